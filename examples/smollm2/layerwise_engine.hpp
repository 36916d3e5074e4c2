// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/engine/layerwise_predictor.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>

#include "engine.hpp"

namespace kvexact::examples {

/// sqrt(mean(h^2) + epsilon) of a hidden state, squares summed in order.
[[nodiscard]] inline float hidden_rms(std::span<const bf16> hidden, float epsilon) noexcept {
  float squares = 0;
  for (const bf16 value : hidden) squares += value.to_float() * value.to_float();
  return std::sqrt(squares / static_cast<float>(hidden.size()) + epsilon);
}

/// The reference engine as the codec's closed loop drives it, for one sequence of token ids.
///
/// Predictions are the layer's float sums, keys turned in float, nothing rounded. `advance` rounds the keys and values it is given to bf16,
/// which changes nothing where they come from a bf16 cache, and corrects by h <- bf16(h + hidden_rms(h) * correction), each step rounded to
/// float.
///
/// In the layers that the engine computes exactly (`engine_options::exact_layers`), predictions are what the target's bf16 cache holds, and
/// that is what the engine goes on with: the cache that is coded may know it less well (fp8), and the hidden states miss nothing.
///
/// The engine and the cache are the caller's and outlive this object; calls to objects of one engine or one cache must not overlap in time.
/// Objects may share a cache if each takes its whole sequence as one range: the rows of a layer are then written by the call that reads
/// them.
class layerwise_engine {
 public:
  layerwise_engine(engine& model, kv_cache& cache, std::vector<std::uint32_t> ids) noexcept
      : model_(&model), cache_(&cache), ids_(std::move(ids)) {}

  [[nodiscard]] std::uint64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::size_t hidden_width() const noexcept { return model_->shape().width; }

  /// The hidden states of the current range at the input of the layer that comes next, [tokens][hidden_width()].
  [[nodiscard]] std::span<const bf16> hidden() const noexcept { return hidden_; }

  /// Starts a range. Errors: out_of_range (does not begin at `tokens()`, or goes beyond the ids or the cache, or an id is not of the
  /// vocabulary), out_of_memory.
  [[nodiscard]] result<void> begin(index_range tokens) noexcept {
    if (tokens.begin != tokens_) return error{error_code::out_of_range, "the range does not begin where the engine stands"};
    if (tokens.end < tokens.begin || tokens.end > ids_.size()) return error{error_code::out_of_range, "tokens whose ids are not known"};
    if (tokens.end > cache_->capacity()) return error{error_code::out_of_range, "tokens beyond the engine's cache"};
    active_ = false;
    auto embedded = model_->embed(std::span(ids_).subspan(tokens.begin, tokens.size()));
    if (!embedded) return error{embedded.error().code, "cannot embed the tokens"};
    hidden_ = std::move(*embedded);
    range_ = tokens;
    layer_ = 0;
    active_ = true;
    return {};
  }

  /// K^ and V^ of the layer that comes next, [tokens][kv_width]. Errors: invalid_argument (another layer, wrong sizes).
  [[nodiscard]] result<void> predict(std::uint32_t layer, std::span<float> keys, std::span<float> values) noexcept {
    if (auto checked = check(layer, keys.size(), values.size()); !checked) return checked;
    const std::size_t row_size = model_->shape().kv_width();
    if (model_->is_exact(layer)) {
      write_own(layer);
      const auto rows_of = [&](std::span<const bf16> all) { return all.subspan(range_.begin * row_size); };
      std::ranges::transform(rows_of(cache_->keys(layer, range_.end)), keys.begin(), &bf16::to_float);
      std::ranges::transform(rows_of(cache_->values(layer, range_.end)), values.begin(), &bf16::to_float);
      return {};
    }
    key_value_sums sums;
    model_->keys_values(layer, hidden_, sums);
    std::ranges::copy(sums.keys, keys.begin());
    std::ranges::copy(sums.values, values.begin());
    for (std::size_t row = 0; row < range_.size(); ++row) {
      cache_->rotary().rotate(keys.subspan(row * row_size, row_size), range_.begin + row);
    }
    return {};
  }

  /// Takes the exact keys and values of the layer that comes next, [tokens][kv_width], and the corrections of the hidden states,
  /// [tokens][hidden_width()] or empty for none, then computes the rest of the layer. Errors: invalid_argument (another layer, wrong
  /// sizes), out_of_memory.
  [[nodiscard]] result<void> advance(std::uint32_t layer, std::span<const float> keys, std::span<const float> values,
                                     std::span<const float> correction) noexcept {
    if (auto checked = check(layer, keys.size(), values.size()); !checked) return checked;
    if (!correction.empty() && correction.size() != hidden_.size()) {
      return error{error_code::invalid_argument, "size of the correction", layer};
    }
    if (model_->is_exact(layer)) {
      write_own(layer);  // once more: an object that shares the cache may have written since `predict`
    } else {
      try {
        std::vector<bf16> exact_keys(keys.size()), exact_values(values.size());
        std::ranges::transform(keys, exact_keys.begin(), bf16::from_float);
        std::ranges::transform(values, exact_values.begin(), bf16::from_float);
        cache_->write(layer, range_.begin, exact_keys, exact_values);
      } catch (...) {
        return error{error_code::out_of_memory, "rows of the engine's cache", layer};
      }
      if (!correction.empty()) correct(correction);
    }
    if (++layer_ < model_->shape().layers) {
      if (model_->is_run(layer)) model_->rest(layer, hidden_, range_.begin, *cache_);
    } else {  // nothing more is predicted from these hidden states
      active_ = false;
      tokens_ = range_.end;
    }
    return {};
  }

 private:
  friend class layerwise_pair;

  /// Whether the call is for the layer that comes next, with spans of that many keys and values.
  [[nodiscard]] result<void> check(std::uint32_t layer, std::size_t keys, std::size_t values) const noexcept {
    if (!active_ || layer != layer_) return error{error_code::invalid_argument, "the layers of a range come in order", layer};
    const std::size_t expected = range_.size() * model_->shape().kv_width();
    if (keys != expected || values != expected) return error{error_code::invalid_argument, "numbers of keys and values", layer};
    return {};
  }

  /// Stores the layer's keys and values as the engine computes them.
  void write_own(std::uint32_t layer) noexcept {
    key_value_sums sums;
    model_->keys_values(layer, hidden_, sums);
    cache_->write(layer, range_.begin, sums);
  }

  void correct(std::span<const float> correction) noexcept {
    const std::size_t row_size = hidden_width();
    for (std::size_t row = 0; row < hidden_.size(); row += row_size) {
      const float rms = hidden_rms(std::span(hidden_).subspan(row, row_size), model_->shape().norm_epsilon);
      for (std::size_t i = row; i < row + row_size; ++i) hidden_[i] = bf16::from_float(hidden_[i].to_float() + rms * correction[i]);
    }
  }

  engine* model_;
  kv_cache* cache_;
  std::vector<std::uint32_t> ids_;
  std::uint64_t tokens_ = 0;
  index_range range_;
  std::uint32_t layer_ = 0;
  bool active_ = false;
  std::vector<bf16> hidden_;
};

static_assert(layerwise_predictor<layerwise_engine>);

/// A `layerwise_engine` with the target beside it, from which calibration learns the corrections.
///
/// The target computes its own keys, values and hidden states. Everything is the caller's and outlives this object; the two caches differ,
/// and the sequences of a calibration may share each as described at `layerwise_engine`.
class layerwise_pair {
 public:
  layerwise_pair(layerwise_engine predictor, engine& target, kv_cache& target_cache) noexcept
      : predictor_(std::move(predictor)), target_(&target), cache_(&target_cache) {}

  [[nodiscard]] std::uint64_t tokens() const noexcept { return predictor_.tokens(); }
  [[nodiscard]] std::size_t hidden_width() const noexcept { return predictor_.hidden_width(); }

  /// Errors: those of the predictor; shape_mismatch (the target is another model), out_of_range (beyond the target's cache).
  [[nodiscard]] result<void> begin(index_range tokens) noexcept {
    const model_shape &ours = predictor_.model_->shape(), &theirs = target_->shape();
    if (ours.layers != theirs.layers || ours.width != theirs.width || ours.kv_width() != theirs.kv_width()) {
      return error{error_code::shape_mismatch, "the target is another model"};
    }
    if (tokens.end > cache_->capacity()) return error{error_code::out_of_range, "tokens beyond the target's cache"};
    if (auto begun = predictor_.begin(tokens); !begun) return begun;
    auto embedded = target_->embed(std::span(predictor_.ids_).subspan(tokens.begin, tokens.size()));
    if (!embedded) return error{embedded.error().code, "cannot embed the tokens"};
    hidden_ = std::move(*embedded);
    return {};
  }

  [[nodiscard]] result<void> predict(std::uint32_t layer, std::span<float> keys, std::span<float> values) noexcept {
    return predictor_.predict(layer, keys, values);
  }

  /// (h_target - h) / hidden_rms(h) at the input of the layer that comes next, [tokens][hidden_width()]. Errors: invalid_argument
  /// (another layer, wrong size).
  [[nodiscard]] result<void> hidden_error(std::uint32_t layer, std::span<float> out) const noexcept {
    if (!predictor_.active_ || layer != predictor_.layer_) {
      return error{error_code::invalid_argument, "the layers of a range come in order", layer};
    }
    const std::span<const bf16> ours = predictor_.hidden();
    if (out.size() != ours.size()) return error{error_code::invalid_argument, "size of the hidden states", layer};
    const std::size_t row_size = hidden_width();
    for (std::size_t row = 0; row < ours.size(); row += row_size) {
      const float rms = hidden_rms(ours.subspan(row, row_size), predictor_.model_->shape().norm_epsilon);
      for (std::size_t i = row; i < row + row_size; ++i) out[i] = (hidden_[i].to_float() - ours[i].to_float()) / rms;
    }
    return {};
  }

  /// Errors: those of the predictor.
  [[nodiscard]] result<void> advance(std::uint32_t layer, std::span<const float> keys, std::span<const float> values,
                                     std::span<const float> correction) noexcept {
    const std::uint64_t first = predictor_.range_.begin;
    if (auto advanced = predictor_.advance(layer, keys, values, correction); !advanced) return advanced;
    if (layer + 1 == target_->shape().layers) return {};
    key_value_sums sums;
    target_->keys_values(layer, hidden_, sums);
    cache_->write(layer, first, sums);
    target_->rest(layer, hidden_, first, *cache_);
    return {};
  }

 private:
  layerwise_engine predictor_;
  engine* target_;
  kv_cache* cache_;
  std::vector<bf16> hidden_;
};

static_assert(layerwise_teacher<layerwise_pair>);

}  // namespace kvexact::examples

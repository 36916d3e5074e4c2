// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <common/outcome.hpp>
#include <kvexact/compression/attention.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>

#include "engine.hpp"

namespace kvexact::examples {

/// What a method can calibrate on, and what it is told of the layer that it is made for.
struct draft_setting {
  const std::vector<float>* key_means;    ///< of each layer, [kv_heads, head_dim]
  const std::vector<float>* value_means;
  std::uint32_t query_heads;              ///< of one KV head
  std::uint64_t context;                  ///< tokens of the prompt
};

/// A compressor of one layer, whatever it is.
class draft_layer {
 public:
  virtual ~draft_layer() = default;
  virtual result<void> append(const layer_tensors<const bf16>& rows, std::uint64_t tokens) = 0;
  virtual result<void> attend(std::uint32_t head, const attention_call& call) = 0;
  [[nodiscard]] virtual bool observes(std::uint64_t position) const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  [[nodiscard]] virtual std::size_t entries(std::uint32_t head) const = 0;
  virtual result<void> materialise(std::uint32_t head, const materialised_head& out) const = 0;
};

template <layer_compressor C>
class draft_layer_of final : public draft_layer {
 public:
  explicit draft_layer_of(C cache) : cache_(std::move(cache)) {}

  result<void> append(const layer_tensors<const bf16>& rows, std::uint64_t tokens) override { return cache_.append(rows, tokens); }
  result<void> attend(std::uint32_t head, const attention_call& call) override {
    if constexpr (observes_attention<C>) {
      const std::uint64_t position = cache_.length() - 1;
      if (cache_.observes(position)) {
        weights_.resize(call.log_mass.size() * cache_.entries(head));
        const auto attended = attend_materialised(cache_, head, call, weights_);
        return attended ? cache_.observe({head, position, weights_, call.queries}) : attended;
      }
    }
    return kvexact::attend(cache_, head, call);
  }
  bool observes(std::uint64_t position) const override {
    if constexpr (observes_attention<C>) {
      return cache_.observes(position);
    } else {
      return false;
    }
  }
  std::size_t bytes() const override { return cache_.bytes(); }
  std::size_t entries(std::uint32_t head) const override { return cache_.entries(head); }
  result<void> materialise(std::uint32_t head, const materialised_head& out) const override { return cache_.materialise(head, out); }

 private:
  C cache_;
  std::vector<float> weights_;
};

/// A method by name: makes a layer's compressor.
struct draft_method {
  std::string name;
  std::string needs;  ///< what it takes to operate: calibration, state, restrictions
  std::function<result<std::unique_ptr<draft_layer>>(const layer_shape&, std::size_t layer, const draft_setting&)> make;
};

/// The draft cache of a sequence for `engine::step`.
class draft_token_cache final : public token_cache {
 public:
  draft_token_cache(const model_shape& model, std::vector<std::unique_ptr<draft_layer>> layers) : model_(model), layers_(std::move(layers)) {}

  status append(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) override {
    return checked(layers_[layer]->append(rows_at(keys.data(), values.data()), 1), layer);
  }
  status attend(std::size_t layer, std::span<const float> queries, std::span<float> out) override {
    const std::size_t shared = model_.heads / model_.kv_heads, each = shared * model_.head_dim;
    scaled_.assign(queries.begin(), queries.end());
    for (float& query : scaled_) query /= std::sqrt(static_cast<float>(model_.head_dim));
    mass_.resize(shared);
    for (std::size_t head = 0; head < model_.kv_heads; ++head) {
      const attention_call call{std::span(scaled_).subspan(head * each, each), out.subspan(head * each, each), mass_};
      const status attended = checked(layers_[layer]->attend(static_cast<std::uint32_t>(head), call), layer);
      if (!attended) return attended;
    }
    return done;
  }

  /// Rows of many tokens at once, [tokens, kv_heads, head_dim].
  status fill(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) {
    return checked(layers_[layer]->append(rows_at(keys.data(), values.data()), keys.size() / model_.kv_width()), layer);
  }
  [[nodiscard]] bool observes(std::uint64_t position) const {
    for (const auto& layer : layers_)
      if (layer->observes(position)) return true;
    return false;
  }
  [[nodiscard]] std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& layer : layers_) sum += layer->bytes();
    return sum;
  }
  [[nodiscard]] draft_layer& layer(std::size_t index) { return *layers_[index]; }

 private:
  [[nodiscard]] layer_tensors<const bf16> rows_at(const bf16* keys, const bf16* values) const {
    const auto heads = static_cast<std::uint32_t>(model_.kv_heads), dim = static_cast<std::uint32_t>(model_.head_dim);
    return {strided_tensor<const bf16>::nhd(keys, heads, dim), strided_tensor<const bf16>::nhd(values, heads, dim)};
  }
  [[nodiscard]] static status checked(const result<void>& outcome, std::size_t layer) {
    if (outcome) return done;
    return failure{outcome.error().code, outcome.error().at_layer(static_cast<std::int64_t>(layer)).message()};
  }

  model_shape model_;
  std::vector<std::unique_ptr<draft_layer>> layers_;
  std::vector<float> scaled_, mass_;
};

}  // namespace kvexact::examples

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include <kvexact/compression/compressor.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact::test {

/// Counts calls down and fails one of them; whatever is given to several objects counts all their calls.
struct fault_plan {
  std::uint64_t calls = 0;
  std::uint64_t failing = ~std::uint64_t{0};

  [[nodiscard]] result<void> next() noexcept {
    return calls++ == failing ? result<void>(error{error_code::output_failed, "an injected fault"}) : result<void>();
  }
};

/// A model of two layers with attention over real K and V rows, small enough for thousands of sequences.
class toy_engine {
 public:
  using scalar = bf16;

  static constexpr std::uint32_t layer_count = 2, heads = 2, dim = 4, shared = 2, width = heads * shared * dim;

  struct options {
    std::uint32_t vocabulary = 12;
    std::uint64_t capacity = 512;
    std::uint32_t seed = 1;
    float sharpness = 3;          ///< of the logits
    bool width_dependent = false;  ///< the last bits of a row depend on how many rows its pass has, as in engines that tile
    bool pad_dependent = false;    ///< and on what the others hold
    bool last_row_differs = false;  ///< or, in passes of several rows, on being the last
    std::uint64_t max_rollback = ~std::uint64_t{0};
    fault_plan* faults = nullptr;
    std::function<result<void>(std::uint32_t layer)> before_layer = nullptr;  ///< of `forward`, for each token, before its rows are read
  };

  explicit toy_engine(const options& chosen) : options_(chosen), shape_(*cache_shape::uniform(layer_count, {heads, dim, dim})) {
    std::mt19937 random(chosen.seed);
    const auto fill = [&](std::vector<float>& values, std::size_t size, float spread) {
      for (std::size_t i = 0; i < size; ++i) values.push_back((static_cast<float>(random() >> 8) * 0x1p-24F - 0.5F) * spread);
    };
    fill(embedding_, std::size_t{chosen.vocabulary} * width, 2);
    for (layer_weights& each : layers_) {
      fill(each.query, width * width, 1.6F);
      fill(each.key, heads * dim * width, 1.6F);
      fill(each.value, heads * dim * width, 1.2F);
      fill(each.output, width * width, 1.2F);
    }
  }

  [[nodiscard]] std::uint32_t vocabulary() const noexcept { return options_.vocabulary; }
  [[nodiscard]] const cache_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return options_.capacity; }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return options_.max_rollback; }
  /// Row-tokens that ran through `forward`, and tokens through `step`.
  [[nodiscard]] std::uint64_t rows_run() const noexcept { return rows_run_; }
  [[nodiscard]] std::uint64_t steps_run() const noexcept { return steps_run_; }

  result<void> forward(std::span<const std::uint32_t> tokens, std::span<float> logits) noexcept {
    if (const auto fault = next_fault(); !fault) return fault;
    if (logits.size() % vocabulary() != 0 || logits.size() / vocabulary() > tokens.size())
      return error{error_code::invalid_argument, "room for logits is of whole rows, at most one a token"};
    if (tokens.size() > capacity() - length_) return error{error_code::out_of_range, "tokens beyond the engine's cache"};
    for (const std::uint32_t token : tokens) {
      if (token >= vocabulary()) return error{error_code::invalid_argument, "a token that is not in the vocabulary"};
    }
    const std::size_t first = tokens.size() - logits.size() / vocabulary();
    float sum_of_others = 0;
    for (const std::uint32_t token : tokens) sum_of_others += static_cast<float>(token);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      own_rows cache{this, length_ + i};
      row_noise_ = 1;
      if (options_.width_dependent) row_noise_ += 1e-6F * static_cast<float>(tokens.size() % 7);
      if (options_.last_row_differs && i > 0 && i + 1 == tokens.size()) row_noise_ += 1e-6F;
      if (options_.pad_dependent) row_noise_ += 1e-6F * (sum_of_others - static_cast<float>(tokens[i]));
      const auto done = run(tokens[i], length_ + i, cache, i < first ? std::span<float>() : logits.subspan((i - first) * vocabulary(), vocabulary()));
      if (!done) return done;
    }
    row_noise_ = 1;
    length_ += tokens.size();
    rows_run_ += tokens.size();
    return {};
  }
  result<void> truncate(std::uint64_t length) noexcept {
    if (const auto fault = next_fault(); !fault) return fault;
    if (length > length_) return error{error_code::out_of_range, "a cache cannot be truncated to more than it holds"};
    if (length_ - length > options_.max_rollback) return error{error_code::out_of_range, "truncation further back than max_rollback"};
    length_ = length;
    return {};
  }
  [[nodiscard]] layer_tensors<const bf16> rows(std::uint32_t layer, std::uint64_t position) const noexcept {
    const std::size_t first = static_cast<std::size_t>(position) * heads * dim;
    return {strided_tensor<const bf16>::nhd(layers_[layer].keys.data() + first, heads, dim),
            strided_tensor<const bf16>::nhd(layers_[layer].values.data() + first, heads, dim)};
  }
  /// [tokens, heads, dim], of tokens that have run once.
  [[nodiscard]] std::span<bf16> keys(std::uint32_t layer, std::uint64_t tokens) noexcept {
    return std::span(layers_[layer].keys).first(tokens * heads * dim);
  }
  [[nodiscard]] std::span<bf16> values(std::uint32_t layer, std::uint64_t tokens) noexcept {
    return std::span(layers_[layer].values).first(tokens * heads * dim);
  }

  template <class Cache>
  result<void> step(std::uint32_t token, std::uint64_t position, Cache& cache, std::span<float> logits) noexcept {
    if (const auto fault = next_fault(); !fault) return fault;
    ++steps_run_;
    return run(token, position, cache, logits);
  }

 private:
  struct layer_weights {
    std::vector<float> query, key, value, output;  // [outputs, width]
    std::vector<bf16> keys, values;                // [capacity, heads, dim], as far as used
  };
  /// The engine's own cache, for a row at its position.
  struct own_rows {
    toy_engine* engine;
    std::uint64_t position;

    result<void> append(std::uint32_t layer, const layer_tensors<const bf16>& rows, std::uint64_t) const {
      const auto& ready = engine->options_.before_layer;
      if (const auto done = ready ? ready(layer) : result<void>(); !done) return done;
      const std::size_t first = static_cast<std::size_t>(position) * heads * dim;
      auto& [query, key, value, output, keys, values] = engine->layers_[layer];
      keys.resize(std::max(keys.size(), first + heads * dim));
      values.resize(std::max(values.size(), first + heads * dim));
      std::copy_n(rows.key.data, heads * dim, keys.begin() + static_cast<std::ptrdiff_t>(first));
      std::copy_n(rows.value.data, heads * dim, values.begin() + static_cast<std::ptrdiff_t>(first));
      return {};
    }
    result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) const {
      for (std::size_t q = 0; q < shared; ++q) {
        const auto out = call.out.subspan(q * dim, dim);
        std::fill(out.begin(), out.end(), 0.0F);
        float mass = 0;
        for (std::size_t t = 0; t <= position; ++t) {
          const bf16* const key = &engine->layers_[layer].keys[(t * heads + head) * dim];
          const bf16* const value = &engine->layers_[layer].values[(t * heads + head) * dim];
          float score = 0;
          for (std::size_t c = 0; c < dim; ++c) score += call.queries[q * dim + c] * key[c].to_float();
          const float weight = std::exp(score);
          mass += weight;
          for (std::size_t c = 0; c < dim; ++c) out[c] += weight * value[c].to_float();
        }
        for (float& each : out) each /= mass;
        call.log_mass[q] = std::log(mass);
      }
      return {};
    }
  };

  [[nodiscard]] result<void> next_fault() noexcept { return options_.faults == nullptr ? result<void>() : options_.faults->next(); }

  static void multiply(const std::vector<float>& weights, std::span<const float> in, std::span<float> out) {
    for (std::size_t o = 0; o < out.size(); ++o) {
      out[o] = 0;
      for (std::size_t i = 0; i < in.size(); ++i) out[o] += weights[o * in.size() + i] * in[i];
    }
  }

  template <class Cache>
  result<void> run(std::uint32_t token, std::uint64_t position, Cache& cache, std::span<float> logits) {
    std::array<float, width> hidden{}, queries{}, attended{}, added{};
    for (std::size_t c = 0; c < width; ++c)
      hidden[c] = embedding_[token * width + c] * row_noise_ + 0.3F * std::sin(static_cast<float>(position * (c + 1)));
    for (std::uint32_t l = 0; l < layer_count; ++l) {
      if (const auto fault = next_fault(); !fault) return fault;
      std::array<float, heads * dim> key{}, value{};
      multiply(layers_[l].key, hidden, key);
      multiply(layers_[l].value, hidden, value);
      multiply(layers_[l].query, hidden, queries);
      std::array<bf16, heads * dim> key_row{}, value_row{};
      for (std::size_t c = 0; c < heads * dim; ++c) {
        key_row[c] = bf16::from_float(key[c]);
        value_row[c] = bf16::from_float(value[c]);
      }
      const auto appended = cache.append(l, {strided_tensor<const bf16>::nhd(key_row.data(), heads, dim), strided_tensor<const bf16>::nhd(value_row.data(), heads, dim)}, 1);
      if (!appended) return appended;
      std::array<float, shared> mass{};
      for (std::uint32_t h = 0; h < heads; ++h) {
        const attention_call call{std::span(queries).subspan(h * shared * dim, shared * dim), std::span(attended).subspan(h * shared * dim, shared * dim), mass};
        const auto done = cache.attend(l, h, call);
        if (!done) return done;
      }
      multiply(layers_[l].output, attended, added);
      for (std::size_t c = 0; c < width; ++c) hidden[c] = std::tanh(hidden[c] + added[c]);
    }
    if (!logits.empty()) multiply(embedding_, hidden, logits);
    for (float& each : logits) each *= options_.sharpness * row_noise_;
    return {};
  }

  options options_;
  cache_shape shape_;
  std::vector<float> embedding_;
  std::array<layer_weights, layer_count> layers_;
  std::uint64_t length_ = 0, rows_run_ = 0, steps_run_ = 0;
  float row_noise_ = 1;
};

static_assert(positional_decoder<toy_engine> && readable_cache<toy_engine>);

}  // namespace kvexact::test

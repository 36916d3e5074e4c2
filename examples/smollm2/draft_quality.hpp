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

#include "any_draft_cache.hpp"
#include "draft_calibration.hpp"
#include "engine.hpp"

namespace kvexact::examples {

/// What a method can calibrate on, and what it is told of the layer that it is made for.
struct draft_setting {
  const draft_calibration* calibration;  ///< outlives what is made with it
  std::uint32_t query_heads;             ///< of one KV head
  std::uint64_t context;                 ///< tokens of the prompt
};

/// A method by name: makes a sequence's draft cache.
struct draft_method {
  std::string name;
  std::string needs;  ///< what it takes to operate: calibration, state, restrictions
  std::function<result<any_draft_cache>(const cache_shape&, const draft_setting&)> make;
};

/// The draft cache of a sequence for `engine::step`.
class draft_token_cache final : public token_cache {
 public:
  draft_token_cache(const model_shape& model, any_draft_cache cache) : model_(model), cache_(std::move(cache)) {}

  status append(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) override {
    return checked(cache_.append(static_cast<std::uint32_t>(layer), rows_at(keys.data(), values.data()), 1));
  }
  status attend(std::size_t layer, std::span<const float> queries, std::span<float> out) override {
    const std::size_t shared = model_.heads / model_.kv_heads, each = shared * model_.head_dim;
    scaled_.assign(queries.begin(), queries.end());
    for (float& query : scaled_) query /= std::sqrt(static_cast<float>(model_.head_dim));
    mass_.resize(shared);
    for (std::size_t head = 0; head < model_.kv_heads; ++head) {
      const attention_call call{std::span(scaled_).subspan(head * each, each), out.subspan(head * each, each), mass_};
      const status attended = checked(attend(static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(head), call));
      if (!attended) return attended;
    }
    return done;
  }

  /// Rows of many tokens at once, [tokens, kv_heads, head_dim].
  status fill(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) {
    return checked(cache_.append(static_cast<std::uint32_t>(layer), rows_at(keys.data(), values.data()), keys.size() / model_.kv_width()));
  }
  [[nodiscard]] bool observes(std::uint64_t position) const {
    for (std::uint32_t l = 0; l < cache_.shape().layers(); ++l)
      if (cache_.observes(l, position)) return true;
    return false;
  }
  [[nodiscard]] const any_draft_cache& cache() const { return cache_; }

 private:
  [[nodiscard]] layer_tensors<const bf16> rows_at(const bf16* keys, const bf16* values) const {
    const auto heads = static_cast<std::uint32_t>(model_.kv_heads), dim = static_cast<std::uint32_t>(model_.head_dim);
    return {strided_tensor<const bf16>::nhd(keys, heads, dim), strided_tensor<const bf16>::nhd(values, heads, dim)};
  }
  result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) {
    const std::uint64_t position = cache_.length(layer) - 1;
    if (!cache_.observes(layer, position)) return cache_.attend(layer, head, call);
    weights_.resize(call.log_mass.size() * cache_.entries(layer, head));
    const auto attended = cache_.attend(layer, head, call, weights_);
    return attended ? cache_.observe(layer, {head, position, weights_, call.queries}) : attended;
  }
  [[nodiscard]] static status checked(const result<void>& outcome) {
    if (outcome) return done;
    return failure{outcome.error().code, outcome.error().message()};
  }

  model_shape model_;
  any_draft_cache cache_;
  std::vector<float> scaled_, mass_, weights_;
};

/// A method's cache with all of a prompt but its last token, which is for the first step. `exact` holds the prompt's K and V; where a method
/// observes attention, tokens go one by one through the model instead.
[[nodiscard]] inline outcome<draft_token_cache> cache_of_prompt(engine& model, const draft_method& method, const draft_calibration& calibration,
                                                                std::span<const std::uint32_t> prompt, const kv_cache& exact) {
  const model_shape& shape = model.shape();
  const draft_setting setting{&calibration, static_cast<std::uint32_t>(shape.heads / shape.kv_heads), prompt.size()};
  const auto heads = static_cast<std::uint32_t>(shape.kv_heads), dim = static_cast<std::uint32_t>(shape.head_dim);
  const auto all = cache_shape::uniform(static_cast<std::uint32_t>(shape.layers), {heads, dim, dim});
  if (!all) return failure{all.error().code, all.error().message()};
  auto made = method.make(*all, setting);
  if (!made) return failure{made.error().code, method.name + ": " + made.error().message()};
  draft_token_cache cache(shape, *std::move(made));
  std::size_t unobserved = 0;
  while (unobserved + 1 < prompt.size() && !cache.observes(unobserved)) ++unobserved;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    const status filled = cache.fill(l, exact.keys(l, unobserved), exact.values(l, unobserved));
    if (!filled) return filled.error();
  }
  for (std::size_t t = unobserved; t + 1 < prompt.size(); ++t) {
    const auto hidden = model.step(prompt[t], t, exact.rotary(), cache);
    if (!hidden) return hidden.error();
  }
  return cache;
}

}  // namespace kvexact::examples

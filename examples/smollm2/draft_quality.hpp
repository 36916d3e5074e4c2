// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <common/outcome.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>

#include "any_draft_cache.hpp"
#include "draft_calibration.hpp"
#include "engine.hpp"
#include "sequence_engine.hpp"

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
  bool is_calibrated = false;  ///< reads the setting's calibration
};

/// A draft cache that is handed the attention that it observes while the model decodes on it.
class observing_cache {
 public:
  explicit observing_cache(any_draft_cache cache) noexcept : cache_(std::move(cache)) {}

  result<void> append(std::uint32_t layer, const layer_tensors<const bf16>& rows, std::uint64_t tokens) noexcept { return cache_.append(layer, rows, tokens); }
  result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) noexcept {
    return attend_observed(cache_, layer, head, cache_.length(layer) - 1, call, weights_);
  }
  [[nodiscard]] const any_draft_cache& cache() const noexcept { return cache_; }

 private:
  any_draft_cache cache_;
  std::vector<float> weights_;
};

/// The draft cache of a sequence for `engine::step`.
class draft_token_cache final : public token_cache {
 public:
  draft_token_cache(const model_shape& model, any_draft_cache cache)
      : cache_(std::make_unique<observing_cache>(std::move(cache))), steps_(model, *cache_) {}

  status append(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) override { return steps_.append(layer, keys, values); }
  status attend(std::size_t layer, std::span<const float> queries, std::span<float> out) override { return steps_.attend(layer, queries, out); }

  /// Rows of many tokens at once.
  status fill(std::size_t layer, const layer_tensors<const bf16>& rows, std::size_t tokens) {
    const auto outcome = cache_->append(static_cast<std::uint32_t>(layer), rows, tokens);
    if (outcome) return done;
    return failure{outcome.error().code, outcome.error().message()};
  }
  [[nodiscard]] const any_draft_cache& cache() const noexcept { return cache_->cache(); }

 private:
  std::unique_ptr<observing_cache> cache_;
  detail::stepped_cache<observing_cache> steps_;
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
  while (unobserved + 1 < prompt.size() && !observes_anywhere(cache.cache(), unobserved)) ++unobserved;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    const status filled = cache.fill(
        l, {strided_tensor<const bf16>::nhd(exact.keys(l, unobserved).data(), heads, dim), strided_tensor<const bf16>::nhd(exact.values(l, unobserved).data(), heads, dim)},
        unobserved);
    if (!filled) return filled.error();
  }
  for (std::size_t t = unobserved; t + 1 < prompt.size(); ++t) {
    const auto hidden = model.step(prompt[t], t, exact.rotary(), cache);
    if (!hidden) return hidden.error();
  }
  return cache;
}

}  // namespace kvexact::examples

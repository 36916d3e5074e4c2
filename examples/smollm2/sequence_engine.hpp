// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/compression/compressor.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

#include "engine.hpp"
#include "sequence_batch.hpp"

namespace kvexact::examples {

namespace detail {

/// A cache of the library (`token_stepper`) as the engine sees one.
template <class Cache>
class stepped_cache final : public token_cache {
 public:
  stepped_cache(const model_shape& model, Cache& cache) : model_(&model), cache_(&cache) {}

  status append(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) override {
    const auto heads = static_cast<std::uint32_t>(model_->kv_heads), dim = static_cast<std::uint32_t>(model_->head_dim);
    return checked(cache_->append(static_cast<std::uint32_t>(layer),
                                  {strided_tensor<const bf16>::nhd(keys.data(), heads, dim), strided_tensor<const bf16>::nhd(values.data(), heads, dim)}, 1));
  }
  status attend(std::size_t layer, std::span<const float> queries, std::span<float> out) override {
    const std::size_t shared = model_->heads / model_->kv_heads, each = shared * model_->head_dim;
    queries_.assign(queries.begin(), queries.end());
    for (float& query : queries_) query /= std::sqrt(static_cast<float>(model_->head_dim));
    log_mass_.resize(shared);
    for (std::size_t head = 0; head < model_->kv_heads; ++head) {
      const attention_call call{std::span(queries_).subspan(head * each, each), out.subspan(head * each, each), log_mass_};
      const status attended = checked(cache_->attend(static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(head), call));
      if (!attended) return attended;
    }
    return done;
  }
  /// Of the cache, if that is what ended the step.
  [[nodiscard]] const result<void>& outcome() const noexcept { return outcome_; }

 private:
  status checked(const result<void>& outcome) {
    outcome_ = outcome;
    if (outcome) return done;
    return failure{outcome.error().code, outcome.error().message()};
  }

  const model_shape* model_;
  Cache* cache_;
  result<void> outcome_;
  std::vector<float> queries_, log_mass_;
};

/// `step` (`token_stepper`) of an engine by itself.
template <class Cache>
result<void> step_outside(engine& model, const rotary_table& rotary, std::uint32_t token, std::uint64_t position, Cache& cache, std::span<float> logits) noexcept {
  stepped_cache<Cache> seen(model.shape(), cache);
  const auto hidden = model.step(token, static_cast<std::size_t>(position), rotary, seen);
  if (!seen.outcome()) return seen.outcome();
  if (!hidden) return error{hidden.error().code, "a step on a draft cache"};
  if (!logits.empty()) model.logits(*hidden, logits);
  return {};
}

[[nodiscard]] inline result<cache_shape> cache_shape_of(const model_shape& model) noexcept {
  const auto dim = static_cast<std::uint32_t>(model.head_dim);
  return cache_shape::uniform(static_cast<std::uint32_t>(model.layers), {static_cast<std::uint32_t>(model.kv_heads), dim, dim});
}

/// From a position on, of rows [tokens, kv_heads, head_dim].
[[nodiscard]] inline layer_tensors<const bf16> rows_from(const layer_shape& shape, std::span<const bf16> keys, std::span<const bf16> values,
                                                         std::uint64_t position) noexcept {
  const auto [heads, dim, value_dim] = shape;
  const std::size_t first = static_cast<std::size_t>(position) * heads * dim;
  return {strided_tensor<const bf16>::nhd(keys.data() + first, heads, dim), strided_tensor<const bf16>::nhd(values.data() + first, heads, value_dim)};
}

/// What `forward` (`positional_decoder`) must be given.
[[nodiscard]] inline result<void> expect_room(std::span<const std::uint32_t> tokens, std::span<const float> logits, std::uint32_t vocabulary,
                                              std::uint64_t room) noexcept {
  if (logits.size() % vocabulary != 0 || logits.size() / vocabulary > tokens.size())
    return error{error_code::invalid_argument, "room for logits is of whole rows, at most one a token"};
  if (tokens.size() > room) return error{error_code::out_of_range, "tokens beyond the engine's cache"};
  return {};
}

}  // namespace detail

/// The reference engine with the full cache of one sequence, as the speculative decoder drives it. Engine and batch are the caller's and
/// outlive this object; calls to objects of one engine must not overlap in time, but for sequences of one batch, each on its thread.
///
/// Row-invariant: a row's bits are the same whatever the number of rows in a call.
class sequence_engine {
 public:
  using scalar = bf16;

  /// Room for `capacity` tokens; with a batch, passes are made together with those of its other sequences.
  [[nodiscard]] static outcome<sequence_engine> make(engine& model, std::size_t capacity, sequence_batch* batch = nullptr) noexcept {
    auto cache = model.make_cache(capacity);
    if (!cache) return cache.error();
    auto shape = detail::cache_shape_of(model.shape());
    if (!shape) return failure{shape.error().code, shape.error().message()};
    return sequence_engine(model, batch, *std::move(shape), *std::move(cache));
  }

  [[nodiscard]] std::uint32_t vocabulary() const noexcept { return static_cast<std::uint32_t>(model_->shape().vocabulary); }
  [[nodiscard]] const cache_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return cache_.capacity(); }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return ~std::uint64_t{0}; }

  result<void> forward(std::span<const std::uint32_t> tokens, std::span<float> logits) noexcept {
    if (const auto fits = detail::expect_room(tokens, logits, vocabulary(), capacity() - length_); !fits) return fits;
    if (tokens.empty()) return {};
    sequence_pass pass{tokens, static_cast<std::size_t>(length_), &cache_};
    run(pass, logits);
    if (!pass.outcome) {
      const bool memory = pass.outcome.error().code == error_code::out_of_memory;
      return error{memory ? error_code::out_of_memory : error_code::invalid_argument, "a forward pass"};
    }
    length_ += tokens.size();
    return {};
  }
  result<void> truncate(std::uint64_t length) noexcept {
    if (length > length_) return error{error_code::out_of_range, "a cache cannot be truncated to more than it holds"};
    length_ = length;
    return {};
  }
  [[nodiscard]] layer_tensors<const bf16> rows(std::uint32_t layer, std::uint64_t position) const noexcept {
    const auto held = static_cast<std::size_t>(length_);
    return detail::rows_from(shape_.layer(layer), cache_.keys(layer, held), cache_.values(layer, held), position);
  }

  template <class Cache>
  result<void> step(std::uint32_t token, std::uint64_t position, Cache& cache, std::span<float> logits) noexcept {
    detail::stepped_cache<Cache> seen(model_->shape(), cache);
    sequence_pass pass{std::span(&token, 1), static_cast<std::size_t>(position), nullptr, &seen, &cache_.rotary()};
    run(pass, logits);
    if (!seen.outcome()) return seen.outcome();
    if (!pass.outcome) return error{pass.outcome.error().code, "a step on a draft cache"};
    return {};
  }

 private:
  sequence_engine(engine& model, sequence_batch* batch, cache_shape shape, kv_cache cache) noexcept
      : model_(&model), batch_(batch), shape_(std::move(shape)), cache_(std::move(cache)) {}

  void run(sequence_pass& pass, std::span<float> logits) noexcept {
    if (batch_ != nullptr) return batch_->run(pass, logits);
    model_->forward(std::span(&pass, 1));
    if (pass.outcome) model_->logits(std::span(pass.hidden).last(logits.size() / vocabulary() * model_->shape().width), logits);
  }

  engine* model_;
  sequence_batch* batch_;
  cache_shape shape_;
  kv_cache cache_;
  std::uint64_t length_ = 0;
};

static_assert(positional_decoder<sequence_engine> && readable_cache<sequence_engine>);

}  // namespace kvexact::examples

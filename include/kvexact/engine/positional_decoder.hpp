// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// A model with the full cache of one sequence, by position: what verifies drafts, and what plain decoding runs on.
///
/// - `vocabulary()`: how many tokens there are.
/// - `length()`: tokens that have K and V rows in the cache; the next one takes this position.
/// - `capacity()`: the most that there can be. `max_rollback()`: that number of newest tokens can always be taken back.
/// - `forward(tokens, logits)`: appends the tokens and gives the logits after each of the last logits.size() / vocabulary() of them,
///   [rows, vocabulary]; none if empty, as for all of a prompt but its end. Errors: out_of_range (beyond the capacity), invalid_argument (a
///   token that is not in the vocabulary, a size of `logits` that is no number of rows or more than the tokens), and the engine's own; then
///   `length()` has not changed.
/// - `truncate(length)`: forgets the positions from `length` on. Errors: out_of_range; then nothing has changed.
template <class E>
concept positional_decoder = requires(E& engine, const E& seen, std::span<const std::uint32_t> tokens, std::span<float> logits,
                                      std::uint64_t length) {
  { seen.vocabulary() } noexcept -> std::same_as<std::uint32_t>;
  { seen.length() } noexcept -> std::same_as<std::uint64_t>;
  { seen.capacity() } noexcept -> std::same_as<std::uint64_t>;
  { seen.max_rollback() } noexcept -> std::same_as<std::uint64_t>;
  { engine.forward(tokens, logits) } noexcept -> std::same_as<result<void>>;
  { engine.truncate(length) } noexcept -> std::same_as<result<void>>;
};

/// An engine whose memory grows with the sequence (pages, blocks): `reserve(length)`: there is room for the positions below `length`, until
/// the next `truncate`. Errors: out_of_memory, out_of_range (beyond the capacity); then nothing has changed. `forward` reserves by itself
/// what nobody has reserved.
template <class E>
concept reserving_decoder = positional_decoder<E> && requires(E& engine, std::uint64_t length) {
  { engine.reserve(length) } noexcept -> std::same_as<result<void>>;
};

/// An engine whose state cannot be cut at any position (recurrent layers, sliding windows): `checkpoint()` remembers the state in place
/// of the one before, `restore()` brings it back, `length()` included, any number of times. `max_rollback()` still says what `truncate`
/// can do.
template <class E>
concept checkpointing_decoder = positional_decoder<E> && requires(E& engine) {
  { engine.checkpoint() } noexcept -> std::same_as<result<void>>;
  { engine.restore() } noexcept -> std::same_as<result<void>>;
};

/// An engine whose cache can be read: `shape()` of its layers; `rows(layer, position)` points at the K and V of that token and of those
/// after it, up to `length()`, all at the same stride (an engine with pages gathers them first). They stay where they are until the next
/// `forward` or `truncate`. `scalar` is a number format of numeric/, such as `bf16` or `fp16`.
template <class E>
concept readable_cache = requires(const E& engine, std::uint32_t layer, std::uint64_t position) {
  typename E::scalar;
  { engine.shape() } noexcept -> std::same_as<const cache_shape&>;
  { engine.rows(layer, position) } noexcept -> std::same_as<layer_tensors<const typename E::scalar>>;
};

/// A model that can run one token on a cache that is not its own, of any type `Cache`: so `step` is a template. For every layer in order it
/// calls
///
///   cache.append(layer, rows, 1)          // K (rotated) and V of the token, const layer_tensors<const scalar>&
///   cache.attend(layer, head, call)       // for every KV head: attention_call, with the queries of its query heads
///
/// and gives the logits after the token, [vocabulary], or computes none if `logits` is empty. An error of the cache ends the step and is
/// passed on; layers may then differ in length. Other errors: out_of_range (a position that the model does not have), and its own.
template <class E, class Cache>
concept token_stepper = requires(E& engine, std::uint32_t token, std::uint64_t position, Cache& cache, std::span<float> logits) {
  { engine.step(token, position, cache, logits) } noexcept -> std::same_as<result<void>>;
};

}  // namespace kvexact

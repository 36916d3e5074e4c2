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

/// What a compressor gives back of one KV head: `positions` [entries] in increasing order, `keys` [entries, key_dim] and `values`
/// [entries, value_dim], all of the sizes that `entries` of the compressor says. Keys are as they were appended: rotated for their positions.
struct materialised_head {
  std::span<std::uint64_t> positions;
  std::span<float> keys;
  std::span<float> values;
};

/// The draft cache of one sequence in one layer: a lossy, small copy of its K and V. Batches are one object a sequence, so that nothing is
/// ever shared between sequences.
///
/// Meaning. Positions are counted from 0 by what is appended. After any calls that leave `length()` = n, what `entries` and `materialise`
/// give depends on the first n tokens alone: not on how they were cut into calls, nor on tokens that were appended and truncated again.
///
/// - `append(rows, tokens)`: K and V of the next `tokens` positions; `rows` points at the first of them, and is not read where `tokens`
///   is 0. Errors: invalid_argument (null data; a value that is not finite, with its token), out_of_range (a longer sequence than it can
///   hold), out_of_memory. On an error nothing has changed.
/// - `truncate(length)`: forgets all positions from `length` on. Errors: out_of_range (longer than the sequence; further back than
///   `max_rollback()` tokens from the greatest length so far, unless it still holds what it needs); then nothing has changed.
/// - `max_rollback()`: that number of newest tokens can always be taken back.
/// - `entries(head)`: how many positions the head still holds.
/// - `materialise(head, out)`: all of them. Errors: shape_mismatch (sizes of `out`).
/// - `bytes()`: all memory that the object has taken for the sequence, tails, scales, scores and spare room counted; tables that all
///   sequences share are not.
template <class C>
concept layer_compressor = std::movable<C> && requires(C& cache, const C& constant, const layer_tensors<const typename C::scalar>& rows,
                                                       std::uint64_t tokens, std::uint32_t head, const materialised_head& out) {
  typename C::scalar;
  { constant.shape() } noexcept -> std::same_as<const layer_shape&>;
  { constant.length() } noexcept -> std::same_as<std::uint64_t>;
  { constant.max_rollback() } noexcept -> std::same_as<std::uint64_t>;
  { cache.append(rows, tokens) } noexcept -> std::same_as<result<void>>;
  { cache.truncate(tokens) } noexcept -> std::same_as<result<void>>;
  { constant.entries(head) } noexcept -> std::same_as<std::size_t>;
  { constant.materialise(head, out) } noexcept -> std::same_as<result<void>>;
  { constant.bytes() } noexcept -> std::same_as<std::size_t>;
};

/// What the query heads of one KV head attend to: `queries` [query heads, key_dim], already scaled by 1/sqrt(key_dim) or what the model
/// uses and rotated; gives `out` [query heads, value_dim], the weighted mean of the values, and `log_mass` [query heads], the logarithm of
/// the sum of exp(score).
struct attention_call {
  std::span<const float> queries;
  std::span<float> out;
  std::span<float> log_mass;
};

/// A compressor that answers for some of its positions as a whole, which are not among `entries` any more: `summarise(head, call)` is what
/// attention over them alone would give, approximately; -infinity for `log_mass`, and 0 for `out`, where there are none. Attention over the
/// cache is attention over the entries and this, each with its mass. Errors: shape_mismatch (sizes of the call's spans).
template <class C>
concept summarises_attention = layer_compressor<C> && requires(const C& cache, std::uint32_t head, const attention_call& call) {
  { cache.summarise(head, call) } noexcept -> std::same_as<result<void>>;
};

/// A compressor on which attention runs without materialising: `attend(head, call)` equals attention over `materialise(head)`, and
/// `summarise(head)` if it has that, but for rounding. Errors: shape_mismatch (sizes of the call's spans), invalid_argument (nothing to attend to), out_of_memory.
template <class C>
concept attends_on_codes = layer_compressor<C> && requires(const C& cache, std::uint32_t head, const attention_call& call) {
  { cache.attend(head, call) } noexcept -> std::same_as<result<void>>;
};

/// What a token paid attention to: `weights` [query heads of one KV head, entries], each row a softmax over the head's entries at the time
/// of the call, in their order; `position` of the query. Weights are not negative; rows sum to 1 but for rounding. `queries`, as in
/// `attention_call`, are read by compressors that fit a summary only.
struct attention_rows {
  std::uint32_t head = 0;
  std::uint64_t position = 0;
  std::span<const float> weights;
  std::span<const float> queries = {};
};

/// A compressor that decides by attention what to keep. After each token has been appended, and before the next one is, the engine hands
/// over the attention of its query for every KV head; where `observes(position)` is false it need not, and such tokens may be appended
/// together. Attention that was never handed over counts as none. Errors: shape_mismatch (sizes), out_of_range (a head or a position that is
/// not the newest), invalid_argument (a weight that is negative or no number, a token handed over twice), out_of_memory.
template <class C>
concept observes_attention = layer_compressor<C> && requires(C& cache, std::uint64_t position, const attention_rows& rows) {
  { cache.observes(position) } noexcept -> std::same_as<bool>;
  { cache.observe(rows) } noexcept -> std::same_as<result<void>>;
};

/// A compressor that can be told to keep the next tokens whole, and to compress them again, from any token on. Each token stays as it was
/// taken: what was dropped of earlier ones does not come back. Truncation does not change the mode.
template <class C>
concept switchable = layer_compressor<C> && requires(C& cache, const C& constant, bool whole) {
  { cache.keep_whole(whole) } noexcept -> std::same_as<void>;
  { constant.keeps_whole() } noexcept -> std::same_as<bool>;
};

}  // namespace kvexact

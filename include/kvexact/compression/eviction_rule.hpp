// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// What a dropper keeps, and when it drops the rest: at the boundaries `first_eviction`, `first_eviction + interval`, ... (tokens of the
/// sequence). At a boundary a head keeps its first `sinks` tokens, the newest `window` before the boundary, and of all others the `budget`
/// best. Everything after the last boundary is kept, so a head gives at most max(first_eviction, sinks + budget + window + interval)
/// entries.
struct dropper_options {
  std::uint32_t sinks = 4;
  std::uint32_t budget = 256;
  std::uint32_t window = 32;
  std::uint64_t first_eviction = 0;  ///< 0: sinks + budget + window + interval
  std::uint32_t interval = 64;       ///< at least 1
  std::uint32_t max_rollback = 32;
  std::uint32_t query_heads = 1;  ///< of one KV head
};

/// The query of one token, as a scorer sees it.
struct scored_query {
  std::uint64_t before = 0;  ///< how far it lies before the boundary for which it counts; the newest one: 1
  bool first = false;        ///< nothing that counts for this boundary has been folded before
};

/// The entries of one head at a boundary. `states` [entries, lanes]: what the scorer has folded of the queries; `values` [entries,
/// value_dim], as the cache gives them back, empty unless the scorer reads them. The first `older` entries lie before the protected window.
template <class Summary>
struct judged_entries {
  std::uint32_t head = 0;
  std::size_t older = 0;
  std::span<const std::uint64_t> positions;
  std::span<const float> states;
  std::span<const float> values;
  Summary summary;
};

/// What a dropper is told by its method: `make` checks the options (errors: invalid_argument, shape_mismatch), `eviction()` gives those
/// that all methods share. `summary` and `memory` are of use to an `attention_scorer` and empty elsewhere.
template <class S>
concept eviction_rule = std::movable<S> && std::copyable<typename S::summary> && std::copyable<typename S::memory> &&
    requires(const S& rule, const layer_shape& shape, const typename S::options& options) {
  { S::make(shape, options) }
  noexcept->std::same_as<result<S>>;
  { rule.eviction() }
  noexcept->std::same_as<const dropper_options&>;
};

/// A rule that judges tokens by the attention they get. It must not keep anything itself: what it says depends on its arguments alone.
///
/// - `queries()`: how many queries before a boundary count for it; at most `interval`, or all with `scorer_all_queries`.
/// - `lanes()`: numbers that an entry needs of a query, and of all queries so far. `reads_values`: whether `score` needs the values.
/// - `reduce(query, weights, row, order)`: from [query heads, entries] to `row` [entries, lanes], rounded to bf16, since it is held as long
///   as the query can be taken back; what else a query tells is the `summary`. `order` [entries] is working memory.
/// - `fold(query, row, summary, states, sum)`: takes a query into `states` [entries, lanes], which are 0 for tokens that no query has seen.
///   Queries come oldest first. Weights of tokens that are not held any more are 0.
/// - `score(entries, memory, scores)`: how much the first `older` entries are worth, all finite; the larger, the better. `memory` is what
///   `take(workspace, entries)` gave for at least as many entries.
template <class S>
concept attention_scorer = eviction_rule<S> &&
    requires(const S& scorer, workspace& space, std::size_t entries, const scored_query& query, std::span<const float> weights,
             std::span<bf16> row, std::span<const bf16> held_row, std::span<std::uint32_t> order, typename S::summary& sum,
             const typename S::summary& of_row, std::span<float> states, const judged_entries<typename S::summary>& judged,
             std::span<double> scores, typename S::memory& memory) {
  { S::reads_values }
  ->std::convertible_to<bool>;
  { scorer.queries() }
  noexcept->std::same_as<std::uint64_t>;
  { scorer.lanes() }
  noexcept->std::same_as<std::uint32_t>;
  { scorer.take(space, entries) }
  noexcept->std::same_as<typename S::memory>;
  { scorer.reduce(query, weights, row, order) }
  noexcept->std::same_as<typename S::summary>;
  { scorer.fold(query, held_row, of_row, states, sum) }
  noexcept;
  { scorer.score(judged, memory, scores) }
  noexcept;
};

inline constexpr std::uint64_t scorer_all_queries = ~std::uint64_t{0};

namespace detail {

/// What a head keeps at a boundary and appends until the next.
[[nodiscard]] inline std::uint64_t most_kept(const dropper_options& options) noexcept {
  return std::uint64_t{options.sinks} + options.budget + options.window + options.interval;
}

/// The absolute positions at which a dropper evicts.
struct eviction_schedule {
  std::uint64_t first = 1;
  std::uint64_t interval = 1;

  [[nodiscard]] static eviction_schedule of(const dropper_options& options) noexcept {
    return {options.first_eviction == 0 ? most_kept(options) : options.first_eviction, options.interval};
  }
  /// The first boundary that is at least `length`.
  [[nodiscard]] std::uint64_t next(std::uint64_t length) const noexcept {
    if (length <= first) return first;
    return first + (length - first + interval - 1) / interval * interval;
  }
};

/// [query heads, entries] to [entries].
inline void mean_over_heads(std::span<const float> weights, std::span<bf16> mean) noexcept {
  const std::size_t heads = weights.size() / mean.size();
  for (std::size_t i = 0; i < mean.size(); ++i) {
    float sum = 0;
    for (std::size_t h = 0; h < heads; ++h) sum += weights[h * mean.size() + i];
    mean[i] = bf16::from_float(sum / static_cast<float>(heads));
  }
}

/// Moves the `count` indices with the largest scores to the front; of equal scores the lower index counts as larger.
template <class Score>
void best_first(std::span<std::uint32_t> indices, std::size_t count, std::span<const Score> scores) noexcept {
  std::ranges::nth_element(indices, indices.begin() + static_cast<std::ptrdiff_t>(count),
                           [&](std::uint32_t a, std::uint32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
}

/// Of the methods that let the queries of the protected window decide. Windows do not overlap, so that one sum an entry is enough.
[[nodiscard]] inline result<void> check_window(const dropper_options& options) noexcept {
  if (options.window == 0) return error{error_code::invalid_argument, "the queries of the window decide: it is at least 1 token"};
  if (options.window > options.interval)
    return error{error_code::invalid_argument, "the queries of the window decide: it is at most as long as the interval of evictions"};
  return {};
}

}  // namespace detail

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/compression/dropper.hpp>

namespace kvexact {

/// H2O (arXiv 2306.14048, algorithm 1): a token is worth all the attention that later queries have paid to it while it was held, and its
/// own. The sum is causal: a query counts only for tokens that are not newer than itself. Mean over the query heads of a KV head.
class accumulated_attention {
 public:
  using options = dropper_options;
  struct summary {};
  struct memory {};
  static constexpr bool reads_values = false;

  [[nodiscard]] static result<accumulated_attention> make(const layer_shape&, const options& chosen) noexcept {
    return accumulated_attention(chosen);
  }

  [[nodiscard]] const dropper_options& eviction() const noexcept { return eviction_; }
  [[nodiscard]] std::uint64_t queries() const noexcept { return scorer_all_queries; }
  [[nodiscard]] std::uint32_t lanes() const noexcept { return 1; }
  [[nodiscard]] memory take(workspace&, std::size_t) const noexcept { return {}; }

  summary reduce(const scored_query&, std::span<const float> weights, std::span<bf16> row, std::span<std::uint32_t>) const noexcept {
    detail::mean_over_heads(weights, row);
    return {};
  }

  void fold(const scored_query&, std::span<const bf16> row, const summary&, std::span<float> states, summary&) const noexcept {
    for (std::size_t i = 0; i < row.size(); ++i) states[i] += row[i].to_float();
  }

  void score(const judged_entries<summary>& entries, memory&, std::span<double> scores) const noexcept {
    for (std::size_t i = 0; i < entries.older; ++i) scores[i] = entries.states[i];
  }

 private:
  explicit accumulated_attention(const dropper_options& eviction) noexcept : eviction_(eviction) {}

  dropper_options eviction_;
};

/// `h2o<bf16>::make(shape, {.budget = 256, .window = 256, .query_heads = 4})`
template <cache_scalar Scalar>
using h2o = dropper<Scalar, accumulated_attention>;

static_assert(observes_attention<h2o<bf16>>);

}  // namespace kvexact

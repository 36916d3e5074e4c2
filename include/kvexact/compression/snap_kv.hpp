// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/compression/dropper.hpp>

namespace kvexact {

struct snap_kv_options {
  dropper_options eviction = {};  ///< `window` is also the number of queries that decide; at least 1 and at most `interval`
  std::uint32_t kernel = 5;       ///< positions over which scores are averaged, odd
};

/// SnapKV (arXiv 2404.14469, section 4): a token is worth the attention that the queries of the newest `window` positions before the
/// boundary pay to it, averaged over the `kernel` positions around it, so that tokens are kept together with their neighbours. Positions
/// that are not held, or lie in the window, count as 0. Mean over the query heads of a KV head.
class window_attention {
 public:
  using options = snap_kv_options;
  struct summary {};
  struct memory {};
  static constexpr bool reads_values = false;

  /// Errors: invalid_argument.
  [[nodiscard]] static result<window_attention> make(const layer_shape&, const options& chosen) noexcept {
    if (chosen.kernel % 2 == 0) return error{error_code::invalid_argument, "the kernel of SnapKV is odd"};
    if (const auto good = detail::check_window(chosen.eviction); !good) return good.error();
    return window_attention(chosen);
  }

  [[nodiscard]] const dropper_options& eviction() const noexcept { return options_.eviction; }
  [[nodiscard]] std::uint64_t queries() const noexcept { return options_.eviction.window; }
  [[nodiscard]] std::uint32_t lanes() const noexcept { return 1; }
  [[nodiscard]] memory take(workspace&, std::size_t) const noexcept { return {}; }

  summary reduce(const scored_query&, std::span<const float> weights, std::span<bf16> row, std::span<std::uint32_t>) const noexcept {
    detail::mean_over_heads(weights, row);
    return {};
  }

  void fold(const scored_query& query, std::span<const bf16> row, const summary&, std::span<float> states, summary&) const noexcept {
    for (std::size_t i = 0; i < row.size(); ++i) states[i] = query.first ? row[i].to_float() : states[i] + row[i].to_float();
  }

  void score(const judged_entries<summary>& entries, memory&, std::span<double> scores) const noexcept {
    const std::uint64_t reach = options_.kernel / 2;
    std::size_t first = 0;
    for (std::size_t i = 0; i < entries.older; ++i) {
      const std::uint64_t position = entries.positions[i];
      while (entries.positions[first] + reach < position) ++first;
      double sum = 0;
      for (std::size_t j = first; j < entries.older && entries.positions[j] <= position + reach; ++j) sum += entries.states[j];
      scores[i] = sum / options_.kernel;
    }
  }

 private:
  explicit window_attention(const options& chosen) noexcept : options_(chosen) {}

  options options_;
};

/// `snap_kv<bf16>::make(shape, {.eviction = {.budget = 256, .query_heads = 4}, .kernel = 7})`
template <cache_scalar Scalar>
using snap_kv = dropper<Scalar, window_attention>;

static_assert(observes_attention<snap_kv<bf16>>);

}  // namespace kvexact

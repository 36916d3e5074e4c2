// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/compression/dropper.hpp>

namespace kvexact {

struct rest_kv_options {
  dropper_options eviction = {};    ///< `window` is also the number of queries that decide; at least 1 and at most `interval`
  float smoothing = 0.3F;           ///< weight of the newer row in the moving average, in (0, 1]
  std::uint32_t kernel = 5;         ///< least number of entries over which scores are averaged, odd, at most 1023
  std::uint32_t drift_unit = 2000;  ///< shift of attention, in entries, that widens the kernel by 2; at least 1
  /// W^T W of the slice of the output projection that belongs to each query head, [query heads of the layer, value_dim, value_dim]; query
  /// heads of one KV head stand together. Empty: W is the identity. Not copied: must outlive the compressor and its moved-to heirs.
  std::span<const float> output_gram = {};
};

namespace detail {

/// |W x| from W^T W [dim, dim], or |x| where that is empty.
template <std::floating_point T, class Gram>
[[nodiscard]] T projected_norm(std::span<const T> x, std::span<const Gram> gram) noexcept {
  T sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    T product = x[i];
    if (!gram.empty()) {
      product = 0;
      for (std::size_t j = 0; j < x.size(); ++j) product += static_cast<T>(gram[i * x.size() + j]) * x[j];
    }
    sum += x[i] * product;
  }
  return std::sqrt(std::max(sum, T{0}));
}

/// How much the output o = sum of a_j v_j changes when one entry of weight a and value v is dropped and the other weights are scaled up to
/// sum to 1 again: a / (1 - a) |W (o - v)|. All weights sum to 1; `difference`: |W (o - v)|; `output`: |W o|. Where the entry has all the
/// weight, nothing is left that could be scaled up, and all of the output is lost.
template <std::floating_point T>
[[nodiscard]] T leave_one_out(T weight, T difference, T output) noexcept {
  constexpr T least = T{1} / (1 << 30);  // below, o - v is rounding errors only
  const T rest = 1 - weight;
  return rest < least ? output : weight / rest * difference;
}

/// Over how many entries scores are averaged, and how far to the right of the entry, for attention that moves by `drift` entries (the mean
/// index before less the mean index after).
struct drift_kernel {
  std::int64_t size = 0;
  std::int64_t shift = 0;

  [[nodiscard]] static drift_kernel of(double drift, std::uint32_t least, std::uint32_t unit) noexcept {
    const double steps = std::floor(drift / unit);
    return {std::max(std::int64_t{least}, 2 * static_cast<std::int64_t>(std::floor(std::abs(drift) / unit)) + 1),
            static_cast<std::int64_t>(drift > 0 ? steps : steps + 1)};
  }
};

/// out[i]: mean of in[i - size / 2 + shift .. i + size / 2 + shift], where the first and the last stand for what lies beyond them.
inline void pool(std::span<const double> in, const drift_kernel& kernel, std::span<double> out) noexcept {
  const auto last = static_cast<std::int64_t>(in.size()) - 1;
  for (std::int64_t i = 0; i <= last; ++i) {
    double sum = 0;
    for (std::int64_t k = 0; k < kernel.size; ++k) {
      sum += in[static_cast<std::size_t>(std::clamp(i - kernel.size / 2 + kernel.shift + k, std::int64_t{0}, last))];
    }
    out[static_cast<std::size_t>(i)] = sum / static_cast<double>(kernel.size);
  }
}

}  // namespace detail

/// ReST-KV (arXiv 2605.08840): a token is worth the change of the layer's output when it is dropped and softmax spreads its weight over the
/// others. The weights are a moving average over the queries of the newest `window` positions before the boundary, oldest to newest. Scores
/// are averaged over neighbouring entries; where attention drifts from the first half of the window to the second, over more of them and
/// off centre, towards where it comes from.
///
/// One set per KV head: scores are averaged over its query heads, which bounds the change of their sum (triangle inequality), before they
/// are averaged over neighbours. The drift is the mean over the queries of the first half, less that of the second, of the mean index of
/// the `budget` entries with the largest weights, over all query heads.
class output_change {
 public:
  static constexpr std::uint32_t most_kernel = 1023;
  static constexpr bool reads_values = true;
  using options = rest_kv_options;

  struct summary {
    double first = 0;  ///< sum of the indices with the largest weights, of the queries in the window's first half
    double second = 0;
    double firsts = 0;  ///< how many indices that are
    double seconds = 0;
  };

  struct memory {
    std::span<double> output;      // [value_dim]
    std::span<double> difference;  // [value_dim]
    std::span<double> raw;         // [entries]
  };

  /// Errors: invalid_argument, shape_mismatch (a layer without V, size of `output_gram`).
  [[nodiscard]] static result<output_change> make(const layer_shape& shape, const options& chosen) noexcept {
    if (shape.value_dim == 0) return error{error_code::shape_mismatch, "ReST-KV needs values"};
    if (!(chosen.smoothing > 0 && chosen.smoothing <= 1))
      return error{error_code::invalid_argument, "the smoothing of ReST-KV is in (0, 1]"};
    if (chosen.kernel % 2 == 0 || chosen.kernel > most_kernel) return error{error_code::invalid_argument, "the kernel of ReST-KV is odd, and at most 1023"};
    if (chosen.drift_unit == 0) return error{error_code::invalid_argument, "the drift unit of ReST-KV is at least 1"};
    if (const auto good = detail::check_window(chosen.eviction); !good) return good.error();
    const std::uint64_t heads = std::uint64_t{shape.kv_heads} * chosen.eviction.query_heads;
    if (!chosen.output_gram.empty() && chosen.output_gram.size() != heads * shape.value_dim * shape.value_dim)
      return error{error_code::shape_mismatch, "the output projection is given as [query heads, value_dim, value_dim]"};
    if (!std::ranges::all_of(chosen.output_gram, [](float each) { return std::isfinite(each); }))
      return error{error_code::invalid_argument, "the output projection is not finite"};
    return output_change(shape.value_dim, chosen);
  }

  [[nodiscard]] const dropper_options& eviction() const noexcept { return options_.eviction; }
  [[nodiscard]] std::uint64_t queries() const noexcept { return options_.eviction.window; }
  [[nodiscard]] std::uint32_t lanes() const noexcept { return options_.eviction.query_heads; }
  [[nodiscard]] memory take(workspace& space, std::size_t entries) const noexcept {
    return {space.take<double>(value_dim_), space.take<double>(value_dim_), space.take<double>(entries)};
  }

  summary reduce(const scored_query& query, std::span<const float> weights, std::span<bf16> row,
                 std::span<std::uint32_t> order) const noexcept {
    const std::size_t heads = lanes();
    const std::size_t entries = weights.size() / heads;
    const std::size_t largest = std::min<std::size_t>(options_.eviction.budget, entries);
    double sum = 0;
    for (std::size_t h = 0; h < heads; ++h) {
      const std::span<const float> head = weights.subspan(h * entries, entries);
      for (std::size_t i = 0; i < entries; ++i) row[i * heads + h] = bf16::from_float(head[i]);
      sum += indices_of_largest(head, largest, order);
    }
    const auto count = static_cast<double>(heads * largest);
    const bool first_half = query.before > queries() - queries() / 2;
    return first_half ? summary{sum, 0, count, 0} : summary{0, sum, 0, count};
  }

  void fold(const scored_query& query, std::span<const bf16> row, const summary& of_row, std::span<float> states,
            summary& sum) const noexcept {
    if (query.first) sum = {};
    sum = {sum.first + of_row.first, sum.second + of_row.second, sum.firsts + of_row.firsts, sum.seconds + of_row.seconds};
    for (std::size_t i = 0; i < row.size(); ++i) {
      const float newer = row[i].to_float();
      states[i] = query.first ? newer : states[i] + options_.smoothing * (newer - states[i]);
    }
  }

  void score(const judged_entries<summary>& entries, memory& work, std::span<double> scores) const noexcept {
    std::ranges::fill(work.raw, 0.0);
    for (std::size_t h = 0; h < lanes(); ++h) add_change(entries, h, work);
    const auto& [first, second, firsts, seconds] = entries.summary;
    detail::drift_kernel kernel{options_.kernel, 0};
    if (firsts > 0 && seconds > 0) {
      // Exact but for the division, so that a drift of 0 is 0.
      const double drift = (first * seconds - second * firsts) / (firsts * seconds);
      kernel = detail::drift_kernel::of(drift, options_.kernel, options_.drift_unit);
    }
    detail::pool(work.raw.first(entries.older), kernel, scores);
  }

 private:
  output_change(std::uint32_t value_dim, const options& chosen) noexcept : value_dim_(value_dim), options_(chosen) {}

  /// The sum of the indices of the `count` largest weights.
  [[nodiscard]] static double indices_of_largest(std::span<const float> weights, std::size_t count,
                                                 std::span<std::uint32_t> order) noexcept {
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
    detail::best_first(order, count, weights);
    double sum = 0;
    for (const std::uint32_t each : order.first(count)) sum += each;
    return sum;
  }

  /// Adds the change that each entry would make to the output of one query head.
  void add_change(const judged_entries<summary>& entries, std::size_t h, memory& work) const noexcept {
    const std::size_t heads = lanes();
    const std::size_t square = std::size_t{value_dim_} * value_dim_;
    const auto gram =
        options_.output_gram.empty() ? std::span<const float>() : options_.output_gram.subspan((entries.head * heads + h) * square, square);
    double total = 0;
    std::ranges::fill(work.output, 0.0);
    for (std::size_t i = 0; i < entries.positions.size(); ++i) {
      const double weight = entries.states[i * heads + h];
      total += weight;
      for (std::size_t d = 0; d < value_dim_; ++d) work.output[d] += weight * entries.values[i * value_dim_ + d];
    }
    if (total == 0) return;
    for (double& each : work.output) each /= total;
    const double output = detail::projected_norm<double>(work.output, gram);
    for (std::size_t i = 0; i < entries.older; ++i) {
      for (std::size_t d = 0; d < value_dim_; ++d) work.difference[d] = work.output[d] - entries.values[i * value_dim_ + d];
      const double difference = detail::projected_norm<double>(work.difference, gram);
      work.raw[i] += detail::leave_one_out(entries.states[i * heads + h] / total, difference, output);
    }
  }

  std::uint32_t value_dim_;
  options options_;
};

/// `rest_kv<bf16>::make(shape, {.eviction = {.budget = 256, .query_heads = 4}, .output_gram = gram})`
template <cache_scalar Scalar>
using rest_kv = dropper<Scalar, output_change>;

static_assert(observes_attention<rest_kv<bf16>>);

}  // namespace kvexact

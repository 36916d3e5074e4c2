// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/entropy/frequency_table.hpp>
#include <kvexact/residual/value_grid.hpp>

namespace kvexact {

/// A symmetric density around the mean: a mixture of normal distributions whose spreads are multiples of sigma. What of the weights is
/// missing to 1 belongs to values that are far away, and ends up in the escape symbol.
struct density {
  struct component {
    double weight = 0;
    double spread = 1;
  };
  std::array<component, 2> components{};

  /// Probability of a residual below `z` sigmas, by complementary error functions so that tails keep their digits.
  [[nodiscard]] double below(double z) const noexcept {
    double sum = 0;
    for (const component& part : components) sum += part.weight * 0.5 * std::erfc(-z / (part.spread * std::sqrt(2.0)));
    return sum;
  }
  /// Probability of [from, to) sigmas.
  [[nodiscard]] double mass(double from, double to) const noexcept { return from > 0 ? below(-from) - below(-to) : below(to) - below(from); }

  /// N(0, sigma).
  [[nodiscard]] static constexpr density gaussian() noexcept { return {{{{1.0, 1.0}, {0.0, 1.0}}}}; }
  /// 0.95 N(0, sigma) + 0.03 N(0, 3 sigma) + 0.02 empirical ("speculative KV coding", F. Finn, May 2026); the empirical part depends
  /// on the value itself and becomes the escape.
  [[nodiscard]] static constexpr density mixture() noexcept { return {{{{0.95, 1.0}, {0.03, 3.0}}}}; }
};

/// Probability of every symbol of `Grid` in a context, from a density integrated over the cells of a mean and a sigma typical of it.
template <class Grid>
[[nodiscard]] std::array<double, static_cast<std::size_t>(Grid::alphabet)> integrate_density(std::int32_t context, const density& shape) noexcept {
  const auto [mean, mean_cell, sigma] = Grid::typical(context);
  std::array<double, static_cast<std::size_t>(Grid::alphabet)> probability{};
  double sum = 0;
  for (int s = 0; s < Grid::escape_symbol; ++s) {
    const std::int32_t cell = mean_cell + s - Grid::zero_symbol;
    const double from = cell >= 0 ? Grid::lower_edge(cell) : -Grid::lower_edge(-cell);
    const double to = cell >= -1 ? Grid::lower_edge(cell + 1) : -Grid::lower_edge(-1 - cell);
    const double mass = std::max(shape.mass((from - mean) / sigma, (to - mean) / sigma), 0.0);
    probability[static_cast<std::size_t>(s)] = mass;
    sum += mass;
  }
  probability[static_cast<std::size_t>(Grid::escape_symbol)] = std::max(1.0 - sum, 1e-9);
  return probability;
}

/// A frequency table from counts, which may be all zero, and a prior worth `strength` counts. Symbols so rare that the smallest possible
/// frequency would cost more than it saves are left to the escape symbol, the last one. Errors: those of frequency_table::from_counts.
[[nodiscard]] inline result<frequency_table> blend_counts(std::span<const std::uint64_t> counts, std::span<const double> prior, double strength,
                                                          int precision) noexcept {
  // Keeping a symbol takes at least 2^-precision from all others, log2(e) 2^-precision bits a value; losing it costs some 16 bits
  // whenever it occurs.
  constexpr double worth_keeping = 0.09;
  constexpr double unit = 16;  // keeps fractions of the prior
  if (counts.empty() || counts.size() > frequency_table::max_symbols || precision < frequency_table::min_precision ||
      precision > frequency_table::max_precision)
    return frequency_table::from_counts(counts, precision);  // says what is wrong
  std::array<double, frequency_table::max_symbols> weight{};
  std::array<std::uint64_t, frequency_table::max_symbols> merged{};
  const std::size_t size = counts.size();
  double sum = 0;
  for (std::size_t s = 0; s < size; ++s) {
    weight[s] = static_cast<double>(counts[s]) + strength * (s < prior.size() ? prior[s] : 0.0);
    sum += weight[s];
  }
  double escaped = 0;
  const double least = sum * worth_keeping / static_cast<double>(std::uint64_t{1} << precision);
  for (std::size_t s = 0; s < size; ++s) {
    if (s + 1 == size || weight[s] < least) {
      escaped += weight[s];
    } else {
      merged[s] = static_cast<std::uint64_t>(std::max(std::llround(weight[s] * unit), 1LL));
    }
  }
  merged[size - 1] = static_cast<std::uint64_t>(std::max(std::llround(escaped * unit), 1LL));
  return frequency_table::from_counts(std::span(merged).first(size), precision);
}

}  // namespace kvexact

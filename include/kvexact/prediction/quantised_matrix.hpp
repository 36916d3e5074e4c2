// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <kvexact/core/config.hpp>

namespace kvexact {

/// A linear map in 8-bit integers with one scale a row. Its product with a vector of integers x is, row by row,
///
///     scaled(sum over k < depth of weights[row * depth + k] * x[k], scales[row], shift)
///
/// in integers throughout. The shift is the caller's, one for all rows.
struct quantised_matrix {
  std::size_t rows = 0;
  std::size_t depth = 0;
  std::vector<std::int8_t> weights;   ///< [row][depth]
  std::vector<std::uint32_t> scales;  ///< one a row, less than 2^31

  /// sum * scale / 2^shift, rounded to the nearest integer, halves upwards. `scale` < 2^31, 1 <= `shift` <= 62.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE static constexpr std::int64_t scaled(std::int32_t sum, std::uint32_t scale, int shift) noexcept {
    return (std::int64_t{sum} * std::int64_t{scale} + (std::int64_t{1} << (shift - 1))) >> shift;
  }
};

/// Rounds a real matrix `weights`, [row][depth], to a quantised one for `shift` (1 to 62). A row's scale is its largest weight in
/// magnitude / 127 * 2^shift, rounded up to an integer in [1, 2^31), and its weights are the nearest integers in [-127, 127], so that a
/// weight is off by at most scale / 2^(shift + 1), unless the row holds weights beyond 127 * (2^31 - 1) / 2^shift, which are clamped.
/// Weights that are not finite count as 0. For calibration: it allocates, and std::bad_alloc passes through it.
[[nodiscard]] inline quantised_matrix quantise_rows(std::span<const double> weights, std::size_t rows, std::size_t depth, int shift) {
  constexpr double largest_weight = 127;
  constexpr double largest_scale = std::numeric_limits<std::int32_t>::max();
  quantised_matrix out{rows, depth, std::vector<std::int8_t>(rows * depth), std::vector<std::uint32_t>(rows)};
  for (std::size_t r = 0; r < rows; ++r) {
    const std::span<const double> row = weights.subspan(r * depth, depth);
    double largest = 0;
    for (const double weight : row) largest = std::isfinite(weight) ? std::max(largest, std::abs(weight)) : largest;
    const double scale = std::clamp(std::ceil(std::ldexp(largest / largest_weight, shift)), 1.0, largest_scale);
    out.scales[r] = static_cast<std::uint32_t>(scale);
    for (std::size_t k = 0; k < depth; ++k) {
      const double steps = std::isfinite(row[k]) ? std::ldexp(row[k], shift) / scale : 0.0;
      out.weights[r * depth + k] = static_cast<std::int8_t>(std::lrint(std::clamp(steps, -largest_weight, largest_weight)));
    }
  }
  return out;
}

}  // namespace kvexact

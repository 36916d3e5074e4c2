// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>

namespace kvexact {

/// The best 2^bits values for one coordinate of a uniformly random unit vector of `dim` coordinates, whose density is proportional to
/// (1 - t^2)^((dim - 3) / 2): Lloyd's fixed point, each value the mean of what lies nearest to it (TurboQuant, arXiv 2504.19874).
/// They are symmetric, so only the positive half is kept.
class lloyd_max_table {
 public:
  /// `dim` 4 to 65536, `bits` 1 to 8. Errors: invalid_argument, out_of_memory.
  [[nodiscard]] static result<lloyd_max_table> make(std::uint32_t dim, int bits) noexcept {
    if (dim < 4 || dim > 1U << 16) return error{error_code::invalid_argument, "a table for unit vectors needs 4 to 65536 channels"};
    if (bits < 1 || bits > 8) return error{error_code::invalid_argument, "a table for unit vectors has 1 to 8 bits"};
    try {
      return lloyd_max_table(dim, bits);
    } catch (...) {
      return error{error_code::out_of_memory, "a table for unit vectors"};
    }
  }

  /// The positive values, increasing, 2^(bits-1) of them.
  [[nodiscard]] const std::vector<float>& values() const noexcept { return values_; }
  /// Magnitudes from which on the next value is nearer, 2^(bits-1) - 1 of them.
  [[nodiscard]] const std::vector<float>& thresholds() const noexcept { return thresholds_; }
  /// Expected squared error of a whole unit vector.
  [[nodiscard]] double distortion() const noexcept { return distortion_; }

 private:
  static constexpr std::size_t cells = 1U << 13;

  /// (1 - t^2)^power; 1 - t^2 alone would lose digits that large powers need.
  [[nodiscard]] static double power_of_rest(double t, double power) noexcept { return std::exp(power * std::log1p(-std::min(1.0, t * t))); }

  lloyd_max_table(std::uint32_t dim, int bits) {
    const double power = 0.5 * (dim - 3.0);
    // Beyond, there is less than 1e-30 of the mass.
    const double most = std::min(1.0, 12 / std::sqrt(static_cast<double>(dim)));
    const double step = most / cells;
    const auto density = [&](double t) { return power_of_rest(t, power); };
    // Mass from 0 up to each node, by Simpson's rule.
    std::vector<double> mass(cells + 1), at(cells + 1);
    for (std::size_t i = 0; i <= cells; ++i) at[i] = density(static_cast<double>(i) * step);
    for (std::size_t i = 0; i < cells; ++i)
      mass[i + 1] = mass[i] + step / 6 * (at[i] + 4 * density((static_cast<double>(i) + 0.5) * step) + at[i + 1]);
    const double total = mass[cells];
    // Cubic between nodes: values and slopes are known.
    const auto mass_below = [&](double t) {
      const double place = std::clamp(t / step, 0.0, static_cast<double>(cells));
      const auto i = std::min(static_cast<std::size_t>(place), cells - 1);
      const double x = place - static_cast<double>(i);
      const double rise = mass[i + 1] - mass[i], left = at[i] * step - rise, right = rise - at[i + 1] * step;
      return mass[i] + x * rise + x * (1 - x) * (left * (1 - x) + right * x);
    };
    // The first moment above t has a closed form.
    const auto moment_above = [&](double t) { return power_of_rest(t, power + 1) / (2 * (power + 1)); };

    const std::size_t half = std::size_t{1} << (bits - 1);
    std::vector<double> value(half), limit(half + 1), move(half), follows(half);
    for (std::size_t i = 0; i < half; ++i) value[i] = (static_cast<double>(i) + 0.5) * std::min(most, 3 / std::sqrt(dim)) / static_cast<double>(half);
    limit[half] = most;
    double squares = 0, moved = 1;
    // Newton's method: 7 iterations at most, where Lloyd's own takes 100000 for 8 bits. A mean depends on its own value and the two beside
    // it, so that the moves solve a system of three diagonals: first each in terms of the next one, `follows` times that, then downwards.
    // What a move leaves is about its square, as parts of the usual size of a coordinate.
    for (int iteration = 0; iteration < 20 && moved * std::sqrt(dim) > 1e-9; ++iteration) {
      for (std::size_t i = 1; i < half; ++i) limit[i] = 0.5 * (value[i - 1] + value[i]);
      squares = 0;
      for (std::size_t i = 0; i < half; ++i) {
        const bool first = i == 0, last = i + 1 == half;
        const double low = limit[i], high = limit[i + 1], here = mass_below(high) - mass_below(low);
        const double mean = (moment_above(low) - (last ? 0 : moment_above(high))) / here;
        squares += here / total * mean * mean;
        // How the mean follows the values below and above, and so its own.
        const double by_lower = first ? 0 : density(low) * (mean - low) / (2 * here);
        const double by_upper = last ? 0 : density(high) * (high - mean) / (2 * here);
        const double pivot = 1 - by_lower - by_upper - (first ? 0 : by_lower * follows[i - 1]);
        follows[i] = by_upper / pivot;
        move[i] = (mean - value[i] + (first ? 0 : by_lower * move[i - 1])) / pivot;
      }
      moved = 0;
      for (std::size_t i = half; i-- > 0;) {
        if (i + 1 < half) move[i] += follows[i] * move[i + 1];
        value[i] += move[i];
        moved = std::max(moved, std::fabs(move[i]));
      }
    }
    distortion_ = 1 - dim * squares;
    values_.assign(value.begin(), value.end());
    for (std::size_t i = 1; i < half; ++i) thresholds_.push_back(static_cast<float>(0.5 * (value[i - 1] + value[i])));
  }

  std::vector<float> values_, thresholds_;
  double distortion_ = 0;
};

}  // namespace kvexact

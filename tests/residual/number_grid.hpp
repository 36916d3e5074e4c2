// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvexact/residual/value_grid.hpp>

namespace kvexact::test {

/// A format and its grid by definition, in floating point: no bit tricks, and cells are found by counting.
template <class Format>
struct number_grid {
  static constexpr int mantissa_bits = Format::mantissa_bits;
  static constexpr int first_coarse = 2 << mantissa_bits;
  static constexpr std::uint32_t codes = std::uint32_t{Format::magnitude_mask} + 1;

  /// Value of a magnitude. Those that are not finite count as if the exponents went on.
  [[nodiscard]] static double value(std::uint32_t code) {
    const auto biased = static_cast<int>(code >> mantissa_bits);
    const double fraction = std::ldexp(static_cast<double>(code & ((1U << mantissa_bits) - 1U)), -mantissa_bits);
    return biased == 0 ? std::ldexp(fraction, 1 - Format::bias) : std::ldexp(1 + fraction, biased - Format::bias);
  }

  [[nodiscard]] static const std::vector<double>& values() {
    static const std::vector<double> all = [] {
      std::vector<double> line;
      for (std::uint32_t code = 0; code < codes; ++code) line.push_back(value(code));
      return line;
    }();
    return all;
  }

  /// log2 of the grid step D for a sigma in 1/256 octave.
  [[nodiscard]] static int step(std::int32_t sigma) {
    const double octaves = std::floor(static_cast<double>(sigma) / 256);
    const double smallest = 1 - Format::bias - mantissa_bits;
    return static_cast<int>(std::clamp(octaves - 2, smallest, static_cast<double>(Format::bias)));
  }

  /// The cell of every magnitude: [c D, (c + 1) D) where D is coarser than the format, else one for each value.
  [[nodiscard]] static std::vector<std::int32_t> cells(int step) {
    const double d = std::ldexp(1.0, step);
    std::vector<std::int32_t> all;
    std::int32_t coarse = first_coarse;
    for (const double x : values()) all.push_back(x < first_coarse * d ? static_cast<std::int32_t>(std::floor(x / d)) : coarse++);
    return all;
  }

  /// The largest finite magnitude not above a mean's; 0 for means that are not finite.
  [[nodiscard]] static std::uint32_t code_below(float mean) {
    if (!std::isfinite(mean)) return 0;
    const auto& line = values();
    const auto above = std::upper_bound(line.begin(), line.begin() + Format::max_finite + 1, static_cast<double>(std::abs(mean)));
    return static_cast<std::uint32_t>(above - line.begin() - 1);
  }
};

}  // namespace kvexact::test

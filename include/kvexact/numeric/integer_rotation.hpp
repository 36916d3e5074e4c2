// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include <kvexact/core/config.hpp>

namespace kvexact {

/// Cosine and sine in units of 2^-30.
struct integer_rotation {
  std::int32_t cosine;
  std::int32_t sine;
};

namespace detail {

/// sin(pi/2 * x / 2^30) * 2^30 for x in [0, 2^30]: odd polynomial of degree 11, least squares on Chebyshev points (error below 2^-30
/// before the truncations of the evaluation).
[[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::int32_t quarter_sine(std::int64_t x) noexcept {
  const std::int64_t square = (x * x) >> 30;
  std::int64_t sum = -14691;
  sum = ((sum * square) >> 30) + 688155;
  sum = ((sum * square) >> 30) - 20107435;
  sum = ((sum * square) >> 30) + 342277070;
  sum = ((sum * square) >> 30) - 2774394655;
  sum = ((sum * square) >> 30) + 6746518852;
  return static_cast<std::int32_t>(std::min<std::int64_t>((sum * x) >> 32, 1 << 30));
}

/// Bits of binary32 for value * 2^exponent, truncated towards zero; zero below the smallest normal number, largest finite above.
[[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::uint32_t to_binary32(std::int64_t value, std::int32_t exponent) noexcept {
  const std::uint32_t sign = value < 0 ? 0x80000000U : 0U;
  const auto magnitude = static_cast<std::uint64_t>(value < 0 ? -value : value);
  if (magnitude == 0) return 0;
  const int top = 63 - std::countl_zero(magnitude);
  const std::int32_t biased = top + exponent + 127;
  if (biased <= 0) return 0;
  if (biased >= 255) return sign | 0x7f7fffffU;
  const std::uint64_t aligned = top >= 23 ? magnitude >> (top - 23) : magnitude << (23 - top);
  return sign | (static_cast<std::uint32_t>(biased) << 23) | (static_cast<std::uint32_t>(aligned) & 0x7fffffU);
}

}  // namespace detail

/// Rotation by an angle given in turns, in units of 2^-64 (so position * frequency may wrap). The same on every machine; within 2^-27.
[[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr integer_rotation rotation_by_turns(std::uint64_t turns) noexcept {
  const auto quadrant = static_cast<std::uint32_t>(turns >> 62);
  const auto fraction = static_cast<std::int64_t>((turns >> 32) & 0x3fffffffU);  // of a quarter turn
  const std::int32_t rising = detail::quarter_sine(fraction);
  const std::int32_t falling = detail::quarter_sine((std::int64_t{1} << 30) - fraction);
  const bool odd = (quadrant & 1U) != 0;
  const std::int32_t sine = odd ? falling : rising;
  const std::int32_t cosine = odd ? rising : falling;
  return {quadrant == 1 || quadrant == 2 ? -cosine : cosine, quadrant >= 2 ? -sine : sine};
}

/// A pair of binary32 numbers, prepared for rotation: integers with a common exponent. Infinities and NaNs count as zero.
struct integer_pair {
  std::int32_t first = 0;
  std::int32_t second = 0;
  std::int32_t exponent = 0;

  [[nodiscard]] static constexpr integer_pair from_bits(std::uint32_t a, std::uint32_t b) noexcept {
    const auto exponent_of = [](std::uint32_t bits) {
      const auto biased = static_cast<std::int32_t>((bits >> 23) & 0xffU);
      return biased == 255 ? 0 : biased;
    };
    const std::int32_t top = std::max(exponent_of(a), exponent_of(b));
    const auto scaled = [&](std::uint32_t bits) {
      const std::int32_t biased = exponent_of(bits);
      if (biased == 0) return 0;
      const auto significand = static_cast<std::int32_t>(((bits & 0x7fffffU) | 0x800000U) << 5) >> std::min(top - biased, 31);
      return (bits >> 31) != 0 ? -significand : significand;
    };
    return {scaled(a), scaled(b), top - 127 - 28};
  }

  /// first * cos - second * sin, as bits of binary32.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::uint32_t rotated_first(integer_rotation by) const noexcept {
    return detail::to_binary32(std::int64_t{first} * by.cosine - std::int64_t{second} * by.sine, exponent - 30);
  }
  /// first * sin + second * cos, as bits of binary32.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::uint32_t rotated_second(integer_rotation by) const noexcept {
    return detail::to_binary32(std::int64_t{first} * by.sine + std::int64_t{second} * by.cosine, exponent - 30);
  }
};

}  // namespace kvexact

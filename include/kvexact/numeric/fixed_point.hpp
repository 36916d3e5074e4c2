// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include <kvexact/core/config.hpp>

namespace kvexact {

/// True for the bits of a binary32 number that is positive, finite and normal.
[[nodiscard]] constexpr bool is_positive_normal(std::uint32_t bits) noexcept { return bits >= 0x00800000U && bits < 0x7f800000U; }

/// floor(256 * log2(x)) of a positive normal binary32 number given as bits, by repeated squaring of a 32-bit significand (truncated, so
/// it may be one too low right at a step; the same everywhere).
[[nodiscard]] constexpr std::int32_t log2_in_256ths(std::uint32_t bits) noexcept {
  std::uint64_t significand = std::uint64_t{(bits & 0x7fffffU) | 0x800000U} << 8;  // [2^31, 2^32) stands for [1, 2)
  std::int32_t value = static_cast<std::int32_t>(bits >> 23) - 127;
  for (int i = 0; i < 8; ++i) {
    significand = (significand * significand) >> 31;
    const bool above_two = significand >= (std::uint64_t{1} << 32);
    value = value * 2 + (above_two ? 1 : 0);
    significand >>= above_two ? 1 : 0;
  }
  return value;
}

/// Divides binary32 numbers by a fixed one, in integers: the quotient is the product with a 24-bit reciprocal, truncated. Within 2^-22 of
/// the real quotient, not correctly rounded, and the same on every machine. Zero and subnormal numerators give zero, results below the
/// smallest normal number too; too large ones give the largest finite number; infinities and NaNs pass through.
class integer_divider {
 public:
  constexpr integer_divider() noexcept = default;
  /// `divisor`: bits of a positive normal number; anything else divides by 1.
  explicit constexpr integer_divider(std::uint32_t divisor) noexcept {
    if (!is_positive_normal(divisor)) return;
    exponent_ = static_cast<std::int32_t>(divisor >> 23);
    reciprocal_ = static_cast<std::uint32_t>((std::uint64_t{1} << 47) / ((divisor & 0x7fffffU) | 0x800000U));
  }

  [[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::uint32_t operator()(std::uint32_t bits) const noexcept {
    const std::uint32_t sign = bits & 0x80000000U;
    const auto exponent = static_cast<std::int32_t>((bits >> 23) & 0xffU);
    const std::uint64_t product = std::uint64_t{(bits & 0x7fffffU) | 0x800000U} * reciprocal_;
    const auto carry = static_cast<std::uint32_t>(product >> 47);
    const std::uint32_t mantissa = static_cast<std::uint32_t>(product >> (23 + carry)) & 0x7fffffU;
    const std::int32_t result_exponent = exponent - exponent_ + 126 + static_cast<std::int32_t>(carry);
    std::uint32_t result = (static_cast<std::uint32_t>(result_exponent) << 23) | mantissa;
    result = result_exponent >= 255 ? 0x7f7fffffU : result;
    result = exponent == 0 || result_exponent <= 0 ? 0U : result;
    return exponent == 255 ? bits : (sign | result);
  }

 private:
  std::int32_t exponent_ = 127;
  std::uint32_t reciprocal_ = 1U << 24;
};

/// Fixed-point numbers are integers in a unit of 2^unit and lie within +-`largest_fixed`.
inline constexpr std::int32_t largest_fixed = (1 << 30) - 1;

[[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::int32_t saturate_fixed(std::int64_t value) noexcept {
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(value, -largest_fixed, largest_fixed));
}

/// A binary32 number, given as bits, in fixed point: truncated towards zero, saturated; infinities and NaNs give zero.
/// `unit`: -200 to 200.
[[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::int32_t to_fixed(std::uint32_t bits, std::int32_t unit) noexcept {
  const auto biased = static_cast<std::int32_t>((bits >> 23) & 0xffU);
  const std::uint32_t significand = (bits & 0x7fffffU) | (biased != 0 ? 0x800000U : 0U);
  const std::int32_t shift = std::max(biased, 1) - 150 - unit;
  const std::uint32_t up = significand << std::clamp(shift, 0, 6);
  std::uint32_t magnitude = up >> std::clamp(-shift, 0, 31);
  magnitude = shift > 6 && significand != 0 ? static_cast<std::uint32_t>(largest_fixed) : magnitude;
  magnitude = biased == 255 ? 0U : magnitude;
  return (bits >> 31) != 0 ? -static_cast<std::int32_t>(magnitude) : static_cast<std::int32_t>(magnitude);
}

/// The same for the product of two binary32 numbers, both finite.
[[nodiscard]] constexpr std::int32_t product_to_fixed(std::uint32_t a, std::uint32_t b, std::int32_t unit) noexcept {
  const auto biased_a = static_cast<std::int32_t>((a >> 23) & 0xffU);
  const auto biased_b = static_cast<std::int32_t>((b >> 23) & 0xffU);
  const std::uint64_t significand = std::uint64_t{(a & 0x7fffffU) | (biased_a != 0 ? 0x800000U : 0U)} * ((b & 0x7fffffU) | (biased_b != 0 ? 0x800000U : 0U));
  const std::int32_t shift = std::max(biased_a, 1) + std::max(biased_b, 1) - 300 - unit;  // significand < 2^48
  const std::uint64_t magnitude = significand == 0 ? 0 : shift > 15 ? ~std::uint64_t{0} : shift >= 0 ? significand << shift : significand >> std::min(-shift, 63);
  const auto bounded = static_cast<std::int32_t>(std::min<std::uint64_t>(magnitude, static_cast<std::uint64_t>(largest_fixed)));
  return ((a ^ b) >> 31) != 0 ? -bounded : bounded;
}

/// A fixed-point number as bits of binary32, truncated towards zero to 17 to 24 significant bits; zero below the smallest normal number,
/// the largest finite number above. By way of conversions to float that are exact, which vectorise.
[[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::uint32_t from_fixed(std::int32_t value, std::int32_t unit) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(value) & 0x80000000U;
  const std::int32_t magnitude = value < 0 ? -value : value;
  const bool wide = magnitude >= (1 << 24);
  const auto exact = static_cast<float>(wide ? magnitude >> 7 : magnitude);
  const auto bits = std::bit_cast<std::uint32_t>(exact);
  const std::int32_t biased = static_cast<std::int32_t>(bits >> 23) + (wide ? 7 : 0) + unit;
  std::uint32_t out = (static_cast<std::uint32_t>(biased) << 23) | (bits & 0x7fffffU);
  out = biased >= 255 ? 0x7f7fffffU : out;
  out = biased <= 0 || magnitude == 0 ? 0U : out;
  return sign | out;
}

}  // namespace kvexact

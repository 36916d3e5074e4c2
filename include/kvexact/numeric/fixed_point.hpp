// SPDX-License-Identifier: Apache-2.0
#pragma once

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

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace kvexact {

/// How a format spends its top exponent.
enum class float_specials : std::uint8_t {
  ieee,      ///< infinities and NaNs (bf16, fp16, e5m2)
  nan_only,  ///< finite values but for the all-ones pattern, which is NaN; no infinities (OCP e4m3, "e4m3fn")
};

/// A number of at most 16 bits, held as its bits. Sign, then `ExponentBits`, then `MantissaBits`; bias 2^(ExponentBits-1) - 1.
/// Conversions are exact to float and round to nearest even from float, in integers only, so they do not depend on the
/// floating-point environment.
template <int ExponentBits, int MantissaBits, float_specials Specials>
struct small_float {
  static_assert(ExponentBits >= 4 && ExponentBits <= 8 && MantissaBits >= 2 && MantissaBits <= 10 && 1 + ExponentBits + MantissaBits <= 16,
                "kvexact: small_float has 4 to 8 exponent bits, 2 to 10 mantissa bits and at most 16 bits in all");
  static_assert(Specials == float_specials::ieee || ExponentBits < 8, "kvexact: a small_float without infinities must be narrower than float");

  using bits_type = std::conditional_t<(1 + ExponentBits + MantissaBits > 8), std::uint16_t, std::uint8_t>;

  static constexpr int bit_count = 1 + ExponentBits + MantissaBits;
  static constexpr int exponent_bits = ExponentBits;
  static constexpr int mantissa_bits = MantissaBits;
  static constexpr int bias = (1 << (ExponentBits - 1)) - 1;
  static constexpr float_specials specials = Specials;
  /// Exponent of the smallest normal number; the smallest subnormal is 2^(min_exponent - mantissa_bits).
  static constexpr int min_exponent = 1 - bias;
  static constexpr bits_type sign_mask = static_cast<bits_type>(1U << (bit_count - 1));
  static constexpr bits_type magnitude_mask = static_cast<bits_type>(sign_mask - 1U);
  /// Magnitude of the largest finite number; all larger magnitudes are infinite or NaN.
  static constexpr bits_type max_finite =
      static_cast<bits_type>(Specials == float_specials::ieee ? (((1U << ExponentBits) - 1U) << MantissaBits) - 1U : magnitude_mask - 1U);
  static constexpr bits_type quiet_nan =
      static_cast<bits_type>(Specials == float_specials::ieee ? magnitude_mask ^ ((1U << (MantissaBits - 1)) - 1U) : magnitude_mask);

  bits_type bits = 0;

  [[nodiscard]] static constexpr small_float from_bits(bits_type value) noexcept { return {value}; }

  [[nodiscard]] constexpr bool is_finite() const noexcept { return (bits & magnitude_mask) <= max_finite; }
  [[nodiscard]] constexpr bool is_nan() const noexcept {
    return Specials == float_specials::ieee ? (bits & magnitude_mask) > max_finite + 1U : (bits & magnitude_mask) == magnitude_mask;
  }

  /// Exact for every finite value; infinities map to infinities, NaNs to NaNs with the payload in the top mantissa bits.
  [[nodiscard]] constexpr float to_float() const noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & sign_mask) << (32 - bit_count);
    const std::uint32_t magnitude = bits & magnitude_mask;
    if (magnitude > max_finite) {
      const std::uint32_t mantissa = Specials == float_specials::ieee ? magnitude & ((1U << MantissaBits) - 1U) : 1U << (MantissaBits - 1);
      return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << (23 - MantissaBits)));
    }
    if (magnitude == 0) return std::bit_cast<float>(sign);
    if constexpr (ExponentBits < 8) {
      if (magnitude < (1U << MantissaBits)) {  // subnormal here, normal in float
        const int shift = std::countl_zero(magnitude) - (31 - MantissaBits);
        const auto exponent = static_cast<std::uint32_t>(127 + min_exponent - shift);
        const std::uint32_t mantissa = (magnitude << shift) & ((1U << MantissaBits) - 1U);
        return std::bit_cast<float>(sign | (exponent << 23) | (mantissa << (23 - MantissaBits)));
      }
    }
    return std::bit_cast<float>(sign | ((magnitude << (23 - MantissaBits)) + (static_cast<std::uint32_t>(127 - bias) << 23)));
  }

  /// Round to nearest, ties to even. Overflow gives infinity, or NaN where there is none; NaN stays NaN (quiet, payload truncated).
  [[nodiscard]] static constexpr small_float from_float(float value) noexcept {
    const auto source = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<bits_type>((source >> (32 - bit_count)) & sign_mask);
    const std::uint32_t magnitude = source & 0x7fffffffU;
    if (magnitude > 0x7f800000U) {
      const auto payload = Specials == float_specials::ieee ? (magnitude >> (23 - MantissaBits)) & ((1U << MantissaBits) - 1U) : 0U;
      return {static_cast<bits_type>(sign | quiet_nan | payload)};
    }
    const std::uint32_t rounded = round_magnitude(magnitude);
    const std::uint32_t overflow = Specials == float_specials::ieee ? max_finite + 1U : quiet_nan;
    return {static_cast<bits_type>(sign | (rounded > max_finite ? overflow : rounded))};
  }

  /// As `from_float`, but overflow and infinities give the largest finite number; `saturated` counts them.
  template <std::unsigned_integral Counter>
  [[nodiscard]] static constexpr small_float from_float_saturating(float value, Counter& saturated) noexcept {
    const small_float plain = from_float(value);
    if (plain.is_finite() || (std::bit_cast<std::uint32_t>(value) & 0x7fffffffU) > 0x7f800000U) return plain;
    ++saturated;
    return {static_cast<bits_type>((plain.bits & sign_mask) | max_finite)};
  }

 private:
  /// Rounded code of a non-NaN float magnitude; may exceed `max_finite`.
  [[nodiscard]] static constexpr std::uint32_t round_magnitude(std::uint32_t magnitude) noexcept {
    const auto exponent = static_cast<int>(magnitude >> 23);
    const int target = exponent - 127 + bias;
    if (target >= (1 << ExponentBits)) return magnitude_mask;
    std::uint32_t mantissa = magnitude & 0x7fffffU;
    int drop = 23 - MantissaBits;
    std::uint32_t base = 0;
    if (target > 0) {
      base = static_cast<std::uint32_t>(target) << MantissaBits;
    } else {  // subnormal here: the leading one becomes explicit
      if (exponent > 0) mantissa |= 0x800000U;
      drop += exponent > 0 ? 1 - target : -target;
      if (drop > 25) return 0;
    }
    const std::uint32_t half = 1U << (drop - 1);
    const std::uint32_t kept = mantissa >> drop;
    const std::uint32_t rest = mantissa & ((half << 1) - 1U);
    return base + kept + (rest > half || (rest == half && ((base + kept) & 1U)) ? 1U : 0U);
  }
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvexact/core/config.hpp>
#include <kvexact/numeric/fp16.hpp>

namespace kvexact::detail {

/// Scales and offsets are stored as fp16, rounded away from what they must cover, so that values only saturate beyond fp16's range.

/// The smallest fp16 that is not below `value`; the largest finite one at most. `value` is finite.
[[nodiscard]] constexpr fp16 fp16_at_least(float value) noexcept {
  unsigned saturated = 0;
  fp16 near = fp16::from_float_saturating(value, saturated);
  if (near.to_float() >= value || near.bits == fp16::max_finite) return near;
  // One step up: away from 0 above it, towards 0 below it.
  near.bits = static_cast<std::uint16_t>((near.bits & fp16::sign_mask) == 0 ? near.bits + 1U : near.bits - 1U);
  return near;
}
/// The largest fp16 that is not above `value`.
[[nodiscard]] constexpr fp16 fp16_at_most(float value) noexcept {
  const fp16 mirrored = fp16_at_least(-value);
  return fp16::from_bits(static_cast<std::uint16_t>(mirrored.bits ^ fp16::sign_mask));
}

/// Little-endian bytes of the stored numbers.
KVEXACT_ALWAYS_INLINE KVEXACT_HOST_DEVICE void store_fp16(std::byte* at, fp16 value) noexcept {
  at[0] = static_cast<std::byte>(value.bits & 0xff);
  at[1] = static_cast<std::byte>(value.bits >> 8);
}
[[nodiscard]] KVEXACT_ALWAYS_INLINE float load_fp16(const std::byte* at) noexcept {
  return fp16::from_bits(static_cast<std::uint16_t>(static_cast<unsigned>(at[0]) | static_cast<unsigned>(at[1]) << 8)).to_float();
}

/// The nearest integer, ties to even, of |value| < 2^22. Adding and subtracting 1.5 * 2^23 does it in whatever vectors the compiler uses; the
/// argument must come from a division, since a product could be fused with the addition, which would round once instead of twice.
[[nodiscard]] KVEXACT_ALWAYS_INLINE KVEXACT_HOST_DEVICE float round_quotient(float value) noexcept { return (value + 12582912.0F) - 12582912.0F; }

}  // namespace kvexact::detail

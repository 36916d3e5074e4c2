// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <kvexact/core/config.hpp>
#include <kvexact/numeric/fp16.hpp>

#if defined(__CUDACC__) && !defined(__CUDACC_RELAXED_CONSTEXPR__)
#error "kvexact: kernels call constexpr functions of the host: nvcc needs --expt-relaxed-constexpr"
#endif

namespace kvexact::cuda {

/// Channels of a row that a lane has: eight codes of any number of bits are whole bytes, so lanes pack and unpack without each other.
inline constexpr int octet_channels = 8;
/// Most channels of a row, for 32 lanes.
inline constexpr std::uint32_t most_channels = 32 * octet_channels;

/// Eight consecutive channels of a row, those of lane `channel / 8`.
struct octet {
  float v[octet_channels];
};
using octet_codes = std::uint32_t[octet_channels];

/// Products and quotients rounded to float by themselves. nvcc fuses products with additions unless told otherwise, which rounds once
/// instead of twice, and with -prec-div=false does not round quotients to nearest.
[[nodiscard]] KVEXACT_HOST_DEVICE inline float product(float a, float b) noexcept {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
[[nodiscard]] KVEXACT_HOST_DEVICE inline float quotient(float a, float b) noexcept {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

/// `to_float` of a finite number without branches: its exponent and mantissa, read as a float, are off by a power of two. (Subnormal
/// numbers become subnormal floats on the way, so code must not be compiled with -ftz=true.)
template <class Number>
[[nodiscard]] KVEXACT_HOST_DEVICE inline float finite_value(Number number) noexcept {
  if constexpr (std::same_as<Number, float>) {
    return number;
  } else {
    const std::uint32_t magnitude = number.bits & Number::magnitude_mask, sign = number.bits & Number::sign_mask;
    const float rebased = std::bit_cast<float>(static_cast<std::uint32_t>(254 - Number::bias) << 23);  // 2^(127 - bias)
    const float value = std::bit_cast<float>(magnitude << (23 - Number::mantissa_bits)) * rebased;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign << (32 - Number::bit_count));
  }
}
template <class Number>
[[nodiscard]] KVEXACT_HOST_DEVICE inline Number nearest(float value) noexcept {
  if constexpr (std::same_as<Number, float>) {
    return value;
  } else {
    return Number::from_float(value);
  }
}

/// A number of a row, within what `quantised` clips values to.
template <class Number>
[[nodiscard]] KVEXACT_HOST_DEVICE inline float clipped_value(Number number) noexcept {
  constexpr float largest = 1e30F;
  const float value = finite_value(number);
  return value < -largest ? -largest : value > largest ? largest : value;
}
template <class Number>
[[nodiscard]] KVEXACT_HOST_DEVICE inline octet load_octet(const Number* row, int lane) noexcept {
  octet values;
  for (int k = 0; k < octet_channels; ++k) values.v[k] = clipped_value(row[lane * octet_channels + k]);
  return values;
}

[[nodiscard]] KVEXACT_HOST_DEVICE inline float load_scale(const std::byte* at) noexcept {
  return finite_value(fp16::from_bits(static_cast<std::uint16_t>(static_cast<unsigned>(at[0]) | static_cast<unsigned>(at[1]) << 8)));
}

/// The codes of an octet, `Bits` bytes, the first code in the lowest bits of the first byte, as `pack_codes` has them.
template <int Bits>
using octet_word = std::conditional_t<(Bits <= 4), std::uint32_t, std::uint64_t>;

template <int Bits>
KVEXACT_HOST_DEVICE inline void store_codes(const octet_codes& codes, std::byte* at) noexcept {
  octet_word<Bits> word = 0;
  for (int k = 0; k < octet_channels; ++k) word |= static_cast<octet_word<Bits>>(codes[k]) << (k * Bits);
  for (int b = 0; b < Bits; ++b) at[b] = static_cast<std::byte>((word >> (8 * b)) & 0xff);
}
template <int Bits>
KVEXACT_HOST_DEVICE inline void load_codes(const std::byte* at, octet_codes& codes) noexcept {
  octet_word<Bits> word = 0;
  for (int b = 0; b < Bits; ++b) word |= static_cast<octet_word<Bits>>(at[b]) << (8 * b);
  for (int k = 0; k < octet_channels; ++k) codes[k] = static_cast<std::uint32_t>(word >> (k * Bits)) & ((1U << Bits) - 1);
}

}  // namespace kvexact::cuda

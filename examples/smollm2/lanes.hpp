// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include <kvexact/core/config.hpp>

// Sixteen float lanes, whatever the machine: the compiler splits the type where its registers are narrower (only the product loop, where
// the time goes, is written for the registers' own width). Every operation is a single
// IEEE operation per lane and nothing is ever summed across lanes, so results do not depend on the instruction set. Files that use this
// must be compiled with -ffp-contract=off. Vectors pass by reference: by value they would have a calling convention per instruction set.

namespace kvexact::examples::lanes {

inline constexpr std::size_t count = 16;

using f32 = float __attribute__((vector_size(64)));
using i32 = std::int32_t __attribute__((vector_size(64)));
using u32 = std::uint32_t __attribute__((vector_size(64)));
using u16 = std::uint16_t __attribute__((vector_size(32)));

template <class Vector, class T>
KVEXACT_ALWAYS_INLINE void load(Vector& v, const T* from) noexcept {
  static_assert(sizeof(Vector) == count * sizeof(T));
  std::memcpy(&v, from, sizeof v);
}
template <class Vector, class T>
KVEXACT_ALWAYS_INLINE void store(const Vector& v, T* to) noexcept {
  static_assert(sizeof(Vector) == count * sizeof(T));
  std::memcpy(to, &v, sizeof v);
}

/// Vectors of 4, 8 or 16 lanes.
template <std::size_t Lanes>
struct of;
template <>
struct of<4> {
  using f32 = float __attribute__((vector_size(16)));
  using u32 = std::uint32_t __attribute__((vector_size(16)));
  using u16 = std::uint16_t __attribute__((vector_size(8)));
};
template <>
struct of<8> {
  using f32 = float __attribute__((vector_size(32)));
  using u32 = std::uint32_t __attribute__((vector_size(32)));
  using u16 = std::uint16_t __attribute__((vector_size(16)));
};
template <>
struct of<16> {
  using f32 = lanes::f32;
  using u32 = lanes::u32;
  using u16 = lanes::u16;
};

/// bf16 bits -> float, exact.
template <std::size_t Lanes = count>
KVEXACT_ALWAYS_INLINE void load_bf16(typename of<Lanes>::f32& v, const std::uint16_t* from) noexcept {
  typename of<Lanes>::u16 half;
  std::memcpy(&half, from, sizeof half);
  v = (typename of<Lanes>::f32)(__builtin_convertvector(half, typename of<Lanes>::u32) << 16);
}

/// a where the mask (all ones or zero a lane) is set, else b.
KVEXACT_ALWAYS_INLINE void select(f32& out, const i32& mask, const f32& a, const f32& b) noexcept {
  out = (f32)(((u32)a & (u32)mask) | ((u32)b & ~(u32)mask));
}

KVEXACT_ALWAYS_INLINE void maximum(f32& a, const f32& b) noexcept { select(a, b > a, b, a); }

KVEXACT_ALWAYS_INLINE void absolute(f32& out, const f32& v) noexcept { out = (f32)((u32)v & 0x7fffffffU); }

/// Rounds to the nearest bf16, ties to even, as `kvexact::bf16::from_float` does (NaN stays a quiet NaN).
KVEXACT_ALWAYS_INLINE void round_bf16(f32& v) noexcept {
  const u32 bits = (u32)v;
  const u32 rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) & 0xffff0000U;
  const u32 quiet = (bits & 0xffff0000U) | 0x400000U;
  const u32 nan = (u32)((bits & 0x7fffffffU) > 0x7f800000U);
  v = (f32)((quiet & nan) | (rounded & ~nan));
}
/// Bits of a float that is already a bf16 value.
KVEXACT_ALWAYS_INLINE void store_bf16(const f32& v, std::uint16_t* to) noexcept {
  const u16 half = __builtin_convertvector((u32)v >> 16, u16);
  store(half, to);
}

/// The nearest integer, ties to even; |v| < 2^22. The bits of v + shift count on from those of shift.
KVEXACT_ALWAYS_INLINE void nearest_integer(i32& out, const f32& v) noexcept {
  constexpr float shift = 0x1.8p23F;
  out = (i32)(v + shift) - 0x4b400000;
}

/// Rounds to the nearest e4m3 value, ties to even; |v| <= 448.
KVEXACT_ALWAYS_INLINE void round_e4m3(f32& v) noexcept {
  constexpr float shift = 0x1.8p14F;  // floats are spaced 2^-9 there, as subnormal e4m3 values are
  const u32 sign = (u32)v & 0x80000000U;
  const u32 magnitude = (u32)v & 0x7fffffffU;
  const f32 subnormal = ((f32)magnitude + shift) - shift;
  const f32 normal = (f32)((magnitude + 0x7ffffU + ((magnitude >> 20) & 1U)) & 0xfff00000U);
  f32 rounded;
  select(rounded, magnitude < 0x3c800000U, subnormal, normal);  // 2^-6
  v = (f32)((u32)rounded | sign);
}

/// e^v within about 1 ulp; v is clamped to [-87, 88], where the result is a normal number. v = n ln 2 + r, |r| <= ln 2 / 2, e^r by
/// its Taylor polynomial of degree 7 (the next term is below 6e-9).
KVEXACT_ALWAYS_INLINE void exponential(f32& v) noexcept {
  constexpr float shift = 0x1.8p23F;
  f32 x;
  const f32 highest = f32{} + 88.0F, lowest = f32{} - 87.0F;
  select(x, v > highest, highest, v);
  select(x, x < lowest, lowest, x);
  const f32 shifted = x * 0x1.715476p+0F + shift;
  const f32 n = shifted - shift;
  f32 r = x - n * 0x1.62e4p-1F;  // ln 2 in two parts; n times the first is exact
  r = r - n * 0x1.7f7d1cp-20F;
  f32 p = r * (1.0F / 5040) + 1.0F / 720;
  p = p * r + 1.0F / 120;
  p = p * r + 1.0F / 24;
  p = p * r + 1.0F / 6;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const i32 exponent = (i32)shifted - 0x4b400000 + 127;
  v = p * (f32)(exponent << 23);
}

/// Storage aligned to a cache line, so that a vector never straddles two.
template <class T>
struct line_allocator {
  using value_type = T;
  line_allocator() = default;
  template <class U>
  line_allocator(const line_allocator<U>&) noexcept {}
  [[nodiscard]] T* allocate(std::size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, std::size_t) noexcept { ::operator delete (p, std::align_val_t{64}); }
  template <class U>
  bool operator==(const line_allocator<U>&) const noexcept {
    return true;
  }
};
template <class T>
using buffer = std::vector<T, line_allocator<T>>;

}  // namespace kvexact::examples::lanes

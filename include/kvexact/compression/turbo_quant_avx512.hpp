// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/core/config.hpp>
#include <kvexact/core/intrinsics.hpp>

#ifdef KVEXACT_TARGET_AVX512

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvexact::detail {

/// The steps of `turbo_quant` by AVX-512, on registers of 16 channels, with 1 to 4 bits: thresholds and values fit into a register.
struct turbo_quant_avx512 {
  /// Eight sums of squares, those of channels c, c + 8, ...: products are exact, so that fusing them changes nothing.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void squares(const float* vector, std::size_t count, double* sums) noexcept {
    __m512d sum = _mm512_setzero_pd();
    for (std::size_t c = 0; c < count; c += 8) {
      const __m512d values = _mm512_cvtps_pd(_mm256_loadu_ps(vector + c));
      sum = _mm512_fmadd_pd(values, values, sum);
    }
    _mm512_storeu_pd(sums, sum);
  }

  /// Thresholds [2^(Bits-1) - 1] as a binary tree: the root is node 1, and below node n are 2n and 2n + 1.
  template <int Bits>
  [[nodiscard]] KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512 tree(const float* thresholds) noexcept {
    float nodes[16] = {};
    for (std::size_t width = 1, apart = std::size_t{1} << (Bits - 1); apart > 1; width *= 2, apart /= 2)
      for (std::size_t i = 0; i < width; ++i) nodes[width + i] = thresholds[i * apart + apart / 2 - 1];
    return _mm512_loadu_ps(nodes);
  }
  /// Codes of rotated channels: the leaves below `tree` that magnitudes lead to, mirrored for negative ones.
  template <int Bits>
  [[nodiscard]] KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m128i code(__m512 rotated, __m512 tree) noexcept {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512 magnitude = _mm512_abs_ps(rotated);
    __m512i node = one;
    for (int level = 1; level < Bits; ++level) {
      const __mmask16 reached = _mm512_cmp_ps_mask(magnitude, _mm512_permutexvar_ps(node, tree), _CMP_GE_OQ);
      node = _mm512_add_epi32(node, node);
      node = _mm512_mask_add_epi32(node, reached, node, one);
    }
    const __mmask16 negative = _mm512_cmp_ps_mask(rotated, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_cvtepi32_epi8(_mm512_mask_xor_epi32(node, negative, node, _mm512_set1_epi32((1 << Bits) - 1)));
  }

  /// 16 codes to 2 * Bits bytes.
  template <int Bits>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void pack(__m128i codes, std::byte* packed) noexcept {
    const std::uint64_t low = _pext_u64(static_cast<std::uint64_t>(_mm_cvtsi128_si64(codes)), code_bits<Bits>);
    const std::uint64_t high = _pext_u64(static_cast<std::uint64_t>(_mm_extract_epi64(codes, 1)), code_bits<Bits>);
    const std::uint64_t all = high << (8 * Bits) | low;
    std::memcpy(packed, &all, 2 * Bits);
  }
  /// Values of 16 packed codes.
  template <int Bits>
  [[nodiscard]] KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512 look_up(const std::byte* packed, __m512 values) noexcept {
    std::uint64_t all = 0;
    for (int k = 0; k < 2 * Bits; ++k) all |= static_cast<std::uint64_t>(packed[k]) << (8 * k);
    const std::uint64_t low = _pdep_u64(all, code_bits<Bits>), high = _pdep_u64(all >> (8 * Bits), code_bits<Bits>);
    const __m128i codes = _mm_set_epi64x(static_cast<long long>(high), static_cast<long long>(low));
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), values);
  }

 private:
  /// Of eight bytes, the bits that codes take.
  template <int Bits>
  static constexpr std::uint64_t code_bits = ((1U << Bits) - 1) * 0x0101010101010101U;
};

}  // namespace kvexact::detail

#endif

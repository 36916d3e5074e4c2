// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/core/config.hpp>
#include <kvexact/core/intrinsics.hpp>

#ifdef KVEXACT_TARGET_AVX512

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvexact::detail {

/// The loops of `turbo_quant` by AVX-512, for whole registers of 16 channels; what is left over goes the plain way.
struct turbo_quant_avx512 {
  /// Eight partial sums of squares, those of channels c, c + 8, ...: products are exact, so that fusing them changes nothing.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void squares(const float* vector, std::size_t count, double* sums) noexcept {
    __m512d sum = _mm512_loadu_pd(sums);
    for (std::size_t c = 0; c < count; c += 8) {
      const __m512d values = _mm512_cvtps_pd(_mm256_loadu_ps(vector + c));
      sum = _mm512_fmadd_pd(values, values, sum);
    }
    _mm512_storeu_pd(sums, sum);
  }

  /// Codes of rotated channels: how many of `limits` [half - 1] the magnitude reaches, mirrored below 0.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void code(const float* rotated, std::size_t count, const float* limits, int half,
                                                               std::uint8_t* codes) noexcept {
    const __m512i one = _mm512_set1_epi32(1), top = _mm512_set1_epi32(2 * half - 1);
    for (std::size_t c = 0; c < count; c += 16) {
      const __m512 value = _mm512_loadu_ps(rotated + c), magnitude = _mm512_abs_ps(value);
      __m512i found = _mm512_set1_epi32(half);
      for (int k = 0; k + 1 < half; ++k)
        found = _mm512_mask_add_epi32(found, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(limits[k]), _CMP_GE_OQ), found, one);
      found = _mm512_mask_sub_epi32(found, _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_LT_OQ), top, found);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + c), _mm512_cvtepi32_epi8(found));
    }
  }

  /// Codes of 4 bits, two a byte.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void pack_4(const std::uint8_t* codes, std::size_t count, std::byte* packed) noexcept {
    for (std::size_t c = 0; c < count; c += 16) {
      const __m128i pairs = _mm_maddubs_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + c)), _mm_set1_epi16(0x1001));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(packed + c / 2), _mm_cvtepi16_epi8(pairs));
    }
  }

  /// Values of codes below 16, from a table of 16.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void look_up(const std::uint8_t* codes, std::size_t count, const float* table,
                                                                  float* values) noexcept {
    const __m512 all = _mm512_loadu_ps(table);
    for (std::size_t c = 0; c < count; c += 16) {
      const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + c)));
      _mm512_storeu_ps(values + c, _mm512_permutexvar_ps(index, all));
    }
  }
  /// The same from packed codes of 4 bits. Each byte goes to 64 bits: its low half stays below, the high one is brought above.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void look_up_4(const std::byte* packed, std::size_t count, const float* table,
                                                                    float* values) noexcept {
    const __m512 all = _mm512_loadu_ps(table);
    for (std::size_t c = 0; c < count; c += 16) {
      const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(packed + c / 2)));
      const __m512i index = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
      _mm512_storeu_ps(values + c, _mm512_permutexvar_ps(index, all));  // which reads the lowest 4 bits
    }
  }
};

}  // namespace kvexact::detail

#endif

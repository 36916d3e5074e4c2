// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/core/config.hpp>
#include <kvexact/core/intrinsics.hpp>

#ifdef KVEXACT_TARGET_AVX512

#include <cstddef>

namespace kvexact::detail {

/// The Walsh-Hadamard transform of a power of two of at least 16 floats, times `norm`, with the additions and subtractions of the plain one.
/// Signs [size], 1 or -1, may be multiplied with before or after; null for none.
struct hadamard_avx512 {
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void transform(float* vector, std::size_t size, float norm, const float* before,
                                                                    const float* after) noexcept {
    switch (size) {
      case 64: return in_registers<4>(vector, norm, before, after);
      case 128: return in_registers<8>(vector, norm, before, after);
      default: break;
    }
    for (std::size_t c = 0; c < size; c += 16) _mm512_storeu_ps(vector + c, within(signed_by(_mm512_loadu_ps(vector + c), before, c)));
    for (std::size_t half = 16; half < size; half *= 2) {
      for (std::size_t begin = 0; begin < size; begin += 2 * half) {
        for (std::size_t c = begin; c < begin + half; c += 16) {
          const __m512 a = _mm512_loadu_ps(vector + c), b = _mm512_loadu_ps(vector + c + half);
          _mm512_storeu_ps(vector + c, _mm512_add_ps(a, b));
          _mm512_storeu_ps(vector + c + half, _mm512_sub_ps(a, b));
        }
      }
    }
    for (std::size_t c = 0; c < size; c += 16)
      _mm512_storeu_ps(vector + c, signed_by(_mm512_mul_ps(_mm512_loadu_ps(vector + c), _mm512_set1_ps(norm)), after, c));
  }

 private:
  template <std::size_t Registers>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void in_registers(float* vector, float norm, const float* before,
                                                                       const float* after) noexcept {
    __m512 all[Registers];
    for (std::size_t r = 0; r < Registers; ++r) all[r] = within(signed_by(_mm512_loadu_ps(vector + 16 * r), before, 16 * r));
    for (std::size_t half = 1; half < Registers; half *= 2) {
      for (std::size_t r = 0; r < Registers; ++r) {
        if ((r & half) != 0) continue;
        const __m512 a = all[r], b = all[r + half];
        all[r] = _mm512_add_ps(a, b);
        all[r + half] = _mm512_sub_ps(a, b);
      }
    }
    for (std::size_t r = 0; r < Registers; ++r)
      _mm512_storeu_ps(vector + 16 * r, signed_by(_mm512_mul_ps(all[r], _mm512_set1_ps(norm)), after, 16 * r));
  }
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512 signed_by(__m512 x, const float* signs, std::size_t c) noexcept {
    return signs == nullptr ? x : _mm512_mul_ps(x, _mm512_loadu_ps(signs + c));
  }
  /// The four stages of each 16 floats: the upper one of a pair becomes lower minus upper.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512 within(__m512 x) noexcept {
    __m512 other = _mm512_permute_ps(x, 0xb1);
    x = _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xaaaa, other, x);
    other = _mm512_permute_ps(x, 0x4e);
    x = _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xcccc, other, x);
    other = _mm512_shuffle_f32x4(x, x, 0xb1);
    x = _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xf0f0, other, x);
    other = _mm512_shuffle_f32x4(x, x, 0x4e);
    return _mm512_mask_sub_ps(_mm512_add_ps(x, other), 0xff00, other, x);
  }
};

}  // namespace kvexact::detail

#endif

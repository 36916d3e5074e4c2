// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/core/config.hpp>
#include <kvexact/core/intrinsics.hpp>

#ifdef KVEXACT_TARGET_AVX512

#include <cstddef>

namespace kvexact::detail {

/// The Walsh-Hadamard transform of a vector in registers, with the additions and subtractions of the plain one.
struct hadamard_avx512 {
  template <std::size_t Registers>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void transform(__m512* vector, __m512 norm) noexcept {
    for (std::size_t r = 0; r < Registers; ++r) vector[r] = within(vector[r]);
    for (std::size_t half = 1; half < Registers; half *= 2) {
      for (std::size_t r = 0; r < Registers; ++r) {
        if ((r & half) != 0) continue;
        const __m512 a = vector[r], b = vector[r + half];
        vector[r] = _mm512_add_ps(a, b);
        vector[r + half] = _mm512_sub_ps(a, b);
      }
    }
    for (std::size_t r = 0; r < Registers; ++r) vector[r] = _mm512_mul_ps(vector[r], norm);
  }

 private:
  /// The four stages of 16 floats: of each pair, the lower one becomes lower plus upper, the upper one lower minus upper. Products with 1
  /// and -1 are exact, so that fusing them changes nothing.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512 within(__m512 x) noexcept {
    x = _mm512_fmadd_ps(x, minus_where(0xaaaa), _mm512_permute_ps(x, 0xb1));
    x = _mm512_fmadd_ps(x, minus_where(0xcccc), _mm512_permute_ps(x, 0x4e));
    x = _mm512_fmadd_ps(x, minus_where(0xf0f0), _mm512_shuffle_f32x4(x, x, 0xb1));
    return _mm512_fmadd_ps(x, minus_where(0xff00), _mm512_shuffle_f32x4(x, x, 0x4e));
  }
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512 minus_where(__mmask16 upper) noexcept {
    return _mm512_mask_blend_ps(upper, _mm512_set1_ps(1), _mm512_set1_ps(-1));
  }
};

}  // namespace kvexact::detail

#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/bitstream/bit_io.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/core/intrinsics.hpp>

#ifdef KVEXACT_TARGET_AVX512

#include <cstddef>
#include <cstdint>

namespace kvexact::detail {

/// `bit_reader::get_row<32>` by AVX-512, on 16-bit lanes.
struct bit_row_avx512 {
  /// No row may have more bits: those of a register less the seven before the first byte boundary, and a word to be read in pairs.
  static constexpr int most_bits = 512 - 7 - 16;

  /// `counts`: 0 to 16 bits a lane, `most_bits` in all.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512i get(bit_reader& reader, __m512i counts) noexcept {
    const __m512i ends = prefix_sums(counts);
    const auto byte = static_cast<std::size_t>(reader.at_ >> 3);
    const std::size_t size = reader.bytes_.size();
    __m512i window = _mm512_setzero_si512();
    if (byte + 64 <= size) {
      window = _mm512_loadu_si512(reader.bytes_.data() + byte);
    } else if (byte < size) {
      window = _mm512_maskz_loadu_epi8((std::uint64_t{1} << (size - byte)) - 1, reader.bytes_.data() + byte);
    }
    // A lane's bits begin in the word at `begin / 16` and may go on in the next one. Shifts by 16 give zero.
    const __m512i begin = _mm512_add_epi16(_mm512_sub_epi16(ends, counts), _mm512_set1_epi16(static_cast<short>(reader.at_ & 7)));
    const __m512i word = _mm512_srli_epi16(begin, 4);
    const __m512i shift = _mm512_and_si512(begin, _mm512_set1_epi16(15));
    const __m512i low = _mm512_permutexvar_epi16(word, window);
    const __m512i high = _mm512_permutexvar_epi16(_mm512_add_epi16(word, _mm512_set1_epi16(1)), window);
    const __m512i rest = _mm512_sub_epi16(_mm512_set1_epi16(16), shift);
    const __m512i bits = _mm512_or_si512(_mm512_srlv_epi16(low, shift), _mm512_sllv_epi16(high, rest));
    reader.at_ += static_cast<std::uint32_t>(_mm_extract_epi16(_mm512_extracti32x4_epi32(ends, 3), 7));
    return _mm512_andnot_si512(_mm512_sllv_epi16(_mm512_set1_epi16(-1), counts), bits);
  }

 private:
  /// Lane i: the sum of the lanes 0 to i.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512i prefix_sums(__m512i x) noexcept {
    x = _mm512_add_epi16(x, _mm512_bslli_epi128(x, 2));
    x = _mm512_add_epi16(x, _mm512_bslli_epi128(x, 4));
    x = _mm512_add_epi16(x, _mm512_bslli_epi128(x, 8));
    // The last word of each quarter, in all words of the next ones.
    const __m512i last = _mm512_shuffle_epi8(x, _mm512_set1_epi16(0x0f0e));
    __m512i carry = _mm512_maskz_shuffle_i64x2(0xfc, last, last, _MM_SHUFFLE(2, 1, 0, 0));
    carry = _mm512_add_epi16(carry, _mm512_maskz_shuffle_i64x2(0xf0, last, last, _MM_SHUFFLE(1, 0, 0, 0)));
    carry = _mm512_add_epi16(carry, _mm512_maskz_shuffle_i64x2(0xc0, last, last, _MM_SHUFFLE(0, 0, 0, 0)));
    return _mm512_add_epi16(x, carry);
  }
};

}  // namespace kvexact::detail

#endif

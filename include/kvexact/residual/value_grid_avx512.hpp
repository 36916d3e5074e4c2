// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/core/config.hpp>
#include <kvexact/core/intrinsics.hpp>

#ifdef KVEXACT_TARGET_AVX512

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include <kvexact/bitstream/bit_io.hpp>
#include <kvexact/bitstream/bit_row_avx512.hpp>
#include <kvexact/entropy/lanes_avx512.hpp>

namespace kvexact::detail {

/// `value_grid` by AVX-512 for full rows of one channel, on 32 lanes of 16 bits: all cells and codes fit, and what depends on sigma alone
/// is the same in all lanes. `Grid` is a value_grid.
template <class Grid>
class value_grid_avx512 {
 public:
  using format = typename Grid::format;
  using bits_type = typename Grid::bits_type;

  /// What the rows of a channel share.
  struct channel {
    const std::uint16_t* tables;  // of the contexts
    __m512i near_tables;          // linear contexts: by the distance up to 31 cells
    __m512i far_tables;           // 32 to 63 cells
    std::int32_t step;
    std::int32_t sigma_in_quarters;
  };
  /// Lanes of a row.
  struct row {
    __m512i table;
    __m512i cell;
    __m512i sign;
  };

  /// `sigma` as for `prepare`; `tables`: the entropy coder's context for each of the grid's, Grid::contexts of them.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static channel start(std::int32_t sigma, const std::uint16_t* tables) noexcept {
    sigma = std::clamp(sigma, Grid::min_sigma, Grid::max_sigma);
    const std::int32_t step = std::max((sigma >> 8) - Grid::step_log2, Grid::smallest_step);
    const std::int32_t linear_class = std::clamp((sigma - step * 256) >> 6, 0, Grid::linear_classes - 1);
    const __m512i by_distance =
        _mm512_maskz_loadu_epi16((1U << Grid::distances) - 1, tables + Grid::shared_contexts + linear_class * Grid::distances);
    return {tables, _mm512_permutexvar_epi16(_mm512_load_si512(distance_classes.data()), by_distance),
            _mm512_permutexvar_epi16(_mm512_load_si512(distance_classes.data() + 32), by_distance), step, sigma >> 6};
  }

  /// The twin of Grid::prepare, with the table of each lane in place of its context.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static row prepare(const channel& in, const std::uint32_t* means) noexcept {
    const __m512i low_bits = _mm512_loadu_si512(means);
    const __m512i high_bits = _mm512_loadu_si512(means + 16);
    const split_mean low = split(low_bits);
    const split_mean high = split(high_bits);
    const __mmask32 nonzero = _mm512_kunpackw(high.nonzero, low.nonzero);
    const __m512i sign = _mm512_and_si512(join_halves<1>(low_bits, high_bits), set(0x8000));
    const __m512i code = join_halves<0>(_mm512_srli_epi32(low.code_and_eighths, 3), _mm512_srli_epi32(high.code_and_eighths, 3));
    const __m512i eighths = _mm512_and_si512(join_halves<0>(low.code_and_eighths, high.code_and_eighths), set(7));

    const __m512i mantissa = _mm512_and_si512(code, set(mantissa_mask));
    const __m512i biased = _mm512_srli_epi16(code, mantissa_bits);
    const __m512i significand = _mm512_mask_add_epi16(mantissa, _mm512_test_epi16_mask(biased, biased), mantissa, set(1 << mantissa_bits));
    const __m512i ulp = _mm512_add_epi16(_mm512_max_epi16(biased, set(1)), set(Grid::smallest_step - 1));
    const __mmask32 linear = _mm512_cmple_epi16_mask(ulp, set(in.step));
    const __m512i linear_cell = _mm512_srlv_epi16(significand, _mm512_sub_epi16(set(in.step), ulp));
    const __m512i coarse_cell = _mm512_sub_epi16(code, set((in.step - Grid::smallest_step) * (1 << mantissa_bits)));

    row out;
    out.sign = _mm512_srli_epi16(_mm512_maskz_mov_epi16(nonzero, sign), 16 - format::bit_count);
    out.cell = _mm512_mask_mov_epi16(coarse_cell, linear, linear_cell);
    const __m512i distance = _mm512_min_epi16(_mm512_sub_epi16(set(Grid::first_coarse_cell), linear_cell), set(63));
    out.table = _mm512_permutex2var_epi16(in.near_tables, distance, in.far_tables);
    // The others by their class: a row has one or two.
    alignas(64) std::array<std::int16_t, 32> ulps;
    _mm512_store_si512(ulps.data(), ulp);
    const __m512i context = _mm512_add_epi16(place_of(mantissa), eighths);
    for (std::uint32_t rest = ~linear; rest != 0;) {
      const std::int32_t one = ulps[static_cast<std::size_t>(std::countr_zero(rest))];
      const __mmask32 alike = _mm512_mask_cmpeq_epi16_mask(rest, ulp, set(one));
      const std::int32_t unbounded = in.sigma_in_quarters - 4 * one + Grid::value_class_of_one;
      const std::int32_t value_class = std::clamp(unbounded, 0, Grid::value_classes - 1);
      const std::uint16_t* const tables = in.tables + value_class * (Grid::places * Grid::offsets);
      const __m512i table = _mm512_permutex2var_epi16(_mm512_loadu_si512(tables), context, _mm512_loadu_si512(tables + 32));
      out.table = _mm512_mask_mov_epi16(out.table, alike, table);
      rest &= ~alike;
    }
    return out;
  }

  /// The twin of Grid::decode.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void decode(const channel& in, const row& of, __m512i symbols, bit_reader& reader,
                                                                 bits_type* values) noexcept {
    const __m512i signed_cell = _mm512_add_epi16(_mm512_sub_epi16(symbols, set(Grid::zero_symbol)), of.cell);
    const __m512i cell = _mm512_xor_si512(signed_cell, _mm512_srai_epi16(signed_cell, 15));
    const __mmask32 linear = _mm512_cmplt_epi16_mask(cell, set(Grid::first_coarse_cell));
    const __mmask32 escaped = _mm512_cmpeq_epi16_mask(symbols, set(Grid::escape_symbol));
    const __mmask32 apart = escaped | _mm512_testn_epi16_mask(cell, cell);
    const __m512i octave = octave_of(cell);
    const __m512i count =
        _mm512_maskz_min_epi16(linear, _mm512_sub_epi16(set(mantissa_bits), octave), set(in.step - Grid::smallest_step));
    const __m512i binades_up = _mm512_max_epi16(_mm512_add_epi16(octave, set(in.step - format::min_exponent)), set(0));
    const __m512i coarse_start = set((in.step - Grid::smallest_step) * (1 << mantissa_bits));
    const __m512i above = _mm512_mask_slli_epi16(coarse_start, linear, binades_up, mantissa_bits);
    const __m512i code = _mm512_add_epi16(_mm512_sllv_epi16(cell, count), above);
    const __m512i below_zero = _mm512_srli_epi16(_mm512_and_si512(signed_cell, set(0x8000)), 16 - format::bit_count);
    const __m512i sign = _mm512_xor_si512(below_zero, of.sign);
    const __m512i raw = bit_row_avx512::get(reader, _mm512_maskz_mov_epi16(~apart, count));
    const __m512i magnitude = _mm512_or_si512(_mm512_and_si512(code, set(format::magnitude_mask)), raw);
    const __m512i value = _mm512_or_si512(magnitude, sign);
    if constexpr (sizeof(bits_type) == 2) {
      _mm512_storeu_si512(values, value);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), _mm512_cvtepi16_epi8(value));
    }
    for (std::uint32_t rest = apart; rest != 0; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if (((escaped >> i) & 1) != 0) {
        values[i] = static_cast<bits_type>(reader.get(format::bit_count));
      } else {
        values[i] = static_cast<bits_type>((values[i] & format::sign_mask) | Grid::get_near_zero(reader, in.step));
      }
    }
  }

 private:
  static constexpr int mantissa_bits = format::mantissa_bits;
  static constexpr int mantissa_mask = (1 << mantissa_bits) - 1;
  static_assert(Grid::places * Grid::offsets == 64);
  static_assert(32 * mantissa_bits <= bit_row_avx512::most_bits);

  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512i set(int value) noexcept {
    return _mm512_set1_epi16(static_cast<short>(value));
  }

  /// The distance class of each number of cells from 0 to 63.
  alignas(64) static constexpr std::array<std::uint16_t, 64> distance_classes = [] {
    std::array<std::uint16_t, 64> classes{};
    for (std::size_t cells = 0; cells < classes.size(); ++cells)
      classes[cells] = static_cast<std::uint16_t>(Grid::distance_class(static_cast<std::int32_t>(cells)));
    return classes;
  }();

  /// Of 16 means.
  struct split_mean {
    __m512i code_and_eighths;  // the format's value at or below the magnitude, and what is left in eighths of an ulp, in the lowest 3 bits
    __mmask16 nonzero;
  };
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static split_mean split(__m512i bits) noexcept {
    __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    magnitude = _mm512_maskz_mov_epi32(_mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(0x7f800000)), magnitude);
    const __mmask16 nonzero = _mm512_test_epi32_mask(magnitude, magnitude);
    magnitude = _mm512_min_epu32(magnitude, _mm512_set1_epi32(static_cast<int>(Grid::largest_mean)));
    if constexpr (format::min_exponent == -126) {  // binary32 with a shorter mantissa
      return {_mm512_srli_epi32(magnitude, 20 - mantissa_bits), nonzero};
    } else {
      const __m512i biased = _mm512_srli_epi32(magnitude, 23);
      // Subnormal numbers of binary32 are far below an eighth of any ulp here: an implied bit too many does not show.
      const __m512i significand = _mm512_or_si512(_mm512_and_si512(magnitude, _mm512_set1_epi32(0x7fffff)), _mm512_set1_epi32(0x800000));
      const __m512i binade = _mm512_max_epi32(biased, _mm512_set1_epi32(format::min_exponent + 127));
      const __m512i drop = _mm512_add_epi32(_mm512_sub_epi32(binade, biased), _mm512_set1_epi32(20 - mantissa_bits));
      const __m512i kept = _mm512_srlv_epi32(significand, drop);
      const __m512i binades_up = _mm512_sub_epi32(binade, _mm512_set1_epi32(format::min_exponent + 127));
      return {_mm512_add_epi32(kept, _mm512_slli_epi32(binades_up, mantissa_bits + 3)), nonzero};
    }
  }

  /// Grid::place_class times Grid::offsets.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512i place_of(__m512i mantissa) noexcept {
    if constexpr ((1 << mantissa_bits) <= Grid::places) {
      return _mm512_slli_epi16(mantissa, std::countr_zero(unsigned{Grid::offsets}));
    } else {
      // The ends of a binade in steps of one, and all between as one.
      constexpr int bottom = 8;
      constexpr int top = (1 << mantissa_bits) - 16;
      alignas(64) static constexpr std::array<std::uint16_t, 32> places = [] {
        std::array<std::uint16_t, 32> all{};
        for (int i = 0; i < bottom + 16; ++i) {
          const std::int32_t place = Grid::place_class(i <= bottom ? i : i - bottom + top);
          all[static_cast<std::size_t>(i)] = static_cast<std::uint16_t>(Grid::offsets * place);
        }
        return all;
      }();
      const __m512i index = _mm512_add_epi16(_mm512_min_epu16(mantissa, set(bottom)), _mm512_subs_epu16(mantissa, set(top)));
      return _mm512_permutexvar_epi16(index, _mm512_load_si512(places.data()));
    }
  }

  /// Grid::octave_of for cells below Grid::first_coarse_cell, from tables of the halves of a byte.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512i octave_of(__m512i cell) noexcept {
    const __m512i of_low = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m512i of_high = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7));
    const __m512i low = _mm512_shuffle_epi8(of_low, _mm512_and_si512(cell, set(0x0f0f)));
    const __m512i high = _mm512_shuffle_epi8(of_high, _mm512_and_si512(_mm512_srli_epi16(cell, 4), set(0x0f0f)));
    const __m512i octaves = _mm512_max_epu8(low, high);  // of each byte
    if constexpr (Grid::first_coarse_cell <= 256) {
      return octaves;
    } else {
      const __m512i of_upper_byte = _mm512_add_epi16(_mm512_srli_epi16(octaves, 8), set(8));
      return _mm512_mask_mov_epi16(octaves, _mm512_cmpgt_epi16_mask(cell, set(255)), of_upper_byte);
    }
  }
};

}  // namespace kvexact::detail

#endif

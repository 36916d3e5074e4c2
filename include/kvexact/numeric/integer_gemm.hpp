// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <kvexact/core/config.hpp>
#include <kvexact/core/intrinsics.hpp>

namespace kvexact {

namespace detail {

/// 4 x 2 dot products at once: six loads for eight vector multiplications, and the sums fit the 16 registers of SSE2 and AVX2. `sums`
/// is [row][column]. All additions are modulo 2^32, as those of the instructions.
struct gemm_tile {
  static constexpr std::size_t rows = 4;
  static constexpr std::size_t columns = 2;
  using rows_of_a = std::array<const std::int16_t*, rows>;
  using rows_of_b = std::array<const std::int16_t*, columns>;
  using sums_type = std::array<std::int32_t, rows * columns>;
  using row_indices = std::make_index_sequence<rows>;

  [[nodiscard]] KVEXACT_ALWAYS_INLINE static constexpr std::int32_t add(std::int32_t x, std::int32_t y) noexcept {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(x) + static_cast<std::uint32_t>(y));
  }

  /// Adds the products at the depths [first, depth) to `sums`.
  KVEXACT_ALWAYS_INLINE static void add_products(const rows_of_a& a, const rows_of_b& b, std::size_t first, std::size_t depth,
                                                 sums_type& sums) noexcept {
    for (std::size_t k = first; k < depth; ++k) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = add(sums[i], a[i / columns][k] * b[i % columns][k]);
    }
  }

  KVEXACT_ALWAYS_INLINE static void multiply(const rows_of_a& a, const rows_of_b& b, std::size_t depth, sums_type& sums) noexcept {
    sums.fill(0);
    add_products(a, b, 0, depth, sums);
  }
};

#ifdef KVEXACT_TARGET_AVX512

// Rows are written out by a pack of their numbers, because compilers do not unroll loops over them at every level of optimisation; and
// `multiply` is not inlined, because g++ 12 then runs out of registers.

struct gemm_tile_sse2 : gemm_tile {
  KVEXACT_NO_INLINE static void multiply(const rows_of_a& a, const rows_of_b& b, std::size_t depth, sums_type& sums) noexcept {
    const std::size_t done = multiply(a, b, depth, sums, row_indices{});
    gemm_tile::add_products(a, b, done, depth, sums);
  }

 private:
  template <std::size_t... I>
  KVEXACT_ALWAYS_INLINE static std::size_t multiply(const rows_of_a& a, const rows_of_b& b, std::size_t depth, sums_type& sums,
                                                    std::index_sequence<I...>) noexcept {
    __m128i left[]{((void)I, _mm_setzero_si128())...};
    __m128i right[]{((void)I, _mm_setzero_si128())...};
    std::size_t k = 0;
    for (; k + 8 <= depth; k += 8) {
      const __m128i b0 = load(b[0] + k);
      const __m128i b1 = load(b[1] + k);
      (add_row(load(a[I] + k), b0, b1, left[I], right[I]), ...);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums.data()), sum_each(left[0], right[0], left[1], right[1]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums.data() + 4), sum_each(left[2], right[2], left[3], right[3]));
    return k;
  }
  KVEXACT_ALWAYS_INLINE static void add_row(__m128i row, __m128i b0, __m128i b1, __m128i& left, __m128i& right) noexcept {
    left = _mm_add_epi32(left, _mm_madd_epi16(row, b0));
    right = _mm_add_epi32(right, _mm_madd_epi16(row, b1));
  }
  KVEXACT_ALWAYS_INLINE static __m128i load(const std::int16_t* from) noexcept {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  /// The sums of four vectors.
  KVEXACT_ALWAYS_INLINE static __m128i sum_each(__m128i x, __m128i y, __m128i z, __m128i w) noexcept {
    const __m128i xy = _mm_add_epi32(_mm_unpacklo_epi32(x, y), _mm_unpackhi_epi32(x, y));
    const __m128i zw = _mm_add_epi32(_mm_unpacklo_epi32(z, w), _mm_unpackhi_epi32(z, w));
    return _mm_add_epi32(_mm_unpacklo_epi64(xy, zw), _mm_unpackhi_epi64(xy, zw));
  }
};

struct gemm_tile_avx2 : gemm_tile {
  [[gnu::target("avx2,bmi,bmi2")]] KVEXACT_NO_INLINE static void multiply(const rows_of_a& a, const rows_of_b& b, std::size_t depth,
                                                                          sums_type& sums) noexcept {
    const std::size_t done = multiply(a, b, depth, sums, row_indices{});
    gemm_tile::add_products(a, b, done, depth, sums);
  }

 private:
  template <std::size_t... I>
  [[gnu::target("avx2,bmi,bmi2")]] KVEXACT_ALWAYS_INLINE static std::size_t multiply(const rows_of_a& a, const rows_of_b& b,
                                                                                     std::size_t depth, sums_type& sums,
                                                                                     std::index_sequence<I...>) noexcept {
    __m256i left[]{((void)I, _mm256_setzero_si256())...};
    __m256i right[]{((void)I, _mm256_setzero_si256())...};
    std::size_t k = 0;
    for (; k + 16 <= depth; k += 16) {
      const __m256i b0 = load(b[0] + k);
      const __m256i b1 = load(b[1] + k);
      (add_row(load(a[I] + k), b0, b1, left[I], right[I]), ...);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums.data()), sum_each(left[0], right[0], left[1], right[1]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums.data() + 4), sum_each(left[2], right[2], left[3], right[3]));
    return k;
  }
  [[gnu::target("avx2,bmi,bmi2")]] KVEXACT_ALWAYS_INLINE static void add_row(__m256i row, __m256i b0, __m256i b1, __m256i& left,
                                                                             __m256i& right) noexcept {
    left = _mm256_add_epi32(left, _mm256_madd_epi16(row, b0));
    right = _mm256_add_epi32(right, _mm256_madd_epi16(row, b1));
  }
  [[gnu::target("avx2,bmi,bmi2")]] KVEXACT_ALWAYS_INLINE static __m256i load(const std::int16_t* from) noexcept {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  [[gnu::target("avx2,bmi,bmi2")]] KVEXACT_ALWAYS_INLINE static __m128i sum_each(__m256i x, __m256i y, __m256i z, __m256i w) noexcept {
    const __m256i xy = _mm256_add_epi32(_mm256_unpacklo_epi32(x, y), _mm256_unpackhi_epi32(x, y));
    const __m256i zw = _mm256_add_epi32(_mm256_unpacklo_epi32(z, w), _mm256_unpackhi_epi32(z, w));
    const __m256i halves = _mm256_add_epi32(_mm256_unpacklo_epi64(xy, zw), _mm256_unpackhi_epi64(xy, zw));
    return _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  }
};

struct gemm_tile_avx512 : gemm_tile {
  KVEXACT_TARGET_AVX512 KVEXACT_NO_INLINE static void multiply(const rows_of_a& a, const rows_of_b& b, std::size_t depth,
                                                               sums_type& sums) noexcept {
    multiply(a, b, depth, sums, row_indices{});
  }

 private:
  template <std::size_t... I>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void multiply(const rows_of_a& a, const rows_of_b& b, std::size_t depth,
                                                                   sums_type& sums, std::index_sequence<I...>) noexcept {
    // The depths that fill no vector come first, so that nothing follows the loop: g++ 12 then keeps the sums in place.
    const std::size_t head = depth % 32;
    const __mmask32 first = (std::uint32_t{1} << head) - 1;
    const __m512i first0 = _mm512_maskz_loadu_epi16(first, b[0]);
    const __m512i first1 = _mm512_maskz_loadu_epi16(first, b[1]);
    __m512i left[]{_mm512_madd_epi16(_mm512_maskz_loadu_epi16(first, a[I]), first0)...};
    __m512i right[]{_mm512_madd_epi16(_mm512_maskz_loadu_epi16(first, a[I]), first1)...};
    for (std::size_t k = head; k < depth; k += 32) {
      const __m512i b0 = _mm512_loadu_si512(b[0] + k);
      const __m512i b1 = _mm512_loadu_si512(b[1] + k);
      (add_row(_mm512_loadu_si512(a[I] + k), b0, b1, left[I], right[I]), ...);
    }
    const __m512i low = sum_quarters(left[0], right[0], left[1], right[1]);
    const __m512i high = sum_quarters(left[2], right[2], left[3], right[3]);
    // Even quarters of both plus odd quarters of both; then each pair of what is left.
    const __m512i halves = _mm512_add_epi32(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xdd));
    const __m512i all = _mm512_add_epi32(halves, _mm512_shuffle_i32x4(halves, halves, 0xb1));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums.data()), _mm512_castsi512_si256(_mm512_shuffle_i32x4(all, all, 0x08)));
  }
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static void add_row(__m512i row, __m512i b0, __m512i b1, __m512i& left,
                                                                  __m512i& right) noexcept {
    left = _mm512_add_epi32(left, _mm512_madd_epi16(row, b0));
    right = _mm512_add_epi32(right, _mm512_madd_epi16(row, b1));
  }
  /// The sums of four vectors, each still in four parts, one in each quarter.
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512i sum_quarters(__m512i x, __m512i y, __m512i z, __m512i w) noexcept {
    const __m512i xy = _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
    const __m512i zw = _mm512_add_epi32(_mm512_unpacklo_epi32(z, w), _mm512_unpackhi_epi32(z, w));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(xy, zw), _mm512_unpackhi_epi64(xy, zw));
  }
};

#endif

}  // namespace detail

/// Product of a matrix of 16-bit integers and the transpose of another one, added to a matrix of 32-bit integers; a kernel for `run_on`:
///
///     out[i * out_stride + j] += sum over k < depth of a[i * a_stride + k] * b[j * b_stride + k],   i < rows, j < columns
///
/// Exact as long as the result fits 32 bits, which it does from zero if depth * max|a| * max|b| < 2^31 (so factors of at most 127 allow
/// depths up to 133144); beyond that it wraps modulo 2^32. Strides count elements. Neither alignment nor padding is needed, and nothing
/// outside the rows is read. Rows are multiplied by fours and columns by pairs, and an incomplete group takes as long as a full one. The
/// result is the same for every instruction set.
struct integer_gemm {
  KVEXACT_ALWAYS_INLINE static void run(const std::int16_t* a, std::size_t a_stride, std::size_t rows, const std::int16_t* b,
                                        std::size_t b_stride, std::size_t columns, std::size_t depth, std::int32_t* out,
                                        std::size_t out_stride) noexcept {
#ifdef KVEXACT_TARGET_AVX512
    multiply<detail::gemm_tile_sse2>(a, a_stride, rows, b, b_stride, columns, depth, out, out_stride);
#else
    multiply<detail::gemm_tile>(a, a_stride, rows, b, b_stride, columns, depth, out, out_stride);
#endif
  }

#ifdef KVEXACT_TARGET_AVX512
  [[gnu::target("avx2,bmi,bmi2")]] static void run_avx2(const std::int16_t* a, std::size_t a_stride, std::size_t rows,
                                                        const std::int16_t* b, std::size_t b_stride, std::size_t columns, std::size_t depth,
                                                        std::int32_t* out, std::size_t out_stride) noexcept {
    multiply<detail::gemm_tile_avx2>(a, a_stride, rows, b, b_stride, columns, depth, out, out_stride);
  }
  KVEXACT_TARGET_AVX512 static void run_avx512(const std::int16_t* a, std::size_t a_stride, std::size_t rows, const std::int16_t* b,
                                               std::size_t b_stride, std::size_t columns, std::size_t depth, std::int32_t* out,
                                               std::size_t out_stride) noexcept {
    multiply<detail::gemm_tile_avx512>(a, a_stride, rows, b, b_stride, columns, depth, out, out_stride);
  }
#endif

 private:
  /// Depths at a time: the rows of a tile stay in the first-level cache, the matrix b mostly in the second.
  static constexpr std::size_t depth_at_once = 2048;

  template <class Tile>
  KVEXACT_ALWAYS_INLINE static void multiply(const std::int16_t* a, std::size_t a_stride, std::size_t rows, const std::int16_t* b,
                                             std::size_t b_stride, std::size_t columns, std::size_t depth, std::int32_t* out,
                                             std::size_t out_stride) noexcept {
    for (std::size_t k = 0; k < depth; k += depth_at_once) {
      const std::size_t depths = std::min(depth_at_once, depth - k);
      for (std::size_t i = 0; i < rows; i += Tile::rows) {
        // Tiles beyond the edge repeat the last row or column, and those sums are dropped.
        const std::size_t tile_rows = std::min(Tile::rows, rows - i);
        typename Tile::rows_of_a tile_a;
        for (std::size_t r = 0; r < Tile::rows; ++r) tile_a[r] = a + (i + std::min(r, tile_rows - 1)) * a_stride + k;
        for (std::size_t j = 0; j < columns; j += Tile::columns) {
          const std::size_t tile_columns = std::min(Tile::columns, columns - j);
          typename Tile::rows_of_b tile_b;
          for (std::size_t c = 0; c < Tile::columns; ++c) tile_b[c] = b + (j + std::min(c, tile_columns - 1)) * b_stride + k;
          typename Tile::sums_type sums;
          Tile::multiply(tile_a, tile_b, depths, sums);
          for (std::size_t r = 0; r < tile_rows; ++r) {
            for (std::size_t c = 0; c < tile_columns; ++c) {
              std::int32_t& sum = out[(i + r) * out_stride + j + c];
              sum = Tile::add(sum, sums[r * Tile::columns + c]);
            }
          }
        }
      }
    }
  }
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include <kvexact/core/intrinsics.hpp>

#include "instruction_set.hpp"
#include "lanes.hpp"

// The arithmetic of a transformer layer. Two layouts:
//   tile    [k][16] floats: 16 rows side by side, one row a lane. Whatever works along a row (norms, groups, softmax) is vertical.
//   panel   [k][16] bf16: 16 outputs of a weight matrix side by side.
//   pairs   [k / 2][16] words: either of the two, of integers, two neighbours of k in a word.
// A product is a tile times a panel, summed over k one after the other from zero, multiplication and addition rounded separately. Every
// output is thus one fixed sequence of operations, however many rows are computed together.

namespace kvexact::examples::kernels {

using lanes::f32;
using lanes::i32;
inline constexpr std::size_t width = lanes::count;
/// Channels that are rotated together, and that share one scale (integers: at most that many).
inline constexpr std::size_t block = 64;

/// How a tile or a panel is quantised.
enum class quantisation : std::uint8_t {
  none,          ///< bf16
  e4m3,          ///< fp8 values times amax / 448 of each block
  int8,          ///< integers of [-127, 127] times amax / 127 of each group of 64 or 32
  rotated_int8,  ///< the same after an orthonormal Hadamard rotation of each block
};

template <std::size_t Lanes, bool Continued, std::size_t... Row>
KVEXACT_ALWAYS_INLINE void multiply_rows(const float* x, const std::uint16_t* w, std::size_t w_stride, std::size_t k, float* sums,
                                         std::index_sequence<Row...>) noexcept {
  using vector = typename lanes::of<Lanes>::f32;
  vector sum[sizeof...(Row)] = {};
  if constexpr (Continued) (std::memcpy(&sum[Row], sums + Row * width, sizeof(vector)), ...);
  for (std::size_t i = 0; i < k; ++i, x += width, w += w_stride) {
    vector weight;
    lanes::load_bf16<Lanes>(weight, w);
    ((sum[Row] += x[Row] * weight), ...);
  }
  (std::memcpy(sums + Row * width, &sum[Row], sizeof(vector)), ...);
}

/// sums[row][lane] = sum over k of x[k][row] * w[k][lane], for `rows` rows and 16 lanes; continued: what is there plus that sum.
template <class Isa, bool Continued = false>
KVEXACT_ALWAYS_INLINE void multiply(const float* x, const std::uint16_t* w, std::size_t w_stride, std::size_t k, std::size_t rows,
                                    float* sums) noexcept {
  constexpr std::size_t lanes = Isa::register_lanes;
  for (std::size_t part = 0; part < width; part += lanes) {
    std::size_t row = 0;
    for (; row + Isa::rows <= rows; row += Isa::rows) {
      multiply_rows<lanes, Continued>(x + row, w + part, w_stride, k, sums + row * width + part, std::make_index_sequence<Isa::rows>{});
    }
    for (; row + 4 <= rows; row += 4) {
      multiply_rows<lanes, Continued>(x + row, w + part, w_stride, k, sums + row * width + part, std::make_index_sequence<4>{});
    }
    for (; row < rows; ++row) {
      multiply_rows<lanes, Continued>(x + row, w + part, w_stride, k, sums + row * width + part, std::make_index_sequence<1>{});
    }
  }
}

/// sums += part * (row scale * lane scale), for `rows` rows of 16 lanes.
template <class T>
KVEXACT_ALWAYS_INLINE void add_scaled(float* sums, const T* part, const float* row_scales, const float* lane_scales,
                                      std::size_t rows) noexcept {
  f32 scale;
  lanes::load(scale, lane_scales);
  for (std::size_t row = 0; row < rows; ++row) {
    T values __attribute__((vector_size(sizeof(T) * width)));
    f32 sum;
    lanes::load(values, part + row * width);
    lanes::load(sum, sums + row * width);
    sum += __builtin_convertvector(values, f32) * (row_scales[row] * scale);
    lanes::store(sum, sums + row * width);
  }
}

// sums[row][lane] = sum over k of x[k][row] * w[k][lane] of integers, for `rows` rows and 16 lanes. Two neighbours of k travel as the
// 16-bit halves of a 32-bit word, because processors multiply such halves and add the two products in one instruction. These functions are
// called from kernels, not inlined into them: intrinsics may only be inlined into functions of their own instruction set.

inline void multiply_pairs(examples::detail::baseline_registers, const std::int32_t* x, const std::int32_t* w, std::size_t pairs,
                           std::size_t rows, std::int32_t* sums) noexcept {
  for (std::size_t row = 0; row < rows; ++row) {
    i32 sum{};
    for (std::size_t k = 0; k < pairs; ++k) {
      i32 weights;
      lanes::load(weights, w + k * width);
      const std::int32_t pair = x[k * width + row], low = static_cast<std::int16_t>(pair), high = pair >> 16;
      sum += (weights << 16 >> 16) * low + (weights >> 16) * high;
    }
    lanes::store(sum, sums + row * width);
  }
}

#if defined(__x86_64__)
template <std::size_t... Row>
[[gnu::target("avx2")]] void multiply_pairs_avx2(const std::int32_t* x, const std::int32_t* w, std::size_t pairs, std::int32_t* sums,
                                                 std::index_sequence<Row...>) noexcept {
  __m256i sum[sizeof...(Row)] = {};
  for (std::size_t k = 0; k < pairs; ++k, x += width, w += width) {
    const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    ((sum[Row] = _mm256_add_epi32(sum[Row], _mm256_madd_epi16(_mm256_set1_epi32(x[Row]), weights))), ...);
  }
  (_mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + Row * width), sum[Row]), ...);
}

inline void multiply_pairs(examples::detail::avx2_registers, const std::int32_t* x, const std::int32_t* w, std::size_t pairs,
                           std::size_t rows, std::int32_t* sums) noexcept {
  for (std::size_t part = 0; part < width; part += 8) {
    std::size_t row = 0;
    for (; row + 8 <= rows; row += 8) {
      multiply_pairs_avx2(x + row, w + part, pairs, sums + row * width + part, std::make_index_sequence<8>{});
    }
    for (; row < rows; ++row) multiply_pairs_avx2(x + row, w + part, pairs, sums + row * width + part, std::make_index_sequence<1>{});
  }
}

template <std::size_t... Row>
[[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void multiply_pairs_avx512(const std::int32_t* x, const std::int32_t* w,
                                                                                 std::size_t pairs, std::int32_t* sums,
                                                                                 std::index_sequence<Row...>) noexcept {
  __m512i sum[sizeof...(Row)] = {};
  for (std::size_t k = 0; k < pairs; ++k, x += width, w += width) {
    const __m512i weights = _mm512_loadu_si512(w);
    ((sum[Row] = _mm512_add_epi32(sum[Row], _mm512_madd_epi16(_mm512_set1_epi32(x[Row]), weights))), ...);
  }
  (_mm512_storeu_si512(sums + Row * width, sum[Row]), ...);
}

inline void multiply_pairs(examples::detail::avx512_registers, const std::int32_t* x, const std::int32_t* w, std::size_t pairs,
                           std::size_t rows, std::int32_t* sums) noexcept {
  std::size_t row = 0;
  for (; row + 16 <= rows; row += 16) multiply_pairs_avx512(x + row, w, pairs, sums + row * width, std::make_index_sequence<16>{});
  for (; row + 4 <= rows; row += 4) multiply_pairs_avx512(x + row, w, pairs, sums + row * width, std::make_index_sequence<4>{});
  for (; row < rows; ++row) multiply_pairs_avx512(x + row, w, pairs, sums + row * width, std::make_index_sequence<1>{});
}
#endif

/// Linear layer: out[row][output] = sum over k of x[row][k] * w[output][k], not rounded beyond float. With scales, each group is summed
/// alone, then multiplied by the product of its two scales and added.
struct linear {
  const float* x;          ///< tiles [ceil(rows / 16)][k][16]
  const float* x_scales;   ///< [ceil(rows / 16)][k / 64][16], or null
  const std::uint16_t* w;  ///< panels [outputs / 16][k][16]
  const float* w_scales;   ///< [outputs / 16][k / 64][16], or null
  std::size_t rows, k, outputs;
  float* out;  ///< [rows][outputs]

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    const std::size_t groups = k / block;
    for (std::size_t panel = 0; panel < outputs / width; ++panel) {
      const std::uint16_t* const weights = w + panel * k * width;
      for (std::size_t first = 0; first < rows; first += width) {
        const std::size_t count = rows - first < width ? rows - first : width;
        const float* const tile = x + first * k;
        alignas(64) float sums[width * width] = {};
        if (x_scales == nullptr) {
          multiply<Isa>(tile, weights, width, k, count, sums);
        } else {
          for (std::size_t g = 0; g < groups; ++g) {
            alignas(64) float part[width * width];
            multiply<Isa>(tile + g * block * width, weights + g * block * width, width, block, count, part);
            add_scaled(sums, part, x_scales + (first * groups + g * width), w_scales + (panel * groups + g) * width, count);
          }
        }
        for (std::size_t row = 0; row < count; ++row) {
          std::memcpy(out + (first + row) * outputs + panel * width, sums + row * width, width * sizeof(float));
        }
      }
    }
  }
};

/// Linear layer of integers: each group of int8 values is summed as integers, then multiplied by the product of its two scales and added,
/// in float. A group's sum is at most 64 * 127^2 < 2^24 in size, so every way to compute it gives the same bits, in float as well.
struct integer_linear {
  const std::int32_t* x;  ///< pairs [ceil(rows / 16)][k / 2][16]
  const float* x_scales;  ///< [ceil(rows / 16)][k / group][16]
  const std::int32_t* w;  ///< pairs [outputs / 16][k / 2][16]
  const float* w_scales;  ///< [outputs / 16][k / group][16]
  std::size_t rows, k, outputs, group;
  float* out;  ///< [rows][outputs]

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    const std::size_t groups = k / group, pairs = group / 2;
    for (std::size_t panel = 0; panel < outputs / width; ++panel) {
      for (std::size_t first = 0; first < rows; first += width) {
        const std::size_t count = rows - first < width ? rows - first : width;
        alignas(64) float sums[width * width] = {};
        for (std::size_t g = 0; g < groups; ++g) {
          alignas(64) std::int32_t part[width * width];
          const std::int32_t* const tile = x + first * k / 2 + g * pairs * width;
          const std::int32_t* const weights = w + panel * width * k / 2 + g * pairs * width;
          multiply_pairs(Isa{}, tile, weights, pairs, count, part);
          add_scaled(sums, part, x_scales + (first * groups + g * width), w_scales + (panel * groups + g) * width, count);
        }
        for (std::size_t row = 0; row < count; ++row) {
          std::memcpy(out + (first + row) * outputs + panel * width, sums + row * width, width * sizeof(float));
        }
      }
    }
  }
};

/// Walsh-Hadamard transform of 64 vectors, orthonormal: additions and subtractions in a fixed order and an exact scaling by 1/8.
KVEXACT_ALWAYS_INLINE void rotate(f32* v) noexcept {
  for (std::size_t half = 1; half < block; half *= 2) {
    for (std::size_t first = 0; first < block; first += 2 * half) {
      for (std::size_t i = first; i < first + half; ++i) {
        const f32 a = v[i], b = v[i + half];
        v[i] = a + b;
        v[i + half] = a - b;
      }
    }
  }
  for (std::size_t i = 0; i < block; ++i) v[i] *= 0.125F;
}

/// What `n` vectors are to be divided by so that they come to at most `largest`: amax / largest, never 0.
KVEXACT_ALWAYS_INLINE void scale_of(f32& scale, const f32* v, std::size_t n, float largest) noexcept {
  scale = f32{} + 1e-12F;
  for (std::size_t i = 0; i < n; ++i) {
    f32 magnitude;
    lanes::absolute(magnitude, v[i]);
    lanes::maximum(scale, magnitude);
  }
  scale = scale / largest;
}

/// Quantises a tile to e4m3 in place, block by block; `scales` [k / 64][16] are what the values are to be multiplied with.
struct quantise_e4m3 {
  float* tile;
  float* scales;
  std::size_t k;

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    for (std::size_t b = 0; b < k / block; ++b) {
      f32 v[block], scale;
      for (std::size_t i = 0; i < block; ++i) lanes::load(v[i], tile + (b * block + i) * width);
      scale_of(scale, v, block, 448);
      for (std::size_t i = 0; i < block; ++i) {
        v[i] = v[i] / scale;
        lanes::round_e4m3(v[i]);
        lanes::store(v[i], tile + (b * block + i) * width);
      }
      lanes::store(scale, scales + b * width);
    }
  }
};

/// Quantises a tile to integers, group by group, rotating each block first if asked to. `pairs` [k / 2][16]: two neighbours as the halves
/// of a word, the first one low; `scales` [k / group][16]: what the integers are to be multiplied with. `group` divides 64 and is even.
struct quantise_int8 {
  const float* tile;
  std::int32_t* pairs;
  float* scales;
  std::size_t k, group;
  bool rotated;

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    for (std::size_t first = 0; first < k; first += block) {
      f32 v[block];
      for (std::size_t i = 0; i < block; ++i) lanes::load(v[i], tile + (first + i) * width);
      if (rotated) rotate(v);
      for (std::size_t begin = 0; begin < block; begin += group) {
        f32 scale;
        scale_of(scale, v + begin, group, 127);
        for (std::size_t i = begin; i < begin + group; i += 2) {
          i32 low, high;
          lanes::nearest_integer(low, v[i] / scale);
          lanes::nearest_integer(high, v[i + 1] / scale);
          lanes::store((low & 0xffff) | (high << 16), pairs + (first + i) / 2 * width);
        }
        lanes::store(scale, scales + (first + begin) / group * width);
      }
    }
  }
};

/// A matrix with one scale per block, e4m3: tile / scale, rounded. `scales` as `quantise` leaves them.
struct quantise_e4m3_by {
  float* tile;
  const float* scales;
  std::size_t k;

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    for (std::size_t i = 0; i < k; ++i) {
      f32 v, scale;
      lanes::load(v, tile + i * width);
      lanes::load(scale, scales + i / block * width);
      v = v / scale;
      lanes::round_e4m3(v);
      lanes::store(v, tile + i * width);
    }
  }
};

/// RMS norm of a tile in place: bf16(bf16(x / sqrt(mean(x^2) + epsilon)) * gain); x and gain are bf16 values.
struct rms_norm {
  float* tile;
  const float* gain;  ///< [k]
  std::size_t k;
  float epsilon;

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    f32 squares{};
    for (std::size_t i = 0; i < k; ++i) {
      f32 v;
      lanes::load(v, tile + i * width);
      squares += v * v;
    }
    float roots[width];
    lanes::store(squares / static_cast<float>(k) + epsilon, roots);
    for (float& root : roots) root = std::sqrt(root);  // correctly rounded, as IEEE demands
    f32 factor;
    lanes::load(factor, roots);
    factor = 1.0F / factor;
    for (std::size_t i = 0; i < k; ++i) {
      f32 v;
      lanes::load(v, tile + i * width);
      v *= factor;
      lanes::round_bf16(v);
      v *= gain[i];
      lanes::round_bf16(v);
      lanes::store(v, tile + i * width);
    }
  }
};

/// Rounds `n` floats to bf16 values in place; `n` is a multiple of 16.
struct round_all {
  float* values;
  std::size_t n;

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    for (std::size_t i = 0; i < n; i += width) {
      f32 v;
      lanes::load(v, values + i);
      lanes::round_bf16(v);
      lanes::store(v, values + i);
    }
  }
};

/// The gate of the feed-forward part, in place of `gate`: bf16(bf16(silu(bf16(gate))) * bf16(up)); `n` is a multiple of 16.
struct gated_silu {
  float* gate;
  const float* up;
  std::size_t n;

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    for (std::size_t i = 0; i < n; i += width) {
      f32 g, u;
      lanes::load(g, gate + i);
      lanes::load(u, up + i);
      lanes::round_bf16(g);
      lanes::round_bf16(u);
      f32 e = -g;
      lanes::exponential(e);
      f32 v = g / (1.0F + e);
      lanes::round_bf16(v);
      v *= u;
      lanes::round_bf16(v);
      lanes::store(v, gate + i);
    }
  }
};

/// Residual connection: hidden = bf16(hidden + bf16(sum)); `n` is a multiple of 16.
struct add_residual {
  std::uint16_t* hidden;
  const float* sums;
  std::size_t n;

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    for (std::size_t i = 0; i < n; i += width) {
      f32 h, v;
      lanes::load_bf16(h, hidden + i);
      lanes::load(v, sums + i);
      lanes::round_bf16(v);
      v = h + v;
      lanes::round_bf16(v);
      lanes::store_bf16(v, hidden + i);
    }
  }
};

/// Attention of up to 16 queries that share a KV head, one a lane. A query at position t sees the keys 0 to t or, if `newest` is not 0,
/// those of them that are below `sinks` or above t - newest; what lies elsewhere may be anything finite, and most of it is not even read.
/// Scores in float, softmax rounded to bf16, then the sum over the values in the order of the keys. (A key that is read but not seen adds
/// a zero to sums that are never -0, so that a query's result does not depend on its neighbours.)
struct attention {
  const std::uint16_t* queries;  ///< panel [head_dim][16]
  std::size_t query_count;
  const std::int32_t* positions;  ///< [16], at least 0, ascending; lanes from query_count on as any other
  std::size_t sinks, newest;
  const float* key_tiles;       ///< [tiles][head_dim][16], keys side by side
  const std::uint16_t* values;  ///< [keys][value_stride]
  std::size_t value_stride, head_dim;
  float* scratch;  ///< [tiles * 16][16]
  float* out;      ///< [16][head_dim]

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    const float root = std::sqrt(static_cast<float>(head_dim));
    const std::size_t keys = static_cast<std::size_t>(positions[width - 1]) + 1, before = static_cast<std::size_t>(positions[0]) + 1;
    i32 position;
    lanes::load(position, positions);
    i32 oldest{};
    std::size_t window_begin = 0, sinks_end = 0;  // what is seen lies in tiles below sinks_end or from window_begin on
    if (newest != 0 && newest < keys) {
      oldest = position - static_cast<std::int32_t>(newest - 1);
      window_begin = before > newest ? (before - newest) / width * width : 0;
      sinks_end = sinks < window_begin ? (sinks + width - 1) / width * width : window_begin;
    }
    const std::size_t ranges[2][2] = {{0, sinks_end}, {window_begin, keys}};

    f32 largest = f32{} - HUGE_VALF;
    for (const auto& [begin, end] : ranges) {
      for (std::size_t first = begin; first < end; first += width) {
        alignas(64) float scores[width * width];
        multiply<Isa>(key_tiles + first * head_dim, queries, width, head_dim, width, scores);
        for (std::size_t i = 0; i < width; ++i) {
          f32 score;
          i32 seen;
          lanes::load(score, scores + i * width);
          see(seen, first + i, position, oldest);
          score /= root;
          lanes::select(score, seen, score, f32{} - HUGE_VALF);
          lanes::maximum(largest, score);
          lanes::store(score, scratch + (first + i) * width);
        }
      }
    }
    f32 sum{};
    for (const auto& [begin, end] : ranges) {
      for (std::size_t key = begin; key < end; ++key) {
        f32 p;
        i32 seen;
        lanes::load(p, scratch + key * width);
        see(seen, key, position, oldest);
        p -= largest;
        lanes::exponential(p);
        lanes::select(p, seen, p, f32{});
        sum += p;
        lanes::store(p, scratch + key * width);
      }
    }
    for (const auto& [begin, end] : ranges) {
      for (std::size_t key = begin; key < end; ++key) {
        f32 p;
        lanes::load(p, scratch + key * width);
        p /= sum;
        lanes::round_bf16(p);
        lanes::store(p, scratch + key * width);
      }
    }
    for (std::size_t part = 0; part < head_dim; part += width) {
      alignas(64) float sums[width * width] = {};
      for (const auto& [begin, end] : ranges) {
        multiply<Isa, true>(scratch + begin * width, values + begin * value_stride + part, value_stride, end - begin, query_count, sums);
      }
      for (std::size_t query = 0; query < query_count; ++query) {
        std::memcpy(out + query * head_dim + part, sums + query * width, width * sizeof(float));
      }
    }
  }

 private:
  KVEXACT_ALWAYS_INLINE void see(i32& seen, std::size_t key, const i32& position, const i32& oldest) const noexcept {
    const auto k = static_cast<std::int32_t>(key);
    seen = position >= k;
    if (key >= sinks) seen &= oldest <= k;
  }
};

}  // namespace kvexact::examples::kernels

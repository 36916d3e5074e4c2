// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "lanes.hpp"

// The arithmetic of a transformer layer. Two layouts:
//   tile    [k][16] floats: 16 rows side by side, one row a lane. Whatever works along a row (norms, groups, softmax) is vertical.
//   panel   [k][16] bf16: 16 outputs of a weight matrix side by side.
// A product is a tile times a panel, summed over k one after the other from zero, multiplication and addition rounded separately. Every
// output is thus one fixed sequence of operations, however many rows are computed together.

namespace kvexact::examples::kernels {

using lanes::f32;
using lanes::i32;
inline constexpr std::size_t width = lanes::count;
/// Channels that share one scale in the quantised engines.
inline constexpr std::size_t group = 64;

/// How a tile or a panel is quantised.
enum class quantisation : std::uint8_t {
  none,          ///< bf16
  e4m3,          ///< fp8 values times amax / 448 of each group
  int8,          ///< integers of [-127, 127] times amax / 127 of each group
  rotated_int8,  ///< the same after an orthonormal Hadamard rotation of each group
};

template <std::size_t Lanes, std::size_t... Row>
KVEXACT_ALWAYS_INLINE void multiply_rows(const float* x, const std::uint16_t* w, std::size_t w_stride, std::size_t k, float* sums,
                                         std::index_sequence<Row...>) noexcept {
  using vector = typename lanes::of<Lanes>::f32;
  vector sum[sizeof...(Row)] = {};
  for (std::size_t i = 0; i < k; ++i, x += width, w += w_stride) {
    vector weight;
    lanes::load_bf16<Lanes>(weight, w);
    ((sum[Row] += x[Row] * weight), ...);
  }
  (std::memcpy(sums + Row * width, &sum[Row], sizeof(vector)), ...);
}

/// sums[row][lane] = sum over k of x[k][row] * w[k][lane], for `rows` rows and 16 lanes.
template <class Isa>
KVEXACT_ALWAYS_INLINE void multiply(const float* x, const std::uint16_t* w, std::size_t w_stride, std::size_t k, std::size_t rows,
                                    float* sums) noexcept {
  constexpr std::size_t lanes = Isa::register_lanes;
  for (std::size_t part = 0; part < width; part += lanes) {
    std::size_t row = 0;
    for (; row + Isa::rows <= rows; row += Isa::rows) {
      multiply_rows<lanes>(x + row, w + part, w_stride, k, sums + row * width + part, std::make_index_sequence<Isa::rows>{});
    }
    for (; row + 4 <= rows; row += 4) {
      multiply_rows<lanes>(x + row, w + part, w_stride, k, sums + row * width + part, std::make_index_sequence<4>{});
    }
    for (; row < rows; ++row) {
      multiply_rows<lanes>(x + row, w + part, w_stride, k, sums + row * width + part, std::make_index_sequence<1>{});
    }
  }
}

/// Linear layer: out[row][output] = sum over k of x[row][k] * w[output][k], not rounded beyond float. With scales, each group is summed
/// alone (for integers that sum is exact), then multiplied by the product of its two scales and added.
struct linear {
  const float* x;          ///< tiles [ceil(rows / 16)][k][16]
  const float* x_scales;   ///< [ceil(rows / 16)][k / 64][16], or null
  const std::uint16_t* w;  ///< panels [outputs / 16][k][16]
  const float* w_scales;   ///< [outputs / 16][k / 64][16], or null
  std::size_t rows, k, outputs;
  float* out;  ///< [rows][outputs]

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    const std::size_t groups = k / group;
    for (std::size_t panel = 0; panel < outputs / width; ++panel) {
      const std::uint16_t* const weights = w + panel * k * width;
      for (std::size_t first = 0; first < rows; first += width) {
        const std::size_t count = rows - first < width ? rows - first : width;
        const float* const tile = x + first * k;
        alignas(64) float sums[width * width];
        if (x_scales == nullptr) {
          multiply<Isa>(tile, weights, width, k, count, sums);
        } else {
          const float* const tile_scales = x_scales + first * groups;
          const float* const panel_scales = w_scales + panel * groups * width;
          for (std::size_t g = 0; g < groups; ++g) {
            alignas(64) float part[width * width];
            multiply<Isa>(tile + g * group * width, weights + g * group * width, width, group, count, part);
            f32 weight_scale;
            lanes::load(weight_scale, panel_scales + g * width);
            for (std::size_t row = 0; row < count; ++row) {
              f32 sum{}, term;
              if (g != 0) lanes::load(sum, sums + row * width);
              lanes::load(term, part + row * width);
              sum += term * (tile_scales[g * width + row] * weight_scale);
              lanes::store(sum, sums + row * width);
            }
          }
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
  for (std::size_t half = 1; half < group; half *= 2) {
    for (std::size_t block = 0; block < group; block += 2 * half) {
      for (std::size_t i = block; i < block + half; ++i) {
        const f32 a = v[i], b = v[i + half];
        v[i] = a + b;
        v[i + half] = a - b;
      }
    }
  }
  for (std::size_t i = 0; i < group; ++i) v[i] *= 0.125F;
}

/// Quantises a tile in place, group by group: values become e4m3 values or integers, `scales` [k / 64][16] what they are to be
/// multiplied with.
struct quantise {
  quantisation kind;
  float* tile;
  float* scales;
  std::size_t k;

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    if (kind == quantisation::none) return;
    const f32 smallest = f32{} + 1e-12F;
    const float largest = kind == quantisation::e4m3 ? 448.0F : 127.0F;
    for (std::size_t g = 0; g < k / group; ++g) {
      f32 v[group], amax = smallest;
      for (std::size_t i = 0; i < group; ++i) lanes::load(v[i], tile + (g * group + i) * width);
      if (kind == quantisation::rotated_int8) rotate(v);
      for (std::size_t i = 0; i < group; ++i) {
        f32 magnitude;
        lanes::absolute(magnitude, v[i]);
        lanes::maximum(amax, magnitude);
      }
      const f32 scale = amax / largest;
      for (std::size_t i = 0; i < group; ++i) {
        v[i] = v[i] / scale;
        if (kind == quantisation::e4m3) {
          lanes::round_e4m3(v[i]);
        } else {
          lanes::round_integer(v[i]);
        }
        lanes::store(v[i], tile + (g * group + i) * width);
      }
      lanes::store(scale, scales + g * width);
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
      lanes::load(scale, scales + i / group * width);
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

/// Attention of up to 16 queries that share a KV head, one a lane. A query sees the keys 0 to `last`; what lies behind may be anything
/// finite. Scores in float, softmax rounded to bf16, then the sum over the values in the order of the keys.
struct attention {
  const std::uint16_t* queries;  ///< panel [head_dim][16]
  std::size_t query_count;
  const std::int32_t* last;     ///< [16] newest position seen, at least 0; lanes from query_count on as any other
  std::size_t keys;             ///< 1 + the largest `last`
  const float* key_tiles;       ///< [ceil(keys / 16)][head_dim][16], keys side by side
  const std::uint16_t* values;  ///< [keys][value_stride]
  std::size_t value_stride, head_dim;
  float* scratch;  ///< [ceil(keys / 16) * 16][16]
  float* out;      ///< [16][head_dim]

  template <class Isa>
  KVEXACT_ALWAYS_INLINE void run() const noexcept {
    const float root = std::sqrt(static_cast<float>(head_dim));
    i32 newest;
    lanes::load(newest, last);
    f32 largest = f32{} - HUGE_VALF;
    for (std::size_t first = 0; first < keys; first += width) {
      alignas(64) float scores[width * width];
      multiply<Isa>(key_tiles + first * head_dim, queries, width, head_dim, width, scores);
      for (std::size_t i = 0; i < width; ++i) {
        f32 score, visible;
        lanes::load(score, scores + i * width);
        score /= root;
        lanes::select(visible, newest >= static_cast<std::int32_t>(first + i), score, f32{} - HUGE_VALF);
        lanes::maximum(largest, visible);
        lanes::store(score, scratch + (first + i) * width);
      }
    }
    f32 sum{};
    for (std::size_t key = 0; key < keys; ++key) {
      f32 p;
      lanes::load(p, scratch + key * width);
      p -= largest;
      lanes::exponential(p);
      lanes::select(p, newest >= static_cast<std::int32_t>(key), p, f32{});
      sum += p;
      lanes::store(p, scratch + key * width);
    }
    for (std::size_t key = 0; key < keys; ++key) {
      f32 p;
      lanes::load(p, scratch + key * width);
      p /= sum;
      lanes::round_bf16(p);
      lanes::store(p, scratch + key * width);
    }
    for (std::size_t part = 0; part < head_dim; part += width) {
      alignas(64) float sums[width * width];
      multiply<Isa>(scratch, values + part, value_stride, keys, query_count, sums);
      for (std::size_t query = 0; query < query_count; ++query) {
        std::memcpy(out + query * head_dim + part, sums + query * width, width * sizeof(float));
      }
    }
  }
};

}  // namespace kvexact::examples::kernels

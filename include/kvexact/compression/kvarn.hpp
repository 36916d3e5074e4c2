// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <kvexact/compression/asymmetric.hpp>
#include <kvexact/compression/packed_codes.hpp>
#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/rotation.hpp>
#include <kvexact/compression/scale.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// KVarN (arXiv 2606.03458): a tile of `group_tokens` tokens is rotated along its channels, then channels and tokens are scaled in turns until
/// all have nearly the same standard deviation, then rounded asymmetrically: keys channel by channel, values token by token. Stored are the
/// codes, an fp16 step and offset for each channel of keys or token of values, and an fp16 scale for each token of keys or channel of values:
/// Bits + 32 / group_tokens + 16 / dim bits a value for keys, Bits + 32 / dim + 16 / group_tokens for values.
///
/// Tiles are brought to one root mean square first, the middle of the published limits of the scales, which would make small tiles pass
/// unchanged. Within a tile the limits hold: a token or channel some 170 times quieter than the rest is not scaled up to it.
template <int Bits, cache_part Part>
class kvarn {
  static_assert(Bits >= 1 && Bits <= 8, "kvexact: kvarn has 1 to 8 bits");

 public:
  struct options {
    std::uint32_t group_tokens = 128;
    std::uint32_t iterations = 8;  ///< of normalisation, 0 to 64: the best one counts
    bool rotated = true;
    std::uint64_t seed = 1;
  };

  [[nodiscard]] static result<kvarn> make(std::uint32_t heads, std::uint32_t dim, const options& chosen = {}) noexcept {
    if (heads == 0 || dim < 2) return error{error_code::invalid_argument, "kvarn needs heads and two channels"};
    if (chosen.group_tokens < 2 || chosen.group_tokens > 1U << 16)
      return error{error_code::invalid_argument, "a tile of kvarn has 2 to 65536 tokens"};
    if (chosen.iterations > 64) return error{error_code::invalid_argument, "kvarn has at most 64 iterations"};
    auto rotation = orthonormal_rotation::make(dim, {.rounds = 1, .seed = chosen.seed});
    if (!rotation) return rotation.error();
    return kvarn(chosen, *std::move(rotation));
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return rotation_.dim(); }
  [[nodiscard]] std::uint32_t group_tokens() const noexcept { return options_.group_tokens; }
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return codes_bytes() + 4 * lines() + 2 * crossings(); }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return tile_size() + 5 * std::size_t{dim()} + 4 * std::size_t{group_tokens()} + (tile_size() + 3) / 4; }

  std::uint64_t pack(std::uint32_t, std::span<const float> values, std::span<std::byte> packed, std::span<float> scratch) const noexcept {
    std::uint64_t saturated = 0;
    for (std::size_t tile = 0; tile * tile_size() < values.size(); ++tile)
      pack_tile(values.subspan(tile * tile_size(), tile_size()), packed.data() + tile * packed_bytes(), scratch, saturated);
    return saturated;
  }

  void unpack(std::uint32_t, std::span<const std::byte> packed, std::span<float> values, std::span<float> scratch) const noexcept {
    for (std::size_t tile = 0; tile * tile_size() < values.size(); ++tile) {
      const std::byte* const from = packed.data() + tile * packed_bytes();
      float* const to = values.data() + tile * tile_size();
      run_on<unpack_kernel>(best_instruction_set(), *this, from, to);
      if (!options_.rotated) continue;
      for (std::size_t t = 0; t < group_tokens(); ++t) rotation_.backward(to + t * dim(), scratch.data());
    }
  }

  /// Products and sums are those of rotated vectors.
  [[nodiscard]] std::size_t working_floats() const noexcept { return dim(); }
  void prepare(std::uint32_t, std::span<const float> query, std::span<float> prepared, std::span<float> scratch) const noexcept {
    std::copy(query.begin(), query.end(), prepared.begin());
    if (options_.rotated) rotation_.forward(prepared.data(), scratch.data());
  }
  void dot(std::span<const float> prepared, std::span<const std::byte> packed, std::span<float> scores) const noexcept {
    run_on<dot_kernel>(best_instruction_set(), *this, prepared.data(), packed.data(), scores.data());
  }
  void add_weighted(std::span<const float> weights, std::span<const std::byte> packed, std::span<float> sums) const noexcept {
    run_on<add_kernel>(best_instruction_set(), *this, weights.data(), packed.data(), sums.data());
  }
  void finish(std::uint32_t, float, std::span<const float> sums, std::span<float> out, std::span<float> scratch) const noexcept {
    std::copy(sums.begin(), sums.begin() + dim(), out.begin());
    if (options_.rotated) rotation_.backward(out.data(), scratch.data());
  }

 private:
  using affine = detail::affine<Bits>;
  static constexpr bool by_channel = Part == cache_part::key;
  static constexpr float tile_rms = 128;

  kvarn(const options& chosen, orthonormal_rotation rotation) noexcept : options_(chosen), rotation_(std::move(rotation)) {}

  /// A line is what is rounded together: a channel of keys, a token of values. A crossing is what crosses all lines: the other one.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t lines() const noexcept { return by_channel ? dim() : group_tokens(); }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t crossings() const noexcept { return by_channel ? group_tokens() : dim(); }
  [[nodiscard]] std::size_t at(std::size_t line, std::size_t crossing) const noexcept {
    return by_channel ? crossing * dim() + line : line * dim() + crossing;
  }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t tile_size() const noexcept { return std::size_t{group_tokens()} * dim(); }
  /// Each token's codes start at a byte.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t row_bytes() const noexcept { return detail::packed_code_bytes(dim(), Bits); }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t codes_bytes() const noexcept { return row_bytes() * group_tokens(); }

  /// Of a line, and the scale of a crossing.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE float step_of(const std::byte* packed, std::size_t line) const noexcept {
    return detail::load_fp16(packed + codes_bytes() + 4 * line);
  }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE float offset_of(const std::byte* packed, std::size_t line) const noexcept {
    return detail::load_fp16(packed + codes_bytes() + 4 * line + 2);
  }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE float scale_of(const std::byte* packed, std::size_t crossing) const noexcept {
    return detail::load_fp16(packed + codes_bytes() + 4 * lines() + 2 * crossing);
  }

  /// The kernels go over a run of channels at a time, for which they keep what belongs to channels, and over all tokens within.
  static constexpr std::size_t run_channels = 64;
  struct channel_terms {
    float factor[run_channels], offset[run_channels];  // of keys: step and offset; of values: scale, and nothing
  };
  KVEXACT_ALWAYS_INLINE void load_terms(const std::byte* packed, std::size_t begin, std::size_t count, channel_terms& terms) const noexcept {
    for (std::size_t i = 0; i < count; ++i) {
      terms.factor[i] = by_channel ? step_of(packed, begin + i) : scale_of(packed, begin + i);
      terms.offset[i] = by_channel ? offset_of(packed, begin + i) : 0;
    }
  }
  KVEXACT_ALWAYS_INLINE void load_codes(const std::byte* packed, std::size_t token, std::size_t begin, std::size_t count,
                                        std::uint8_t* codes) const noexcept {
    detail::unpack_codes<Bits>(packed + token * row_bytes() + begin * Bits / 8, count, codes);
  }

  struct unpack_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const kvarn& by, const std::byte* packed, float* to) noexcept {
      for (std::size_t begin = 0; begin < by.dim(); begin += run_channels) {
        const std::size_t count = by.dim() - begin < run_channels ? by.dim() - begin : run_channels;
        channel_terms terms;
        by.load_terms(packed, begin, count, terms);
        for (std::size_t t = 0; t < by.group_tokens(); ++t) {
          std::uint8_t codes[run_channels];
          by.load_codes(packed, t, begin, count, codes);
          float* const row = to + t * by.dim() + begin;
          if constexpr (by_channel) {
            const float scale = by.scale_of(packed, t);
            for (std::size_t i = 0; i < count; ++i) row[i] = (static_cast<float>(codes[i]) * terms.factor[i] + terms.offset[i]) * scale;
          } else {
            const float step = by.step_of(packed, t), offset = by.offset_of(packed, t);
            for (std::size_t i = 0; i < count; ++i) row[i] = (static_cast<float>(codes[i]) * step + offset) * terms.factor[i];
          }
        }
      }
    }
  };
  struct dot_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const kvarn& by, const float* prepared, const std::byte* packed, float* scores) noexcept {
      for (std::size_t t = 0; t < by.group_tokens(); ++t) scores[t] = 0;
      for (std::size_t begin = 0; begin < by.dim(); begin += run_channels) {
        const std::size_t count = by.dim() - begin < run_channels ? by.dim() - begin : run_channels;
        channel_terms terms;
        by.load_terms(packed, begin, count, terms);
        float scaled[run_channels], base = 0;
        for (std::size_t i = 0; i < count; ++i) {
          scaled[i] = prepared[begin + i] * terms.factor[i];
          base += by_channel ? prepared[begin + i] * terms.offset[i] : scaled[i];
        }
        for (std::size_t t = 0; t < by.group_tokens(); ++t) {
          std::uint8_t codes[run_channels];
          by.load_codes(packed, t, begin, count, codes);
          float sum = 0;
          for (std::size_t i = 0; i < count; ++i) sum += scaled[i] * static_cast<float>(codes[i]);
          scores[t] += by_channel ? (sum + base) * by.scale_of(packed, t) : sum * by.step_of(packed, t) + base * by.offset_of(packed, t);
        }
      }
    }
  };
  struct add_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const kvarn& by, const float* weights, const std::byte* packed, float* sums) noexcept {
      for (std::size_t begin = 0; begin < by.dim(); begin += run_channels) {
        const std::size_t count = by.dim() - begin < run_channels ? by.dim() - begin : run_channels;
        float sum[run_channels] = {}, total = 0;
        for (std::size_t t = 0; t < by.group_tokens(); ++t) {
          std::uint8_t codes[run_channels];
          by.load_codes(packed, t, begin, count, codes);
          const float weight = weights[t] * (by_channel ? by.scale_of(packed, t) : by.step_of(packed, t));
          total += by_channel ? weight : weights[t] * by.offset_of(packed, t);
          for (std::size_t i = 0; i < count; ++i) sum[i] += weight * static_cast<float>(codes[i]);
        }
        channel_terms terms;
        by.load_terms(packed, begin, count, terms);
        for (std::size_t i = 0; i < count; ++i)
          sums[begin + i] += by_channel ? sum[i] * terms.factor[i] + total * terms.offset[i] : (sum[i] + total) * terms.factor[i];
      }
    }
  };

  /// Standard deviations (unbiased) of the tile's lines or crossings, each value times the two scales.
  void deviations(const float* tile, std::span<const float> line_scales, std::span<const float> crossing_scales, bool of_lines,
                  std::span<float> out) const noexcept {
    const std::size_t count = of_lines ? lines() : crossings(), length = of_lines ? crossings() : lines();
    for (std::size_t i = 0; i < count; ++i) {
      double sum = 0, squares = 0;
      for (std::size_t j = 0; j < length; ++j) {
        const std::size_t line = of_lines ? i : j, crossing = of_lines ? j : i;
        const auto value = static_cast<double>(tile[at(line, crossing)] / (line_scales[line] * crossing_scales[crossing]));
        sum += value;
        squares += value * value;
      }
      const auto n = static_cast<double>(length);
      out[i] = static_cast<float>(std::sqrt(std::max(0.0, (squares - sum * sum / n) / (n - 1))));
    }
  }
  [[nodiscard]] static float spread(std::span<const float> deviations) noexcept {
    const auto [least, most] = std::minmax_element(deviations.begin(), deviations.end());
    return *most / std::max(*least, 1e-12F);
  }

  void pack_tile(std::span<const float> values, std::byte* packed, std::span<float> scratch, std::uint64_t& saturated) const noexcept {
    const auto take = [&](std::size_t count) {
      const auto taken = scratch.first(count);
      scratch = scratch.subspan(count);
      return taken;
    };
    const auto tile = take(tile_size());
    std::copy(values.begin(), values.end(), tile.begin());
    if (options_.rotated)
      for (std::size_t t = 0; t < group_tokens(); ++t) rotation_.forward(tile.data() + t * dim(), scratch.data());
    double squares = 0;
    for (const float value : tile) squares += static_cast<double>(value) * static_cast<double>(value);
    const auto rms = static_cast<float>(std::sqrt(squares / static_cast<double>(tile_size())));
    const float norm = rms > 0 ? rms / tile_rms : 1;
    for (float& value : tile) value /= norm;

    const auto line_scales = take(lines()), crossing_scales = take(crossings());
    const auto best_crossings = take(crossings());
    const auto line_deviations = take(lines()), crossing_deviations = take(crossings());
    std::fill(line_scales.begin(), line_scales.end(), 1.0F);
    std::fill(crossing_scales.begin(), crossing_scales.end(), 1.0F);
    float best = 0;
    for (std::uint32_t i = 0;; ++i) {
      deviations(tile.data(), line_scales, crossing_scales, true, line_deviations);
      deviations(tile.data(), line_scales, crossing_scales, false, crossing_deviations);
      const float imbalance = spread(line_deviations) + spread(crossing_deviations);  // 2 is perfect
      if (i == 0 || imbalance < best) {
        best = imbalance;
        std::copy(crossing_scales.begin(), crossing_scales.end(), best_crossings.begin());
      }
      if (i == options_.iterations) break;
      scale_by(crossing_scales, crossing_deviations);
      deviations(tile.data(), line_scales, crossing_scales, true, line_deviations);
      scale_by(line_scales, line_deviations);
    }
    write_tile(tile, norm, best_crossings, packed, scratch, saturated);
  }
  /// Logarithms of scales stay in [-0.3, 10], as published.
  static void scale_by(std::span<float> scales, std::span<const float> deviations) noexcept {
    for (std::size_t i = 0; i < scales.size(); ++i)
      scales[i] = std::clamp(scales[i] * std::max(deviations[i], 1e-12F), 0.74081822F, 22026.4658F);
  }

  /// The lines' own scales are part of their steps and offsets.
  void write_tile(std::span<const float> tile, float norm, std::span<const float> crossing_scales, std::byte* packed, std::span<float> scratch,
                  std::uint64_t& saturated) const noexcept {
    std::byte* const affines = packed + codes_bytes();
    std::byte* const scales = affines + 4 * lines();
    float* const divisors = scratch.data();  // of the crossings: their scales as stored, and the norm
    auto* const codes = reinterpret_cast<std::uint8_t*>(divisors + crossings());
    for (std::size_t i = 0; i < crossings(); ++i) {
      const fp16 scale = fp16::from_float_saturating(crossing_scales[i], saturated);
      detail::store_fp16(scales + 2 * i, scale);
      divisors[i] = scale.to_float() / norm;
    }
    for (std::size_t line = 0; line < lines(); ++line) {
      float least = 0, most = 0;
      for (std::size_t i = 0; i < crossings(); ++i) {
        const float value = tile[at(line, i)] / divisors[i];
        least = i == 0 ? value : std::min(least, value);
        most = i == 0 ? value : std::max(most, value);
      }
      const affine found = affine::covering(least, most);
      detail::store_fp16(affines + 4 * line, found.step);
      detail::store_fp16(affines + 4 * line + 2, found.offset);
      const float step = found.step.to_float(), offset = found.offset.to_float();
      if (found.may_saturate()) ++saturated;
      for (std::size_t i = 0; i < crossings(); ++i)
        codes[at(line, i)] =
            static_cast<std::uint8_t>(detail::affine_code<Bits>(tile[at(line, i)] / divisors[i], step > 0 ? step : 1, offset));
    }
    for (std::size_t t = 0; t < group_tokens(); ++t) detail::pack_codes<Bits>(codes + t * dim(), dim(), packed + t * row_bytes());
  }

  options options_;
  orthonormal_rotation rotation_;
};

}  // namespace kvexact

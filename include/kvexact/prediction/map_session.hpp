// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <kvexact/core/config.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/engine/layerwise_predictor.hpp>
#include <kvexact/numeric/fixed_point.hpp>
#include <kvexact/numeric/integer_gemm.hpp>
#include <kvexact/numeric/integer_rotation.hpp>
#include <kvexact/prediction/closed_loop.hpp>
#include <kvexact/prediction/cross_layer.hpp>
#include <kvexact/prediction/layer_maps.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/tensor/rotation_table.hpp>
#include <kvexact/tensor/tile.hpp>

namespace kvexact {

namespace detail {

[[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::int32_t rotate_first(std::int32_t a, std::int32_t b, integer_rotation by) noexcept {
  return static_cast<std::int32_t>((std::int64_t{a} * by.cosine - std::int64_t{b} * by.sine) >> 30);
}
[[nodiscard]] KVEXACT_ALWAYS_INLINE constexpr std::int32_t rotate_second(std::int32_t a, std::int32_t b, integer_rotation by) noexcept {
  return static_cast<std::int32_t>((std::int64_t{a} * by.sine + std::int64_t{b} * by.cosine) >> 30);
}
[[nodiscard]] constexpr integer_rotation reversed(integer_rotation by) noexcept { return {by.cosine, -by.sine}; }

/// sums * scale / 2^shift, rounded, for a row of `n` sums.
struct scale_kernel {
  KVEXACT_ALWAYS_INLINE static void run(std::int32_t* sums, std::size_t n, std::uint32_t scale, int shift, std::int32_t largest) noexcept {
    const std::int64_t half = std::int64_t{1} << (shift - 1);
    for (std::size_t i = 0; i < n; ++i) {
      const std::int64_t product = std::int64_t{sums[i]} * static_cast<std::int64_t>(scale);
      sums[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>((product + half) >> shift, -std::int64_t{largest}, std::int64_t{largest}));
    }
  }
};

/// Turns the pairs of `a` and `b` in place.
struct rotate_kernel {
  KVEXACT_ALWAYS_INLINE static void run(std::int32_t* a, std::int32_t* b, const integer_rotation* by, std::size_t n) noexcept {
    for (std::size_t t = 0; t < n; ++t) {
      const std::int32_t first = rotate_first(a[t], b[t], by[t]);
      const std::int32_t second = rotate_second(a[t], b[t], by[t]);
      a[t] = first;
      b[t] = second;
    }
  }
};

/// Base prediction plus what the maps add to it.
struct combine_kernel {
  KVEXACT_ALWAYS_INLINE static void run(const std::uint32_t* base, const std::int32_t* added, std::size_t n, std::int32_t unit,
                                        std::uint32_t* means) noexcept {
    for (std::size_t i = 0; i < n; ++i) {
      const std::int32_t sum = to_fixed(base[i], unit) + added[i];  // both are below 2^30
      means[i] = from_fixed(std::clamp(sum, -largest_fixed, largest_fixed), unit);
    }
  }
};

/// What a format's numbers mean in fixed point, with the storage scale where there is one: a table for 8-bit formats.
template <class Scalar>
class fixed_values {
 public:
  fixed_values(std::uint32_t scale, std::int32_t unit) noexcept : unit_(unit) {
    if constexpr (sizeof(typename Scalar::bits_type) == 1) {
      const std::uint32_t factor = is_positive_normal(scale) ? scale : std::bit_cast<std::uint32_t>(1.0F);
      for (std::uint32_t bits = 0; bits < 256; ++bits) {
        const auto value = Scalar::from_bits(static_cast<std::uint8_t>(bits));
        finite_[bits] = value.is_finite();
        value_[bits] = finite_[bits] ? product_to_fixed(std::bit_cast<std::uint32_t>(value.to_float()), factor, unit) : 0;
      }
      for (std::uint32_t code = 0; code <= Scalar::max_finite; ++code) {
        // Halfway to the neighbours; what lies beyond the largest number was stored as it.
        const std::int32_t low = code == 0 ? -value_[1] / 2 : (value_[code - 1] + value_[code]) / 2;
        const std::int32_t high = code == Scalar::max_finite ? largest_fixed : (value_[code] + value_[code + 1]) / 2;
        low_[code] = low;
        high_[code] = high;
        low_[code | Scalar::sign_mask] = -high;
        high_[code | Scalar::sign_mask] = -low;
      }
    }
  }

  [[nodiscard]] KVEXACT_ALWAYS_INLINE bool is_finite(typename Scalar::bits_type bits) const noexcept {
    if constexpr (sizeof(bits) == 1) return finite_[bits];
    return (bits & Scalar::magnitude_mask) <= Scalar::max_finite;
  }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::int32_t value(typename Scalar::bits_type bits) const noexcept {
    if constexpr (sizeof(bits) == 1) {
      return value_[bits];
    } else if constexpr (Scalar::exponent_bits == 8) {
      return to_fixed(std::uint32_t{bits} << (32 - Scalar::bit_count), unit_);
    } else {
      return to_fixed(std::bit_cast<std::uint32_t>(Scalar::from_bits(bits).to_float()), unit_);
    }
  }
  /// The number nearest to `mean` that is rounded to `bits`.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::int32_t nearest(typename Scalar::bits_type bits, std::int32_t mean) const noexcept {
    if constexpr (sizeof(bits) == 1) {
      return std::min(std::max(mean, low_[bits]), high_[bits]);
    } else {
      return value(bits);
    }
  }

 private:
  static constexpr std::size_t entries = sizeof(typename Scalar::bits_type) == 1 ? 256 : 0;
  std::int32_t unit_;
  std::array<std::int32_t, entries> value_{};
  std::array<std::int32_t, entries> low_{};
  std::array<std::int32_t, entries> high_{};
  std::array<bool, entries> finite_{};
};

/// Residuals of one channel: to the base (fed back) and to the mean (`missed`).
template <class Scalar>
struct residual_kernel {
  KVEXACT_ALWAYS_INLINE static void run(const fixed_values<Scalar>& fixed, bool clamped, const typename Scalar::bits_type* values,
                                        const std::uint32_t* base, const std::int32_t* added, std::size_t n, std::int32_t unit,
                                        std::int32_t* residual, std::int32_t* missed) noexcept {
    for (std::size_t t = 0; t < n; ++t) {
      const std::int32_t from = to_fixed(base[t], unit);
      const std::int32_t mean = std::clamp(from + added[t], -largest_fixed, largest_fixed);
      const std::int32_t value = fixed.is_finite(values[t]) ? fixed.value(values[t]) : mean;
      const std::int32_t fed_back = clamped && fixed.is_finite(values[t]) ? fixed.nearest(values[t], mean) : value;
      residual[t] = std::clamp(fed_back - from, -largest_fixed, largest_fixed);
      missed[t] = std::clamp(value - mean, -largest_fixed, largest_fixed);
    }
  }
};

/// Residuals in sixteenths of their spread.
struct feature_kernel {
  KVEXACT_ALWAYS_INLINE static void run(const std::int32_t* residual, std::size_t n, std::uint32_t scale, std::int32_t largest,
                                        std::int16_t* out) noexcept {
    for (std::size_t t = 0; t < n; ++t) {
      const std::int64_t product = std::int64_t{residual[t]} * static_cast<std::int64_t>(scale);
      out[t] = static_cast<std::int16_t>(std::clamp<std::int64_t>((product + (std::int64_t{1} << 31)) >> 32, -std::int64_t{largest}, std::int64_t{largest}));
    }
  }
};

}  // namespace detail

/// Predicts the tiles of a token range one after the other by `Predictor` (a `cross_layer` or `closed_loop`), each block of channels from the
/// exact values of those before. For every tile, in coding order: `begin_tile`, for each of its blocks `predict` and then `accept` with the
/// values, `end_tile`. All arithmetic is on integers.
template <class Predictor, class Scalar>
class map_session {
  static constexpr bool has_engine = std::same_as<Predictor, closed_loop>;

 public:
  using bits_type = typename Scalar::bits_type;

  /// Memory for token ranges of up to `stride` tokens.
  struct buffers {
    std::span<std::uint32_t> base;           // [channel][stride], the tile's base prediction
    std::span<std::int32_t> added;           // [channel][stride], what the maps add, keys rotated
    std::span<std::int16_t> history;         // [layers_back + 1][token][channels of a layer, K then V, in coding order], features
    std::span<std::int32_t> token_scales;    // [stride]
    std::span<std::uint64_t> energies;       // [stride]
    std::span<std::int32_t> rows;            // [4][stride]
    std::span<std::int16_t> narrow;          // [stride], and with a rank [token][rank]
    std::span<std::int32_t> sums;            // with a rank: [rank][stride]
    std::span<integer_rotation> rotations;   // [pair][stride]
    std::span<float> keys, values;           // closed loop: [token][channel]
    std::span<float> correction;             // closed loop: [token][hidden_width]
    std::size_t channels = 0;                // most of a layer
    std::size_t stride = 0;

    static buffers take(workspace& memory, const cache_shape& shape, const rotary& rotation, const prepared_maps& maps, std::size_t stride) noexcept {
      buffers made;
      std::size_t tile = 0;
      for (const layer_shape& layer : shape.all()) {
        made.channels = std::max<std::size_t>(made.channels, layer.channels());
        tile = std::max<std::size_t>({tile, layer.channels(cache_part::key), layer.channels(cache_part::value)});
      }
      made.stride = stride;
      made.base = memory.take<std::uint32_t>(tile * stride);
      made.added = memory.take<std::int32_t>(tile * stride);
      made.history = memory.take<std::int16_t>((maps.layers_back() + 1) * made.channels * stride);
      made.token_scales = memory.take<std::int32_t>(stride);
      made.energies = memory.take<std::uint64_t>(stride);
      made.rows = memory.take<std::int32_t>(4 * stride);
      const std::size_t rank = std::min<std::size_t>(maps.rank(), tile);
      made.narrow = memory.take<std::int16_t>((rank + 1) * stride);
      if (rank > 0) made.sums = memory.take<std::int32_t>(rank * stride);
      if (rotation.dim() > 0) made.rotations = memory.take<integer_rotation>(rotation.turns().size() * stride);
      if constexpr (has_engine) {
        made.keys = memory.take<float>(tile * stride);
        made.values = memory.take<float>(tile * stride);
        if (maps.hidden_width() > 0) made.correction = memory.take<float>(maps.hidden_width() * stride);
      }
      return made;
    }
  };

  map_session() noexcept = default;
  /// `scales`: bits of the storage scales, one a tile, or empty. All arguments must outlive the session.
  map_session(const cache_shape& shape, const rotary& rotation, const prepared_maps& maps, std::span<const std::uint32_t> scales, instruction_set set,
              const buffers& memory) noexcept
      : shape_(&shape), rotation_(&rotation), maps_(&maps), scales_(scales), set_(set), memory_(memory) {}

  /// Starts a token range at layer 0; `stride` is that of its tiles.
  template <class Prediction>
  [[nodiscard]] result<void> begin(index_range tokens, std::size_t stride, Prediction& prediction) noexcept {
    tokens_ = tokens;
    stride_ = stride;
    turns_ = rotation_table(*rotation_, tokens, stride, memory_.rotations);
    std::fill(memory_.token_scales.begin(), memory_.token_scales.end(), 0);
    if constexpr (has_engine) {
      if (prediction.hidden_width() != maps_->hidden_width() && maps_->hidden_width() != 0)
        return error{error_code::shape_mismatch, "the engine's hidden states have another length than the profile's correction"};
      if (prediction.tokens() != tokens.begin)
        return error{error_code::out_of_range, "the engine does not stand at the first token to be coded"}.at_token(static_cast<std::int64_t>(tokens.begin));
      return prediction.begin(tokens);
    }
    return {};
  }

  /// Per token, what to add to the logarithm of sigma: 1/256 octave. Valid until `end_tile`.
  [[nodiscard]] const std::int32_t* token_scales() const noexcept { return memory_.token_scales.data(); }
  /// The base prediction of the last tile, [channel][stride]: what a fingerprint covers.
  [[nodiscard]] std::span<const std::uint32_t> base() const noexcept { return memory_.base; }
  [[nodiscard]] std::span<const channel_block> blocks(std::size_t tile) const noexcept { return (*maps_)[tile].blocks; }

  /// `channel_means`: of the tile, if the base prediction is made of them.
  template <class Prediction>
  [[nodiscard]] result<void> begin_tile(const tile_shape& where, std::size_t tile, std::span<const std::uint32_t> channel_means,
                                        Prediction& prediction) noexcept {
    if (const auto predicted = predict_base(where, channel_means, prediction); !predicted) return predicted;
    start_maps(where, tile);
    return {};
  }

  /// Fills the block's channels of `means`, [channel][stride] bits of binary32, real units, zero beyond the tokens.
  void predict(const tile_shape& where, std::size_t tile, const channel_block& block, std::uint32_t* means) noexcept {
    const prepared_maps::tile& map = (*maps_)[tile];
    for (const channel_run& run : block.runs()) std::fill_n(memory_.added.data() + run.first * where.stride, run.count * where.stride, 0);
    if (!map.maps.empty() && map.maps[static_cast<std::size_t>(&block - map.blocks.data())].depth > 0) {
      multiply(where, map, map.maps[static_cast<std::size_t>(&block - map.blocks.data())], block);
      if (where.part == cache_part::key) rotate(where, block);
    }
    for (const channel_run& run : block.runs()) {
      const std::size_t at = run.first * where.stride;
      run_on<detail::combine_kernel>(set_, memory_.base.data() + at, memory_.added.data() + at, run.count * where.stride, map.unit, means + at);
    }
  }

  /// Takes the block's features, and what it says of the tokens' scale, from the values, [channel][stride] of the tile.
  void accept(const tile_shape& where, std::size_t tile, const channel_block& block, const bits_type* values) noexcept {
    const prepared_maps::tile& map = (*maps_)[tile];
    const auto count = static_cast<std::size_t>(where.tokens.size());
    for_each_residual(where, tile, block, values, maps_->clamped_feedback(),
                      [&](std::size_t c, std::size_t place, const std::int32_t* residual, const std::int32_t* missed) {
                        std::int16_t* const narrow = memory_.narrow.data();
                        run_on<detail::feature_kernel>(set_, residual, count, map.feature_scales[c], std::int32_t{127}, narrow);
                        std::int16_t* const out = tile_features(where) + place;
                        for (std::size_t t = 0; t < count; ++t) out[t * memory_.channels] = narrow[t];
                        run_on<detail::feature_kernel>(set_, missed, count, map.missed_scales[c], std::int32_t{1023}, narrow);
                        for (std::size_t t = 0; t < count; ++t) memory_.energies[t] += static_cast<std::uint64_t>(narrow[t] * narrow[t]);
                      });
  }

  template <class Prediction>
  [[nodiscard]] result<void> end_tile(const tile_shape& where, Prediction& prediction) noexcept {
    scale_tokens(where);
    return advance(where, prediction);
  }

  // The steps of the functions above, which calibration takes one by one.

  template <class Prediction>
  [[nodiscard]] result<void> predict_base(const tile_shape& where, std::span<const std::uint32_t> channel_means, Prediction& prediction) noexcept {
    if constexpr (has_engine) {
      const layer_shape& layer = shape_->layer(where.layer);
      const auto count = static_cast<std::size_t>(where.tokens.size());
      if (where.part == cache_part::key) {
        const auto predicted = prediction.predict(where.layer, memory_.keys.first(count * layer.channels(cache_part::key)),
                                                  memory_.values.first(count * layer.channels(cache_part::value)));
        if (!predicted) return predicted.error().at_layer(where.layer);
      }
      const std::span<const float> rows = where.part == cache_part::key ? memory_.keys : memory_.values;
      for (std::size_t c = 0; c < where.channels(); ++c) {
        std::uint32_t* const out = memory_.base.data() + c * where.stride;
        for (std::size_t t = 0; t < count; ++t) {
          const auto bits = std::bit_cast<std::uint32_t>(rows[t * where.channels() + c]);
          out[t] = (bits & 0x7f800000U) == 0x7f800000U ? 0U : bits;  // the bits of NaNs need not be the same everywhere
        }
        std::fill(out + count, out + where.stride, 0U);
      }
    } else {
      Predictor::base::predict(where, {channel_means, rotation_}, prediction, memory_.base.data());
    }
    return {};
  }

  void start_maps(const tile_shape& where, std::size_t tile) noexcept {
    const prepared_maps::tile& map = (*maps_)[tile];
    const auto count = static_cast<std::size_t>(where.tokens.size());
    std::fill_n(memory_.energies.data(), count, std::uint64_t{0});
    if (map.inner.rows == 0) return;
    std::fill(memory_.sums.begin(), memory_.sums.end(), 0);
    multiply_features(where, map.inner, 0, memory_.sums.data());
    std::int16_t* const narrow = memory_.narrow.data() + stride_;
    for (std::size_t r = 0; r < map.inner.rows; ++r) {
      std::int32_t* const row = memory_.sums.data() + r * where.stride;
      run_on<detail::scale_kernel>(set_, row, count, map.inner.scales[r], layer_maps::scale_shift, std::int32_t{127});
      for (std::size_t t = 0; t < count; ++t) narrow[t * map.inner.rows + r] = static_cast<std::int16_t>(row[t]);
    }
  }

  void scale_tokens(const tile_shape& where) noexcept {
    for (std::size_t t = 0; t < where.tokens.size(); ++t) memory_.token_scales[t] = token_scale(memory_.energies[t], where.channels());
  }

  /// Calls visit(channel, its place in coding order, residual, missed) for every channel of a block, with rows over the tokens in fixed point:
  /// what the base prediction misses, keys before rotation, and what the means miss, as cached. `clamped`: the first not to the value but to
  /// the number nearest to the mean that is rounded to it.
  template <class Visit>
  void for_each_residual(const tile_shape& where, std::size_t tile, const channel_block& block, const bits_type* values, bool clamped,
                         Visit&& visit) noexcept {
    const detail::fixed_values<Scalar> fixed(scales_.empty() ? 0U : scales_[tile], (*maps_)[tile].unit);
    const auto count = static_cast<std::size_t>(where.tokens.size());
    const std::array<std::int32_t*, 2> residual{memory_.rows.data(), memory_.rows.data() + stride_};
    const std::array<std::int32_t*, 2> missed{memory_.rows.data() + 2 * stride_, memory_.rows.data() + 3 * stride_};
    const auto take = [&](std::size_t c, std::size_t k) {
      const std::size_t at = c * where.stride;
      run_on<detail::residual_kernel<Scalar>>(set_, fixed, clamped, values + at, memory_.base.data() + at, memory_.added.data() + at, count,
                                              (*maps_)[tile].unit, residual[k], missed[k]);
      if constexpr (has_engine) feed_back(where, c, values + at, residual[k], (*maps_)[tile].unit);
    };
    // Channels in coding order; where the first of a rotary pair comes up, both are taken.
    for_each_pair(where, block, [&](std::uint32_t i, std::uint32_t a, std::uint32_t place_a, std::uint32_t b, std::uint32_t place_b) {
      take(a, 0);
      take(b, 1);
      const integer_rotation* const by = turns_[i];
      for (std::size_t t = 0; t < count; ++t) {
        const std::int32_t first = detail::rotate_first(residual[0][t], residual[1][t], detail::reversed(by[t]));
        residual[1][t] = detail::rotate_second(residual[0][t], residual[1][t], detail::reversed(by[t]));
        residual[0][t] = first;
      }
      visit(std::size_t{a}, std::size_t{place_a}, residual[0], missed[0]);
      visit(std::size_t{b}, std::size_t{place_b}, residual[1], missed[1]);
    });
    const std::uint32_t rotated = where.part == cache_part::key ? rotation_->dim() : 0;
    for (std::uint32_t k = 0; k < block.count; ++k) {
      const std::uint32_t c = block.channel(k);
      if (c % where.dim < rotated) continue;
      take(c, 0);
      visit(std::size_t{c}, std::size_t{block.first + k}, residual[0], missed[0]);
    }
  }

  /// The features of `layer`, [token][channel, K then V]; `stride` from one token to the next.
  [[nodiscard]] const std::int16_t* features(std::uint32_t layer) const noexcept {
    return memory_.history.data() + layer % (maps_->layers_back() + 1) * memory_.channels * stride_;
  }
  [[nodiscard]] std::size_t feature_stride() const noexcept { return memory_.channels; }

  /// After a layer's last tile: corrects the engine's hidden states and lets it go on with the exact values.
  template <class Prediction>
  [[nodiscard]] result<void> advance(const tile_shape& where, Prediction& prediction) noexcept {
    if constexpr (has_engine) {
      const layer_shape& layer = shape_->layer(where.layer);
      if (where.part == cache_part::key && layer.value_dim > 0) return {};
      const auto count = static_cast<std::size_t>(where.tokens.size());
      std::span<const float> correction;
      if (maps_->hidden_width() > 0) {
        correct(where.layer, count);
        correction = memory_.correction.first(count * maps_->hidden_width());
      }
      const auto advanced = prediction.advance(where.layer, memory_.keys.first(count * layer.channels(cache_part::key)),
                                               memory_.values.first(count * layer.channels(cache_part::value)), correction);
      if (!advanced) return advanced.error().at_layer(where.layer);
    }
    return {};
  }

 private:
  /// The features of a tile, a token every `feature_stride()`.
  [[nodiscard]] std::int16_t* tile_features(const tile_shape& where) const noexcept {
    return memory_.history.data() + where.layer % (maps_->layers_back() + 1) * memory_.channels * stride_ +
           (where.part == cache_part::value ? shape_->layer(where.layer).channels(cache_part::key) : 0);
  }

  /// Products of the features with a block's weights.
  void multiply(const tile_shape& where, const prepared_maps::tile& map, const prepared_maps::matrix& by, const channel_block& block) noexcept {
    const auto count = static_cast<std::size_t>(where.tokens.size());
    std::size_t row = 0;
    for (const channel_run& run : block.runs()) {
      std::int32_t* const out = memory_.added.data() + run.first * where.stride;
      const std::int16_t* weights = by.weights.data() + row * by.depth;
      const auto multiply_part = [&](const std::int16_t* from, std::size_t stride, std::size_t depth) {
        if (depth > 0) run_on<integer_gemm>(set_, weights, by.depth, std::size_t{run.count}, from, stride, count, depth, out, where.stride);
        weights += depth;
      };
      if (map.inner.rows > 0) {
        multiply_part(memory_.narrow.data() + stride_, map.inner.rows, map.inner.rows);
      } else {
        for_each_feature_run(where, block.head, [&](const std::int16_t* from, std::size_t depth) { multiply_part(from, memory_.channels, depth); });
      }
      const std::size_t skipped = maps_->per_head() ? std::size_t{block.head} * where.dim : 0;
      multiply_part(tile_features(where) + skipped, memory_.channels, block.first - skipped);
      for (std::size_t k = 0; k < run.count; ++k)
        run_on<detail::scale_kernel>(set_, out + k * where.stride, count, by.scales[row + k], layer_maps::scale_shift, largest_fixed / 2);
      row += run.count;
    }
  }

  /// out[row][token] += all rows of `by` times the features from other tiles.
  void multiply_features(const tile_shape& where, const prepared_maps::matrix& by, std::uint32_t head, std::int32_t* out) noexcept {
    const std::int16_t* weights = by.weights.data();
    for_each_feature_run(where, head, [&](const std::int16_t* from, std::size_t depth) {
      run_on<integer_gemm>(set_, weights, by.depth, by.rows, from, memory_.channels, static_cast<std::size_t>(where.tokens.size()), depth, out, where.stride);
      weights += depth;
    });
  }

  /// Calls visit(first feature of the first token, number of features) for the features that a tile, or a head of it, gets from others.
  template <class Visit>
  void for_each_feature_run(const tile_shape& where, std::uint32_t head, Visit&& visit) const noexcept {
    const auto visit_layer = [&](std::uint32_t layer, bool with_values) {
      const layer_shape& of = shape_->layer(layer);
      const std::int16_t* const from = features(layer);
      if (!maps_->per_head()) return visit(from, std::size_t{with_values ? of.channels() : of.channels(cache_part::key)});
      visit(from + std::size_t{head} * of.key_dim, std::size_t{of.key_dim});
      if (with_values && of.value_dim > 0) visit(from + of.channels(cache_part::key) + std::size_t{head} * of.value_dim, std::size_t{of.value_dim});
    };
    for (std::uint32_t back = 1; back <= std::min(maps_->layers_back(), where.layer); ++back) visit_layer(where.layer - back, true);
    if (where.part == cache_part::value) visit_layer(where.layer, false);
  }

  /// Calls visit(pair, channel and place in coding order of its two halves) for the rotary pairs of a block of keys.
  template <class Visit>
  void for_each_pair(const tile_shape& where, const channel_block& block, Visit&& visit) const noexcept {
    if (where.part != cache_part::key || rotation_->dim() == 0) return;
    const std::uint32_t rotated = rotation_->dim();
    const bool interleaved = rotation_->pairing() == rotary_pairing::interleaved;
    for (std::uint32_t k = 0; k < block.count; ++k) {
      const std::uint32_t a = block.channel(k);
      const std::uint32_t d = a % where.dim;
      if (d >= rotated || (interleaved ? d % 2 != 0 : d >= rotated / 2)) continue;  // not rotated, or the second half
      const std::uint32_t i = interleaved ? d / 2 : d;
      const std::uint32_t distance = interleaved ? 1 : rotated / 2;
      const std::uint32_t place_distance = block.runs_used == 2 ? block.both[0].count : distance;
      visit(i, a, block.first + k, a + distance, block.first + k + place_distance);
    }
  }

  void rotate(const tile_shape& where, const channel_block& block) noexcept {
    for_each_pair(where, block, [&](std::uint32_t i, std::uint32_t a, std::uint32_t, std::uint32_t b, std::uint32_t) {
      run_on<detail::rotate_kernel>(set_, memory_.added.data() + a * where.stride, memory_.added.data() + b * where.stride, turns_[i],
                                    static_cast<std::size_t>(where.tokens.size()));
    });
  }

  /// Half the logarithm of the mean square of `channels` features whose squares sum up to `energy`, plus 0.02.
  [[nodiscard]] static std::int32_t token_scale(std::uint64_t energy, std::size_t channels) noexcept {
    constexpr std::uint32_t floor_in_65536ths = 1311;
    const auto mean = static_cast<std::int32_t>((energy << 8) / channels + floor_in_65536ths);  // below 1024^2 * 2^8 = 2^28
    return (log2_in_256ths(from_fixed(mean, 0)) - 16 * 256) >> 1;
  }

  /// Rows of what the engine will attend to: the exact values or, with clamped feedback, the best estimate of what they were rounded from.
  /// What is not finite is left as predicted, so that the engine sees finite numbers only.
  void feed_back(const tile_shape& where, std::size_t c, const bits_type* values, const std::int32_t* residual, std::int32_t unit) noexcept {
    float* const out = (where.part == cache_part::key ? memory_.keys : memory_.values).data() + c;
    const std::uint32_t* const base = memory_.base.data() + c * where.stride;
    for (std::size_t t = 0; t < where.tokens.size(); ++t) {
      const std::int32_t fed_back = std::clamp(to_fixed(base[t], unit) + residual[t], -largest_fixed, largest_fixed);
      std::uint32_t bits = from_fixed(fed_back, unit);
      if constexpr (sizeof(bits_type) > 1) {
        const auto exact = Scalar::from_bits(values[t]);
        if (exact.is_finite() && fed_back > -largest_fixed && fed_back < largest_fixed) bits = std::bit_cast<std::uint32_t>(exact.to_float());
      }
      out[t * where.channels()] = std::bit_cast<float>(bits);
    }
  }

  void correct(std::uint32_t layer, std::size_t count) noexcept {
    constexpr std::size_t tokens_at_once = 64;
    constexpr std::size_t rows_at_once = 16;
    const prepared_maps::matrix& gain = maps_->gain(layer);
    const std::size_t width = maps_->hidden_width();
    alignas(64) std::array<std::int32_t, rows_at_once * tokens_at_once> sums;
    for (std::size_t first = 0; first < count; first += tokens_at_once) {
      const std::size_t n = std::min(tokens_at_once, count - first);
      for (std::size_t h = 0; h < width; h += rows_at_once) {
        const std::size_t rows = std::min(rows_at_once, width - h);
        sums.fill(0);
        run_on<integer_gemm>(set_, gain.weights.data() + h * gain.depth, gain.depth, rows, features(layer) + first * memory_.channels, memory_.channels, n,
                             gain.depth, sums.data(), tokens_at_once);
        for (std::size_t r = 0; r < rows; ++r) {
          for (std::size_t t = 0; t < n; ++t) {
            const std::int64_t product = std::int64_t{sums[r * tokens_at_once + t]} * static_cast<std::int64_t>(gain.scales[h + r]);
            memory_.correction[(first + t) * width + h + r] = std::bit_cast<float>(detail::to_binary32(product, -layer_maps::gain_shift));
          }
        }
      }
    }
  }

  const cache_shape* shape_ = nullptr;
  const rotary* rotation_ = nullptr;
  const prepared_maps* maps_ = nullptr;
  std::span<const std::uint32_t> scales_;
  instruction_set set_ = instruction_set::baseline;
  buffers memory_;
  index_range tokens_;
  std::size_t stride_ = 0;
  rotation_table turns_;
};

}  // namespace kvexact

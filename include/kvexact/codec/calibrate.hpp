// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvexact/codec/calibration_statistics.hpp>
#include <kvexact/codec/map_calibration.hpp>
#include <kvexact/codec/profile_data.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/engine/layerwise_predictor.hpp>
#include <kvexact/numeric/integer_rotation.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/prediction/channel_mean.hpp>
#include <kvexact/prediction/closed_loop.hpp>
#include <kvexact/prediction/layer_maps.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>
#include <kvexact/tensor/rotary.hpp>
#include <kvexact/tensor/tile.hpp>

namespace kvexact {

namespace detail {

/// Goes through the tiles in coding order, each over all examples.
template <class Codec, class Example>
class calibration {
 public:
  using scalar = typename Codec::scalar;
  using predictor_type = typename Codec::predictor_type;
  using counter_type = symbol_counter<typename Codec::residual_model_type>;
  static constexpr bool is_mapped = mapped_predictor<predictor_type>;
  static constexpr bool has_fallback = !std::same_as<predictor_type, channel_mean>;

  calibration(const cache_shape& shape, const rotary& rotation, std::span<const Example> examples, const calibration_options& options)
      : shape_(shape), rotation_(rotation), examples_(examples), maps_(shape, rotation, examples, options) {
    data_.format = Codec::format;
    data_.residual = Codec::residual_model_type::id;
    data_.shared_contexts = Codec::residual_model_type::shared_contexts;
    data_.tile_contexts = static_cast<std::uint32_t>(counter_type::own_contexts);
    data_.alphabet = Codec::residual_model_type::alphabet;
    data_.precision = Codec::entropy_coder_type::precision;
    data_.shape = shape;
    data_.rotation = rotation;
    data_.models.resize(has_fallback ? 2 : 1);
    data_.models.front().predictor = predictor_type::id;
    data_.models.back().predictor = channel_mean::id;
    counters_.assign(data_.models.size(), counter_type(count_tiles(shape)));
  }

  [[nodiscard]] result<profile_data> run() {
    if constexpr (is_mapped) {
      if (const auto begun = maps_.begin(); !begun) return begun.error();
    }
    std::size_t tile = 0;
    for (std::uint32_t l = 0; l < shape_.layers(); ++l) {
      for (const cache_part part : cache_parts) {
        if (shape_.layer(l).channels(part) == 0) continue;
        if (const auto done = calibrate_tile({l, part, {}, shape_.layer(l).kv_heads, shape_.layer(l).dim(part), tokens_at_once}, tile); !done)
          return done.error();
        ++tile;
      }
    }
    if (seen_ == 0) return error{error_code::not_calibrated, "no finite value was seen"};
    for (std::size_t m = 0; m < counters_.size(); ++m) {
      if (const auto built = counters_[m].build(data_.models[m], Codec::entropy_coder_type::precision); !built) return built.error();
    }
    if constexpr (is_mapped) data_.models.front().maps = maps_.take();
    return std::move(data_);
  }

 private:
  static constexpr std::uint64_t tokens_at_once = 256;

  /// Calls visit(example, tile shape, storage scale) for pieces of all examples, with their values in `values_`.
  template <class Visit>
  void for_each_piece(const tile_shape& tile_at, std::size_t tile, Visit&& visit) {
    for (const Example& example : examples_) {
      const index_range all = example.cache.tokens();
      for (std::uint64_t token = all.begin; token < all.end; token += tokens_at_once) {
        tile_shape where = tile_at;
        where.tokens = {token, std::min(all.end, token + tokens_at_once)};
        values_.resize(where.channels() * where.stride);
        gather_tile(example.cache, where, values_.data());
        visit(example, where, storage_scale_of(example, tile));
      }
    }
  }

  [[nodiscard]] result<void> calibrate_tile(const tile_shape& where, std::size_t tile) {
    std::vector<running_average> sums(where.channels());
    for_each_piece(where, tile, [&](const Example&, const tile_shape& piece, std::uint32_t scale) { add_values(piece, factor_of(scale), sums); });
    for (const running_average& sum : sums) {
      seen_ += sum.count;
      data_.models.back().means.push_back(std::bit_cast<std::uint32_t>(static_cast<float>(sum.average())));
    }
    const std::span<const std::uint32_t> means = std::span(data_.models.back().means).last(where.channels());
    if constexpr (is_mapped) {
      if constexpr (!predictor_type::needs_prediction) data_.models.front().means.insert(data_.models.front().means.end(), means.begin(), means.end());
      if (const auto done = maps_.calibrate_tile(where, tile, means, data_.models.front(), counters_.front()); !done) return done;
    } else if constexpr (has_fallback) {
      observe<predictor_type>(data_.models.front(), counters_.front(), where, tile, {});
    }
    observe<channel_mean>(data_.models.back(), counters_.back(), where, tile, means);
    return {};
  }

  /// Sums of values; of keys before rotation.
  void add_values(const tile_shape& where, double factor, std::span<running_average> sums) const {
    const auto tokens = static_cast<std::size_t>(where.tokens.size());
    const auto value = [&](std::size_t c, std::size_t t) {
      return factor * static_cast<double>(scalar::from_bits(values_[c * where.stride + t]).to_float());
    };
    const std::uint32_t rotated = where.part == cache_part::key ? rotation_.dim() : 0;
    for (std::uint32_t head = 0; head < where.heads; ++head) {
      const std::size_t base = std::size_t{head} * where.dim;
      for (std::size_t c = base + rotated; c < base + where.dim; ++c) {
        for (std::size_t t = 0; t < tokens; ++t) sums[c].add(value(c, t));
      }
      for (std::uint32_t i = 0; i < rotated / 2; ++i) {
        const auto [first, second] = rotation_.pair(i);
        for (std::size_t t = 0; t < tokens; ++t) {
          const integer_rotation by = rotation_by_turns((where.tokens.begin + t) * rotation_.turns()[i]);
          const double cosine = std::ldexp(static_cast<double>(by.cosine), -30);
          const double sine = std::ldexp(static_cast<double>(by.sine), -30);
          const double a = value(base + first, t);
          const double b = value(base + second, t);
          sums[base + first].add(a * cosine + b * sine);
          sums[base + second].add(b * cosine - a * sine);
        }
      }
    }
  }

  /// Spreads and symbols of a predictor of single tiles.
  template <class Predictor>
  void observe(model_parameters& model, counter_type& counter, const tile_shape& tile_at, std::size_t tile, std::span<const std::uint32_t> means) {
    const auto predict = [&](const Example& example, const tile_shape& where) {
      means_.resize(where.channels() * where.stride);
      if constexpr (Predictor::needs_prediction) {
        Predictor::predict(where, {means, &rotation_}, example.prediction, means_.data());
      } else {
        Predictor::predict(where, {means, &rotation_}, no_prediction{}, means_.data());
      }
    };
    std::vector<running_average> squares(tile_at.channels());
    for_each_piece(tile_at, tile, [&](const Example& example, const tile_shape& where, std::uint32_t scale) {
      predict(example, where);
      for (std::size_t c = 0; c < where.channels(); ++c) {
        for (std::size_t t = 0; t < where.tokens.size(); ++t) {
          const double value = factor_of(scale) * static_cast<double>(scalar::from_bits(values_[c * where.stride + t]).to_float());
          const double mean = static_cast<double>(std::bit_cast<float>(means_[c * where.stride + t]));
          const double missed = value - (std::isfinite(mean) ? mean : 0.0);
          squares[c].add(missed * missed);
        }
      }
    });
    const std::size_t first = model.sigmas.size();
    for (const running_average& square : squares) model.sigmas.push_back(log2_of_root(square.average()));
    for_each_piece(tile_at, tile, [&](const Example& example, const tile_shape& where, std::uint32_t scale) {
      predict(example, where);
      counter.count(where, tile, values_.data(), means_.data(), model.sigmas.data() + first, nullptr, scale);
    });
  }

  const cache_shape& shape_;
  const rotary& rotation_;
  std::span<const Example> examples_;
  std::conditional_t<is_mapped, map_calibration<Codec, Example>, no_map_calibration> maps_;
  profile_data data_;
  std::vector<counter_type> counters_;
  std::uint64_t seen_ = 0;  // finite values
  std::vector<typename scalar::bits_type> values_;
  std::vector<std::uint32_t> means_;
};

}  // namespace detail

/// Makes a profile from example caches:
///
///     std::vector<kvexact::calibration_example<view>> examples{{view of a cache}, ...};
///     const auto data = kvexact::calibrate<codec>(shape, rotation, examples);   // profile_data
///     const auto file = kvexact::serialize_profile(*data);
///
/// It goes through the caches layer by layer, several times each, so files are best mapped into memory. Besides the codec's predictor it
/// always calibrates `channel_mean`, into which badly predicted chunks fall back. Values that are not finite are left out. `rotation`: how
/// the cached keys are rotated; a default one is sound but costs size. Floating point is used here and nowhere else; its results are frozen
/// in the profile.
///
/// Memory: for predictors of single tiles a few megabytes. With maps about (16 + 2 (layers_back + 1)) * channels of a layer bytes a token of
/// all examples together, closed loop 8 * hidden width more, and 8 f^2 bytes for f features of a map.
///
/// Errors: shape_mismatch, out_of_range (a prediction does not cover its cache, or an engine's hidden states are longer than 65536),
/// not_calibrated (no finite value was seen), invalid_argument (no examples, or options that are out of range or do not go together),
/// out_of_memory, those of an engine.
template <class Codec, class Cache, class Prediction>
[[nodiscard]] result<profile_data> calibrate(const cache_shape& shape, const rotary& rotation,
                                             std::span<const calibration_example<Cache, Prediction>> examples,
                                             const calibration_options& options = {}) noexcept {
  static_assert(std::same_as<std::remove_const_t<typename Cache::value_type>, typename Codec::scalar>,
                "kvexact: the caches must hold the codec's number format");
  static_assert(!Codec::predictor_type::needs_prediction || !std::same_as<Prediction, no_prediction>,
                "kvexact: this codec's predictor needs a predicted cache (closed_loop: a pointer to an engine) with each example");
  if (examples.empty()) return error{error_code::invalid_argument, "calibration needs examples"};
  if (const auto fits = expect_rotary_fits(rotation, shape); !fits) return fits.error();
  if (options.layers_back > layer_maps::most_layers_back) return error{error_code::invalid_argument, "maps reach back over at most 8 layers"};
  if (options.rank > cache_shape::max_channels) return error{error_code::invalid_argument, "the rank of maps is at most 65536"};
  if (options.rank > 0 && options.per_head) return error{error_code::invalid_argument, "maps by head have no rank"};
  for (std::uint32_t l = 0; options.per_head && l < shape.layers(); ++l) {
    if (shape.layer(l).kv_heads != shape.layer(0).kv_heads)
      return error{error_code::invalid_argument, "maps by head need as many heads in every layer", l};
  }
  for (const auto& example : examples) {
    if (const auto fits = expect_shape(example.cache.shape(), shape); !fits) return fits.error();
    if (!example.storage_scales.empty() && example.storage_scales.size() != count_tiles(shape))
      return error{error_code::shape_mismatch, "one storage scale per layer and part is needed"};
    if constexpr (std::same_as<typename Codec::predictor_type, closed_loop>) {
      if constexpr (layerwise_teacher<std::remove_reference_t<decltype(*example.prediction)>>) {
        if (example.prediction->hidden_width() > layer_maps::most_hidden_width)
          return error{error_code::out_of_range, "hidden states to be corrected have at most 65536 numbers"};
      }
    }
    if constexpr (kv_cache<Prediction>) {
      if (const auto fits = expect_shape(example.prediction.shape(), shape); !fits) return fits.error();
      if (example.prediction.tokens().begin > example.cache.tokens().begin || example.prediction.tokens().end < example.cache.tokens().end)
        return error{error_code::out_of_range, "the prediction does not cover the cache"};
    }
  }
  try {
    return detail::calibration<Codec, calibration_example<Cache, Prediction>>(shape, rotation, examples, options).run();
  } catch (...) {
    return error{error_code::out_of_memory, "calibration"};
  }
}
template <class Codec, class Cache, class Prediction>
[[nodiscard]] result<profile_data> calibrate(const cache_shape& shape, const rotary& rotation,
                                             const std::vector<calibration_example<Cache, Prediction>>& examples,
                                             const calibration_options& options = {}) noexcept {
  return calibrate<Codec>(shape, rotation, std::span(examples), options);
}

}  // namespace kvexact

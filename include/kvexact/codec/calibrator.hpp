// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvexact/bitstream/bit_io.hpp>
#include <kvexact/codec/profile_data.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/entropy/frequency_table.hpp>
#include <kvexact/numeric/fixed_point.hpp>
#include <kvexact/numeric/integer_rotation.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/prediction/channel_mean.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/residual/residual_model.hpp>
#include <kvexact/residual/table_clusters.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>
#include <kvexact/tensor/rotary.hpp>
#include <kvexact/tensor/tile.hpp>

namespace kvexact {

/// Makes a profile from example caches, in passes over the same data (means, spreads, symbol counts), so that memory does not grow with
/// the data:
///
///     auto calibrator = kvexact::calibrator<codec>::make(shape, rotation);
///     for (int pass = 0; pass < calibrator->passes; ++pass) {
///       for (each example) calibrator->observe(cache, prediction);
///       calibrator->next_pass();
///     }
///     auto data = calibrator->finish();          // profile_data; serialize_profile(*data) gives the file
///
/// Besides the codec's predictor it always calibrates `channel_mean`, into which badly predicted chunks fall back. Values that are not
/// finite are left out. Floating point is used here and nowhere else; its results are frozen in the profile.
template <class Codec>
class calibrator {
 public:
  using scalar = typename Codec::scalar;
  using residual = typename Codec::residual_model_type;
  static constexpr int passes = 3;

  /// `rotation`: how the cached keys are rotated; the default is sound but costs some size. Errors: shape_mismatch (more dimensions
  /// rotated than keys have), out_of_memory.
  [[nodiscard]] static result<calibrator> make(const cache_shape& shape, const rotary& rotation = {}) noexcept {
    if (const auto fits = expect_rotary_fits(rotation, shape); !fits) return fits.error();
    try {
      return calibrator(shape, rotation);
    } catch (...) {
      return error{error_code::out_of_memory, "calibrator"};
    }
  }

  /// One example. `storage_scales` as for the encoder. Errors: shape_mismatch, out_of_range (the prediction does not cover the cache),
  /// out_of_memory.
  template <kv_cache Cache, class Prediction = no_prediction>
  [[nodiscard]] result<void> observe(const Cache& cache, const Prediction& prediction = {}, std::span<const std::uint32_t> storage_scales = {}) noexcept {
    static_assert(std::same_as<std::remove_const_t<typename Cache::value_type>, scalar>, "kvexact: the cache must hold the codec's number format");
    static_assert(!Codec::predictor_type::needs_prediction || !std::same_as<Prediction, no_prediction>,
                  "kvexact: this codec's predictor needs a predicted cache as second argument of observe");
    if (const auto fits = expect_shape(cache.shape(), shape_); !fits) return fits.error();
    if (!storage_scales.empty() && storage_scales.size() != tiles_)
      return error{error_code::shape_mismatch, "one storage scale per layer and part is needed"};
    if constexpr (!std::same_as<Prediction, no_prediction>) {
      if (const auto fits = expect_shape(prediction.shape(), shape_); !fits) return fits.error();
      if (prediction.tokens().begin > cache.tokens().begin || prediction.tokens().end < cache.tokens().end)
        return error{error_code::out_of_range, "the prediction does not cover the cache"};
    }
    try {
      std::size_t tile = 0;
      std::size_t channel = 0;
      for (std::uint32_t l = 0; l < shape_.layers(); ++l) {
        const layer_shape& layer = shape_.layer(l);
        for (const cache_part part : cache_parts) {
          if (layer.channels(part) == 0) continue;
          for (std::uint64_t token = cache.tokens().begin; token < cache.tokens().end; token += tokens_at_once) {
            const index_range tokens{token, std::min(cache.tokens().end, token + tokens_at_once)};
            const tile_shape where{l, part, tokens, layer.kv_heads, layer.dim(part), tokens_at_once};
            values_.resize(where.channels() * where.stride);
            means_.resize(where.channels() * where.stride);
            gather_tile(cache, where, values_.data());
            const std::uint32_t scale = storage_scales.empty() ? std::bit_cast<std::uint32_t>(1.0F) : storage_scales[tile];
            if (static_cast<pass>(pass_) == pass::means) {
              observe_means(where, channel, is_positive_normal(scale) ? static_cast<double>(std::bit_cast<float>(scale)) : 1.0);
              continue;
            }
            observe_tile<typename Codec::predictor_type>(models_[0], where, tile, channel, prediction, scale);
            if constexpr (has_fallback) observe_tile<channel_mean>(models_[1], where, tile, channel, no_prediction{}, scale);
          }
          channel += layer.channels(part);
          ++tile;
        }
      }
    } catch (...) {
      return error{error_code::out_of_memory, "calibrator"};
    }
    return {};
  }

  /// Ends a pass. Errors: not_calibrated (no finite value was seen).
  [[nodiscard]] result<void> next_pass() noexcept {
    const pass ended = static_cast<pass>(pass_);
    if (ended == pass::means) {
      std::vector<std::uint32_t>& means = models_.back().parameters.means;
      std::uint64_t seen = 0;
      for (std::size_t c = 0; c < sums_.size(); ++c) {
        seen += sums_[c].count;
        means[c] = std::bit_cast<std::uint32_t>(static_cast<float>(sums_[c].average()));
      }
      if (seen == 0) return error{error_code::not_calibrated, "no finite value was seen"};
    }
    if (ended == pass::spreads) {
      for (model& m : models_) {
        for (std::size_t c = 0; c < m.squares.size(); ++c) m.parameters.sigmas[c] = log2_of_root(m.squares[c].average());
      }
    }
    ++pass_;
    return {};
  }

  /// The profile. Errors: not_calibrated (a pass is missing), out_of_memory.
  [[nodiscard]] result<profile_data> finish() noexcept {
    if (pass_ < passes) return error{error_code::not_calibrated, "all passes over the data are needed"};
    try {
      profile_data data;
      data.format = Codec::format;
      data.residual = residual::id;
      data.shared_contexts = residual::shared_contexts;
      data.tile_contexts = own_contexts;
      data.alphabet = residual::alphabet;
      data.precision = Codec::entropy_coder_type::precision;
      data.shape = shape_;
      data.rotation = rotation_;
      for (model& m : models_) {
        if (const auto built = build_tables(m); !built) return built.error();
        data.models.push_back(m.parameters);
      }
      return data;
    } catch (...) {
      return error{error_code::out_of_memory, "profile"};
    }
  }

 private:
  static constexpr bool has_fallback = !std::same_as<typename Codec::predictor_type, channel_mean>;
  static constexpr std::uint64_t tokens_at_once = 256;
  static constexpr std::size_t own_contexts = residual::contexts - residual::shared_contexts;
  static constexpr std::size_t alphabet = static_cast<std::size_t>(residual::alphabet);
  enum class pass { means = 0, spreads = 1, counts = 2 };

  struct running_average {
    std::uint64_t count = 0;
    double sum = 0;

    void add(double value) noexcept {
      if (!std::isfinite(value)) return;
      ++count;
      sum += value;
    }
    [[nodiscard]] double average() const noexcept { return count == 0 ? 0.0 : sum / static_cast<double>(count); }
  };

  /// log2 of the root of a mean square in 1/256 octave.
  [[nodiscard]] static std::int16_t log2_of_root(double mean_square) noexcept {
    const double octaves = mean_square > 0 ? 128.0 * std::log2(mean_square) : -std::numeric_limits<double>::infinity();
    return static_cast<std::int16_t>(std::lrint(std::clamp(octaves, -32768.0, 32767.0)));
  }

  struct model {
    model_parameters parameters;
    std::vector<running_average> squares;  // of residuals, per channel
    std::vector<context_counts<residual>> contexts;  // the shared ones, then the others tile by tile
    std::uint64_t values = 0;
    std::uint64_t raw_bits = 0;
  };

  calibrator(const cache_shape& shape, const rotary& rotation)
      : shape_(shape), rotation_(rotation), tiles_(count_tiles(shape)), sums_(static_cast<std::size_t>(shape.channels())) {
    const auto channels = static_cast<std::size_t>(shape.channels());
    models_.resize(has_fallback ? 2 : 1);
    for (model& m : models_) {
      m.parameters.sigmas.resize(channels);
      m.squares.resize(channels);
      m.contexts.resize(residual::shared_contexts + tiles_ * own_contexts);
      for (std::size_t i = 0; i < m.contexts.size(); ++i) {
        const std::size_t own = i < residual::shared_contexts ? i : residual::shared_contexts + (i - residual::shared_contexts) % own_contexts;
        m.contexts[i].context = static_cast<std::int32_t>(own);
      }
    }
    models_[0].parameters.predictor = Codec::predictor_type::id;
    models_.back().parameters.predictor = channel_mean::id;
    models_.back().parameters.means.resize(channels);
  }

  /// Means of values; of keys before rotation.
  void observe_means(const tile_shape& where, std::size_t channel, double scale) {
    const auto tokens = static_cast<std::size_t>(where.tokens.size());
    const auto value = [&](std::size_t c, std::size_t t) {
      return scale * static_cast<double>(scalar::from_bits(values_[c * where.stride + t]).to_float());
    };
    const std::uint32_t rotated = where.part == cache_part::key ? rotation_.dim() : 0;
    for (std::uint32_t head = 0; head < where.heads; ++head) {
      const std::size_t base = std::size_t{head} * where.dim;
      for (std::size_t c = base + rotated; c < base + where.dim; ++c) {
        for (std::size_t t = 0; t < tokens; ++t) sums_[channel + c].add(value(c, t));
      }
      for (std::uint32_t i = 0; i < rotated / 2; ++i) {
        const auto [first, second] = rotation_.pair(i);
        for (std::size_t t = 0; t < tokens; ++t) {
          const integer_rotation by = rotation_by_turns((where.tokens.begin + t) * rotation_.turns()[i]);
          const double cosine = std::ldexp(static_cast<double>(by.cosine), -30);
          const double sine = std::ldexp(static_cast<double>(by.sine), -30);
          const double a = value(base + first, t);
          const double b = value(base + second, t);
          sums_[channel + base + first].add(a * cosine + b * sine);
          sums_[channel + base + second].add(b * cosine - a * sine);
        }
      }
    }
  }

  template <class Predictor, class Prediction>
  void observe_tile(model& m, const tile_shape& where, std::size_t tile, std::size_t channel, const Prediction& prediction, std::uint32_t scale_bits) {
    const auto tokens = static_cast<std::size_t>(where.tokens.size());
    const std::span<const std::uint32_t> means =
        m.parameters.means.empty() ? std::span<const std::uint32_t>{} : std::span(m.parameters.means).subspan(channel, where.channels());
    Predictor::predict(where, {means, &rotation_}, prediction, means_.data());
    if (static_cast<pass>(pass_) == pass::spreads) {
      const double scale = is_positive_normal(scale_bits) ? static_cast<double>(std::bit_cast<float>(scale_bits)) : 1.0;
      for (std::size_t c = 0; c < where.channels(); ++c) {
        running_average& squares = m.squares[channel + c];
        for (std::size_t t = 0; t < tokens; ++t) {
          const double value = scale * static_cast<double>(scalar::from_bits(values_[c * where.stride + t]).to_float());
          const double mean = static_cast<double>(std::bit_cast<float>(means_[c * where.stride + t]));
          const double missed = value - (std::isfinite(mean) ? mean : 0.0);
          squares.add(missed * missed);
        }
      }
      return;
    }
    const integer_divider divide(scale_bits);
    const std::int32_t shift = is_positive_normal(scale_bits) ? log2_in_256ths(scale_bits) : 0;
    typename residual::row row;
    std::array<std::int32_t, row_lanes> sigmas{};
    std::array<std::uint32_t, row_lanes> row_means{};
    std::array<std::uint8_t, row_lanes> symbols{};
    std::array<std::byte, 256> scratch{};
    for (std::size_t c = 0; c < where.channels(); ++c) {
      sigmas.fill(m.parameters.sigmas[channel + c] - shift);
      for (std::size_t first = 0; first < tokens; first += row_lanes) {
        const std::size_t n = std::min<std::size_t>(row_lanes, tokens - first);
        for (std::size_t i = 0; i < row_lanes; ++i) row_means[i] = divide(means_[c * where.stride + first + i]);
        residual::prepare(row_means.data(), sigmas.data(), row);
        bit_writer raw(scratch);
        const auto* const values = values_.data() + c * where.stride + first;
        residual::to_symbols(values, row, symbols.data(), static_cast<int>(n));
        residual::put_raw(values, row, symbols.data(), raw, static_cast<int>(n));
        m.raw_bits += raw.bits();
        m.values += n;
        for (std::size_t i = 0; i < n; ++i) {
          const auto context = static_cast<std::size_t>(row.context[i]);
          ++m.contexts[context + (context < residual::shared_contexts ? 0 : tile * own_contexts)].counts[symbols[i]];
        }
      }
    }
  }

  [[nodiscard]] result<void> build_tables(model& m) {
    auto clusters = cluster_contexts<residual>(m.contexts, Codec::entropy_coder_type::precision);
    if (!clusters) return clusters.error();
    double bits = static_cast<double>(m.raw_bits);
    std::vector<std::array<float, alphabet>> symbol_bits;
    for (const frequency_table& table : clusters->tables) symbol_bits.push_back(detail::symbol_bits<residual>(table));
    for (std::size_t i = 0; i < m.contexts.size(); ++i) {
      for (std::size_t s = 0; s < alphabet; ++s)
        bits += static_cast<double>(m.contexts[i].counts[s]) * static_cast<double>(symbol_bits[clusters->table_of[i]][s]);
    }
    m.parameters.bits_per_value_q8 = static_cast<std::uint32_t>(std::lrint(256 * bits / static_cast<double>(std::max<std::uint64_t>(m.values, 1))));
    const auto shared_end = clusters->table_of.begin() + residual::shared_contexts;
    m.parameters.shared_tables.assign(clusters->table_of.begin(), shared_end);
    m.parameters.tile_tables.assign(shared_end, clusters->table_of.end());
    m.parameters.tables = std::move(clusters->tables);
    return {};
  }

  cache_shape shape_;
  rotary rotation_;
  std::size_t tiles_;
  std::vector<running_average> sums_;  // of values, per channel; keys before rotation
  int pass_ = 0;
  std::vector<model> models_;
  std::vector<typename scalar::bits_type> values_;
  std::vector<std::uint32_t> means_;
};

}  // namespace kvexact

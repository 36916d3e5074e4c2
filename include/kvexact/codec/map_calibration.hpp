// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvexact/codec/calibration_statistics.hpp>
#include <kvexact/codec/profile_data.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/engine/layerwise_predictor.hpp>
#include <kvexact/prediction/channel_mean.hpp>
#include <kvexact/prediction/closed_loop.hpp>
#include <kvexact/prediction/cross_layer.hpp>
#include <kvexact/prediction/layer_maps.hpp>
#include <kvexact/prediction/map_fit.hpp>
#include <kvexact/prediction/map_session.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/tensor/tile.hpp>

namespace kvexact {

/// How maps are fitted. The defaults are good; the rest trades size for multiply-adds and profile bytes.
struct calibration_options {
  std::uint32_t layers_back = 0;        ///< layers that a map looks at, up to 8; 0: 3 without a model, 1 with one
  std::uint32_t block_size = 16;        ///< channels that are coded together, and help to predict the next of their tile; 0: whole tiles
  std::uint32_t rank = 0;               ///< rank of the maps from other tiles; 0: full
  bool per_head = false;                ///< maps within each head only
  bool clamped_feedback = true;         ///< closed loop, fp8: the engine that made the cache attended to the values before quantisation
  double ridge = 1e-3;                  ///< of the maps at least, in units of the mean square of the features; more where data is scarce
  double gain_ridge = 1e-4;             ///< of the closed loop's correction at least
  instruction_set set = best_instruction_set();
};

/// A cache to learn from. `prediction`: what the codec's predictor wants of the caller; for `closed_loop` a pointer to an engine of
/// its own at the cache's first token; if that is a `layerwise_teacher` the correction is fitted as well. `storage_scales` as for the encoder.
template <kv_cache Cache, class Prediction = no_prediction>
struct calibration_example {
  Cache cache;
  Prediction prediction{};
  std::span<const std::uint32_t> storage_scales{};
};

namespace detail {

template <class Example>
[[nodiscard]] std::uint32_t storage_scale_of(const Example& example, std::size_t tile) noexcept {
  return example.storage_scales.empty() ? std::bit_cast<std::uint32_t>(1.0F) : example.storage_scales[tile];
}

/// For predictors of single tiles.
struct no_map_calibration {
  template <class... Arguments>
  explicit no_map_calibration(const Arguments&...) noexcept {}
};

/// Fits the maps of a mapped predictor, tile by tile over all examples, running each example's session along: every map is fitted to what the
/// integer arithmetic of coding will really see.
template <class Codec, class Example>
class map_calibration {
 public:
  using scalar = typename Codec::scalar;
  using bits_type = typename scalar::bits_type;
  using predictor_type = typename Codec::predictor_type;
  using session_type = map_session<predictor_type, scalar>;
  static constexpr bool has_engine = std::same_as<predictor_type, closed_loop>;

  map_calibration(const cache_shape& shape, const rotary& rotation, std::span<const Example> examples, const calibration_options& options)
      : shape_(shape), rotation_(rotation), examples_(examples), options_(options) {
    data_.layers_back = options.layers_back > 0 ? options.layers_back : predictor_type::needs_prediction ? 1U : 3U;
    data_.rank = options.rank;
    data_.block_size = options.per_head && options.block_size == 0 ? cache_shape::max_channels : options.block_size;
    data_.per_head = options.per_head;
    data_.clamped_feedback = has_engine && sizeof(bits_type) == 1 && options.clamped_feedback;
    if constexpr (has_teacher()) {
      if (!examples.empty()) data_.hidden_width = static_cast<std::uint32_t>(examples.front().prediction->hidden_width());
    }
    maps_ = prepared_maps(data_, shape, rotation);
    sequences_.resize(examples.size());
    for (std::size_t i = 0; i < examples.size(); ++i) {
      sequence& s = sequences_[i];
      s.stride = round_up(static_cast<std::size_t>(examples[i].cache.tokens().size()), 64);
      workspace counter;
      (void)session_type::buffers::take(counter, shape, rotation, maps_, s.stride);
      s.memory.resize(counter.needed());
      workspace space(s.memory);
      s.session = session_type(shape, rotation, maps_, examples[i].storage_scales, options.set, session_type::buffers::take(space, shape, rotation, maps_, s.stride));
    }
  }
  map_calibration(const map_calibration&) = delete;
  map_calibration& operator=(const map_calibration&) = delete;

  [[nodiscard]] result<void> begin() {
    return for_each([](const Example& example, sequence& s) { return s.session.begin(example.cache.tokens(), s.stride, prediction_of(example)); });
  }

  /// Fits the tile's map, and finds the spreads and the symbols of what remains.
  [[nodiscard]] result<void> calibrate_tile(const tile_shape& tile_at, std::size_t tile, std::span<const std::uint32_t> means, model_parameters& model,
                                            symbol_counter<typename Codec::residual_model_type>& counter) {
    data_.tiles.emplace_back();
    tile_map& map = data_.tiles.back();
    map.feature_scales.resize(tile_at.channels());
    map.missed_scales.resize(tile_at.channels());
    double largest = 0;
    const auto predicted = for_each([&](const Example& example, sequence& s) -> result<void> {
      const tile_shape where = at(tile_at, example, s);
      s.values.assign(where.channels() * s.stride, bits_type{0});
      s.means.resize(where.channels() * s.stride);
      gather_tile(example.cache, where, s.values.data());
      if (const auto done = s.session.predict_base(where, means, prediction_of(example)); !done) return done;
      for (const bits_type bits : s.values) {
        const double value = std::fabs(static_cast<double>(scalar::from_bits(bits).to_float()));
        if (std::isfinite(value)) largest = std::max(largest, factor_of(storage_scale_of(example, tile)) * value);
      }
      return {};
    });
    if (!predicted) return predicted;

    // Values may grow to eight times what was seen; what is finer than 2^-18 of the spread is noise.
    const std::int32_t coarsest = exponent_of(largest) + 3 - 30;
    std::vector<double> spreads = base_spreads(tile_at, tile, map, coarsest);
    const double widest = spreads.empty() ? 0 : *std::max_element(spreads.begin(), spreads.end());
    spreads = base_spreads(tile_at, tile, map, std::max(coarsest, exponent_of(std::ldexp(widest, coarsest)) - 18));
    for (std::size_t c = 0; c < spreads.size(); ++c) map.feature_scales[c] = scale_for(spreads[c]);
    maps_.set(tile, map);
    // The tile's own features. Clamped ones depend on the means, so these get a first map without them.
    walk(tile_at, tile);
    if (data_.clamped_feedback && data_.block_size > 0) {
      if (const auto fitted = fit(tile_at, tile, map, spreads, false); !fitted) return fitted;
      maps_.set(tile, map);
      walk(tile_at, tile);
    }
    if (const auto fitted = fit(tile_at, tile, map, spreads, true); !fitted) return fitted;
    maps_.set(tile, map);
    walk(tile_at, tile);

    const std::size_t first = model.sigmas.size();
    find_spreads(tile_at, tile, map, model.sigmas);
    maps_.set(tile, map);
    const auto observed = for_each([&](const Example& example, sequence& s) -> result<void> {
      const tile_shape where = at(tile_at, example, s);
      counter.count(where, tile, s.values.data(), s.means.data(), model.sigmas.data() + first, s.session.token_scales(), storage_scale_of(example, tile));
      walk(where, tile, s);
      s.session.scale_tokens(where);
      return {};
    });
    if (!observed) return observed;
    if (tile_at.part == cache_part::key && shape_.layer(tile_at.layer).value_dim > 0) return {};
    if constexpr (has_teacher()) {
      if (data_.hidden_width > 0) {
        if (const auto fitted = fit_gain(tile_at.layer); !fitted) return fitted;
      }
    }
    return for_each([&](const Example& example, sequence& s) { return s.session.advance(at(tile_at, example, s), prediction_of(example)); });
  }

  [[nodiscard]] layer_maps take() noexcept { return std::move(data_); }

 private:
  static constexpr std::size_t tokens_at_once = 256;
  static constexpr double units_of_target = 256;  // of the spread

  struct sequence {
    std::size_t stride = 0;
    std::vector<std::byte> memory;
    session_type session;
    std::vector<bits_type> values;      // of the tile at hand
    std::vector<std::uint32_t> means;
  };

  static constexpr bool has_teacher() noexcept {
    if constexpr (has_engine) {
      return layerwise_teacher<std::remove_reference_t<decltype(*std::declval<const Example&>().prediction)>>;
    } else {
      return false;
    }
  }
  [[nodiscard]] static auto& prediction_of(const Example& example) noexcept {
    if constexpr (has_engine) {
      return *example.prediction;
    } else {
      return example.prediction;
    }
  }
  [[nodiscard]] static std::size_t round_up(std::size_t n, std::size_t multiple) noexcept { return (n + multiple - 1) / multiple * multiple; }
  [[nodiscard]] static std::int32_t exponent_of(double value) noexcept { return value > 0 ? std::clamp(std::ilogb(value) + 1, -150, 150) : -150; }
  /// Of a spread in fixed point: what turns it into 16.
  [[nodiscard]] static std::uint32_t scale_for(double spread) noexcept {
    return spread > 0 ? static_cast<std::uint32_t>(std::clamp(16.0 * 4294967296.0 / spread, 1.0, 2147483647.0)) : 0U;
  }
  [[nodiscard]] static tile_shape at(const tile_shape& tile_at, const Example& example, const sequence& s) noexcept {
    tile_shape where = tile_at;
    where.tokens = example.cache.tokens();
    where.stride = s.stride;
    return where;
  }

  template <class Visit>
  [[nodiscard]] result<void> for_each(Visit&& visit) {
    for (std::size_t i = 0; i < examples_.size(); ++i) {
      if (examples_[i].cache.tokens().size() == 0) continue;
      if (const auto done = visit(examples_[i], sequences_[i]); !done) return done;
    }
    return {};
  }

  /// What coding does with a tile, after its base prediction: means and features of all blocks.
  void walk(const tile_shape& where, std::size_t tile, sequence& s) {
    s.session.start_maps(where, tile);
    for (const channel_block& block : s.session.blocks(tile)) {
      s.session.predict(where, tile, block, s.means.data());
      s.session.accept(where, tile, block, s.values.data());
    }
  }
  void walk(const tile_shape& tile_at, std::size_t tile) {
    (void)for_each([&](const Example& example, sequence& s) -> result<void> {
      walk(at(tile_at, example, s), tile, s);
      return {};
    });
  }

  /// Root mean squares of what the base prediction misses, keys before rotation, in fixed point of 2^unit, which the map takes.
  [[nodiscard]] std::vector<double> base_spreads(const tile_shape& tile_at, std::size_t tile, tile_map& map, std::int32_t unit) {
    map.unit = unit;
    maps_.set(tile, map);
    walk(tile_at, tile);
    std::vector<running_average> squares(tile_at.channels());
    for_each_residual(tile_at, tile, [&](std::size_t c, std::size_t, const std::int32_t* residual, const std::int32_t*, std::size_t count) {
      for (std::size_t t = 0; t < count; ++t) squares[c].add(static_cast<double>(residual[t]) * residual[t]);
    });
    std::vector<double> spreads;
    for (const running_average& square : squares) spreads.push_back(std::sqrt(square.average()));
    return spreads;
  }

  /// Residuals to the centres of cells.
  template <class Visit>
  void for_each_residual(const tile_shape& where, std::size_t tile, sequence& s, Visit&& visit) {
    for (const channel_block& block : s.session.blocks(tile)) {
      s.session.for_each_residual(where, tile, block, s.values.data(), false,
                                  [&](std::size_t c, std::size_t place, const std::int32_t* residual, const std::int32_t* missed) {
                                    visit(c, place, residual, missed, static_cast<std::size_t>(where.tokens.size()));
                                  });
    }
  }
  template <class Visit>
  void for_each_residual(const tile_shape& tile_at, std::size_t tile, Visit&& visit) {
    (void)for_each([&](const Example& example, sequence& s) -> result<void> {
      for_each_residual(at(tile_at, example, s), tile, s, visit);
      return {};
    });
  }

  /// A run of channels of one layer's features.
  struct feature_run {
    std::uint32_t layer;
    std::size_t first, count;
  };
  /// Features of a tile in the order of the weights, those from other tiles and then its own; with maps by head those of one head.
  [[nodiscard]] std::vector<feature_run> feature_runs(const tile_shape& tile_at, std::uint32_t head, bool with_own) const {
    std::vector<feature_run> runs;
    const auto add = [&](std::uint32_t layer, bool with_values) {
      const layer_shape& of = shape_.layer(layer);
      if (!data_.per_head) return runs.push_back({layer, 0, with_values ? of.channels() : of.channels(cache_part::key)});
      runs.push_back({layer, std::size_t{head} * of.key_dim, of.key_dim});
      if (with_values && of.value_dim > 0) runs.push_back({layer, of.channels(cache_part::key) + std::size_t{head} * of.value_dim, of.value_dim});
    };
    for (std::uint32_t back = 1; back <= std::min(data_.layers_back, tile_at.layer); ++back) add(tile_at.layer - back, true);
    if (tile_at.part == cache_part::value) add(tile_at.layer, false);
    if (with_own) {
      const std::size_t first = tile_at.part == cache_part::value ? shape_.layer(tile_at.layer).channels(cache_part::key) : 0;
      const std::size_t skipped = data_.per_head ? std::size_t{head} * tile_at.dim : 0;
      runs.push_back({tile_at.layer, first + skipped, data_.per_head ? tile_at.dim : tile_at.channels()});
    }
    return runs;
  }

  [[nodiscard]] result<void> fit(const tile_shape& tile_at, std::size_t tile, tile_map& map, std::span<const double> spreads, bool with_own) {
    const auto blocks = blocks_of(shape_, rotation_, data_, tile_at.layer, tile_at.part);
    const std::uint32_t parts = data_.per_head ? tile_at.heads : 1;
    const std::size_t outputs = tile_at.channels() / parts;
    const std::size_t others = count_features(shape_, data_, tile_at.layer, tile_at.part);
    const bool sees_own = with_own && blocks.size() > parts;
    const std::size_t features = others + (sees_own ? outputs : 0);
    map.blocks.assign(blocks.size(), {});
    if (features == 0) return size_matrices(tile_at, map, blocks);

    std::vector<normal_equations> equations;
    for (std::uint32_t head = 0; head < parts; ++head) {
      auto made = normal_equations::make(features, outputs);
      if (!made) return made.error();
      equations.push_back(*std::move(made));
    }
    std::vector<std::int16_t> x(features * tokens_at_once);
    std::vector<std::int16_t> y(outputs * tokens_at_once);
    std::vector<std::int16_t> targets;  // in coding order
    std::vector<double> energy(parts);
    (void)for_each([&](const Example& example, sequence& s) -> result<void> {
      const tile_shape where = at(tile_at, example, s);
      const auto count = static_cast<std::size_t>(where.tokens.size());
      const std::size_t stride = round_up(count, tokens_at_once);
      targets.assign(tile_at.channels() * stride, 0);
      for_each_residual(where, tile, s, [&](std::size_t c, std::size_t place, const std::int32_t* residual, const std::int32_t*, std::size_t) {
        if (!(spreads[c] > 0)) return;
        for (std::size_t t = 0; t < count; ++t) targets[place * stride + t] = narrow(residual[t] * units_of_target / spreads[c]);
      });
      for (std::uint32_t head = 0; head < parts; ++head) {
        const auto runs = feature_runs(tile_at, head, sees_own);
        for (std::size_t i = head * outputs * stride; i < (head + 1) * outputs * stride; ++i) energy[head] += static_cast<double>(targets[i]) * targets[i];
        for (std::size_t first = 0; first < count; first += tokens_at_once) {
          const std::size_t n = std::min(tokens_at_once, count - first);
          gather_features(s, runs, first, n, x);
          for (std::size_t o = 0; o < outputs; ++o) std::copy_n(targets.data() + (head * outputs + o) * stride + first, tokens_at_once, y.data() + o * tokens_at_once);
          equations[head].add(x.data(), y.data(), tokens_at_once, n, options_.set);
        }
      }
      return {};
    });

    // Weights [place of the channel][feature], in units of the tile.
    std::vector<double> weights;
    for (std::uint32_t head = 0; head < parts; ++head) {
      std::vector<std::size_t> leading;
      for (const channel_block& block : blocks) {
        if (data_.per_head && block.head != head) continue;
        leading.insert(leading.end(), block.count, others + (sees_own ? count_own_features(data_, block, tile_at.dim) : 0));
      }
      auto solved = equations[head].solve_leading(options_.ridge, leading);
      if (!solved) return solved.error();
      solved = equations[head].solve_leading(std::max(options_.ridge, equations[head].best_ridge(*solved, energy[head])), leading);
      if (!solved) return solved.error();
      weights.insert(weights.end(), solved->begin(), solved->end());
    }
    low_rank_map factors;
    const std::size_t rank = others == 0 ? 0 : std::min<std::size_t>(data_.rank, outputs);
    if (rank > 0) {
      std::vector<double> from_others;
      std::vector<std::uint32_t> subset(others);
      std::iota(subset.begin(), subset.end(), 0U);
      for (std::size_t o = 0; o < outputs; ++o)
        from_others.insert(from_others.end(), weights.begin() + static_cast<std::ptrdiff_t>(o * features), weights.begin() + static_cast<std::ptrdiff_t>(o * features + others));
      auto found = equations.front().low_rank(from_others, rank, subset);
      if (!found) return found.error();
      factors = *std::move(found);
      map.inner = quantise_rows(factors.inner, rank, others, layer_maps::scale_shift);
    }
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const std::size_t own = count_own_features(data_, blocks[b], tile_at.dim);
      const std::size_t shared = rank > 0 ? rank : others;
      std::vector<double> rows;
      for (std::uint32_t k = 0; k < blocks[b].count; ++k) {
        const std::size_t place = blocks[b].first + k;
        const double unit = spreads[blocks[b].channel(k)] / units_of_target;
        for (std::size_t i = 0; i < shared; ++i) rows.push_back(unit * (rank > 0 ? factors.outer[place * rank + i] : weights[place * features + i]));
        for (std::size_t i = 0; i < own; ++i) rows.push_back(sees_own ? unit * weights[place * features + others + i] : 0.0);
      }
      if (shared + own > 0) map.blocks[b] = quantise_rows(rows, blocks[b].count, shared + own, layer_maps::scale_shift);
    }
    return {};
  }

  /// Maps of a tile that has no features to map from.
  [[nodiscard]] result<void> size_matrices(const tile_shape& tile_at, tile_map& map, std::span<const channel_block> blocks) const {
    for_each_matrix(data_, 0, tile_at.channels(), tile_at.dim, blocks, [&](std::size_t m, std::size_t rows, std::size_t depth) {
      if (m > 0 && depth > 0) map.blocks[m - 1] = quantise_rows(std::vector<double>(rows * depth), rows, depth, layer_maps::scale_shift);
    });
    return {};
  }

  [[nodiscard]] static std::int16_t narrow(double value) noexcept { return static_cast<std::int16_t>(std::lrint(std::clamp(value, -32767.0, 32767.0))); }

  /// Features of up to 256 tokens as [feature][token], zero beyond them.
  void gather_features(const sequence& s, std::span<const feature_run> runs, std::size_t first, std::size_t n, std::span<std::int16_t> x) const {
    std::fill(x.begin(), x.end(), std::int16_t{0});
    std::size_t row = 0;
    for (const feature_run& run : runs) {
      const std::int16_t* const from = s.session.features(run.layer) + run.first;
      for (std::size_t t = 0; t < n; ++t) {
        const std::int16_t* const token = from + (first + t) * s.session.feature_stride();
        for (std::size_t c = 0; c < run.count; ++c) x[(row + c) * tokens_at_once + t] = token[c];
      }
      row += run.count;
    }
  }

  /// Spreads of what the maps miss: in sixteenths for the token scale, and as sigmas with the token scale divided out.
  void find_spreads(const tile_shape& tile_at, std::size_t tile, tile_map& map, std::vector<std::int16_t>& sigmas) {
    std::vector<running_average> squares(tile_at.channels());
    for_each_residual(tile_at, tile, [&](std::size_t c, std::size_t, const std::int32_t*, const std::int32_t* missed, std::size_t count) {
      for (std::size_t t = 0; t < count; ++t) squares[c].add(static_cast<double>(missed[t]) * missed[t]);
    });
    for (std::size_t c = 0; c < squares.size(); ++c) map.missed_scales[c] = scale_for(std::sqrt(squares[c].average()));

    std::vector<running_average> scaled(tile_at.channels());
    std::vector<double> weights;
    (void)for_each([&](const Example& example, sequence& s) -> result<void> {
      const tile_shape where = at(tile_at, example, s);
      const double factor = factor_of(storage_scale_of(example, tile));
      weights.resize(where.tokens.size());
      for (std::size_t t = 0; t < weights.size(); ++t) weights[t] = std::exp2(-s.session.token_scales()[t] / 128.0);
      for (std::size_t c = 0; c < where.channels(); ++c) {
        for (std::size_t t = 0; t < weights.size(); ++t) {
          const double value = factor * static_cast<double>(scalar::from_bits(s.values[c * s.stride + t]).to_float());
          const double missed = value - static_cast<double>(std::bit_cast<float>(s.means[c * s.stride + t]));
          scaled[c].add(missed * missed * weights[t]);
        }
      }
      return {};
    });
    for (const running_average& square : scaled) sigmas.push_back(log2_of_root(square.average()));
  }

  /// Least squares from the residuals of a layer to the error of its hidden states.
  [[nodiscard]] result<void> fit_gain(std::uint32_t layer) {
    const std::size_t width = data_.hidden_width;
    const std::size_t features = shape_.layer(layer).channels();
    const std::array<feature_run, 1> runs{{{layer, 0, features}}};
    std::vector<std::vector<float>> errors;
    std::vector<running_average> squares(width);
    const auto measured = for_each([&](const Example& example, sequence&) -> result<void> {
      errors.emplace_back(static_cast<std::size_t>(example.cache.tokens().size()) * width);
      if (const auto done = example.prediction->hidden_error(layer, errors.back()); !done) return done;
      for (std::size_t i = 0; i < errors.back().size(); ++i) squares[i % width].add(static_cast<double>(errors.back()[i]) * static_cast<double>(errors.back()[i]));
      return {};
    });
    if (!measured) return measured;
    auto equations = normal_equations::make(features, width);
    if (!equations) return equations.error();
    std::vector<std::int16_t> x(features * tokens_at_once);
    std::vector<std::int16_t> y(width * tokens_at_once);
    std::vector<double> units(width);
    for (std::size_t h = 0; h < width; ++h) units[h] = std::sqrt(squares[h].average()) / units_of_target;
    std::size_t number = 0;
    double energy = 0;
    const auto added = for_each([&](const Example& example, sequence& s) -> result<void> {
      const std::vector<float>& error_of = errors[number++];
      const auto count = static_cast<std::size_t>(example.cache.tokens().size());
      for (std::size_t first = 0; first < count; first += tokens_at_once) {
        const std::size_t n = std::min(tokens_at_once, count - first);
        gather_features(s, runs, first, n, x);
        std::fill(y.begin(), y.end(), std::int16_t{0});
        for (std::size_t t = 0; t < n; ++t) {
          for (std::size_t h = 0; h < width; ++h) {
            const double value = static_cast<double>(error_of[(first + t) * width + h]);
            if (units[h] > 0 && std::isfinite(value)) y[h * tokens_at_once + t] = narrow(value / units[h]);
            energy += static_cast<double>(y[h * tokens_at_once + t]) * y[h * tokens_at_once + t];
          }
        }
        equations->add(x.data(), y.data(), tokens_at_once, n, options_.set);
      }
      return {};
    });
    if (!added) return added;
    auto weights = equations->solve(options_.gain_ridge);
    if (!weights) return weights.error();
    weights = equations->solve(std::max(options_.gain_ridge, equations->best_ridge(*weights, energy)));
    if (!weights) return weights.error();
    for (std::size_t h = 0; h < width; ++h) {
      for (std::size_t i = 0; i < features; ++i) (*weights)[h * features + i] *= units[h];
    }
    data_.gains.push_back(quantise_rows(*weights, width, features, layer_maps::gain_shift));
    maps_.set_gain(layer, data_.gains.back());
    return {};
  }

  const cache_shape& shape_;
  const rotary& rotation_;
  std::span<const Example> examples_;
  calibration_options options_;
  layer_maps data_;
  prepared_maps maps_;
  std::vector<sequence> sequences_;
};

}  // namespace detail
}  // namespace kvexact

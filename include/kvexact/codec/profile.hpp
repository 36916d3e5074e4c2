// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/codec/profile_data.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/entropy/entropy_model.hpp>
#include <kvexact/prediction/channel_mean.hpp>
#include <kvexact/prediction/layer_maps.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact {

/// A profile made ready for coding with `Codec`: checked against the codec's policies, tables built. Immutable, so any number of
/// encoders and decoders in any number of threads may share it. `Codec` is a `codec<...>`.
template <class Codec>
class profile {
 public:
  using residual_model = typename Codec::residual_model_type;
  using table_set_type = table_set<Codec::entropy_coder_type::precision>;

  /// One predictor's parameters, addressed by tile.
  class model_view {
   public:
    [[nodiscard]] std::span<const std::uint32_t> means(std::size_t tile) const noexcept {
      return means_.empty() ? std::span<const std::uint32_t>{} : std::span(means_).subspan((*channels_)[tile], (*channels_)[tile + 1] - (*channels_)[tile]);
    }
    [[nodiscard]] std::span<const std::int16_t> sigmas(std::size_t tile) const noexcept {
      return std::span(sigmas_).subspan((*channels_)[tile], (*channels_)[tile + 1] - (*channels_)[tile]);
    }
    /// Table of every context of the residual model in this tile.
    [[nodiscard]] std::span<const std::uint16_t> context_tables(std::size_t tile) const noexcept {
      return std::span(context_tables_).subspan(tile * residual_model::contexts, residual_model::contexts);
    }
    [[nodiscard]] const table_set_type& tables() const noexcept { return tables_; }
    /// Without tiles where the predictor has none.
    [[nodiscard]] const prepared_maps& maps() const noexcept { return maps_; }

   private:
    friend class profile;
    model_view(const model_parameters& from, const profile& of, table_set_type tables)
        : channels_(of.channels_.get()), means_(from.means), sigmas_(from.sigmas), tables_(std::move(tables)) {
      if (!from.maps.empty()) maps_ = prepared_maps(from.maps, of.shape_, of.rotation_);
      const std::size_t tiles = channels_->size() - 1;
      constexpr std::size_t own = residual_model::contexts - residual_model::shared_contexts;
      context_tables_.reserve(tiles * residual_model::contexts);
      for (std::size_t tile = 0; tile < tiles; ++tile) {
        context_tables_.insert(context_tables_.end(), from.shared_tables.begin(), from.shared_tables.end());
        const auto first = from.tile_tables.begin() + static_cast<std::ptrdiff_t>(tile * own);
        context_tables_.insert(context_tables_.end(), first, first + own);
      }
    }

    const std::vector<std::size_t>* channels_;
    std::vector<std::uint32_t> means_;
    std::vector<std::int16_t> sigmas_;
    std::vector<std::uint16_t> context_tables_;
    table_set_type tables_;
    prepared_maps maps_;
  };

  /// Reads a profile file. Errors: those of `parse_profile` and `make`.
  [[nodiscard]] static result<profile> parse(std::span<const std::byte> file, build_for use = build_for::both) noexcept {
    const auto parsed = parse_profile(file);
    if (!parsed) return parsed.error();
    return make(parsed->data, parsed->hash, use);
  }

  /// Errors: dtype_mismatch (number format), profile_mismatch (residual model, table precision, or no model for the codec's predictor),
  /// corrupt (means or maps that the predictor needs are missing or do not fit), those of building the tables, out_of_memory.
  [[nodiscard]] static result<profile> make(const profile_data& data, std::uint64_t hash, build_for use = build_for::both) noexcept {
    if (data.format != Codec::format) return error{error_code::dtype_mismatch, "the profile is for another number format"};
    if (data.residual != residual_model::id || data.shared_contexts != residual_model::shared_contexts ||
        data.tile_contexts != residual_model::contexts - residual_model::shared_contexts || data.alphabet != residual_model::alphabet)
      return error{error_code::profile_mismatch, "the profile is for another residual model"};
    if (data.precision != Codec::entropy_coder_type::precision)
      return error{error_code::profile_mismatch, "the profile's tables have another precision"};
    try {
      profile made(data, hash);
      const std::size_t main = data.find_model(Codec::predictor_type::id);
      if (main == data.models.size()) return error{error_code::profile_mismatch, "the profile was not calibrated for this predictor"};
      if (Codec::predictor_type::needs != dependency::none) {
        if (data.models[main].maps.empty()) return error{error_code::corrupt, "the profile lacks the maps of its predictor"};
        if (const auto fits = expect_maps_fit(data.models[main].maps, data.shape, data.rotation); !fits) return fits.error();
      }
      if (const auto added = made.add(data.models[main], use); !added) return added.error();
      const std::size_t fallback = data.find_model(channel_mean::id);
      if (fallback != main && fallback != data.models.size()) {
        if (const auto added = made.add(data.models[fallback], use); !added) return added.error();
        made.fallback_bits_q8_ = data.models[fallback].bits_per_value_q8;
      }
      return made;
    } catch (...) {
      return error{error_code::out_of_memory, "profile"};
    }
  }

  [[nodiscard]] const cache_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] const rotary& rotation() const noexcept { return rotation_; }
  /// The name by which streams ask for this profile.
  [[nodiscard]] std::uint64_t hash() const noexcept { return hash_; }
  [[nodiscard]] std::size_t tile_number(std::uint32_t layer, cache_part part) const noexcept {
    return first_tile_[layer] + (part == cache_part::value ? 1U : 0U);
  }

  /// Which directions the tables were built for.
  [[nodiscard]] bool can_encode() const noexcept { return models_.front().tables().entries() != nullptr; }
  [[nodiscard]] bool can_decode() const noexcept { return models_.front().tables().slots() != nullptr; }

  /// Whether chunks may be coded by channel means.
  [[nodiscard]] bool has_fallback() const noexcept { return std::same_as<typename Codec::predictor_type, channel_mean> || models_.size() > 1; }
  /// Code length of the channel means on the calibration data, 1/256 bit a value; 0 if there are none.
  [[nodiscard]] std::uint64_t fallback_bits_q8() const noexcept { return fallback_bits_q8_; }
  template <class Predictor>
  [[nodiscard]] const model_view& model() const noexcept {
    return std::same_as<Predictor, typename Codec::predictor_type> ? models_.front() : models_.back();
  }

 private:
  profile(const profile_data& data, std::uint64_t hash)
      : shape_(data.shape), rotation_(data.rotation), hash_(hash), channels_(std::make_unique<std::vector<std::size_t>>()) {
    channels_->push_back(0);
    for (const layer_shape& layer : shape_.all()) {
      first_tile_.push_back(channels_->size() - 1);
      for (const cache_part part : cache_parts) {
        if (layer.channels(part) > 0) channels_->push_back(channels_->back() + layer.channels(part));
      }
    }
  }

  [[nodiscard]] result<void> add(const model_parameters& model, build_for use = build_for::both) {
    auto tables = table_set_type::build(model.tables, use);
    if (!tables) return tables.error();
    if ((model.predictor == channel_mean::id || !Codec::predictor_type::needs_prediction) && model.means.empty())
      return error{error_code::corrupt, "the profile lacks channel means"};
    models_.push_back(model_view(model, *this, *std::move(tables)));
    return {};
  }

  cache_shape shape_;
  rotary rotation_;
  std::uint64_t hash_;
  std::uint64_t fallback_bits_q8_ = 0;
  std::vector<std::size_t> first_tile_;
  std::unique_ptr<std::vector<std::size_t>> channels_;  // first channel of each tile and the end; its address survives moves
  std::vector<model_view> models_;
};

}  // namespace kvexact

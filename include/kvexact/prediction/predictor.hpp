// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <span>

#include <kvexact/tensor/rotary.hpp>
#include <kvexact/tensor/tile.hpp>

namespace kvexact {

/// What must have been decoded before a unit (layer, part, token range) can be predicted. Random access, damage isolation and threading
/// follow from it.
enum class dependency : std::uint8_t {
  none = 0,          ///< nothing: any (layer range, token range) decodes alone
  lower_layers = 1,  ///< the same tokens in lower layers: any token range decodes alone
  all_previous = 2,  ///< lower layers and earlier tokens: any token prefix decodes alone
};

/// Stands where a predicted cache would, for predictors that need none.
struct no_prediction {};

/// What the profile knows of the tile to be predicted.
struct tile_parameters {
  std::span<const std::uint32_t> means;  ///< one a channel, bits of binary32; keys as they are before rotation. Empty if not calibrated
  const rotary* rotation;                ///< how cached keys are rotated; not null
};

/// Names a way to predict the values of a cache.
///
/// - `id`: number in streams and profiles; `name`: for people; `needs`: its dependency.
/// - `needs_prediction`: the caller must hand something in, for encoding and for decoding, that predicts equal to the bit.
template <class P>
concept predictor = requires {
  { P::id } -> std::convertible_to<std::uint32_t>;
  { P::name } -> std::convertible_to<const char*>;
  { P::needs } -> std::convertible_to<dependency>;
  { P::needs_prediction } -> std::convertible_to<bool>;
};

/// Predicts the values of a cache, one tile at a time and each alone.
///
/// - `predict(shape, parameters, prediction, out)` fills all shape.channels() * shape.stride scalars of `out` (bits of IEEE binary32,
///   real unit) and pads beyond shape.tokens with zeros. It must give the same bits on every machine.
template <class P, class Prediction = no_prediction>
concept tile_predictor =
    predictor<P> && P::needs == dependency::none &&
    requires(const tile_shape& shape, const tile_parameters& parameters, const Prediction& prediction, std::uint32_t* out) {
      { P::predict(shape, parameters, prediction, out) } noexcept;
    };

/// A predictor whose tiles depend on others: it has maps in the profile and runs as a `map_session`.
template <class P>
concept mapped_predictor = predictor<P> && P::needs != dependency::none;

}  // namespace kvexact

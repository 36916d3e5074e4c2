// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <kvexact/prediction/channel_mean.hpp>
#include <kvexact/prediction/external.hpp>
#include <kvexact/prediction/predictor.hpp>

namespace kvexact {

/// Corrects the prediction of `Base` by what it missed in the layers below, for the same token, and K of the same layer for V: linear maps
/// in integers, fitted at calibration (`layer_maps`, `map_session`). Which tokens were hard shows in lower layers, too: the spread of every
/// residual is scaled by how large those of the tile before were at this token.
///
/// - `cross_layer<channel_mean>` needs neither model nor prompt at decoding. AQUA-KV (arXiv 2501.19392) has such maps for lossy caches.
/// - `cross_layer<external>` sharpens a predicted cache, from an engine that stays a black box.
template <class Base>
struct cross_layer;

template <>
struct cross_layer<channel_mean> {
  using base = channel_mean;
  static constexpr std::uint32_t id = 3;
  static constexpr const char* name = "cross_layer";
  static constexpr dependency needs = dependency::lower_layers;
  static constexpr bool needs_prediction = false;
};

template <>
struct cross_layer<external> {
  using base = external;
  static constexpr std::uint32_t id = 4;
  static constexpr const char* name = "cross_layer on external";
  static constexpr dependency needs = dependency::lower_layers;
  static constexpr bool needs_prediction = true;
};

static_assert(mapped_predictor<cross_layer<channel_mean>> && mapped_predictor<cross_layer<external>>);

}  // namespace kvexact

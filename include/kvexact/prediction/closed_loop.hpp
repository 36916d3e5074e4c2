// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <kvexact/prediction/predictor.hpp>

namespace kvexact {

/// An engine predicts layer by layer (`layerwise_predictor`), and after each layer it gets the exact K and V, which its attention uses from
/// then on, and a correction of its hidden states, fitted at calibration: the least-squares estimate of their error from what the
/// prediction of K and V missed. So errors do not pile up with depth. The maps of `cross_layer` work on top.
/// The caller hands in the engine where other predictors take a predicted cache.
/// fp8 caches calibrated with clamped feedback, the usual case, give it not the values as stored but the best estimate of what they were
/// rounded from.
/// When decoding ends with an error, the engine stands in the middle of a range or behind it and has taken in values that no checksum has
/// confirmed; when encoding does, in the middle of one. Discard it, or take it back to a token it was at before.
struct closed_loop {
  static constexpr std::uint32_t id = 5;
  static constexpr const char* name = "closed_loop";
  static constexpr dependency needs = dependency::all_previous;
  static constexpr bool needs_prediction = true;
};

static_assert(mapped_predictor<closed_loop>);

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// An engine that predicts a KV cache layer by layer while the exact one becomes known: the inside of the closed-loop codec. It stands
/// for one sequence whose tokens it knows.
///
/// For a range of tokens the codec calls `begin(tokens)` and then, for every layer l = 0, 1, ... in order,
///
/// - `predict(l, keys, values)`: fills K^ and V^ of the layer from the hidden states, rows [token][kv_head * dim]; keys as they are
///   cached (after the rotary embedding), both as exact as the engine has them (not rounded to the cache's format);
/// - `advance(l, keys, values, correction)`: takes the exact K and V of these tokens (rows as above, keys as cached, binary32, all finite)
///   into the engine's own cache, adds to each hidden state h (the input of layer l) its row of the correction,
///   h <- h + rms(h) * correction, rms(h) = sqrt(mean(h^2)), [token][hidden_width()], and then runs the rest of layer l: queries from the
///   corrected state, attention over the exact K and V of this and of all earlier ranges, feed-forward.
///
/// After `advance` of the last layer the range is done: `tokens()` becomes tokens.end, and the next range begins there. A `begin` in the
/// middle of a range gives it up and starts it again. `tokens.begin` is always `tokens()`.
///
/// Encoder and decoder must get the same bits from `predict`, whatever the machine, the number of threads and how tokens are cut into
/// ranges; a difference is found by a fingerprint and reported, never decoded. `hidden_width()` is the length of a hidden state, or 0 if the
/// engine takes no correction. The correction is empty where the profile has none. Errors are passed on to the caller of the codec.
template <class E>
concept layerwise_predictor =
    requires(E& engine, const E& seen, index_range tokens, std::uint32_t layer, std::span<float> out, std::span<const float> in) {
      { seen.tokens() } noexcept -> std::same_as<std::uint64_t>;
      { seen.hidden_width() } noexcept -> std::same_as<std::size_t>;
      { engine.begin(tokens) } noexcept -> std::same_as<result<void>>;
      { engine.predict(layer, out, out) } noexcept -> std::same_as<result<void>>;
      { engine.advance(layer, in, in, in) } noexcept -> std::same_as<result<void>>;
    };

/// What calibration of a correction needs beside: `hidden_error(l, out)`, called between `predict` and `advance` of layer l, gives by how
/// much the hidden states miss those of the engine that made the target cache, relative to their size:
/// (h_target - h) / rms(h), [token][hidden_width()].
template <class E>
concept layerwise_teacher = layerwise_predictor<E> && requires(E& engine, std::uint32_t layer, std::span<float> out) {
  { engine.hidden_error(layer, out) } noexcept -> std::same_as<result<void>>;
};

}  // namespace kvexact

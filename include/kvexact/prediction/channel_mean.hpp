// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <kvexact/numeric/integer_rotation.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/tensor/rotary.hpp>
#include <kvexact/tensor/tile.hpp>

namespace kvexact {

/// Predicts every value by its channel's mean over the calibration data; keys by the mean before rotation, turned by their position.
/// Needs no side information at all.
struct channel_mean {
  static constexpr std::uint32_t id = 1;
  static constexpr const char* name = "channel_mean";
  static constexpr dependency needs = dependency::none;
  static constexpr bool needs_prediction = false;

  template <class Prediction>
  static void predict(const tile_shape& shape, const tile_parameters& parameters, const Prediction&, std::uint32_t* out) noexcept {
    const auto tokens = static_cast<std::size_t>(shape.tokens.size());
    const std::uint32_t rotated = shape.part == cache_part::key ? parameters.rotation->dim() : 0;
    for (std::uint32_t head = 0; head < shape.heads; ++head) {
      for (std::uint32_t d = rotated; d < shape.dim; ++d) {
        const std::size_t c = std::size_t{head} * shape.dim + d;
        std::fill_n(out + c * shape.stride, tokens, parameters.means[c]);
      }
    }
    for (std::uint32_t i = 0; i < rotated / 2; ++i) rotate_pair(shape, parameters, i, out);
    for (std::size_t c = 0; c < shape.channels(); ++c) std::fill(out + c * shape.stride + tokens, out + (c + 1) * shape.stride, 0U);
  }

 private:
  static void rotate_pair(const tile_shape& shape, const tile_parameters& parameters, std::uint32_t i, std::uint32_t* out) noexcept {
    const std::uint64_t turns = parameters.rotation->turns()[i];
    const auto [first, second] = parameters.rotation->pair(i);
    for (std::uint32_t head = 0; head < shape.heads; ++head) {
      const std::size_t a = std::size_t{head} * shape.dim + first;
      const std::size_t b = std::size_t{head} * shape.dim + second;
      const auto mean = integer_pair::from_bits(parameters.means[a], parameters.means[b]);
      for (std::uint64_t t = 0; t < shape.tokens.size(); ++t) {
        const integer_rotation by = rotation_by_turns((shape.tokens.begin + t) * turns);
        out[a * shape.stride + t] = mean.rotated_first(by);
        out[b * shape.stride + t] = mean.rotated_second(by);
      }
    }
  }
};

static_assert(tile_predictor<channel_mean>);

}  // namespace kvexact

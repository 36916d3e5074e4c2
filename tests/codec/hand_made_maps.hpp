// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvexact/prediction/layer_maps.hpp>
#include <kvexact/prediction/quantised_matrix.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact::test {

/// Maps of the kind that `like` is of, for any shape: weight i of all is weight(i), and all scales are `scale`.
template <class Weight>
layer_maps make_maps(const cache_shape& shape, const rotary& rotation, layer_maps like, Weight&& weight, std::uint32_t scale = 1) {
  std::size_t number = 0;
  const auto matrix = [&](std::size_t rows, std::size_t depth) {
    quantised_matrix made{rows, depth, std::vector<std::int8_t>(rows * depth), std::vector<std::uint32_t>(rows, scale)};
    for (std::int8_t& each : made.weights) each = weight(number++);
    return made;
  };
  like.tiles.clear();
  like.gains.clear();
  for (std::uint32_t l = 0; l < shape.layers(); ++l) {
    for (const cache_part part : cache_parts) {
      const std::uint32_t channels = shape.layer(l).channels(part);
      if (channels == 0) continue;
      tile_map tile;
      tile.feature_scales.assign(channels, scale);
      tile.missed_scales.assign(channels, scale);
      for_each_matrix(like, count_features(shape, like, l, part), channels, shape.layer(l).dim(part),
                      blocks_of(shape, rotation, like, l, part), [&](std::size_t m, std::size_t rows, std::size_t depth) {
                        if (m == 0) {
                          tile.inner = matrix(rows, depth);
                        } else {
                          tile.blocks.push_back(matrix(rows, depth));
                        }
                      });
      like.tiles.push_back(std::move(tile));
    }
    if (like.hidden_width > 0) like.gains.push_back(matrix(like.hidden_width, shape.layer(l).channels()));
  }
  return like;
}

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/prediction/quantised_matrix.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/channel_blocks.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact {

/// How the residuals of one tile (layer, part) are predicted from those of tiles before it. A "residual" is value - base prediction, keys
/// before rotation, in fixed point of this tile's unit; a "feature" is a residual in sixteenths of its spread, an integer of at most 7
/// bits and a sign.
struct tile_map {
  std::int32_t unit = 0;                       ///< of the fixed-point numbers, a power of two: log2 of it
  std::vector<std::uint32_t> feature_scales;   ///< [channel]: feature = residual * this / 2^32
  std::vector<std::uint32_t> missed_scales;    ///< [channel]: the same for what maps miss as well, for the token scale
  quantised_matrix inner;                      ///< with a rank only: [rank][features]
  std::vector<quantised_matrix> blocks;        ///< of each block: [channel of the block][features]; the product is in this tile's unit
};

/// Maps of all tiles of a model. A tile's channels are coded in blocks (`cut_into_blocks`), so that a block knows those before it. Features
/// of a block of tile (l, part) are, in this order: layer l-1 K and V, l-2 K and V, ... down to l-`layers_back` (as far as there are such
/// layers), K of layer l itself if the part is V, and the channels of this tile that are coded before; all in coding order. With `per_head` a
/// block has the features of its own head only, and holds no more than that head. With a rank the features of other tiles are first mapped to that many numbers.
struct layer_maps {
  static constexpr std::uint32_t most_layers_back = 8;
  static constexpr std::uint32_t most_hidden_width = 1U << 16;
  static constexpr int scale_shift = 20;       ///< of the maps' scales
  static constexpr int gain_shift = 40;        ///< of the gains' scales: the correction is in units of rms(h)

  std::uint32_t layers_back = 0;
  std::uint32_t rank = 0;                      ///< 0: full maps
  std::uint32_t block_size = 0;                ///< channels that are coded together; 0: all of a tile
  bool per_head = false;
  bool clamped_feedback = false;               ///< fp8: residuals of the prediction clamped into the decoded cell, not of its centre
  std::vector<tile_map> tiles;                 ///< by tile number; empty if the model has no maps
  std::uint32_t hidden_width = 0;              ///< closed loop: length of a hidden state, 0 without correction
  std::vector<quantised_matrix> gains;         ///< closed loop: [layer], [hidden_width][channels of the layer, K then V]

  [[nodiscard]] bool empty() const noexcept { return tiles.empty(); }
};

/// Number of features that a tile gets from other tiles; with `per_head` for one head.
[[nodiscard]] inline std::size_t count_features(const cache_shape& shape, const layer_maps& maps, std::uint32_t layer, cache_part part) noexcept {
  const auto width = [&](const layer_shape& of, bool with_values) {
    const std::size_t dims = std::size_t{of.key_dim} + (with_values ? of.value_dim : 0U);
    return maps.per_head ? dims : dims * of.kv_heads;
  };
  std::size_t count = part == cache_part::value ? width(shape.layer(layer), false) : 0;
  for (std::uint32_t back = 1; back <= std::min(maps.layers_back, layer); ++back) count += width(shape.layer(layer - back), true);
  return count;
}

/// Number of channels of the tile itself that a block gets as features.
[[nodiscard]] inline std::size_t count_own_features(const layer_maps& maps, const channel_block& block, std::uint32_t dim) noexcept {
  return maps.per_head ? block.first - block.head * dim : block.first;
}

[[nodiscard]] inline std::vector<channel_block> blocks_of(const cache_shape& shape, const rotary& rotation, const layer_maps& maps, std::uint32_t layer,
                                                          cache_part part) {
  return cut_into_blocks(shape.layer(layer).kv_heads, shape.layer(layer).dim(part), part, rotation, maps.block_size);
}

/// Sizes of the matrices of a tile, and calls visit(matrix number, rows, depth): first the inner one, then each block.
template <class Visit>
void for_each_matrix(const layer_maps& maps, std::size_t features, std::uint32_t channels, std::uint32_t dim, std::span<const channel_block> blocks,
                     Visit&& visit) {
  const std::size_t rank = features == 0 ? 0 : std::min<std::size_t>(maps.rank, channels);
  visit(std::size_t{0}, rank, rank == 0 ? 0 : features);
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const std::size_t depth = (rank > 0 ? rank : features) + count_own_features(maps, blocks[b], dim);
    visit(b + 1, depth == 0 ? 0 : blocks[b].count, depth);
  }
}

/// Whether maps fit a shape, so that they can be used without further checks. Errors: corrupt, with the layer. Throws std::bad_alloc.
[[nodiscard]] inline result<void> expect_maps_fit(const layer_maps& maps, const cache_shape& shape, const rotary& rotation) {
  if (maps.layers_back > layer_maps::most_layers_back || maps.rank > cache_shape::max_channels || maps.hidden_width > layer_maps::most_hidden_width ||
      (maps.per_head && (maps.rank > 0 || maps.block_size == 0)))
    return error{error_code::corrupt, "kind of the maps"};
  const auto small = [](const std::vector<std::uint32_t>& scales, std::size_t count) {
    return scales.size() == count && std::all_of(scales.begin(), scales.end(), [](std::uint32_t scale) { return scale >> 31 == 0; });
  };
  const auto fits = [&](const quantised_matrix& matrix, std::size_t rows, std::size_t depth) {
    return matrix.rows == rows && matrix.depth == depth && matrix.weights.size() == rows * depth && small(matrix.scales, rows);
  };
  std::size_t number = 0;
  for (std::uint32_t l = 0; l < shape.layers(); ++l) {
    if (maps.per_head && shape.layer(l).kv_heads != shape.layer(0).kv_heads)
      return error{error_code::corrupt, "maps by head need as many heads in every layer", l};
    for (const cache_part part : cache_parts) {
      const std::uint32_t channels = shape.layer(l).channels(part);
      if (channels == 0) continue;
      if (number == maps.tiles.size()) return error{error_code::corrupt, "number of maps", l};
      const tile_map& tile = maps.tiles[number++];
      const auto blocks = blocks_of(shape, rotation, maps, l, part);
      bool good = tile.unit >= -200 && tile.unit <= 200 && small(tile.feature_scales, channels) && small(tile.missed_scales, channels) &&
                  tile.blocks.size() == blocks.size();
      for_each_matrix(maps, count_features(shape, maps, l, part), channels, shape.layer(l).dim(part), blocks,
                      [&](std::size_t m, std::size_t rows, std::size_t depth) { good = good && fits(m == 0 ? tile.inner : tile.blocks[m - 1], rows, depth); });
      if (!good) return error{error_code::corrupt, "size or scale of a map", l};
    }
    if (maps.hidden_width > 0 && (l >= maps.gains.size() || !fits(maps.gains[l], maps.hidden_width, shape.layer(l).channels())))
      return error{error_code::corrupt, "size or scale of a gain", l};
  }
  if (number != maps.tiles.size() || maps.gains.size() != (maps.hidden_width > 0 ? shape.layers() : 0U))
    return error{error_code::corrupt, "number of maps"};
  return {};
}

/// Maps with their weights widened for the integer products. Immutable in use; `set` prepares one tile.
class prepared_maps {
 public:
  struct matrix {
    std::size_t rows = 0;
    std::size_t depth = 0;
    std::vector<std::int16_t> weights;
    std::vector<std::uint32_t> scales;
  };
  struct tile {
    std::int32_t unit = 0;
    std::vector<std::uint32_t> feature_scales;
    std::vector<std::uint32_t> missed_scales;
    matrix inner;
    std::vector<matrix> maps;            // one a block; empty before it is fitted
    std::vector<channel_block> blocks;
  };

  prepared_maps() noexcept = default;
  /// `maps` may lack tiles and gains, to be set later. Throws std::bad_alloc.
  prepared_maps(const layer_maps& maps, const cache_shape& shape, const rotary& rotation)
      : layers_back_(maps.layers_back), rank_(maps.rank), per_head_(maps.per_head), clamped_(maps.clamped_feedback), hidden_width_(maps.hidden_width) {
    for (std::uint32_t l = 0; l < shape.layers(); ++l) {
      for (const cache_part part : cache_parts) {
        if (shape.layer(l).channels(part) == 0) continue;
        tiles_.emplace_back();
        tiles_.back().blocks = blocks_of(shape, rotation, maps, l, part);
      }
    }
    gains_.resize(maps.hidden_width > 0 ? shape.layers() : 0);
    for (std::size_t t = 0; t < maps.tiles.size(); ++t) set(t, maps.tiles[t]);
    for (std::size_t l = 0; l < maps.gains.size(); ++l) set_gain(l, maps.gains[l]);
  }

  void set(std::size_t number, const tile_map& from) {
    tile& to = tiles_[number];
    to.unit = from.unit;
    to.feature_scales = from.feature_scales;
    to.missed_scales = from.missed_scales;
    to.inner = widen(from.inner);
    to.maps.clear();
    for (const quantised_matrix& map : from.blocks) to.maps.push_back(widen(map));
  }
  void set_gain(std::size_t layer, const quantised_matrix& from) { gains_[layer] = widen(from); }

  [[nodiscard]] std::uint32_t layers_back() const noexcept { return layers_back_; }
  [[nodiscard]] std::uint32_t rank() const noexcept { return rank_; }
  [[nodiscard]] bool per_head() const noexcept { return per_head_; }
  [[nodiscard]] bool clamped_feedback() const noexcept { return clamped_; }
  [[nodiscard]] std::size_t hidden_width() const noexcept { return hidden_width_; }
  [[nodiscard]] const tile& operator[](std::size_t number) const noexcept { return tiles_[number]; }
  [[nodiscard]] const matrix& gain(std::size_t layer) const noexcept { return gains_[layer]; }

 private:
  [[nodiscard]] static matrix widen(const quantised_matrix& from) {
    return {from.rows, from.depth, {from.weights.begin(), from.weights.end()}, from.scales};
  }

  std::uint32_t layers_back_ = 0;
  std::uint32_t rank_ = 0;
  bool per_head_ = false;
  bool clamped_ = false;
  std::size_t hidden_width_ = 0;
  std::vector<tile> tiles_;
  std::vector<matrix> gains_;
};

}  // namespace kvexact

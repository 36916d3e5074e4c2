// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/prediction/layer_maps.hpp>

#include "codec/example_cache.hpp"
#include "codec/hand_made_maps.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

/// Layers that differ, one without V.
cache_shape some_shape() { return make_shape({{2, 4, 3}, {2, 6, 0}, {2, 4, 5}, {2, 5, 1}}); }

layer_maps kind_of(std::uint32_t layers_back, std::uint32_t rank, std::uint32_t block_size, bool per_head, std::uint32_t hidden_width) {
  layer_maps maps;
  maps.layers_back = layers_back;
  maps.rank = rank;
  maps.block_size = block_size;
  maps.per_head = per_head;
  maps.hidden_width = hidden_width;
  return maps;
}

layer_maps fitting(const layer_maps& like, const rotary& rotation) {
  return make_maps(some_shape(), rotation, like, [](std::size_t i) { return static_cast<std::int8_t>(i % 256 - 128); });
}

}  // namespace

TEST_CASE("layer_maps: features are those of lower layers, and K for V") {
  const cache_shape shape = some_shape();
  const auto count = [&](std::uint32_t layers_back, bool per_head, std::uint32_t layer, cache_part part) {
    return count_features(shape, kind_of(layers_back, 0, 2, per_head, 0), layer, part);
  };
  CHECK(count(3, false, 0, cache_part::key) == 0);
  CHECK(count(3, false, 0, cache_part::value) == 8);
  CHECK(count(3, false, 1, cache_part::key) == 14);
  CHECK(count(3, false, 2, cache_part::key) == 12 + 14);
  CHECK(count(3, false, 2, cache_part::value) == 12 + 14 + 8);
  CHECK(count(3, false, 3, cache_part::value) == 18 + 12 + 14 + 10);
  CHECK(count(2, false, 3, cache_part::value) == 18 + 12 + 10);
  CHECK(count(1, false, 3, cache_part::key) == 18);
  CHECK(count(0, false, 3, cache_part::key) == 0);
  CHECK(count(0, false, 3, cache_part::value) == 10);
  CHECK(count(2, true, 3, cache_part::value) == 9 + 6 + 5);
  CHECK(count(0, true, 3, cache_part::value) == 5);
}

TEST_CASE("layer_maps: matrices have the sizes that their kind, the shape and the blocks make") {
  // Two heads of five dimensions, four of them rotated, so that blocks are (0, 2) (1, 3) (4) and the same of the second head.
  const auto rotation = *rotary::from_base(rotary_pairing::half_split, 4, 100.0);
  const auto blocks = cut_into_blocks(2, 5, cache_part::key, rotation, 2);
  REQUIRE(blocks.size() == 6);
  using size = std::pair<std::size_t, std::size_t>;
  const auto sizes = [&](const layer_maps& maps, std::size_t features) {
    std::vector<size> all;
    for_each_matrix(maps, features, 10, 5, blocks, [&](std::size_t m, std::size_t rows, std::size_t depth) {
      CHECK(m == all.size());
      all.emplace_back(rows, depth);
    });
    return all;
  };
  CHECK(sizes(kind_of(1, 0, 2, false, 0), 18) == std::vector<size>{{0, 0}, {2, 18}, {2, 20}, {1, 22}, {2, 23}, {2, 25}, {1, 27}});
  CHECK(sizes(kind_of(1, 0, 2, false, 0), 0) == std::vector<size>{{0, 0}, {0, 0}, {2, 2}, {1, 4}, {2, 5}, {2, 7}, {1, 9}});
  CHECK(sizes(kind_of(1, 0, 2, true, 0), 9) == std::vector<size>{{0, 0}, {2, 9}, {2, 11}, {1, 13}, {2, 9}, {2, 11}, {1, 13}});
  CHECK(sizes(kind_of(1, 3, 2, false, 0), 18) == std::vector<size>{{3, 18}, {2, 3}, {2, 5}, {1, 7}, {2, 8}, {2, 10}, {1, 12}});
  CHECK(sizes(kind_of(1, 99, 2, false, 0), 18)[0] == size{10, 18});
  CHECK(sizes(kind_of(1, 3, 2, false, 0), 0) == sizes(kind_of(1, 0, 2, false, 0), 0));
}

TEST_CASE("layer_maps: what fits, and what does not") {
  const cache_shape shape = some_shape();
  for (const rotary& rotation : {rotary(), *rotary::from_base(rotary_pairing::half_split, 4, 100.0)}) {
    for (const layer_maps& kind : {kind_of(3, 0, 0, false, 0), kind_of(2, 2, 0, false, 7), kind_of(8, 0, 3, true, 1),
                                   kind_of(0, 0, 2, false, 0), kind_of(1, 1000, 1, false, 5), kind_of(3, 0, ~0U, true, 0)}) {
      const layer_maps good = fitting(kind, rotation);
      CHECK(expect_maps_fit(good, shape, rotation));
      const auto refused = [&](const std::function<void(layer_maps&)>& change, std::int64_t layer) {
        layer_maps bad = good;
        change(bad);
        const auto fits = expect_maps_fit(bad, shape, rotation);
        REQUIRE(!fits);
        CHECK(fits.error().code == error_code::corrupt);
        CHECK(fits.error().layer == layer);
      };
      // Tiles are K0 V0 K1 K2 V2 K3 V3.
      refused([](layer_maps& maps) { maps.layers_back = 9; }, -1);
      refused([](layer_maps& maps) { maps.hidden_width = (1U << 16) + 1; }, -1);
      refused([](layer_maps& maps) { maps.tiles.pop_back(); }, 3);
      refused([](layer_maps& maps) { maps.tiles.push_back(maps.tiles.back()); }, -1);
      refused([](layer_maps& maps) { maps.gains.emplace_back(); }, -1);
      refused([](layer_maps& maps) { maps.tiles[3].unit = -201; }, 2);
      refused([](layer_maps& maps) { maps.tiles[3].unit = 201; }, 2);
      refused([](layer_maps& maps) { maps.tiles[2].feature_scales.pop_back(); }, 1);
      refused([](layer_maps& maps) { maps.tiles[2].feature_scales[5] = 1U << 31; }, 1);
      refused([](layer_maps& maps) { maps.tiles[4].missed_scales.push_back(0); }, 2);
      refused([](layer_maps& maps) { maps.tiles[4].missed_scales[0] = ~0U; }, 2);
      refused([](layer_maps& maps) { maps.tiles[5].blocks.pop_back(); }, 3);
      refused([](layer_maps& maps) { maps.tiles[5].blocks.emplace_back(); }, 3);
      const auto changed_matrix = [&](const std::function<quantised_matrix&(layer_maps&)>& which, std::int64_t layer) {
        refused([&](layer_maps& maps) { ++which(maps).rows; }, layer);
        refused([&](layer_maps& maps) { ++which(maps).depth; }, layer);
        refused([&](layer_maps& maps) { which(maps).weights.emplace_back(); }, layer);
        refused([&](layer_maps& maps) { which(maps).scales.emplace_back(); }, layer);
        layer_maps some = good;
        if (which(some).scales.empty()) return;
        refused([&](layer_maps& maps) { which(maps).scales.back() = 1U << 31; }, layer);
        refused([&](layer_maps& maps) { which(maps).weights.pop_back(); }, layer);
      };
      changed_matrix([](layer_maps& maps) -> quantised_matrix& { return maps.tiles[6].inner; }, 3);
      changed_matrix([](layer_maps& maps) -> quantised_matrix& { return maps.tiles[1].blocks.back(); }, 0);
      if (kind.hidden_width > 0) {
        changed_matrix([](layer_maps& maps) -> quantised_matrix& { return maps.gains[2]; }, 2);
        refused([](layer_maps& maps) { maps.gains.pop_back(); }, 3);
        refused([](layer_maps& maps) { --maps.hidden_width; }, kind.hidden_width == 1 ? -1 : 0);
      }
      // The same for another shape or rotation, where that makes other blocks.
      const auto other = expect_maps_fit(good, make_shape({{2, 4, 3}, {2, 6, 0}, {2, 4, 4}, {2, 5, 1}}), rotation);
      REQUIRE(!other);
      CHECK(other.error().layer == 2);
    }
  }
  const auto refused_kind = [&](const layer_maps& kind) {
    const auto fits = expect_maps_fit(fitting(kind, {}), shape, {});
    REQUIRE(!fits);
    CHECK(fits.error().code == error_code::corrupt);
  };
  refused_kind(kind_of(3, 1, 2, true, 0));
  refused_kind(kind_of(3, 0, 0, true, 0));
  refused_kind(kind_of(3, cache_shape::max_channels + 1, 2, false, 0));
  refused_kind(kind_of(3, 0xffffffffU, 2, false, 0));
  // Maps by head go from head to head.
  const cache_shape other_heads = make_shape({{2, 4, 3}, {1, 4, 3}});
  const layer_maps by_head = make_maps(other_heads, {}, kind_of(1, 0, 2, true, 0), [](std::size_t) { return std::int8_t{1}; });
  const auto fits = expect_maps_fit(by_head, other_heads, {});
  REQUIRE(!fits);
  CHECK(fits.error().layer == 1);
  // A rotation that makes other blocks.
  const auto half_split = *rotary::from_base(rotary_pairing::half_split, 4, 100.0);
  CHECK(!expect_maps_fit(fitting(kind_of(3, 0, 3, false, 0), {}), shape, half_split));
}

TEST_CASE("layer_maps: prepared ones hold the same") {
  const auto rotation = *rotary::from_base(rotary_pairing::interleaved, 2, 100.0);
  for (layer_maps maps : {fitting(kind_of(3, 2, 3, false, 4), rotation), fitting(kind_of(8, 0, 2, true, 0), rotation)}) {
    for (std::size_t t = 0; t < maps.tiles.size(); ++t) maps.tiles[t].unit = static_cast<std::int32_t>(t) - 20;
    maps.clamped_feedback = maps.rank > 0;
    const prepared_maps ready(maps, some_shape(), rotation);
    CHECK(ready.layers_back() == maps.layers_back);
    CHECK(ready.rank() == maps.rank);
    CHECK(ready.per_head() == maps.per_head);
    CHECK(ready.clamped_feedback() == maps.clamped_feedback);
    CHECK(ready.hidden_width() == maps.hidden_width);
    const auto same = [](const prepared_maps::matrix& a, const quantised_matrix& b) {
      return a.rows == b.rows && a.depth == b.depth && a.weights == std::vector<std::int16_t>(b.weights.begin(), b.weights.end()) &&
             a.scales == b.scales;
    };
    for (std::size_t t = 0; t < maps.tiles.size(); ++t) {
      CHECK(ready[t].unit == maps.tiles[t].unit);
      CHECK(ready[t].feature_scales == maps.tiles[t].feature_scales);
      CHECK(ready[t].missed_scales == maps.tiles[t].missed_scales);
      CHECK(same(ready[t].inner, maps.tiles[t].inner));
      REQUIRE(ready[t].maps.size() == maps.tiles[t].blocks.size());
      CHECK(ready[t].blocks.size() == ready[t].maps.size());
      for (std::size_t b = 0; b < ready[t].maps.size(); ++b) CHECK(same(ready[t].maps[b], maps.tiles[t].blocks[b]));
    }
    for (std::size_t l = 0; l < maps.gains.size(); ++l) CHECK(same(ready.gain(l), maps.gains[l]));
  }
}

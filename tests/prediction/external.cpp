// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/prediction/external.hpp>
#include <kvexact/tensor/paged_kv_cache_view.hpp>

#include "tensor/owned_cache.hpp"

using namespace kvexact;

namespace {

const cache_shape mixed = *cache_shape::make(std::array<layer_shape, 2>{{{3, 5, 2}, {2, 1, 3}}});
constexpr std::uint32_t guard = 0xdeadbeef;

tile_shape tile_of(std::uint32_t layer, cache_part part, index_range tokens, std::size_t stride) {
  return {layer, part, tokens, mixed.layer(layer).kv_heads, mixed.layer(layer).dim(part), stride};
}

template <class Prediction>
std::vector<std::uint32_t> predicted(const tile_shape& shape, const Prediction& prediction) {
  constexpr std::size_t margin = 8;
  std::vector<std::uint32_t> memory(margin + shape.channels() * shape.stride + margin, guard);
  const rotary rotation;
  external::predict(shape, {{}, &rotation}, prediction, memory.data() + margin);
  CHECK(std::all_of(memory.begin(), memory.begin() + margin, [](std::uint32_t bits) { return bits == guard; }));
  CHECK(std::all_of(memory.end() - margin, memory.end(), [](std::uint32_t bits) { return bits == guard; }));
  return {memory.begin() + margin, memory.end() - margin};
}

/// Upper halves of binary32 in [channel, token] order, zeros behind the tokens.
void check_tile(const tile_shape& shape, const std::vector<std::uint32_t>& out) {
  std::size_t wrong = 0;
  for (std::uint32_t c = 0; c < shape.channels(); ++c) {
    for (std::uint64_t t = 0; t < shape.stride; ++t) {
      const std::uint32_t bits = test::scalar_at<bf16>(shape.layer, shape.part, shape.tokens.begin + t, c / shape.dim, c % shape.dim).bits;
      wrong += out[c * shape.stride + t] != (t < shape.tokens.size() ? bits << 16 : 0U);
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

static_assert(tile_predictor<external, kv_cache_view<const bf16>> && tile_predictor<external, paged_kv_cache_view<const bf16>> &&
              tile_predictor<external, kv_cache_view<bf16>> && !tile_predictor<external> && !mapped_predictor<external> &&
              external::needs == dependency::none && external::needs_prediction);

TEST_CASE("external: the prediction transposed and widened, zeros behind it") {
  for (const test::layout order : test::layouts) {
    test::owned_cache<bf16> cache(mixed, {100, 180}, order);
    cache.fill();
    for (std::uint32_t l = 0; l < 2; ++l) {
      for (const cache_part part : cache_parts) {
        for (const auto& [begin, count, stride] :
             {std::array<std::uint64_t, 3>{100, 80, 96}, {105, 1, 32}, {110, 32, 32}, {120, 33, 64}, {130, 0, 32}, {130, 0, 0}}) {
          const tile_shape shape = tile_of(l, part, {begin, begin + count}, stride);
          check_tile(shape, predicted(shape, cache.reader()));
          check_tile(shape, predicted(shape, cache.view()));
        }
      }
    }
  }
}

TEST_CASE("external: from a paged cache") {
  constexpr std::uint64_t tokens = 50;
  std::vector<std::int32_t> table(7);
  std::iota(table.rbegin(), table.rend(), 0);
  test::owned_pools<bf16> pools(mixed, 8, 7, true);
  pools.fill(table, tokens);
  const auto view = paged_kv_cache_view<bf16>::make(mixed, pools.pools(), {table, 8, 7}, tokens);
  REQUIRE(view);
  const tile_shape shape = tile_of(0, cache_part::key, {3, 47}, 64);
  check_tile(shape, predicted(shape, *view));
}

TEST_CASE("external: every bf16 passes through") {
  const auto shape = *cache_shape::make(std::array<layer_shape, 1>{{{1, 256, 0}}});
  std::vector<bf16> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<std::uint16_t>(i);  // NaNs, infinities and subnormal numbers too
  const std::array<layer_tensors<const bf16>, 1> layers{{{strided_tensor<const bf16>::nhd(all.data(), 1, 256), {}}}};
  const auto view = kv_cache_view<const bf16>::make(shape, layers, {0, 256});
  REQUIRE(view);
  const auto out = predicted(tile_shape{0, cache_part::key, {0, 256}, 1, 256, 256}, *view);
  std::size_t wrong = 0;
  for (std::uint32_t i = 0; i < 65536; ++i) wrong += out[(i % 256) * 256 + i / 256] != i << 16;
  CHECK(wrong == 0);
}

// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/fp8_e4m3.hpp>
#include <kvexact/tensor/tile.hpp>

#include "tensor/owned_cache.hpp"

using namespace kvexact;

namespace {

const cache_shape mixed = *cache_shape::make(std::array<layer_shape, 2>{{{3, 5, 2}, {2, 1, 3}}});
constexpr std::uint64_t first_token = 90;

tile_shape tile_of(std::uint32_t layer, cache_part part, index_range tokens, std::size_t stride) {
  return {layer, part, tokens, mixed.layer(layer).kv_heads, mixed.layer(layer).dim(part), stride};
}

/// A gathered tile must hold exactly the cache's scalars, and nothing beyond its tokens may be written.
template <class T, class Bits, class Cache>
std::vector<Bits> gather_checked(const Cache& cache, const tile_shape& shape) {
  constexpr auto guard = static_cast<Bits>(0x5a5a5a5a);
  const std::size_t margin = 40;
  std::vector<Bits> padded(margin + shape.channels() * shape.stride + margin, guard);
  gather_tile(cache, shape, padded.data() + margin);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < margin; ++i) wrong += padded[i] != guard || padded[padded.size() - 1 - i] != guard;
  for (std::uint32_t c = 0; c < shape.channels(); ++c) {
    for (std::size_t t = 0; t < shape.stride; ++t) {
      const bool inside = t < shape.tokens.size();
      const Bits expected =
          inside ? static_cast<Bits>(test::scalar_at<T>(shape.layer, shape.part, shape.tokens.begin + t, c / shape.dim, c % shape.dim).bits)
                 : guard;
      wrong += padded[margin + c * shape.stride + t] != expected;
    }
  }
  CHECK(wrong == 0);
  return {padded.begin() + margin, padded.end() - margin};
}

/// Scattering must write exactly the wanted tokens of one (layer, part).
template <class T, class Bits>
void scatter_checked(const tile_shape& shape, index_range wanted, const std::vector<Bits>& tile, index_range all, test::layout order) {
  test::owned_cache<T> cache(mixed, all, order);
  auto expected = cache.memory();
  std::size_t at = 0;
  cache.for_each([&](T& scalar, std::uint32_t l, cache_part part, std::uint64_t t, std::uint32_t h, std::uint32_t d) {
    if (l != shape.layer || part != shape.part || t < shape.tokens.begin || t >= shape.tokens.end || t < wanted.begin || t >= wanted.end)
      return;
    at = static_cast<std::size_t>(&scalar - cache.memory().data());
    expected[at] = test::scalar_at<T>(l, part, t, h, d);
  });
  scatter_tile(cache.view(), shape, wanted, tile.data());
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) wrong += cache.memory()[i].bits != expected[i].bits;
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("tile: gathers and scatters every number of tokens") {
  for (std::uint64_t count = 0; count <= 70; ++count) {
    CAPTURE(count);
    const index_range all{first_token, first_token + 80};
    const index_range tokens{first_token + count % 7, first_token + count % 7 + count};
    const test::layout order = test::layouts[count % 4];
    test::owned_cache<bf16> cache(mixed, all, order);
    cache.fill();
    for (std::uint32_t l = 0; l < 2; ++l) {
      for (const cache_part part : cache_parts) {
        const tile_shape shape = tile_of(l, part, tokens, (count + 31) / 32 * 32);
        const auto tile = gather_checked<bf16, std::uint16_t>(cache.reader(), shape);
        scatter_checked<bf16>(shape, tokens, tile, all, test::layouts[(count + l) % 4]);
      }
    }
  }
}

TEST_CASE("tile: only the wanted tokens are written") {
  const index_range all{first_token, first_token + 100};
  const index_range tokens{first_token + 10, first_token + 80};
  test::owned_cache<fp8_e4m3> cache(mixed, all, test::layout::nhd);
  cache.fill();
  const tile_shape shape = tile_of(0, cache_part::key, tokens, 70);
  const auto tile = gather_checked<fp8_e4m3, std::uint8_t>(cache.reader(), shape);
  for (const std::uint64_t begin : {0U, 89U, 95U, 100U, 101U, 132U, 169U, 170U, 180U})
    for (const std::uint64_t size : {0U, 1U, 5U, 31U, 32U, 33U, 64U, 70U, 500U}) {
      CAPTURE(begin);
      CAPTURE(size);
      scatter_checked<fp8_e4m3>(shape, {begin, begin + size}, tile, all, test::layout::hnd);
    }
  scatter_checked<fp8_e4m3>(shape, {0, ~std::uint64_t{0}}, tile, all, test::layout::nhd_padded);
  scatter_checked<fp8_e4m3>(shape, {150, 140}, tile, all, test::layout::nhd);
}

TEST_CASE("tile: scalars may be widened") {
  test::owned_cache<bf16> cache(mixed, {0, 45}, test::layout::hnd_padded);
  cache.fill();
  gather_checked<bf16, std::uint32_t>(cache.reader(), tile_of(0, cache_part::value, {3, 45}, 64));
}

TEST_CASE("tile: paged and contiguous caches give the same tiles") {
  constexpr std::uint64_t tokens = 75;
  std::vector<std::int32_t> table(10);
  std::iota(table.rbegin(), table.rend(), 1);
  test::owned_pools<bf16> pools(mixed, 8, 12, true);
  pools.fill(table, tokens);
  const auto view = paged_kv_cache_view<bf16>::make(mixed, pools.pools(), {table, 8, 12}, tokens);
  REQUIRE(view);
  const tile_shape shape = tile_of(1, cache_part::value, {5, 72}, 96);
  const auto tile = gather_checked<bf16, std::uint16_t>(*view, shape);

  test::owned_pools<bf16> copy(mixed, 8, 12, false);
  const std::size_t untouched = copy.guards();
  const auto out = paged_kv_cache_view<bf16>::make(mixed, copy.pools(), {table, 8, 12}, tokens);
  REQUIRE(out);
  scatter_tile(*out, shape, {20, 60}, tile.data());
  std::size_t wrong = 0;
  std::size_t written = 0;
  for (std::uint64_t t = 0; t < tokens; ++t) {
    for (std::uint32_t h = 0; h < 2; ++h) {
      for (std::uint32_t d = 0; d < 3; ++d) {
        const bf16 value = copy.at(1, cache_part::value, static_cast<std::uint32_t>(table[t / 8]), static_cast<std::uint32_t>(t % 8), h, d);
        const bf16 expected = test::scalar_at<bf16>(1, cache_part::value, t, h, d);
        const bool wanted = t >= 20 && t < 60;
        wrong += value.bits != (wanted ? expected.bits : copy.guard);
        written += wanted && expected.bits != copy.guard ? 1U : 0U;
      }
    }
  }
  CHECK(wrong == 0);
  CHECK(untouched - copy.guards() == written);
}

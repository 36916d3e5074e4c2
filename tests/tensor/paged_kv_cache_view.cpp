// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/fp8_e5m2.hpp>
#include <kvexact/tensor/paged_kv_cache_view.hpp>

#include "tensor/owned_cache.hpp"

using namespace kvexact;

namespace {

const cache_shape mixed = *cache_shape::make(std::array<layer_shape, 3>{{{3, 6, 4}, {1, 9, 0}, {2, 1, 5}}});

template <class T>
using view_result = result<paged_kv_cache_view<T>>;

void check_refused(const view_result<bf16>& view, error_code code, std::int64_t layer = -1, std::int64_t token = -1) {
  REQUIRE_FALSE(view);
  CHECK(view.error().code == code);
  CHECK(view.error().layer == layer);
  CHECK(view.error().token == token);
}

void check_refused(const result<block_layout>& layout) {
  REQUIRE_FALSE(layout);
  CHECK(layout.error().code == error_code::out_of_range);
}

/// Random, disjoint blocks for `tokens` tokens, followed by `spare` unused entries that are not even valid.
std::vector<std::int32_t> shuffled_blocks(std::uint64_t tokens, std::uint32_t block_size, std::uint32_t pool_blocks, std::size_t spare) {
  std::vector<std::int32_t> ids(pool_blocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::mt19937_64 random(tokens * 31 + block_size);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(static_cast<std::size_t>((tokens + block_size - 1) / block_size));
  ids.resize(ids.size() + spare, -1);
  return ids;
}

template <class T>
void check_against_contiguous(std::uint64_t tokens, std::uint32_t block_size) {
  CAPTURE(tokens);
  CAPTURE(block_size);
  const auto pool_blocks = static_cast<std::uint32_t>(tokens / block_size) + 4;
  const auto table = shuffled_blocks(tokens, block_size, pool_blocks, tokens % 3);
  test::owned_cache<T> contiguous(mixed, {0, tokens}, test::layout::nhd);
  contiguous.fill();
  const auto expected = contiguous.reader();
  for (const bool heads_first : {false, true}) {
    CAPTURE(heads_first);
    test::owned_pools<T> pools(mixed, block_size, pool_blocks, heads_first);
    pools.fill(table, tokens);
    const auto view = paged_kv_cache_view<T>::make(mixed, pools.pools(), {table, block_size, pool_blocks}, tokens);
    REQUIRE(view);
    CHECK(view->tokens() == index_range{0, tokens});
    CHECK(view->shape() == mixed);
    std::size_t wrong = 0;
    for (std::uint32_t l = 0; l < mixed.layers(); ++l) {
      for (const cache_part part : cache_parts) {
        for (std::uint64_t t = 0; t < tokens; ++t) {
          for (std::uint32_t h = 0; h < mixed.layer(l).kv_heads; ++h) {
            const T* const row = view->row(l, part, t, h);
            const T* const same = expected.row(l, part, t, h);
            for (std::uint32_t d = 0; d < mixed.layer(l).dim(part); ++d) wrong += row[d].bits != same[d].bits;
          }
        }
      }
    }
    CHECK(wrong == 0);
  }
}

}  // namespace

static_assert(kv_cache<paged_kv_cache_view<bf16>> && kv_cache<paged_kv_cache_view<const fp8_e5m2>>);

TEST_CASE("paged_kv_cache_view: permuted blocks read like a contiguous cache") {
  for (const std::uint64_t tokens : {0U, 1U, 2U, 15U, 16U, 17U, 31U, 32U, 33U, 50U})
    for (const std::uint32_t block_size : {1U, 3U, 16U, 64U}) check_against_contiguous<bf16>(tokens, block_size);
  check_against_contiguous<fp8_e5m2>(37, 8);
}

TEST_CASE("paged_kv_cache_view: strides of the named layouts") {
  std::array<bf16, 1> data;
  const auto nhd = block_pool<bf16>::nhd(data.data(), 16, 3, 64);
  CHECK(nhd.data == data.data());
  CHECK(nhd.block_stride == 16 * 3 * 64);
  CHECK(nhd.slot_stride == 3 * 64);
  CHECK(nhd.head_stride == 64);
  const auto hnd = block_pool<bf16>::hnd(data.data(), 16, 3, 64);
  CHECK(hnd.data == data.data());
  CHECK(hnd.block_stride == 16 * 3 * 64);
  CHECK(hnd.slot_stride == 64);
  CHECK(hnd.head_stride == 16 * 64);
}

TEST_CASE("paged_kv_cache_view: large ids and blocks are addressed in 64 bits") {
  const auto shape = *cache_shape::make(std::array<layer_shape, 1>{{{8, 128, 0}}});
  // Only addresses are computed. One pool entry stands for the whole pool.
  std::array<bf16, 1> data;
  const std::array<layer_pools<bf16>, 1> pools{{{block_pool<bf16>{data.data(), 0, 0, 0}, {}}}};
  const std::array<std::int32_t, 2> table{std::numeric_limits<std::int32_t>::max(), 0};
  const auto view = paged_kv_cache_view<bf16>::make(shape, pools, {table, 1U << 31, 1U << 31}, (std::uint64_t{1} << 31) + 1);
  REQUIRE(view);
  CHECK(view->tokens().size() == (std::uint64_t{1} << 31) + 1);
  CHECK(view->row(0, cache_part::key, std::uint64_t{1} << 31, 7) == data.data());
  CHECK(block_pool<bf16>::nhd(nullptr, 1U << 20, 1U << 10, 1U << 10).block_stride == std::ptrdiff_t{1} << 40);
  CHECK(block_pool<bf16>::hnd(nullptr, 1U << 20, 1U << 10, 1U << 10).block_stride == std::ptrdiff_t{1} << 40);
}

TEST_CASE("paged_kv_cache_view: refuses bad tables and pools") {
  test::owned_pools<bf16> owned(mixed, 4, 5, false);
  const std::vector<layer_pools<bf16>>& pools = owned.pools();
  const std::vector<std::int32_t> table{4, 0, 2};
  const auto make = [&](std::span<const std::int32_t> ids, std::uint32_t block_size, std::uint32_t pool_blocks, std::uint64_t tokens) {
    return paged_kv_cache_view<bf16>::make(mixed, pools, {ids, block_size, pool_blocks}, tokens);
  };
  REQUIRE(make(table, 4, 5, 12));
  REQUIRE(make(table, 4, 5, 9));
  REQUIRE(make({}, 4, 5, 0));

  SUBCASE("table too short") {
    check_refused(make(table, 4, 5, 13), error_code::out_of_range);
    check_refused(make({}, 4, 5, 1), error_code::out_of_range);
    check_refused(make(table, 4, 5, std::numeric_limits<std::uint64_t>::max()), error_code::out_of_range);
    check_refused(make(table, 1, 5, std::numeric_limits<std::uint64_t>::max()), error_code::out_of_range);
  }
  SUBCASE("block size 0") {
    check_refused(make(table, 0, 5, 12), error_code::invalid_argument);
    check_refused(make(table, 0, 5, 0), error_code::invalid_argument);
  }
  SUBCASE("ids outside the pool") {
    check_refused(make(table, 4, 4, 12), error_code::out_of_range, -1, 0);
    check_refused(make(table, 4, 0, 12), error_code::out_of_range, -1, 0);
    const std::vector<std::int32_t> negative{-2};
    check_refused(make(negative, 4, std::numeric_limits<std::uint32_t>::max(), 1), error_code::out_of_range, -1, 0);
    for (const std::int32_t id : {5, 6, -1, -5, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()}) {
      const std::vector<std::int32_t> bad{4, 0, id};
      check_refused(make(bad, 4, 5, 9), error_code::out_of_range, -1, 8);
      CHECK(make(bad, 4, 5, 8));  // not needed for 8 tokens
    }
  }
  SUBCASE("number of layers") {
    for (const std::size_t count : {std::size_t{0}, std::size_t{2}})
      check_refused(paged_kv_cache_view<bf16>::make(mixed, std::span(pools).first(count), {table, 4, 5}, 12), error_code::shape_mismatch);
  }
  SUBCASE("null data") {
    auto broken = pools;
    broken[2].value.data = nullptr;
    check_refused(paged_kv_cache_view<bf16>::make(mixed, broken, {table, 4, 5}, 1), error_code::invalid_argument, 2);
    CHECK(paged_kv_cache_view<bf16>::make(mixed, broken, {table, 4, 5}, 0));
    broken = pools;
    broken[1].key.data = nullptr;
    check_refused(paged_kv_cache_view<bf16>::make(mixed, broken, {table, 4, 5}, 1), error_code::invalid_argument, 1);
  }
}

TEST_CASE("block_layout: sequences of a batch in CSR form") {
  const std::vector<std::int32_t> indptr{0, 2, 2, 5};
  const std::vector<std::int32_t> indices{7, 3, 0, 9, 4};
  const auto ids = [&](std::size_t sequence) {
    const auto layout = block_layout::from_csr(indptr, indices, sequence, 16, 10);
    REQUIRE(layout);
    CHECK(layout->block_size == 16);
    CHECK(layout->pool_blocks == 10);
    return std::vector<std::int32_t>(layout->block_table.begin(), layout->block_table.end());
  };
  CHECK(ids(0) == std::vector<std::int32_t>{7, 3});
  CHECK(ids(1).empty());
  CHECK(ids(2) == std::vector<std::int32_t>{0, 9, 4});
  CHECK(block_layout::from_csr(indptr, indices, 0, 16, 10)->tokens(5) == 21);
  CHECK(block_layout::from_csr(indptr, indices, 0, 16, 10)->tokens(16) == 32);
  CHECK(block_layout::from_csr(indptr, indices, 1, 16, 10)->tokens(5) == 0);
  CHECK(block_layout::from_csr(indptr, indices, 2, 16, 10)->tokens(1) == 33);
}

TEST_CASE("block_layout: refuses a bad indptr") {
  const std::vector<std::int32_t> indices{7, 3, 0, 9, 4};
  const auto layout = [&](const std::vector<std::int32_t>& indptr, std::size_t sequence) {
    return block_layout::from_csr(indptr, indices, sequence, 16, 10);
  };
  REQUIRE(layout({0, 5}, 0));
  check_refused(layout({}, 0));
  check_refused(layout({0}, 0));
  check_refused(layout({0, 5}, 1));
  check_refused(layout({0, 5}, std::numeric_limits<std::size_t>::max()));
  check_refused(layout({0, 6}, 0));
  check_refused(layout({6, 6}, 0));
  check_refused(layout({3, 2}, 0));
  check_refused(layout({-1, 2}, 0));
  check_refused(layout({-2, -1}, 0));
  check_refused(layout({std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()}, 0));
}

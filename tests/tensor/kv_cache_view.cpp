// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/fp8_e4m3.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

#include "tensor/owned_cache.hpp"

using namespace kvexact;

namespace {

const cache_shape mixed = *cache_shape::make(std::array<layer_shape, 3>{{{3, 6, 4}, {1, 9, 0}, {2, 1, 5}}});

template <class T>
void check_every_scalar(index_range tokens) {
  for (const test::layout order : test::layouts) {
    CAPTURE(static_cast<int>(order));
    test::owned_cache<T> cache(mixed, tokens, order);
    cache.fill();
    const auto view = cache.view();
    const auto reader = cache.reader();
    CHECK(view.tokens() == tokens);
    CHECK(view.shape() == mixed);
    std::size_t wrong = 0;
    cache.for_each([&](T& scalar, std::uint32_t l, cache_part part, std::uint64_t t, std::uint32_t h, std::uint32_t d) {
      wrong += view.row(l, part, t, h) + d != &scalar || reader.row(l, part, t, h) + d != &scalar;
      wrong += view.row(l, part, t, h)[d].bits != test::scalar_at<T>(l, part, t, h, d).bits;
    });
    CHECK(wrong == 0);
  }
}

}  // namespace

static_assert(kv_cache<kv_cache_view<bf16>> && kv_cache<kv_cache_view<const fp8_e4m3>>);

TEST_CASE("kv_cache_view: every layout with every stride reads the same scalars") {
  check_every_scalar<bf16>({0, 7});
  check_every_scalar<fp8_e4m3>({0, 1});
}

TEST_CASE("kv_cache_view: tokens are absolute and data begins at the first") {
  check_every_scalar<bf16>({1000, 1013});
  check_every_scalar<bf16>({(std::uint64_t{1} << 40) - 2, (std::uint64_t{1} << 40) + 3});
}

TEST_CASE("kv_cache_view: strides of the named layouts") {
  std::array<bf16, 1> data;
  const auto nhd = strided_tensor<bf16>::nhd(data.data(), 3, 64);
  CHECK(nhd.data == data.data());
  CHECK(nhd.token_stride == 192);
  CHECK(nhd.head_stride == 64);
  const auto hnd = strided_tensor<bf16>::hnd(data.data(), 1000, 64);
  CHECK(hnd.data == data.data());
  CHECK(hnd.token_stride == 64);
  CHECK(hnd.head_stride == 64000);
  CHECK(strided_tensor<bf16>::nhd(nullptr, 1U << 31, 1U << 20).token_stride == std::ptrdiff_t{1} << 51);
  CHECK(strided_tensor<bf16>::hnd(nullptr, std::uint64_t{1} << 40, 1U << 16).head_stride == std::ptrdiff_t{1} << 56);
}

TEST_CASE("kv_cache_view: negative strides read backwards") {
  const auto shape = *cache_shape::make(std::array<layer_shape, 1>{{{2, 3, 0}}});
  std::vector<bf16> memory(5 * 2 * 3);
  for (std::size_t i = 0; i < memory.size(); ++i) memory[i].bits = static_cast<std::uint16_t>(i);
  const std::array<layer_tensors<bf16>, 1> layers{{{{memory.data() + 4 * 6, -6, 3}, {}}}};
  const auto view = kv_cache_view<bf16>::make(shape, layers, {10, 15});
  REQUIRE(view);
  CHECK(view->row(0, cache_part::key, 10, 0)->bits == 24);
  CHECK(view->row(0, cache_part::key, 14, 1)->bits == 3);
}

TEST_CASE("kv_cache_view: refuses wrong layer counts, missing data and reversed ranges") {
  std::array<bf16, 64> data{};
  using tensor = strided_tensor<bf16>;
  const std::array<layer_tensors<bf16>, 3> good{{{tensor::nhd(data.data(), 3, 6), tensor::nhd(data.data(), 3, 4)},
                                                 {tensor::nhd(data.data(), 1, 9), {}},
                                                 {tensor::nhd(data.data(), 2, 1), tensor::nhd(data.data(), 2, 5)}}};
  REQUIRE(kv_cache_view<bf16>::make(mixed, good, {5, 6}));

  for (const std::size_t count : {std::size_t{0}, std::size_t{2}}) {
    const auto view = kv_cache_view<bf16>::make(mixed, std::span(good).first(count), {0, 1});
    REQUIRE_FALSE(view);
    CHECK(view.error().code == error_code::shape_mismatch);
  }
  const auto reversed = kv_cache_view<bf16>::make(mixed, good, {6, 5});
  REQUIRE_FALSE(reversed);
  CHECK(reversed.error().code == error_code::invalid_argument);

  for (const std::uint32_t l : {0U, 1U, 2U}) {
    for (const cache_part part : cache_parts) {
      auto layers = good;
      (part == cache_part::key ? layers[l].key : layers[l].value).data = nullptr;
      const auto view = kv_cache_view<bf16>::make(mixed, layers, {0, 1});
      if (l == 1 && part == cache_part::value) {
        CHECK(view);  // this layer stores no V
      } else {
        REQUIRE_FALSE(view);
        CHECK(view.error().code == error_code::invalid_argument);
        CHECK(view.error().layer == l);
      }
    }
  }
}

TEST_CASE("kv_cache_view: without tokens it needs no data") {
  const std::array<layer_tensors<bf16>, 3> nothing{};
  const auto view = kv_cache_view<bf16>::make(mixed, nothing, {9, 9});
  REQUIRE(view);
  CHECK(view->tokens().size() == 0);
  CHECK(kv_cache_view<bf16>::make(cache_shape(), {}, {0, 4}));
}

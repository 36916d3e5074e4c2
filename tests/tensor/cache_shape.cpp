// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/tensor/cache_shape.hpp>

using namespace kvexact;

namespace {

constexpr std::uint32_t huge = std::numeric_limits<std::uint32_t>::max();

result<cache_shape> one_layer(layer_shape layer) { return cache_shape::make(std::array{layer}); }

void check_refused(const result<cache_shape>& shape, error_code code, std::int64_t layer) {
  REQUIRE_FALSE(shape);
  CHECK(shape.error().code == code);
  CHECK(shape.error().layer == layer);
}

}  // namespace

TEST_CASE("cache_shape: layers may differ and may store no V") {
  const std::array<layer_shape, 3> layers{{{8, 128, 64}, {1, 576, 0}, {3, 64, 64}}};
  const auto shape = cache_shape::make(layers);
  REQUIRE(shape);
  REQUIRE(shape->layers() == 3);
  CHECK(shape->layer(0).channels(cache_part::key) == 1024);
  CHECK(shape->layer(0).channels(cache_part::value) == 512);
  CHECK(shape->layer(0).channels() == 1536);
  CHECK(shape->layer(1).dim(cache_part::key) == 576);
  CHECK(shape->layer(1).dim(cache_part::value) == 0);
  CHECK(shape->layer(1).channels(cache_part::value) == 0);
  CHECK(shape->layer(1).channels() == 576);
  CHECK(shape->layer(2).channels() == 384);
  CHECK(shape->channels() == 1536 + 576 + 384);
  REQUIRE(shape->all().size() == 3);
  for (std::size_t l = 0; l < 3; ++l) CHECK(shape->all()[l] == layers[l]);
}

TEST_CASE("cache_shape: a default one has no layers") {
  CHECK(cache_shape().layers() == 0);
  CHECK(cache_shape().channels() == 0);
  CHECK(cache_shape() == cache_shape());
}

TEST_CASE("cache_shape: refuses what no cache has") {
  check_refused(cache_shape::make({}), error_code::invalid_argument, -1);
  check_refused(cache_shape::uniform(0, {3, 64, 64}), error_code::invalid_argument, -1);
  check_refused(one_layer({0, 64, 64}), error_code::invalid_argument, 0);
  check_refused(one_layer({3, 0, 64}), error_code::invalid_argument, 0);
  check_refused(cache_shape::make(std::array<layer_shape, 3>{{{3, 64, 64}, {3, 64, 0}, {0, 64, 64}}}), error_code::invalid_argument, 2);
}

TEST_CASE("cache_shape: limits") {
  constexpr std::uint32_t most = cache_shape::max_channels;
  CHECK(one_layer({1, most, 0}));
  CHECK(one_layer({most, 1, 0}));
  CHECK(one_layer({most / 2, 1, 1}));
  CHECK(one_layer({most / 256, 128, 128}));
  check_refused(one_layer({1, most + 1, 0}), error_code::out_of_range, 0);
  check_refused(one_layer({1, most, 1}), error_code::out_of_range, 0);
  check_refused(one_layer({most, 1, 1}), error_code::out_of_range, 0);
  check_refused(one_layer({most + 1, 1, 0}), error_code::out_of_range, 0);
  check_refused(one_layer({257, 128, 128}), error_code::out_of_range, 0);
  check_refused(cache_shape::make(std::array<layer_shape, 2>{{{3, 64, 64}, {3, 64, most}}}), error_code::out_of_range, 1);

  CHECK(cache_shape::uniform(cache_shape::max_layers, {1, 1, 0}));
  check_refused(cache_shape::uniform(cache_shape::max_layers + 1, {1, 1, 0}), error_code::out_of_range, -1);
  check_refused(cache_shape::uniform(huge, {1, 1, 0}), error_code::out_of_range, -1);
  check_refused(cache_shape::make(std::vector<layer_shape>(cache_shape::max_layers + 1, {1, 1, 0})), error_code::out_of_range, -1);
}

TEST_CASE("cache_shape: products that overflow 32 or 64 bits are refused") {
  for (const layer_shape layer : {layer_shape{huge, 1, 0},
                                  {1, huge, 0},
                                  {1, 1, huge},
                                  {1, huge, huge},
                                  {huge, huge, huge},
                                  {1U << 16, 1U << 16, 0},
                                  {1U << 31, 2, 0},
                                  {2, 1U << 31, 0},
                                  {2, 1, huge},
                                  {1U << 31, 1, 1}}) {
    CAPTURE(layer.kv_heads);
    CAPTURE(layer.key_dim);
    CAPTURE(layer.value_dim);
    check_refused(one_layer(layer), error_code::out_of_range, 0);
  }
}

TEST_CASE("cache_shape: the largest one counts its channels") {
  const auto shape = cache_shape::uniform(cache_shape::max_layers, {1, cache_shape::max_channels, 0});
  REQUIRE(shape);
  CHECK(shape->channels() == std::uint64_t{cache_shape::max_layers} * cache_shape::max_channels);
}

TEST_CASE("cache_shape: equality and the first layer that differs") {
  const auto expected = *cache_shape::uniform(4, {3, 64, 32});
  CHECK(expect_shape(expected, expected));
  CHECK(expected == *cache_shape::make(std::vector<layer_shape>(4, {3, 64, 32})));

  const auto fewer = expect_shape(*cache_shape::uniform(3, {3, 64, 32}), expected);
  REQUIRE_FALSE(fewer);
  CHECK(fewer.error().code == error_code::shape_mismatch);
  CHECK(fewer.error().layer == -1);

  for (const layer_shape other : {layer_shape{6, 64, 32}, {3, 32, 32}, {3, 64, 0}}) {
    for (std::size_t l = 0; l < 4; ++l) {
      std::vector<layer_shape> layers(4, {3, 64, 32});
      layers[l] = other;
      if (l < 3) layers[3].value_dim = 1;  // a later difference must not be the one that is named
      const auto actual = *cache_shape::make(layers);
      CHECK(actual != expected);
      const auto same = expect_shape(actual, expected);
      REQUIRE_FALSE(same);
      CHECK(same.error().code == error_code::shape_mismatch);
      CHECK(same.error().layer == static_cast<std::int64_t>(l));
    }
  }
}

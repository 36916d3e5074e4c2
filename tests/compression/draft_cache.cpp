// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/compression/h2o.hpp>
#include <kvexact/compression/kivi.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/compression/uncompressed.hpp>

#include "dropper_driver.hpp"
#include "heap_meter.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr layer_shape shape{2, 8, 6};
using exact = uncompressed<bf16>;
using int4 = quantised<bf16, symmetric<4>, symmetric<4>>;
using mixed = draft_cache<first_layers<2, exact>, last_layers<1, int4>, kivi<bf16, 4, 2>>;

template <class Cache>
head_state state_in(const Cache& cache, std::uint32_t layer, std::uint32_t head) {
  return cache.visit(layer, [&](const auto& own) { return state_of(own, head); });
}
template <class Kind, class Cache>
bool is(const Cache& cache, std::uint32_t layer) {
  return cache.visit(layer, []<class Layer>(const Layer&) { return std::same_as<Layer, Kind>; });
}

}  // namespace

TEST_CASE("draft_cache: each layer has the compressor of the first rule that applies") {
  const auto cache = *mixed::make(*cache_shape::uniform(5, shape));
  CHECK(is<exact>(cache, 0));
  CHECK(is<exact>(cache, 1));
  CHECK(is<kivi<bf16, 4, 2>>(cache, 2));
  CHECK(is<kivi<bf16, 4, 2>>(cache, 3));
  CHECK(is<int4>(cache, 4));
  const auto two = *mixed::make(*cache_shape::uniform(2, shape));
  CHECK(is<exact>(two, 1));
}

TEST_CASE("draft_cache: layers hold what their compressors would alone") {
  mixed cache = *mixed::make(*cache_shape::uniform(4, shape), {{}, {.keys = {8}, .values = {8}}, {.keys = {4}, .values = {}}});
  CHECK(cache.max_rollback() == 32);
  auto alone = *kivi<bf16, 4, 2>::make(shape, {.keys = {4}, .values = {}});
  const example_layer layer(shape, 1, 90, 1);
  for (std::uint32_t l = 0; l < 4; ++l) REQUIRE(cache.append(l, layer.rows(0), 90));
  REQUIRE(alone.append(layer.rows(0), 90));
  for (std::uint32_t head = 0; head < 2; ++head) {
    const head_state state = state_of(alone, head);
    CHECK(state_in(cache, 2, head) == state);
    CHECK(cache.entries(2, head) == state.positions.size());
    head_state other = state;
    REQUIRE(cache.materialise(2, head, {other.positions, other.keys, other.values}));
    CHECK(other == state);
    CHECK(!(state_in(cache, 0, head) == state));
  }
  std::vector<float> query(8, 0.5F), out(6), mass(1), expected(6), expected_mass(1);
  REQUIRE(cache.attend(2, 1, {query, out, mass}));
  REQUIRE(alone.attend(1, {query, expected, expected_mass}));
  CHECK(out == expected);
}

TEST_CASE("draft_cache: truncates all layers or none") {
  mixed cache = *mixed::make(*cache_shape::uniform(4, shape));
  const example_layer layer(shape, 1, 100, 1);
  for (std::uint32_t l = 0; l < 4; ++l) REQUIRE(cache.append(l, layer.rows(0), l == 3 ? 80 : 100));  // a step that was given up
  CHECK(cache.truncate(67).error().code == error_code::out_of_range);
  CHECK(cache.length(0) == 100);
  REQUIRE(cache.truncate(90));
  CHECK(cache.length(0) == 90);
  CHECK(cache.length(3) == 80);
  REQUIRE(cache.truncate(80));
  for (std::uint32_t l = 0; l < 4; ++l) CHECK(cache.length(l) == 80);
  CHECK(cache.truncate(81).error().code == error_code::out_of_range);
  CHECK(cache.length(4) == 0);
  CHECK(cache.entries(4, 0) == 0);
  CHECK(!cache.observes(4, 0));
  // Counted from the greatest length.
  CHECK(cache.truncate(60).error().code == error_code::out_of_range);
}

TEST_CASE("draft_cache: errors name the layer") {
  mixed cache = *mixed::make(*cache_shape::uniform(4, shape));
  CHECK(cache.append(2, {}, 1).error().layer == 2);
  CHECK(cache.append(4, {}, 1).error().code == error_code::out_of_range);
  const example_layer layer(shape, 1, 10, 1);
  REQUIRE(cache.append(1, layer.rows(0), 10));
  std::vector<float> none;
  CHECK(cache.attend(1, 0, {none, none, none}).error().layer == 1);
  CHECK(cache.materialise(1, 0, {}).error().code == error_code::shape_mismatch);
  const std::vector<layer_shape> layers{shape, {2, 8, 0}};
  CHECK(draft_cache<exact>::make(*cache_shape::make(layers)).error().layer == 1);
}

TEST_CASE("draft_cache: attention reaches the layers that observe it") {
  using watching = draft_cache<first_layers<1, exact>, h2o<bf16>>;
  watching cache = *watching::make(*cache_shape::uniform(2, shape), {{}, {.sinks = 1, .budget = 4, .window = 2, .interval = 4, .max_rollback = 3}});
  const example_layer layer(shape, 1, 60, 1);
  auto alone = *h2o<bf16>::make(shape, {.sinks = 1, .budget = 4, .window = 2, .interval = 4, .max_rollback = 3});
  decode(alone, layer, 60);
  for (std::uint64_t t = 0; t < 60; ++t) {
    for (std::uint32_t l = 0; l < 2; ++l) {
      REQUIRE(cache.append(l, layer.rows(t), 1));
      CHECK(cache.observes(l, t) == (l == 1));
      for (std::uint32_t head = 0; head < 2; ++head) {
        const auto weights = layer.attention(t, head, state_in(cache, l, head).positions);
        REQUIRE(cache.observe(l, {head, t, weights}));
      }
    }
  }
  CHECK(state_in(cache, 1, 0) == state_of(alone, 0));
  CHECK(cache.max_rollback() == 3);
}

TEST_CASE("draft_cache: bytes are those that were allocated") {
  const example_layer layer(shape, 1, 100, 1);
  const cache_shape all = *cache_shape::uniform(4, shape);
  const heap_meter meter;
  mixed cache = *mixed::make(all);
  // Tables that sequences share are not counted; these formats have none.
  for (std::uint32_t l = 0; l < 4; ++l) REQUIRE(cache.append(l, layer.rows(0), 100));
  CHECK(cache.bytes() == sizeof(cache) + meter.live());
}

// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/compression/echo_kv.hpp>
#include <kvexact/compression/quantised.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/numeric/fp16.hpp>
#include <kvexact/numeric/fp8_e4m3.hpp>

#include "dropper_driver.hpp"
#include "echo_layers.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

using echo = echo_kv<bf16>;
static_assert(switchable<group_layer<echo>> && !switchable<uncompressed<bf16>>);

std::shared_ptr<const echo_group> shared(echo_group maps) { return std::make_shared<const echo_group>(std::move(maps)); }
echo filled(const echo_layers& with, const echo::options& options, std::uint64_t tokens) {
  auto group = *echo::make(std::vector{with.first, with.second}, options);
  for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(group.append(l, with.at(l, 0), tokens));
  return group;
}
float value_at(const echo_layers& with, std::size_t layer, std::uint64_t token, std::size_t channel) {
  return with.rows[layer][1][token * (layer == 0 ? with.first : with.second).channels(cache_part::value) + channel].to_float();
}
bool is_whole(const echo_layers& with, const echo& group, std::uint64_t token) {
  bool all = true;
  for (std::uint32_t head = 0; head < 3; ++head) {
    const head_state state = state_of(group_layer(group, 1), head);
    for (std::size_t c = 0; c < 5; ++c) all &= state.values[token * 5 + c] == value_at(with, 1, token, head * 5 + c);
    for (std::size_t c = 0; c < 8; ++c) all &= state.keys[token * 8 + c] == with.rows[1][0][(token * 3 + head) * 8 + c].to_float();
  }
  return all;
}

}  // namespace

TEST_CASE("echo_kv: channels are kept or mapped") {
  const echo_layers with(30);
  const echo group = filled(with, {.maps = shared(some_maps(with.first, with.second, rotary())), .whole_tokens = 0}, 30);
  CHECK(state_of(group_layer(group, 0), 1) == state_of([&] {
          auto alone = *uncompressed<bf16>::make(with.first);
          REQUIRE(alone.append(with.at(0, 0), 30));
          return alone;
        }(), 1));
  std::size_t other = 0;
  for (std::uint32_t channel = 0; channel < 15; ++channel) {
    const head_state state = state_of(group_layer(group, 1), channel / 5);
    const bool kept = channel == 1 || channel == 2 || channel == 14;
    for (std::uint64_t t = 0; t < 30; ++t) {
      const float expected = kept ? value_at(with, 1, t, channel)
                                  : static_cast<float>(other) * 0.25F + 0.5F * value_at(with, 0, t, other % 12) + 0.5F * value_at(with, 0, t, (other + 5) % 12);
      CHECK(state.values[t * 5 + channel % 5] == doctest::Approx(static_cast<double>(expected)).epsilon(1e-5));
    }
    other += kept ? 0 : 1;
  }
}

TEST_CASE("echo_kv: what is kept is what the paper says") {
  const echo_layers with(2000);
  const echo group = filled(with, {.maps = shared(some_maps(with.first, with.second, with.rotation)), .whole_tokens = 0}, 2000);
  const double first = 28, own = 39, kept = 6;
  const double ratio = static_cast<double>(group.bytes()) / (2000 * 2 * (first + own));
  CHECK(ratio == doctest::Approx((first + kept) / (first + own)).epsilon(0.03));
}

TEST_CASE("echo_kv: the first tokens, and others on demand, are whole, and what was dropped stays so") {
  const echo_layers with(60);
  auto group = *echo::make(std::vector{with.first, with.second}, {.maps = shared(some_maps(with.first, with.second, with.rotation)), .whole_tokens = 3});
  const auto append = [&](std::uint64_t end) {
    for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(group.append(l, with.at(l, group.length(l)), end - group.length(l)));
  };
  const auto whole_is = [&](const std::vector<std::uint64_t>& switches) {
    bool expected = true;
    for (std::uint64_t t = 0; t < group.length(1); ++t) {
      for (const std::uint64_t at : switches) expected ^= at == t;
      CAPTURE(t);
      CHECK(is_whole(with, group, t) == expected);
    }
  };
  append(20);
  CHECK(!group.keeps_whole());
  group.keep_whole(true);
  append(30);
  group.keep_whole(false);
  append(40);
  whole_is({3, 20, 30});
  for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(group.truncate(l, 25));
  whole_is({3, 20});
  append(33);  // the mode is that of now
  whole_is({3, 20, 25});
  for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(group.truncate(l, 1));
  append(10);
  whole_is({3});
}

TEST_CASE("echo_kv: the first layer comes first") {
  const echo_layers with(30);
  auto group = *echo::make(std::vector{with.first, with.second}, {.maps = shared(some_maps(with.first, with.second, with.rotation))});
  CHECK(group.append(1, with.at(1, 0), 5).error().code == error_code::out_of_range);
  REQUIRE(group.append(0, with.at(0, 0), 10));
  CHECK(group.append(1, with.at(1, 0), 11).error().code == error_code::out_of_range);
  REQUIRE(group.append(1, with.at(1, 0), 10));
  const head_state before = state_of(group_layer(group, 1), 0);
  REQUIRE(group.append(0, with.at(0, 10), 1));  // a step begins
  CHECK(state_of(group_layer(group, 1), 0) == before);
  REQUIRE(group.truncate(0, 9));
  std::vector<std::uint64_t> positions(10);
  std::vector<float> keys(80), values(50);
  CHECK(group.materialise(1, 0, {positions, keys, values}).error().code == error_code::out_of_range);
}

TEST_CASE("echo_kv: maps that do not fit") {
  const echo_layers with(3);
  const std::vector layers{with.first, with.second};
  const auto code = [&](const auto& change) {
    echo_group maps = some_maps(with.first, with.second, with.rotation);
    change(maps);
    return echo::make(layers, {.maps = shared(std::move(maps))}).error().code;
  };
  CHECK(echo::make(layers, {}).error().code == error_code::not_calibrated);
  CHECK(code([](echo_group& maps) { maps.followers.push_back(maps.followers[0]); }) == error_code::shape_mismatch);
  CHECK(code([](echo_group& maps) { maps.followers[0][0].kept[0] = 2; }) == error_code::shape_mismatch);
  CHECK(code([](echo_group& maps) { maps.followers[0][0].kept[2] = 24; }) == error_code::shape_mismatch);
  CHECK(code([](echo_group& maps) { maps.followers[0][1].bias.pop_back(); }) == error_code::shape_mismatch);
  CHECK(code([](echo_group& maps) { maps.followers[0][1].weights.push_back(0); }) == error_code::shape_mismatch);
  CHECK(code([](echo_group& maps) { maps.followers[0][1].weights[5] = std::numeric_limits<float>::infinity(); }) == error_code::invalid_argument);
  CHECK(code([](echo_group& maps) { maps.rotation = *rotary::from_base(rotary_pairing::interleaved, 10, 100.0); }) == error_code::shape_mismatch);
  const auto maps = shared(some_maps(with.first, with.second, with.rotation));
  CHECK(echo::make(std::vector{with.first, layer_shape{3, 8, 0}}, {.maps = maps}).error().layer == 1);
  CHECK(echo::make(std::vector{with.first}, {.maps = maps}).error().code == error_code::shape_mismatch);
}

TEST_CASE("echo_kv: keys as large as the format has stay finite when they are turned back") {
  const layer_shape shape{1, 8, 8};
  const auto all_finite = [&]<class Scalar>(Scalar largest) {
    echo_group maps = some_maps(shape, shape, *rotary::from_base(rotary_pairing::interleaved, 8, 100.0));
    auto group = *echo_kv<Scalar>::make(std::vector{shape, shape}, {.maps = shared(std::move(maps)), .whole_tokens = 0});
    const std::vector<Scalar> rows(20 * 8, largest);
    const auto tensor = strided_tensor<const Scalar>::nhd(rows.data(), 1, 8);
    for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(group.append(l, {tensor, tensor}, 20));
    const head_state state = state_of(group_layer(group, 1), 0);
    for (const float each : state.keys) CHECK(std::isfinite(each));
  };
  all_finite(fp16::from_float(60000));
  all_finite(fp8_e4m3::from_float(448));
}

TEST_CASE("echo_kv: in a draft cache, over a quantised first layer") {
  const echo_layers with(50);
  using group = echo_kv<bf16, quantised<bf16, symmetric<8>, symmetric<8>>>;
  using draft = draft_cache<last_layers<1, uncompressed<bf16>>, group>;
  const cache_shape shape = *cache_shape::make(std::vector{with.first, with.second, with.first, with.second, with.second});
  const auto maps = shared(some_maps(with.first, with.second, with.rotation));
  std::vector<std::uint32_t> asked;
  auto cache = *draft::make(shape, [&](std::uint32_t layer) {
    asked.push_back(layer);
    return draft::options{{}, {.maps = maps, .first = {.keys = {.group_channels = 8}, .values = {.group_channels = 6}}}};
  });
  CHECK(asked == std::vector<std::uint32_t>{0, 2, 4});
  for (std::uint32_t l = 0; l < 5; ++l) REQUIRE(cache.append(l, with.at(l % 2 == 0 && l < 4 ? 0 : 1, 0), 50));
  CHECK(cache.max_rollback() == 32);
  cache.keep_whole(true);
  REQUIRE(cache.truncate(40));
  for (std::uint32_t l = 0; l < 5; ++l) {
    CHECK(cache.length(l) == 40);
    REQUIRE(cache.append(l, with.at(l % 2 == 0 && l < 4 ? 0 : 1, 40), 10));
  }
  auto alone = *group::make(std::vector{with.first, with.second}, {.maps = maps, .first = {.keys = {.group_channels = 8}, .values = {.group_channels = 6}}});
  for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(alone.append(l, with.at(l, 0), 40));
  alone.keep_whole(true);
  for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(alone.append(l, with.at(l, 40), 10));
  for (std::uint32_t l = 0; l < 2; ++l) {
    const auto own = cache.visit(l + 2, [](const auto& layer) { return state_of(layer, 1); });
    CHECK(own == state_of(group_layer(alone, l), 1));
  }
  CHECK(cache.entries(1, 0) == 50);
  std::vector<float> query(8, 0.5F), out(5), mass(1), expected(5), expected_mass(1);
  REQUIRE(cache.attend(3, 2, {query, out, mass}));
  REQUIRE(attend_materialised(group_layer(alone, 1), 2, {query, expected, expected_mass}));
  CHECK(mass[0] == doctest::Approx(static_cast<double>(expected_mass[0])));
  for (std::size_t c = 0; c < 5; ++c) CHECK(out[c] == doctest::Approx(static_cast<double>(expected[c])).epsilon(1e-4));
  // The maps are for two layers, and one is left.
  CHECK(draft::make(*cache_shape::make(std::vector{with.first, with.second, with.first, with.second}), {{}, {.maps = maps}}).error().layer == 2);
}

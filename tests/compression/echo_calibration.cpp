// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/echo_calibration.hpp>

#include "dropper_driver.hpp"
#include "echo_layers.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

echo_calibration<bf16> calibrated(const echo_layers& on, const rotary& rotation) {
  auto calibration = *echo_calibration<bf16>::make(std::vector{on.first, on.second}, rotation);
  // In two pieces, the second one somewhere in the middle.
  const std::uint64_t half = on.tokens / 2 + 3;
  REQUIRE(calibration.add(std::vector{on.at(0, 0), on.at(1, 0)}, 0, half));
  REQUIRE(calibration.add(std::vector{on.at(0, half), on.at(1, half)}, half, on.tokens - half));
  return calibration;
}

struct errors {
  double keys = 0, values = 0;
};
/// Mean squared errors of the second layer's channels that are not kept.
errors errors_of(const echo_layers& on, const std::shared_ptr<const echo_group>& maps) {
  auto group = *echo_kv<bf16>::make(std::vector{on.first, on.second}, {.maps = maps, .whole_tokens = 0});
  for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(group.append(l, on.at(l, 0), on.tokens));
  errors sums;
  for (std::uint32_t head = 0; head < on.second.kv_heads; ++head) {
    const head_state state = state_of(group_layer(group, 1), head);
    for (std::uint64_t t = 0; t < on.tokens; ++t) {
      const auto squares = [&](cache_part part, const std::vector<float>& got) {
        double sum = 0;
        for (std::uint32_t c = 0; c < on.second.dim(part); ++c) {
          const double exact = on.rows[1][static_cast<std::size_t>(part)][(t * on.second.kv_heads + head) * on.second.dim(part) + c].to_float();
          sum += std::pow(static_cast<double>(got[t * on.second.dim(part) + c]) - exact, 2);
        }
        return sum;
      };
      sums.keys += squares(cache_part::key, state.keys);
      sums.values += squares(cache_part::value, state.values);
    }
  }
  const auto& [keys, values] = maps->followers[0];
  return {sums.keys / static_cast<double>(on.tokens * keys.bias.size()), sums.values / static_cast<double>(on.tokens * values.bias.size())};
}

}  // namespace

TEST_CASE("echo_calibration: what is left is the noise") {
  const echo_layers known(3000), other(1000, 2);
  const auto maps = *calibrated(known, known.rotation).fit({.kept_keys = 1, .kept_values = 1});
  // The channel that nothing explains is the one that is kept.
  CHECK(maps->followers[0][0].kept == std::vector<std::uint32_t>{other.free_channel});
  CHECK(maps->followers[0][1].kept == std::vector<std::uint32_t>{other.free_channel});
  const errors left = errors_of(other, maps);
  const double rounding = 3e-5;  // of bf16, at this size
  CHECK(left.keys == doctest::Approx(0.01 + rounding).epsilon(0.05));
  CHECK(left.values == doctest::Approx(0.01 + rounding).epsilon(0.05));
}

TEST_CASE("echo_calibration: rotated keys have no common map") {
  const echo_layers known(3000), other(1000, 2);
  const auto maps = *calibrated(known, rotary()).fit({.kept_keys = 1, .kept_values = 1});
  const errors left = errors_of(other, maps);
  CHECK(left.keys > 0.5);
  CHECK(left.values < 0.011);
}

TEST_CASE("echo_calibration: kept channels take their error with them") {
  const echo_layers known(2000, 3, 0.5);
  const auto calibration = calibrated(known, known.rotation);
  double before = 1e9;
  for (const std::uint32_t kept : {0U, 1U, 6U, 14U}) {
    const auto maps = *calibration.fit({.kept_keys = kept, .kept_values = kept});
    const errors left = errors_of(known, maps);
    const double sum = left.values * static_cast<double>(maps->followers[0][1].bias.size());
    CHECK(sum < before);
    before = sum;
  }
  const auto all = *calibration.fit({.kept_keys = 24, .kept_values = 15});
  auto group = *echo_kv<bf16>::make(std::vector{known.first, known.second}, {.maps = all});
  for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(group.append(l, known.at(l, 0), 50));
  const head_state state = state_of(group_layer(group, 1), 2);
  for (std::uint64_t t = 0; t < 50; ++t) {
    for (std::size_t c = 0; c < 5; ++c) CHECK(state.values[t * 5 + c] == known.rows[1][1][(t * 3 + 2) * 5 + c].to_float());
    for (std::size_t c = 0; c < 8; ++c) CHECK(state.keys[t * 8 + c] == doctest::Approx(static_cast<double>(known.rows[1][0][(t * 3 + 2) * 8 + c].to_float())).epsilon(0.02));
  }
}

TEST_CASE("echo_calibration: tokens of no weight were never seen") {
  const echo_layers known(1000), wrong(1000, 2, 5.0);
  auto weighted = *echo_calibration<bf16>::make(std::vector{known.first, known.second}, known.rotation);
  REQUIRE(weighted.add(std::vector{known.at(0, 0), known.at(1, 0)}, 0, 1000, std::vector<float>(1000, 2.5F)));
  REQUIRE(weighted.add(std::vector{wrong.at(0, 0), wrong.at(1, 0)}, 0, 1000, std::vector<float>(1000, 0.0F)));
  auto plain = *echo_calibration<bf16>::make(std::vector{known.first, known.second}, known.rotation);
  REQUIRE(plain.add(std::vector{known.at(0, 0), known.at(1, 0)}, 0, 1000));
  const auto a = *weighted.fit({.kept_keys = 3, .kept_values = 2}), b = *plain.fit({.kept_keys = 3, .kept_values = 2});
  CHECK(a->followers[0][0].kept == b->followers[0][0].kept);
  for (std::size_t i = 0; i < a->followers[0][0].weights.size(); ++i)
    CHECK(a->followers[0][0].weights[i] == doctest::Approx(static_cast<double>(b->followers[0][0].weights[i])).epsilon(1e-4));
}

TEST_CASE("echo_calibration: what it cannot use") {
  const echo_layers known(20);
  const std::vector shapes{known.first, known.second};
  const std::vector rows{known.at(0, 0), known.at(1, 0)};
  CHECK(echo_calibration<bf16>::make(std::vector{known.first}, known.rotation).error().code == error_code::invalid_argument);
  CHECK(echo_calibration<bf16>::make(std::vector{known.first, layer_shape{2, 8, 0}}, known.rotation).error().layer == 1);
  CHECK(echo_calibration<bf16>::make(std::vector{known.first, layer_shape{2, 4, 4}}, known.rotation).error().code == error_code::shape_mismatch);
  auto calibration = *echo_calibration<bf16>::make(shapes, known.rotation);
  CHECK(calibration.fit({}).error().code == error_code::not_calibrated);
  CHECK(calibration.add(std::vector{known.at(0, 0)}, 0, 5).error().code == error_code::shape_mismatch);
  CHECK(calibration.add(rows, 0, 5, std::vector<float>(4, 1.0F)).error().code == error_code::shape_mismatch);
  CHECK(calibration.add(rows, 0, 1, std::vector<float>{-1.0F}).error().code == error_code::invalid_argument);
  CHECK(calibration.add(rows, 0, 1, std::vector<float>{std::numeric_limits<float>::quiet_NaN()}).error().code == error_code::invalid_argument);
  echo_layers broken(20);
  broken.rows[1][1][7 * 15] = bf16::from_bits(0x7fc0);
  const auto outcome = calibration.add(std::vector{broken.at(0, 0), broken.at(1, 0)}, 100, 20);
  CHECK(outcome.error().layer == 1);
  CHECK(outcome.error().token == 107);
  REQUIRE(calibration.add(rows, 0, 20));
  CHECK(calibration.fit({.kept_keys = 25}).error().code == error_code::invalid_argument);
  CHECK(calibration.fit({.ridge = -1}).error().code == error_code::invalid_argument);
  CHECK(calibration.fit({.kept_keys = 24, .kept_values = 15}));
  CHECK(calibration.fit({}));
}

// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include <doctest/doctest.h>

#include <kvexact/compression/scaled_float.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("scaled_float: keeps a quantiser's promises, whatever the groups") {
  for (const std::uint32_t dim : {1U, 31U, 64U, 80U}) {
    for (const std::uint32_t group : {0U, 1U, 32U, 100U}) {
      CAPTURE(dim);
      CAPTURE(group);
      check_quantiser(*scaled_float<fp8_e4m3>::make(1, dim, {.group_channels = group}));
      check_quantiser(*scaled_float<fp8_e5m2>::make(2, dim, {.group_channels = group}));
    }
  }
}

TEST_CASE("scaled_float: errors on normal numbers as known, bits as counted") {
  const auto unscaled = *scaled_float<fp8_e4m3>::make(1, 128, {.group_channels = 0});
  CHECK(normal_error(unscaled) == doctest::Approx(7.05e-4).epsilon(0.03));
  CHECK(bits_per_value(unscaled) == 8);
  const auto by_32 = *scaled_float<fp8_e4m3>::make(1, 128);
  CHECK(normal_error(by_32) == doctest::Approx(5.75e-4).epsilon(0.03));
  CHECK(bits_per_value(by_32) == 8.5);
  CHECK(normal_error(*scaled_float<fp8_e5m2>::make(1, 128, {.group_channels = 0})) == doctest::Approx(2.79e-3).epsilon(0.03));
}

TEST_CASE("scaled_float: what is too large is counted and replaced by the largest") {
  const auto format = *scaled_float<fp8_e4m3>::make(1, 4, {.group_channels = 0, .scale = 0.5F});
  const std::vector<float> values{1, 224, -225, 1e30F};
  std::uint64_t saturated = 0;
  const auto packed = packed_by(format, values, 0, &saturated);
  CHECK(saturated == 1);  // 225 / 0.5 is rounded to 448
  CHECK(unpacked_by(format, packed) == std::vector<float>{1, 224, -224, 224});
  // The scale of a group is beyond fp16.
  CHECK(packed_by(*scaled_float<fp8_e4m3>::make(1, 1), std::vector<float>{3e8F}, 0, &saturated).size() == 3);
  CHECK(saturated == 1);
}

TEST_CASE("scaled_float: unusable options") {
  CHECK(scaled_float<fp8_e4m3>::make(0, 64).error().code == error_code::invalid_argument);
  CHECK(scaled_float<fp8_e4m3>::make(1, 0).error().code == error_code::invalid_argument);
  for (const float scale : {0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::nanf(""), 8e36F})
    CHECK(scaled_float<fp8_e4m3>::make(1, 64, {.group_channels = 0, .scale = scale}).error().code == error_code::invalid_argument);
}

// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/compression/symmetric.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("symmetric: keeps a quantiser's promises, whatever the groups") {
  for (const std::uint32_t dim : {1U, 9U, 64U, 100U, 130U}) {
    for (const std::uint32_t group : {1U, 20U, 32U, 64U, 1000U}) {
      CAPTURE(dim);
      CAPTURE(group);
      check_quantiser(*symmetric<8>::make(1, dim, {group}));
      check_quantiser(*symmetric<4>::make(1, dim, {group}));
      check_quantiser(*symmetric<3>::make(1, dim, {group}));
      check_quantiser(*symmetric<2>::make(1, dim, {group}));
    }
  }
}

TEST_CASE("symmetric: errors on normal numbers as known, bits as counted") {
  CHECK(normal_error(*symmetric<8>::make(1, 128, {32})) == doctest::Approx(2.86e-5).epsilon(0.03));
  CHECK(normal_error(*symmetric<8>::make(1, 128, {128})) == doctest::Approx(4.19e-5).epsilon(0.03));
  CHECK(normal_error(*symmetric<4>::make(1, 128, {32})) == doctest::Approx(9.42e-3).epsilon(0.03));
  CHECK(normal_error(*symmetric<4>::make(1, 128, {128})) == doctest::Approx(1.38e-2).epsilon(0.03));
  CHECK(bits_per_value(*symmetric<8>::make(1, 128, {32})) == 8.5);
  CHECK(bits_per_value(*symmetric<4>::make(1, 128, {128})) == 4.125);
}

TEST_CASE("symmetric: by hand, ties to even") {
  const auto format = *symmetric<4>::make(1, 8, {8});
  const std::vector<float> values{7, -7, 0, 1, 0.5F, 1.5F, -2.5F, 6.4F};
  CHECK(through(format, values) == std::vector<float>{7, -7, 0, 1, 0, 2, -2, 6});
}

TEST_CASE("symmetric: the same bytes everywhere") {
  CHECK(pinned_hash(*symmetric<8>::make(1, 100, {32})) == 0x9a9b1bfc60058a10U);
  CHECK(pinned_hash(*symmetric<4>::make(1, 100, {32})) == 0x195ff638ebcb4eeeU);
  CHECK(pinned_hash(*symmetric<3>::make(1, 100, {32})) == 0xba966daacc748269U);
}

TEST_CASE("symmetric: what is too large is counted and clipped") {
  std::uint64_t saturated = 0;
  const auto format = *symmetric<4>::make(1, 4, {4});
  const auto packed = packed_by(format, std::vector<float>{1e6F, -1e7F, 65504, 0}, 0, &saturated);
  CHECK(saturated == 2);
  CHECK(unpacked_by(format, packed) == std::vector<float>{7 * 65504.0F, -7 * 65504.0F, 65504, 0});
}

TEST_CASE("symmetric: unusable options") {
  CHECK(symmetric<4>::make(0, 64).error().code == error_code::invalid_argument);
  CHECK(symmetric<4>::make(1, 0).error().code == error_code::invalid_argument);
  CHECK(symmetric<4>::make(1, 64, {0}).error().code == error_code::invalid_argument);
}

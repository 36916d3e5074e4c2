// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/compression/asymmetric.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("asymmetric: keeps a quantiser's promises, whatever the groups") {
  for (const std::uint32_t dim : {1U, 9U, 64U, 100U, 130U}) {
    for (const std::uint32_t group : {2U, 20U, 32U, 64U, 1000U}) {
      CAPTURE(dim);
      CAPTURE(group);
      check_quantiser(*asymmetric<4>::make(1, dim, {group}));
      check_quantiser(*asymmetric<3>::make(1, dim, {group}));
      check_quantiser(*asymmetric<2>::make(1, dim, {group}));
    }
  }
}

TEST_CASE("asymmetric: errors on normal numbers as known, bits as counted") {
  CHECK(normal_error(*asymmetric<4>::make(1, 128, {32})) == doctest::Approx(6.12e-3).epsilon(0.03));
  CHECK(normal_error(*asymmetric<4>::make(1, 128, {64})) == doctest::Approx(8.03e-3).epsilon(0.03));
  CHECK(normal_error(*asymmetric<4>::make(1, 128, {128})) == doctest::Approx(9.97e-3).epsilon(0.03));
  CHECK(normal_error(*asymmetric<3>::make(1, 128, {32})) == doctest::Approx(2.81e-2).epsilon(0.03));
  CHECK(normal_error(*asymmetric<3>::make(1, 128, {128})) == doctest::Approx(4.58e-2).epsilon(0.03));
  CHECK(normal_error(*asymmetric<2>::make(1, 128, {32})) == doctest::Approx(0.154).epsilon(0.03));
  CHECK(normal_error(*asymmetric<2>::make(1, 128, {64})) == doctest::Approx(0.202).epsilon(0.03));
  CHECK(normal_error(*asymmetric<2>::make(1, 128, {128})) == doctest::Approx(0.251).epsilon(0.03));
  CHECK(bits_per_value(*asymmetric<4>::make(1, 128, {32})) == 5);
  CHECK(bits_per_value(*asymmetric<3>::make(1, 128, {128})) == 3.25);
  CHECK(bits_per_value(*asymmetric<2>::make(1, 128, {64})) == 2.5);
}

TEST_CASE("asymmetric: by hand, ties to even, far from 0") {
  const auto format = *asymmetric<2>::make(1, 6, {6});
  CHECK(through(format, std::vector<float>{10, 13, 10.5F, 11.5F, 12.4F, 12.6F}) == std::vector<float>{10, 13, 10, 12, 12, 13});
  // fp16 has steps of 0.0625 there; offsets are rounded down and steps up, so no value is clipped.
  const std::vector<float> far{-100.03F, -98.01F, -99};
  const auto back = through(*asymmetric<4>::make(1, 3, {3}), far);
  for (std::size_t i = 0; i < far.size(); ++i) CHECK(std::fabs(back[i] - far[i]) <= 0.5 * (2.02 + 0.0625) / 15 + 0.001);
}

TEST_CASE("asymmetric: the same bytes everywhere") {
  CHECK(pinned_hash(*asymmetric<4>::make(1, 100, {32})) == 0x1f3e56e325bb837fU);
  CHECK(pinned_hash(*asymmetric<3>::make(1, 100, {32})) == 0xb7b10ca97d15e5deU);
  CHECK(pinned_hash(*asymmetric<2>::make(1, 100, {32})) == 0x098fbaa0438cebb9U);
}

TEST_CASE("asymmetric: what is too large is counted and clipped") {
  std::uint64_t saturated = 0;
  const auto packed = packed_by(*asymmetric<2>::make(1, 4, {4}), std::vector<float>{-1e7F, 0, 5, 1e7F}, 0, &saturated);
  CHECK(saturated == 2);
  const auto back = unpacked_by(*asymmetric<2>::make(1, 4, {4}), packed);
  CHECK(back[0] == -65504);
  CHECK(back[3] == 2 * 65504.0F);
}

TEST_CASE("asymmetric: a group of one channel is refused, it would be billed as few bits and stored in 32") {
  CHECK(asymmetric<2>::make(1, 64, {1}).error().code == error_code::invalid_argument);
  CHECK(asymmetric<2>::make(1, 64, {0}).error().code == error_code::invalid_argument);
  CHECK(asymmetric<2>::make(0, 64).error().code == error_code::invalid_argument);
  CHECK(asymmetric<2>::make(1, 0).error().code == error_code::invalid_argument);
}

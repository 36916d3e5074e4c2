// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/core/split_mix.hpp>

using namespace kvexact::detail;

TEST_CASE("split_mix: gives the known sequence") {
  std::uint64_t state = 0;
  CHECK(split_mix(state) == 0xe220a8397b1dcdafU);
  CHECK(split_mix(state) == 0x6e789e6aa1b965f4U);
  CHECK(state == 2 * split_mix_step);
}

TEST_CASE("split_mix: numbers are at least 0 and below 1") {
  CHECK(unit_number(0) == 0);
  CHECK(unit_number(~std::uint64_t{0}) == 1 - 0x1p-53);
  CHECK(unit_number(std::uint64_t{1} << 63) == 0.5);
}

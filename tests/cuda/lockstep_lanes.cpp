// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <doctest/doctest.h>

#include <kvexact/cuda/lockstep_lanes.cuh>

#include "emulated_lanes.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("lockstep_lanes: runs are combined in the order of their lanes, and every lane has the outcome") {
  for (const int count : {8, 16, 32}) {
    for (int run = 1; run <= count; run *= 2) {
      const emulated_lanes lanes(count);
      cuda::per_lane<emulated_lanes, std::string> names;
      lanes.each([](int lane, std::string& name) { name = static_cast<char>('A' + lane); }, names);
      const auto join = [](const std::string& a, const std::string& b) { return a + b; };
      const auto combined = cuda::combine_lanes<std::string>(lanes, names, run, join);
      for (int lane = 0; lane < count; ++lane) {
        std::string expected;
        for (int i = 0; i < run; ++i) expected += static_cast<char>('A' + lane / run * run + i);
        CHECK(combined[static_cast<std::size_t>(lane)] == expected);
      }
    }
  }
}

TEST_CASE("lockstep_lanes: sums and maxima") {
  const emulated_lanes lanes(16);
  cuda::per_lane<emulated_lanes, float> values{};
  lanes.each([](int lane, float& value) { value = static_cast<float>(lane * 7 % 16); }, values);
  const auto sums = cuda::sum_of_lanes(lanes, values);
  const auto largest = cuda::largest_of_lanes(lanes, values, 4);
  lanes.each([](int lane, const float& sum, const float& most) {
    CHECK(sum == 120);
    CHECK(most == (lane < 4 ? 14 : lane < 8 ? 12 : lane < 12 ? 15 : 11));  // 0 7 14 5, 12 3 10 1, 8 15 6 13, 4 11 2 9
  }, sums, largest);
}

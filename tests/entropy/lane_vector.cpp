// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/entropy/lane_vector.hpp>

#include "ballot_lanes.hpp"
#include "lane_vector_checks.hpp"

using namespace kvexact;

TEST_CASE("lane_vector: scalar lanes do what the concept says") {
  test::check_lane_vector<scalar_lanes<1>, 12>();
  test::check_lane_vector<scalar_lanes<5>, 12>();
  test::check_lane_vector<scalar_lanes<16>, 12>();
  test::check_lane_vector<scalar_lanes<32>, 12>();
  test::check_lane_vector<scalar_lanes<64>, 12>();
  test::check_lane_vector<scalar_lanes<256>, 12>();
}

TEST_CASE("lane_vector: scalar lanes at other precisions") {
  test::check_lane_vector<scalar_lanes<32>, 6>();
  test::check_lane_vector<scalar_lanes<32>, 8>();
  test::check_lane_vector<scalar_lanes<32>, 11>();
  test::check_lane_vector<scalar_lanes<32>, 13>();
  test::check_lane_vector<scalar_lanes<32>, 14>();
  test::check_lane_vector<scalar_lanes<32>, 16>();
}

TEST_CASE("lane_vector: lanes that vote like a warp") {
  static_assert(lane_vector<test::ballot_lanes<32>>);
  test::check_lane_vector<test::ballot_lanes<32>, 12>();
  test::check_lane_vector<test::ballot_lanes<64>, 16>();
}

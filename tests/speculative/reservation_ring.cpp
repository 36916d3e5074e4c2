// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/speculative/reservation_ring.hpp>

using namespace kvexact;

TEST_CASE("reservation ring: slots come and go, and capacity is never exceeded") {
  auto ring = *reservation_ring::make(10, 4);
  CHECK(ring.reserve(0, 3, 6));
  CHECK_FALSE(ring.reserve(2, 4, 5));
  CHECK(ring.free(3) == 10);  // all or nothing
  CHECK(ring.reserve(2, 4, 4));
  CHECK(ring.free(2) == 0);
  CHECK_FALSE(ring.reserve(3, 5, 1));  // beyond the horizon
  CHECK(ring.free(4) == 0);
  ring.advance();
  CHECK(ring.begin() == 1);
  CHECK(ring.end() == 5);
  CHECK(ring.free(0) == 0);
  CHECK(ring.free(4) == 10);
  ring.release(0, 3, 6);  // slot 0 has passed
  CHECK(ring.free(1) == 10);
  CHECK(ring.free(2) == 6);
  CHECK(ring.reserved(3) == 4);
}

TEST_CASE("reservation ring: a hold lasts until it is ended") {
  auto ring = *reservation_ring::make(10, 4);
  CHECK(ring.reserve(1, 2, 5));
  CHECK(ring.hold(6) == 2);
  CHECK(ring.free(1) == 5);
  CHECK(ring.hold(6) == ring.end());
  for (int i = 0; i < 6; ++i) ring.advance();
  for (std::uint64_t slot = ring.begin(); slot < ring.end(); ++slot) CHECK(ring.free(slot) == 4);
  CHECK(ring.hold(4) == ring.begin());
  ring.end_hold(2, 7, 6);
  CHECK(ring.free(6) == 0);
  CHECK(ring.free(7) == 6);
  ring.advance();
  CHECK(ring.free(ring.end() - 1) == 6);
}

TEST_CASE("reservation ring: no slots") { CHECK(reservation_ring::make(1, 0).error().code == error_code::invalid_argument); }

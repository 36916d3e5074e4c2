// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/speculative/cost_model.hpp>

using namespace kvexact;

namespace {
constexpr offload_cost example{.weights = 48e9, .full_cache = 4e9, .memory_bandwidth = 1.79e12, .link_bandwidth = 64e9, .batch = 10};
}

TEST_CASE("cost model: an iteration reads weights, draft caches and the full caches that verify, or waits for the link") {
  CHECK(example.plain_seconds() == doctest::Approx(88e9 / 1.79e12));
  CHECK(example.iteration_seconds(40) == doctest::Approx((48e9 + 10e9 + 1e9) / 1.79e12));
  CHECK(example.iteration_seconds(4) == doctest::Approx(10e9 / 64e9));
  const double period = example.hidden_period();
  CHECK(period == doctest::Approx(40 * (1790. / 64 - 1) / 58));
  const double link = 40e9 / (period * 64e9);
  CHECK(example.iteration_seconds(period) == doctest::Approx(link));
  offload_cost refinement = example;
  refinement.transfer_ratio = 0.39;
  CHECK(refinement.iteration_seconds(4) == doctest::Approx(0.39 * 10e9 / 64e9));
  refinement.link_bandwidth = 1e15;
  CHECK(refinement.hidden_period() == 0);
}

TEST_CASE("cost model: a round is its drafts and one verification more") {
  CHECK(example.round_seconds(0) == example.plain_seconds());
  CHECK(example.round_seconds(19) == doctest::Approx(20 * example.iteration_seconds(20)));
  const measured_cost measured{.draft = 2, .verify = 5, .verify_row = 1, .transfer = 30, .plain = 4};
  CHECK(measured.round_seconds(0) == 4);
  CHECK(measured.round_seconds(5) == 30);
  CHECK(measured.round_seconds(10) == 35);
}

TEST_CASE("cost model: expected tokens") {
  CHECK(expected_tokens(0, 7) == 1);
  CHECK(expected_tokens(1, 7) == 8);
  CHECK(expected_tokens(0.5, 2) == doctest::Approx(1.75));
  CHECK(expected_tokens(1 - 1e-12, 9) == doctest::Approx(10));
}

TEST_CASE("cost model: break-even acceptance") {
  // The example does not say how large the batch is. 10 requests, a period of one verification: 0.955; drafts alone as the period, 0.951;
  // four requests, 0.935 so and 0.956 else.
  CHECK(break_even_acceptance(example, 128) == doctest::Approx(0.9552).epsilon(2e-4));
  struct without_verification : offload_cost {
    double round_seconds(std::uint32_t length) const noexcept { return length == 0 ? plain_seconds() : length * iteration_seconds(length); }
  };
  without_verification four{example};
  four.batch = 4;
  CHECK(break_even_acceptance(four, 128) == doctest::Approx(0.935).epsilon(0.001));
  CHECK(best_length(example, 0.9, 128).length == 0);
  CHECK(best_length(example, 0.99, 128).length == 18);
  offload_cost slow = example;
  slow.link_bandwidth = 1.2e9;
  CHECK(break_even_acceptance(slow, 128) == doctest::Approx(1));
}

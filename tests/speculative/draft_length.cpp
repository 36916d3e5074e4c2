// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/core/split_mix.hpp>
#include <kvexact/speculative/draft_length.hpp>

using namespace kvexact;

static_assert(draft_length_policy<fixed_draft_length>);
static_assert(draft_length_policy<adaptive_draft_length<measured_cost>>);
static_assert(stops_early<early_stopping<adaptive_draft_length<offload_cost>>>);
static_assert(!stops_early<fixed_draft_length>);

namespace {

class counter {
 public:
  explicit counter(std::uint64_t seed) : state_(seed) {}
  double operator()() { return kvexact::detail::unit_number(kvexact::detail::split_mix(state_)); }

 private:
  std::uint64_t state_;
};

/// Committed tokens a step of plain decoding.
template <class Policy, class Cost, class Law>
double speed(Policy& policy, const Cost& cost, double tokens, counter& random, Law law) {
  double committed = 0;
  double steps = 0;
  while (committed < tokens) {
    const std::uint32_t length = policy.next(128);
    std::uint32_t accepted = 0;
    while (accepted < length && random() < law(committed, accepted + 1)) ++accepted;
    policy.observe({length, accepted});
    committed += accepted + 1;
    steps += cost.round_seconds(length) / cost.round_seconds(0);
  }
  return committed / steps;
}

constexpr measured_cost resident{.draft = 0.2, .verify = 1, .verify_row = 0.01, .transfer = 0, .plain = 1};
constexpr offload_cost offloaded{.weights = 48e9, .full_cache = 4e9, .memory_bandwidth = 1.79e12, .link_bandwidth = 64e9, .batch = 10};

template <class Cost>
void check_constant(const Cost& cost, double acceptance, double first_share) {
  CAPTURE(acceptance);
  const auto law = [&](double, std::uint32_t) { return acceptance; };
  adaptive_draft_length policy(cost);
  counter random(1);
  const double best = best_length(cost, acceptance, 128).rate * cost.round_seconds(0);
  const double first = speed(policy, cost, 4096, random, law);
  CHECK(first > first_share * best);
  CHECK(first > 0.97);
  (void)speed(policy, cost, 4096, random, law);
  CHECK(speed(policy, cost, 16384, random, law) > 0.95 * best);
}

}  // namespace

TEST_CASE("draft length: near the best fixed length, from the first request on where drafts are cheap") {
  for (const double acceptance : {0.0, 0.3, 0.6, 0.8, 0.9, 0.97, 0.99}) check_constant(resident, acceptance, 0.95);
}

TEST_CASE("draft length: near the best fixed length when full caches come over a link") {
  for (const double acceptance : {0.0, 0.5, 0.9, 0.95}) check_constant(offloaded, acceptance, 0.95);
  for (const double acceptance : {0.98, 0.99}) check_constant(offloaded, acceptance, 0.85);
}

TEST_CASE("draft length: acceptance that changes") {
  const auto law = [](double committed, std::uint32_t) { return std::fmod(committed, 2048) < 1024 ? 0.95 : 0.3; };
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    adaptive_draft_length policy(resident);
    counter random(seed);
    double best = 0;
    for (std::uint32_t length = 0; length <= 32; ++length) {
      fixed_draft_length fixed(length);
      counter same(seed);
      best = std::max(best, speed(fixed, resident, 16384, same, law));
    }
    CHECK(speed(policy, resident, 16384, random, law) > best);
  }
  adaptive_draft_length policy(offloaded);
  counter random(4);
  CHECK(speed(policy, offloaded, 16384, random, law) > 0.97);
}

TEST_CASE("draft length: acceptance that falls with the position") {
  const auto law = [](double, std::uint32_t position) { return position <= 4 ? 0.97 : 0.2; };
  adaptive_draft_length policy(resident);
  counter random(5);
  fixed_draft_length four(4);
  const double best = speed(four, resident, 8192, random, law);
  CHECK(speed(policy, resident, 8192, random, law) > 0.95 * best);
  CHECK(policy.next(128) <= 6);
  CHECK(policy.acceptance(1) > 0.9);
  CHECK(policy.acceptance(6) < policy.acceptance(1));
}

TEST_CASE("draft length: what is cut off is no failure") {
  adaptive_draft_length cut(resident);
  adaptive_draft_length rejected(resident);
  for (int i = 0; i < 50; ++i) {
    (void)cut.next(8);
    (void)rejected.next(8);
    cut.observe({8, 3, true});
    rejected.observe({8, 3, false});
  }
  CHECK(cut.acceptance(4) > 0.95);
  CHECK(rejected.acceptance(4) < 0.5);
  CHECK(rejected.acceptance(1) > 0.85);
}

TEST_CASE("draft length: no drafts where they cannot pay, and limits") {
  offload_cost hopeless = offloaded;
  hopeless.link_bandwidth = 1e6;
  adaptive_draft_length policy(hopeless);
  for (int i = 0; i < 5000; ++i) {
    const std::uint32_t length = policy.next(128);
    REQUIRE(length == 0);
    policy.observe({length, 0});
  }
  adaptive_draft_length eager(resident);
  for (int i = 0; i < 100; ++i) eager.observe({8, 8});
  CHECK(eager.next(1000) <= 128);
  CHECK(eager.next(3) <= 3);
  CHECK(eager.next(0) == 0);
  CHECK(fixed_draft_length(5).next(3) == 3);
  // The cost decides, and may change.
  CHECK(eager.next(128) > 0);
  eager.set_cost({.draft = 2, .verify = 3, .verify_row = 0, .transfer = 0, .plain = 1});
  CHECK(eager.next(128) == 0);
}

TEST_CASE("draft length: losses are bounded however wrong the start is") {
  adaptive_options options;
  options.acceptance = 0.99;
  options.confidence = 1e6;
  adaptive_draft_length policy(resident, options);
  counter random(6);
  CHECK(speed(policy, resident, 4096, random, [](double, std::uint32_t) { return 0.0; }) > 4096 / (4096 * 1.02 + 4 + 32 + 30));
}

TEST_CASE("draft length: early stop") {
  early_stopping policy(fixed_draft_length(8), 0.5);
  CHECK(policy.next(4) == 4);
  CHECK_FALSE(policy.stop_early(0.8));
  CHECK_FALSE(policy.stop_early(0.7));
  CHECK(policy.stop_early(0.8));
  CHECK(policy.next(8) == 8);
  CHECK_FALSE(policy.stop_early(0.6));
}

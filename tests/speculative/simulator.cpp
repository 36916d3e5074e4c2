// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/speculative/simulator.hpp>

using namespace kvexact;

namespace {

/// 10 requests of 4 GB, drafts of 1 GB, a link of 50 GB/s, 48 GB of weights and 1.79 TB/s.
simulator_options example() {
  simulator_options options;
  options.cost = {.weights = 48e9, .full_cache = 4e9, .memory_bandwidth = 1.79e12, .link_bandwidth = 50e9, .batch = 10};
  options.schedule.link = static_cast<std::uint64_t>(50e9 * options.cost.iteration_seconds(30));
  options.schedule.transient = 4'000'000'000;
  options.schedule.resident = 10'000'000'000;
  options.schedule.horizon = 128;
  options.schedule.max_requests = 10;
  return options;
}

simulator_report run(const simulator_options& options, std::uint32_t length, std::uint32_t tokens, double acceptance) {
  auto simulator = *offload_simulator<fixed_draft_length>::make(options);
  for (std::uint64_t id = 0; id < 10; ++id) REQUIRE(simulator.submit({id, tokens, acceptance}, fixed_draft_length(length)));
  return simulator.run();
}

}  // namespace

TEST_CASE("simulator: the worked example, staggered") {
  const simulator_options options = example();
  auto simulator = *offload_simulator<fixed_draft_length>::make(options);
  // A period of 30: 29 drafts and a verification.
  for (std::uint64_t id = 0; id < 10; ++id) REQUIRE(simulator.submit({id, 1'000'000, 1}, fixed_draft_length(29)));
  for (int i = 0; i < 120; ++i) (void)simulator.step();
  const simulator_report before = simulator.report();
  for (int i = 0; i < 300; ++i) (void)simulator.step();
  const simulator_report& after = simulator.report();
  CHECK(after.verifications - before.verifications == 100);  // one in 3 iterations
  CHECK(after.tokens - before.tokens == 100 * 30);
  CHECK(after.most_verified == 1);
  CHECK(after.peak_transient == 4'000'000'000);  // one full cache
  CHECK(after.idle == before.idle);
  CHECK(after.link_wait == 0);  // 80 ms each, all hidden
  CHECK(after.link_busy - before.link_busy == doctest::Approx(100 * 0.08).epsilon(0.01));
  CHECK(after.seconds - before.seconds == doctest::Approx(300 * (48e9 + 10e9 + 3e9 / 3) / 1.79e12).epsilon(0.001));
}

TEST_CASE("simulator: the worked example in lock-step waits for all caches at once") {
  simulator_options options = example();
  // Room for everything in one iteration: all are booked for the same one.
  options.schedule.link = 40'000'000'000;
  options.schedule.transient = 40'000'000'000;
  auto simulator = *offload_simulator<fixed_draft_length>::make(options);
  for (std::uint64_t id = 0; id < 10; ++id) REQUIRE(simulator.submit({id, 1'000'000, 1}, fixed_draft_length(29)));
  for (int i = 0; i < 30; ++i) (void)simulator.step();
  const simulator_report& report = simulator.report();
  CHECK(report.most_verified == 10);
  CHECK(report.verifications == 10);
  CHECK(report.peak_transient == 40'000'000'000);
  CHECK(report.link_busy == doctest::Approx(0.8));
  CHECK(report.link_wait == doctest::Approx(0.8 - (48e9 + 40e9) / 1.79e12));
}

TEST_CASE("simulator: every token asked for, with loads that fail or stand still") {
  for (const double failing : {0.0, 0.3}) {
    for (const std::uint32_t length : {0u, 1u, 8u, 29u}) {
      simulator_options options = example();
      options.failed_loads = failing;
      options.stuck_loads = failing / 3;
      options.seed = length;
      const simulator_report report = run(options, length, 150, 0.9);
      CHECK(report.tokens == 10 * 150);
      CHECK(report.peak_transient <= options.schedule.transient);
      CHECK((report.failed_loads > 0) == (failing > 0));
    }
  }
}

TEST_CASE("simulator: the same run each time") {
  simulator_options options = example();
  options.failed_loads = 0.1;
  const simulator_report first = run(options, 12, 200, 0.9);
  const simulator_report second = run(options, 12, 200, 0.9);
  CHECK(first.seconds == second.seconds);
  CHECK(first.iterations == second.iterations);
  CHECK(first.drafts == second.drafts);
}

TEST_CASE("simulator: requests are cancelled, and policies may adapt") {
  const simulator_options options = example();
  using policy = adaptive_draft_length<offload_cost>;
  auto simulator = *offload_simulator<policy>::make(options);
  for (std::uint64_t id = 0; id < 10; ++id) REQUIRE(simulator.submit({id, 300, 0.98}, policy(options.cost)));
  CHECK(simulator.submit({11, 0, 0.5}, policy(options.cost)).error().code == error_code::invalid_argument);
  for (int i = 0; i < 20; ++i) (void)simulator.step();
  CHECK(simulator.cancel(3));
  CHECK_FALSE(simulator.cancel(3));
  const std::uint64_t tokens = simulator.run().tokens;
  CHECK(tokens >= 9 * 300);
  CHECK(tokens < 10 * 300);
  CHECK(simulator.schedule().requests() == 0);
}

TEST_CASE("simulator: loads that stand still never share the memory of one") {
  simulator_options options;
  options.cost = {.weights = 1e3, .full_cache = 100, .draft_ratio = .1, .transfer_ratio = 1, .memory_bandwidth = 1e3, .link_bandwidth = 1e3, .batch = 1};
  options.schedule = {.link = 100, .transient = 200, .resident = 1000, .horizon = 64, .max_requests = 16};
  options.stuck_loads = 0.3;
  options.seed = 5;
  auto simulated = *offload_simulator<fixed_draft_length>::make(options);
  for (std::uint64_t id = 0; id < 8; ++id) REQUIRE(simulated.submit({id, 200, .8}, fixed_draft_length(4)));
  const simulator_report report = simulated.run();
  CHECK(report.tokens == 8 * 200);
  CHECK(report.peak_transient <= 200);
}

// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/drafter.hpp>
#include <kvexact/speculative/engine_model.hpp>

#include "toy_engine.hpp"

using namespace kvexact;
using namespace kvexact::test;

static_assert(logit_model<engine_model<toy_engine>>);

TEST_CASE("engine_model: gives the logits of its own model, whatever it was asked or failed at before") {
  std::mt19937 random(5);
  fault_plan faults;
  engine_model<toy_engine> used(toy_engine({.seed = 7, .faults = &faults}));
  std::vector<token_id> committed;
  const auto draw = [&] { return static_cast<token_id>(random() % 12); };
  while (committed.size() < 60) {
    for (std::uint64_t more = 1 + random() % 5; more > 0; --more) committed.push_back(draw());
    std::vector<token_id> pending;
    for (std::uint64_t more = random() % 6; more > 0; --more) pending.push_back(draw());
    const std::size_t rows = 1 + random() % (pending.size() + 1);
    std::vector<float> logits(rows * used.vocabulary()), expected(logits);
    for (std::uint64_t failing = random() % 4;; failing += 1 + random() % 7) {
      faults = {.calls = 0, .failing = failing};
      if (used.synchronise(committed)) break;
    }
    for (std::uint64_t failing = random() % 4;; failing += 1 + random() % 7) {
      faults = {.calls = 0, .failing = failing};
      if (used.logits(committed, pending, logits)) break;
    }
    engine_model fresh(toy_engine({.seed = 7}));
    REQUIRE(fresh.logits(committed, pending, expected));
    REQUIRE(logits == expected);
  }
  // What it has seen it does not run again.
  const std::uint64_t before = used.engine().rows_run();
  faults = {};
  std::vector<float> row(used.vocabulary());
  REQUIRE(used.logits(committed, {}, row));
  REQUIRE(used.logits(committed, std::vector<token_id>{1}, row));
  REQUIRE(used.logits(committed, std::vector<token_id>{1, 2}, row));
  CHECK(used.engine().rows_run() <= before + 3);
  CHECK(used.logits({}, {}, row).error().code == error_code::invalid_argument);
}

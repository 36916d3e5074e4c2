// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/guarantee.hpp>

#include "toy_engine.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

const std::vector<std::uint32_t> tokens{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
const std::vector<std::uint32_t> widths{2, 3, 8, 11};

toy_engine started(const toy_engine::options& options) {
  toy_engine engine(options);
  REQUIRE(engine.forward(std::vector<std::uint32_t>{7, 8, 9}, {}));
  return engine;
}

}  // namespace

TEST_CASE("guarantee: an engine whose rows stand alone is found to be row-invariant, and left where it was") {
  toy_engine engine = started({});
  const auto found = probe_row_invariance(engine, tokens, widths);
  REQUIRE(found);
  CHECK(found->invariant());
  CHECK(engine.length() == 3);
  const auto fixed = probe_fixed_width(engine, tokens, 5, 0);
  REQUIRE(fixed);
  CHECK(fixed->invariant());
  CHECK(engine.length() == 3);
}

TEST_CASE("guarantee: rows that depend on the width are found, and pass at a fixed width") {
  toy_engine engine = started({.width_dependent = true});
  const auto found = *probe_row_invariance(engine, tokens, widths);
  CHECK(!found.logits_equal);
  CHECK(!found.invariant());
  CHECK(probe_fixed_width(engine, tokens, 5, 0)->invariant());
  // Widths that it does not tell apart hide it.
  CHECK(probe_row_invariance(engine, tokens, std::vector<std::uint32_t>{1})->invariant());
}

TEST_CASE("guarantee: rows that depend on what the others hold pass no probe") {
  toy_engine engine = started({.pad_dependent = true});
  CHECK(!probe_row_invariance(engine, tokens, widths)->invariant());
  CHECK(!probe_fixed_width(engine, tokens, 5, 0)->invariant());
  CHECK(!probe_fixed_width(engine, tokens, 2, 0)->invariant());
}

TEST_CASE("guarantee: every place of a pass is looked at") {
  toy_engine engine = started({.last_row_differs = true});
  for (const std::uint32_t width : {2U, 3U, 5U}) CHECK(!probe_fixed_width(engine, tokens, width, 0)->invariant());
  CHECK(!probe_row_invariance(engine, tokens, widths)->invariant());
}

TEST_CASE("guarantee: what could not be taken back is not run") {
  toy_engine engine = started({.max_rollback = 12});
  CHECK(probe_row_invariance(engine, tokens, widths)->invariant());
  CHECK(probe_fixed_width(engine, tokens, 3, 0).error().code == error_code::out_of_range);
  CHECK(engine.length() == 3);
  CHECK(engine.rows_run() == 3 + 5 * tokens.size());
}

TEST_CASE("guarantee: errors of the engine are passed on, and it is left where it was") {
  fault_plan faults;
  toy_engine engine = started({.faults = &faults});
  for (std::uint64_t call = 0; call < 40; call += 3) {
    faults = {.calls = 0, .failing = call};
    CHECK(probe_row_invariance(engine, tokens, widths).error().code == error_code::output_failed);
    if (engine.length() != 3) REQUIRE(engine.truncate(3));  // the very call that restores it may be the one that fails
  }
  CHECK(probe_row_invariance(engine, {}, widths).error().code == error_code::invalid_argument);
  CHECK(probe_row_invariance(engine, tokens, std::vector<std::uint32_t>{2, 0}).error().code == error_code::invalid_argument);
  CHECK(probe_fixed_width(engine, tokens, 1, 0).error().code == error_code::invalid_argument);
  toy_engine small({.capacity = 8});
  CHECK(probe_row_invariance(small, tokens, widths).error().code == error_code::out_of_range);
}

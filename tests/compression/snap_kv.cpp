// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/snap_kv.hpp>

#include "dropper_driver.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

/// Attention of the queries of the window on what is older, averaged over positions.
reference_scores pooled(std::uint32_t window, std::uint32_t kernel) {
  return [=](std::uint32_t, std::uint64_t boundary, const std::vector<std::uint64_t>& held, const attention_history& history) {
    const std::uint64_t begin = boundary > window ? boundary - window : 0;
    std::vector<double> sums(boundary);
    for (std::uint64_t position = begin; position < boundary; ++position) {
      for (const std::uint64_t token : held) {
        if (token < begin) sums[token] += mean_weight(history[position], token);
      }
    }
    std::vector<double> scores;
    for (const std::uint64_t token : held) {
      double sum = 0;
      for (std::uint64_t at = 0; at < boundary; ++at) {
        if (at + kernel / 2 >= token && at <= token + kernel / 2) sum += sums[at];
      }
      scores.push_back(sum / kernel);
    }
    return scores;
  };
}

}  // namespace

TEST_CASE("snap_kv: against a reference that keeps everything") {
  for (const std::uint32_t heads : {1U, 3U}) {
    const example_layer layer({2, 6, 4}, heads, 160, 1);
    for (const std::uint32_t kernel : {1U, 3U, 5U, 11U}) {
      for (const std::uint32_t window : {1U, 5U, 8U}) {
        for (const std::uint32_t rollback : {0U, 3U, 12U}) {
          for (const std::uint64_t first : {0U, 4U, 60U}) {
            const dropper_options options{.sinks = 2,
                                          .budget = 7,
                                          .window = window,
                                          .first_eviction = first,
                                          .interval = 8,
                                          .max_rollback = rollback,
                                          .query_heads = heads};
            auto made = snap_kv<bf16>::make(layer.shape, {.eviction = options, .kernel = kernel});
            REQUIRE(made);
            check_against_reference(*made, layer, options, 160, pooled(window, kernel));
          }
        }
      }
    }
  }
}

TEST_CASE("snap_kv: the queries of the window decide, and no others") {
  const example_layer layer({1, 6, 4}, 2, 80, 3);
  const dropper_options options{
      .sinks = 0, .budget = 8, .window = 6, .first_eviction = 50, .interval = 20, .max_rollback = 0, .query_heads = 2};
  const auto expected = reference_positions(layer, options, 0, 51, pooled(6, 5))[51];
  REQUIRE(expected != reference_positions(layer, options, 0, 51, pooled(5, 5))[51]);
  REQUIRE(expected != reference_positions(layer, options, 0, 51, pooled(7, 5))[51]);
  REQUIRE(expected != reference_positions(layer, options, 0, 51, pooled(6, 1))[51]);
  REQUIRE(expected != reference_positions(layer, options, 0, 51, pooled(50, 5))[51]);
  auto made = snap_kv<bf16>::make(layer.shape, {.eviction = options});
  REQUIRE(made);
  decode(*made, layer, 51);
  CHECK(state_of(*made, 0).positions == expected);
  for (std::uint64_t position = 0; position < 110; ++position)
    CHECK(made->observes(position) == ((position >= 44 && position < 50) || (position >= 64 && position < 70) ||
                                       (position >= 84 && position < 90) || (position >= 104)));
}

TEST_CASE("snap_kv: attention of an earlier window does not count where a later one was not handed over") {
  const example_layer layer({1, 2, 2}, 1, 40, 3);
  for (const std::uint32_t rollback : {0U, 30U}) {
    auto made = snap_kv<bf16>::make(
        layer.shape, {.eviction = {.sinks = 0, .budget = 2, .window = 2, .interval = 4, .max_rollback = rollback}, .kernel = 1});
    REQUIRE(made);
    REQUIRE(made->append(layer.rows(0), 8));
    std::vector<float> weights(8);
    weights[3] = 0.4F;
    weights[5] = 0.6F;
    REQUIRE(made->observe({0, 7, weights}));
    REQUIRE(made->append(layer.rows(8), 1));
    CHECK(state_of(*made, 0).positions == std::vector<std::uint64_t>{3, 5, 6, 7, 8});
    // Token 9 is not in the window of boundary 12: ignored.
    REQUIRE(made->append(layer.rows(9), 1));
    REQUIRE_FALSE(made->observes(9));
    REQUIRE(made->observe({0, 9, std::vector<float>{0, 0, 0, 0.5F, 0.5F, 0}}));
    REQUIRE(made->append(layer.rows(10), 2));
    REQUIRE(made->observe({0, 11, std::vector<float>{0.1F, 0, 0.3F, 0, 0, 0, 0, 0.6F}}));
    REQUIRE(made->append(layer.rows(12), 1));
    CHECK(state_of(*made, 0).positions == std::vector<std::uint64_t>{3, 6, 10, 11, 12});
    REQUIRE(made->append(layer.rows(13), 4));
    CHECK(state_of(*made, 0).positions == std::vector<std::uint64_t>{3, 6, 14, 15, 16});
  }
}

TEST_CASE("snap_kv: options that cannot be") {
  const auto code = [](std::uint32_t window, std::uint32_t interval, std::uint32_t kernel) {
    const auto made = snap_kv<bf16>::make({1, 2, 2}, {.eviction = {.window = window, .interval = interval}, .kernel = kernel});
    return made ? error_code{} : made.error().code;
  };
  CHECK(code(8, 8, 1) == error_code{});
  CHECK(code(9, 8, 1) == error_code::invalid_argument);
  CHECK(code(0, 8, 1) == error_code::invalid_argument);
  CHECK(code(8, 8, 0) == error_code::invalid_argument);
  CHECK(code(8, 8, 4) == error_code::invalid_argument);
}

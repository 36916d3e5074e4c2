// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/h2o.hpp>

#include "dropper_driver.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

/// Attention of all queries so far, mean over the query heads.
std::vector<double> accumulated(std::uint32_t, std::uint64_t, const std::vector<std::uint64_t>& held, const attention_history& history) {
  std::vector<double> scores;
  for (const std::uint64_t token : held) {
    double sum = 0;
    for (const auto& query : history) sum += mean_weight(query, token);
    scores.push_back(sum);
  }
  return scores;
}

}  // namespace

TEST_CASE("h2o: accumulated attention against a reference that keeps everything") {
  for (const std::uint32_t heads : {1U, 4U}) {
    const example_layer layer({2, 6, 4}, heads, 150, 1);
    for (const std::uint32_t window : {0U, 1U, 9U}) {
      for (const std::uint32_t rollback : {0U, 6U}) {
        for (const std::uint64_t first : {0U, 3U, 50U}) {
          const dropper_options options{.sinks = 2,
                                        .budget = 7,
                                        .window = window,
                                        .first_eviction = first,
                                        .interval = 5,
                                        .max_rollback = rollback,
                                        .query_heads = heads};
          auto made = h2o<bf16>::make(layer.shape, options);
          REQUIRE(made);
          check_against_reference(*made, layer, options, 150, accumulated);
        }
      }
    }
  }
}

TEST_CASE("h2o: the sum is causal") {
  const example_layer layer({1, 6, 4}, 2, 60, 2);
  const dropper_options options{
      .sinks = 0, .budget = 8, .window = 4, .first_eviction = 40, .interval = 30, .max_rollback = 0, .query_heads = 2};
  // The variant that lets old queries see newer tokens, too.
  const reference_scores not_causal = [&](std::uint32_t head, std::uint64_t boundary, const std::vector<std::uint64_t>& held,
                                          const attention_history&) {
    std::vector<double> sums(held.size());
    for (std::uint64_t position = 0; position < boundary; ++position) {
      const auto weights = layer.attention(position, head, held);
      for (std::size_t i = 0; i < weights.size(); ++i) sums[i % held.size()] += static_cast<double>(weights[i]);
    }
    return sums;
  };
  const auto causal = reference_positions(layer, options, 0, 60, accumulated);
  REQUIRE(causal[41] != reference_positions(layer, options, 0, 60, not_causal)[41]);
  auto made = h2o<bf16>::make(layer.shape, options);
  REQUIRE(made);
  decode(*made, layer, 41);
  CHECK(state_of(*made, 0).positions == causal[41]);
}

TEST_CASE("h2o: one set per KV head, by the mean over its query heads") {
  auto made = h2o<bf16>::make(
      {1, 1, 1}, {.sinks = 0, .budget = 1, .window = 0, .first_eviction = 3, .interval = 9, .max_rollback = 1, .query_heads = 3});
  REQUIRE(made);
  const std::vector<bf16> rows(8, bf16::from_float(1));
  const layer_tensors<const bf16> tensors{strided_tensor<const bf16>::nhd(rows.data(), 1, 1),
                                          strided_tensor<const bf16>::nhd(rows.data(), 1, 1)};
  REQUIRE(made->append(tensors, 3));
  // The largest weight of all is on token 0, two of three heads prefer token 2, the mean prefers token 1.
  REQUIRE(made->observe({0, 2, std::vector<float>{0.9F, 0.1F, 0, 0, 0.48F, 0.52F, 0, 0.48F, 0.52F}}));
  CHECK(made->entries(0) == 3);
  REQUIRE(made->append(tensors, 1));
  CHECK(state_of(*made, 0).positions == std::vector<std::uint64_t>{1, 3});
}

TEST_CASE("h2o: equal scores favour the lower position, also where nothing was handed over") {
  const example_layer layer({1, 2, 2}, 1, 30, 3);
  auto made = h2o<bf16>::make(layer.shape, {.sinks = 1, .budget = 3, .window = 2, .interval = 4, .max_rollback = 2});
  REQUIRE(made);
  REQUIRE(made->append(layer.rows(0), 10));
  REQUIRE(made->observe({0, 9, std::vector<float>(10, 0.1F)}));
  REQUIRE(made->append(layer.rows(10), 1));
  CHECK(state_of(*made, 0).positions == std::vector<std::uint64_t>{0, 1, 2, 3, 8, 9, 10});
  REQUIRE(made->append(layer.rows(11), 8));
  CHECK(state_of(*made, 0).positions == std::vector<std::uint64_t>{0, 1, 2, 3, 16, 17, 18});
}

TEST_CASE("h2o: what a query pays to a token is rounded to bf16") {
  const example_layer layer({1, 2, 2}, 1, 4, 4);
  for (const bool enough : {false, true}) {
    auto made = h2o<bf16>::make(layer.shape, {.sinks = 0, .budget = 1, .window = 0, .first_eviction = 3, .interval = 9});
    REQUIRE(made);
    REQUIRE(made->append(layer.rows(0), 3));
    REQUIRE(made->observe({0, 2, std::vector<float>{0.25F, 0.25F + (enough ? 0x1.8p-10F : 0x0.8p-10F), 0}}));
    REQUIRE(made->append(layer.rows(3), 1));
    CHECK(state_of(*made, 0).positions == std::vector<std::uint64_t>{enough ? 1U : 0U, 3});
  }
}

TEST_CASE("h2o: every token is observed") {
  auto made = h2o<bf16>::make({1, 2, 2}, {});
  REQUIRE(made);
  for (const std::uint64_t position : {0U, 1U, 357U, 1000000U}) CHECK(made->observes(position));
  CHECK_FALSE(made->observes(~std::uint64_t{0}));
}

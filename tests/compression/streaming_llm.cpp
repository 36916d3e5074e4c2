// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/streaming_llm.hpp>

#include "dropper_driver.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("streaming_llm: first and newest tokens at every length") {
  const example_layer layer({2, 4, 3}, 1, 70, 1);
  for (const std::uint32_t sinks : {0U, 1U, 4U}) {
    for (const std::uint32_t window : {0U, 1U, 10U}) {
      for (const std::uint32_t interval : {1U, 3U, 16U}) {
        for (const std::uint32_t rollback : {0U, 5U, 40U}) {
          CAPTURE(sinks);
          CAPTURE(window);
          CAPTURE(interval);
          auto made =
              streaming_llm<bf16>::make(layer.shape, {.sinks = sinks, .window = window, .interval = interval, .max_rollback = rollback});
          REQUIRE(made);
          for (std::uint64_t length = 1; length <= 70; ++length) {
            decode(*made, layer, length);
            // The newest boundary that is older than the newest token.
            std::uint64_t boundary = 0;
            for (std::uint64_t b = sinks + window + interval; b < length; b += interval) boundary = b;
            std::vector<std::uint64_t> expected;
            for (std::uint64_t token = 0; token < length; ++token) {
              if (token < sinks || token + window >= boundary) expected.push_back(token);
            }
            REQUIRE(state_of(*made, 0).positions == expected);
            REQUIRE(state_of(*made, 1).positions == expected);
          }
        }
      }
    }
  }
}

TEST_CASE("streaming_llm: a window shorter than an interval and everything by default") {
  const example_layer layer({1, 2, 2}, 1, 700, 2);
  auto made = streaming_llm<bf16>::make(layer.shape, {});
  REQUIRE(made);
  REQUIRE(made->append(layer.rows(0), 700));
  const auto positions = state_of(*made, 0).positions;
  CHECK(positions[3] == 3);
  CHECK(positions.size() <= 4 + 256 + 16);
  CHECK(positions.size() > 4 + 256);
  CHECK(positions[4] == 700 - (positions.size() - 4));
}

TEST_CASE("streaming_llm: an interval of 0 is refused") {
  CHECK(streaming_llm<bf16>::make({1, 2, 2}, {.interval = 0}).error().code == error_code::invalid_argument);
}

TEST_CASE("streaming_llm: other number formats") {
  auto made = streaming_llm<fp8_e4m3>::make({1, 2, 1}, {.sinks = 1, .window = 1, .interval = 1, .max_rollback = 0});
  REQUIRE(made);
  std::vector<fp8_e4m3> numbers;
  for (int i = 0; i < 30; ++i) numbers.push_back(fp8_e4m3::from_float(static_cast<float>(i)));
  const layer_tensors<const fp8_e4m3> rows{strided_tensor<const fp8_e4m3>::nhd(numbers.data(), 1, 2),
                                           strided_tensor<const fp8_e4m3>::nhd(numbers.data() + 10, 1, 1)};
  REQUIRE(made->append(rows, 5));
  const head_state state = state_of(*made, 0);
  CHECK(state.positions == std::vector<std::uint64_t>{0, 3, 4});
  CHECK(state.keys == std::vector<float>{0, 1, 6, 7, 8, 9});
  CHECK(state.values == std::vector<float>{10, 13, 14});
  numbers[12] = fp8_e4m3::from_bits(fp8_e4m3::quiet_nan);
  const auto refused = made->append(rows, 3);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().token == 7);
}

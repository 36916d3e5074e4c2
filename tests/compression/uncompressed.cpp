// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/compression/uncompressed.hpp>

#include "dropper_driver.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("uncompressed: gives back every value") {
  constexpr layer_shape shape{3, 5, 7};
  const example_layer layer(shape, 1, 50, 1);
  auto cache = *uncompressed<bf16>::make(shape);
  REQUIRE(cache.append(layer.rows(0), 50));
  const auto state = state_of(cache);
  for (std::uint32_t head = 0; head < 3; ++head) {
    for (std::uint64_t t = 0; t < 50; ++t) {
      CHECK(state[head].positions[t] == t);
      for (std::size_t c = 0; c < 5; ++c) REQUIRE(state[head].keys[t * 5 + c] == layer.key(t, head)[c].to_float());
      for (std::size_t c = 0; c < 7; ++c) REQUIRE(state[head].values[t * 7 + c] == layer.value(t, head)[c].to_float());
    }
  }
}

TEST_CASE("uncompressed: layers that it cannot hold") {
  CHECK(uncompressed<bf16>::make({65536, 65536, 65536}).error().code == error_code::out_of_range);
  CHECK(uncompressed<bf16>::make({0, 5, 7}).error().code == error_code::invalid_argument);
  CHECK(uncompressed<bf16>::make({3, 0, 7}).error().code == error_code::invalid_argument);
  CHECK(uncompressed<bf16>::make({3, 5, 0}).error().code == error_code::invalid_argument);
}

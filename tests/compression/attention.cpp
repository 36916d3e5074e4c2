// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/attention.hpp>
#include <kvexact/compression/uncompressed.hpp>

#include "dropper_driver.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("attention: against its definition in double precision") {
  constexpr layer_shape shape{2, 6, 4};
  const example_layer layer(shape, 3, 40, 1, 2.0F);
  auto cache = *uncompressed<bf16>::make(shape);
  REQUIRE(cache.append(layer.rows(0), 40));
  for (std::uint32_t head = 0; head < 2; ++head) {
    const auto queries = std::span(layer.queries).subspan(head * 18, 18);
    std::vector<float> out(12), mass(3), weights(3 * 40);
    REQUIRE(attend_materialised(cache, head, {queries, out, mass}, weights));
    for (std::size_t q = 0; q < 3; ++q) {
      std::vector<double> scores(40), expected(4);
      double sum = 0;
      for (std::size_t t = 0; t < 40; ++t) {
        for (std::size_t c = 0; c < 6; ++c) scores[t] += static_cast<double>(queries[q * 6 + c]) * static_cast<double>(layer.key(t, head)[c].to_float());
        sum += std::exp(scores[t]);
      }
      for (std::size_t t = 0; t < 40; ++t) {
        CHECK(weights[q * 40 + t] == doctest::Approx(std::exp(scores[t]) / sum).epsilon(1e-5));
        for (std::size_t c = 0; c < 4; ++c) expected[c] += std::exp(scores[t]) / sum * static_cast<double>(layer.value(t, head)[c].to_float());
      }
      for (std::size_t c = 0; c < 4; ++c) CHECK(out[q * 4 + c] == doctest::Approx(expected[c]).epsilon(1e-5));
      CHECK(mass[q] == doctest::Approx(std::log(sum)).epsilon(1e-6));
    }
    CHECK(attend_materialised(cache, head, {queries, out, mass}, std::span(weights).first(7)).error().code == error_code::shape_mismatch);
  }
}

// SPDX-License-Identifier: Apache-2.0
#include <numeric>

#include <doctest/doctest.h>

#include <kvexact/compression/asymmetric_by_channel.hpp>
#include <kvexact/compression/outlier_split.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/compression/turbo_quant.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("outlier_split: keeps a quantiser's promises, other channels for each head") {
  using split = outlier_split<symmetric<8>, symmetric<4>>;
  check_quantiser(*split::make(2, 10, {.channels = {1, 9, 0, 5}, .outliers = {}, .rest = {}}), 2);
  using grouped = outlier_split<asymmetric_by_channel<4>, asymmetric_by_channel<2>>;
  check_quantiser(*grouped::make(1, 9, {.channels = {8}, .outliers = {4}, .rest = {4}}));
}

TEST_CASE("outlier_split: 32 of 128 channels with a bit more, as published") {
  using split = outlier_split<turbo_quant<3>, turbo_quant<2>>;
  std::vector<std::uint32_t> channels(32);
  std::iota(channels.begin(), channels.end(), 40U);
  const auto format = *split::make(1, 128, {.channels = channels, .outliers = {}, .rest = {}});
  CHECK(bits_per_value(format) == 2.25 + 2 * 16.0 / 128);
  // Loud channels are where they should be, or elsewhere.
  std::vector<float> values = normal_values(128 * 1024, 4);
  for (std::size_t i = 0; i < values.size(); ++i)
    if (i % 128 >= 40 && i % 128 < 72) values[i] *= 10;
  const double plain = relative_error(values, through(*turbo_quant<2>::make(1, 128), values));
  CHECK(relative_error(values, through(format, values)) < 0.4 * plain);
}

TEST_CASE("outlier_split: unusable options") {
  using split = outlier_split<symmetric<8>, symmetric<4>>;
  const auto code = [](std::uint32_t heads, std::uint32_t dim, std::vector<std::uint32_t> channels) {
    return split::make(heads, dim, {.channels = std::move(channels), .outliers = {}, .rest = {}}).error().code;
  };
  CHECK(code(0, 4, {1}) == error_code::shape_mismatch);
  CHECK(code(1, 4, {}) == error_code::shape_mismatch);
  CHECK(code(2, 4, {1, 2, 3}) == error_code::shape_mismatch);
  CHECK(code(1, 2, {0, 1}) == error_code::shape_mismatch);
  CHECK(code(1, 4, {4}) == error_code::invalid_argument);
  CHECK(code(1, 4, {2, 1}) == error_code::invalid_argument);
  CHECK(code(1, 4, {1, 1}) == error_code::invalid_argument);
  using mixed = outlier_split<asymmetric_by_channel<4>, symmetric<4>>;
  CHECK(mixed::make(1, 4, {.channels = {1}, .outliers = {}, .rest = {}}).error().code == error_code::invalid_argument);
}

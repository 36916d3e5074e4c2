// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include <doctest/doctest.h>

#include <kvexact/compression/asymmetric_by_channel.hpp>
#include <kvexact/compression/centred.hpp>
#include <kvexact/compression/kvarn.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/compression/turbo_quant.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("centred: keeps a quantiser's promises, with other means for each head") {
  const std::vector<float> means = normal_values(2 * 20, 1);
  check_quantiser(*centred<symmetric<4>>::make(2, 20, {.means = means, .inner = {}}), 2);
  check_quantiser(*centred<turbo_quant<3>>::make(2, 20, {.means = means, .inner = {}}), 2);
  check_quantiser(*centred<asymmetric_by_channel<2>>::make(2, 20, {.means = means, .inner = {8}}), 2);
  check_quantiser(*centred<kvarn<4, cache_part::value>>::make(2, 20, {.means = means, .inner = {.group_tokens = 8}}), 2);
}

TEST_CASE("centred: a large mean takes all precision, unless it is taken off") {
  constexpr std::size_t dim = 64, tokens = 256;
  std::vector<float> means(dim, 0.0F);
  means[3] = 30;
  means[40] = -50;
  const std::vector<float> around = normal_values(dim * tokens, 2);
  std::vector<float> values = around;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] += means[i % dim];
  const auto error_of = [&](const std::vector<float>& back) {
    double error = 0;
    for (std::size_t i = 0; i < values.size(); ++i) error += std::pow(static_cast<double>(values[i]) - static_cast<double>(back[i]), 2);
    return error / static_cast<double>(values.size());
  };
  const auto plain = *turbo_quant<3>::make(1, dim);
  const auto without = *centred<turbo_quant<3>>::make(1, dim, {.means = means, .inner = {}});
  CHECK(error_of(through(plain, values)) > 20 * error_of(through(without, values)));
  CHECK(error_of(through(without, values)) == doctest::Approx(relative_error(around, through(plain, around))).epsilon(0.05));
}

TEST_CASE("centred: unusable options") {
  using format = centred<symmetric<4>>;
  CHECK(format::make(1, 4, {.means = {1, 2, 3}, .inner = {}}).error().code == error_code::shape_mismatch);
  CHECK(format::make(1, 2, {.means = {1, std::numeric_limits<float>::infinity()}, .inner = {}}).error().code == error_code::invalid_argument);
  CHECK(format::make(0, 2, {.means = {}, .inner = {}}).error().code == error_code::invalid_argument);
}

// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/compression/asymmetric_by_channel.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("asymmetric_by_channel: keeps a quantiser's promises, whatever the groups") {
  for (const std::uint32_t dim : {1U, 9U, 64U, 130U}) {
    for (const std::uint32_t group : {2U, 5U, 32U}) {
      CAPTURE(dim);
      CAPTURE(group);
      check_quantiser(*asymmetric_by_channel<4>::make(1, dim, {group}));
      check_quantiser(*asymmetric_by_channel<3>::make(1, dim, {group}));
      check_quantiser(*asymmetric_by_channel<2>::make(1, dim, {group}));
    }
  }
}

TEST_CASE("asymmetric_by_channel: errors on normal numbers as known, bits as counted") {
  CHECK(normal_error(*asymmetric_by_channel<4>::make(1, 128, {32})) == doctest::Approx(6.12e-3).epsilon(0.03));
  CHECK(normal_error(*asymmetric_by_channel<3>::make(1, 128, {32})) == doctest::Approx(2.81e-2).epsilon(0.03));
  CHECK(normal_error(*asymmetric_by_channel<2>::make(1, 128, {128})) == doctest::Approx(0.251).epsilon(0.03));
  CHECK(bits_per_value(*asymmetric_by_channel<2>::make(1, 128, {32})) == 3);
  CHECK(bits_per_value(*asymmetric_by_channel<4>::make(1, 128, {128})) == 4.25);
}

TEST_CASE("asymmetric_by_channel: a loud channel costs the others nothing, unlike token by token") {
  constexpr std::size_t dim = 64, tokens = 32;
  std::vector<float> quiet = normal_values(dim * tokens, 3), loud = quiet;
  for (std::size_t t = 0; t < tokens; ++t) loud[t * dim + 7] = 100 + 50 * loud[t * dim + 7];
  const auto error_of_others = [&](const auto& format, std::vector<float> values) {
    std::vector<float> back = through(format, values);
    for (std::size_t t = 0; t < tokens; ++t) values[t * dim + 7] = back[t * dim + 7] = 0;
    return relative_error(values, back);
  };
  const auto by_channel = *asymmetric_by_channel<3>::make(1, dim, {tokens});
  CHECK(error_of_others(by_channel, loud) == error_of_others(by_channel, quiet));
  const auto by_token = *asymmetric<3>::make(1, dim, {64});
  CHECK(error_of_others(by_token, loud) > 10 * error_of_others(by_token, quiet));
}

TEST_CASE("asymmetric_by_channel: the same bytes everywhere") {
  CHECK(pinned_hash(*asymmetric_by_channel<4>::make(1, 100, {32})) == 0x9d075ea33f33564eU);
  CHECK(pinned_hash(*asymmetric_by_channel<3>::make(1, 100, {32})) == 0x7eeea60d1304a99fU);
  CHECK(pinned_hash(*asymmetric_by_channel<2>::make(1, 100, {32})) == 0xf46ced1c1dea6b4eU);
}

TEST_CASE("asymmetric_by_channel: a group of one token is refused, it would be billed as few bits and stored in 32") {
  CHECK(asymmetric_by_channel<2>::make(1, 64, {1}).error().code == error_code::invalid_argument);
  CHECK(asymmetric_by_channel<2>::make(1, 64, {0}).error().code == error_code::invalid_argument);
  CHECK(asymmetric_by_channel<2>::make(1, 64, {100000}).error().code == error_code::invalid_argument);
  CHECK(asymmetric_by_channel<2>::make(0, 64).error().code == error_code::invalid_argument);
  CHECK(asymmetric_by_channel<2>::make(1, 0).error().code == error_code::invalid_argument);
}

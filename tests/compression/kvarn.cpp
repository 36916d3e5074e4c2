// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <doctest/doctest.h>

#include <kvexact/compression/kvarn.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr std::size_t dim = 128, tokens = 128;

/// Tiles whose tokens have scales of their own, lognormal(0.5), and four channels 20 times the others'.
std::vector<float> uneven_tile(std::uint64_t seed) {
  std::vector<float> values = normal_values(dim * tokens, seed);
  const std::vector<float> scales = normal_values(tokens, seed + 1000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] *= std::exp(0.5F * scales[i / dim]);
  for (int loud = 0; loud < 4; ++loud) {
    const std::size_t c = detail::split_mix(seed) % 32 + static_cast<std::size_t>(loud) * 32;
    for (std::size_t t = 0; t < tokens; ++t) values[t * dim + c] *= 20;
  }
  return values;
}
/// Mean relative error over 60 tiles.
template <int Bits>
double uneven_error(bool normalised, bool rotated) {
  const auto format = *kvarn<Bits, cache_part::key>::make(1, dim, {.iterations = normalised ? 8U : 0U, .rotated = rotated});
  double sum = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const std::vector<float> values = uneven_tile(seed);
    sum += relative_error(values, through(format, values)) / 60;
  }
  return sum;
}
double worst_norm_error(const kvarn<2, cache_part::key>& format) {
  double worst = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const std::vector<float> values = uneven_tile(seed), back = through(format, values);
    for (std::size_t t = 0; t < tokens; ++t) {
      double before = 0, after = 0;
      for (std::size_t c = 0; c < dim; ++c) {
        before += std::pow(static_cast<double>(values[t * dim + c]), 2);
        after += std::pow(static_cast<double>(back[t * dim + c]), 2);
      }
      worst = std::max(worst, std::fabs(std::sqrt(after / before) - 1));
    }
  }
  return worst;
}

}  // namespace

TEST_CASE("kvarn: keeps a quantiser's promises, for keys and values") {
  for (const std::uint32_t channels : {2U, 9U, 64U, 80U}) {
    for (const bool rotated : {true, false}) {
      CAPTURE(channels);
      check_quantiser(*kvarn<4, cache_part::key>::make(1, channels, {.group_tokens = 16, .rotated = rotated}));
      check_quantiser(*kvarn<3, cache_part::value>::make(1, channels, {.group_tokens = 7, .rotated = rotated}));
      check_quantiser(*kvarn<2, cache_part::value>::make(1, channels, {.group_tokens = 16, .iterations = 0, .rotated = rotated}));
    }
  }
}

TEST_CASE("kvarn: bits are those of everything that is stored") {
  CHECK(bits_per_value(*kvarn<2, cache_part::key>::make(1, 128)) == 2 + 32.0 / 128 + 16.0 / 128);
  CHECK(bits_per_value(*kvarn<2, cache_part::value>::make(1, 64)) == 2 + 32.0 / 64 + 16.0 / 128);
}

TEST_CASE("kvarn: errors on even and uneven tiles as known") {
  const std::vector<float> even = normal_values(dim * tokens * 20, 77);
  CHECK(relative_error(even, through(*kvarn<2, cache_part::key>::make(1, dim, {.iterations = 0, .rotated = false}), even)) ==
        doctest::Approx(.251).epsilon(0.05));
  CHECK(relative_error(even, through(*kvarn<2, cache_part::key>::make(1, dim), even)) == doctest::Approx(.246).epsilon(0.05));
  CHECK(uneven_error<2>(false, false) == doctest::Approx(.516).epsilon(0.1));
  CHECK(uneven_error<2>(false, true) == doctest::Approx(.508).epsilon(0.1));
  CHECK(uneven_error<2>(true, false) == doctest::Approx(.239).epsilon(0.05));
  CHECK(uneven_error<2>(true, true) == doctest::Approx(.186).epsilon(0.05));
  CHECK(uneven_error<4>(false, false) == doctest::Approx(.0196).epsilon(0.1));
  CHECK(uneven_error<4>(false, true) == doctest::Approx(.0196).epsilon(0.1));
  CHECK(uneven_error<4>(true, false) == doctest::Approx(.0096).epsilon(0.05));
  CHECK(uneven_error<4>(true, true) == doctest::Approx(.0068).epsilon(0.05));
}

TEST_CASE("kvarn: norms of tokens are kept far better than without normalisation") {
  CHECK(worst_norm_error(*kvarn<2, cache_part::key>::make(1, dim, {.iterations = 0})) > 5);
  CHECK(worst_norm_error(*kvarn<2, cache_part::key>::make(1, dim)) < 0.79);
}

TEST_CASE("kvarn: small tiles are treated as large ones") {
  const auto format = *kvarn<2, cache_part::key>::make(1, dim);
  std::vector<float> values = uneven_tile(5);
  const double before = relative_error(values, through(format, values));
  for (float& each : values) each *= 0.05F;
  CHECK(relative_error(values, through(format, values)) == doctest::Approx(before).epsilon(0.01));
}

TEST_CASE("kvarn: unusable options") {
  using format = kvarn<2, cache_part::key>;
  CHECK(format::make(0, 64).error().code == error_code::invalid_argument);
  CHECK(format::make(1, 1).error().code == error_code::invalid_argument);
  CHECK(format::make(1, 64, {.group_tokens = 1}).error().code == error_code::invalid_argument);
  CHECK(format::make(1, 64, {.group_tokens = 100000}).error().code == error_code::invalid_argument);
  CHECK(format::make(1, 64, {.iterations = 65}).error().code == error_code::invalid_argument);
}

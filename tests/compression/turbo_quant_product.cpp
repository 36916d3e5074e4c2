// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/turbo_quant.hpp>
#include <kvexact/compression/turbo_quant_product.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

/// Products of random unit vectors with random unit vectors: 128 * mean squared error, and the slope of estimate over truth.
template <int Bits>
std::pair<double, double> products() {
  constexpr std::size_t dim = 128, tokens = 1024;
  const std::vector<float> values = unit_vectors(tokens, dim, 31), others = unit_vectors(tokens, dim, 32);
  double error = 0, own = 0;
  // Over several rotations: one set of directions has a slope of its own.
  constexpr std::uint64_t seeds = 4;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    const auto back = through(*turbo_quant_product<Bits>::make(1, dim, {.seed = seed}), values);
    for (std::size_t t = 0; t < tokens; ++t) {
      double difference = 0;
      for (std::size_t c = 0; c < dim; ++c) {
        difference += static_cast<double>(others[t * dim + c]) * (static_cast<double>(values[t * dim + c]) - static_cast<double>(back[t * dim + c]));
        own += static_cast<double>(values[t * dim + c]) * static_cast<double>(back[t * dim + c]);
      }
      error += difference * difference;
    }
  }
  return {dim * error / (tokens * seeds), own / (tokens * seeds)};
}

/// How often the key with the largest product stays the same, of 1024 keys of normal values.
template <class Format>
double first_choices_kept(const Format& format) {
  constexpr std::size_t dim = 128, keys = 1024, queries = 200;
  const std::vector<float> values = normal_values(keys * dim, 33), asked = normal_values(queries * dim, 34), back = through(format, values);
  const auto best = [&](const std::vector<float>& of, std::size_t query) {
    std::size_t found = 0;
    float most = -1e30F;
    for (std::size_t k = 0; k < keys; ++k) {
      float product = 0;
      for (std::size_t c = 0; c < dim; ++c) product += asked[query * dim + c] * of[k * dim + c];
      if (product > most) found = k;
      most = std::max(most, product);
    }
    return found;
  };
  std::size_t kept = 0;
  for (std::size_t q = 0; q < queries; ++q) kept += best(values, q) == best(back, q) ? 1 : 0;
  return static_cast<double>(kept) / queries;
}

}  // namespace

TEST_CASE("turbo_quant_product: keeps a quantiser's promises") {
  for (const std::uint32_t dim : {9U, 64U}) {
    check_quantiser(*turbo_quant_product<4>::make(1, dim));
    check_quantiser(*turbo_quant_product<1>::make(1, dim));
  }
  CHECK(bits_per_value(*turbo_quant_product<4>::make(1, 64)) == 4 + 32.0 / 64);
  CHECK(bits_per_value(*turbo_quant_product<1>::make(1, 64)) == 1 + 16.0 / 64);
}

TEST_CASE("turbo_quant_product: products have the right expectation, at more error than the plain method") {
  const auto [one, slope_one] = products<1>();
  CHECK(one == doctest::Approx(1.56).epsilon(0.05));
  CHECK(slope_one == doctest::Approx(1).epsilon(0.01));
  const auto [two, slope_two] = products<2>();
  CHECK(two == doctest::Approx(.564).epsilon(0.05));
  CHECK(slope_two == doctest::Approx(1).epsilon(0.003));
  const auto [three, slope_three] = products<3>();
  CHECK(three == doctest::Approx(.181).epsilon(0.05));
  CHECK(slope_three == doctest::Approx(1).epsilon(0.003));
}

TEST_CASE("turbo_quant_product: the sketch costs attention its first choices") {
  CHECK(first_choices_kept(*turbo_quant<3>::make(1, 128)) == doctest::Approx(.675).epsilon(0.1));
  CHECK(first_choices_kept(*turbo_quant_product<3>::make(1, 128)) == doctest::Approx(.390).epsilon(0.1));
}

TEST_CASE("turbo_quant_product: unusable options") {
  CHECK(turbo_quant_product<3>::make(0, 64).error().code == error_code::invalid_argument);
  CHECK(turbo_quant_product<1>::make(1, 0).error().code == error_code::invalid_argument);
  CHECK(turbo_quant_product<1>::make(1, 5000).error().code == error_code::out_of_range);
}

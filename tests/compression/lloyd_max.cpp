// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/compression/lloyd_max.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("lloyd_max: distortions as published, and below the bound") {
  for (const known_distortions& each : published_distortions) {
    const std::uint32_t dim = each.dim;
    const auto& distortion = each.distortion;
    for (int bits = 1; bits <= 4; ++bits) {
      const auto table = *lloyd_max_table::make(dim, bits);
      CAPTURE(dim);
      CAPTURE(bits);
      CHECK(table.distortion() == doctest::Approx(distortion[static_cast<std::size_t>(bits - 1)]).epsilon(0.001));
      CHECK(table.distortion() < std::sqrt(3.0) * 3.14159265358979 / 2 * std::pow(4.0, -bits));
    }
  }
}

TEST_CASE("lloyd_max: a fixed point") {
  for (const std::uint32_t dim : {4U, 64U, 65536U}) {
    for (const int bits : {1, 2, 5, 8}) {
      CAPTURE(dim);
      CAPTURE(bits);
      const auto table = *lloyd_max_table::make(dim, bits);
      const auto& values = table.values();
      REQUIRE(values.size() == std::size_t{1} << (bits - 1));
      REQUIRE(table.thresholds().size() == values.size() - 1);
      // By sums over a fine grid: every value is the mean of its cell, and sum p c^2 + D / d = 1 / d.
      constexpr int steps = 50000;
      const double most = std::min(1.0, 12 / std::sqrt(static_cast<double>(dim)));
      std::vector<double> mass(values.size()), moment(values.size());
      double total = 0;
      for (int i = 0; i < steps; ++i) {
        const double t = (i + 0.5) * most / steps;
        const double density = std::pow(1 - t * t, 0.5 * (dim - 3.0));
        std::size_t cell = 0;
        while (cell < table.thresholds().size() && t >= static_cast<double>(table.thresholds()[cell])) ++cell;
        mass[cell] += density;
        moment[cell] += density * t;
        total += density;
      }
      double squares = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double value = values[i];
        if (mass[i] > 1e-6 * total) CHECK(moment[i] / mass[i] == doctest::Approx(value).epsilon(2e-3));
        squares += mass[i] / total * value * value;
        if (i > 0) CHECK(table.thresholds()[i - 1] == doctest::Approx((values[i - 1] + values[i]) / 2).epsilon(1e-6));
      }
      CHECK(squares + table.distortion() / dim == doctest::Approx(1.0 / dim).epsilon(1e-3));
    }
  }
}

TEST_CASE("lloyd_max: what it has no table for") {
  CHECK(lloyd_max_table::make(3, 2).error().code == error_code::invalid_argument);
  CHECK(lloyd_max_table::make(100000, 2).error().code == error_code::invalid_argument);
  CHECK(lloyd_max_table::make(64, 0).error().code == error_code::invalid_argument);
  CHECK(lloyd_max_table::make(64, 9).error().code == error_code::invalid_argument);
}

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/prediction/quantised_matrix.hpp>

using namespace kvexact;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

double restored(const quantised_matrix& m, std::size_t row, std::size_t k, int shift) {
  return std::ldexp(static_cast<double>(m.weights[row * m.depth + k]) * m.scales[row], -shift);
}

}  // namespace

TEST_CASE("quantised_matrix: scaled sums are rounded to the nearest integer, halves upwards") {
  CHECK(quantised_matrix::scaled(0, 5, 4) == 0);
  CHECK(quantised_matrix::scaled(3, 5, 1) == 8);    // 7.5
  CHECK(quantised_matrix::scaled(-3, 5, 1) == -7);  // -7.5
  CHECK(quantised_matrix::scaled(7, 1, 2) == 2);    // 1.75
  CHECK(quantised_matrix::scaled(5, 1, 2) == 1);    // 1.25
  CHECK(quantised_matrix::scaled(-5, 1, 2) == -1);
  CHECK(quantised_matrix::scaled(-7, 1, 2) == -2);
  constexpr std::int32_t lowest = std::numeric_limits<std::int32_t>::min();
  constexpr std::int32_t highest = std::numeric_limits<std::int32_t>::max();
  CHECK(quantised_matrix::scaled(lowest, 0x7fffffffU, 31) == -std::int64_t{0x7fffffff});
  CHECK(quantised_matrix::scaled(highest, 0x7fffffffU, 62) == 1);  // just below 1
  CHECK(quantised_matrix::scaled(lowest, 0x7fffffffU, 62) == -1);
  static_assert(quantised_matrix::scaled(100, 3, 2) == 75);
}

TEST_CASE("quantised_matrix: weights are off by at most half a scale") {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  constexpr std::size_t rows = 12;
  constexpr std::size_t depth = 77;
  for (const int shift : {1, 8, 16, 24, 31}) {
    CAPTURE(shift);
    std::vector<double> weights(rows * depth);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double size = std::exp2(static_cast<double>(i / depth) - 6.0);  // rows of all sizes, the smallest below a scale of 1
      weights[i] = std::clamp(normal(random) * size, -200.0, 200.0);
    }
    const quantised_matrix m = quantise_rows(weights, rows, depth, shift);
    REQUIRE(m.rows == rows);
    REQUIRE(m.depth == depth);
    REQUIRE(m.weights.size() == rows * depth);
    REQUIRE(m.scales.size() == rows);
    for (std::size_t r = 0; r < rows; ++r) {
      CAPTURE(r);
      double largest = 0;
      int most = 0;
      double worst = 0;
      for (std::size_t k = 0; k < depth; ++k) {
        largest = std::max(largest, std::abs(weights[r * depth + k]));
        most = std::max(most, std::abs(int{m.weights[r * depth + k]}));
        worst = std::max(worst, std::abs(restored(m, r, k, shift) - weights[r * depth + k]));
      }
      const double exact = std::ldexp(largest / 127, shift);
      CHECK(m.scales[r] >= 1);
      CHECK(m.scales[r] >= exact * (1 - 1e-12));
      CHECK(m.scales[r] <= std::max(1.0, exact + 1));
      CHECK(worst <= std::ldexp(0.5 * m.scales[r], -shift) * (1 + 1e-12));
      CHECK(most <= 127);
      if (exact > 200) CHECK(most == 127);
    }
  }
}

TEST_CASE("quantised_matrix: integers times a power of two are kept") {
  const std::vector<double> weights{127, -127, 1, 0, -64, 63.5, -1, 2};
  const quantised_matrix m = quantise_rows(weights, 2, 4, 10);
  CHECK(m.scales == std::vector<std::uint32_t>{1024, 517});  // 64 / 127 * 1024 = 516.03
  CHECK(std::vector<std::int8_t>(m.weights.begin(), m.weights.begin() + 4) == std::vector<std::int8_t>{127, -127, 1, 0});
  CHECK(m.weights[4] == -127);
  CHECK(m.weights[5] == 126);
}

TEST_CASE("quantised_matrix: the product with integers is close to the real one") {
  std::mt19937 random(2);
  std::normal_distribution<double> normal(0, 0.05);
  constexpr std::size_t depth = 384;
  constexpr int shift = 20;
  std::vector<double> weights(depth);
  for (double& w : weights) w = normal(random);
  const quantised_matrix m = quantise_rows(weights, 1, depth, shift);
  for (int trial = 0; trial < 20; ++trial) {
    double exact = 0;
    double bound = 0.5;
    std::int32_t sum = 0;
    for (std::size_t k = 0; k < depth; ++k) {
      const std::int32_t x = static_cast<std::int32_t>(random() % 255) - 127;
      exact += weights[k] * x;
      bound += std::ldexp(0.5 * m.scales[0], -shift) * std::abs(x);
      sum += m.weights[k] * x;
    }
    CHECK(std::abs(static_cast<double>(quantised_matrix::scaled(sum, m.scales[0], shift)) - exact) <= bound);
  }
}

TEST_CASE("quantised_matrix: what is not finite counts as 0") {
  const std::vector<double> weights{nan_value, 127, -infinity, infinity, nan_value, -infinity};
  const quantised_matrix m = quantise_rows(weights, 2, 3, 4);
  CHECK(m.weights == std::vector<std::int8_t>{0, 127, 0, 0, 0, 0});
  CHECK(m.scales == std::vector<std::uint32_t>{16, 1});
}

TEST_CASE("quantised_matrix: weights of every size have a scale") {
  const std::vector<double> weights{0, -0.0, 1e-300, -1e-20, 1e300, -1e300, 1e12, 1};
  const quantised_matrix m = quantise_rows(weights, 4, 2, 30);
  CHECK(m.scales == std::vector<std::uint32_t>{1, 1, 0x7fffffff, 0x7fffffff});
  CHECK(m.weights == std::vector<std::int8_t>{0, 0, 0, 0, 127, -127, 127, 1});
}

TEST_CASE("quantised_matrix: no rows, no depth") {
  CHECK(quantise_rows({}, 0, 5, 8).scales.empty());
  const quantised_matrix m = quantise_rows({}, 3, 0, 8);
  CHECK(m.scales == std::vector<std::uint32_t>{1, 1, 1});
  CHECK(m.weights.empty());
}

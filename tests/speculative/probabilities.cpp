// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/probabilities.hpp>

using namespace kvexact;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr double below_1 = 1 - 0x1p-53;

}  // namespace

TEST_CASE("distribution: probabilities are weights over their sum") {
  const std::vector<float> weights{1, 0, 2, 1};
  const auto made = distribution::dense(weights);
  REQUIRE(made);
  CHECK_FALSE(made->is_point());
  CHECK(made->mass(0) == 0.25);
  CHECK(made->mass(1) == 0);
  CHECK(made->mass(2) == 0.5);
  CHECK(made->mass(4) == 0);
  CHECK(made->mode() == 2);
  std::vector<float> memory(4);
  const auto copy = made->copied_to(memory);
  CHECK(copy.weights().data() == memory.data());
  CHECK(copy.mass(2) == 0.5);
}

TEST_CASE("distribution: a point") {
  const auto point = distribution::point(7);
  CHECK(point.is_point());
  CHECK(point.mass(7) == 1);
  CHECK(point.mass(6) == 0);
  CHECK(point.mode() == 7);
  CHECK(point.draw(0) == 7);
  CHECK(point.draw(below_1) == 7);
}

TEST_CASE("distribution: what is no distribution is refused") {
  for (const std::vector<float>& weights :
       {std::vector<float>{}, {0, 0}, {1, not_a_number}, {1, infinity}, {3, -1}, {-infinity, 1}, {not_a_number, not_a_number}}) {
    const auto made = distribution::dense(weights);
    REQUIRE_FALSE(made);
    CHECK(made.error().code == error_code::invalid_argument);
  }
  CHECK(distribution::dense(std::vector<float>{0, std::numeric_limits<float>::denorm_min()}));
  CHECK(distribution::dense(std::vector<float>(3, std::numeric_limits<float>::max()))->mass(0) == 1.0 / 3);
}

TEST_CASE("draw: the inverse of the cumulative distribution") {
  const std::vector<float> weights{0, 1, 0, 2, 1, 0};
  const auto made = distribution::dense(weights);
  REQUIRE(made);
  CHECK(made->draw(0) == 1);
  CHECK(made->draw(0.25 - 0x1p-53) == 1);
  CHECK(made->draw(0.25) == 3);
  CHECK(made->draw(0.75 - 0x1p-53) == 3);
  CHECK(made->draw(0.75) == 4);
  CHECK(made->draw(below_1) == 4);
  CHECK(made->draw(1) == 4);
}

TEST_CASE("draw: never a token of probability 0, however the sum is rounded") {
  for (int n = 1; n < 300; ++n) {
    std::vector<float> weights{0};
    for (int i = 0; i < n; ++i) weights.push_back(1 / static_cast<float>(i + n) / 3);
    weights.push_back(0);
    const auto made = distribution::dense(weights);
    REQUIRE(made);
    CHECK(made->draw(0) == 1);
    CHECK(made->draw(below_1) == static_cast<token_id>(n));
  }
}

TEST_CASE("top_two: the largest, of equals the lowest, and the gap") {
  const auto check = [](std::vector<float> logits, token_id first, float gap) {
    const auto top = top_two(logits);
    REQUIRE(top);
    CHECK(top->first == first);
    CHECK(top->gap == gap);
  };
  check({1, 3, 2}, 1, 1);
  check({3, 2, 1}, 0, 1);
  check({1, 2, 5}, 2, 3);
  check({2, 5, 5, 1}, 1, 0);
  check({-infinity, -4, -infinity}, 1, infinity);
  check({7}, 0, infinity);
  check({infinity, 1, infinity}, 0, 0);
  check({-0.0F, 0.0F}, 0, 0);
}

TEST_CASE("top_two and softmax: what cannot be sampled is named") {
  for (std::vector<float> logits :
       {std::vector<float>{not_a_number, 1}, {1, not_a_number}, {1, not_a_number, 2}, {-infinity, -infinity}, {}, {not_a_number}}) {
    const auto top = top_two(logits);
    REQUIRE_FALSE(top);
    CHECK(top.error().code == error_code::invalid_argument);
    const auto soft = softmax(logits);
    REQUIRE_FALSE(soft);
    CHECK(soft.error().code == error_code::invalid_argument);
  }
  std::vector<float> infinite{1, infinity};
  CHECK_FALSE(softmax(infinite));
}

TEST_CASE("softmax: exponentials over their sum") {
  std::vector<float> logits{1000, 998, -infinity, 1000, -1000};
  const auto made = softmax(logits);
  REQUIRE(made);
  const double total = 2 + std::exp(-2.0);
  CHECK(made->mass(0) == doctest::Approx(1 / total).epsilon(1e-7));
  CHECK(made->mass(1) == doctest::Approx(std::exp(-2.0) / total).epsilon(1e-7));
  CHECK(made->mass(2) == 0);
  CHECK(made->mass(3) == made->mass(0));
  CHECK(made->mass(4) == 0);
}

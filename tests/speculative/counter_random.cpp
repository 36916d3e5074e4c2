// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/counter_random.hpp>

using namespace kvexact;

namespace {

constexpr std::array purposes{random_purpose::draft, random_purpose::accept, random_purpose::replace};

/// Correlation of two sequences of uniform numbers; of n independent ones within 5 / sqrt(n) but for once in a million.
template <class A, class B>
double correlation(int n, A a, B b) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += (a(static_cast<std::uint64_t>(i)) - 0.5) * (b(static_cast<std::uint64_t>(i)) - 0.5);
  return 12 * sum / n;
}

}  // namespace

TEST_CASE("counter_random: the numbers are fixed") {
  constexpr counter_random random(42);
  static_assert(random.uniform(0, random_purpose::draft) == random.uniform(0, random_purpose::draft));
  CHECK(random.uniform(0, random_purpose::draft) == 0x1.43f7098e32c68p-4);
  CHECK(random.uniform(7, random_purpose::accept) == 0x1.71816c769bd6p-6);
  CHECK(random.fork(7).uniform(7, random_purpose::replace) == 0x1.e3b5ac4653dccp-2);
}

TEST_CASE("counter_random: uniform, in 53 bits") {
  constexpr int n = 40000;
  for (const random_purpose purpose : purposes) {
    std::array<int, 64> counts{};
    std::array<int, 53> ones{};
    for (std::uint64_t position = 0; position < n; ++position) {
      const double u = counter_random(1).uniform(position, purpose);
      REQUIRE((u >= 0 && u < 1));
      ++counts[static_cast<std::size_t>(u * 64)];
      const auto bits = static_cast<std::uint64_t>(u * 0x1p53);
      REQUIRE(static_cast<double>(bits) * 0x1p-53 == u);
      for (std::size_t bit = 0; bit < 53; ++bit) ones[bit] += static_cast<int>(bits >> bit & 1);
    }
    double chi_square = 0;
    for (const int count : counts) chi_square += (count - n / 64.0) * (count - n / 64.0) / (n / 64.0);
    CHECK(chi_square < 63 + 5 * std::sqrt(2 * 63.0));
    for (const int count : ones) CHECK(std::abs(count - n / 2) < 5 * std::sqrt(n) / 2);
  }
}

TEST_CASE("counter_random: neighbours are independent") {
  constexpr int n = 40000;
  const double bound = 5 / std::sqrt(n);
  for (const random_purpose purpose : purposes) {
    const auto here = [&](std::uint64_t i) { return counter_random(5).uniform(i, purpose); };
    CHECK(std::abs(correlation(n, here, [&](std::uint64_t i) { return counter_random(5).uniform(i + 1, purpose); })) < bound);
    CHECK(std::abs(correlation(n, here, [&](std::uint64_t i) { return counter_random(6).uniform(i, purpose); })) < bound);
    CHECK(std::abs(correlation(n, here, [&](std::uint64_t i) { return counter_random(5).fork(i).uniform(i, purpose); })) < bound);
    CHECK(std::abs(correlation(n, here, [&](std::uint64_t i) { return counter_random(5).fork(0).uniform(i, purpose); })) < bound);
    CHECK(std::abs(correlation(
              n, [&](std::uint64_t i) { return counter_random(i).uniform(0, purpose); },
              [&](std::uint64_t i) { return counter_random(i + 1).uniform(0, purpose); })) < bound);
    for (const random_purpose other : purposes) {
      if (other == purpose) continue;
      CHECK(std::abs(correlation(n, here, [&](std::uint64_t i) { return counter_random(5).uniform(i, other); })) < bound);
      CHECK(std::abs(correlation(n, here, [&](std::uint64_t i) { return counter_random(5).uniform(i + 1, other); })) < bound);
    }
  }
}

TEST_CASE("counter_random: one bit of an input changes half of the output") {
  double flipped = 0;
  int pairs = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    for (int bit = 0; bit < 64; ++bit) {
      const std::uint64_t other = seed ^ (std::uint64_t{1} << bit);
      const auto count = [](double a, double b) {
        return std::popcount(static_cast<std::uint64_t>(a * 0x1p53) ^ static_cast<std::uint64_t>(b * 0x1p53));
      };
      flipped += count(counter_random(seed).uniform(3, {}), counter_random(other).uniform(3, {}));
      flipped += count(counter_random(1).uniform(seed, {}), counter_random(1).uniform(other, {}));
      flipped += count(counter_random(1).fork(seed).uniform(3, {}), counter_random(1).fork(other).uniform(3, {}));
      pairs += 3;
    }
  }
  CHECK(std::abs(flipped / pairs / 53 - 0.5) < 0.005);
}

TEST_CASE("counter_random: forks of forks are all different") {
  std::set<double> seen;
  std::size_t asked = 0;
  const counter_random root(9);
  const auto add = [&](const counter_random& random) {
    for (const random_purpose purpose : purposes) {
      for (std::uint64_t position = 0; position < 8; ++position, ++asked) seen.insert(random.uniform(position, purpose));
    }
  };
  add(root);
  for (std::uint64_t a = 0; a < 8; ++a) {
    add(root.fork(a));
    for (std::uint64_t b = 0; b < 8; ++b) add(root.fork(a).fork(b));
  }
  CHECK(seen.size() == asked);
}

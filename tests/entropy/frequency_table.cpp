// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/entropy/frequency_table.hpp>

using namespace kvexact;

namespace {

std::vector<std::uint32_t> frequencies(const frequency_table& table) {
  std::vector<std::uint32_t> all;
  for (int s = 0; s < table.symbol_count(); ++s) all.push_back(table.frequency(s));
  return all;
}

/// Least code length over every way to give `left` units to the symbols from `s` on, each counted one at least 1.
double least_cost(const std::vector<std::uint64_t>& counts, std::size_t s, std::uint32_t left, int precision) {
  if (s == counts.size()) return left == 0 ? 0.0 : std::numeric_limits<double>::infinity();
  if (counts[s] == 0) return least_cost(counts, s + 1, left, precision);
  double best = std::numeric_limits<double>::infinity();
  for (std::uint32_t f = 1; f <= left; ++f) {
    const double own = static_cast<double>(counts[s]) * (precision - std::log2(static_cast<double>(f)));
    best = std::min(best, own + least_cost(counts, s + 1, left - f, precision));
  }
  return best;
}

/// The largest saving in bits that moving one unit of frequency between two symbols could still make.
long double best_move(const frequency_table& table, const std::vector<std::uint64_t>& counts) {
  long double most_gained = 0;
  long double least_lost = std::numeric_limits<long double>::infinity();
  for (int s = 0; s < table.symbol_count(); ++s) {
    const auto count = static_cast<long double>(counts[static_cast<std::size_t>(s)]);
    const auto f = static_cast<long double>(table.frequency(s));
    if (count == 0) continue;
    most_gained = std::max(most_gained, count * std::log2((f + 1) / f));
    if (f > 1) least_lost = std::min(least_lost, count * std::log2(f / (f - 1)));
  }
  return most_gained - least_lost;
}

void check_valid(const frequency_table& table, const std::vector<std::uint64_t>& counts, int precision) {
  REQUIRE(table.precision() == precision);
  REQUIRE(table.symbol_count() == static_cast<int>(counts.size()));
  std::uint32_t sum = 0;
  for (int s = 0; s < table.symbol_count(); ++s) {
    REQUIRE(table.start(s) == sum);
    REQUIRE((table.frequency(s) > 0) == (counts[static_cast<std::size_t>(s)] > 0));
    sum += table.frequency(s);
  }
  REQUIRE(sum == (std::uint32_t{1} << precision));
}

}  // namespace

TEST_CASE("frequency_table: takes exact frequencies as they are") {
  const auto table = frequency_table::from_frequencies(std::vector<std::uint32_t>{3, 0, 4, 1, 0}, 3);
  REQUIRE(table);
  CHECK(table->precision() == 3);
  CHECK(table->symbol_count() == 5);
  CHECK(frequencies(*table) == std::vector<std::uint32_t>{3, 0, 4, 1, 0});
  CHECK(table->start(0) == 0);
  CHECK(table->start(1) == 3);
  CHECK(table->start(2) == 3);
  CHECK(table->start(3) == 7);
  CHECK(table->start(4) == 8);
  // Symbols beyond the table cannot be coded.
  CHECK(table->frequency(5) == 0);
  CHECK(table->frequency(255) == 0);
  CHECK(table->start(255) == 8);
}

TEST_CASE("frequency_table: one symbol at full precision and 256 symbols") {
  for (int precision = 1; precision <= 16; ++precision) {
    const auto table = frequency_table::from_frequencies(std::vector<std::uint32_t>{std::uint32_t{1} << precision}, precision);
    REQUIRE(table);
    CHECK(table->frequency(0) == std::uint32_t{1} << precision);
    const auto counted = frequency_table::from_counts(std::vector<std::uint64_t>{0, 0, 5}, precision);
    REQUIRE(counted);
    CHECK(frequencies(*counted) == std::vector<std::uint32_t>{0, 0, std::uint32_t{1} << precision});
  }
  const auto full = frequency_table::from_counts(std::vector<std::uint64_t>(256, 9), 8);
  REQUIRE(full);
  CHECK(frequencies(*full) == std::vector<std::uint32_t>(256, 1));
  CHECK(full->start(255) == 255);
}

TEST_CASE("frequency_table: refuses what is no table") {
  const auto code = [](const std::vector<std::uint32_t>& freq, int precision) {
    const auto table = frequency_table::from_frequencies(freq, precision);
    REQUIRE(!table);
    return table.error().code;
  };
  CHECK(code({}, 4) == error_code::invalid_argument);
  CHECK(code(std::vector<std::uint32_t>(257, 1), 8) == error_code::invalid_argument);
  CHECK(code({1}, 0) == error_code::invalid_argument);
  CHECK(code({1U << 17}, 17) == error_code::invalid_argument);
  CHECK(code({1}, -1) == error_code::invalid_argument);
  CHECK(code({8, 7}, 4) == error_code::corrupt);
  CHECK(code({8, 9}, 4) == error_code::corrupt);
  CHECK(code({0, 0}, 4) == error_code::corrupt);
  // Sums that would come out right modulo 2^32.
  CHECK(code({0xffffffffU, 17}, 4) == error_code::corrupt);
  CHECK(code({0x80000000U, 0x80000000U, 16}, 4) == error_code::corrupt);

  const auto counted = [](const std::vector<std::uint64_t>& counts, int precision) {
    const auto table = frequency_table::from_counts(counts, precision);
    REQUIRE(!table);
    return table.error().code;
  };
  CHECK(counted({}, 4) == error_code::invalid_argument);
  CHECK(counted(std::vector<std::uint64_t>(257, 1), 12) == error_code::invalid_argument);
  CHECK(counted({1}, 0) == error_code::invalid_argument);
  CHECK(counted({1}, 17) == error_code::invalid_argument);
  CHECK(counted({0, 0, 0}, 4) == error_code::invalid_argument);
  CHECK(counted(std::vector<std::uint64_t>(17, 1), 4) == error_code::invalid_argument);
  CHECK(counted({(std::uint64_t{1} << 60) + 1, 1}, 4) == error_code::invalid_argument);
  CHECK(frequency_table::from_counts(std::vector<std::uint64_t>(16, 1), 4));
}

TEST_CASE("frequency_table: from_counts is as short as the best of all tables") {
  std::mt19937_64 random(11);
  int starved = 0;
  for (int trial = 0; trial < 600; ++trial) {
    const int precision = 2 + static_cast<int>(random() % 4);
    std::vector<std::uint64_t> counts(1 + random() % 4);
    for (auto& count : counts) {
      const std::uint64_t kinds[] = {0, 1, 1 + random() % 9, 1 + random() % 1000, 1 + random() % 100000};
      count = kinds[random() % 5];
    }
    if (std::all_of(counts.begin(), counts.end(), [](std::uint64_t count) { return count == 0; })) counts[0] = 1;
    const auto table = frequency_table::from_counts(counts, precision);
    REQUIRE(table);
    check_valid(*table, counts, precision);
    const double best = least_cost(counts, 0, std::uint32_t{1} << precision, precision);
    CHECK(table->code_length(counts) <= best * (1 + 1e-12) + 1e-9);
    // Proportional shares below 1 are where plain rounding goes wrong.
    const double total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}));
    starved += std::any_of(counts.begin(), counts.end(),
                           [&](std::uint64_t count) { return count > 0 && static_cast<double>(count) * std::exp2(precision) < total; });
  }
  CHECK(starved > 100);
}

TEST_CASE("frequency_table: no unit of a large table would be better elsewhere") {
  std::mt19937_64 random(12);
  for (const int precision : {8, 9, 11, 12, 14, 16}) {
    for (int trial = 0; trial < 30; ++trial) {
      std::vector<std::uint64_t> counts(1 + random() % 256);
      const auto spread = static_cast<unsigned>(random() % 60);
      for (auto& count : counts) count = (random() & ((std::uint64_t{1} << 60) - 1)) >> (random() % (spread + 1));
      counts[0] |= 1;
      const auto table = frequency_table::from_counts(counts, precision);
      REQUIRE(table);
      check_valid(*table, counts, precision);
      const long double total = std::accumulate(counts.begin(), counts.end(), 0.0L);
      CHECK(best_move(*table, counts) <= total * 1e-15L);
    }
  }
}

TEST_CASE("frequency_table: extreme counts") {
  std::vector<std::uint64_t> counts(256, std::uint64_t{1} << 60);
  CHECK(frequencies(*frequency_table::from_counts(counts, 16)) == std::vector<std::uint32_t>(256, 256));
  counts.assign(256, 1);
  counts[100] = std::uint64_t{1} << 60;
  const auto table = frequency_table::from_counts(counts, 16);
  REQUIRE(table);
  CHECK(table->frequency(100) == 65536 - 255);
  CHECK(table->frequency(0) == 1);
  counts.assign(256, 1);
  counts[255] = std::uint64_t{1} << 60;
  CHECK(frequency_table::from_counts(counts, 8)->frequency(255) == 1);
}

TEST_CASE("frequency_table: equal counts always give the same table") {
  // Units left over go to the lower symbols.
  CHECK(frequencies(*frequency_table::from_counts(std::vector<std::uint64_t>{7, 7, 7}, 4)) == std::vector<std::uint32_t>{6, 5, 5});
  // Pinned, so that a change of compiler, machine or search shows.
  std::vector<std::uint64_t> counts;
  for (std::uint64_t i = 0; i < 12; ++i) counts.push_back(i * i * i * 31 + 1);
  CHECK(frequencies(*frequency_table::from_counts(counts, 10)) ==
        std::vector<std::uint32_t>{1, 1, 2, 6, 15, 29, 51, 81, 120, 171, 235, 312});
}

TEST_CASE("frequency_table: code length") {
  const auto table = frequency_table::from_frequencies(std::vector<std::uint32_t>{8, 4, 0, 4}, 4);
  REQUIRE(table);
  CHECK(table->code_length(std::vector<std::uint64_t>{10, 3, 0, 1}) == doctest::Approx(10 * 1 + 4 * 2));
  CHECK(table->code_length(std::vector<std::uint64_t>{}) == 0);
  CHECK(std::isinf(table->code_length(std::vector<std::uint64_t>{0, 0, 1})));
  CHECK(std::isinf(table->code_length(std::vector<std::uint64_t>{0, 0, 0, 0, 1})));
}

TEST_CASE("frequency_table: tables compare by their frequencies and precision") {
  const auto a = frequency_table::from_frequencies(std::vector<std::uint32_t>{8, 8}, 4);
  CHECK(*a == *frequency_table::from_counts(std::vector<std::uint64_t>{3, 3}, 4));
  CHECK(*a != *frequency_table::from_frequencies(std::vector<std::uint32_t>{8, 8, 0}, 4));
  CHECK(*a != *frequency_table::from_frequencies(std::vector<std::uint32_t>{4, 4}, 3));
  CHECK(*a != *frequency_table::from_frequencies(std::vector<std::uint32_t>{7, 9}, 4));
}

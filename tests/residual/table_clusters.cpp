// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/numeric/number_format.hpp>
#include <kvexact/residual/table_clusters.hpp>

using namespace kvexact;

namespace {

using grid = value_grid<bf16>;
using counts_type = context_counts<grid>;
constexpr int precision = 12;

/// `values` residuals with the given spread in cells, in a context of the linear part.
counts_type context_of(std::int32_t context, double spread, int values, std::mt19937_64& random) {
  counts_type one;
  one.context = context;
  std::normal_distribution<double> residual(0.0, spread);
  for (int i = 0; i < values; ++i) {
    const auto symbol = std::clamp(static_cast<int>(std::floor(residual(random))) + grid::zero_symbol, 0, grid::escape_symbol);
    ++one.counts[static_cast<std::size_t>(symbol)];
  }
  return one;
}

/// Bits a context costs with a table, with 16 more for each symbol that must be escaped.
double cost(const counts_type& one, const frequency_table& table) {
  double bits = 0;
  const double escape = precision - std::log2(static_cast<double>(table.frequency(grid::escape_symbol)));
  for (int s = 0; s < grid::alphabet; ++s) {
    const auto n = static_cast<double>(one.counts[static_cast<std::size_t>(s)]);
    const std::uint32_t f = table.frequency(s);
    if (n > 0) bits += n * (f > 0 ? precision - std::log2(static_cast<double>(f)) : escape + 16);
  }
  return bits;
}

double values_of(const counts_type& one) {
  double sum = 0;
  for (const std::uint64_t n : one.counts) sum += static_cast<double>(n);
  return sum;
}

void check_valid(const table_clusters& clusters, std::size_t contexts) {
  REQUIRE(clusters.table_of.size() == contexts);
  for (const std::uint16_t table : clusters.table_of) REQUIRE(table < clusters.tables.size());
  for (const frequency_table& table : clusters.tables) {
    CHECK(table.precision() == precision);
    CHECK(table.symbol_count() == grid::alphabet);
    CHECK(table.frequency(grid::escape_symbol) >= 1);
  }
}

constexpr std::int32_t linear = grid::shared_contexts + 8 * grid::distances;

}  // namespace

TEST_CASE("table_clusters: alike contexts share, different ones do not, and little is lost") {
  std::mt19937_64 random(11);
  std::vector<counts_type> contexts;
  for (std::int32_t i = 0; i < 60; ++i)
    contexts.push_back(context_of(linear + i % 40, i % 3 == 0 ? 1.0 : i % 3 == 1 ? 4.0 : 12.0, 20000, random));
  const auto clusters = cluster_contexts<grid>(contexts, precision);
  REQUIRE(clusters);
  check_valid(*clusters, contexts.size());
  CHECK(clusters->tables.size() == 3);
  for (std::size_t i = 0; i < contexts.size(); ++i)
    for (std::size_t k = 0; k < i; ++k) CHECK((clusters->table_of[i] == clusters->table_of[k]) == (i % 3 == k % 3));
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    const auto own = frequency_table::from_counts(contexts[i].counts, precision);
    REQUIRE(own);
    CHECK(cost(contexts[i], clusters->tables[clusters->table_of[i]]) < cost(contexts[i], *own) + 0.004 * values_of(contexts[i]) + 1000);
  }
}

TEST_CASE("table_clusters: a smooth family needs fewer tables than contexts at a small cost") {
  std::mt19937_64 random(12);
  std::vector<counts_type> contexts;
  double shared = 0;
  double separate = 0;
  double values = 0;
  for (std::int32_t i = 0; i < 80; ++i) contexts.push_back(context_of(linear + i % 48, 1.0 + 0.1 * i, 3000 + 50 * i, random));
  const auto clusters = cluster_contexts<grid>(contexts, precision);
  REQUIRE(clusters);
  check_valid(*clusters, contexts.size());
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    shared += cost(contexts[i], clusters->tables[clusters->table_of[i]]);
    separate += frequency_table::from_counts(contexts[i].counts, precision)->code_length(contexts[i].counts);
    values += values_of(contexts[i]);
    // Each has the best of the tables, up to what the prior weighs.
    double best = INFINITY;
    for (const frequency_table& table : clusters->tables) best = std::min(best, cost(contexts[i], table));
    CHECK(cost(contexts[i], clusters->tables[clusters->table_of[i]]) <= best + 200);
  }
  CHECK(clusters->tables.size() < 20);
  CHECK(clusters->tables.size() > 2);
  CHECK(shared < separate + 0.1 * values);
}

TEST_CASE("table_clusters: contexts never seen get a table that suits their prior") {
  std::mt19937_64 random(13);
  // Two seen contexts, narrow and wide; the unseen ones have sigma = 4.4 D (class 8 of the linear part) or less than an ulp.
  std::vector<counts_type> contexts{context_of(linear, 4.4, 50000, random),
                                    context_of(4 * grid::places * grid::offsets, 0.2, 50000, random)};
  const std::size_t seen = contexts.size();
  for (const std::int32_t context : {linear + 1, linear + 5, 3 * grid::places * grid::offsets, 5 * grid::places * grid::offsets}) {
    contexts.emplace_back();
    contexts.back().context = context;
  }
  const auto clusters = cluster_contexts<grid>(contexts, precision);
  REQUIRE(clusters);
  check_valid(*clusters, contexts.size());
  CHECK(clusters->tables.size() == seen);
  CHECK(clusters->table_of[0] != clusters->table_of[1]);
  CHECK(clusters->table_of[2] == clusters->table_of[0]);
  CHECK(clusters->table_of[3] == clusters->table_of[0]);
  CHECK(clusters->table_of[4] == clusters->table_of[1]);
  CHECK(clusters->table_of[5] == clusters->table_of[1]);
}

TEST_CASE("table_clusters: nothing seen at all gives one table from the prior") {
  std::vector<counts_type> contexts(50);
  for (std::size_t i = 0; i < contexts.size(); ++i) contexts[i].context = static_cast<std::int32_t>(i);
  const auto clusters = cluster_contexts<grid>(contexts, precision);
  REQUIRE(clusters);
  check_valid(*clusters, contexts.size());
  CHECK(clusters->tables.size() == 1);
}

TEST_CASE("table_clusters: no contexts, no tables") {
  const auto clusters = cluster_contexts<grid>({}, precision);
  REQUIRE(clusters);
  CHECK(clusters->tables.empty());
  CHECK(clusters->table_of.empty());
}

TEST_CASE("table_clusters: a context with few values does not found a table") {
  std::mt19937_64 random(14);
  const std::vector<counts_type> contexts{context_of(linear, 4.0, 100000, random), context_of(linear + 1, 5.0, 50, random)};
  const auto clusters = cluster_contexts<grid>(contexts, precision);
  REQUIRE(clusters);
  CHECK(clusters->tables.size() == 1);
}

TEST_CASE("table_clusters: equal counts give equal tables") {
  std::mt19937_64 random(15);
  std::vector<counts_type> contexts;
  for (std::int32_t i = 0; i < 20; ++i) contexts.push_back(context_of(linear + i, 0.5 + i, 4000, random));
  const auto once = cluster_contexts<grid>(contexts, precision);
  const auto twice = cluster_contexts<grid>(contexts, precision);
  REQUIRE(once);
  REQUIRE(twice);
  CHECK(once->table_of == twice->table_of);
  CHECK(once->tables == twice->tables);
}

TEST_CASE("table_clusters: an impossible precision is refused") {
  std::mt19937_64 random(16);
  const std::vector<counts_type> contexts{context_of(linear, 4.0, 1000, random)};
  for (const int bad : {0, 17}) {
    const auto clusters = cluster_contexts<grid>(contexts, bad);
    REQUIRE_FALSE(clusters);
    CHECK(clusters.error().code == error_code::invalid_argument);
  }
}

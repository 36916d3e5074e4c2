// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/numeric/number_format.hpp>
#include <kvexact/residual/table_builder.hpp>

using namespace kvexact;

namespace {

double normal_density(double z, double spread) {
  return std::exp(-0.5 * (z / spread) * (z / spread)) / (spread * std::sqrt(2 * 3.14159265358979323846));
}

/// The cell of a real number in units of D, rounded to a format without bounds.
template <class Grid>
std::int32_t cell_of(double y) {
  constexpr int mantissa_bits = Grid::format::mantissa_bits;
  double size = std::abs(y);
  if (size > 0x1p-40) {
    const double ulp = std::exp2(std::floor(std::log2(size)) - mantissa_bits);
    size = std::nearbyint(size / ulp) * ulp;
  }
  std::int32_t cell = 0;
  if (size < Grid::first_coarse_cell) {
    cell = static_cast<std::int32_t>(std::floor(size));
  } else {
    const double octave = std::floor(std::log2(size)) - (mantissa_bits + 1);
    const double place = size / std::exp2(octave + mantissa_bits + 1) - 1;
    cell = Grid::first_coarse_cell + static_cast<std::int32_t>((octave + place) * (1 << mantissa_bits));
  }
  return y < 0 ? -1 - cell : cell;
}

/// Every symbol's probability by adding up the density in small steps.
template <class Grid>
void check_integrals(const density& shape, int every) {
  double worst = 0;
  double worst_sum = 0;
  for (std::int32_t context = 5; context < Grid::contexts; context += every) {
    const auto [mean, mean_cell, sigma] = Grid::typical(context);
    std::array<double, static_cast<std::size_t>(Grid::alphabet)> expected{};
    constexpr double dz = 0.001;
    for (double z = -9 + dz / 2; z < 9; z += dz) {
      double here = 0;
      for (const auto& part : shape.components)
        if (part.weight > 0) here += part.weight * normal_density(z, part.spread);
      const std::int32_t symbol = cell_of<Grid>(mean + z * sigma) - mean_cell + Grid::zero_symbol;
      if (symbol >= 0 && symbol < Grid::escape_symbol) expected[static_cast<std::size_t>(symbol)] += here * dz;
    }
    const auto actual = integrate_density<Grid>(context, shape);
    for (std::size_t s = 0; s < static_cast<std::size_t>(Grid::escape_symbol); ++s) {
      // What lies beyond 9 sigmas may be in any cell.
      worst = std::max(worst, std::abs(actual[s] - expected[s]) - shape.mass(9, 1e9));
    }
    worst_sum = std::max(worst_sum, std::abs(std::accumulate(actual.begin(), actual.end(), 0.0) - 1));
  }
  CHECK(worst < 6e-4);
  CHECK(worst_sum < 2e-9);
}

std::vector<std::uint64_t> counts_of(std::size_t size, std::initializer_list<std::pair<std::size_t, std::uint64_t>> known) {
  std::vector<std::uint64_t> counts(size);
  for (const auto& [symbol, count] : known) counts[symbol] = count;
  return counts;
}

void check_refused(const result<frequency_table>& table) {
  REQUIRE_FALSE(table);
  CHECK(table.error().code == error_code::invalid_argument);
}

}  // namespace

TEST_CASE("table_builder: the Gaussian and the mixture") {
  constexpr density gaussian = density::gaussian();
  CHECK(gaussian.below(0) == doctest::Approx(0.5));
  CHECK(gaussian.below(1) == doctest::Approx(0.841344746));
  CHECK(gaussian.below(-INFINITY) == 0);
  CHECK(gaussian.below(INFINITY) == doctest::Approx(1));
  CHECK(gaussian.mass(-1, 1) == doctest::Approx(0.682689492));
  // Tails keep their digits.
  CHECK(gaussian.mass(10, 11) / 7.61985302416e-24 == doctest::Approx(1).epsilon(1e-4));
  CHECK(gaussian.mass(-11, -10) / 7.61985302416e-24 == doctest::Approx(1).epsilon(1e-4));

  constexpr density mixture = density::mixture();
  CHECK(mixture.below(INFINITY) == doctest::Approx(0.98));
  CHECK(mixture.mass(-1, 1) == doctest::Approx(0.95 * 0.682689492 + 0.03 * 0.261117320));
  CHECK(mixture.mass(3, 6) == doctest::Approx(0.95 * 0.00134989705 + 0.03 * 0.135905122).epsilon(1e-5));
}

TEST_CASE("table_builder: densities integrated over cells") {
  check_integrals<value_grid<bf16>>(density::gaussian(), 131);
  check_integrals<value_grid<fp16>>(density::mixture(), 239);
  check_integrals<value_grid<fp8_e4m3>>(density::mixture(), 97);
  // Few mantissa bits, where the edges count most; only contexts that exist.
  check_integrals<value_grid<fp8_e5m2>>(density::gaussian(), 192);
}

TEST_CASE("table_builder: near zero the cells' edges are those of the format") {
  using grid = value_grid<fp8_e5m2>;
  // Mean in cell 0, D = sigma / 4.
  check_integrals<grid>(density::gaussian(), grid::shared_contexts + 9 * grid::distances);
}

TEST_CASE("table_builder: the sum is 1 in every context") {
  using grid = value_grid<fp8_e4m3>;
  double worst = 0;
  double least_escape = 1;
  std::size_t negative = 0;
  for (std::int32_t context = 0; context < grid::contexts; ++context) {
    const auto probability = integrate_density<grid>(context, density::mixture());
    worst = std::max(worst, std::abs(std::accumulate(probability.begin(), probability.end(), 0.0) - 1));
    least_escape = std::min(least_escape, probability.back());
    for (const double each : probability) negative += each < 0 ? 1U : 0U;
  }
  CHECK(worst < 1e-12);
  CHECK(negative == 0);
  CHECK(least_escape > 0.0199);
}

TEST_CASE("table_builder: blended counts") {
  SUBCASE("without a prior the table follows the counts") {
    const auto table = blend_counts(counts_of(8, {{0, 4000}, {2, 2000}, {5, 2000}}), {}, 0, 12);
    REQUIRE(table);
    CHECK(table->symbol_count() == 8);
    CHECK(table->frequency(0) > 2040);
    CHECK(table->frequency(2) > 1020);
    CHECK(table->frequency(5) > 1020);
    CHECK(table->frequency(1) == 0);
    CHECK(table->frequency(7) == 1);  // the escape is always there
  }
  SUBCASE("symbols that are not worth a frequency are escaped") {
    // The limit is 0.09 * 100000 / 4096 = 2.2 counts.
    const auto table = blend_counts(counts_of(8, {{0, 100000}, {1, 2}, {2, 3}, {3, 30}}), {}, 0, 12);
    REQUIRE(table);
    CHECK(table->frequency(1) == 0);
    CHECK(table->frequency(2) == 1);
    CHECK(table->frequency(3) >= 1);
    CHECK(table->frequency(7) >= 1);
    // What is escaped counts for the escape.
    const auto many = blend_counts(counts_of(128, {{0, 100000}, {127, 0}}), std::vector<double>(127, 2.0), 1, 12);
    REQUIRE(many);
    CHECK(many->frequency(1) == 0);
    CHECK(many->frequency(127) >= 9);
  }
  SUBCASE("a prior stands in for counts and counts outweigh it") {
    const std::vector<double> prior{0.5, 0.25, 0.125, 0.0625, 0.0625};
    const auto from_prior = blend_counts(counts_of(5, {}), prior, 16, 10);
    REQUIRE(from_prior);
    CHECK(from_prior->frequency(0) == 512);
    CHECK(from_prior->frequency(1) == 256);
    CHECK(from_prior->frequency(2) == 128);
    CHECK(from_prior->frequency(3) == 64);
    CHECK(from_prior->frequency(4) == 64);
    const auto mixed = blend_counts(counts_of(5, {{3, 16}}), prior, 16, 10);
    REQUIRE(mixed);
    CHECK(mixed->frequency(3) == 512 + 32);
    const auto seen = blend_counts(counts_of(5, {{3, 1000000}}), prior, 16, 10);
    REQUIRE(seen);
    CHECK(seen->frequency(3) >= 1020);
  }
  SUBCASE("nothing at all still gives a table with an escape") {
    const auto table = blend_counts(counts_of(128, {}), {}, 0, 12);
    REQUIRE(table);
    CHECK(table->frequency(127) >= 1);
  }
  SUBCASE("one symbol") {
    const auto table = blend_counts(counts_of(1, {{0, 5}}), {}, 0, 12);
    REQUIRE(table);
    CHECK(table->frequency(0) == 4096);
  }
}

TEST_CASE("table_builder: refuses what no table can be") {
  const auto counts = counts_of(8, {{0, 10}, {1, 10}});
  CHECK(blend_counts(counts, {}, 0, 1 + 1));
  check_refused(blend_counts(counts, {}, 0, 0));
  check_refused(blend_counts(counts, {}, 0, 17));
  check_refused(blend_counts(counts, {}, 0, -1));
  check_refused(blend_counts(counts, {}, 0, 1000));
  check_refused(blend_counts({}, {}, 0, 12));
  check_refused(blend_counts(counts_of(257, {{0, 10}}), {}, 0, 12));
}

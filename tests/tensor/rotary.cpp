// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/tensor/rotary.hpp>

using namespace kvexact;

namespace {

constexpr long double full_turn = 6.283185307179586476925286766559L;

void check_refused(const result<rotary>& made) {
  REQUIRE_FALSE(made);
  CHECK(made.error().code == error_code::invalid_argument);
}

}  // namespace

TEST_CASE("rotary: frequencies from a base") {
  for (const auto& each : {std::pair{64U, 100000.0}, {128U, 10000.0}, {2U, 500000.0}, {rotary::max_dim, 1.5}}) {
    const std::uint32_t dim = each.first;
    const double base = each.second;
    CAPTURE(dim);
    CAPTURE(base);
    const auto made = rotary::from_base(rotary_pairing::interleaved, dim, base);
    REQUIRE(made);
    CHECK(made->dim() == dim);
    REQUIRE(made->turns().size() == dim / 2);
    std::size_t wrong = 0;
    for (std::uint32_t i = 0; i < dim / 2; ++i) {
      const long double radians = std::pow(static_cast<long double>(base), -2.0L * i / dim);
      const long double expected = std::ldexp(radians / full_turn, 64);
      wrong += std::abs(static_cast<long double>(made->turns()[i]) - expected) > expected * 0x1p-49L + 1;
    }
    CHECK(wrong == 0);
  }
  // The first pair of every base turns by one radian a token: 2^64 / (2 pi).
  CHECK(std::abs(static_cast<double>(rotary::from_base(rotary_pairing::half_split, 64, 1e4)->turns()[0]) - 0x1p64 / 6.283185307179586) <
        4096);
}

TEST_CASE("rotary: pairs") {
  const std::array<std::uint64_t, 4> turns{1, 2, 3, 4};
  const auto interleaved = *rotary::make(rotary_pairing::interleaved, turns);
  const auto half_split = *rotary::make(rotary_pairing::half_split, turns);
  CHECK(interleaved.pairing() == rotary_pairing::interleaved);
  CHECK(half_split.pairing() == rotary_pairing::half_split);
  using pair = std::pair<std::uint32_t, std::uint32_t>;
  for (std::uint32_t i = 0; i < 4; ++i) {
    CHECK(interleaved.pair(i) == pair{2 * i, 2 * i + 1});
    CHECK(half_split.pair(i) == pair{i, i + 4});
    CHECK(interleaved.turns()[i] == i + 1);
  }
  CHECK(interleaved.dim() == 8);
}

TEST_CASE("rotary: none") {
  const rotary none;
  CHECK(none.pairing() == rotary_pairing::none);
  CHECK(none.dim() == 0);
  CHECK(none.turns().empty());
  const auto made = rotary::make(rotary_pairing::none, {});
  REQUIRE(made);
  CHECK(*made == none);
}

TEST_CASE("rotary: equality") {
  const std::array<std::uint64_t, 2> turns{5, 6};
  const std::array<std::uint64_t, 2> others{5, 7};
  const auto one = *rotary::make(rotary_pairing::interleaved, turns);
  CHECK(one == *rotary::make(rotary_pairing::interleaved, turns));
  CHECK(one != *rotary::make(rotary_pairing::half_split, turns));
  CHECK(one != *rotary::make(rotary_pairing::interleaved, others));
  CHECK(one != rotary());
}

TEST_CASE("rotary: refuses impossible descriptions") {
  const std::vector<std::uint64_t> turns(rotary::max_dim / 2 + 1, 7);
  check_refused(rotary::make(rotary_pairing::none, std::span(turns).first(1)));
  check_refused(rotary::make(rotary_pairing::interleaved, {}));
  check_refused(rotary::make(rotary_pairing::half_split, {}));
  check_refused(rotary::make(rotary_pairing::half_split, turns));
  check_refused(rotary::make(static_cast<rotary_pairing>(3), std::span(turns).first(1)));
  check_refused(rotary::make(static_cast<rotary_pairing>(~0U), std::span(turns).first(1)));
  CHECK(rotary::make(rotary_pairing::half_split, std::span(turns).first(rotary::max_dim / 2)));

  for (const std::uint32_t dim : {0U, 1U, 63U, rotary::max_dim + 2, ~0U, ~0U - 1})
    check_refused(rotary::from_base(rotary_pairing::interleaved, dim, 1e4));
  for (const double base : {1.0, 0.5, 0.0, -1e4, double{INFINITY}, double{NAN}})
    check_refused(rotary::from_base(rotary_pairing::interleaved, 64, base));
  check_refused(rotary::from_base(rotary_pairing::none, 64, 1e4));
}

TEST_CASE("rotary: frequencies in radians") {
  const double end = static_cast<double>(full_turn);
  const std::array<double, 4> radians{0.0, end / 4, end / 2, std::nextafter(end, 0.0)};
  const auto made = rotary::from_radians(rotary_pairing::half_split, radians);
  REQUIRE(made);
  CHECK(made->turns()[0] == 0);
  CHECK(made->turns()[1] == std::uint64_t{1} << 62);
  CHECK(made->turns()[2] == std::uint64_t{1} << 63);
  CHECK(made->turns()[3] > std::numeric_limits<std::uint64_t>::max() - 4096);
  for (const double bad : {-1e-9, end, 7.0, double{INFINITY}, -double{INFINITY}, double{NAN}})
    check_refused(rotary::from_radians(rotary_pairing::half_split, std::array{0.5, bad}));
  check_refused(rotary::from_radians(rotary_pairing::half_split, {}));
}

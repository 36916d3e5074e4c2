// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/entropy/interleaved_rans.hpp>
#include <kvexact/entropy/range_coder.hpp>

#include "coder_conformance.hpp"

using namespace kvexact;

TEST_CASE("range_coder: conforms") {
  test::check_coder<range_coder<>>();
  test::check_coder<range_coder<1, 12>>();
  test::check_coder<range_coder<32, 16>>();
}

TEST_CASE("range_coder: refuses what cannot hold its first bytes") {
  const std::vector<std::byte> bytes(8, std::byte{0});
  CHECK(range_coder<>::decoder::open(std::span(bytes).first(7)).error().code == error_code::truncated);
  const auto nothing = range_coder<>::decoder::open(bytes);
  REQUIRE(nothing);
  CHECK(nothing->finish());
}

TEST_CASE("range_coder: costs what the tables say") {
  test::check_cost<range_coder<32, 12>>(8);
  test::check_cost<range_coder<32, 16>>(8);
}

TEST_CASE("range_coder: carries run through many bytes") {
  // The middle symbol's range is centred on 1/2, so a run of it leaves an interval around 1/2 with low = 0.0111...; what follows may
  // step over 1/2 and carry through the whole run.
  std::mt19937_64 random(61);
  const std::vector<frequency_table> tables{*frequency_table::from_frequencies(std::vector<std::uint32_t>{85, 86, 85}, 8)};
  int carried = 0;
  for (int length = 1; length < 200; ++length) {
    test::message m{8, tables, {}, {}, {}};
    for (int i = 0; i < length; ++i) m.symbols.push_back(1);
    for (int i = 0; i < 9; ++i) m.symbols.push_back(static_cast<std::uint8_t>(random() % 3));
    m.rows.assign(m.symbols.size(), 1);
    m.contexts.assign(m.symbols.size(), 0);
    test::check_round_trip<range_coder<1, 8>>(m);
    carried += std::to_integer<unsigned>(test::encode<range_coder<1, 8>>(m)[0]) >= 0x80 ? 1 : 0;
  }
  CHECK(carried > 10);
  CHECK(carried < 190);
}

TEST_CASE("range_coder: agrees with interleaved_rans about the size of the same rows") {
  std::mt19937_64 random(62);
  for (const auto kind : {test::table_kind::random, test::table_kind::skewed, test::table_kind::flat}) {
    const auto m = test::make_message(12, kind, std::vector<int>(2000, 32), random);
    const auto by_range = static_cast<double>(test::encode<range_coder<>>(m).size());
    const auto by_rans = static_cast<double>(test::encode<interleaved_rans<>>(m).size());
    CHECK(by_rans <= 1.001 * by_range + 128);
    CHECK(by_range <= 1.001 * by_rans + 8);
  }
}

TEST_CASE("range_coder: pinned bytes") {
  const std::vector<frequency_table> tables{*frequency_table::from_frequencies(std::vector<std::uint32_t>{1000, 2000, 1000, 95, 1}, 12)};
  const test::message m{12, tables, {4, 4, 2}, std::vector<std::uint16_t>(10, 0), {1, 4, 0, 2, 1, 1, 3, 1, 4, 4}};
  const auto coded = test::encode<range_coder<4>>(m);
  CHECK(test::to_hex(coded) == "bb79dd2e51f73277704229220000");
}

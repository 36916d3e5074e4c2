// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/entropy/interleaved_rans.hpp>

#include "ballot_lanes.hpp"
#include "coder_conformance.hpp"

using namespace kvexact;

namespace {

/// The coded bytes by the definition, without lanes vectors, reciprocals or buffers.
template <int Lanes, int Precision>
std::vector<std::byte> encode_by_definition(const test::message& m) {
  std::vector<std::uint64_t> x(Lanes, 0x10000);
  std::vector<std::uint16_t> words;  // last one first
  std::size_t at = m.symbols.size();
  for (std::size_t r = m.rows.size(); r-- > 0;) {
    at -= static_cast<std::size_t>(m.rows[r]);
    for (auto i = static_cast<std::size_t>(m.rows[r]); i-- > 0;) {
      const frequency_table& table = m.tables[m.contexts[at + i]];
      const std::uint64_t f = table.frequency(m.symbols[at + i]);
      if (x[i] >= (f << (32 - Precision))) {
        words.push_back(static_cast<std::uint16_t>(x[i] % 0x10000));
        x[i] /= 0x10000;
      }
      x[i] = (x[i] / f) * (std::uint64_t{1} << Precision) + table.start(m.symbols[at + i]) + x[i] % f;
      REQUIRE(x[i] >= 0x10000);
      REQUIRE(x[i] < 0x100000000);
    }
  }
  std::vector<std::byte> bytes;
  for (const std::uint64_t state : x) {
    for (int k = 0; k < 4; ++k) bytes.push_back(static_cast<std::byte>(state >> (8 * k)));
  }
  for (std::size_t w = words.size(); w-- > 0;) {
    bytes.push_back(static_cast<std::byte>(words[w]));
    bytes.push_back(static_cast<std::byte>(words[w] >> 8));
  }
  return bytes;
}

template <int Lanes, int Precision>
void check_definition() {
  CAPTURE(Lanes);
  CAPTURE(Precision);
  std::mt19937_64 random(51);
  using coder = interleaved_rans<Lanes, Precision>;
  using ballot = interleaved_rans<Lanes, Precision, test::ballot_lanes<Lanes>>;
  for (const auto& rows : test::row_shapes<coder>(random)) {
    for (const auto kind : {test::table_kind::random, test::table_kind::skewed, test::table_kind::one_symbol, test::table_kind::flat}) {
      const auto m = test::make_message(Precision, kind, rows, random);
      const auto coded = test::encode<coder>(m);
      REQUIRE(coded == encode_by_definition<Lanes, Precision>(m));
      REQUIRE(coded == test::encode<ballot>(m));
      REQUIRE(test::decode<ballot>(m, coded).symbols == m.symbols);
    }
  }
}

}  // namespace

TEST_CASE("interleaved_rans: conforms, 32 lanes and 12 bits") { test::check_coder<interleaved_rans<>>(); }
TEST_CASE("interleaved_rans: conforms with other lanes and precisions") {
  test::check_coder<interleaved_rans<1, 12>>();
  test::check_coder<interleaved_rans<7, 8>>();
  test::check_coder<interleaved_rans<64, 14>>();
  test::check_coder<interleaved_rans<32, 16>>();
}
TEST_CASE("interleaved_rans: round trips at the precisions between") {
  test::check_round_trips<interleaved_rans<16, 2>>();
  test::check_round_trips<interleaved_rans<32, 9>>();
  test::check_round_trips<interleaved_rans<32, 10>>();
  test::check_round_trips<interleaved_rans<32, 11>>();
  test::check_round_trips<interleaved_rans<32, 13>>();
  test::check_round_trips<interleaved_rans<32, 15>>();
}

TEST_CASE("interleaved_rans: writes what the definition says, whatever the lane vector") {
  check_definition<32, 12>();
  check_definition<32, 16>();
  check_definition<5, 8>();
  check_definition<1, 1>();
}

TEST_CASE("interleaved_rans: costs what the tables say") {
  // 16 bits of each state are the initial state.
  test::check_cost<interleaved_rans<32, 12>>(128);
  test::check_cost<interleaved_rans<64, 12>>(256);
  test::check_cost<interleaved_rans<32, 14>>(128);
}

TEST_CASE("interleaved_rans: nothing coded is the initial states") {
  const auto coded =
      test::encode<interleaved_rans<2>>(test::message{12, {*frequency_table::from_counts(std::vector<std::uint64_t>{1}, 12)}, {}, {}, {}});
  CHECK(test::to_hex(coded) == "0000010000000100");
}

TEST_CASE("interleaved_rans: a lane that stays out of a row keeps its state") {
  std::mt19937_64 random(52);
  const std::vector<frequency_table> tables{test::make_table(test::table_kind::random, 12, random)};
  const auto m = test::make_message(12, tables, {3, 1, 2, 3}, random);
  const auto coded = test::encode<interleaved_rans<4>>(m);
  CHECK(test::to_hex(std::span(coded).subspan(12, 4)) == "00000100");
}

TEST_CASE("interleaved_rans: refuses states that no encoder leaves") {
  const auto code = [](std::vector<std::byte> bytes) { return interleaved_rans<2>::decoder::open(bytes).error().code; };
  std::vector<std::byte> bytes(8, std::byte{0});
  bytes[2] = std::byte{1};
  CHECK(code(bytes) == error_code::corrupt);  // second state below 2^16
  bytes[6] = std::byte{1};
  CHECK(interleaved_rans<2>::decoder::open(bytes));
  bytes.push_back(std::byte{0});
  CHECK(code(bytes) == error_code::corrupt);  // half a word
  bytes.resize(7);
  CHECK(code(bytes) == error_code::truncated);
}

TEST_CASE("interleaved_rans: a missing word is missed even where zeros in its place give the right symbols") {
  const std::vector<frequency_table> tables{*frequency_table::from_frequencies(std::vector<std::uint32_t>{65535, 1}, 16)};
  const test::message m{16, tables, {1}, {0}, {1}};
  const auto coded = test::encode<interleaved_rans<1, 16>>(m);
  REQUIRE(test::to_hex(coded) == "ffff01000000");
  const auto back = test::decode<interleaved_rans<1, 16>>(m, std::span(coded).first(4));
  CHECK(back.symbols == m.symbols);
  CHECK(back.failure == error_code::truncated);
}

TEST_CASE("interleaved_rans: pinned bytes") {
  const std::vector<frequency_table> tables{*frequency_table::from_frequencies(std::vector<std::uint32_t>{1000, 2000, 1000, 95, 1}, 12),
                                            *frequency_table::from_frequencies(std::vector<std::uint32_t>{0, 4096}, 12)};
  const test::message m{12, tables, {4, 4, 2, 4}, {0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}, {1, 4, 0, 2, 1, 1, 3, 1, 4, 4, 2, 1, 0, 4}};
  const auto coded = test::encode<interleaved_rans<4>>(m);
  CHECK(test::to_hex(coded) == "fb150100ffef09024812cf02f73d38863776ff8f");
  CHECK(test::decode<interleaved_rans<4>>(m, coded).symbols == m.symbols);
}

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/entropy/entropy_model.hpp>

using namespace kvexact;

namespace {

std::vector<frequency_table> some_tables(int precision) {
  std::mt19937_64 random(21);
  std::vector<frequency_table> tables;
  for (int t = 0; t < 9; ++t) {
    std::vector<std::uint64_t> counts(1 + random() % std::min<std::uint64_t>(256, std::uint64_t{1} << precision));
    for (auto& count : counts) count = random() % 5 == 0 ? 0 : 1 + (random() >> (20 + random() % 40));
    counts.back() = 1;
    if (t == 0) counts.assign(1, 1);
    tables.push_back(*frequency_table::from_counts(counts, precision));
  }
  return tables;
}

template <int P>
void check_precision() {
  CAPTURE(P);
  const auto tables = some_tables(P);
  const auto set = table_set<P>::build(tables);
  REQUIRE(set);
  REQUIRE(set->size() == tables.size());
  for (std::size_t c = 0; c < tables.size(); ++c) {
    for (int s = 0; s < 256; ++s) {
      const encode_entry& entry = set->entries()[(c << 8) + static_cast<std::size_t>(s)];
      REQUIRE(entry.frequency == tables[c].frequency(s));
      if (entry.frequency == 0) continue;
      REQUIRE(entry.start == tables[c].start(s));
      for (std::uint32_t i = 0; i < entry.frequency; ++i) {
        const auto slot = set->slots()[(c << P) + tables[c].start(s) + i];
        REQUIRE(slot.symbol() == s);
        REQUIRE(slot.frequency() == entry.frequency);
        REQUIRE(slot.offset() == i);
      }
    }
  }
}

}  // namespace

TEST_CASE("entropy_model: entries and slots say what the tables say, at every precision") {
  check_precision<1>();
  check_precision<4>();
  check_precision<8>();
  check_precision<11>();
  check_precision<12>();
  check_precision<13>();
  check_precision<14>();
  check_precision<16>();
}

TEST_CASE("entropy_model: slots take 4 bytes up to 12 bits of precision") {
  static_assert(sizeof(decode_slot<11>) == 4 && sizeof(decode_slot<12>) == 4 && sizeof(decode_slot<13>) == 8);
  static_assert(sizeof(encode_entry) == 8);
  // symbol 8 | frequency - 1 12 | offset 12
  CHECK(decode_slot<12>::make(0xab, 0x124, 0x045).bits == 0xab123045U);
  CHECK(decode_slot<12>::make(0, 4096, 4095).bits == 0x00ffffffU);
}

TEST_CASE("entropy_model: a set can be built for one direction only") {
  const auto tables = some_tables(12);
  const auto encode = table_set<12>::build(tables, build_for::encode);
  REQUIRE(encode);
  CHECK(encode->entries() != nullptr);
  CHECK(encode->slots() == nullptr);
  const auto decode = table_set<12>::build(tables, build_for::decode);
  REQUIRE(decode);
  CHECK(decode->entries() == nullptr);
  CHECK(decode->slots() != nullptr);
  CHECK(table_set<12>::memory_bytes(9, build_for::encode) == 9 * 2048);
  CHECK(table_set<12>::memory_bytes(9, build_for::decode) == 9 * 16384);
  CHECK(table_set<12>::memory_bytes(9, build_for::both) == 9 * (2048 + 16384));
  CHECK(table_set<14>::memory_bytes(1, build_for::decode) == 16384 * 8);
}

TEST_CASE("entropy_model: a set moves") {
  auto first = table_set<12>::build(some_tables(12));
  const auto* slots = first->slots();
  const table_set<12> second = *std::move(first);
  CHECK(second.slots() == slots);
  CHECK(second.size() == 9);
}

TEST_CASE("entropy_model: refuses sets that cannot be") {
  CHECK(table_set<12>::build({}).error().code == error_code::invalid_argument);
  CHECK(table_set<12>::build(some_tables(11)).error().code == error_code::invalid_argument);
  auto mixed = some_tables(12);
  mixed.push_back(some_tables(13).front());
  CHECK(table_set<12>::build(mixed).error().code == error_code::invalid_argument);
  const std::vector<frequency_table> many(65537, some_tables(1).front());
  CHECK(table_set<1>::build(many).error().code == error_code::invalid_argument);
  const auto most = table_set<1>::build(std::span(many).first(65536), build_for::decode);
  REQUIRE(most);
  CHECK(most->size() == 65536);
}

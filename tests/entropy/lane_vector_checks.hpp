// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/entropy/entropy_model.hpp>
#include <kvexact/entropy/lane_vector.hpp>

namespace kvexact::test {

/// Full-row steps against their definitions, one lane after the other, on random states, with exactly the memory that each step may
/// touch.
template <class V, int P>
void check_lane_vector() {
  CAPTURE(V::count);
  CAPTURE(P);
  constexpr auto count = static_cast<std::size_t>(V::count);
  constexpr std::uint32_t total = std::uint32_t{1} << P;
  std::mt19937_64 random(31);

  std::vector<frequency_table> tables;
  for (int t = 0; t < 5; ++t) {
    std::vector<std::uint64_t> counts(t == 0 ? 1 : 40);
    for (auto& value : counts) value = 1 + (random() >> (24 + random() % 40));
    tables.push_back(*frequency_table::from_counts(counts, P));
  }
  const auto model = table_set<P>::build(tables);

  for (int trial = 0; trial < 300; ++trial) {
    V lanes;
    std::vector<std::uint32_t> x(count);
    auto contexts = std::make_unique<std::uint16_t[]>(count);
    auto symbols = std::make_unique<std::uint8_t[]>(count);
    auto words = std::make_unique<std::byte[]>(2 * count);
    for (std::size_t i = 0; i < count; ++i) {
      x[i] = 0x10000U + static_cast<std::uint32_t>(random() % 0xffff0000U) / (random() % 3 == 0 ? 0x8000U : 1U);
      contexts[i] = static_cast<std::uint16_t>(random() % tables.size());
      lanes.set_lane(static_cast<int>(i), x[i]);
    }
    for (std::size_t i = 0; i < 2 * count; ++i) words[i] = static_cast<std::byte>(random());
    for (std::size_t i = 0; i < count; ++i) REQUIRE(lanes.lane(static_cast<int>(i)) == x[i]);

    // Encoder, with symbols of frequency 0 in some trials.
    {
      V encoder = lanes;
      std::vector<std::uint32_t> y = x;
      std::vector<std::byte> expected;
      bool expected_codable = true;
      for (std::size_t i = count; i-- > 0;) {
        const frequency_table& table = tables[contexts[i]];
        do symbols[i] = static_cast<std::uint8_t>(random() % 41);
        while (table.frequency(symbols[i]) == 0 && trial % 4 != 0);
        const std::uint32_t f = table.frequency(symbols[i]);
        if (f == 0) expected_codable = false;
        if (std::uint64_t{y[i]} >= std::uint64_t{f} << (32 - P)) {
          expected.insert(expected.begin(), {static_cast<std::byte>(y[i]), static_cast<std::byte>(y[i] >> 8)});
          y[i] >>= 16;
        }
        if (f != 0) y[i] = (y[i] / f) * total + y[i] % f + table.start(symbols[i]);
      }
      auto room = std::make_unique<std::byte[]>(2 * count);
      bool codable = true;
      std::byte* const end = room.get() + 2 * count;
      std::byte* const begin = encoder.template retreat<P>(model->entries(), contexts.get(), symbols.get(), end, codable);
      REQUIRE(codable == expected_codable);
      if (codable) {
        REQUIRE(std::vector<std::byte>(begin, end) == expected);
        for (std::size_t i = 0; i < count; ++i) REQUIRE(encoder.lane(static_cast<int>(i)) == y[i]);
      }
      codable = false;
      (void)encoder.template retreat<P>(model->entries(), contexts.get(), symbols.get(), end, codable);
      REQUIRE(!codable);
    }

    // Decoder.
    lanes.template advance<P>(model->slots(), contexts.get(), symbols.get());
    for (std::size_t i = 0; i < count; ++i) {
      const frequency_table& table = tables[contexts[i]];
      const std::uint32_t v = x[i] % total;
      int s = 0;
      while (table.start(s) + table.frequency(s) <= v) ++s;
      REQUIRE(symbols[i] == s);
      x[i] = table.frequency(s) * (x[i] / total) + v - table.start(s);
      REQUIRE(lanes.lane(static_cast<int>(i)) == x[i]);
    }
    std::size_t used = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (random() % 4 == 0) {  // around the limit
        constexpr std::uint32_t edges[] = {0xffff, 0x10000, 1, 0x10001};
        x[i] = edges[random() % 4];
        lanes.set_lane(static_cast<int>(i), x[i]);
      }
      if (x[i] >= 0x10000U) continue;
      x[i] = x[i] * 0x10000U + std::to_integer<std::uint32_t>(words[2 * used]) + 256 * std::to_integer<std::uint32_t>(words[2 * used + 1]);
      ++used;
    }
    REQUIRE(lanes.refill(words.get()) == static_cast<int>(used));
    for (std::size_t i = 0; i < count; ++i) REQUIRE(lanes.lane(static_cast<int>(i)) == x[i]);
  }
}

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>

#include <doctest/doctest.h>

#include <kvexact/bitstream/bit_row_avx512.hpp>
#include <kvexact/core/instruction_set.hpp>

#ifdef KVEXACT_TARGET_AVX512

using namespace kvexact;

namespace {

KVEXACT_TARGET_AVX512 void get(bit_reader& reader, const std::array<std::uint16_t, 32>& counts, std::array<std::uint16_t, 32>& values) {
  _mm512_storeu_si512(values.data(), detail::bit_row_avx512::get(reader, _mm512_loadu_si512(counts.data())));
}

}  // namespace

TEST_CASE("bit_row_avx512: the bits that get gives one after the other, from every position and at the end") {
  if (best_instruction_set() != instruction_set::avx512) return;
  std::mt19937_64 random(7);
  for (const int most : {0, 1, 7, 10, 15}) {
    CAPTURE(most);
    for (std::size_t size = 0; size < 300; size += 1 + size / 90) {
      CAPTURE(size);
      const auto bytes = std::make_unique<std::byte[]>(size);  // no room behind it
      for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(random());
      bit_reader by_row(std::span(bytes.get(), size));
      bit_reader one_by_one = by_row;
      for (int rows = 0; rows < 12; ++rows) {
        std::array<std::uint16_t, 32> counts{};
        for (auto& count : counts) count = static_cast<std::uint16_t>(random() % 4 == 0 ? 0 : random() % static_cast<unsigned>(most + 1));
        if (rows % 4 == 3) counts.fill(static_cast<std::uint16_t>(most));
        if (rows % 4 == 2) counts[random() % 32] = 16;
        std::array<std::uint16_t, 32> values{};
        std::array<std::uint16_t, 32> expected{};
        for (std::size_t i = 0; i < 32; ++i) expected[i] = static_cast<std::uint16_t>(one_by_one.get(counts[i]));
        get(by_row, counts, values);
        REQUIRE(values == expected);
        REQUIRE(by_row.finish() == one_by_one.finish());
        bit_reader further = by_row;  // both stand at the same bit
        bit_reader also_further = one_by_one;
        REQUIRE(further.get(32) == also_further.get(32));
      }
    }
  }
}

#endif

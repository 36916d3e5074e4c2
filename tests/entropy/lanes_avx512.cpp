// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/core/instruction_set.hpp>
#include <kvexact/entropy/interleaved_rans.hpp>
#include <kvexact/entropy/lanes_avx512.hpp>

#include "lane_vector_checks.hpp"

#ifdef KVEXACT_TARGET_AVX512

using namespace kvexact;

namespace {

/// A lane vector whose decoding steps are those of lanes_avx512.
class lanes_under_test : public scalar_lanes<32> {
 public:
  template <int P>
  KVEXACT_TARGET_AVX512 void advance(const decode_slot<P>* slots, const std::uint16_t* contexts, std::uint8_t* symbols) noexcept {
    auto lanes = detail::lanes_avx512::load(*this);
    std::array<std::uint16_t, 32> wide;
    _mm512_storeu_si512(wide.data(), lanes.template advance<P>(slots, _mm512_loadu_si512(contexts)));
    for (std::size_t i = 0; i < 32; ++i) symbols[i] = static_cast<std::uint8_t>(wide[i]);
    lanes.store(*this);
  }
  KVEXACT_TARGET_AVX512 int refill(const std::byte* words) noexcept {
    auto lanes = detail::lanes_avx512::load(*this);
    const int used = lanes.refill(words);
    lanes.store(*this);
    return used;
  }
};

using coder = interleaved_rans<>;

KVEXACT_TARGET_AVX512 void decode_rows(coder::decoder& decoder, const table_set<12>& model, const std::uint16_t* contexts,
                                       std::uint16_t* symbols, std::size_t rows) {
  coder::decoder::avx512 fast(decoder);
  for (std::size_t r = 0; r < rows; ++r) _mm512_storeu_si512(symbols + 32 * r, fast.get_row(model, _mm512_loadu_si512(contexts + 32 * r)));
  fast.stop();
}

}  // namespace

TEST_CASE("lanes_avx512: they do what lane_vector says") {
  if (best_instruction_set() != instruction_set::avx512) return;
  test::check_lane_vector<lanes_under_test, 6>();
  test::check_lane_vector<lanes_under_test, 11>();
  test::check_lane_vector<lanes_under_test, 12>();
}

TEST_CASE("lanes_avx512: whole streams, mixed with rows of the decoder itself, to the last word and beyond") {
  if (best_instruction_set() != instruction_set::avx512) return;
  std::mt19937_64 random(19);
  std::vector<frequency_table> tables;
  for (int t = 0; t < 9; ++t) {
    std::vector<std::uint64_t> counts(static_cast<std::size_t>(t == 0 ? 256 : 3 * t + 1));
    for (auto& count : counts) count = 1 + (random() >> (30 + random() % 30));
    tables.push_back(*frequency_table::from_counts(counts, 12));
  }
  const auto model = table_set<12>::build(tables);
  for (std::size_t rows = 0; rows < 40; ++rows) {
    CAPTURE(rows);
    std::vector<std::uint16_t> contexts(32 * rows);
    std::vector<std::uint8_t> symbols(32 * rows);
    for (std::size_t i = 0; i < symbols.size(); ++i) {
      contexts[i] = static_cast<std::uint16_t>(random() % tables.size());
      do symbols[i] = static_cast<std::uint8_t>(random());
      while (symbols[i] >= tables[contexts[i]].symbol_count() || tables[contexts[i]].frequency(symbols[i]) == 0);
    }
    std::vector<std::byte> buffer(coder::max_coded_bytes(symbols.size()));
    coder::encoder encoder(buffer);
    for (std::size_t r = rows; r-- > 0;) encoder.put_row(*model, contexts.data() + 32 * r, symbols.data() + 32 * r, 32);
    const auto coded = encoder.finish();
    REQUIRE(coded);
    // The whole, and a part whose words run out; in memory of exactly that size.
    for (const std::size_t cut : {std::size_t{0}, (coded->size() - 128) / 4 * 2}) {
      const std::size_t size = coded->size() - cut;
      const auto bytes = std::make_unique<std::byte[]>(size);
      std::copy_n(coded->begin(), size, bytes.get());
      auto slow = coder::decoder::open({bytes.get(), size});
      auto fast = coder::decoder::open({bytes.get(), size});
      REQUIRE(slow);
      REQUIRE(fast);
      std::vector<std::uint8_t> expected(symbols.size());
      std::vector<std::uint16_t> decoded(symbols.size());
      for (std::size_t r = 0; r < rows; ++r) slow->get_row(*model, contexts.data() + 32 * r, expected.data() + 32 * r, 32);
      const std::size_t middle = rows == 0 ? 0 : random() % rows;
      decode_rows(*fast, *model, contexts.data(), decoded.data(), middle);
      decode_rows(*fast, *model, contexts.data() + 32 * middle, decoded.data() + 32 * middle, rows - middle);
      if (cut == 0) REQUIRE(expected == symbols);
      REQUIRE(std::equal(decoded.begin(), decoded.end(), expected.begin(), expected.end()));
      const auto how = slow->finish();
      const auto same = fast->finish();
      REQUIRE(bool(how) == bool(same));
      if (!how) REQUIRE(how.error().code == same.error().code);
    }
  }
}

#endif

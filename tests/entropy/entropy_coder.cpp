// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/entropy/entropy_coder.hpp>
#include <kvexact/entropy/interleaved_rans.hpp>
#include <kvexact/entropy/range_coder.hpp>

using namespace kvexact;

namespace {

struct no_coder {
  [[maybe_unused]] static constexpr int precision = 12;
  using encoder = int;
  using decoder = int;
};

/// Works, but for `finish`, which may not throw.
struct throwing_coder : interleaved_rans<> {
  struct encoder : interleaved_rans<>::encoder {
    using interleaved_rans<>::encoder::encoder;
    result<std::span<const std::byte>> finish() { return interleaved_rans<>::encoder::finish(); }
  };
};

}  // namespace

TEST_CASE("entropy_coder: the concepts tell coders from others") {
  static_assert(entropy_coder<interleaved_rans<>>);
  static_assert(entropy_coder<interleaved_rans<64, 16>>);
  static_assert(entropy_coder<range_coder<>>);
  static_assert(!entropy_coder<no_coder>);
  static_assert(!entropy_coder<throwing_coder>);
  static_assert(!entropy_encoder<interleaved_rans<>::decoder, table_set<12>>);
  static_assert(!entropy_decoder<interleaved_rans<>::encoder, table_set<12>>);
  static_assert(!entropy_model<int>);
}

TEST_CASE("entropy_coder: what streams store about a coder") {
  static_assert(interleaved_rans<>::id == 1 && range_coder<>::id == 2);
  static_assert(interleaved_rans<>::lanes == 32 && interleaved_rans<>::precision == 12);
  static_assert(interleaved_rans<>::encode_order == row_order::reverse && range_coder<>::encode_order == row_order::forward);
  static_assert(interleaved_rans<>::max_coded_bytes(0) == 128 && interleaved_rans<>::max_coded_bytes(100) == 328);
}

TEST_CASE("entropy_coder: the example of the concept") {
  using coder = interleaved_rans<>;
  const auto table = frequency_table::from_counts(std::vector<std::uint64_t>{5, 1, 90, 3}, coder::precision);
  const auto model = table_set<coder::precision>::build(std::span(&*table, 1));
  constexpr std::size_t rows = 3;
  const std::vector<std::uint16_t> contexts(rows * coder::lanes, 0);
  std::vector<std::uint8_t> symbols(rows * coder::lanes);
  for (std::size_t i = 0; i < symbols.size(); ++i) symbols[i] = static_cast<std::uint8_t>(i % 4);

  std::vector<std::byte> buffer(coder::max_coded_bytes(rows * coder::lanes));
  coder::encoder encoder(buffer);
  for (std::size_t r = rows; r-- > 0;) encoder.put_row(*model, &contexts[r * coder::lanes], &symbols[r * coder::lanes], coder::lanes);
  const auto coded = encoder.finish();
  REQUIRE(coded);

  auto decoder = coder::decoder::open(*coded);
  REQUIRE(decoder);
  std::vector<std::uint8_t> back(rows * coder::lanes);
  for (std::size_t r = 0; r < rows; ++r) decoder->get_row(*model, &contexts[r * coder::lanes], &back[r * coder::lanes], coder::lanes);
  CHECK(decoder->finish());
  CHECK(back == symbols);
}

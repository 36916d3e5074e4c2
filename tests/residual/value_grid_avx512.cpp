// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/core/instruction_set.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/fp16.hpp>
#include <kvexact/numeric/fp8_e4m3.hpp>
#include <kvexact/numeric/fp8_e5m2.hpp>
#include <kvexact/residual/value_grid.hpp>

#ifdef KVEXACT_TARGET_AVX512

using namespace kvexact;

namespace {

constexpr std::size_t lanes = row_lanes;

/// What one row gives, by either implementation.
template <class Format>
struct outcome {
  std::array<std::uint16_t, lanes> tables{};
  std::array<typename Format::bits_type, lanes> values{};
  std::uint32_t next_bits = 0;

  bool operator==(const outcome&) const = default;
};

template <class Format>
outcome<Format> plain(const std::uint32_t* means, std::int32_t sigma, const std::uint16_t* tables, const std::uint8_t* symbols,
                      bit_reader& reader) {
  using grid = value_grid<Format>;
  std::array<std::int32_t, lanes> sigmas;
  sigmas.fill(sigma);
  typename grid::row row;
  outcome<Format> out;
  grid::prepare(means, sigmas.data(), row);
  for (std::size_t i = 0; i < lanes; ++i) out.tables[i] = tables[row.context[i]];
  grid::decode(symbols, row, reader, out.values.data(), row_lanes);
  bit_reader further = reader;
  out.next_bits = further.get(32);
  return out;
}

template <class Format>
KVEXACT_TARGET_AVX512 outcome<Format> by_avx512(const std::uint32_t* means, std::int32_t sigma, const std::uint16_t* tables,
                                                const std::uint8_t* symbols, bit_reader& reader) {
  using grid = detail::value_grid_avx512<value_grid<Format>>;
  outcome<Format> out;
  const auto channel = grid::start(sigma, tables);
  const auto row = grid::prepare(channel, means);
  _mm512_storeu_si512(out.tables.data(), row.table);
  const __m512i wide_symbols = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbols)));
  grid::decode(channel, row, wide_symbols, reader, out.values.data());
  bit_reader further = reader;
  out.next_bits = further.get(32);
  return out;
}

template <class Format>
void check_rows() {
  using grid = value_grid<Format>;
  if (best_instruction_set() != instruction_set::avx512) return;
  std::mt19937_64 random(5);
  // A table for each context, all different; nothing behind them.
  const auto tables = std::make_unique<std::uint16_t[]>(grid::contexts);
  for (std::size_t i = 0; i < std::size_t{grid::contexts}; ++i) tables[i] = static_cast<std::uint16_t>(65535 - i);
  constexpr std::uint32_t edges[] = {0, 1, 0x007fffff, 0x00800000, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fffffff};
  constexpr std::int32_t extreme_sigmas[] = {-32768 - 32768, -32768, grid::min_sigma - 1, grid::min_sigma,
                                             grid::max_sigma, grid::max_sigma + 1, 32767,     32767 + 32768};
  std::size_t wrong = 0;
  for (int trial = 0; trial < 40000; ++trial) {
    // Means of one order of magnitude, of all, or any bits; sigma below or above them, at a class limit in every fourth row.
    std::array<std::uint32_t, lanes> means;
    const auto exponent = static_cast<std::int32_t>(random() % 256);
    for (std::uint32_t& mean : means) {
      const auto bits = static_cast<std::uint32_t>(random());
      const std::int32_t near = std::clamp(exponent + static_cast<std::int32_t>(random() % 5) - 2, 0, 255);
      mean = trial % 3 == 0 ? bits : (bits & 0x807fffffU) | (static_cast<std::uint32_t>(near) << 23);
      if (random() % 3 == 0) mean &= 0xffff0000U;
      if (random() % 16 == 0) mean = (bits & 0x80000000U) | edges[random() % std::size(edges)];
      const Format value = Format::from_bits(static_cast<typename Format::bits_type>(bits));
      if (random() % 16 == 0) mean = std::bit_cast<std::uint32_t>(value.to_float()) + static_cast<std::uint32_t>(random() % 3) - 1;
    }
    std::int32_t sigma = (exponent - 127) * 256 + static_cast<std::int32_t>(random() % 6000) - 4500;
    if (trial % 4 == 0) sigma = sigma / 64 * 64 - static_cast<std::int32_t>(random() % 2);
    if (trial % 16 == 1) sigma = extreme_sigmas[random() % std::size(extreme_sigmas)];
    std::array<std::uint8_t, lanes> symbols;
    for (std::uint8_t& symbol : symbols) {
      symbol = static_cast<std::uint8_t>(random() % 4 == 0 ? random() % grid::alphabet : grid::zero_symbol - 8 + random() % 17);
      if (trial % 5 == 0 && random() % 8 == 0) symbol = grid::escape_symbol;
    }
    const std::size_t size = random() % (trial % 2 == 0 ? 400 : 60);
    const auto bytes = std::make_unique<std::byte[]>(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(random());
    bit_reader reader(std::span(bytes.get(), size));
    (void)reader.get(static_cast<int>(random() % 32));
    bit_reader same_reader = reader;
    const auto expected = plain<Format>(means.data(), sigma, tables.get(), symbols.data(), reader);
    const auto actual = by_avx512<Format>(means.data(), sigma, tables.get(), symbols.data(), same_reader);
    wrong += actual != expected || same_reader.finish() != reader.finish();
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("value_grid_avx512: rows are those of value_grid, bf16") { check_rows<bf16>(); }
TEST_CASE("value_grid_avx512: rows are those of value_grid, fp16") { check_rows<fp16>(); }
TEST_CASE("value_grid_avx512: rows are those of value_grid, fp8_e4m3") { check_rows<fp8_e4m3>(); }
TEST_CASE("value_grid_avx512: rows are those of value_grid, fp8_e5m2") { check_rows<fp8_e5m2>(); }

#endif

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/entropy/entropy_coder.hpp>
#include <kvexact/entropy/entropy_model.hpp>
#include <kvexact/entropy/frequency_table.hpp>

namespace kvexact::test {

/// Rows of symbols with their contexts and tables.
struct message {
  int precision = 0;
  std::vector<frequency_table> tables;
  std::vector<int> rows;  // symbols in each row
  std::vector<std::uint16_t> contexts;
  std::vector<std::uint8_t> symbols;

  /// Code length in bits by the tables.
  [[nodiscard]] double ideal_bits() const {
    double bits = 0;
    for (std::size_t i = 0; i < symbols.size(); ++i) bits += precision - std::log2(double(tables[contexts[i]].frequency(symbols[i])));
    return bits;
  }
};

enum class table_kind {
  random,      ///< all sorts of shapes
  skewed,      ///< one symbol nearly always
  one_symbol,  ///< f = 2^precision
  flat,        ///< as many symbols as fit, all equal
};

inline frequency_table make_table(table_kind kind, int precision, std::mt19937_64& random) {
  const std::uint64_t fits = std::min<std::uint64_t>(256, std::uint64_t{1} << precision);
  std::vector<std::uint64_t> counts(1 + random() % fits);
  switch (kind) {
    case table_kind::random:
      for (auto& count : counts) count = random() % 7 == 0 ? 0 : 1 + (random() >> (14 + random() % 50));
      counts.front() = 1;
      break;
    case table_kind::skewed:
      counts.assign(std::min<std::uint64_t>(fits, 30), 1);
      counts[random() % counts.size()] = std::uint64_t{1} << 50;
      break;
    case table_kind::one_symbol:
      std::fill(counts.begin(), counts.end(), 0);
      counts.back() = 3;
      break;
    case table_kind::flat: counts.assign(fits, 1); break;
  }
  return *frequency_table::from_counts(counts, precision);
}

/// Symbols drawn by their frequencies, in rows of the given lengths.
inline message make_message(int precision, std::vector<frequency_table> tables, std::vector<int> rows, std::mt19937_64& random) {
  message m{precision, std::move(tables), std::move(rows), {}, {}};
  for (const int n : m.rows) {
    for (int i = 0; i < n; ++i) {
      const auto context = static_cast<std::uint16_t>(random() % m.tables.size());
      const auto v = static_cast<std::uint32_t>(random() % (std::uint64_t{1} << precision));
      int s = 0;
      while (m.tables[context].start(s) + m.tables[context].frequency(s) <= v) ++s;
      m.contexts.push_back(context);
      m.symbols.push_back(static_cast<std::uint8_t>(s));
    }
  }
  return m;
}

inline message make_message(int precision, table_kind kind, std::vector<int> rows, std::mt19937_64& random) {
  std::vector<frequency_table> tables;
  for (int t = 0; t < 6; ++t) tables.push_back(make_table(kind, precision, random));
  return make_message(precision, std::move(tables), std::move(rows), random);
}

template <class Coder>
result<std::span<const std::byte>> encode(const message& m, const table_set<Coder::precision>& model, std::span<std::byte> buffer) {
  typename Coder::encoder encoder(buffer);
  constexpr bool reverse = Coder::encode_order == row_order::reverse;
  std::size_t at = reverse ? m.symbols.size() : 0;
  for (std::size_t r = 0; r < m.rows.size(); ++r) {
    const int n = m.rows[reverse ? m.rows.size() - 1 - r : r];
    if (reverse) at -= static_cast<std::size_t>(n);
    encoder.put_row(model, m.contexts.data() + at, m.symbols.data() + at, n);
    if (!reverse) at += static_cast<std::size_t>(n);
  }
  return encoder.finish();
}

template <class Coder>
std::vector<std::byte> encode(const message& m) {
  const auto model = table_set<Coder::precision>::build(m.tables, build_for::encode);
  std::vector<std::byte> buffer(Coder::max_coded_bytes(m.symbols.size()));
  const auto coded = encode<Coder>(m, *model, buffer);
  REQUIRE(coded);
  REQUIRE(coded->data() >= buffer.data());
  REQUIRE(coded->data() + coded->size() <= buffer.data() + buffer.size());
  return {coded->begin(), coded->end()};
}

inline std::string to_hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += "0123456789abcdef"[std::to_integer<int>(byte >> 4)];
    text += "0123456789abcdef"[std::to_integer<int>(byte & std::byte{15})];
  }
  return text;
}

struct decoded {
  std::vector<std::uint8_t> symbols;
  std::optional<error_code> failure;
};

/// Decodes from a heap block of exactly the right size at an odd address, so that any read outside is seen by AddressSanitizer.
template <class Coder>
decoded decode(const message& m, const table_set<Coder::precision>& model, std::span<const std::byte> coded) {
  std::vector<std::byte> block(1);
  block.insert(block.end(), coded.begin(), coded.end());
  block.shrink_to_fit();
  auto decoder = Coder::decoder::open(std::span<const std::byte>(block).subspan(1));
  if (!decoder) return {{}, decoder.error().code};
  decoded out;
  std::size_t at = 0;
  for (const int n : m.rows) {
    const auto count = static_cast<std::size_t>(n);
    std::vector<std::uint8_t> row(count);
    std::vector<std::uint16_t> contexts(count);
    for (std::size_t i = 0; i < count; ++i) contexts[i] = m.contexts[at + i];
    decoder->get_row(model, contexts.data(), row.data(), n);
    out.symbols.insert(out.symbols.end(), row.begin(), row.end());
    at += count;
  }
  if (const auto ok = decoder->finish(); !ok) out.failure = ok.error().code;
  return out;
}

template <class Coder>
decoded decode(const message& m, std::span<const std::byte> coded) {
  return decode<Coder>(m, *table_set<Coder::precision>::build(m.tables, build_for::decode), coded);
}

template <class Coder>
void check_round_trip(const message& m) {
  const auto coded = encode<Coder>(m);
  const auto back = decode<Coder>(m, coded);
  REQUIRE(!back.failure);
  REQUIRE(back.symbols == m.symbols);
}

/// Row lengths that exercise both ends: none, one symbol, fewer than the lanes, exact multiples, all lengths mixed.
template <class Coder>
std::vector<std::vector<int>> row_shapes(std::mt19937_64& random) {
  constexpr int lanes = Coder::lanes;
  std::vector<std::vector<int>> shapes{{}, {0}, {1}, {lanes}, {lanes, lanes}, std::vector<int>(40, lanes), std::vector<int>(100, 1)};
  if (lanes > 1) shapes.push_back({lanes - 1});
  std::vector<int> every;
  for (int n = 0; n <= lanes; ++n) every.push_back(n);
  shapes.push_back(every);
  std::shuffle(every.begin(), every.end(), random);
  shapes.push_back(every);
  std::vector<int> tail(20, lanes);
  tail.push_back((lanes + 1) / 2);
  shapes.push_back(tail);
  return shapes;
}

template <class Coder>
void check_round_trips() {
  CAPTURE(Coder::lanes);
  CAPTURE(Coder::precision);
  std::mt19937_64 random(41);
  for (const auto& rows : row_shapes<Coder>(random)) {
    for (const table_kind kind : {table_kind::random, table_kind::skewed, table_kind::one_symbol, table_kind::flat}) {
      check_round_trip<Coder>(make_message(Coder::precision, kind, rows, random));
    }
    // Kinds mixed within a row.
    std::vector<frequency_table> tables;
    for (const table_kind kind : {table_kind::random, table_kind::skewed, table_kind::one_symbol, table_kind::flat}) {
      tables.push_back(make_table(kind, Coder::precision, random));
    }
    check_round_trip<Coder>(make_message(Coder::precision, tables, rows, random));
  }
}

/// The least probable symbols only: the most bytes that a message can take.
template <class Coder>
void check_worst_case() {
  constexpr std::uint32_t total = std::uint32_t{1} << Coder::precision;
  message m{
      Coder::precision, {*frequency_table::from_frequencies(std::vector<std::uint32_t>{1, total - 2, 1}, Coder::precision)}, {}, {}, {}};
  m.rows.assign(50, Coder::lanes);
  m.contexts.assign(static_cast<std::size_t>(50 * Coder::lanes), 0);
  for (std::size_t i = 0; i < m.contexts.size(); ++i) m.symbols.push_back(i % 3 == 0 ? 0 : 2);
  check_round_trip<Coder>(m);
}

/// A buffer of every size: too small fails in `finish` without a write outside, the exact size succeeds with the same bytes.
template <class Coder>
void check_small_buffers() {
  std::mt19937_64 random(42);
  for (const auto& rows :
       {std::vector<int>{Coder::lanes, Coder::lanes, Coder::lanes}, std::vector<int>{1, Coder::lanes, 1}, std::vector<int>{}}) {
    const message m = make_message(Coder::precision, table_kind::random, rows, random);
    const auto model = table_set<Coder::precision>::build(m.tables, build_for::encode);
    const auto whole = encode<Coder>(m);
    for (std::size_t size = 0; size <= Coder::max_coded_bytes(m.symbols.size()) + 3; ++size) {
      CAPTURE(size);
      constexpr std::size_t guard = 64;
      std::vector<std::byte> block(size + 2 * guard, std::byte{0xa5});
      const auto coded = encode<Coder>(m, *model, std::span(block).subspan(guard, size));
      REQUIRE(std::all_of(block.begin(), block.begin() + guard, [](std::byte b) { return b == std::byte{0xa5}; }));
      REQUIRE(std::all_of(block.end() - guard, block.end(), [](std::byte b) { return b == std::byte{0xa5}; }));
      REQUIRE(static_cast<bool>(coded) == (size >= whole.size()));
      if (coded) {
        REQUIRE(std::equal(coded->begin(), coded->end(), whole.begin(), whole.end()));
      } else {
        REQUIRE(coded.error().code == error_code::workspace_too_small);
      }
    }
  }
}

/// Every proper prefix is refused, and so are bytes too many.
template <class Coder>
void check_truncations() {
  std::mt19937_64 random(43);
  const message m =
      make_message(Coder::precision, table_kind::random, {Coder::lanes, std::min(3, Coder::lanes), Coder::lanes, Coder::lanes}, random);
  const auto model = table_set<Coder::precision>::build(m.tables, build_for::decode);
  auto coded = encode<Coder>(m);
  for (std::size_t size = 0; size < coded.size(); ++size) {
    CAPTURE(size);
    const auto back = decode<Coder>(m, *model, std::span(coded).first(size));
    REQUIRE(back.failure);
    REQUIRE((*back.failure == error_code::truncated || *back.failure == error_code::corrupt));
  }
  const auto empty = decode<Coder>(m, *model, {});
  REQUIRE(empty.failure == error_code::truncated);
  for (int extra = 1; extra <= 3; ++extra) {
    coded.push_back(std::byte{0});
    REQUIRE(decode<Coder>(m, *model, coded).failure == error_code::corrupt);
  }
}

/// Changed bytes either fail or are exactly what the encoder writes for the symbols that they decode to. So no two inputs mean the
/// same symbols, and a change never goes by unseen with the right symbols.
template <class Coder>
void check_accepted_or_refused(const message& m, const table_set<Coder::precision>& model, std::span<const std::byte> changed,
                               int& accepted) {
  const auto back = decode<Coder>(m, model, changed);
  if (back.failure) return;
  ++accepted;
  message other = m;
  other.symbols = back.symbols;
  const auto again = encode<Coder>(other);
  REQUIRE(std::equal(again.begin(), again.end(), changed.begin(), changed.end()));
}

template <class Coder>
void check_bit_flips() {
  std::mt19937_64 random(44);
  for (const auto kind : {table_kind::random, table_kind::flat, table_kind::one_symbol}) {
    const message m = make_message(Coder::precision, kind, {Coder::lanes, std::min(3, Coder::lanes), Coder::lanes, Coder::lanes}, random);
    const auto model = table_set<Coder::precision>::build(m.tables, build_for::decode);
    auto coded = encode<Coder>(m);
    int accepted = 0;
    for (std::size_t bit = 0; bit < 8 * coded.size(); ++bit) {
      CAPTURE(bit);
      coded[bit / 8] ^= std::byte{1} << (bit % 8);
      const auto back = decode<Coder>(m, *model, coded);
      REQUIRE((back.failure || back.symbols != m.symbols));
      check_accepted_or_refused<Coder>(m, *model, coded, accepted);
      coded[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  }
}

/// Random bytes: bounded, inside the input, and every symbol codable in its context.
template <class Coder>
void check_garbage() {
  std::mt19937_64 random(45);
  const std::vector<int> shapes[] = {{}, {1}, {Coder::lanes, std::min(2, Coder::lanes), Coder::lanes}, std::vector<int>(30, Coder::lanes)};
  int accepted = 0;
  for (const auto& rows : shapes) {
    const message m = make_message(Coder::precision, table_kind::random, rows, random);
    const auto model = table_set<Coder::precision>::build(m.tables, build_for::decode);
    const std::size_t longest = 2 * Coder::max_coded_bytes(static_cast<std::size_t>(Coder::lanes));
    for (int trial = 0; trial < 400; ++trial) {
      std::vector<std::byte> bytes(random() % longest);
      const std::uint64_t mask = trial % 8 == 0 ? 0 : trial % 8 == 1 ? 0xff : random();
      for (auto& byte : bytes) byte = static_cast<std::byte>(trial % 8 == 1 ? 0xff : random() & mask);
      const auto back = decode<Coder>(m, *model, bytes);
      for (std::size_t i = 0; i < back.symbols.size(); ++i) REQUIRE(m.tables[m.contexts[i]].frequency(back.symbols[i]) > 0);
      check_accepted_or_refused<Coder>(m, *model, bytes, accepted);
    }
  }
}

/// Symbols without frequency fail in `finish`, wherever they stand, and `put_row` says so from then on.
template <class Coder>
void check_uncodable() {
  constexpr std::uint32_t total = std::uint32_t{1} << Coder::precision;
  const std::vector<frequency_table> tables{
      *frequency_table::from_frequencies(std::vector<std::uint32_t>{total / 2, 0, total / 2}, Coder::precision)};
  const auto model = table_set<Coder::precision>::build(tables);
  const std::vector<std::uint16_t> contexts(static_cast<std::size_t>(Coder::lanes), 0);
  for (const int n : {1, (Coder::lanes + 1) / 2, Coder::lanes}) {
    for (int at = 0; at < n; ++at) {
      for (const int symbol : {1, 3, 255}) {
        std::vector<std::uint8_t> symbols(static_cast<std::size_t>(n), 2);
        std::vector<std::byte> buffer(Coder::max_coded_bytes(static_cast<std::size_t>(5 * Coder::lanes)));
        typename Coder::encoder encoder(buffer);
        REQUIRE(encoder.put_row(*model, contexts.data(), symbols.data(), n));
        symbols[static_cast<std::size_t>(at)] = static_cast<std::uint8_t>(symbol);
        REQUIRE(!encoder.put_row(*model, contexts.data(), symbols.data(), n));
        symbols[static_cast<std::size_t>(at)] = 0;
        REQUIRE(!encoder.put_row(*model, contexts.data(), symbols.data(), n));
        const auto coded = encoder.finish();
        REQUIRE(!coded);
        REQUIRE(coded.error().code == error_code::invalid_argument);
      }
    }
  }
}

/// Coded size against the code length of the tables: within 0.1 % and `fixed_bytes`.
template <class Coder>
void check_cost(std::size_t fixed_bytes) {
  std::mt19937_64 random(46);
  for (const table_kind kind : {table_kind::random, table_kind::skewed, table_kind::flat, table_kind::one_symbol}) {
    const message m =
        make_message(Coder::precision, kind, std::vector<int>(static_cast<std::size_t>(60000 / Coder::lanes), Coder::lanes), random);
    const double bits = 8.0 * static_cast<double>(encode<Coder>(m).size());
    CAPTURE(m.ideal_bits());
    CAPTURE(bits);
    CHECK(bits <= 1.001 * m.ideal_bits() + 8.0 * static_cast<double>(fixed_bytes));
    CHECK(bits >= 0.999 * m.ideal_bits());
  }
}

/// Everything that holds for every entropy coder.
template <class Coder>
void check_coder() {
  static_assert(entropy_coder<Coder>);
  check_round_trips<Coder>();
  check_worst_case<Coder>();
  check_small_buffers<Coder>();
  check_truncations<Coder>();
  check_bit_flips<Coder>();
  check_garbage<Coder>();
  check_uncodable<Coder>();
}

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/core/instruction_set.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/residual/value_grid.hpp>

#include "residual/number_grid.hpp"

using namespace kvexact;

namespace {

constexpr auto lanes = static_cast<std::size_t>(row_lanes);
constexpr float infinity = std::numeric_limits<float>::infinity();

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

template <class Format>
std::vector<float> means() {
  const float largest = Format::from_bits(Format::max_finite).to_float();
  const float normal = std::ldexp(1.0F, Format::min_exponent);
  const float smallest = std::ldexp(normal, -Format::mantissa_bits);
  return {0.0F,
          -0.0F,
          1.0F,
          -3.0F,
          100.0F,
          -0.8125F,
          0.99999994F,
          1.0F + 1.0F / 4096,
          smallest,
          -smallest * 0.4F,
          smallest * 2.7F,
          normal,
          -normal * 0.99F,
          largest,
          -largest,
          std::numeric_limits<float>::max(),
          std::numeric_limits<float>::denorm_min(),
          infinity,
          -infinity,
          std::bit_cast<float>(0xffc00001U)};
}

template <class Format>
std::vector<std::int32_t> sigmas() {
  using grid = value_grid<Format>;
  const std::int32_t low = (Format::min_exponent - Format::mantissa_bits) * 256;
  return {std::numeric_limits<std::int32_t>::min(),
          low,
          low + 600,
          low + 768,
          low + 256 * (Format::mantissa_bits + 2) + 255,
          low + 256 * (Format::mantissa_bits + 6),
          -1800,
          -1023,
          -257,
          -1,
          0,
          300,
          1000,
          grid::max_sigma,
          std::numeric_limits<std::int32_t>::max()};
}

template <class Format>
typename value_grid<Format>::row prepared(float mean, std::int32_t sigma) {
  std::array<std::uint32_t, lanes> all_means;
  std::array<std::int32_t, lanes> all_sigmas;
  all_means.fill(bits_of(mean));
  all_sigmas.fill(sigma);
  typename value_grid<Format>::row row;
  value_grid<Format>::prepare(all_means.data(), all_sigmas.data(), row);
  return row;
}

/// All bit patterns of a format, coded with one mean and one sigma.
template <class Format>
struct coded_line {
  using grid = value_grid<Format>;
  using bits_type = typename Format::bits_type;
  static constexpr std::size_t size = std::size_t{1} << Format::bit_count;

  typename grid::row row;
  std::vector<std::uint8_t> symbols = std::vector<std::uint8_t>(size);
  std::vector<std::byte> raw = std::vector<std::byte>(4 * size);
  std::size_t raw_bytes = 0;

  coded_line(float mean, std::int32_t sigma) : row(prepared<Format>(mean, sigma)) {
    bit_writer writer(raw);
    std::array<bits_type, lanes> values;
    for (std::size_t at = 0; at < size; at += lanes) {
      for (std::size_t i = 0; i < lanes; ++i) values[i] = static_cast<bits_type>(at + i);
      grid::to_symbols(values.data(), row, symbols.data() + at, row_lanes);
      grid::put_raw(values.data(), row, symbols.data() + at, writer, row_lanes);
    }
    raw_bytes = writer.finish().size();
    REQUIRE_FALSE(writer.overflowed());
  }

  [[nodiscard]] std::size_t wrong_values() const {
    bit_reader reader{std::span(raw).first(raw_bytes)};
    std::array<bits_type, lanes> values;
    std::size_t wrong = 0;
    for (std::size_t at = 0; at < size; at += lanes) {
      grid::decode(symbols.data() + at, row, reader, values.data(), row_lanes);
      for (std::size_t i = 0; i < lanes; ++i) wrong += values[i] != at + i;
    }
    return wrong + (reader.finish() ? 0U : 1U);
  }
};

template <class Format>
std::int32_t signed_cell(const std::vector<std::int32_t>& cells, std::size_t bits) {
  const std::int32_t cell = cells[bits & Format::magnitude_mask];
  return (bits & Format::sign_mask) != 0 ? -1 - cell : cell;
}

/// Round trip and symbols of every pattern for every mean and sigma; symbols against cells that were counted.
template <class Format>
void check_every_pattern() {
  using grid = value_grid<Format>;
  using reference = test::number_grid<Format>;
  for (const std::int32_t sigma : sigmas<Format>()) {
    CAPTURE(sigma);
    const auto cells = reference::cells(reference::step(sigma));
    for (const float mean : means<Format>()) {
      CAPTURE(mean);
      const coded_line<Format> line(mean, sigma);
      CHECK(line.wrong_values() == 0);
      const bool folded = std::isfinite(mean) && mean < 0;
      const std::int32_t mean_cell = cells[reference::code_below(mean)];
      std::size_t wrong = 0;
      for (std::size_t x = 0; x < line.size; ++x) {
        const std::int32_t expected = signed_cell<Format>(cells, folded ? x ^ Format::sign_mask : x) - mean_cell + grid::zero_symbol;
        wrong += line.symbols[x] != (expected >= 0 && expected < grid::escape_symbol ? expected : grid::escape_symbol);
      }
      CHECK(wrong == 0);
      CHECK(line.row.cell[7] == mean_cell);
      CHECK(line.row.context[7] >= 0);
      CHECK(line.row.context[7] < grid::contexts);
    }
  }
}

/// Symbols grow with the value, and the raw bits of each cell name its values one by one, in order.
template <class Format>
void check_cells() {
  using grid = value_grid<Format>;
  using bits_type = typename Format::bits_type;
  std::size_t cells_seen = 0;
  for (const float mean : {0.0F, -3.0F, 0.8F, std::ldexp(1.5F, Format::min_exponent), Format::from_bits(Format::max_finite).to_float()}) {
    CAPTURE(mean);
    for (const std::int32_t sigma : sigmas<Format>()) {
      CAPTURE(sigma);
      const coded_line<Format> line(mean, sigma);
      const std::size_t fold = mean < 0 ? Format::sign_mask : 0;
      std::vector<std::vector<bits_type>> members(static_cast<std::size_t>(grid::alphabet));
      std::size_t falls = 0;
      int last = 0;
      for (std::size_t i = 0; i < line.size; ++i) {
        const std::size_t half = Format::magnitude_mask;
        const std::size_t x = (i <= half ? Format::sign_mask + half - i : i - half - 1) ^ fold;  // from the most negative up
        const std::uint8_t symbol = line.symbols[x];
        if (symbol == grid::escape_symbol) continue;
        falls += symbol < last;
        last = symbol;
        members[symbol].push_back(static_cast<bits_type>(x));
      }
      CHECK(falls == 0);
      std::size_t wrong = 0;
      for (int symbol = 0; symbol < grid::escape_symbol; ++symbol) {
        auto& group = members[static_cast<std::size_t>(symbol)];
        const std::int32_t cell = line.row.cell[0] + symbol - grid::zero_symbol;
        if (group.empty() || cell == 0 || cell == -1) continue;
        ++cells_seen;
        if (cell < 0) std::reverse(group.begin(), group.end());  // by magnitude
        const int count = std::countr_zero(group.size());
        wrong += !std::has_single_bit(group.size());
        std::vector<std::byte> buffer(group.size() * 2 + 8);
        bit_writer writer(buffer);
        for (std::uint32_t raw = 0; raw < group.size(); ++raw) writer.put(raw, count);
        bit_reader reader(writer.finish());
        std::array<std::uint8_t, lanes> symbols;
        symbols.fill(static_cast<std::uint8_t>(symbol));
        std::array<bits_type, lanes> values;
        for (std::size_t at = 0; at < group.size(); at += lanes) {
          const std::size_t n = std::min(lanes, group.size() - at);
          grid::decode(symbols.data(), line.row, reader, values.data(), static_cast<int>(n));
          for (std::size_t i = 0; i < n; ++i) wrong += values[i] != group[at + i];
        }
        wrong += !reader.finish();
      }
      CHECK(wrong == 0);
    }
  }
  CHECK(cells_seen > 1000);
}

/// Magnitudes in the zero cells: a prefix code, short for the large ones.
template <class Format>
void check_near_zero() {
  using grid = value_grid<Format>;
  using bits_type = typename Format::bits_type;
  for (const std::int32_t sigma : sigmas<Format>()) {
    CAPTURE(sigma);
    const auto row = prepared<Format>(0.0F, sigma);
    const int step = test::number_grid<Format>::step(sigma);
    const auto cells = test::number_grid<Format>::cells(step);
    std::array<std::byte, 8> buffer;
    double kraft = 0;
    std::uint64_t last_length = 99;
    std::size_t longer = 0;
    std::size_t elsewhere = 0;
    for (std::uint32_t code = 0; code < cells.size() && cells[code] == 0; ++code) {
      bit_writer writer(buffer);
      const auto value = static_cast<bits_type>(code);
      std::uint8_t symbol = 0;
      grid::to_symbols(&value, row, &symbol, 1);
      elsewhere += symbol != grid::zero_symbol;
      grid::put_raw(&value, row, &symbol, writer, 1);
      kraft += std::ldexp(1.0, -static_cast<int>(writer.bits()));
      longer += writer.bits() > last_length;
      last_length = writer.bits();
    }
    CHECK(longer == 0);
    CHECK(elsewhere == 0);
    // Complete unless what is left after the halvings is stored with all its bits.
    const bool complete = step - Format::min_exponent + 1 <= 8;
    if (complete) {
      CHECK(kraft == 1);
    } else {
      CHECK(kraft < 1);
      CHECK(kraft > 1 - 0x1p-6);
      const std::uint32_t half = test::number_grid<Format>::code_below(std::ldexp(1.0F, step - 1));
      bit_writer writer(buffer);
      const auto value = static_cast<bits_type>(half);
      const auto symbol = static_cast<std::uint8_t>(grid::zero_symbol);
      grid::put_raw(&value, row, &symbol, writer, 1);
      CHECK(writer.bits() == 1 + Format::mantissa_bits);
    }
  }
}

/// Negating value and mean changes nothing but the sign.
template <class Format>
void check_folding() {
  using bits_type = typename Format::bits_type;
  using grid = value_grid<Format>;
  for (const float mean : means<Format>()) {
    if (mean == 0 || !std::isfinite(mean)) continue;
    for (const std::int32_t sigma : {-1800, -257, 300}) {
      CAPTURE(mean);
      CAPTURE(sigma);
      const coded_line<Format> line(mean, sigma);
      const coded_line<Format> mirror(-mean, sigma);
      CHECK(line.row.context == mirror.row.context);
      std::size_t wrong = 0;
      for (std::size_t x = 0; x < line.size; ++x) wrong += line.symbols[x] != mirror.symbols[x ^ Format::sign_mask];
      for (std::size_t x = 0; x < line.size; x += 1 + line.size / 4096) {
        if (line.symbols[x] == grid::escape_symbol) continue;
        std::array<std::byte, 8> a{};
        std::array<std::byte, 8> b{};
        bit_writer to_a(a);
        bit_writer to_b(b);
        const auto value = static_cast<bits_type>(x);
        const auto negated = static_cast<bits_type>(x ^ Format::sign_mask);
        grid::put_raw(&value, line.row, &line.symbols[x], to_a, 1);
        grid::put_raw(&negated, mirror.row, &line.symbols[x], to_b, 1);
        wrong += to_a.finish().size() != to_b.finish().size() || a != b;
      }
      CHECK(wrong == 0);
    }
  }
}

float random_mean(std::mt19937_64& random, int exponent) {
  const auto sign = random() % 2 == 0 ? 1.0F : -1.0F;
  switch (random() % 16) {
    case 0: return std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    case 1: return 0.0F;
    case 2: return sign * static_cast<float>(random() % 300);
    default:
      return sign * std::ldexp(1 + std::ldexp(static_cast<float>(random() >> 41), -23), exponent + static_cast<int>(random() % 12) - 8);
  }
}

/// Rows whose lanes differ: full and short ones, with some symbols replaced by the escape, on every instruction set.
template <class Format>
struct coder {
  using grid = value_grid<Format>;
  using bits_type = typename Format::bits_type;

  KVEXACT_ALWAYS_INLINE static void run(const std::uint32_t* row_means, const std::int32_t* row_sigmas, const bits_type* values,
                                        std::uint64_t escaped, int n, std::vector<std::byte>& bytes,
                                        std::array<std::uint8_t, lanes>& symbols, std::array<std::int32_t, lanes>& context,
                                        std::array<bits_type, lanes>& decoded, bool& finished) noexcept {
    typename grid::row row;
    grid::prepare(row_means, row_sigmas, row);
    context = row.context;
    grid::to_symbols(values, row, symbols.data(), n);
    for (std::size_t i = 0; i < lanes; ++i)
      if (((escaped >> i) & 1U) != 0) symbols[i] = static_cast<std::uint8_t>(grid::escape_symbol);
    std::array<std::byte, 4 * lanes> buffer;
    bit_writer writer(buffer);
    grid::put_raw(values, row, symbols.data(), writer, n);
    const auto written = writer.finish();
    bytes.assign(written.begin(), written.end());
    bit_reader reader(bytes);
    grid::decode(symbols.data(), row, reader, decoded.data(), n);
    finished = reader.finish();
  }
};

template <class Format>
void check_rows() {
  using grid = value_grid<Format>;
  using bits_type = typename Format::bits_type;
  std::mt19937_64 random(21);
  std::size_t wrong = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const int centre = static_cast<int>(random() % 24) - 12;
    std::array<std::uint32_t, lanes> row_means;
    std::array<std::int32_t, lanes> row_sigmas;
    std::array<bits_type, lanes> values;
    for (std::size_t i = 0; i < lanes; ++i) {
      const float mean = random_mean(random, centre);
      row_means[i] = bits_of(mean);
      row_sigmas[i] = (centre - 3) * 256 + static_cast<std::int32_t>(random() % 1500) - 500;
      const float spread = std::exp2(static_cast<float>(row_sigmas[i]) / 256);
      values[i] = random() % 8 == 0 ? static_cast<bits_type>(random())
                                    : Format::from_float(mean + spread * (static_cast<float>(random() % 801) - 400) / 100).bits;
    }
    const std::uint64_t escaped = trial % 3 == 0 ? random() & random() & random() : 0;
    std::array<std::uint8_t, lanes> full{};
    std::array<std::int32_t, lanes> context{};
    std::array<bits_type, lanes> decoded{};
    std::vector<std::byte> bytes;
    bool finished = false;
    coder<Format>::run(row_means.data(), row_sigmas.data(), values.data(), escaped, row_lanes, bytes, full, context, decoded, finished);
    wrong += decoded != values || !finished;
    for (std::size_t i = 0; i < lanes; ++i) wrong += context[i] < 0 || context[i] >= grid::contexts || full[i] > grid::escape_symbol;

    for (const instruction_set set : {instruction_set::avx2, instruction_set::avx512}) {
      if (set > best_instruction_set()) continue;
      std::array<std::uint8_t, lanes> symbols{};
      std::array<std::int32_t, lanes> same_context{};
      std::array<bits_type, lanes> same{};
      std::vector<std::byte> same_bytes;
      run_on<coder<Format>>(set, row_means.data(), row_sigmas.data(), values.data(), escaped, row_lanes, same_bytes, symbols, same_context,
                            same, finished);
      wrong += symbols != full || same_context != context || same != values || same_bytes != bytes || !finished;
    }

    // A short row: the same symbols, nothing written behind it, and its bits are the beginning of the full row's once both have no special
    // lanes.
    const int n = static_cast<int>(random() % lanes) + 1;
    const auto length = static_cast<std::size_t>(n);
    constexpr auto guard = static_cast<bits_type>(0xa5a5);
    std::array<std::uint8_t, lanes> symbols;
    symbols.fill(0xee);
    decoded.fill(guard);
    const std::uint64_t kept = escaped & ((std::uint64_t{1} << n) - 1);
    coder<Format>::run(row_means.data(), row_sigmas.data(), values.data(), kept, n, bytes, symbols, context, decoded, finished);
    wrong += !finished;
    for (std::size_t i = 0; i < lanes; ++i)
      wrong += i < length ? symbols[i] != full[i] || decoded[i] != values[i] : symbols[i] != 0xee || decoded[i] != guard;
  }
  CHECK(wrong == 0);
}

/// Any symbols and any bits give some values: nothing is read or written outside.
template <class Format>
void check_hostile_input() {
  using grid = value_grid<Format>;
  using bits_type = typename Format::bits_type;
  std::mt19937_64 random(22);
  std::size_t wrong = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    std::array<std::uint32_t, lanes> row_means;
    std::array<std::int32_t, lanes> row_sigmas;
    std::array<std::uint8_t, lanes> symbols;
    for (std::size_t i = 0; i < lanes; ++i) {
      row_means[i] = static_cast<std::uint32_t>(random());
      row_sigmas[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(random())) >> (random() % 32);
      symbols[i] = static_cast<std::uint8_t>(random() % (trial % 2 == 0 ? 128 : 256));
    }
    typename grid::row row;
    grid::prepare(row_means.data(), row_sigmas.data(), row);
    for (std::size_t i = 0; i < lanes; ++i) wrong += row.context[i] < 0 || row.context[i] >= grid::contexts;
    const std::size_t size = random() % 100;
    const auto bytes = std::make_unique<std::byte[]>(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(random() & random());
    bit_reader reader(std::span<const std::byte>(bytes.get(), size));
    const std::size_t n = 1 + random() % lanes;
    const auto values = std::make_unique<bits_type[]>(n);
    grid::decode(symbols.data(), row, reader, values.get(), static_cast<int>(n));
  }
  CHECK(wrong == 0);
}

/// The context by its description in the class comment.
template <class Format>
std::int32_t described_context(float mean, std::int32_t sigma) {
  using grid = value_grid<Format>;
  using reference = test::number_grid<Format>;
  constexpr int mantissa_bits = Format::mantissa_bits;
  const double size = std::isfinite(mean) ? std::min<double>(std::abs(mean), Format::from_bits(Format::max_finite).to_float()) : 0.0;
  const int step = reference::step(sigma);
  const double clamped = std::clamp(sigma, grid::min_sigma, grid::max_sigma) / 256.0;
  const double binade = size == 0 ? -1000 : std::floor(std::log2(size));
  const int ulp = static_cast<int>(std::max<double>(binade, Format::min_exponent)) - mantissa_bits;
  if (ulp <= step) {
    const auto linear_class = static_cast<std::int32_t>(std::clamp(std::floor(4 * (clamped - step)), 0.0, grid::linear_classes - 1.0));
    const double cells = reference::first_coarse - std::floor(std::ldexp(size, -step));
    const auto half_octaves = static_cast<std::int32_t>(std::floor(2 * std::log2(std::min(cells, 46.0)) + 1e-9));
    return grid::shared_contexts + linear_class * grid::distances + std::max(grid::distances - 1 - half_octaves, 0);
  }
  const auto value_class =
      static_cast<std::int32_t>(std::clamp(std::floor(4 * (clamped - ulp)) + grid::value_class_of_one, 0.0, grid::value_classes - 1.0));
  const double in_ulps = std::ldexp(size, -ulp);
  const auto offset = static_cast<std::int32_t>(std::floor(8 * (in_ulps - std::floor(in_ulps))));
  const auto mantissa = static_cast<std::int32_t>(std::floor(in_ulps)) % (1 << mantissa_bits);
  std::int32_t place = mantissa;
  if (mantissa_bits > 3) {
    const std::int32_t up = (1 << mantissa_bits) - mantissa;
    const std::int32_t down = mantissa + 1;
    place = up < 2 ? 4 : up < 4 ? 3 : up < 8 ? 2 : up < 16 ? 1 : down < 2 ? 7 : down < 4 ? 6 : down < 8 ? 5 : 0;
  }
  return (value_class * grid::places + place) * grid::offsets + offset;
}

template <class Format>
void check_contexts() {
  using grid = value_grid<Format>;
  constexpr int mantissa_bits = Format::mantissa_bits;
  std::mt19937_64 random(23);
  std::vector<bool> reached(static_cast<std::size_t>(grid::contexts));
  std::size_t wrong = 0;
  const auto visit = [&](float mean, std::int32_t sigma) {
    const std::int32_t context = prepared<Format>(mean, sigma).context[0];
    wrong += context != described_context<Format>(mean, sigma);
    reached[static_cast<std::size_t>(context)] = true;
  };
  for (const float mean : means<Format>())
    for (const std::int32_t sigma : sigmas<Format>()) visit(mean, sigma);
  for (int trial = 0; trial < 10000; ++trial) {
    const float mean = random_mean(random, Format::min_exponent + 8);
    visit(mean, Format::min_exponent * 256 + static_cast<std::int32_t>(random() % 6000) - 2500);
  }
  // Means in one binade whose values lie apart: some of each place, every offset, sigmas from far below the ulp to the linear part.
  const int binade = Format::min_exponent + 6;
  const std::int32_t ulp = (binade - mantissa_bits) * 256;
  constexpr int size = 1 << mantissa_bits;
  for (const int mantissa : {0, 1, 2, 3, 4, 5, 6, size / 2, size - 1, size - 2, size - 4, size - 12}) {
    for (int eighth = 0; eighth < 8; ++eighth) {
      const float mean =
          std::ldexp(static_cast<float>(8 * (std::clamp(mantissa, 0, size - 1) + size) + eighth), binade - mantissa_bits - 3);
      for (std::int32_t sigma = ulp - 1100; sigma < ulp + 600; sigma += 32) visit(mean, sigma);
    }
  }
  // Means in the evenly spaced part, in every cell, from the finest step on.
  const std::int32_t finest_step = (Format::min_exponent - mantissa_bits) * 256;
  for (int cell = 0; cell < grid::first_coarse_cell; ++cell)
    for (std::int32_t sigma = finest_step; sigma < finest_step + 768; sigma += 32)
      visit(std::ldexp(static_cast<float>(cell) + 0.5F, Format::min_exponent - mantissa_bits), sigma);
  CHECK(wrong == 0);
  const auto count = static_cast<std::int32_t>(std::count(reached.begin(), reached.end(), true));
  // Half an octave of distance holds no whole number, and short mantissas leave places and distances out.
  constexpr int used_places = std::min(grid::places, 1 << mantissa_bits);
  constexpr int used_distances = mantissa_bits == 2 ? 6 : mantissa_bits == 3 ? 8 : 11;
  CHECK(count == grid::value_classes * used_places * grid::offsets + grid::linear_classes * used_distances);

  // What is typical of a context lies in it.
  std::size_t missed = 0;
  for (std::int32_t c = 0; c < grid::contexts; ++c) {
    if (!reached[static_cast<std::size_t>(c)]) continue;
    const auto [mean, mean_cell, sigma] = grid::typical(c);
    const bool finest =
        c >= grid::shared_contexts && (c - grid::shared_contexts) / grid::distances < 8;  // D no finer than the smallest number
    const int step = Format::min_exponent - mantissa_bits + (finest ? 0 : 2);
    const auto at = static_cast<std::int32_t>(std::floor(256 * (std::log2(sigma) + step)));
    const auto row = prepared<Format>(static_cast<float>(std::ldexp(mean, step)), at);
    missed += row.context[0] != c || row.cell[0] != mean_cell || row.step[0] != step;
  }
  CHECK(missed == 0);
}

/// Halfway between the largest number of a cell and the smallest of the next, found by walking up the numbers.
template <class Format>
void check_lower_edges() {
  using grid = value_grid<Format>;
  constexpr int mantissa_bits = Format::mantissa_bits;
  CHECK(grid::lower_edge(0) == 0);
  CHECK(grid::first_coarse_cell == test::number_grid<Format>::first_coarse);
  double below = std::ldexp((2 << mantissa_bits) - 1, -mantissa_bits - 1);  // the largest number below 1
  double x = 1;
  std::size_t wrong = 0;
  const std::int32_t last = grid::first_coarse_cell + 20 * (1 << mantissa_bits);
  for (std::int32_t cell = 1; cell <= last;) {
    const bool starts = cell <= grid::first_coarse_cell ? x == cell : true;
    if (starts) wrong += grid::lower_edge(cell) != (below + x) / 2;
    cell += starts ? 1 : 0;
    below = x;
    x += std::exp2(std::floor(std::log2(x)) - mantissa_bits);
  }
  CHECK(wrong == 0);
}

}  // namespace

static_assert(residual_model<value_grid<bf16>> && residual_model<value_grid<fp16>> && residual_model<value_grid<fp8_e4m3>> &&
              residual_model<value_grid<fp8_e5m2>>);

TEST_CASE("value_grid: bf16, every pattern comes back and lies in its cell") { check_every_pattern<bf16>(); }
TEST_CASE("value_grid: fp16, every pattern comes back and lies in its cell") { check_every_pattern<fp16>(); }
TEST_CASE("value_grid: fp8, every pattern comes back and lies in its cell") {
  check_every_pattern<fp8_e4m3>();
  check_every_pattern<fp8_e5m2>();
}
TEST_CASE("value_grid: cells are ordered and their raw bits are complete") {
  check_cells<bf16>();
  check_cells<fp16>();
  check_cells<fp8_e4m3>();
  check_cells<fp8_e5m2>();
}
TEST_CASE("value_grid: the cells at zero are a prefix code") {
  check_near_zero<bf16>();
  check_near_zero<fp16>();
  check_near_zero<fp8_e4m3>();
  check_near_zero<fp8_e5m2>();
}
TEST_CASE("value_grid: negating value and mean changes only the sign") {
  check_folding<bf16>();
  check_folding<fp16>();
  check_folding<fp8_e4m3>();
  check_folding<fp8_e5m2>();
}
TEST_CASE("value_grid: means that are not finite act like zero") {
  for (const float mean : {infinity, -infinity, std::bit_cast<float>(0x7fc00000U), std::bit_cast<float>(0xff800001U), -0.0F}) {
    const auto row = prepared<bf16>(mean, -300);
    const auto zero = prepared<bf16>(0.0F, -300);
    CHECK(row.context == zero.context);
    CHECK(row.cell == zero.cell);
    CHECK(row.sign == zero.sign);
  }
}
TEST_CASE("value_grid: rows of different lanes, full and short, on every instruction set") {
  check_rows<bf16>();
  check_rows<fp16>();
  check_rows<fp8_e4m3>();
  check_rows<fp8_e5m2>();
}
TEST_CASE("value_grid: hostile symbols and bits stay in bounds") {
  check_hostile_input<bf16>();
  check_hostile_input<fp16>();
  check_hostile_input<fp8_e4m3>();
  check_hostile_input<fp8_e5m2>();
}
TEST_CASE("value_grid: contexts are what they are described to be") {
  check_contexts<bf16>();
  check_contexts<fp16>();
  check_contexts<fp8_e4m3>();
  check_contexts<fp8_e5m2>();
}
TEST_CASE("value_grid: lower edges are midpoints") {
  check_lower_edges<bf16>();
  check_lower_edges<fp16>();
  check_lower_edges<fp8_e4m3>();
  check_lower_edges<fp8_e5m2>();
}

// What streams depend on: these may never change.
TEST_CASE("value_grid: pinned contexts, symbols and bits") {
  using grid = value_grid<bf16>;
  const auto row = prepared<bf16>(1.37F, -420);
  std::array<std::uint16_t, 6> values{0x3fb0, 0x3f80, 0xbf9a, 0x0001, 0x7f80, 0x4123};
  std::array<std::uint8_t, 6> symbols{};
  grid::to_symbols(values.data(), row, symbols.data(), 6);
  std::array<std::byte, 32> buffer{};
  bit_writer writer(buffer);
  grid::put_raw(values.data(), row, symbols.data(), writer, 6);
  const auto raw = writer.finish();
  CHECK(row.context[0] == grid::shared_contexts + 9 * grid::distances);
  // D is 1/16, the mean's cell is 21: cells 22, 16, -20 and 0, then two values that are too far away.
  CHECK(symbols == std::array<std::uint8_t, 6>{65, 59, 23, 43, 127, 127});
  // Three bits for each of the first three, then the special ones: 7 halvings and 15 bits, 16 bits, 16 bits.
  REQUIRE(raw.size() == 8);
  CHECK(load_little_endian<std::uint64_t>(raw.data()) ==
        ((2U << 6) | (std::uint64_t{0x0001} << 16) | (std::uint64_t{0x7f80} << 31) | (std::uint64_t{0x4123} << 47)));
}

TEST_CASE("value_grid: pinned contexts where the format is coarser than the step") {
  using grid = value_grid<fp8_e4m3>;
  // In [16, 32) the numbers are 2 apart. 21.3 is 0.65 of an ulp above 20, whose mantissa is 2; sigma is 0.75 ulp, class -2 of one.
  const auto row = prepared<fp8_e4m3>(21.3F, 150);
  CHECK(row.step[0] == -2);
  CHECK(row.context[0] == ((grid::value_class_of_one - 2) * grid::places + 2) * grid::offsets + 5);
  CHECK(row.cell[0] == grid::first_coarse_cell + 2 * 8 + 2);  // the coarse part begins at 4, two binades below 16
  const std::array<std::uint8_t, 4> values{0x5a, 0x5b, 0x50, 0xda};
  std::array<std::uint8_t, 4> symbols{};
  grid::to_symbols(values.data(), row, symbols.data(), 4);
  CHECK(symbols == std::array<std::uint8_t, 4>{64, 65, 54, 127});
}

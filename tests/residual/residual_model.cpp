// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/numeric/bf16.hpp>
#include <kvexact/residual/residual_model.hpp>

using namespace kvexact;

namespace {

/// The least that a model can be: one context, one symbol, all bits raw.
struct all_raw {
  using format = bf16;
  using bits_type = bf16::bits_type;
  struct row {
    std::array<std::int32_t, row_lanes> context;
  };
  static constexpr std::uint32_t id = 99;
  static constexpr int alphabet = 1;
  static constexpr int escape_symbol = 0;
  static constexpr int shared_contexts = 1;
  static constexpr int contexts = 1;

  static void prepare(const std::uint32_t*, const std::int32_t*, row& out) noexcept { out.context.fill(0); }
  static void to_symbols(const bits_type*, const row&, std::uint8_t* symbols, int n) noexcept {
    for (int i = 0; i < n; ++i) symbols[i] = 0;
  }
  static void put_raw(const bits_type* values, const row&, const std::uint8_t*, bit_writer& writer, int n) noexcept {
    for (int i = 0; i < n; ++i) writer.put(values[i], 16);
  }
  static void decode(const std::uint8_t*, const row&, bit_reader& reader, bits_type* values, int n) noexcept {
    for (int i = 0; i < n; ++i) values[i] = static_cast<bits_type>(reader.get(16));
  }
};

struct decode_may_throw : all_raw {
  static void decode(const std::uint8_t*, const row&, bit_reader&, bits_type*, int) {}
};

struct changes_its_row : all_raw {
  static void put_raw(const bits_type*, row&, const std::uint8_t*, bit_writer&, int) noexcept {}
};

struct hides_its_contexts : all_raw {
 private:
  static constexpr int contexts = 1;
};

}  // namespace

static_assert(residual_model<all_raw>);
static_assert(!residual_model<decode_may_throw>);
static_assert(!residual_model<changes_its_row>);
static_assert(!residual_model<hides_its_contexts>);
static_assert(!residual_model<int>);

TEST_CASE("residual_model: a user's type is enough") {
  const std::array<std::uint32_t, row_lanes> means{};
  const std::array<std::int32_t, row_lanes> sigmas{};
  all_raw::row row;
  all_raw::prepare(means.data(), sigmas.data(), row);
  const std::array<std::uint16_t, 3> values{0x1234, 0xffff, 0};
  std::array<std::uint8_t, 3> symbols{};
  std::array<std::byte, 8> buffer;
  bit_writer writer(buffer);
  all_raw::to_symbols(values.data(), row, symbols.data(), 3);
  all_raw::put_raw(values.data(), row, symbols.data(), writer, 3);
  bit_reader reader(writer.finish());
  std::array<std::uint16_t, 3> decoded{};
  all_raw::decode(symbols.data(), row, reader, decoded.data(), 3);
  CHECK(decoded == values);
  CHECK(reader.finish());
}

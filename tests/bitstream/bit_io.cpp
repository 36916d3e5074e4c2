// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/bitstream/bit_io.hpp>

using namespace kvexact;

namespace {

struct group {
  std::uint32_t value;
  int count;
};

std::vector<group> random_groups(std::size_t size, int most, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<group> groups(size);
  for (group& each : groups) {
    each.count = static_cast<int>(random() % static_cast<unsigned>(most + 1));
    each.value = static_cast<std::uint32_t>(random() & ((std::uint64_t{1} << each.count) - 1));
  }
  return groups;
}

/// The same bits by the definition: least significant first, in bytes.
std::vector<std::byte> packed(const std::vector<group>& groups) {
  std::vector<bool> bits;
  for (const group& each : groups)
    for (int i = 0; i < each.count; ++i) bits.push_back(((each.value >> i) & 1U) != 0);
  std::vector<std::byte> bytes((bits.size() + 7) / 8);
  for (std::size_t i = 0; i < bits.size(); ++i)
    if (bits[i]) bytes[i / 8] |= std::byte{1} << (i % 8);
  return bytes;
}

std::uint64_t bit_count(const std::vector<group>& groups) {
  std::uint64_t sum = 0;
  for (const group& each : groups) sum += static_cast<std::uint64_t>(each.count);
  return sum;
}

/// A copy in memory of exactly its size, so that a sanitizer sees any read outside.
struct tight {
  explicit tight(std::span<const std::byte> from) : memory(new std::byte[from.size()]), size(from.size()) {
    std::copy(from.begin(), from.end(), memory.get());
  }
  [[nodiscard]] std::span<const std::byte> bytes() const { return {memory.get(), size}; }
  std::unique_ptr<std::byte[]> memory;
  std::size_t size;
};

}  // namespace

TEST_CASE("bit_io: random widths round trip") {
  for (std::uint64_t trial = 0; trial < 200; ++trial) {
    CAPTURE(trial);
    const auto groups = random_groups(trial % 67, trial % 5 == 0 ? 32 : static_cast<int>(trial % 33), trial);
    const auto expected = packed(groups);
    std::vector<std::byte> buffer(expected.size() + trial % 3);
    bit_writer writer(buffer);
    for (const group& each : groups) writer.put(each.value, each.count);
    CHECK(writer.bits() == bit_count(groups));
    const auto written = writer.finish();
    CHECK_FALSE(writer.overflowed());
    CHECK(std::equal(written.begin(), written.end(), expected.begin(), expected.end()));

    const tight copy(written);
    bit_reader reader(copy.bytes());
    std::size_t wrong = 0;
    for (const group& each : groups) wrong += reader.get(each.count) != each.value;
    CHECK(wrong == 0);
    CHECK(reader.finish());
  }
}

TEST_CASE("bit_io: a known pattern") {
  std::array<std::byte, 8> buffer{};
  bit_writer writer(buffer);
  writer.put(1, 1);
  writer.put(0, 2);
  writer.put(0x15, 5);
  writer.put(0, 0);
  writer.put(0xdeadbeef, 32);
  writer.put(3, 2);
  CHECK(writer.bits() == 42);
  const auto bytes = writer.finish();
  REQUIRE(bytes.size() == 6);
  CHECK(std::to_integer<int>(bytes[0]) == 0xa9);
  CHECK(std::to_integer<int>(bytes[1]) == 0xef);
  CHECK(std::to_integer<int>(bytes[2]) == 0xbe);
  CHECK(std::to_integer<int>(bytes[3]) == 0xad);
  CHECK(std::to_integer<int>(bytes[4]) == 0xde);
  CHECK(std::to_integer<int>(bytes[5]) == 0x03);
}

TEST_CASE("bit_io: a full buffer is reported and nothing outside is written") {
  constexpr std::byte guard{0x77};
  for (std::uint64_t trial = 0; trial < 40; ++trial) {
    const auto groups = random_groups(1 + trial, 32, 100 + trial);
    const std::size_t needed = packed(groups).size();
    for (std::size_t size = 0; size <= needed + 1; ++size) {
      std::vector<std::byte> memory(size + 32, guard);
      bit_writer writer{std::span(memory).subspan(16, size)};
      for (const group& each : groups) writer.put(each.value, each.count);
      const auto written = writer.finish();
      const bool fits = size >= needed;
      const bool intact = std::all_of(memory.begin(), memory.begin() + 16, [&](std::byte b) { return b == guard; }) &&
                          std::all_of(memory.end() - 16, memory.end(), [&](std::byte b) { return b == guard; });
      REQUIRE(intact);
      REQUIRE(writer.overflowed() == !fits);
      REQUIRE(written.size() == (fits ? needed : 0));
    }
  }
}

TEST_CASE("bit_io: past the end come zeros and finish says no") {
  const tight bytes(std::vector<std::byte>(5, std::byte{0xff}));
  for (const int width : {1, 3, 7, 8, 13, 31, 32}) {
    CAPTURE(width);
    bit_reader reader(bytes.bytes());
    std::size_t wrong = 0;
    for (int at = 0; at < 200; at += width) {
      const int inside = std::clamp(40 - at, 0, width);
      wrong += reader.get(width) != static_cast<std::uint32_t>((std::uint64_t{1} << inside) - 1);
    }
    CHECK(wrong == 0);
    CHECK_FALSE(reader.finish());
  }
  bit_reader nothing(std::span<const std::byte>{});
  CHECK(nothing.finish());
  CHECK(nothing.get(32) == 0);
  CHECK_FALSE(nothing.finish());
}

TEST_CASE("bit_io: finish wants every byte read and zero padding") {
  const std::array<std::byte, 3> bytes{std::byte{0xff}, std::byte{0xff}, std::byte{0x05}};
  const auto finishes_after = [&](std::span<const std::byte> data, int bits) {
    bit_reader reader(data);
    for (int i = 0; i < bits; ++i) static_cast<void>(reader.get(1));
    return reader.finish();
  };
  for (int bits = 0; bits < 40; ++bits) {
    CAPTURE(bits);
    CHECK(finishes_after(bytes, bits) == (bits >= 19 && bits <= 24));
  }
  // Any set padding bit is seen.
  for (int bit = 0; bit < 8; ++bit) {
    const std::array<std::byte, 1> one{std::byte{1} << bit};
    for (int bits = 1; bits <= 8; ++bits) CHECK(finishes_after(one, bits) == (bits > bit));
  }
}

TEST_CASE("bit_io: a row reads what single reads give") {
  constexpr int lanes = 32;
  std::mt19937_64 random(9);
  std::vector<std::byte> bytes(517);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  for (int most = 0; most <= 32; ++most) {
    CAPTURE(most);
    for (const std::size_t size : std::array<std::size_t, 12>{0, 1, 7, 64, 128, 131, 132, 135, 136, 137, 300, 517}) {
      const tight copy{std::span(bytes).first(size)};
      bit_reader rows(copy.bytes());
      bit_reader singles(copy.bytes());
      for (int start = 0; start < most % 9; ++start) REQUIRE(rows.get(1) == singles.get(1));
      std::size_t wrong = 0;
      for (int row = 0; row < 12; ++row) {
        std::array<std::int32_t, lanes> counts;
        std::array<std::uint32_t, lanes> values;
        for (auto& count : counts) count = row % 4 == 0 ? most : static_cast<std::int32_t>(random() % static_cast<unsigned>(most + 1));
        rows.get_row<lanes>(counts.data(), values.data());
        for (std::size_t i = 0; i < lanes; ++i) wrong += values[i] != singles.get(counts[i]);
        wrong += rows.finish() != singles.finish();
      }
      CHECK(wrong == 0);
      // Both stand at the same place.
      CHECK(rows.get(5) == singles.get(5));
    }
  }
}

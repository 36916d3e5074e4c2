// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/bitstream/byte_io.hpp>

using namespace kvexact;

namespace {

std::vector<std::byte> bytes_of(std::initializer_list<unsigned> values) {
  std::vector<std::byte> bytes;
  for (const unsigned value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

}  // namespace

TEST_CASE("byte_io: little-endian at any address") {
  for (std::size_t at = 0; at < 8; ++at) {
    std::array<std::byte, 17> buffer;
    buffer.fill(std::byte{0xee});
    store_little_endian(buffer.data() + at, std::uint64_t{0x0123456789abcdef});
    for (std::size_t i = 0; i < buffer.size(); ++i) {
      const auto expected = static_cast<unsigned>(i < at || i >= at + 8 ? 0xeeU : (0x0123456789abcdefU >> (8 * (i - at))) & 0xffU);
      CHECK(std::to_integer<unsigned>(buffer[i]) == expected);
    }
    CHECK(load_little_endian<std::uint64_t>(buffer.data() + at) == 0x0123456789abcdefU);
    CHECK(load_little_endian<std::uint32_t>(buffer.data() + at) == 0x89abcdefU);
    CHECK(load_little_endian<std::uint16_t>(buffer.data() + at) == 0xcdefU);
    CHECK(load_little_endian<std::uint8_t>(buffer.data() + at) == 0xefU);
  }
}

TEST_CASE("byte_io: writer and sink append and a reader reads in order") {
  std::vector<std::byte> bytes = bytes_of({0x99});
  byte_writer out(bytes);
  out.put(std::uint8_t{0xfe});
  out.put(std::uint16_t{0x1122});
  vector_sink sink(bytes);
  CHECK(sink(bytes_of({1, 2, 3})));
  CHECK(sink({}));
  out.put(std::uint32_t{0x33445566});
  out.put(std::uint64_t{0x778899aabbccddee});
  CHECK(bytes == bytes_of({0x99, 0xfe, 0x22, 0x11, 1, 2, 3, 0x66, 0x55, 0x44, 0x33, 0xee, 0xdd, 0xcc, 0xbb, 0xaa, 0x99, 0x88, 0x77}));

  byte_reader in(bytes);
  CHECK(in.get<std::uint8_t>() == 0x99);
  CHECK(in.get<std::uint8_t>() == 0xfe);
  CHECK(in.get<std::uint16_t>() == 0x1122);
  const auto piece = in.get_bytes(3);
  CHECK(piece.data() == bytes.data() + 4);
  CHECK(piece.size() == 3);
  CHECK(in.get_bytes(0).empty());
  CHECK(in.get<std::uint32_t>() == 0x33445566);
  CHECK(in.position() == 11);
  CHECK(in.remaining() == 8);
  CHECK(in.get<std::uint64_t>() == 0x778899aabbccddee);
  CHECK(in.position() == bytes.size());
  CHECK(in.remaining() == 0);
  CHECK(in.ok());
  CHECK(in.get_bytes(0).empty());
  CHECK(in.ok());
}

TEST_CASE("byte_io: past the end a reader gives zeros and fails for good") {
  const std::vector<std::byte> bytes(7, std::byte{0xff});
  SUBCASE("integer") {
    byte_reader in(bytes);
    CHECK(in.get<std::uint64_t>() == 0);
    CHECK_FALSE(in.ok());
    CHECK(in.get<std::uint8_t>() == 0);  // even though a byte would have been there
    CHECK(in.remaining() == 0);
    CHECK_FALSE(in.ok());
  }
  SUBCASE("bytes") {
    for (const std::uint64_t count : {std::uint64_t{8}, std::uint64_t{1} << 32, std::numeric_limits<std::uint64_t>::max()}) {
      byte_reader in(bytes);
      CHECK(in.get_bytes(count).empty());
      CHECK_FALSE(in.ok());
      CHECK(in.get_bytes(0).empty());
      CHECK_FALSE(in.ok());
    }
  }
  SUBCASE("after a start") {
    byte_reader in(bytes);
    CHECK(in.get<std::uint32_t>() == 0xffffffffU);
    CHECK(in.get_bytes(std::numeric_limits<std::uint64_t>::max() - 2).empty());
    CHECK_FALSE(in.ok());
  }
  SUBCASE("nothing at all") {
    byte_reader in(std::span<const std::byte>{});
    CHECK(in.ok());
    CHECK(in.get<std::uint8_t>() == 0);
    CHECK_FALSE(in.ok());
  }
}

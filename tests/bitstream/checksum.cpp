// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/bitstream/checksum.hpp>

using namespace kvexact;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

}  // namespace

// Expected values of XXH64 with seed 0, from its definition.
TEST_CASE("checksum: XXH64 with seed 0") {
  CHECK(checksum({}) == 0xef46db3751d8e999U);
  CHECK(checksum(bytes_of("")) == 0xef46db3751d8e999U);
  CHECK(checksum(bytes_of("a")) == 0xd24ec4f1a98c6e5bU);
  CHECK(checksum(bytes_of("abc")) == 0x44bc2cf5ad770999U);
  std::vector<std::byte> counting(101);
  for (std::size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<std::byte>(i);
  CHECK(checksum(counting) == 0xe99038495f85381eU);
}

TEST_CASE("checksum: every bit counts") {
  std::vector<std::byte> bytes(70, std::byte{0x5c});
  const std::uint64_t before = checksum(bytes);
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK(checksum(bytes) != before);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  CHECK(checksum(std::span(bytes).first(69)) != before);
}

TEST_CASE("checksum: pieces chain through the seed") {
  chained_checksum none;
  CHECK(none.digest() == 0);

  chained_checksum one;
  one.update(bytes_of("abc"));
  CHECK(one.digest() == checksum(bytes_of("abc")));

  chained_checksum two;
  two.update(bytes_of("ab"));
  two.update(bytes_of("c"));
  CHECK(two.digest() == 0x7807df9d3024b0f2U);
  CHECK(two.digest() != one.digest());

  chained_checksum shifted;
  shifted.update(bytes_of("a"));
  shifted.update(bytes_of("bc"));
  CHECK(shifted.digest() != two.digest());

  chained_checksum with_empty = one;
  with_empty.update({});
  CHECK(with_empty.digest() != one.digest());
}

// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/packed_codes.hpp>

using namespace kvexact::detail;

namespace {

template <int Bits>
void check_bits() {
  CAPTURE(Bits);
  for (std::size_t count = 0; count < 150; ++count) {
    std::vector<std::uint8_t> codes(count);
    for (std::size_t i = 0; i < count; ++i) codes[i] = static_cast<std::uint8_t>((i * 37 + i * i * 11 + count) & ((1U << Bits) - 1));
    std::vector<std::byte> packed(packed_code_bytes(count, Bits) + 1, std::byte{0xee});
    pack_codes<Bits>(codes.data(), count, packed.data());
    REQUIRE(packed.back() == std::byte{0xee});
    // The first code is in the lowest bits of the first byte, and unused bits are 0.
    for (std::size_t bit = 0; bit < 8 * (packed.size() - 1); ++bit) {
      const unsigned expected = bit / Bits < count ? (codes[bit / Bits] >> (bit % Bits)) & 1U : 0U;
      REQUIRE(((static_cast<unsigned>(packed[bit / 8]) >> (bit % 8)) & 1U) == expected);
    }
    std::vector<std::uint8_t> back(count + 1, 0xee);
    unpack_codes<Bits>(packed.data(), count, back.data());
    REQUIRE(back.back() == 0xee);
    back.pop_back();
    REQUIRE(back == codes);
    for (const std::size_t group : {std::size_t{1}, std::size_t{7}, std::size_t{32}, std::size_t{200}}) {
      std::size_t next = 0;
      for (code_runs<Bits> run(packed.data(), count, group); run.next();) {
        REQUIRE(run.begin == next);
        REQUIRE(run.end > run.begin);
        for (std::size_t c = run.begin; c < run.end; ++c) {
          REQUIRE(c / group == run.group);
          REQUIRE(run.codes[c - run.begin] == codes[c]);
        }
        next = run.end;
      }
      REQUIRE(next == count);
    }
  }
}

}  // namespace

TEST_CASE("packed_codes: any number of codes of any number of bits") {
  [&]<int... I>(std::integer_sequence<int, I...>) { (check_bits<I + 1>(), ...); }(std::make_integer_sequence<int, 8>());
}

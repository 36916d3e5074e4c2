// SPDX-License-Identifier: Apache-2.0
#include <cfenv>
#include <cstdint>
#include <type_traits>

#include <doctest/doctest.h>

#include <kvexact/numeric/small_float.hpp>

#include "number_line.hpp"

using namespace kvexact;

TEST_CASE("small_float: formats between and beside the named ones") {
  SUBCASE("4 + 3 bits with infinities") {
    test::check_format<small_float<4, 3, float_specials::ieee>>({4, 3, 7, true, 240.0, 256.0, 0x1p-9});
  }
  SUBCASE("5 + 2 bits without infinities") {
    test::check_format<small_float<5, 2, float_specials::nan_only>>({5, 2, 15, false, 98304.0, 114688.0, 0x1p-16});
  }
  SUBCASE("7 bits in a byte") { test::check_format<small_float<4, 2, float_specials::ieee>>({4, 2, 7, true, 224.0, 256.0, 0x1p-8}); }
  SUBCASE("9 bits in two bytes") {
    test::check_format<small_float<5, 3, float_specials::ieee>>({5, 3, 15, true, 61440.0, 65536.0, 0x1p-17});
  }
  SUBCASE("6 + 9 bits") { test::check_format<small_float<6, 9, float_specials::ieee>>({6, 9, 31, true, 0x1.FF8p31, 0x1p32, 0x1p-39}); }
  SUBCASE("7 + 8 bits without infinities") {
    test::check_format<small_float<7, 8, float_specials::nan_only>>({7, 8, 63, false, 0x1.FEp64, 0x1.FFp64, 0x1p-70});
  }
}

TEST_CASE("small_float: is its bits and nothing more") {
  using wide = small_float<8, 7, float_specials::ieee>;
  using narrow = small_float<4, 3, float_specials::nan_only>;
  static_assert(std::is_same_v<wide::bits_type, std::uint16_t> && std::is_same_v<narrow::bits_type, std::uint8_t>);
  static_assert(sizeof(wide) == 2 && sizeof(narrow) == 1);
  static_assert(std::is_trivially_copyable_v<wide> && std::is_aggregate_v<wide>);
  static_assert(wide{}.bits == 0 && wide::from_bits(0xffff).bits == 0xffff);
}

TEST_CASE("small_float: rounding ignores the rounding mode of the environment") {
  using half = small_float<5, 10, float_specials::ieee>;
  const test::format described{5, 10, 15, true, 65504.0, 65536.0, 0x1p-24};
  const test::number_line line(described);
  const std::vector<float> floats = test::critical_floats(line);
  const int before = std::fegetround();
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    CAPTURE(mode);
    REQUIRE(std::fesetround(mode) == 0);
    test::check_rounding<half>(described, line, floats);
    test::check_every_pattern<half>(described);
    REQUIRE(std::fesetround(before) == 0);
  }
}

TEST_CASE_TEMPLATE("small_float: counts into any unsigned type", Counter, unsigned char, unsigned, std::uint64_t) {
  using narrow = small_float<4, 3, float_specials::nan_only>;
  Counter counted = 7;
  CHECK(narrow::from_float_saturating(1.0e9F, counted).bits == 0x7e);
  CHECK(narrow::from_float_saturating(-1.0e9F, counted).bits == 0xfe);
  CHECK(narrow::from_float_saturating(464.0F, counted).bits == 0x7e);
  CHECK(counted == 9);
}

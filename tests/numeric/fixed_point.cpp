// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include <doctest/doctest.h>

#include <kvexact/numeric/fixed_point.hpp>

using namespace kvexact;

namespace {

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

/// Every exponent, the ends of the significand, and random ones.
template <class Visit>
void for_positive_normals(Visit&& visit) {
  std::mt19937_64 random(3);
  for (std::uint32_t exponent = 1; exponent < 255; ++exponent) {
    for (const std::uint32_t mantissa : {0U, 1U, 2U, 0x3fffffU, 0x400000U, 0x400001U, 0x3504f3U, 0x7ffffeU, 0x7fffffU})
      visit((exponent << 23) | mantissa);
    for (int i = 0; i < 300; ++i) visit((exponent << 23) | static_cast<std::uint32_t>(random() & 0x7fffffU));
  }
}

void check_quotient(std::uint32_t numerator, std::uint32_t divisor, std::uint32_t quotient, std::size_t& wrong) {
  const long double expected =
      static_cast<long double>(std::bit_cast<float>(numerator)) / static_cast<long double>(std::bit_cast<float>(divisor));
  const long double actual = std::bit_cast<float>(quotient);
  const long double size = std::abs(expected);
  constexpr long double smallest = std::numeric_limits<float>::min();
  constexpr long double largest = std::numeric_limits<float>::max();
  bool good = std::signbit(actual) == std::signbit(expected);
  if (size < smallest * (1 - 0x1p-22L)) {
    good = good && actual == 0;
  } else if (size >= largest * (1 + 0x1p-22L)) {
    good = good && std::abs(actual) == largest;
  } else {
    const bool close = std::abs(actual - expected) <= size * 0x1p-22L && std::abs(actual) <= size;
    good = good && (close || (size < smallest * (1 + 0x1p-22L) && actual == 0) || (size > largest && std::abs(actual) == largest));
  }
  wrong += good ? 0U : 1U;
}

}  // namespace

TEST_CASE("fixed_point: positive normal numbers") {
  CHECK(is_positive_normal(bits_of(1.0F)));
  CHECK(is_positive_normal(bits_of(std::numeric_limits<float>::min())));
  CHECK(is_positive_normal(bits_of(std::numeric_limits<float>::max())));
  for (const float other :
       {0.0F, -0.0F, -1.0F, std::numeric_limits<float>::denorm_min(), std::nextafter(std::numeric_limits<float>::min(), 0.0F),
        std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()})
    CHECK_FALSE(is_positive_normal(bits_of(other)));
  CHECK_FALSE(is_positive_normal(0xffffffffU));
}

TEST_CASE("fixed_point: log2 in 256ths") {
  static_assert(log2_in_256ths(0x3f800000U) == 0 && log2_in_256ths(0x40000000U) == 256 && log2_in_256ths(0x3f000000U) == -256);
  CHECK(log2_in_256ths(bits_of(1.41421366F)) == 128);  // just above the root
  CHECK(log2_in_256ths(bits_of(1.41421354F)) == 127);  // just below
  CHECK(log2_in_256ths(bits_of(10.0F)) == 850);        // 850.41
  CHECK(log2_in_256ths(bits_of(0.1F)) == -851);        // -850.41
  CHECK(log2_in_256ths(0x00800000U) == -126 * 256);
  CHECK(log2_in_256ths(0x7f7fffffU) == 128 * 256 - 1);
  std::size_t wrong = 0;
  for_positive_normals([&](std::uint32_t bits) {
    const long double exact = 256 * std::log2(static_cast<long double>(std::bit_cast<float>(bits)));
    const auto floor = static_cast<std::int32_t>(std::floor(exact));
    const std::int32_t actual = log2_in_256ths(bits);
    const bool at_a_step = exact - static_cast<long double>(floor) < 1e-6L && exact != static_cast<long double>(floor);
    wrong += actual != floor && !(at_a_step && actual == floor - 1);
  });
  CHECK(wrong == 0);
}

TEST_CASE("fixed_point: log2 never falls") {
  std::size_t wrong = 0;
  std::int32_t last = log2_in_256ths(0x3f7fff00U);
  for (std::uint32_t bits = 0x3f7fff00U; bits < 0x40800100U; bits += 7) {
    const std::int32_t now = log2_in_256ths(bits);
    wrong += now < last || now > last + 1;
    last = now;
  }
  CHECK(wrong == 0);
}

TEST_CASE("integer_divider: quotients are truncated and within their bound") {
  std::mt19937_64 random(4);
  std::size_t wrong = 0;
  for_positive_normals([&](std::uint32_t divisor) {
    const integer_divider by(divisor);
    for (int i = 0; i < 4; ++i) {
      const auto numerator = static_cast<std::uint32_t>((random() & 0x807fffffU) | ((1 + random() % 254) << 23));
      check_quotient(numerator, divisor, by(numerator), wrong);
    }
    // Near the divisor, where the quotient is near 1 or the significands meet the carry.
    for (const std::uint32_t numerator : {divisor, divisor - 1, divisor + 1, divisor ^ 0x80000000U}) {
      if (!is_positive_normal(numerator & 0x7fffffffU)) continue;
      check_quotient(numerator, divisor, by(numerator), wrong);
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("integer_divider: powers of two are exact") {
  std::size_t wrong = 0;
  for_positive_normals([&](std::uint32_t numerator) {
    const float x = std::bit_cast<float>(numerator);
    for (const float divisor : {1.0F, 2.0F, 0.5F, 0x1p-20F, 0x1p30F}) {
      const float quotient = x / divisor;
      const double real = static_cast<double>(x) / divisor;
      const bool normal = real >= std::numeric_limits<float>::min() && real <= std::numeric_limits<float>::max();
      if (normal) wrong += integer_divider(bits_of(divisor))(numerator) != bits_of(quotient);
      if (normal) wrong += integer_divider(bits_of(divisor))(numerator | 0x80000000U) != bits_of(-quotient);
    }
    wrong += integer_divider()(numerator) != numerator;
  });
  CHECK(wrong == 0);
}

TEST_CASE("integer_divider: divisors that are not positive and normal divide by 1") {
  for (const float divisor : {0.0F, -0.0F, -3.0F, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
    CHECK(integer_divider(bits_of(divisor))(bits_of(0.3F)) == bits_of(0.3F));
    CHECK(integer_divider(bits_of(divisor))(bits_of(-7e30F)) == bits_of(-7e30F));
  }
}

TEST_CASE("integer_divider: specials") {
  const integer_divider by(bits_of(3.0F));
  for (const std::uint32_t bits : {0x7f800000U, 0xff800000U, 0x7f800001U, 0x7fc00000U, 0xffffffffU, 0xffc12345U}) CHECK(by(bits) == bits);
  for (const std::uint32_t bits : {0U, 1U, 0x7fffffU}) {
    CHECK(by(bits) == 0);
    CHECK((by(bits | 0x80000000U) & 0x7fffffffU) == 0);
  }
  CHECK(by(0x00800000U) == 0);  // a third of the smallest normal number
  CHECK(integer_divider(bits_of(0.25F))(0x7f000000U) == 0x7f7fffffU);
  CHECK(integer_divider(bits_of(0.25F))(0xff000000U) == 0xff7fffffU);
  CHECK(integer_divider(0x00800000U)(0x7f7fffffU) == 0x7f7fffffU);
  CHECK(integer_divider(0x7f7fffffU)(0x00800000U) == 0);
}

// What streams depend on: these may never change.
TEST_CASE("integer_divider: pinned results") {
  CHECK(integer_divider(bits_of(3.0F))(bits_of(1.0F)) == 0x3eaaaaaaU);
  CHECK(integer_divider(bits_of(10.0F))(bits_of(1.0F)) == 0x3dccccccU);
  CHECK(integer_divider(bits_of(0.1F))(bits_of(-1.0F)) == 0xc11fffffU);
  CHECK(integer_divider(bits_of(0.0123F))(bits_of(448.0F)) == 0x470e46c3U);
}

namespace {

constexpr long double largest = largest_fixed;
/// Doubles and floats are exact in long double where this is needed.
std::int32_t expected_fixed(long double value, int unit) {
  return static_cast<std::int32_t>(std::trunc(std::clamp(std::ldexp(value, -unit), -largest, largest)));
}
/// What `to_fixed` does with a number for many units around its size.
template <class Visit>
void for_numbers_and_units(Visit&& visit) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 40000; ++i) {
    auto bits = static_cast<std::uint32_t>(random());
    if (i % 8 == 0) bits &= 0x807fffffU;  // subnormal numbers
    if (i % 8 == 1) bits &= 0xff800000U;  // powers of two
    if (i % 8 == 2) bits |= 0x007fffffU;
    if ((bits & 0x7f800000U) == 0x7f800000U) continue;
    const int exponent = static_cast<int>((bits >> 23) & 0xffU) - 127;
    visit(bits, std::clamp(exponent - 35 + static_cast<int>(random() % 45), -200, 200));
    visit(bits, static_cast<int>(random() % 401) - 200);
  }
}

}  // namespace

TEST_CASE("fixed_point: to_fixed truncates and saturates") {
  std::size_t wrong = 0;
  for_numbers_and_units([&](std::uint32_t bits, int unit) {
    // Subnormal numbers in units beyond all use count as too large.
    if ((bits & 0x7f800000U) == 0 && unit < -155) return;
    wrong += to_fixed(bits, unit) != expected_fixed(std::bit_cast<float>(bits), unit);
  });
  CHECK(wrong == 0);
  for (const std::uint32_t special : {0x7f800000U, 0xff800000U, 0x7fc00000U, 0x7f800001U, 0xffffffffU, 0U, 0x80000000U})
    for (const int unit : {-200, -20, 0, 20, 200}) CHECK(to_fixed(special, unit) == 0);
  CHECK(to_fixed(bits_of(1.0F), -29) == 1 << 29);
  CHECK(to_fixed(bits_of(1.0F), -30) == largest_fixed);
  CHECK(to_fixed(bits_of(-1.0F), -31) == -largest_fixed);
  CHECK(to_fixed(bits_of(-1.99F), 0) == -1);
  CHECK(to_fixed(0x7f7fffffU, 98) == 0x3fffffc0);  // 24 bits at the top
}

TEST_CASE("fixed_point: product_to_fixed truncates and saturates") {
  std::mt19937_64 random(6);
  std::size_t wrong = 0;
  for_numbers_and_units([&](std::uint32_t a, int) {
    auto b = static_cast<std::uint32_t>(random());
    if (random() % 8 == 0) b &= 0x807fffffU;
    if ((b & 0x7f800000U) == 0x7f800000U) return;
    const long double product = static_cast<long double>(std::bit_cast<float>(a)) * static_cast<long double>(std::bit_cast<float>(b));
    const int near = product == 0 ? 0 : std::ilogb(product) - 40 + static_cast<int>(random() % 60);
    for (const int unit : {near, static_cast<int>(random() % 401) - 200}) {
      if (unit < -200 || unit > 200) continue;
      const bool both_normal = (a & 0x7f800000U) != 0 && (b & 0x7f800000U) != 0;
      const std::int32_t actual = product_to_fixed(a, b, unit);
      wrong += actual != expected_fixed(product, unit) && (both_normal || std::abs(actual) != largest_fixed);
    }
  });
  CHECK(wrong == 0);
  CHECK(product_to_fixed(bits_of(1.5F), bits_of(-0.1F), -20) == -157286);
  CHECK(product_to_fixed(0, bits_of(7.0F), -200) == 0);
  CHECK(product_to_fixed(0x7f7fffffU, 0xff7fffffU, 0) == -largest_fixed);
  CHECK(product_to_fixed(bits_of(1.0F), bits_of(3.0F), -20) == to_fixed(bits_of(3.0F), -20));
}

TEST_CASE("fixed_point: from_fixed keeps 24 bits, or 23 and what an eighth byte leaves of them") {
  std::mt19937_64 random(7);
  std::size_t wrong = 0;
  const auto check = [&](std::int32_t value, int unit) {
    const std::int32_t magnitude = std::abs(value);
    const std::int32_t kept = magnitude >= 1 << 24 ? magnitude / 128 * 128 : magnitude;
    const long double real = std::ldexp(static_cast<long double>(kept), unit);
    const std::uint32_t sign = value < 0 ? 0x80000000U : 0U;
    const std::uint32_t expected = real >= std::ldexp(1.0L, 128)               ? sign | 0x7f7fffffU
                                   : real < static_cast<long double>(0x1p-126) ? sign
                                                                               : sign | bits_of(static_cast<float>(real));
    wrong += from_fixed(value, unit) != expected;
    // Back in the same unit nothing more is lost.
    if (real >= static_cast<long double>(0x1p-126) && real < std::ldexp(1.0L, 128))
      wrong += std::abs(to_fixed(from_fixed(value, unit), unit)) != kept;
  };
  for (int i = 0; i < 40000; ++i) {
    const auto value =
        static_cast<std::int32_t>(static_cast<std::int64_t>(random() % (2 * (std::uint64_t{1} << 30) - 1)) - largest_fixed) >>
        (random() % 30);
    check(value, static_cast<int>(random() % 401) - 200);
    check(value, static_cast<int>(random() % 60) - 40);
  }
  for (const std::int32_t value :
       {0, 1, -1, (1 << 24) - 1, 1 << 24, (1 << 24) + 127, (1 << 24) + 128, -(1 << 24) - 1, largest_fixed, -largest_fixed})
    for (int unit = -200; unit <= 200; ++unit) check(value, unit);
  CHECK(wrong == 0);
  CHECK(saturate_fixed(std::int64_t{1} << 40) == largest_fixed);
  CHECK(saturate_fixed(-(std::int64_t{1} << 30)) == -largest_fixed);
  CHECK(saturate_fixed(-5) == -5);
}

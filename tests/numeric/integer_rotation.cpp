// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>

#include <doctest/doctest.h>

#include <kvexact/numeric/integer_rotation.hpp>

using namespace kvexact;

namespace {

constexpr long double full_turn = 6.283185307179586476925286766559L;
constexpr integer_rotation no_turn{1 << 30, 0};

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

/// The greater error of cosine and sine at an angle.
long double error_at(std::uint64_t turns) {
  const integer_rotation by = rotation_by_turns(turns);
  const long double angle = std::ldexp(static_cast<long double>(turns), -64) * full_turn;
  return std::max(std::abs(std::ldexp(static_cast<long double>(by.cosine), -30) - std::cos(angle)),
                  std::abs(std::ldexp(static_cast<long double>(by.sine), -30) - std::sin(angle)));
}

void check_rotation(float a, float b, std::uint64_t turns, std::size_t& wrong) {
  const integer_pair pair = integer_pair::from_bits(bits_of(a), bits_of(b));
  const integer_rotation by = rotation_by_turns(turns);
  const long double angle = std::ldexp(static_cast<long double>(turns), -64) * full_turn;
  const long double first = a * std::cos(angle) - b * std::sin(angle);
  const long double second = a * std::sin(angle) + b * std::cos(angle);
  // The rotation's error, the pair's common exponent and the result's own truncation.
  const long double bound = std::max(std::abs(a), std::abs(b)) * 0x1p-25L;
  for (const auto& [actual, expected] : {std::pair{float_of(pair.rotated_first(by)), first}, {float_of(pair.rotated_second(by)), second}})
    wrong += std::abs(actual - expected) > bound + std::abs(expected) * 0x1p-23L;
}

}  // namespace

TEST_CASE("integer_rotation: quadrant borders are exact") {
  const auto is = [](std::uint64_t turns, std::int32_t cosine, std::int32_t sine) {
    const integer_rotation by = rotation_by_turns(turns);
    return by.cosine == cosine && by.sine == sine;
  };
  constexpr std::int32_t one = 1 << 30;
  CHECK(is(0, one, 0));
  CHECK(is(std::uint64_t{1} << 62, 0, one));
  CHECK(is(std::uint64_t{2} << 62, -one, 0));
  CHECK(is(std::uint64_t{3} << 62, 0, -one));
}

TEST_CASE("integer_rotation: within its bound of sine and cosine") {
  long double worst = 0;
  for (std::uint64_t quadrant = 0; quadrant < 4; ++quadrant) {
    for (const std::uint64_t near : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{0xffffffff}, std::uint64_t{1} << 32,
                                     std::uint64_t{1} << 33, std::uint64_t{1} << 40, std::uint64_t{1} << 50}) {
      worst = std::max(worst, error_at((quadrant << 62) + near));
      worst = std::max(worst, error_at((quadrant << 62) - 1 - near));
      worst = std::max(worst, error_at((quadrant << 62) + (std::uint64_t{1} << 61) + near));
    }
  }
  constexpr std::uint64_t steps = 40000;
  for (std::uint64_t i = 0; i < steps; ++i) worst = std::max(worst, error_at(i * (~std::uint64_t{0} / steps)));
  std::mt19937_64 random(6);
  for (int i = 0; i < 20000; ++i) worst = std::max(worst, error_at(random()));
  CHECK(worst < 0x1p-27L);
}

TEST_CASE("integer_rotation: far positions wrap without loss") {
  std::mt19937_64 random(7);
  std::size_t wrong = 0;
  for (int i = 0; i < 2000; ++i) {
    const std::uint64_t frequency = random() >> (random() % 40);
    const std::uint64_t position = i < 100 ? (std::uint64_t{1} << 40) - static_cast<std::uint64_t>(i) : random() >> (24 + random() % 40);
    // position * frequency modulo one turn in two halves of 32 bits, so that no product wraps.
    const long double high = std::fmod(static_cast<long double>(position) * static_cast<long double>(frequency >> 32), 0x1p32L) / 0x1p32L;
    const long double low =
        std::fmod(static_cast<long double>(position) * static_cast<long double>(frequency & 0xffffffffU), 0x1p64L) / 0x1p64L;
    const bool exact = position < (std::uint64_t{1} << 32);
    const long double angle = (high + low) * full_turn;
    const integer_rotation by = rotation_by_turns(position * frequency);
    // Above 2^32 the products have up to 72 bits and long double keeps 64 of them.
    const long double bound = 0x1p-27L + (exact ? 0.0L : 0x1p-20L);
    wrong += std::abs(std::ldexp(static_cast<long double>(by.cosine), -30) - std::cos(angle)) > bound;
    wrong += std::abs(std::ldexp(static_cast<long double>(by.sine), -30) - std::sin(angle)) > bound;
  }
  CHECK(wrong == 0);
}

TEST_CASE("integer_pair: pairs keep their values up to a common exponent") {
  std::mt19937_64 random(8);
  std::size_t wrong = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto a = static_cast<std::uint32_t>((random() & 0x807fffffU) | ((1 + random() % 254) << 23));
    std::uint32_t b = static_cast<std::uint32_t>(random());
    if (i % 3 == 0) b = static_cast<std::uint32_t>((random() & 0x807fffffU) | (a & 0x7f800000U));
    if (!std::isfinite(float_of(b)) || (b & 0x7f800000U) == 0) continue;
    const integer_pair pair = integer_pair::from_bits(a, b);
    const long double most = std::max(std::abs(float_of(a)), std::abs(float_of(b)));
    for (const auto& [kept, value] : {std::pair{pair.first, float_of(a)}, {pair.second, float_of(b)}}) {
      const long double actual = std::ldexp(static_cast<long double>(kept), pair.exponent);
      wrong += std::abs(actual) > std::abs(value) || std::abs(actual - static_cast<long double>(value)) > most * 0x1p-28L;
    }
    // The larger one is exact.
    const bool first_is_larger = (a & 0x7f800000U) >= (b & 0x7f800000U);
    const std::int32_t kept = first_is_larger ? pair.first : pair.second;
    wrong += std::ldexp(static_cast<long double>(kept), pair.exponent) != static_cast<long double>(float_of(first_is_larger ? a : b));
  }
  CHECK(wrong == 0);
}

TEST_CASE("integer_pair: rotates like real numbers") {
  std::mt19937_64 random(9);
  std::size_t wrong = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto number = [&](int spread) {
      return std::ldexp(static_cast<float>(static_cast<std::int64_t>(random()) >> 40),
                        static_cast<int>(random() % static_cast<unsigned>(spread)) - spread / 2);
    };
    check_rotation(number(8), number(8), random(), wrong);
    check_rotation(number(100), number(100), random(), wrong);
  }
  for (const float a : {0.0F, -0.0F, 1.0F, -1.5F})
    for (const float b : {0.0F, 1.0F, 1e-30F, -2.0F})
      for (std::uint64_t eighth = 0; eighth < 8; ++eighth) check_rotation(a, b, eighth << 61, wrong);
  CHECK(wrong == 0);
}

TEST_CASE("integer_pair: by zero turns it is the identity where the exponents are near") {
  std::mt19937_64 random(10);
  std::size_t wrong = 0;
  for (int i = 0; i < 5000; ++i) {
    const auto a = static_cast<std::uint32_t>((random() & 0x807fffffU) | ((100 + random() % 6) << 23));
    const auto b = static_cast<std::uint32_t>((random() & 0x807fffffU) | ((100 + random() % 6) << 23));
    const integer_pair pair = integer_pair::from_bits(a, b);
    wrong += pair.rotated_first(no_turn) != a || pair.rotated_second(no_turn) != b;
    // A quarter turn: (a, b) -> (-b, a).
    const integer_rotation quarter = rotation_by_turns(std::uint64_t{1} << 62);
    wrong += pair.rotated_first(quarter) != (b ^ 0x80000000U) || pair.rotated_second(quarter) != a;
  }
  CHECK(wrong == 0);
}

TEST_CASE("integer_pair: specials count as zero and results stay in range") {
  const integer_rotation by = rotation_by_turns(std::uint64_t{1} << 61);
  for (const std::uint32_t special : {0x7f800000U, 0xff800000U, 0x7fc00000U, 0xffffffffU, 0U, 0x80000000U, 1U, 0x807fffffU}) {
    const integer_pair pair = integer_pair::from_bits(bits_of(1.0F), special);
    CHECK(pair.second == 0);
    CHECK(pair.rotated_first(no_turn) == bits_of(1.0F));
    CHECK(pair.rotated_second(no_turn) == 0);
    const integer_pair both = integer_pair::from_bits(special, special);
    CHECK(both.rotated_first(by) == 0);
    CHECK(both.rotated_second(by) == 0);
  }
  constexpr float largest = std::numeric_limits<float>::max();
  const integer_pair large = integer_pair::from_bits(bits_of(largest), bits_of(largest));
  CHECK(float_of(large.rotated_second(by)) == largest);
  CHECK(float_of(integer_pair::from_bits(bits_of(-largest), bits_of(-largest)).rotated_second(by)) == -largest);
  constexpr float smallest = std::numeric_limits<float>::min();
  const integer_pair small = integer_pair::from_bits(bits_of(smallest), bits_of(0.0F));
  CHECK(small.rotated_first(no_turn) == bits_of(smallest));
  CHECK(small.rotated_first(by) == 0);  // 0.7 of it is not a normal number
}

// What streams depend on: these may never change.
TEST_CASE("integer_rotation: pinned results") {
  const auto pinned = [](std::uint64_t turns) {
    const integer_rotation by = rotation_by_turns(turns);
    return std::array<std::int32_t, 2>{by.cosine, by.sine};
  };
  using pair = std::array<std::int32_t, 2>;
  CHECK(pinned(std::uint64_t{1} << 61) == pair{759250125, 759250125});
  CHECK(pinned(0x28be60db9391054aU) == pair{580145184, 903522589});  // one radian
  CHECK(pinned(0x123456789abcdef0U * 1000) == pair{822533957, 690187939});
  CHECK(pinned(0xffffffffffffffffU) == pair{1073741823, -1});
  const integer_pair both = integer_pair::from_bits(bits_of(1.7F), bits_of(-0.3F));
  CHECK(both.rotated_first(rotation_by_turns(0x28be60db9391054aU)) == 0x3f95e1dcU);
  CHECK(both.rotated_second(rotation_by_turns(0x28be60db9391054aU)) == 0x3fa25b42U);
}

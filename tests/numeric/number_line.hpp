// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace kvexact::test {

/// A small floating-point format as its standard describes it, in doubles and without anything from the library.
struct format {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool has_infinities;  ///< if not, the all-ones magnitude is the only NaN
  double largest;       ///< largest finite number
  double beyond;        ///< the number that would follow it if the exponents went on
  double smallest;      ///< smallest positive number

  [[nodiscard]] unsigned patterns() const { return 2U << (exponent_bits + mantissa_bits); }
  [[nodiscard]] unsigned magnitudes() const { return 1U << (exponent_bits + mantissa_bits); }
  [[nodiscard]] unsigned top_exponent() const { return (1U << exponent_bits) - 1U; }
  [[nodiscard]] unsigned exponent(unsigned magnitude) const { return magnitude >> mantissa_bits; }
  [[nodiscard]] unsigned mantissa(unsigned magnitude) const { return magnitude & ((1U << mantissa_bits) - 1U); }
  [[nodiscard]] bool is_infinity(unsigned magnitude) const {
    return has_infinities && exponent(magnitude) == top_exponent() && mantissa(magnitude) == 0;
  }
  [[nodiscard]] bool is_nan(unsigned magnitude) const {
    return has_infinities ? exponent(magnitude) == top_exponent() && mantissa(magnitude) != 0 : magnitude == magnitudes() - 1U;
  }
  [[nodiscard]] bool is_finite(unsigned magnitude) const { return !is_infinity(magnitude) && !is_nan(magnitude); }
  /// Value of a finite magnitude.
  [[nodiscard]] double value(unsigned magnitude) const {
    const auto biased = static_cast<int>(exponent(magnitude));
    const unsigned leading = biased == 0 ? 0U : 1U << mantissa_bits;
    return std::ldexp(static_cast<double>(leading + mantissa(magnitude)), std::max(biased, 1) - bias - mantissa_bits);
  }
};

/// All finite non-negative numbers of a format in order, and the one beyond.
class number_line {
 public:
  explicit number_line(const format& described) : format_(described) {
    for (unsigned magnitude = 0; magnitude < described.magnitudes(); ++magnitude) {
      if (described.is_finite(magnitude)) points_.emplace_back(described.value(magnitude), magnitude);
    }
    std::sort(points_.begin(), points_.end());
    points_.emplace_back(described.beyond, points_.back().second + 1U);
  }

  /// Value and magnitude bits, ascending; the last one is beyond the format.
  [[nodiscard]] const std::vector<std::pair<double, unsigned>>& points() const { return points_; }

  /// Magnitude bits of the number nearest to x >= 0, ties to the even mantissa; overflow gives infinity, or NaN where there is none.
  [[nodiscard]] unsigned nearest(double x) const {
    const auto above = std::lower_bound(points_.begin(), points_.end(), std::pair{x, 0U});
    if (above == points_.end()) return overflow();
    if (above == points_.begin() || above->first == x) return checked(above->second);
    const auto below = above - 1;
    const double to_below = x - below->first;
    const double to_above = above->first - x;
    if (to_below != to_above) return checked(to_below < to_above ? below->second : above->second);
    return checked(below->second % 2 == 0 ? below->second : above->second);
  }

 private:
  [[nodiscard]] unsigned overflow() const {
    return format_.has_infinities ? format_.top_exponent() << format_.mantissa_bits : format_.magnitudes() - 1U;
  }
  [[nodiscard]] unsigned checked(unsigned magnitude) const {
    return magnitude > points_[points_.size() - 2].second ? overflow() : magnitude;
  }

  format format_;
  std::vector<std::pair<double, unsigned>> points_;
};

/// Floats worth rounding: every number, every midpoint of two neighbours, and the floats right below and above each of them.
[[nodiscard]] inline std::vector<float> critical_floats(const number_line& line) {
  std::vector<float> floats;
  const auto add = [&floats](double exact) {
    if (exact > static_cast<double>(std::numeric_limits<float>::max())) return;
    const auto x = static_cast<float>(exact);
    REQUIRE(static_cast<double>(x) == exact);
    floats.push_back(x);
    floats.push_back(std::nextafter(x, std::numeric_limits<float>::infinity()));
    if (x > 0.0F) floats.push_back(std::nextafter(x, 0.0F));
  };
  const auto& points = line.points();
  for (std::size_t i = 0; i + 1 < points.size(); ++i) {
    add(points[i].first);
    add((points[i].first + points[i + 1].first) / 2.0);
  }
  add(points.back().first);
  floats.push_back(std::numeric_limits<float>::denorm_min());
  floats.push_back(std::numeric_limits<float>::min());
  floats.push_back(std::numeric_limits<float>::max());
  floats.push_back(std::numeric_limits<float>::infinity());
  return floats;
}

/// Floats from the whole range, a fixed step apart in their bits, NaNs left out.
[[nodiscard]] inline std::vector<float> spread_floats() {
  std::vector<float> floats;
  for (std::uint64_t bits = 0; bits <= 0x7f800000U; bits += 20011) floats.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  return floats;
}

/// The constants of F say what the description says.
template <class F>
void check_constants(const format& described) {
  CHECK(F::bit_count == 1 + described.exponent_bits + described.mantissa_bits);
  CHECK(F::exponent_bits == described.exponent_bits);
  CHECK(F::mantissa_bits == described.mantissa_bits);
  CHECK(F::bias == described.bias);
  CHECK(F::min_exponent == 1 - described.bias);
  CHECK(unsigned{F::sign_mask} == described.magnitudes());
  CHECK(unsigned{F::magnitude_mask} == described.magnitudes() - 1U);
  CHECK(described.value(F::max_finite) == described.largest);
  CHECK(described.is_finite(F::max_finite));
  CHECK_FALSE(described.is_finite(F::max_finite + 1U));
  CHECK(described.value(1) == described.smallest);
  CHECK(described.is_nan(F::quiet_nan));
}

/// Reads every bit pattern, sign included, and writes it back.
template <class F>
void check_every_pattern(const format& described) {
  unsigned numbers = 0;
  unsigned infinities = 0;
  unsigned nans = 0;
  for (unsigned bits = 0; bits < described.patterns(); ++bits) {
    const F x = F::from_bits(static_cast<typename F::bits_type>(bits));
    const bool negative = bits >= described.magnitudes();
    const unsigned magnitude = bits % described.magnitudes();
    const float read = x.to_float();
    CAPTURE(bits);
    if (std::signbit(read) != negative) FAIL_CHECK("sign");
    if (x.is_finite() != described.is_finite(magnitude)) FAIL_CHECK("is_finite");
    if (x.is_nan() != described.is_nan(magnitude)) FAIL_CHECK("is_nan");

    const F written = F::from_float(read);
    if (described.is_nan(magnitude)) {
      ++nans;
      // The float keeps sign and payload; on the way back a NaN becomes quiet and loses nothing else.
      const auto float_bits = std::bit_cast<std::uint32_t>(read);
      const unsigned payload = described.has_infinities ? described.mantissa(magnitude) : 1U << (described.mantissa_bits - 1);
      const unsigned quiet = described.has_infinities ? 1U << (described.mantissa_bits - 1) : 0U;
      if (float_bits != ((negative ? 0xff800000U : 0x7f800000U) | (payload << (23 - described.mantissa_bits)))) FAIL_CHECK("NaN payload");
      if (written.bits != (bits | quiet)) FAIL_CHECK("NaN written back");
      continue;
    }
    if (written.bits != bits) FAIL_CHECK("written back");
    if (described.is_infinity(magnitude)) {
      ++infinities;
      if (!std::isinf(read)) FAIL_CHECK("infinity");
    } else {
      ++numbers;
      if (static_cast<double>(std::fabs(read)) != described.value(magnitude)) FAIL_CHECK("value");
    }
  }
  CHECK(numbers + infinities + nans == described.patterns());
  CHECK(infinities == (described.has_infinities ? 2U : 0U));
  CHECK(nans == (described.has_infinities ? 2U * ((1U << described.mantissa_bits) - 1U) : 2U));
}

/// Rounds floats of both signs and compares with the nearest number on the line.
template <class F>
void check_rounding(const format& described, const number_line& line, const std::vector<float>& floats) {
  REQUIRE(floats.size() > 100);
  for (const float magnitude : floats) {
    const unsigned expected = line.nearest(static_cast<double>(magnitude));
    CAPTURE(magnitude);
    if (F::from_float(magnitude).bits != expected)
      FAIL_CHECK("positive: " << unsigned{F::from_float(magnitude).bits} << ", not " << expected);
    if (F::from_float(-magnitude).bits != (expected | described.magnitudes())) FAIL_CHECK("negative");
  }
}

/// Saturation: what rounds beyond the largest finite number becomes it and is counted, nothing else changes.
template <class F>
void check_saturation(const format& described, const number_line& line, const std::vector<float>& floats) {
  std::uint64_t counted = 0;
  std::uint64_t expected_count = 0;
  for (const float magnitude : floats) {
    const unsigned nearest = line.nearest(static_cast<double>(magnitude));
    const unsigned expected = described.is_finite(nearest) ? nearest : line.points()[line.points().size() - 2].second;
    expected_count += described.is_finite(nearest) ? 0 : 2;
    CAPTURE(magnitude);
    if (F::from_float_saturating(magnitude, counted).bits != expected) FAIL_CHECK("positive");
    if (F::from_float_saturating(-magnitude, counted).bits != (expected | described.magnitudes())) FAIL_CHECK("negative");
    if (counted != expected_count) {
      FAIL_CHECK("counted " << counted << ", not " << expected_count);
      counted = expected_count;
    }
  }
  CHECK(expected_count > 0);
}

/// Every payload bit that a float NaN can carry.
template <class F>
void check_float_nans(const format& described) {
  for (const std::uint32_t sign : {0U, 0x80000000U}) {
    for (int bit = 0; bit < 23; ++bit) {
      const auto nan = std::bit_cast<float>(sign | 0x7f800000U | (1U << bit));
      const unsigned sign_bit = sign != 0 ? described.magnitudes() : 0U;
      const int kept = bit - (23 - described.mantissa_bits);
      const unsigned payload = described.has_infinities && kept >= 0 ? 1U << kept : 0U;
      CAPTURE(bit);
      CHECK(F::from_float(nan).bits == (sign_bit | F::quiet_nan | payload));
      unsigned counted = 0;
      CHECK(F::from_float_saturating(nan, counted).bits == (sign_bit | F::quiet_nan | payload));
      CHECK(counted == 0);
    }
  }
}

/// Everything above.
template <class F>
void check_format(const format& described) {
  const number_line line(described);
  check_constants<F>(described);
  check_every_pattern<F>(described);
  check_float_nans<F>(described);
  check_rounding<F>(described, line, critical_floats(line));
  check_rounding<F>(described, line, spread_floats());
  check_saturation<F>(described, line, critical_floats(line));
}

}  // namespace kvexact::test

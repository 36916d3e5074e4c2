// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

namespace kvexact::examples {

namespace detail {

/// Natural logarithm of a positive number, by 2 atanh((m - 1) / (m + 1)) of its mantissa. Like the two functions below it uses only
/// IEEE operations in a fixed order, because the C library's results differ from one version to the next.
[[nodiscard]] inline double fixed_log(double value) noexcept {
  constexpr double ln2 = 0x1.62e42fefa39efp-1;
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  const double z = (mantissa - 1) / (mantissa + 1), square = z * z;
  double sum = 0;
  for (int n = 61; n >= 1; n -= 2) sum = sum * square + 1.0 / n;
  return 2 * z * sum + exponent * ln2;
}

[[nodiscard]] inline double fixed_exp(double value) noexcept {
  constexpr double ln2_high = 0x1.62e42fef00000p-1, ln2_low = 0x1.473de6af278edp-34;
  const double n = std::floor(value / ln2_high + 0.5);
  const double r = (value - n * ln2_high) - n * ln2_low;
  double sum = 1;
  for (int i = 18; i >= 1; --i) sum = 1 + sum * r / i;
  return std::ldexp(sum, static_cast<int>(n));
}

struct turn {
  double cosine, sine;
};
/// For angles from 0 to a few million.
[[nodiscard]] inline turn fixed_turn(double angle) noexcept {
  constexpr double two_over_pi = 0x1.45f306dc9c883p-1;
  constexpr double half_pi[] = {0x1.921fb54400000p+0, 0x1.0b4611a600000p-34, 0x1.3198a2e037073p-69};  // n times the first two is exact
  const double n = std::floor(angle * two_over_pi + 0.5);
  const double r = ((angle - n * half_pi[0]) - n * half_pi[1]) - n * half_pi[2];
  const double square = r * r;
  double cosine = 1, sine = 1;
  for (int i = 20; i >= 2; i -= 2) {
    cosine = 1 - cosine * square / (i * (i - 1));
    sine = 1 - sine * square / (i * (i + 1));
  }
  sine *= r;
  switch (static_cast<long long>(n) & 3) {
    case 0: return {cosine, sine};
    case 1: return {-sine, cosine};
    case 2: return {-cosine, -sine};
    default: return {sine, -cosine};
  }
}

}  // namespace detail

/// Rotary position embedding with interleaved pairs: at position t, channels 2i and 2i+1 of a head turn by t * base^(-2i / head_dim).
/// The frequency and the angle are rounded to float, as in the usual implementations.
class rotary_table {
 public:
  rotary_table(float base, std::size_t head_dim, std::size_t positions) : half_(head_dim / 2), turns_(positions * half_) {
    const double log_base = detail::fixed_log(static_cast<double>(base));
    for (std::size_t i = 0; i < half_; ++i) {
      const double fraction = 2.0 * static_cast<double>(i) / static_cast<double>(head_dim);
      const float frequency = static_cast<float>(detail::fixed_exp(-fraction * log_base));
      for (std::size_t position = 0; position < positions; ++position) {
        const float angle = static_cast<float>(position) * frequency;
        const detail::turn turn = detail::fixed_turn(static_cast<double>(angle));
        turns_[position * half_ + i] = {static_cast<float>(turn.cosine), static_cast<float>(turn.sine), -static_cast<float>(turn.sine)};
      }
    }
  }

  [[nodiscard]] std::size_t positions() const noexcept { return half_ == 0 ? 0 : turns_.size() / half_; }

  /// Turns the heads of one token in place: [heads * head_dim] floats.
  void rotate(std::span<float> heads, std::size_t position) const noexcept {
    const std::array<float, 3>* const turns = turns_.data() + position * half_;
    for (std::size_t head = 0; head < heads.size(); head += 2 * half_) {
      for (std::size_t i = 0; i < half_; ++i) {
        float* const pair = heads.data() + head + 2 * i;
        const float a = pair[0], b = pair[1];
        const auto [cosine, sine, minus_sine] = turns[i];
        pair[0] = a * cosine + b * minus_sine;
        pair[1] = a * sine + b * cosine;
      }
    }
  }

 private:
  std::size_t half_;
  // [position][pair] cosine, sine, -sine. The last is there because g++ 12 makes vfmaddsub of a difference beside a sum of products, even
  // with -ffp-contract=off.
  std::vector<std::array<float, 3>> turns_;
};

}  // namespace kvexact::examples

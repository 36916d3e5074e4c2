// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <kvexact/core/result.hpp>

namespace kvexact {

/// Exact integer symbol probabilities: symbols 0 .. symbol_count() - 1 have the frequencies f(s), which sum to exactly
/// 2^precision. f(s) = 0 means that the symbol cannot be coded; a table with one symbol has f = 2^precision.
class frequency_table {
 public:
  static constexpr int max_symbols = 256;
  static constexpr int min_precision = 1;
  static constexpr int max_precision = 16;

  /// Takes frequencies as they are. `freq` holds 1 to 256 of them, `precision` is 1 to 16.
  /// Errors: invalid_argument (size or precision out of range), corrupt (the sum is not 2^precision).
  [[nodiscard]] static result<frequency_table> from_frequencies(std::span<const std::uint32_t> freq, int precision) noexcept {
    if (const auto valid = check_shape(freq.size(), precision); !valid) return valid.error();
    frequency_table table(static_cast<int>(freq.size()), precision);
    const std::uint32_t total = std::uint32_t{1} << precision;
    std::uint32_t sum = 0;
    for (std::size_t s = 0; s < freq.size(); ++s) {
      table.starts_[s] = sum;
      if (freq[s] > total - sum) return error{error_code::corrupt, "frequencies sum to more than 2^precision"};
      sum += freq[s];
    }
    if (sum != total) return error{error_code::corrupt, "frequencies sum to less than 2^precision"};
    table.starts_[freq.size()] = total;
    return table;
  }

  /// The table with the least total code length for these counts: it minimises sum counts(s) * log2(2^precision / f(s)) over all
  /// integer f with f(s) >= 1 where counts(s) > 0 and f(s) = 0 elsewhere. `counts` holds 1 to 256 values of at most 2^60 each.
  ///
  /// The cost is separable and convex in f, so a table is optimal exactly if no move of one unit from one symbol to another
  /// gains. The search starts at the proportional table and makes the best unit moves until none is left: symbols that grew never
  /// shrink again, so there are at most 2^precision moves, and in practice a few dozen. Ties go to the lower symbol. All
  /// floating-point operations are single correctly rounded IEEE 754 operations that no compiler may fuse, so equal counts give
  /// equal tables everywhere (without -ffast-math).
  ///
  /// Errors: invalid_argument (size or precision out of range, a count above 2^60, all counts zero, more symbols with a count than
  /// 2^precision).
  [[nodiscard]] static result<frequency_table> from_counts(std::span<const std::uint64_t> counts, int precision) noexcept {
    if (const auto valid = check_shape(counts.size(), precision); !valid) return valid.error();
    const std::uint32_t total = std::uint32_t{1} << precision;
    const std::size_t n = counts.size();

    std::array<double, max_symbols> weight{};
    double weight_sum = 0;
    std::uint32_t used = 0;
    for (std::size_t s = 0; s < n; ++s) {
      if (counts[s] > (std::uint64_t{1} << 60)) return error{error_code::invalid_argument, "a symbol count is above 2^60"};
      weight[s] = static_cast<double>(counts[s]);
      weight_sum += weight[s];
      used += counts[s] > 0 ? 1U : 0U;
    }
    if (used == 0) return error{error_code::invalid_argument, "all symbol counts are zero"};
    if (used > total) return error{error_code::invalid_argument, "more symbols in use than 2^precision"};

    allocation state{weight, {}, {}, {}, n};
    const double scale = static_cast<double>(total) / weight_sum;
    std::uint32_t sum = 0;
    for (std::size_t s = 0; s < n; ++s) {
      if (counts[s] == 0) continue;
      const auto share = static_cast<std::uint32_t>(weight[s] * scale);
      state.set(s, share > total ? total : share < 1 ? 1U : share);
      sum += state.freq[s];
    }
    for (; sum > total; --sum) state.shrink(state.cheapest());
    for (; sum < total; ++sum) state.grow(state.neediest());
    for (;;) {
      const std::size_t to = state.neediest();
      const std::size_t from = state.cheapest();
      if (!(state.gain[to] > state.loss[from])) break;
      state.grow(to);
      state.shrink(from);
    }
    return from_frequencies(std::span<const std::uint32_t>(state.freq.data(), n), precision);
  }

  [[nodiscard]] int precision() const noexcept { return precision_; }
  [[nodiscard]] int symbol_count() const noexcept { return symbol_count_; }

  /// Frequency of `symbol`, 0 to 2^precision; 0 for symbols at and above symbol_count(). `symbol` is 0 to 255.
  [[nodiscard]] std::uint32_t frequency(int symbol) const noexcept {
    const auto s = static_cast<std::size_t>(symbol);
    return symbol < symbol_count_ ? starts_[s + 1] - starts_[s] : 0U;
  }

  /// Sum of the frequencies below `symbol`; 2^precision for symbols at and above symbol_count(). `symbol` is 0 to 255.
  [[nodiscard]] std::uint32_t start(int symbol) const noexcept {
    return starts_[static_cast<std::size_t>(symbol < symbol_count_ ? symbol : symbol_count_)];
  }

  /// Ideal length in bits of coding each symbol s counts[s] times with this table: sum counts(s) * (precision - log2 f(s)).
  /// Infinite if a counted symbol has frequency 0. At most 256 counts are read.
  [[nodiscard]] double code_length(std::span<const std::uint64_t> counts) const noexcept {
    double bits = 0;
    for (std::size_t s = 0; s < counts.size() && s < max_symbols; ++s) {
      if (counts[s] == 0) continue;
      const std::uint32_t f = frequency(static_cast<int>(s));
      if (f == 0) return std::numeric_limits<double>::infinity();
      bits += static_cast<double>(counts[s]) * (precision_ - std::log2(static_cast<double>(f)));
    }
    return bits;
  }

  [[nodiscard]] friend bool operator==(const frequency_table&, const frequency_table&) noexcept = default;

 private:
  frequency_table(int symbol_count, int precision) noexcept : symbol_count_(symbol_count), precision_(precision) {}

  [[nodiscard]] static result<void> check_shape(std::size_t size, int precision) noexcept {
    if (size < 1 || size > max_symbols) return error{error_code::invalid_argument, "a frequency table holds 1 to 256 symbols"};
    if (precision < min_precision || precision > max_precision) {
      return error{error_code::invalid_argument, "the precision of a frequency table is 1 to 16 bits"};
    }
    return {};
  }

  /// Working state of from_counts: what one more unit of frequency would save and one less would cost, in nats.
  struct allocation {
    std::array<double, max_symbols> weight;
    std::array<std::uint32_t, max_symbols> freq;
    std::array<double, max_symbols> gain;
    std::array<double, max_symbols> loss;
    std::size_t n;

    void set(std::size_t s, std::uint32_t f) noexcept {
      freq[s] = f;
      gain[s] = weight[s] * log_step(f);
      loss[s] = f > 1 ? weight[s] * log_step(f - 1) : std::numeric_limits<double>::infinity();
    }

    void grow(std::size_t s) noexcept { set(s, freq[s] + 1); }
    void shrink(std::size_t s) noexcept { set(s, freq[s] - 1); }

    /// The used symbol that gains most from a unit.
    [[nodiscard]] std::size_t neediest() const noexcept {
      std::size_t best = 0;
      for (std::size_t s = 1; s < n; ++s) best = gain[s] > gain[best] ? s : best;
      return best;
    }

    /// The used symbol that loses least with a unit; never one with frequency 1 if any other is left.
    [[nodiscard]] std::size_t cheapest() const noexcept {
      std::size_t best = n;
      for (std::size_t s = 0; s < n; ++s) {
        if (freq[s] > 0 && (best == n || loss[s] < loss[best])) best = s;
      }
      return best;
    }
  };

  /// ln((f + 1) / f) for f >= 1 as 2 artanh(1 / (2 f + 1)). Divisions and additions only: nothing here can become a fused
  /// multiply-add.
  [[nodiscard]] static double log_step(std::uint32_t f) noexcept {
    const double m = 2.0 * f + 1.0;
    const double m2 = m * m;
    double power = 2.0 / m;
    double sum = power;
    for (int k = 3; k < 40; k += 2) {
      power /= m2;
      sum += power / k;
    }
    return sum;
  }

  std::array<std::uint32_t, max_symbols + 1> starts_{};
  int symbol_count_;
  int precision_;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>

namespace kvexact {

/// Which dimensions of a head a rotary embedding turns together.
enum class rotary_pairing : std::uint32_t {
  none = 0,
  interleaved = 1,  ///< (0, 1), (2, 3), ...: GPT-J, llama.cpp's llama models
  half_split = 2,   ///< (0, d/2), (1, d/2 + 1), ...: GPT-NeoX, Hugging Face llama models
};

/// How cached keys were rotated by their position (token number in the cache): pair i by position * frequency(i). Frequencies are turns
/// per token in units of 2^-64, so any scaling scheme (linear, llama3, YaRN) is just another table. The same for all layers and heads.
class rotary {
 public:
  static constexpr std::uint32_t max_dim = 1U << 12;

  /// Keys are not rotated, or nothing is known of it.
  rotary() noexcept = default;

  /// `turns`: one frequency for each of the rotary_dim / 2 pairs. Errors: invalid_argument (none with frequencies or the reverse, more
  /// than 2048 pairs), out_of_memory.
  [[nodiscard]] static result<rotary> make(rotary_pairing pairing, std::span<const std::uint64_t> turns) noexcept {
    if (pairing != rotary_pairing::none && pairing != rotary_pairing::interleaved && pairing != rotary_pairing::half_split)
      return error{error_code::invalid_argument, "unknown pairing of the rotary embedding"};
    if ((pairing == rotary_pairing::none) != turns.empty() || turns.size() > max_dim / 2)
      return error{error_code::invalid_argument, "number of rotary frequencies"};
    try {
      rotary made;
      made.pairing_ = pairing;
      made.turns_.assign(turns.begin(), turns.end());
      return made;
    } catch (...) {
      return error{error_code::out_of_memory, "rotary frequencies"};
    }
  }

  /// From inverse frequencies in radians per token, each in [0, 2 pi). Errors: invalid_argument.
  [[nodiscard]] static result<rotary> from_radians(rotary_pairing pairing, std::span<const double> radians) noexcept {
    constexpr double full_turn = 6.283185307179586476925;
    try {
      std::vector<std::uint64_t> turns;
      for (const double each : radians) {
        if (!(each >= 0 && each < full_turn)) return error{error_code::invalid_argument, "a rotary frequency is not in [0, 2 pi)"};
        turns.push_back(static_cast<std::uint64_t>(std::ldexp(each / full_turn, 64)));
      }
      return make(pairing, turns);
    } catch (...) {
      return error{error_code::out_of_memory, "rotary frequencies"};
    }
  }

  /// base^(-2 i / dim) radians per token for pair i: RoPE (arXiv 2104.09864). Errors: invalid_argument (dim odd, 0 or too large, base
  /// not above 1).
  [[nodiscard]] static result<rotary> from_base(rotary_pairing pairing, std::uint32_t dim, double base) noexcept {
    if (dim == 0 || dim % 2 != 0 || dim > max_dim) return error{error_code::invalid_argument, "a rotary dimension is even and at most 4096"};
    if (!(base > 1 && std::isfinite(base))) return error{error_code::invalid_argument, "a rotary base is above 1"};
    try {
      std::vector<double> radians(dim / 2);
      for (std::size_t i = 0; i < radians.size(); ++i) radians[i] = std::pow(base, -2.0 * static_cast<double>(i) / dim);
      return from_radians(pairing, radians);
    } catch (...) {
      return error{error_code::out_of_memory, "rotary frequencies"};
    }
  }

  [[nodiscard]] rotary_pairing pairing() const noexcept { return pairing_; }
  [[nodiscard]] std::span<const std::uint64_t> turns() const noexcept { return turns_; }
  /// Dimensions that are rotated, from the first on; the others are left alone.
  [[nodiscard]] std::uint32_t dim() const noexcept { return 2 * static_cast<std::uint32_t>(turns_.size()); }
  /// Dimensions of pair `i`.
  [[nodiscard]] std::pair<std::uint32_t, std::uint32_t> pair(std::uint32_t i) const noexcept {
    return pairing_ == rotary_pairing::interleaved ? std::pair{2 * i, 2 * i + 1} : std::pair{i, i + dim() / 2};
  }

  friend bool operator==(const rotary&, const rotary&) noexcept = default;

 private:
  rotary_pairing pairing_ = rotary_pairing::none;
  std::vector<std::uint64_t> turns_;
};

}  // namespace kvexact

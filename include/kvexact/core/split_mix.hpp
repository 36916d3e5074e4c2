// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvexact::detail {

/// The finaliser of SplitMix64 (variant 13 of D. Stafford's mixers): a permutation of 64 bits.
[[nodiscard]] constexpr std::uint64_t mix_bits(std::uint64_t bits) noexcept {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
  return bits ^ (bits >> 31);
}

/// 2^64 over the golden ratio.
inline constexpr std::uint64_t split_mix_step = 0x9e3779b97f4a7c15U;

/// The generator SplitMix64: the same numbers on every machine.
[[nodiscard]] constexpr std::uint64_t split_mix(std::uint64_t& state) noexcept { return mix_bits(state += split_mix_step); }

/// Random bits as a number in [0, 1), a multiple of 2^-53.
[[nodiscard]] constexpr double unit_number(std::uint64_t bits) noexcept { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace kvexact::detail

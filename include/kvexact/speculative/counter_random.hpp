// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>

#include <kvexact/core/split_mix.hpp>

namespace kvexact {

/// What a random number decides. The values are stable: the numbers depend on them.
enum class random_purpose : std::uint8_t {
  draft = 0,    ///< which token is drafted
  accept = 1,   ///< whether a draft token is accepted
  replace = 2,  ///< which token the verifier gives itself: plain, recovered or bonus
};

/// Random numbers that are a function of where they are used, so that taking tokens back needs no state to be restored.
///
/// - `uniform(position, purpose)`: in [0, 1), for a token at this position of the sequence.
/// - `fork(key)`: a source whose numbers are independent of those of this one and of its other forks.
template <class R>
concept random_source = std::copyable<R> && requires(const R& random, std::uint64_t position, random_purpose purpose) {
  { random.uniform(position, purpose) } noexcept -> std::same_as<double>;
  { random.fork(position) } noexcept -> std::same_as<R>;
};

/// The `random_source` of the library: a hash of seed, position and purpose, in integers, so the same on every machine. Each input goes
/// through the finaliser of SplitMix64.
class counter_random {
 public:
  explicit constexpr counter_random(std::uint64_t seed) noexcept : key_(mix(seed + step)) {}

  /// A multiple of 2^-53.
  [[nodiscard]] constexpr double uniform(std::uint64_t position, random_purpose purpose) const noexcept {
    const std::uint64_t at_position = mix(key_ + step * (position + 1));
    const std::uint64_t bits = mix(at_position ^ (purpose_step * (static_cast<std::uint64_t>(purpose) + 1)));
    return detail::unit_number(bits);
  }

  [[nodiscard]] constexpr counter_random fork(std::uint64_t key) const noexcept {
    counter_random forked = *this;
    forked.key_ = mix(mix(key_ ^ fork_step) + step * (key + 1));
    return forked;
  }

 private:
  static constexpr std::uint64_t step = detail::split_mix_step;
  static constexpr std::uint64_t purpose_step = 0xd1342543de82ef95;  // odd constants that have nothing to do with it
  static constexpr std::uint64_t fork_step = 0xaef17502108ef2d9;

  [[nodiscard]] static constexpr std::uint64_t mix(std::uint64_t bits) noexcept { return detail::mix_bits(bits); }

  std::uint64_t key_;
};

static_assert(random_source<counter_random>);

}  // namespace kvexact

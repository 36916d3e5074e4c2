// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/entropy/entropy_model.hpp>

namespace kvexact {

/// The states of all lanes of an interleaved rANS coder (32 bits each, lane 0 first) and the steps of a *full* row. What a
/// lane vector computes is fixed to the bit by these definitions; how (scalar, SIMD, a warp) is its own affair.
///
/// - `lane(i)`, `set_lane(i, x)`: one state. Used at both ends of a stream and for short rows.
/// - `advance<P>(slots, contexts, symbols)`: for each lane, with v = x mod 2^P, e = slots[(contexts[i] << P) + v]:
///   symbols[i] = e.symbol(), x = e.frequency() * (x >> P) + e.offset().
/// - `refill(words)`: for each lane with x < 2^16: x = (x << 16) | next little-endian 16-bit word, in lane order (a lane's word is
///   at the number of lower lanes that also refill). May read `count` words at `words`, whatever it uses; gives the number used.
/// - `retreat<P>(entries, contexts, symbols, end, codable)`: the inverse of both, from the last lane to lane 0, with
///   e = entries[contexts[i] * 256 + symbols[i]], f = e.frequency, s = e.start: where x >> (32 - P) >= f, x mod 2^16 is written
///   just below `end`, `end` moves down by a word, and x >>= 16; then x = ((x / f) << P) + x mod f + s. May write anywhere in the
///   `count` words below the given `end`; gives the new `end`. `codable` becomes false if some f is 0 (that lane's state is then
///   of no use, the rest is as it would be).
template <class V>
concept lane_vector =
    std::default_initializable<V> && std::copyable<V> &&
    requires(V v, const V c, int i, std::uint32_t x, const decode_slot<12>* slots, const encode_entry* entries,
             const std::uint16_t* contexts, std::uint8_t* symbols, const std::uint8_t* source, const std::byte* words, std::byte* end,
             bool& codable) {
      { V::count } -> std::convertible_to<int>;
      { c.lane(i) } noexcept -> std::same_as<std::uint32_t>;
      { v.set_lane(i, x) } noexcept;
      { v.template advance<12>(slots, contexts, symbols) } noexcept;
      { v.refill(words) } noexcept -> std::same_as<int>;
      { v.template retreat<12>(entries, contexts, source, end, codable) } noexcept -> std::same_as<std::byte*>;
    };

/// The lane vector in plain C++. The loops have constant trip counts and no branches; gather and state update are apart from the
/// serial refill so that a compiler can vectorise them for the instruction set of the function they are inlined into.
template <int Count>
class scalar_lanes {
 public:
  static_assert(Count >= 1 && Count <= 256);
  static constexpr int count = Count;

  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::uint32_t lane(int i) const noexcept { return state_[static_cast<std::size_t>(i)]; }
  KVEXACT_ALWAYS_INLINE void set_lane(int i, std::uint32_t x) noexcept { state_[static_cast<std::size_t>(i)] = x; }

  template <int P>
  KVEXACT_ALWAYS_INLINE void advance(const decode_slot<P>* slots, const std::uint16_t* contexts, std::uint8_t* symbols) noexcept {
    constexpr std::uint32_t mask = (std::uint32_t{1} << P) - 1;
    // Copies on the stack, because stores to `symbols` could alias everything else and keep the loops scalar; bits, because an array of
    // slots would be zeroed first.
    std::array<std::uint32_t, size> x = state_;
    std::array<typename decode_slot<P>::bits_type, size> e;
    // 32 bits hold every index (16 of context, at most 16 of precision) and gather better than 64.
    for (std::size_t i = 0; i < size; ++i) e[i] = slots[(std::uint32_t{contexts[i]} << P) + (x[i] & mask)].bits;
    for (std::size_t i = 0; i < size; ++i) {
      const decode_slot<P> slot{e[i]};
      x[i] = slot.frequency() * (x[i] >> P) + slot.offset();
    }
    for (std::size_t i = 0; i < size; ++i) symbols[i] = decode_slot<P>{e[i]}.symbol();
    state_ = x;
  }

  KVEXACT_ALWAYS_INLINE int refill(const std::byte* words) noexcept {
    // Each lane loads the word that it would take; only the count is serial, and masks keep compilers from branching.
    std::array<std::uint32_t, size> word;
    std::size_t used = 0;
    for (std::size_t i = 0; i < size; ++i) {
      word[i] = load_little_endian<std::uint16_t>(words + 2 * used);
      used += state_[i] < 0x10000U ? 1U : 0U;
    }
    for (std::size_t i = 0; i < size; ++i) {
      const std::uint32_t x = state_[i];
      const std::uint32_t needs = 0U - static_cast<std::uint32_t>((x >> 16) == 0);
      state_[i] = (x & ~needs) | (((x << 16) | word[i]) & needs);
    }
    return static_cast<int>(used);
  }

  template <int P>
  KVEXACT_ALWAYS_INLINE std::byte* retreat(const encode_entry* entries, const std::uint16_t* contexts, const std::uint8_t* symbols,
                                           std::byte* end, bool& codable) noexcept {
    constexpr std::uint32_t total = std::uint32_t{1} << P;
    std::uint32_t absent = 0;
    for (std::size_t i = size; i-- > 0;) {
      const encode_entry e = entries[(std::uint32_t{contexts[i]} << 8) + symbols[i]];
      std::uint32_t x = state_[i];
      const std::uint32_t spills = (x >> (32 - P)) >= e.frequency ? 1U : 0U;
      store_little_endian(end - 2, static_cast<std::uint16_t>(x));
      end -= 2 * spills;
      x >>= 16 * spills;
      const std::uint32_t zero = (e.frequency - 1) >> 31;  // 1 for frequency 0, which no branch may find out
      absent |= zero;
      state_[i] = x + e.start + x / (e.frequency + zero) * (total - e.frequency);
    }
    codable = codable && absent == 0;
    return end;
  }

 private:
  static constexpr std::size_t size = static_cast<std::size_t>(Count);
  std::array<std::uint32_t, size> state_{};
};

static_assert(lane_vector<scalar_lanes<32>>);

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/entropy/entropy_model.hpp>

namespace kvexact::test {

/// A lane vector that works as a warp would: all lanes take each step together and find their words by a ballot and a count of the
/// lower lanes' bits. At most 64 lanes.
template <int Count>
struct ballot_lanes {
  static constexpr int count = Count;

  [[nodiscard]] std::uint32_t lane(int i) const noexcept { return x[static_cast<std::size_t>(i)]; }
  void set_lane(int i, std::uint32_t value) noexcept { x[static_cast<std::size_t>(i)] = value; }

  template <int P>
  void advance(const decode_slot<P>* slots, const std::uint16_t* contexts, std::uint8_t* symbols) noexcept {
    for (std::size_t i = 0; i < Count; ++i) {
      const decode_slot<P> e = slots[(std::size_t{contexts[i]} << P) | (x[i] % (std::uint32_t{1} << P))];
      symbols[i] = e.symbol();
      x[i] = e.frequency() * (x[i] >> P) + e.offset();
    }
  }

  int refill(const std::byte* words) noexcept {
    const std::uint64_t votes = ballot([&](std::size_t i) { return x[i] < 0x10000U; });
    for (std::size_t i = 0; i < Count; ++i) {
      if (((votes >> i) & 1) == 0) continue;
      x[i] = (x[i] << 16) | load_little_endian<std::uint16_t>(words + 2 * std::popcount(votes & lower(i)));
    }
    return std::popcount(votes);
  }

  template <int P>
  std::byte* retreat(const encode_entry* entries, const std::uint16_t* contexts, const std::uint8_t* symbols, std::byte* end,
                     bool& codable) noexcept {
    const auto entry = [&](std::size_t i) { return entries[(std::size_t{contexts[i]} << 8) | symbols[i]]; };
    const std::uint64_t votes = ballot([&](std::size_t i) { return (x[i] >> (32 - P)) >= entry(i).frequency; });
    std::byte* const begin = end - 2 * std::popcount(votes);
    for (std::size_t i = 0; i < Count; ++i) {
      if (((votes >> i) & 1) == 0) continue;
      store_little_endian(begin + 2 * std::popcount(votes & lower(i)), static_cast<std::uint16_t>(x[i]));
      x[i] >>= 16;
    }
    for (std::size_t i = 0; i < Count; ++i) {
      const encode_entry e = entry(i);
      codable = codable && e.frequency != 0;
      if (e.frequency != 0) x[i] = x[i] / e.frequency * (std::uint32_t{1} << P) + x[i] % e.frequency + e.start;
    }
    return begin;
  }

 private:
  template <class Predicate>
  [[nodiscard]] static std::uint64_t ballot(Predicate predicate) noexcept {
    std::uint64_t votes = 0;
    for (std::size_t i = 0; i < Count; ++i) votes |= predicate(i) ? std::uint64_t{1} << i : 0;
    return votes;
  }
  [[nodiscard]] static std::uint64_t lower(std::size_t i) noexcept { return (std::uint64_t{1} << i) - 1; }

  std::array<std::uint32_t, Count> x{};
};

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvexact/core/config.hpp>

namespace kvexact::detail {

/// Bytes of `count` codes of `bits` bits, the first in the lowest bits of the first byte.
[[nodiscard]] constexpr std::size_t packed_code_bytes(std::size_t count, int bits) noexcept {
  return (count * static_cast<std::size_t>(bits) + 7) / 8;
}

/// Codes below 2^Bits, one a byte, into packed_code_bytes(count, Bits) bytes. Unused bits are 0.
template <int Bits>
KVEXACT_ALWAYS_INLINE void pack_codes(const std::uint8_t* codes, std::size_t count, std::byte* packed) noexcept {
  static_assert(Bits >= 1 && Bits <= 8, "kvexact: codes have 1 to 8 bits");
  if constexpr (8 % Bits == 0) {
    constexpr std::size_t per_byte = 8 / Bits;
    const std::size_t whole = count / per_byte;
    for (std::size_t i = 0; i < whole; ++i) {
      unsigned byte = 0;
      for (std::size_t j = 0; j < per_byte; ++j) byte |= static_cast<unsigned>(codes[i * per_byte + j]) << (j * Bits);
      packed[i] = static_cast<std::byte>(byte);
    }
    if (whole * per_byte == count) return;
    unsigned byte = 0;
    for (std::size_t j = 0; whole * per_byte + j < count; ++j) byte |= static_cast<unsigned>(codes[whole * per_byte + j]) << (j * Bits);
    packed[whole] = static_cast<std::byte>(byte);
  } else {  // eight codes are a whole number of bytes
    std::size_t out = 0;
    for (std::size_t i = 0; i < count; i += 8) {
      const std::size_t here = count - i < 8 ? count - i : 8;
      std::uint64_t word = 0;
      for (std::size_t j = 0; j < here; ++j) word |= static_cast<std::uint64_t>(codes[i + j]) << (j * Bits);
      for (std::size_t left = packed_code_bytes(here, Bits); left > 0; --left, word >>= 8) packed[out++] = static_cast<std::byte>(word & 0xff);
    }
  }
}

/// The other way round.
template <int Bits>
KVEXACT_ALWAYS_INLINE void unpack_codes(const std::byte* packed, std::size_t count, std::uint8_t* codes) noexcept {
  constexpr unsigned mask = (1U << Bits) - 1;
  if constexpr (8 % Bits == 0) {
    constexpr std::size_t per_byte = 8 / Bits;
    const std::size_t whole = count / per_byte;
    for (std::size_t i = 0; i < whole; ++i) {
      const auto byte = static_cast<unsigned>(packed[i]);
      for (std::size_t j = 0; j < per_byte; ++j) codes[i * per_byte + j] = static_cast<std::uint8_t>((byte >> (j * Bits)) & mask);
    }
    const std::size_t rest = count - whole * per_byte;
    for (std::size_t j = 0; j + 1 < per_byte; ++j) {  // a bound that is constant: g++ takes others for an overflow
      if (j < rest) codes[whole * per_byte + j] = static_cast<std::uint8_t>((static_cast<unsigned>(packed[whole]) >> (j * Bits)) & mask);
    }
  } else {
    std::size_t in = 0;
    for (std::size_t i = 0; i < count; i += 8) {
      const std::size_t here = count - i < 8 ? count - i : 8;
      std::uint64_t word = 0;
      const std::size_t bytes = packed_code_bytes(here, Bits);
      for (std::size_t k = 0; k < bytes; ++k) word |= static_cast<std::uint64_t>(packed[in++]) << (8 * k);
      for (std::size_t j = 0; j < here; ++j) codes[i + j] = static_cast<std::uint8_t>((word >> (j * Bits)) & mask);
    }
  }
}

/// Walks over the codes of a row whose channels lie in groups of `group`, in runs that are unpacked and lie in one group each:
///
///   for (code_runs<4> run(packed, dim, group); run.next();)  // channels run.begin to run.end - 1, of group run.group
///     use(run.codes[c - run.begin]);
template <int Bits>
class code_runs {
 public:
  KVEXACT_ALWAYS_INLINE code_runs(const std::byte* packed, std::size_t dim, std::size_t group_channels) noexcept
      : packed_(packed), dim_(dim), group_channels_(group_channels) {}

  KVEXACT_ALWAYS_INLINE bool next() noexcept {
    begin = end;
    if (begin == dim_) return false;
    if (begin == unpacked_) {
      const std::size_t count = dim_ - begin < room ? dim_ - begin : room;
      unpack_codes<Bits>(packed_ + begin * Bits / 8, count, buffer_);
      first_ = begin;
      unpacked_ = begin + count;
    }
    group = begin / group_channels_;
    const std::size_t group_end = (group + 1) * group_channels_;
    end = group_end < unpacked_ ? group_end : unpacked_;
    codes = buffer_ + (begin - first_);
    return true;
  }

  std::size_t begin = 0, end = 0, group = 0;
  const std::uint8_t* codes = nullptr;

 private:
  static constexpr std::size_t room = 64;  // a multiple of 8: eight codes of any number of bits are whole bytes

  const std::byte* packed_;
  std::size_t dim_, group_channels_, first_ = 0, unpacked_ = 0;
  std::uint8_t buffer_[room];
};

}  // namespace kvexact::detail

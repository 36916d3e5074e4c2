// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/core/config.hpp>

namespace kvexact {

namespace detail {
struct bit_row_avx512;
}

/// Writes groups of bits, least significant first, into the caller's buffer. When the buffer is full it stops writing and `finish`
/// reports the overflow.
class bit_writer {
 public:
  explicit bit_writer(std::span<std::byte> buffer) noexcept : buffer_(buffer) {}

  /// `count` 0 to 32; bits of `value` above `count` must be zero.
  KVEXACT_ALWAYS_INLINE void put(std::uint32_t value, int count) noexcept {
    pending_ |= std::uint64_t{value} << pending_bits_;
    pending_bits_ += count;
    if (pending_bits_ >= 32) flush_word();
  }

  /// Pads the last byte with zero bits. Returns the bytes written, or an empty span with `overflowed()` set.
  [[nodiscard]] std::span<const std::byte> finish() noexcept {
    for (; pending_bits_ > 0; pending_bits_ -= 8, pending_ >>= 8) {
      if (at_ == buffer_.size()) {
        overflowed_ = true;
        break;
      }
      buffer_[at_++] = static_cast<std::byte>(pending_ & 0xffU);
    }
    return overflowed_ ? std::span<const std::byte>{} : buffer_.first(at_);
  }
  [[nodiscard]] bool overflowed() const noexcept { return overflowed_; }
  /// Bits put so far, unless the buffer has overflowed.
  [[nodiscard]] std::uint64_t bits() const noexcept { return 8 * std::uint64_t{at_} + static_cast<std::uint64_t>(pending_bits_); }

 private:
  void flush_word() noexcept {
    if (buffer_.size() - at_ >= 4) {
      store_little_endian(buffer_.data() + at_, static_cast<std::uint32_t>(pending_));
      at_ += 4;
    } else {
      overflowed_ = true;
    }
    pending_ >>= 32;
    pending_bits_ -= 32;
  }

  std::span<std::byte> buffer_;
  std::size_t at_ = 0;
  std::uint64_t pending_ = 0;
  int pending_bits_ = 0;
  bool overflowed_ = false;
};

/// Reads what `bit_writer` wrote. Past the end it yields zero bits; `finish` tells whether the reads matched the buffer exactly.
class bit_reader {
 public:
  explicit bit_reader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  /// `count` 0 to 32.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::uint32_t get(int count) noexcept {
    const std::uint64_t window = peek();
    at_ += static_cast<std::uint64_t>(count);
    return static_cast<std::uint32_t>(window & ((std::uint64_t{1} << count) - 1));
  }

  /// Reads `counts[i]` bits (0 to 32 each) into `values[i]` for every i below N: one bounds check for the row.
  template <int N>
  KVEXACT_ALWAYS_INLINE void get_row(const std::int32_t* counts, std::uint32_t* values) noexcept {
    if ((at_ >> 3) + 4 * N + 8 <= bytes_.size()) {
      std::uint64_t at = at_;
      const std::byte* const data = bytes_.data();
      for (int i = 0; i < N; ++i) {
        const std::uint64_t window = load_little_endian<std::uint64_t>(data + (at >> 3)) >> (at & 7);
        values[i] = static_cast<std::uint32_t>(window & ((std::uint64_t{1} << counts[i]) - 1));
        at += static_cast<std::uint32_t>(counts[i]);
      }
      at_ = at;
    } else {
      for (int i = 0; i < N; ++i) values[i] = get(counts[i]);
    }
  }

  /// True when exactly the buffer was read, up to zero bits that pad the last byte.
  [[nodiscard]] bool finish() const noexcept {
    const std::uint64_t used = (at_ + 7) >> 3;
    if (used != bytes_.size()) return false;
    return (at_ & 7) == 0 || (std::to_integer<unsigned>(bytes_.back()) >> (at_ & 7)) == 0;
  }

 private:
  friend struct detail::bit_row_avx512;

  /// At least 57 bits from the read position.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::uint64_t peek() const noexcept {
    const std::uint64_t byte = at_ >> 3;
    if (byte + 8 <= bytes_.size()) return load_little_endian<std::uint64_t>(bytes_.data() + byte) >> (at_ & 7);
    std::uint64_t window = 0;
    for (std::uint64_t i = byte; i < bytes_.size(); ++i) window |= std::to_integer<std::uint64_t>(bytes_[static_cast<std::size_t>(i)]) << (8 * (i - byte));
    return window >> (at_ & 7);
  }

  std::span<const std::byte> bytes_;
  std::uint64_t at_ = 0;
};

}  // namespace kvexact

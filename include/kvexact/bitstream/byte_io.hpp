// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvexact/core/config.hpp>

namespace kvexact {

/// Reads an unsigned integer stored in little-endian order; no alignment needed.
template <std::unsigned_integral T>
[[nodiscard]] KVEXACT_ALWAYS_INLINE T load_little_endian(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  if constexpr (std::endian::native == std::endian::big && sizeof(T) > 1) {
    T swapped = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) swapped = static_cast<T>(swapped | (((value >> (8 * i)) & 0xffU) << (8 * (sizeof(T) - 1 - i))));
    return swapped;
  } else {
    return value;
  }
}

/// Writes an unsigned integer in little-endian order; no alignment needed.
template <std::unsigned_integral T>
KVEXACT_ALWAYS_INLINE void store_little_endian(std::byte* to, T value) noexcept {
  std::memcpy(to, &value, sizeof value);
  if constexpr (std::endian::native == std::endian::big && sizeof(T) > 1) {
    const T swapped = load_little_endian<T>(to);
    std::memcpy(to, &swapped, sizeof swapped);
  }
}

/// Appends little-endian integers and bytes to a vector that grows; throws what the vector throws.
class byte_writer {
 public:
  explicit byte_writer(std::vector<std::byte>& out) noexcept : out_(&out) {}

  template <std::unsigned_integral T>
  void put(T value) {
    const std::size_t at = out_->size();
    out_->resize(at + sizeof(T));
    store_little_endian(out_->data() + at, value);
  }

 private:
  std::vector<std::byte>* out_;
};

/// Reads little-endian integers and bytes with bounds: past the end it yields zeros and empty spans, and `ok()` turns false for good.
class byte_reader {
 public:
  explicit byte_reader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  template <std::unsigned_integral T>
  [[nodiscard]] T get() noexcept {
    const std::span<const std::byte> from = get_bytes(sizeof(T));
    return from.empty() ? T{0} : load_little_endian<T>(from.data());
  }
  [[nodiscard]] std::span<const std::byte> get_bytes(std::uint64_t count) noexcept {
    if (count > bytes_.size() - at_) {
      ok_ = false;
      at_ = bytes_.size();
      return {};
    }
    const auto from = bytes_.subspan(at_, static_cast<std::size_t>(count));
    at_ += static_cast<std::size_t>(count);
    return from;
  }
  [[nodiscard]] bool ok() const noexcept { return ok_; }
  [[nodiscard]] std::size_t position() const noexcept { return at_; }
  [[nodiscard]] std::size_t remaining() const noexcept { return bytes_.size() - at_; }

 private:
  std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  bool ok_ = true;
};

/// Where an encoder's bytes go: called with consecutive pieces, returns false if it can take no more. It must not
/// throw.
template <class S>
concept byte_sink = requires(S& sink, std::span<const std::byte> bytes) {
  { sink(bytes) } -> std::same_as<bool>;
};

/// A sink that appends to a vector.
class vector_sink {
 public:
  explicit vector_sink(std::vector<std::byte>& out) noexcept : out_(&out) {}

  bool operator()(std::span<const std::byte> bytes) noexcept {
    if (bytes.empty()) return true;
    try {
      const std::size_t at = out_->size();
      out_->resize(at + bytes.size());
      std::memcpy(out_->data() + at, bytes.data(), bytes.size());
      return true;
    } catch (...) {
      return false;
    }
  }

 private:
  std::vector<std::byte>* out_;
};

static_assert(byte_sink<vector_sink>);

}  // namespace kvexact

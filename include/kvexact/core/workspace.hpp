// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <type_traits>

namespace kvexact {

/// Carves aligned arrays out of memory that the caller owns, so that hot paths never allocate. Running it over an empty span counts what
/// a layout needs: `take` then returns empty spans and `needed()` still grows.
class workspace {
 public:
  static constexpr std::size_t alignment = 64;

  workspace() noexcept = default;
  explicit workspace(std::span<std::byte> memory) noexcept : memory_(memory) {}

  /// `count` elements, aligned to 64 bytes, contents unspecified; empty once the memory has run out.
  template <class T>
    requires std::is_trivially_default_constructible_v<T> && std::is_trivially_destructible_v<T>
  [[nodiscard]] std::span<T> take(std::size_t count) noexcept {
    static_assert(alignof(T) <= alignment);
    // Sizes that no memory has count as `most`, so that nothing overflows.
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max() / 4 / alignment * alignment;
    const std::size_t bytes = count > most / sizeof(T) ? most : (count * sizeof(T) + alignment - 1) / alignment * alignment;
    needed_ = std::min(needed_ + bytes, most);
    void* at = memory_.data();
    std::size_t space = memory_.size();
    if (at == nullptr || std::align(alignment, bytes, at, space) == nullptr) return {};
    memory_ = {static_cast<std::byte*>(at) + bytes, space - bytes};
    return {::new (at) T[count], count};
  }

  /// Bytes that fit everything taken so far, wherever the memory starts.
  [[nodiscard]] std::size_t needed() const noexcept { return needed_ + alignment; }

 private:
  std::span<std::byte> memory_;
  std::size_t needed_ = 0;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>

namespace kvexact {

/// A resource that each coming iteration has the same number of bytes of, and what of it is spoken for. Slots are numbered from 0 for ever;
/// those from `begin()` (the iteration that runs or comes next) to `end()` can be reserved. What is reserved never exceeds `capacity()`.
class reservation_ring {
 public:
  /// Errors: invalid_argument (no slots), out_of_memory.
  [[nodiscard]] static result<reservation_ring> make(std::uint64_t capacity, std::uint32_t slots) noexcept {
    if (slots == 0) return error{error_code::invalid_argument, "a reservation ring needs slots"};
    reservation_ring made;
    try {
      made.reserved_.resize(slots);
    } catch (...) {
      return error{error_code::out_of_memory, "a reservation ring"};
    }
    made.capacity_ = capacity;
    return made;
  }

  [[nodiscard]] std::uint64_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::uint64_t begin() const noexcept { return begin_; }
  [[nodiscard]] std::uint64_t end() const noexcept { return begin_ + reserved_.size(); }
  /// 0 outside of begin() to end().
  [[nodiscard]] std::uint64_t reserved(std::uint64_t slot) const noexcept { return contains(slot) ? at(slot) : 0; }
  [[nodiscard]] std::uint64_t free(std::uint64_t slot) const noexcept { return contains(slot) ? capacity_ - at(slot) : 0; }

  /// In each slot from `first` to before `last`, or, if it is not free in all of them, in none: then false.
  [[nodiscard]] bool reserve(std::uint64_t first, std::uint64_t last, std::uint64_t bytes) noexcept {
    for (std::uint64_t slot = first; slot < last; ++slot)
      if (!contains(slot) || free(slot) < bytes) return false;
    for (std::uint64_t slot = first; slot < last; ++slot) at(slot) += bytes;
    return true;
  }
  /// What was reserved there; slots that have passed are left out.
  void release(std::uint64_t first, std::uint64_t last, std::uint64_t bytes) noexcept {
    for (std::uint64_t slot = std::max(first, begin_); slot < std::min(last, end()); ++slot) at(slot) -= bytes;
  }
  /// For ever, from the first slot on after which it stays free. Gives that slot, or `end()` if there is none; then nothing is reserved.
  [[nodiscard]] std::uint64_t hold(std::uint64_t bytes) noexcept {
    if (capacity_ - held_ < bytes) return end();
    std::uint64_t first = end();
    while (first > begin_ && free(first - 1) >= bytes) --first;
    if (first == end()) return first;
    for (std::uint64_t slot = first; slot < end(); ++slot) at(slot) += bytes;
    held_ += bytes;
    return first;
  }
  /// From `last` on, what `hold` reserved from `first` on.
  void end_hold(std::uint64_t first, std::uint64_t last, std::uint64_t bytes) noexcept {
    release(std::max(first, last), end(), bytes);
    held_ -= bytes;
  }
  /// The first slot passes.
  void advance() noexcept {
    at(begin_) = held_;
    ++begin_;
  }

 private:
  reservation_ring() noexcept = default;
  [[nodiscard]] bool contains(std::uint64_t slot) const noexcept { return slot >= begin_ && slot < end(); }
  [[nodiscard]] std::uint64_t& at(std::uint64_t slot) noexcept { return reserved_[static_cast<std::size_t>(slot % reserved_.size())]; }
  [[nodiscard]] std::uint64_t at(std::uint64_t slot) const noexcept { return reserved_[static_cast<std::size_t>(slot % reserved_.size())]; }

  std::vector<std::uint64_t> reserved_;
  std::uint64_t capacity_ = 0;
  std::uint64_t held_ = 0;
  std::uint64_t begin_ = 0;
};

}  // namespace kvexact

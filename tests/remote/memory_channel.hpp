// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/remote/byte_channel.hpp>

namespace kvexact::test {

/// What both ends of a connection would see, in one thread. Time has always run out where there is nothing to move.
struct memory_line {
  std::vector<std::byte> sent, arriving;
  std::size_t arrived = 0;                  ///< of `arriving`
  std::size_t at_once = ~std::size_t{0};    ///< most bytes that one call moves
  std::size_t room = ~std::size_t{0};       ///< bytes that can still be sent
  bool is_closed = false;                   ///< by the other side, behind `arriving`
};

class memory_channel {
 public:
  explicit memory_channel(memory_line& line) noexcept : line_(&line) {}

  result<std::size_t> send(std::span<const std::byte> bytes, channel_deadline) noexcept {
    const std::size_t moved = std::min({bytes.size(), line_->at_once, line_->room});
    if (moved == 0) return error{error_code::timed_out, "a full line"};
    line_->room -= moved;
    line_->sent.insert(line_->sent.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(moved));
    return moved;
  }
  result<std::size_t> receive(std::span<std::byte> bytes, channel_deadline) noexcept {
    const std::size_t moved = std::min({bytes.size(), line_->at_once, line_->arriving.size() - line_->arrived});
    if (moved == 0 && line_->is_closed) return error{error_code::truncated, "a closed line"};
    if (moved == 0) return error{error_code::timed_out, "an empty line"};
    std::copy_n(line_->arriving.begin() + static_cast<std::ptrdiff_t>(line_->arrived), moved, bytes.begin());
    line_->arrived += moved;
    return moved;
  }

 private:
  memory_line* line_;
};

static_assert(byte_channel<memory_channel>);

}  // namespace kvexact::test

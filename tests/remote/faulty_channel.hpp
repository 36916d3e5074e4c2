// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <kvexact/core/result.hpp>
#include <kvexact/remote/byte_channel.hpp>

#include "../../examples/common/tcp_channel.hpp"  // also where the examples are not built

namespace kvexact::test {

/// What goes wrong with one byte of a connection, and how many have crossed it.
struct line_fault {
  enum class kind { none, close, flip, stall };
  kind what = kind::none;
  bool of_received = false;   ///< else of those sent
  std::uint64_t at = 0;       ///< number of the byte
  std::uint64_t sent = 0, received = 0;
  std::uint64_t connections = 0;
};

/// A TCP connection that ends at a byte, changes it, or keeps it and all that follow to itself.
class faulty_channel {
 public:
  faulty_channel(examples::tcp_channel inner, line_fault& fault) noexcept : inner_(std::move(inner)), fault_(&fault) {}

  result<std::size_t> send(std::span<const std::byte> bytes, channel_deadline deadline) noexcept {
    const auto fault = next(false, fault_->sent, bytes);
    if (is_closed_) return error{error_code::output_failed, "a closed line"};
    if (fault == line_fault::kind::stall) return error{error_code::timed_out, "a line that stalls"};
    const std::byte bad = bytes.front() ^ std::byte{4};
    const auto sent = inner_.send(fault == line_fault::kind::flip ? std::span(&bad, 1) : bytes, deadline);
    return counted(sent, fault, fault_->sent);
  }
  result<std::size_t> receive(std::span<std::byte> bytes, channel_deadline deadline) noexcept {
    const auto fault = next(true, fault_->received, bytes);
    if (is_closed_) return error{error_code::truncated, "a closed line"};
    if (fault == line_fault::kind::stall) return error{error_code::timed_out, "a line that stalls"};
    const auto received = inner_.receive(bytes, deadline);
    if (received && fault == line_fault::kind::flip) bytes.front() ^= std::byte{4};
    return counted(received, fault, fault_->received);
  }

 private:
  /// What happens to the next byte; `bytes` is cut before the one that something happens to.
  template <class Byte>
  line_fault::kind next(bool received, std::uint64_t moved, std::span<Byte>& bytes) noexcept {
    if (fault_->of_received != received || moved > fault_->at) return line_fault::kind::none;
    if (moved < fault_->at) {
      bytes = bytes.first(static_cast<std::size_t>(std::min<std::uint64_t>(bytes.size(), fault_->at - moved)));
      return line_fault::kind::none;
    }
    if (fault_->what == line_fault::kind::close) {
      is_closed_ = true;
      fault_->what = line_fault::kind::none;  // not the next connection, too
    }
    return fault_->what;
  }
  result<std::size_t> counted(const result<std::size_t>& moved, line_fault::kind fault, std::uint64_t& counter) noexcept {
    if (moved) counter += *moved;
    if (moved && fault == line_fault::kind::flip) fault_->what = line_fault::kind::none;
    return moved;
  }

  examples::tcp_channel inner_;
  line_fault* fault_;
  bool is_closed_ = false;
};

static_assert(byte_channel<faulty_channel>);

}  // namespace kvexact::test

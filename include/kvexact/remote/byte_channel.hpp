// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <span>

#include <kvexact/core/result.hpp>

namespace kvexact {

using channel_deadline = std::chrono::steady_clock::time_point;

/// So much later than now; never for durations that reach beyond the clock.
[[nodiscard]] inline channel_deadline deadline_after(std::chrono::nanoseconds duration) noexcept {
  const auto now = std::chrono::steady_clock::now();
  return duration > channel_deadline::max() - now ? channel_deadline::max() : now + std::max(duration, std::chrono::nanoseconds(0));
}

/// A connection to another machine that keeps bytes in order, as TCP does. Both functions return as soon as they have moved some bytes, and
/// say how many: at least one, unless there were none to move.
///
/// - `send(bytes, deadline)`: takes bytes from the front. Errors: timed_out (none were taken, the connection is as before), output_failed.
/// - `receive(bytes, deadline)`: fills bytes from the front. Errors: timed_out, truncated (the other side has closed the connection, or it
///   broke).
///
/// A deadline that has passed means: do not wait. Destruction closes the connection.
template <class C>
concept byte_channel = std::movable<C> && requires(C& channel, std::span<const std::byte> out, std::span<std::byte> in,
                                                   channel_deadline deadline) {
  { channel.send(out, deadline) } noexcept -> std::same_as<result<std::size_t>>;
  { channel.receive(in, deadline) } noexcept -> std::same_as<result<std::size_t>>;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>

#include <kvexact/core/result.hpp>

namespace kvexact {

/// Brings full caches from where they live (host memory, another machine) to where they are verified. A request has at most one load, from
/// `start` to `release`.
///
/// - `start(request, attempt)`: takes memory for the request's full cache and begins to load its rows, layer by layer from the first;
///   returns at once. Loads are served in the order in which they are started. `attempt` tells the loads of a request apart.
/// - `wait(request, layer, limit)`: returns when the rows of the layer can be read, at once if they can already. Errors: timed_out after
///   `limit` (the load goes on), what made the load fail, out_of_range (no load).
/// - `left(request)`: bytes that are still to come; 0: all are there. Errors: what made the load fail, out_of_range (no load).
/// - `release(request)`: gives the load up if it is under way, and frees the request's memory, also where it holds a cache that was computed
///   there; when it returns, nothing writes to that memory any more. If there is none it does nothing.
///
/// After an error of `start` there is no load. One that has failed later stays until it is released.
template <class L>
concept cache_loader =
    requires(L& loader, std::uint64_t request, std::uint32_t attempt, std::uint32_t layer, std::chrono::nanoseconds limit) {
      { loader.start(request, attempt) } noexcept -> std::same_as<result<void>>;
      { loader.wait(request, layer, limit) } noexcept -> std::same_as<result<void>>;
      { loader.left(request) } noexcept -> std::same_as<result<std::uint64_t>>;
      { loader.release(request) } noexcept;
    };

}  // namespace kvexact

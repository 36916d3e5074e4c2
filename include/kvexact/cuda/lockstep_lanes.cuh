// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>

#include <kvexact/core/config.hpp>

namespace kvexact::cuda {

/// A value of type T for each lane of L.
template <class L, class T>
using per_lane = typename L::template per_lane<T>;

/// Lanes that take every step together, 8, 16 or 32 of them. On a device they are the threads of a warp or of a part of one, and a
/// `per_lane<T>` is a register; on the host, where tests run the very same algorithms, it is an array.
///
/// - `count()`: how many. The same for all lanes, like everything else that is no `per_lane`.
/// - `each(step, values...)`: step(lane, value...) in every lane, with references to the lane's own values.
/// - `shuffle(value, source)`: in every lane, the value of lane source(lane), which is below `count()`.
template <class L>
concept lockstep_lanes = std::copyable<L> && requires(const L& lanes, per_lane<L, float>& value, void (*step)(int, float&),
                                                      int (*source)(int)) {
  { lanes.count() } noexcept -> std::same_as<int>;
  { lanes.each(step, value) };
  { lanes.shuffle(value, source) } -> std::same_as<per_lane<L, float>>;
};

/// Combines the values of each run of `run` lanes, a power of two: every lane gets its run's outcome, to the same bit. `combine` has the
/// value of lower lanes on its left, so a minimum can prefer the first of equal values.
template <class T, lockstep_lanes L, class Combine>
[[nodiscard]] KVEXACT_HOST_DEVICE per_lane<L, T> combine_lanes(const L& lanes, per_lane<L, T> value, int run,
                                                               const Combine& combine) noexcept {
  for (int distance = 1; distance < run; distance *= 2) {
    const per_lane<L, T> other = lanes.shuffle(value, [&](int lane) { return lane ^ distance; });
    lanes.each([&](int lane, T& own, const T& its) { own = (lane & distance) == 0 ? combine(own, its) : combine(its, own); }, value, other);
  }
  return value;
}

template <lockstep_lanes L>
[[nodiscard]] KVEXACT_HOST_DEVICE per_lane<L, float> sum_of_lanes(const L& lanes, const per_lane<L, float>& value) noexcept {
  return combine_lanes<float>(lanes, value, lanes.count(), [](float a, float b) { return a + b; });
}
template <lockstep_lanes L>
[[nodiscard]] KVEXACT_HOST_DEVICE per_lane<L, float> largest_of_lanes(const L& lanes, const per_lane<L, float>& value, int run) noexcept {
  return combine_lanes<float>(lanes, value, run, [](float a, float b) { return b > a ? b : a; });
}

}  // namespace kvexact::cuda

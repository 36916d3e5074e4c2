// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cassert>
#include <cstddef>

#include <kvexact/cuda/lockstep_lanes.cuh>
#include <kvexact/cuda/octet.cuh>

namespace kvexact::test {

/// The lanes of a warp, or of a part of one, as arrays: what kernels compute, on the host. All lanes finish a step before any begins the
/// next.
class emulated_lanes {
 public:
  static constexpr std::size_t most = 32;
  template <class T>
  using per_lane = std::array<T, most>;

  explicit emulated_lanes(int count) noexcept : count_(count) { assert(count == 8 || count == 16 || count == 32); }

  [[nodiscard]] int count() const noexcept { return count_; }
  template <class Step, class... Values>
  void each(const Step& step, Values&... values) const noexcept {
    for (std::size_t lane = 0; lane < static_cast<std::size_t>(count_); ++lane) step(static_cast<int>(lane), values[lane]...);
  }
  template <class T, class Source>
  [[nodiscard]] std::array<T, most> shuffle(const std::array<T, most>& value, const Source& source) const noexcept {
    std::array<T, most> made{};
    for (std::size_t lane = 0; lane < static_cast<std::size_t>(count_); ++lane) {
      const int from = source(static_cast<int>(lane));
      assert(from >= 0 && from < count_);
      made[lane] = value[static_cast<std::size_t>(from)];
    }
    return made;
  }

 private:
  int count_;
};

static_assert(cuda::lockstep_lanes<emulated_lanes>);

}  // namespace kvexact::test

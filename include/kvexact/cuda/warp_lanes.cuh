// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>

#include <kvexact/core/result.hpp>
#include <kvexact/cuda/lockstep_lanes.cuh>
#include <kvexact/cuda/octet.cuh>

#ifdef __CUDACC__

#include <cuda_runtime.h>

namespace kvexact::cuda {

/// The lanes of the part of a warp that a thread belongs to: those whose index divided by `count` is the same. Threads of a block are
/// numbered along x only. Parts need not stay together, so each may leave a kernel by itself.
class warp_lanes {
 public:
  template <class T>
  using per_lane = T;

  __device__ explicit warp_lanes(int count) noexcept : count_(count) {}

  [[nodiscard]] __device__ int count() const noexcept { return count_; }
  template <class Step, class... Values>
  __device__ void each(const Step& step, Values&... values) const noexcept {
    step(own(), values...);
  }
  template <class T, class Source>
  [[nodiscard]] __device__ T shuffle(const T& value, const Source& source) const noexcept {
    const int from = source(own());
    if constexpr (std::is_arithmetic_v<T>) {
      return __shfl_sync(together(), value, from, count_);
    } else {
      static_assert(sizeof(T) % sizeof(float) == 0 && std::is_trivially_copyable_v<T>, "kvexact: lanes exchange floats");
      float words[sizeof(T) / sizeof(float)];
      memcpy(words, &value, sizeof(T));
      for (float& word : words) word = __shfl_sync(together(), word, from, count_);
      T made;
      memcpy(&made, words, sizeof(T));
      return made;
    }
  }

 private:
  [[nodiscard]] __device__ int own() const noexcept { return static_cast<int>(threadIdx.x) & (count_ - 1); }
  [[nodiscard]] __device__ unsigned together() const noexcept {
    return (0xffffffffU >> (32 - count_)) << (threadIdx.x % 32 & ~static_cast<unsigned>(count_ - 1));
  }

  int count_;
};

/// How a kernel is cut into blocks; never changes a result.
struct launch_tuning {
  unsigned threads_per_block;
};
/// For kernels of independent rows and groups: enough warps to hide memory latency, few enough that small caches fill many processors.
[[nodiscard]] constexpr launch_tuning default_tuning() noexcept { return {128}; }

/// Which piece of its kernel's work these lanes do; the last block has lanes for more pieces than there are.
[[nodiscard]] __device__ inline std::uint64_t piece_of_work(const warp_lanes& lanes) noexcept {
  return (std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) / static_cast<unsigned>(lanes.count());
}

/// A copy of kernel parameters in shared memory, where lanes can look up different entries of tables at once. All threads of a
/// block call it, once for each type: a second copy of a type would take the place of the first.
template <class Parameters>
[[nodiscard]] __device__ const Parameters& in_shared_memory(const Parameters& parameters) noexcept {
  static_assert(std::is_trivially_copyable_v<Parameters> && sizeof(Parameters) % 4 == 0 && alignof(Parameters) <= 4);
  __shared__ std::uint32_t words[sizeof(Parameters) / 4];
  const auto* const from = reinterpret_cast<const std::uint32_t*>(&parameters);
  for (unsigned i = threadIdx.x; i < sizeof(Parameters) / 4; i += blockDim.x) words[i] = from[i];
  __syncthreads();
  return *reinterpret_cast<const Parameters*>(words);
}

/// Launches `kernel` with `lanes` threads for each of `pieces` pieces of work. Errors: out_of_range (more than a grid can have),
/// device_error (the launch failed; what fails later is for the stream's next synchronisation to tell).
template <class... Parameters, class... Arguments>
[[nodiscard]] result<void> launch(void (*kernel)(Parameters...), std::uint64_t pieces, int lanes, cudaStream_t stream,
                                  Arguments&&... arguments) noexcept {
  if (pieces == 0) return {};
  const launch_tuning tuning = default_tuning();
  const std::uint64_t pieces_per_block = tuning.threads_per_block / static_cast<unsigned>(lanes);
  const std::uint64_t blocks = (pieces - 1) / pieces_per_block + 1;
  if (blocks > std::numeric_limits<std::int32_t>::max())
    return error{error_code::out_of_range, "more rows than a grid of a device can have"};
  cudaLaunchConfig_t configuration{};
  configuration.gridDim = dim3(static_cast<unsigned>(blocks));
  configuration.blockDim = dim3(tuning.threads_per_block);
  configuration.stream = stream;
  const cudaError_t status = cudaLaunchKernelEx(&configuration, kernel, std::forward<Arguments>(arguments)...);
  if (status != cudaSuccess) return error{error_code::device_error, cudaGetErrorString(status)};
  return {};
}

}  // namespace kvexact::cuda

#endif

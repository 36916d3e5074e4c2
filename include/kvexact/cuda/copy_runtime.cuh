// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>

#include <kvexact/core/result.hpp>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

namespace kvexact::cuda {

/// Streams, events and copies. `cuda_runtime` is the one that devices have; tests script another one on the host. Handles are pointers.
///
/// - `make_stream`, `make_event`, `destroy(handle)`: a stream does not wait for the default stream, an event tells no time.
/// - `copy(to, from, bytes, stream)`: queued on the stream, in either direction.
/// - `record(event, stream)`: the event is done when all that is on the stream by now is.
/// - `wait(stream, event)`: what is queued on the stream from now on waits for the event as it is recorded now.
/// - `query(event)`: whether it is done. `synchronise(stream)`: returns when all that is on the stream is.
/// Errors: device_error.
template <class R>
concept copy_runtime =
    std::copyable<R> && std::is_pointer_v<typename R::stream> && std::is_pointer_v<typename R::event> &&
    requires(const R& runtime, typename R::stream stream, typename R::event event, void* to, const void* from, std::size_t bytes) {
      { runtime.make_stream() } noexcept -> std::same_as<result<typename R::stream>>;
      { runtime.make_event() } noexcept -> std::same_as<result<typename R::event>>;
      { runtime.destroy(stream) } noexcept;
      { runtime.destroy(event) } noexcept;
      { runtime.copy(to, from, bytes, stream) } noexcept -> std::same_as<result<void>>;
      { runtime.record(event, stream) } noexcept -> std::same_as<result<void>>;
      { runtime.wait(stream, event) } noexcept -> std::same_as<result<void>>;
      { runtime.query(event) } noexcept -> std::same_as<result<bool>>;
      { runtime.synchronise(stream) } noexcept -> std::same_as<result<void>>;
    };

template <copy_runtime R>
struct handle_destroyer {
  [[no_unique_address]] R runtime;

  template <class Handle>
  void operator()(Handle* handle) const noexcept {
    runtime.destroy(handle);
  }
};
/// A stream or an event of R, destroyed with its owner. What is queued goes on.
template <copy_runtime R, class Handle>
using owned_handle = std::unique_ptr<std::remove_pointer_t<Handle>, handle_destroyer<R>>;

#ifdef __CUDACC__

/// The CUDA runtime, for the device that is current in the calling thread.
struct cuda_runtime {
  using stream = cudaStream_t;
  using event = cudaEvent_t;

  [[nodiscard]] static result<stream> make_stream() noexcept {
    stream made = nullptr;
    if (const auto done = told(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking)); !done) return done.error();
    return made;
  }
  [[nodiscard]] static result<event> make_event() noexcept {
    event made = nullptr;
    if (const auto done = told(cudaEventCreateWithFlags(&made, cudaEventDisableTiming)); !done) return done.error();
    return made;
  }
  static void destroy(stream handle) noexcept { (void)told(cudaStreamDestroy(handle)); }
  static void destroy(event handle) noexcept { (void)told(cudaEventDestroy(handle)); }
  [[nodiscard]] static result<void> copy(void* to, const void* from, std::size_t bytes, stream on) noexcept {
    return told(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on));
  }
  [[nodiscard]] static result<void> record(event what, stream on) noexcept { return told(cudaEventRecord(what, on)); }
  [[nodiscard]] static result<void> wait(stream which, event what) noexcept { return told(cudaStreamWaitEvent(which, what, 0)); }
  [[nodiscard]] static result<bool> query(event what) noexcept {
    const cudaError_t status = cudaEventQuery(what);
    const auto done = told(status);
    if (status == cudaErrorNotReady) return false;
    if (!done) return done.error();
    return true;
  }
  [[nodiscard]] static result<void> synchronise(stream on) noexcept { return told(cudaStreamSynchronize(on)); }

 private:
  [[nodiscard]] static result<void> told(cudaError_t status) noexcept {
    if (status == cudaSuccess) return {};
    (void)cudaGetLastError();  // else whoever asks next after a kernel takes it for the kernel's
    return error{error_code::device_error, cudaGetErrorString(status)};
  }
};

#endif

}  // namespace kvexact::cuda

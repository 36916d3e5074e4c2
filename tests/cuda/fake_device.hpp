// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/core/result.hpp>
#include <kvexact/cuda/copy_runtime.cuh>

namespace kvexact::test {

/// Streams and events on the host: what is queued is done when the test says so, and any call can be made to fail.
class fake_device {
 public:
  struct event {
    std::uint64_t recorded = 0;
    std::uint64_t done = 0;
    bool live = true;
  };
  struct operation {
    std::byte* to = nullptr;  // a copy, or
    const std::byte* from = nullptr;
    std::size_t bytes = 0;
    event* what = nullptr;  // a record or a wait
    std::uint64_t ticket = 0;
    bool waits = false;
  };
  struct stream {
    std::deque<operation> queued;
    bool live = true;
  };

  /// Does what can be done, of copies not more than this many, those of earlier streams first.
  void advance(std::size_t copies) {
    for (bool moved = true; moved;) {
      moved = false;
      for (stream& each : streams)
        while (!each.queued.empty() && step(each, copies)) moved = true;
    }
  }
  void finish() { advance(std::numeric_limits<std::size_t>::max()); }
  /// Counts the call; an error if it is one that is to fail.
  result<void> call() {
    const std::size_t call = calls++;
    if (call == fails || (call > fails && lost)) return error{error_code::device_error, "as the test wants it"};
    return {};
  }
  [[nodiscard]] std::ptrdiff_t live_streams() const { return std::ranges::count(streams, true, &stream::live); }
  [[nodiscard]] std::ptrdiff_t live_events() const { return std::ranges::count(events, true, &event::live); }

  std::deque<stream> streams;
  std::deque<event> events;
  std::vector<const std::byte*> copied_to;  // in this order
  std::size_t copies_per_query = 0;
  std::size_t calls = 0;
  std::size_t fails = std::numeric_limits<std::size_t>::max();  // this call,
  bool lost = false;                                            // and all that follow

 private:
  bool step(stream& of, std::size_t& copies) {
    const operation next = of.queued.front();
    if (next.what == nullptr) {
      if (copies == 0) return false;
      --copies;
      std::memcpy(next.to, next.from, next.bytes);
      copied_to.push_back(next.to);
    } else if (next.waits) {
      if (next.what->done < next.ticket) return false;
    } else {
      next.what->done = std::max(next.what->done, next.ticket);
    }
    of.queued.pop_front();
    return true;
  }
};

struct fake_runtime {
  using stream = fake_device::stream*;
  using event = fake_device::event*;

  fake_device* device;

  [[nodiscard]] result<stream> make_stream() const noexcept { return made(device->streams); }
  [[nodiscard]] result<event> make_event() const noexcept { return made(device->events); }
  template <class Handle>
  void destroy(Handle* handle) const noexcept {
    CHECK(handle->live);
    handle->live = false;
  }
  [[nodiscard]] result<void> copy(void* to, const void* from, std::size_t bytes, stream on) const noexcept {
    return queue(on, {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, nullptr, 0, false});
  }
  [[nodiscard]] result<void> record(event what, stream on) const noexcept {
    CHECK(what->live);
    if (const auto queued = queue(on, {nullptr, nullptr, 0, what, what->recorded + 1, false}); !queued) return queued;
    ++what->recorded;
    return {};
  }
  [[nodiscard]] result<void> wait(stream which, event what) const noexcept {
    CHECK(what->live);
    return queue(which, {nullptr, nullptr, 0, what, what->recorded, true});
  }
  [[nodiscard]] result<bool> query(event what) const noexcept {
    CHECK(what->live);
    device->advance(device->copies_per_query);
    if (const auto may = device->call(); !may) return may.error();
    return what->done == what->recorded;
  }
  [[nodiscard]] result<void> synchronise(stream on) const noexcept {
    if (const auto may = device->call(); !may) return may.error();
    for (std::size_t left = 10000; !on->queued.empty() && left > 0; --left) device->advance(1);
    CHECK(on->queued.empty());
    return {};
  }

 private:
  template <class T>
  [[nodiscard]] result<T*> made(std::deque<T>& all) const noexcept {
    if (const auto may = device->call(); !may) return may.error();
    return &all.emplace_back();
  }
  [[nodiscard]] result<void> queue(stream on, const fake_device::operation& next) const noexcept {
    CHECK(on->live);
    if (const auto may = device->call(); !may) return may.error();
    on->queued.push_back(next);
    return {};
  }
};
static_assert(cuda::copy_runtime<fake_runtime>);

}  // namespace kvexact::test

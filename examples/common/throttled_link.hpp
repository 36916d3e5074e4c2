// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/cache_loader.hpp>

namespace kvexact::examples {

/// A full cache as a link sees it.
class linked_cache {
 public:
  linked_cache() = default;
  linked_cache(const linked_cache&) = delete;
  linked_cache& operator=(const linked_cache&) = delete;
  virtual ~linked_cache() = default;

  [[nodiscard]] virtual std::uint32_t layers() const noexcept = 0;
  /// Of a layer, that a load moves.
  [[nodiscard]] virtual std::uint64_t layer_bytes() const noexcept = 0;
  /// Takes memory where the cache is verified.
  virtual result<void> place() noexcept = 0;
  /// Brings a layer there. In the thread of the link, between `place` and `free`.
  virtual void copy(std::uint32_t layer) noexcept = 0;
  /// Gives that memory back; also after the cache was computed there, and when there is none.
  virtual void free() noexcept = 0;
};

/// A link that moves so many bytes a second: a thread that copies layers, each when so much time has passed. A `cache_loader`; one thread
/// calls.
class throttled_link {
 public:
  struct traffic {
    std::uint64_t bytes = 0;
    double seconds = 0;  ///< in which the link was busy
  };

  explicit throttled_link(double bytes_per_second) : bytes_per_second_(bytes_per_second), thread_([this] { serve(); }) {}
  throttled_link(const throttled_link&) = delete;
  throttled_link& operator=(const throttled_link&) = delete;
  ~throttled_link() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// Before the first load of the request.
  void add(std::uint64_t request, linked_cache& cache) {
    const std::lock_guard lock(mutex_);
    caches_[request] = &cache;
  }
  /// Releases its memory and forgets it.
  void remove(std::uint64_t request) noexcept {
    release(request);
    const std::lock_guard lock(mutex_);
    caches_.erase(request);
  }
  [[nodiscard]] traffic moved() const {
    const std::lock_guard lock(mutex_);
    return moved_;
  }

  result<void> start(std::uint64_t request, std::uint32_t) noexcept {
    release(request);
    {
      const std::lock_guard lock(mutex_);
      const auto cache = caches_.find(request);
      if (cache == caches_.end()) return error{error_code::out_of_range, "a request that the link does not know"};
      if (const auto placed = cache->second->place(); !placed) return placed;
      loads_.push_back({request, cache->second});
    }
    changed_.notify_all();
    return {};
  }
  result<void> wait(std::uint64_t request, std::uint32_t layer, std::chrono::nanoseconds limit) noexcept {
    std::unique_lock lock(mutex_);
    const load* const of = find(request);
    if (of == nullptr) return error{error_code::out_of_range, "no load of this request"};
    if (changed_.wait_for(lock, limit, [&] { return of->arrived > layer; })) return {};
    return error{error_code::timed_out, "a layer of a full cache"};
  }
  result<std::uint64_t> left(std::uint64_t request) noexcept {
    const std::lock_guard lock(mutex_);
    const load* const of = find(request);
    if (of == nullptr) return error{error_code::out_of_range, "no load of this request"};
    return (of->cache->layers() - of->arrived) * of->cache->layer_bytes();
  }
  void release(std::uint64_t request) noexcept {
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(loads_, [&](const load& each) { return each.request == request; });
      if (const auto cache = caches_.find(request); cache != caches_.end()) cache->second->free();
    }
    changed_.notify_all();
  }

 private:
  using clock = std::chrono::steady_clock;
  struct load {
    std::uint64_t request = 0;
    linked_cache* cache = nullptr;
    std::uint32_t arrived = 0;  // layers
  };

  [[nodiscard]] load* find(std::uint64_t request) noexcept {
    const auto found = std::ranges::find(loads_, request, &load::request);
    return found == loads_.end() ? nullptr : &*found;
  }
  /// The load that is served: the first one that is not complete.
  [[nodiscard]] load* current() noexcept {
    const auto found = std::ranges::find_if(loads_, [](const load& each) { return each.arrived < each.cache->layers(); });
    return found == loads_.end() ? nullptr : &*found;
  }
  void serve() noexcept {
    std::unique_lock lock(mutex_);
    clock::time_point idle_since = clock::now();
    while (!stopping_) {
      const load* const next = current();
      if (next == nullptr) {
        changed_.wait(lock);
        idle_since = std::max(idle_since, clock::now());
        continue;
      }
      // From when the layer before has arrived, whenever this thread was woken: on the whole the rate is exact.
      const double seconds = static_cast<double>(next->cache->layer_bytes()) / bytes_per_second_;
      const clock::time_point arrives = idle_since + std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(seconds));
      const std::uint64_t request = next->request;
      const std::uint32_t layer = next->arrived;
      const bool is_given_up = changed_.wait_until(lock, arrives, [&] {
        const load* const now = current();
        return stopping_ || now == nullptr || now->request != request || now->arrived != layer;
      });
      if (is_given_up) {
        idle_since = clock::now();
        continue;
      }
      load& served = *current();
      served.cache->copy(layer);
      ++served.arrived;
      moved_.bytes += served.cache->layer_bytes();
      moved_.seconds += seconds;
      idle_since = arrives;
      changed_.notify_all();
    }
  }

  double bytes_per_second_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, linked_cache*> caches_;
  std::deque<load> loads_;  // in the order in which they are served
  traffic moved_;
  bool stopping_ = false;
  std::thread thread_;
};

static_assert(cache_loader<throttled_link>);

}  // namespace kvexact::examples

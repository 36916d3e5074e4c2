// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace kvexact::examples {

/// A few threads that share the iterations of a loop. Which thread runs which iteration varies; results must not depend on it.
class workers {
 public:
  /// `count` threads including the caller, at least 1. May throw std::system_error.
  explicit workers(unsigned count) {
    for (unsigned i = 1; i < count; ++i) threads_.emplace_back([this, i] { serve(i); });
  }
  workers(const workers&) = delete;
  workers& operator=(const workers&) = delete;
  ~workers() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  [[nodiscard]] std::size_t size() const noexcept { return threads_.size() + 1; }

  /// Calls body(iteration, worker) for every iteration below `count`, worker < size(); returns when all are done.
  template <class Body>
  void for_each(std::size_t count, Body&& body) {
    job here{[](void* context, std::size_t iteration, std::size_t worker) { (*static_cast<Body*>(context))(iteration, worker); },
             const_cast<void*>(static_cast<const void*>(&body)), count};
    if (count > 1 && !threads_.empty()) {
      {
        const std::lock_guard lock(mutex_);
        current_ = here;
        next_ = 0;
        busy_ = threads_.size();
        ++generation_;
      }
      wake_.notify_all();
      work(here, 0);
      std::unique_lock lock(mutex_);
      finished_.wait(lock, [&] { return busy_ == 0; });
    } else {
      for (std::size_t i = 0; i < count; ++i) here.call(here.context, i, 0);
    }
  }

 private:
  struct job {
    void (*call)(void*, std::size_t, std::size_t) = nullptr;
    void* context = nullptr;
    std::size_t count = 0;
  };

  void work(const job& here, std::size_t worker) {
    for (std::size_t i = next_++; i < here.count; i = next_++) here.call(here.context, i, worker);
  }
  void serve(std::size_t worker) {
    std::size_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      const job here = current_;
      lock.unlock();
      work(here, worker);
      lock.lock();
      if (--busy_ == 0) finished_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::atomic<std::size_t> next_{0};
  job current_;
  std::size_t generation_ = 0, busy_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvexact::examples

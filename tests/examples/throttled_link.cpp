// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <common/throttled_link.hpp>

#include "speculative/offloaded_sequences.hpp"

using namespace kvexact;
using namespace kvexact::examples;
using namespace kvexact::test;

namespace {

class linked_toy final : public linked_cache {
 public:
  explicit linked_toy(offloaded_toy& toy) : toy_(&toy) {}
  [[nodiscard]] std::uint32_t layers() const noexcept override { return toy_engine::layer_count; }
  [[nodiscard]] std::uint64_t layer_bytes() const noexcept override { return toy_->layer_bytes(); }
  result<void> place() noexcept override { return toy_->place(); }
  void copy(std::uint32_t layer) noexcept override { toy_->copy(layer); }
  void free() noexcept override { toy_->free(); }

 private:
  offloaded_toy* toy_;
};

/// A few microseconds for a cache.
struct fast_link : throttled_link {
  static constexpr std::chrono::seconds patience{60};
  explicit fast_link(fault_plan&) : throttled_link(1e8) {}
  void add(std::uint64_t request, offloaded_toy& cache) { throttled_link::add(request, caches.emplace_back(cache)); }
  void pause() const { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }
  std::deque<linked_toy> caches;
};

/// So slow that no layer comes.
struct stuck_link : throttled_link {
  static constexpr std::chrono::milliseconds patience{1};
  explicit stuck_link(fault_plan&) : throttled_link(1e-3) {}
  void add(std::uint64_t request, offloaded_toy& cache) { throttled_link::add(request, caches.emplace_back(cache)); }
  void pause() const {}
  std::deque<linked_toy> caches;
};

/// A cache of bytes.
struct bytes final : linked_cache {
  std::vector<int> home = std::vector<int>(8, 7), device;
  int placed = 0;

  [[nodiscard]] std::uint32_t layers() const noexcept override { return 8; }
  [[nodiscard]] std::uint64_t layer_bytes() const noexcept override { return 1000; }
  result<void> place() noexcept override {
    ++placed;
    device.assign(8, 0);
    return {};
  }
  void copy(std::uint32_t layer) noexcept override { device[layer] = home[layer]; }
  void free() noexcept override { device.clear(); }
};

}  // namespace

TEST_CASE("throttled_link: layers come one after another, loads in the order of their start") {
  bytes first, second;
  throttled_link link(1e6);
  link.add(1, first);
  link.add(2, second);
  CHECK(link.start(3, 1).error().code == error_code::out_of_range);
  CHECK(link.wait(1, 0, std::chrono::seconds(1)).error().code == error_code::out_of_range);
  CHECK(link.left(1).error().code == error_code::out_of_range);
  REQUIRE(link.start(1, 1));
  REQUIRE(link.start(2, 1));
  REQUIRE(link.wait(2, 0, std::chrono::seconds(60)));
  CHECK(*link.left(1) == 0);
  CHECK(first.device == first.home);
  CHECK(second.device[0] == 7);
  REQUIRE(link.wait(2, 7, std::chrono::seconds(60)));
  CHECK(second.device == second.home);
  CHECK(*link.left(2) == 0);
  CHECK(link.moved().bytes == 16000);
  CHECK(link.moved().seconds == doctest::Approx(0.016));
  link.release(1);
  CHECK(first.device.empty());
  REQUIRE(link.start(1, 2));
  REQUIRE(link.wait(1, 7, std::chrono::seconds(60)));
  CHECK(first.placed == 2);
}

TEST_CASE("throttled_link: gives up what is under way") {
  bytes first, second;
  throttled_link link(1e-3);
  link.add(1, first);
  link.add(2, second);
  REQUIRE(link.start(1, 1));
  REQUIRE(link.start(2, 1));
  CHECK(link.wait(1, 0, std::chrono::milliseconds(1)).error().code == error_code::timed_out);
  CHECK(*link.left(1) == 8000);
  link.release(1);
  CHECK(first.device.empty());
  CHECK(link.left(1).error().code == error_code::out_of_range);
  CHECK(*link.left(2) == 8000);
  CHECK(link.moved().bytes == 0);
}

TEST_CASE("throttled_link: a batch whose full caches come over it has the tokens and rows of plain decoding") {
  offloaded_sequences<fast_link> all(4, {.new_tokens = 16, .patience = 100000});
  auto of = all.made_batch();
  all.submit_all(of);
  CHECK(all.run(of).empty());
  all.check_all();
  CHECK(all.accepted > 0);
  CHECK(all.link.moved().bytes > 4 * 8 * token_bytes_of);  // at least the prompts
}

TEST_CASE("throttled_link: a batch without its link") {
  offloaded_sequences<stuck_link> all(2, {.new_tokens = 8});
  auto of = all.made_batch();
  all.submit_all(of);
  for (const error& each : all.run(of)) CHECK(each.code == error_code::timed_out);
  all.check_all();
  CHECK(all.link.moved().bytes == 0);
}

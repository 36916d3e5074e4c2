// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/offloaded_batch.hpp>

#include "offloaded_sequences.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

/// A link without threads or time: a layer comes with each question.
class scripted_link {
 public:
  static constexpr std::chrono::nanoseconds patience{1};

  explicit scripted_link(fault_plan& faults) : faults_(&faults) {}

  std::uint64_t dead_after = ~std::uint64_t{0};  ///< calls
  std::function<bool(std::uint64_t request, std::uint32_t attempt)> stalls = [](auto, auto) { return false; };

  void add(std::uint64_t request, offloaded_toy& cache) { caches_[request] = &cache; }

  void pause() noexcept {}

  result<void> start(std::uint64_t request, std::uint32_t attempt) noexcept {
    CHECK(!loads_.contains(request));
    if (const auto fault = next(); !fault) return fault;
    const auto placed = caches_.at(request)->place();
    if (placed) loads_[request] = {.attempt = attempt};
    return placed;
  }
  result<void> wait(std::uint64_t request, std::uint32_t layer, std::chrono::nanoseconds) noexcept {
    load* const of = find(request);
    if (of == nullptr) return error{error_code::out_of_range, "no load"};
    if (of->layers > layer) return {};
    if (const auto alive = go_on(*of); !alive) return alive;
    if (stalls(request, of->attempt)) return error{error_code::timed_out, "a load that stands still"};
    while (of->layers <= layer) caches_.at(request)->copy(of->layers++);
    return {};
  }
  result<std::uint64_t> left(std::uint64_t request) noexcept {
    load* const of = find(request);
    if (of == nullptr) return error{error_code::out_of_range, "no load"};
    if (const auto alive = go_on(*of); !alive) return alive.error();
    if (of->layers < toy_engine::layer_count && !stalls(request, of->attempt)) caches_.at(request)->copy(of->layers++);
    return (toy_engine::layer_count - of->layers) * caches_.at(request)->layer_bytes();
  }
  void release(std::uint64_t request) noexcept {
    loads_.erase(request);
    caches_.at(request)->free();
  }

 private:
  struct load {
    std::uint32_t attempt = 0;
    std::uint32_t layers = 0;  // that have come
    bool has_failed = false;
  };

  load* find(std::uint64_t request) noexcept {
    const auto found = loads_.find(request);
    return found == loads_.end() ? nullptr : &found->second;
  }
  result<void> next() noexcept {
    if (faults_->calls >= dead_after) return error{error_code::output_failed, "a link that is dead"};
    return faults_->next();
  }
  result<void> go_on(load& of) noexcept {
    if (!of.has_failed && next()) return {};
    of.has_failed = true;
    return error{error_code::output_failed, "an injected fault"};
  }

  fault_plan* faults_;
  std::map<std::uint64_t, offloaded_toy*> caches_;
  std::map<std::uint64_t, load> loads_;
};

static_assert(cache_loader<scripted_link>);

using several = offloaded_sequences<scripted_link>;

}  // namespace

TEST_CASE("offloaded_batch: tokens and rows of plain decoding") {
  for (const std::uint32_t slots : {1U, 2U, 5U}) {
    for (const std::uint32_t length : {0U, 1U, 4U, 6U}) {
      for (const double loads : {0.2, 0.4, 5.0}) {
        CAPTURE(slots);
        CAPTURE(length);
        CAPTURE(loads);
        several all(5, {.slots = slots, .draft_length = length, .loads_per_iteration = loads});
        auto of = all.made_batch();
        all.submit_all(of);
        CHECK(all.run(of).empty());
        all.check_all();
        CHECK((all.accepted > 0) == (length > 0));
        CHECK(of.schedule().requests() == 0);
      }
    }
  }
}

TEST_CASE("offloaded_batch: draft caches take their rows before full caches leave") {
  several all(3, {.new_tokens = 20});
  auto of = all.made_batch();
  all.submit_all(of);
  while (of.size() > 0) {
    for (const batch_event& each : of.iterate()) {
      REQUIRE(each.round);
      if (each.round->stop) continue;
      const offloaded_sequence& here = all.sequences[each.id];
      const int4& cache = here.decoding->drafts().as<self_drafter>().model().cache();
      int4 expected = made_int4(here.engine->shape());
      const std::uint64_t length = here.decoding->tokens().size() - 1;
      for (std::uint32_t l = 0; l < toy_engine::layer_count; ++l) {
        REQUIRE(expected.append(l, here.reference->rows(l, 0), length));
        REQUIRE(cache.length(l) == length);
        std::vector<std::uint64_t> positions(length);
        std::vector<float> k(length * toy_engine::dim), v(k), x(k), y(k);
        REQUIRE(cache.materialise(l, 1, {positions, k, v}));
        REQUIRE(expected.materialise(l, 1, {positions, x, y}));
        REQUIRE((k == x && v == y));
      }
    }
  }
  all.check_all();
}

TEST_CASE("offloaded_batch: a fault at each call of link and engines") {
  std::size_t faults_seen = 0;
  for (const double loads : {0.4, 5.0}) {  // an iteration
    for (std::uint64_t failing = 0;; ++failing) {
      CAPTURE(loads);
      CAPTURE(failing);
      several all(2, {.slots = 1, .new_tokens = 8, .loads_per_iteration = loads});
      auto of = all.made_batch();
      all.submit_all(of);
      all.faults = {.calls = 0, .failing = failing};
      const auto failures = all.run(of);
      all.check_all();
      CHECK(failures.size() <= 1);
      faults_seen += failures.size();
      if (all.faults.calls <= failing) break;
    }
  }
  CHECK(faults_seen > 60);
}

TEST_CASE("offloaded_batch: a link that dies, and full caches are computed again") {
  for (const std::uint32_t length : {0U, 4U}) {
    for (const std::uint64_t dead_after : {0U, 3U, 50U, 100U}) {
      CAPTURE(length);
      CAPTURE(dead_after);
      several all(3, {.draft_length = length});
      auto of = all.made_batch();
      all.submit_all(of);
      all.faults = {};
      all.link.dead_after = dead_after;
      const auto failures = all.run(of);
      CHECK(failures.size() >= (length == 0 ? (dead_after < 50 ? 3 : 0) : 3));
      all.check_all();
    }
  }
}

TEST_CASE("offloaded_batch: a prompt of one token, whose cache is empty") {
  for (const std::uint64_t dead_after : {0ULL, 20ULL, ~0ULL}) {
    CAPTURE(dead_after);
    several all(3, {.shortest_prompt = 1});
    auto of = all.made_batch();
    all.submit_all(of);
    all.faults = {};
    all.link.dead_after = dead_after;
    CHECK((all.run(of).empty() == (dead_after > 20)));
    all.check_all();
  }
}

TEST_CASE("offloaded_batch: a sequence that cannot go on leaves, and stops no other") {
  several all(2, {.slots = 1, .new_tokens = 30, .small = 1});
  auto of = all.made_batch();
  all.submit_all(of);
  std::vector<std::uint64_t> left;
  for (int i = 0; of.size() > 0; ++i) {
    REQUIRE(i < 2000);
    for (const batch_event& each : of.iterate()) {
      if (!each.left) continue;
      left.push_back(each.id);
      CHECK(each.failure.has_value() == (each.id == 1));
    }
  }
  CHECK(left.size() == 2);
  CHECK(std::ranges::equal(all.sequences[0].decoding->tokens(), all.sequences[0].expected));
  CHECK(all.sequences[1].decoding->tokens().size() == 21);
  CHECK(all.memory.free == 1);
}

TEST_CASE("offloaded_batch: takes no sequence that has not begun") {
  several all(2, {});
  auto of = all.made_batch();
  offloaded_sequence& here = all.sequences[0];
  all.faults = {.calls = 0, .failing = 1};
  offloaded_toy engine({.capacity = 56, .faults = &all.faults}, all.memory, [](std::uint32_t) { return result<void>(); });
  auto failed = *decoder::make(engine, lookup(engine), {}, fixed_draft_length(2), {.sampler = *standard_sampler::make({.temperature = 0})});
  REQUIRE_FALSE(failed.begin(std::span(here.expected).first(8)));
  CHECK(of.submit(failed, {.id = 7, .full = 10, .draft = 1, .transfer = 10}).error().code == error_code::invalid_argument);
  CHECK(failed.synchronise().error().code == error_code::invalid_argument);
  CHECK(failed.forget_rows().error().code == error_code::invalid_argument);
}

TEST_CASE("offloaded_batch: loads that stand still are started again, or done without") {
  for (const bool always : {false, true}) {
    CAPTURE(always);
    several all(4, {.new_tokens = 16, .loads_per_iteration = 0.1});
    auto of = all.made_batch();
    all.submit_all(of);
    std::uint64_t stalled = 0;
    std::vector<std::uint32_t> attempts;
    all.link.stalls = [&](std::uint64_t request, std::uint32_t attempt) {
      if (request != 1) return false;
      if (attempts.empty() || attempts.back() != attempt) attempts.push_back(attempt);
      const bool here = always || attempts.size() % 2 == 1;
      stalled += here ? 1 : 0;
      return here;
    };
    const auto failures = all.run(of);
    CHECK(failures.size() >= 3);
    for (const error& each : failures) CHECK(each.code == error_code::timed_out);
    all.check_all();
    CHECK(stalled > 8);
  }
}

TEST_CASE("offloaded_batch: a drafter that is dead") {
  several all(3, {.drafts = dead});
  auto of = all.made_batch();
  all.submit_all(of);
  const auto failures = all.run(of);
  CHECK(failures.size() == 3 * 11);  // at the end of each round but the last
  for (const error& each : failures) CHECK(each.code == error_code::output_failed);
  all.check_all();
}

TEST_CASE("offloaded_batch: sequences end early, and drafters have nothing to say") {
  for (const auto drafts : {self, lookup}) {
    several all(5, {.new_tokens = 30, .ends = {3, 7}, .drafts = drafts});
    CHECK(std::ranges::any_of(all.sequences, [](const offloaded_sequence& each) { return each.expected.size() < 25; }));
    auto of = all.made_batch();
    all.submit_all(of);
    CHECK(all.run(of).empty());
    all.check_all();
  }
}

TEST_CASE("offloaded_batch: cancelled at any time, and submitted again") {
  for (int cancelled_at = 0; cancelled_at < 12; ++cancelled_at) {
    CAPTURE(cancelled_at);
    several all(3, {});
    auto of = all.made_batch();
    all.submit_all(of);
    for (int i = 0; i < cancelled_at; ++i) (void)of.iterate();
    const offloaded_sequence& here = all.sequences[1];
    REQUIRE(of.cancel(1));
    CHECK(of.cancel(1).error().code == error_code::out_of_range);
    CHECK(of.size() == 2);
    const std::size_t tokens = here.decoding->tokens().size();
    (void)of.iterate();
    CHECK(here.decoding->tokens().size() == tokens);
    const scheduled_request again{.id = 1, .full = several::bytes_of(here), .draft = 10, .transfer = several::bytes_of(here)};
    REQUIRE(of.submit(*here.decoding, again));
    CHECK(of.submit(*here.decoding, again).error().code == error_code::invalid_argument);
    CHECK(all.run(of).empty());
    all.seen.clear();
    all.check_all();
    CHECK(of.submit(*here.decoding, again).error().code == error_code::invalid_argument);  // it has ended
  }
  several all(3, {});
  {
    auto of = all.made_batch();
    all.submit_all(of);
    while (all.memory.free == all.chosen.slots) (void)of.iterate();
  }
  CHECK(all.memory.free == all.chosen.slots);
}

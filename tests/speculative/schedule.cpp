// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/schedule.hpp>

using namespace kvexact;

namespace {

constexpr std::uint32_t true_token(std::uint64_t id, std::size_t position) {
  return static_cast<std::uint32_t>((id * 1000003 + position) * 2654435761u >> 7);
}

/// An engine as bad as it can be: loads stand still, fail, verifications give nothing, requests are cancelled. It holds the schedule to
/// what it may ask for.
class faulty_engine {
 public:
  faulty_engine(const schedule_options& options, std::uint32_t seed, bool faults)
      : options_(options), schedule_(*offload_schedule::make(options)), random_(seed), faults_(faults) {}

  void submit(std::uint64_t id, std::size_t tokens, std::uint64_t full, draft_lengths lengths) {
    REQUIRE(schedule_.submit({id, full, full / 4, full, lengths}));
    requests_[id] = {tokens, full, {}, {}, 0, false};
  }

  void iterate() {
    if (faults_ && !requests_.empty() && one_in(60)) cancel();
    const iteration_plan plan = schedule_.begin_iteration();
    for (const auto& each : plan.stop) loads_.erase({each.id, each.attempt});
    for (const auto& each : plan.start) {
      REQUIRE(requests_.contains(each.id));
      REQUIRE(loads_.try_emplace({each.id, each.attempt}, load{requests_[each.id].full, faults_ && one_in(10)}).second);
      requests_[each.id].attempt = each.attempt;
    }
    check_memory();
    std::set<std::uint64_t> seen;
    for (const std::uint64_t id : plan.draft) {
      REQUIRE(seen.insert(id).second);
      request& of = requests_.at(id);
      REQUIRE_FALSE(of.on_device);
      of.drafts.push_back(true_token(id, of.committed.size() + of.drafts.size()) + (one_in(4) ? 1 : 0));
    }
    move_loads();
    for (const auto& each : plan.verify) {
      REQUIRE(seen.insert(each.id).second);
      request& of = requests_.at(each.id);
      REQUIRE(each.drafts == of.drafts.size());
      const auto found = loads_.find({each.id, of.attempt});
      if (found == loads_.end()) {  // has failed in this iteration
        CHECK_FALSE(schedule_.settle(each.id, {1, 1}));
        continue;
      }
      REQUIRE(found->second.left <= options_.link);
      loads_.erase(found);
      if (faults_ && one_in(12)) continue;  // the engine has failed, the drafts stay
      std::size_t accepted = 0;
      while (accepted < of.drafts.size() && of.drafts[accepted] == true_token(each.id, of.committed.size() + accepted)) ++accepted;
      commit(each.id, accepted + 1);
    }
    for (const auto& each : plan.plain) {
      REQUIRE(seen.insert(each.id).second);
      request& of = requests_.at(each.id);
      REQUIRE((of.on_device || each.recompute));
      if (each.recompute) ++recomputed;
      of.on_device = true;
      commit(each.id, 1);
    }
    schedule_.end_iteration();
    std::uint64_t memory = 0;
    std::uint64_t link = 0;
    for (std::uint64_t slot = schedule_.memory().begin(); slot < schedule_.memory().end(); ++slot) {
      memory = std::max(memory, schedule_.memory().reserved(slot));
      link = std::max(link, schedule_.link().reserved(slot));
    }
    REQUIRE(memory <= options_.transient);
    REQUIRE(link <= options_.link);
    REQUIRE(schedule_.resident() <= options_.resident);
  }
  [[nodiscard]] bool done() const { return requests_.empty(); }
  [[nodiscard]] const offload_schedule& schedule() const { return schedule_; }

  int recomputed = 0;
  int finished = 0;
  int cancelled = 0;

 private:
  struct request {
    std::size_t tokens;
    std::uint64_t full;
    std::vector<std::uint32_t> committed;
    std::vector<std::uint32_t> drafts;
    std::uint32_t attempt;
    bool on_device;
  };
  struct load {
    std::uint64_t left;
    bool stuck;
  };

  bool one_in(unsigned count) { return random_() % count == 0; }
  void check_memory() {
    std::uint64_t sum = 0;
    for (const auto& [key, each] : loads_) sum += requests_.contains(key.first) ? requests_[key.first].full : 0;
    for (const auto& [id, each] : requests_) sum += each.on_device ? each.full : 0;
    REQUIRE(sum <= options_.transient);
  }
  void move_loads() {
    std::uint64_t link = options_.link;
    for (auto each = loads_.begin(); each != loads_.end();) {
      const auto [id, attempt] = each->first;
      if (faults_ && one_in(40)) {
        schedule_.load_failed(id, attempt);
        each = loads_.erase(each);
        continue;
      }
      const std::uint64_t moved = each->second.stuck ? 0 : std::min(each->second.left, faults_ ? random_() % (link + 1) : link);
      link -= moved;
      each->second.left -= moved;
      schedule_.load_progress(id, attempt, each->second.left);
      ++each;
    }
  }
  void commit(std::uint64_t id, std::size_t count) {
    request& of = requests_.at(id);
    for (; count > 0 && of.committed.size() < of.tokens; --count) of.committed.push_back(true_token(id, of.committed.size()));
    of.drafts.clear();
    if (of.committed.size() == of.tokens) {
      if (one_in(2)) REQUIRE(schedule_.settle(id, {}));
      REQUIRE(schedule_.remove(id));
      requests_.erase(id);
      ++finished;
      return;
    }
    const auto wanted = static_cast<std::uint32_t>(one_in(5) ? 0 : random_() % 12);
    REQUIRE(schedule_.settle(id, {wanted, wanted + 3}));
    of.on_device = schedule_.keeps(id);
  }
  void cancel() {
    auto each = requests_.begin();
    std::advance(each, static_cast<std::ptrdiff_t>(random_() % requests_.size()));
    REQUIRE(schedule_.remove(each->first));
    requests_.erase(each);
    ++cancelled;
  }

  schedule_options options_;
  offload_schedule schedule_;
  std::mt19937 random_;
  bool faults_;
  std::map<std::uint64_t, request> requests_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, load> loads_;
};

}  // namespace

TEST_CASE("schedule: no token is lost or invented, and nothing is used that is not reserved") {
  for (const bool faults : {false, true}) {
    int recomputed = 0;
    int cancelled = 0;
    for (std::uint32_t seed = 0; seed < 20; ++seed) {
      CAPTURE(seed);
      schedule_options options;
      options.link = 7;
      options.transient = 45;
      options.resident = 30;
      options.horizon = 64;
      options.max_requests = 16;
      options.patience = 3;
      options.retries = 1;
      faulty_engine engine(options, seed, faults);
      for (std::uint64_t id = 0; id < 10; ++id) engine.submit(id, 20 + 3 * id, 5 + 4 * id, {6, 8});
      int iterations = 0;
      for (; !engine.done() && iterations < 20000; ++iterations) engine.iterate();
      CHECK(engine.done());
      CHECK(engine.finished + engine.cancelled == 10);
      CHECK(engine.schedule().requests() == 0);
      CHECK(engine.schedule().resident() == 0);
      engine.iterate();
      for (std::uint64_t slot = engine.schedule().memory().begin(); slot < engine.schedule().memory().end(); ++slot) {
        CHECK(engine.schedule().memory().reserved(slot) == 0);
        CHECK(engine.schedule().link().reserved(slot) == 0);
      }
      recomputed += engine.recomputed;
      cancelled += engine.cancelled;
    }
    CHECK((recomputed > 5) == faults);
    CHECK((cancelled > 5) == faults);
  }
}

TEST_CASE("schedule: verifications of requests that begin together are staggered") {
  schedule_options options{.link = 2, .transient = 4, .resident = 100, .horizon = 64, .max_requests = 8};
  auto schedule = *offload_schedule::make(options);
  for (std::uint64_t id = 0; id < 4; ++id) REQUIRE(schedule.submit({id, 4, 1, 4, {9, 30}}));
  std::map<std::uint64_t, int> verified;
  std::map<std::uint64_t, int> started;
  for (int i = 0; i < 16; ++i) {
    const iteration_plan plan = schedule.begin_iteration();
    CHECK(plan.start.size() <= 1);
    CHECK(plan.verify.size() <= 1);
    for (const auto& each : plan.start) {
      started[each.id] = i;
      schedule.load_progress(each.id, each.attempt, 2);
    }
    for (const auto& each : plan.verify) {
      verified[each.id] = i;
      CHECK(each.drafts == static_cast<std::uint32_t>(i));
      CHECK(schedule.settle(each.id, {30, 40}));
    }
    schedule.end_iteration();
  }
  CHECK(verified == std::map<std::uint64_t, int>{{0, 9}, {1, 7}, {2, 11}, {3, 5}});
  for (const auto& [id, at] : verified) CHECK(started[id] == at - 1);
}

TEST_CASE("schedule: admission is in order, and a request that leaves makes room") {
  auto schedule = *offload_schedule::make({.link = 10, .transient = 10, .resident = 10, .horizon = 16, .max_requests = 3});
  CHECK(schedule.submit({1, 10, 6, 10, {2, 2}}));
  CHECK(schedule.submit({2, 10, 6, 10, {2, 2}}));
  CHECK(schedule.submit({3, 10, 1, 10, {2, 2}}));
  CHECK(schedule.submit({1, 1, 1, 1, {}}).error().code == error_code::invalid_argument);
  CHECK(schedule.submit({4, 1, 1, 1, {}}).error().code == error_code::out_of_range);
  CHECK(schedule.begin_iteration().draft.size() == 1);  // 3 does not overtake 2
  schedule.end_iteration();
  CHECK(schedule.remove(1));
  CHECK(schedule.remove(1).error().code == error_code::out_of_range);
  CHECK(schedule.submit({5, 11, 1, 1, {}}).error().code == error_code::out_of_range);
  CHECK(schedule.submit({5, 1, 11, 1, {}}).error().code == error_code::out_of_range);
  CHECK(schedule.submit({5, 1, 1, 161, {}}).error().code == error_code::out_of_range);
  CHECK(schedule.begin_iteration().draft.size() == 2);
  CHECK(schedule.admitted() == 2);
  CHECK(schedule.settle(2, {}).error().code == error_code::out_of_range);
}

TEST_CASE("schedule: a load that stands still is given up, tried again, and then the cache is computed again") {
  auto schedule =
      *offload_schedule::make({.link = 1, .transient = 10, .resident = 10, .horizon = 16, .max_requests = 3, .patience = 2, .retries = 1});
  CHECK(schedule.submit({1, 10, 1, 4, {4, 6}}));
  std::vector<int> starts;
  std::vector<int> stops;
  int recomputed = -1;
  for (int i = 0; i < 30; ++i) {
    const iteration_plan plan = schedule.begin_iteration();
    CHECK(plan.verify.empty());
    CHECK((i >= 6) == plan.draft.empty());
    for (std::size_t k = 0; k < plan.start.size(); ++k) starts.push_back(i);
    for (std::size_t k = 0; k < plan.stop.size(); ++k) stops.push_back(i);
    for (const auto& each : plan.plain) {
      if (each.recompute) recomputed = i;
      CHECK(schedule.settle(each.id, {0, 5}));
    }
    schedule.end_iteration();
  }
  CHECK(starts == std::vector{1, 7});  // verifications at 4 and 10
  CHECK(stops == std::vector{7, 13});
  CHECK(recomputed == 13);
  schedule.load_progress(1, 1, 0);  // of a load given up: nothing
  CHECK(schedule.begin_iteration().plain.size() == 1);
}

TEST_CASE("schedule: a load that fails gives back what it has booked, and what comes late of it counts for nothing") {
  auto schedule = *offload_schedule::make({.link = 1, .transient = 10, .resident = 10, .horizon = 16, .max_requests = 3});
  CHECK(schedule.submit({1, 10, 1, 4, {4, 20}}));
  (void)schedule.begin_iteration();
  schedule.end_iteration();
  REQUIRE(schedule.begin_iteration().start.size() == 1);
  schedule.load_failed(1, 1);
  CHECK(schedule.memory().free(1) == 0);  // in use until the iteration ends
  for (std::uint64_t slot = 2; slot < 6; ++slot) {
    CHECK(schedule.memory().free(slot) == 10);
    CHECK(schedule.link().free(slot) == 1);
  }
  schedule.end_iteration();
  for (int i = 2; i < 8; ++i) {
    schedule.load_progress(1, 1, 0);
    const iteration_plan plan = schedule.begin_iteration();
    CHECK(plan.start.size() == (i == 2 ? 1 : 0));
    CHECK(plan.verify.empty());
    CHECK(plan.draft.size() == 1);
    schedule.end_iteration();
  }
  schedule.load_progress(1, 2, 1);  // the last byte may come while it verifies
  const iteration_plan plan = schedule.begin_iteration();
  REQUIRE(plan.verify.size() == 1);
  CHECK(plan.verify[0].drafts == 8);
  schedule.end_iteration();  // not settled: again, with the drafts that there are
  CHECK(schedule.begin_iteration().draft.size() == 1);
}

TEST_CASE("schedule: drafting may end early, and a removed request's load is stopped") {
  auto schedule = *offload_schedule::make({.link = 1, .transient = 10, .resident = 10, .horizon = 16, .max_requests = 3});
  CHECK(schedule.submit({1, 10, 1, 4, {6, 6}}));
  (void)schedule.begin_iteration();
  schedule.end_iteration();
  schedule.stop_drafting(1);
  for (int i = 1; i < 4; ++i) {
    const iteration_plan plan = schedule.begin_iteration();
    CHECK(plan.draft.empty());
    CHECK(plan.start.size() == (i == 3 ? 1 : 0));
    schedule.end_iteration();
  }
  CHECK(schedule.remove(1));
  const iteration_plan plan = schedule.begin_iteration();
  REQUIRE(plan.stop.size() == 1);
  CHECK(plan.stop[0].id == 1);
  CHECK(schedule.memory().free(schedule.memory().begin()) == 10);
}

TEST_CASE("schedule: a load that waits behind one that moves is not given up") {
  auto schedule =
      *offload_schedule::make({.link = 1, .transient = 100, .resident = 10, .horizon = 32, .max_requests = 2, .patience = 3, .retries = 0});
  CHECK(schedule.submit({1, 10, 1, 8, {8, 8}}));
  CHECK(schedule.submit({2, 10, 1, 8, {16, 16}}));
  // Booked from 1 to 8 and from 9 to 16, but the link has a third of the speed.
  std::uint64_t left[3] = {0, 8, 8};
  std::vector<std::uint64_t> verified;
  for (int i = 0; i < 60; ++i) {
    const iteration_plan plan = schedule.begin_iteration();
    CHECK(plan.stop.empty());
    for (const auto& each : plan.verify) {
      verified.push_back(each.id);
      left[each.id] = 0;
      schedule.load_progress(each.id, static_cast<std::uint32_t>(each.id), 0);
      CHECK(schedule.remove(each.id));
    }
    const std::uint64_t id = left[1] > 0 ? 1 : 2;
    if (i > 0 && i % 3 == 0 && left[id] > 0) schedule.load_progress(id, static_cast<std::uint32_t>(id), --left[id]);
    schedule.end_iteration();
  }
  CHECK(verified == std::vector<std::uint64_t>{1, 2});
}

TEST_CASE("schedule: with room enough, a full cache that is wanted next is kept, and settled once") {
  for (const std::uint64_t transient : {100U, 200U, 1000U}) {
    auto schedule = *offload_schedule::make({.link = 100, .transient = transient, .resident = 100, .horizon = 16, .max_requests = 4});
    REQUIRE(schedule.submit({1, 100, 10, 100, {0, 0}}));
    int verified = 0, plain = 0;
    for (int i = 0; i < 20; ++i) {
      const iteration_plan plan = schedule.begin_iteration();
      for (const auto& each : plan.start) schedule.load_progress(each.id, each.attempt, 0);
      verified += static_cast<int>(plan.verify.size());
      plain += static_cast<int>(plan.plain.size());
      const bool has_one = !plan.verify.empty() || !plan.plain.empty();
      CHECK(static_cast<bool>(schedule.settle(1, {0, 0})) == has_one);
      CHECK(schedule.settle(1, {0, 0}).error().code == error_code::out_of_range);
      schedule.end_iteration();
    }
    CHECK(verified == 1);
    CHECK(plain >= 18);
  }
}

TEST_CASE("schedule: with nothing to plan ahead, no more full caches are kept than there is memory for") {
  auto schedule = *offload_schedule::make({.link = 100, .transient = 100, .resident = 10, .horizon = 1, .max_requests = 4});
  for (const std::uint64_t id : {1U, 2U}) REQUIRE(schedule.submit({id, 100, 1, 100, {0, 0}}));
  for (int i = 0; i < 6; ++i) {
    const iteration_plan plan = schedule.begin_iteration();
    for (const auto& each : plan.start) schedule.load_progress(each.id, each.attempt, 0);
    CHECK(plan.verify.size() + plan.plain.size() <= 1);
    for (const auto& each : plan.verify) REQUIRE(schedule.settle(each.id, {0, 0}));
    for (const auto& each : plan.plain) REQUIRE(schedule.settle(each.id, {0, 0}));
    CHECK(!(schedule.keeps(1) && schedule.keeps(2)));
    schedule.end_iteration();
  }
  for (const std::uint64_t id : {1U, 2U}) REQUIRE(schedule.remove(id));
  CHECK(schedule.memory().reserved(schedule.memory().begin()) == 0);
}

TEST_CASE("schedule: no two loads have the same name, not even of a request that comes again") {
  auto schedule = *offload_schedule::make({.link = 100, .transient = 1000, .resident = 10, .horizon = 8, .max_requests = 4});
  std::set<std::uint32_t> names;
  for (int i = 0; i < 3; ++i) {
    REQUIRE(schedule.submit({7, 100, 1, 300, {0, 0}}));
    for (const auto& each : schedule.begin_iteration().start) CHECK(names.insert(each.attempt).second);
    schedule.end_iteration();
    REQUIRE(schedule.remove(7));
  }
  CHECK(names.size() == 3);
}

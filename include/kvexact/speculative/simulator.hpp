// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/core/split_mix.hpp>
#include <kvexact/speculative/cost_model.hpp>
#include <kvexact/speculative/draft_length.hpp>
#include <kvexact/speculative/schedule.hpp>

namespace kvexact {

/// A machine and a model. Of `cost`, what depends on the batch is not read: the schedule makes the batch.
struct simulator_options {
  offload_cost cost;
  schedule_options schedule;
  double failed_loads = 0;       ///< share of loads that fail when half of them is done
  double stuck_loads = 0;        ///< share of loads that stop there for ever
  double patience_seconds = 1;   ///< for a load, in the iteration that verifies
  double recompute_seconds = 0;  ///< of a full cache
  std::uint64_t seed = 0;
};

/// A request that asks for `tokens`, whose drafts are accepted with probability `acceptance`.
struct simulated_request {
  std::uint64_t id = 0;
  std::uint32_t tokens = 0;
  double acceptance = 0;
};

/// Times in seconds, memory in bytes.
struct simulator_report {
  double seconds = 0;
  double link_wait = 0;  ///< of iterations, for loads of what they verified
  double link_busy = 0;
  std::uint64_t iterations = 0;
  std::uint64_t tokens = 0;  ///< committed
  std::uint64_t verifications = 0;
  std::uint64_t drafts = 0;
  std::uint64_t idle = 0;  ///< requests x iterations that were admitted and did nothing
  std::uint64_t failed_loads = 0;
  std::uint64_t peak_transient = 0;  ///< full caches on the device, loading or there
  std::uint32_t most_verified = 0;   ///< in one iteration
};

/// `offload_schedule` on a machine whose iterations take what they read from memory, beside a link that serves loads one after another. It
/// calls the schedule as an engine would, and keeps time by adding it up: the same run each time.
template <draft_length_policy Policy>
class offload_simulator {
 public:
  /// Errors: those of offload_schedule::make, out_of_memory.
  [[nodiscard]] static result<offload_simulator> make(const simulator_options& options) noexcept {
    auto schedule = offload_schedule::make(options.schedule);
    if (!schedule) return schedule.error();
    offload_simulator made(options, *std::move(schedule));
    try {
      made.requests_.reserve(options.schedule.max_requests);
      made.loads_.reserve(options.schedule.max_requests);
    } catch (...) {
      return error{error_code::out_of_memory, "a simulator"};
    }
    return made;
  }

  /// Errors: those of offload_schedule::submit; invalid_argument (no tokens).
  result<void> submit(const simulated_request& request, Policy policy) noexcept {
    if (request.tokens == 0) return error{error_code::invalid_argument, "a request asks for at least one token"};
    running added{request, std::move(policy), 0};
    const auto full = static_cast<std::uint64_t>(options_.cost.full_cache);
    const auto done = schedule_.submit({request.id, full, static_cast<std::uint64_t>(options_.cost.full_cache * options_.cost.draft_ratio),
                                        static_cast<std::uint64_t>(options_.cost.full_cache * options_.cost.transfer_ratio), next(added)});
    if (done) requests_.push_back(std::move(added));
    return done;
  }
  /// Errors: out_of_range (no such request, or finished).
  result<void> cancel(std::uint64_t id) noexcept {
    const auto done = schedule_.remove(id);
    if (done) std::erase_if(requests_, [&](const running& each) { return each.request.id == id; });
    return done;
  }

  /// One iteration; false if no request is left.
  bool step() noexcept {
    if (requests_.empty()) return false;
    const iteration_plan plan = schedule_.begin_iteration();
    for (const auto& each : plan.stop)
      std::erase_if(loads_, [&](const transfer& load) { return load.id == each.id && load.attempt == each.attempt; });
    for (const auto& each : plan.start) begin_load(each);
    std::uint64_t on_device = 0;
    for (const transfer& each : loads_) on_device += each.bytes;
    report_.peak_transient =
        std::max(report_.peak_transient, on_device + plan.plain.size() * static_cast<std::uint64_t>(options_.cost.full_cache));

    const double busy = iteration_seconds(plan);
    run_link(busy);
    double waited = 0;
    for (const auto& each : plan.verify) waited += wait_for(each.id, options_.patience_seconds - waited);
    report_.seconds += busy + waited;
    report_.link_wait += waited;
    ++report_.iterations;
    report_.drafts += plan.draft.size();
    report_.most_verified = std::max(report_.most_verified, static_cast<std::uint32_t>(plan.verify.size()));
    report_.idle += schedule_.admitted() - plan.verify.size() - plan.draft.size() - plan.plain.size();
    report_progress();
    for (const auto& each : plan.verify) {
      const auto load = std::ranges::find(loads_, each.id, &transfer::id);
      if (load == loads_.end() || load->left > 0) continue;
      loads_.erase(load);
      ++report_.verifications;
      commit(each.id, each.drafts);
    }
    for (const auto& each : plan.plain) commit(each.id, 0);
    schedule_.end_iteration();
    return true;
  }
  const simulator_report& run() noexcept {
    while (step()) {
    }
    return report_;
  }

  [[nodiscard]] const simulator_report& report() const noexcept { return report_; }
  [[nodiscard]] const offload_schedule& schedule() const noexcept { return schedule_; }

 private:
  struct running {
    simulated_request request;
    Policy policy;
    std::uint32_t committed = 0;
  };
  struct transfer {
    std::uint64_t id;
    std::uint32_t attempt;
    std::uint64_t bytes;  // of memory
    double left;          // to come over the link
    double stops_at;      // with so much left
    bool fails;           // there; else it is stuck
  };

  offload_simulator(const simulator_options& options, offload_schedule schedule) noexcept
      : options_(options), schedule_(std::move(schedule)), random_state_(options.seed) {}

  /// In [0, 1).
  [[nodiscard]] double random() noexcept {
    return detail::unit_number(detail::split_mix(random_state_));
  }
  [[nodiscard]] draft_lengths next(running& of) noexcept {
    const std::uint32_t most = of.request.tokens - of.committed - 1;
    const std::uint32_t wanted = of.policy.next(most);
    return {wanted, std::min(most, wanted + wanted / 2)};
  }
  [[nodiscard]] double iteration_seconds(const iteration_plan& plan) const noexcept {
    double bytes = options_.cost.weights;
    double recomputed = 0;
    bytes += static_cast<double>(plan.draft.size()) * options_.cost.full_cache * options_.cost.draft_ratio;
    bytes += static_cast<double>(plan.verify.size() + plan.plain.size()) * options_.cost.full_cache;
    for (const auto& each : plan.plain) recomputed += each.recompute ? options_.recompute_seconds : 0;
    return bytes / options_.cost.memory_bandwidth + recomputed;
  }
  void begin_load(const iteration_plan::load& each) noexcept {
    const double bytes = options_.cost.full_cache * options_.cost.transfer_ratio;
    const double drawn = random();
    const bool fails = drawn < options_.failed_loads;
    const bool ends = drawn >= options_.failed_loads + options_.stuck_loads;
    loads_.push_back({each.id, each.attempt, static_cast<std::uint64_t>(options_.cost.full_cache), bytes, ends ? 0 : bytes / 2, fails});
  }
  /// Serves loads in their order; one that fails or is stuck lets the next one pass.
  void run_link(double seconds) noexcept {
    for (transfer& each : loads_) {
      const double moved = std::min(each.left - each.stops_at, seconds * options_.cost.link_bandwidth);
      if (moved <= 0) continue;
      each.left -= moved;
      if (each.left - each.stops_at < 1) each.left = each.stops_at;
      seconds -= moved / options_.cost.link_bandwidth;
      report_.link_busy += moved / options_.cost.link_bandwidth;
    }
  }
  /// Gives the seconds until the load is there or has ended otherwise, at most `patience`.
  double wait_for(std::uint64_t id, double patience) noexcept {
    double before = 0;
    for (const transfer& each : loads_) {
      before += (each.left - each.stops_at) / options_.cost.link_bandwidth;
      if (each.id != id) continue;
      const bool stuck = each.stops_at > 0 && !each.fails;
      const double seconds = std::max(0.0, stuck ? patience : std::min(before, patience));
      run_link(seconds);
      return seconds;
    }
    return 0;
  }
  void report_progress() noexcept {
    for (const transfer& each : loads_) {
      if (each.fails && each.left <= each.stops_at) {
        schedule_.load_failed(each.id, each.attempt);
        ++report_.failed_loads;
      } else {
        schedule_.load_progress(each.id, each.attempt, static_cast<std::uint64_t>(each.left));
      }
    }
    std::erase_if(loads_, [](const transfer& each) { return each.fails && each.left <= each.stops_at; });
  }
  void commit(std::uint64_t id, std::uint32_t drafts) noexcept {
    const auto of = std::ranges::find(requests_, id, [](const running& each) { return each.request.id; });
    std::uint32_t accepted = 0;
    while (accepted < drafts && random() < of->request.acceptance) ++accepted;
    of->policy.observe({drafts, accepted});
    const std::uint32_t tokens = std::min(accepted + 1, of->request.tokens - of->committed);
    of->committed += tokens;
    report_.tokens += tokens;
    if (of->committed < of->request.tokens) {
      (void)schedule_.settle(id, next(*of));
    } else {
      (void)schedule_.settle(id, {});
      (void)schedule_.remove(id);
      requests_.erase(of);
    }
  }

  simulator_options options_;
  offload_schedule schedule_;
  std::vector<running> requests_;
  std::vector<transfer> loads_;
  simulator_report report_;
  std::uint64_t random_state_;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
// What the cost model and the schedule promise, from simulation alone: nothing here is timed, and every run prints the same.
//
//   bench_speculative_simulation gain      speculation on offloaded caches against decoding on full caches that fit the device
//   bench_speculative_simulation lengths   the adaptive draft length against the best fixed one in hindsight

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include <kvexact/core/split_mix.hpp>
#include <kvexact/speculative/cost_model.hpp>
#include <kvexact/speculative/draft_length.hpp>
#include <kvexact/speculative/simulator.hpp>

namespace {

using namespace kvexact;

constexpr double gigabyte = 1e9;

struct shape {
  const char* name;
  int devices;
  double layers;
  double weights;           // bytes
  double device;            // bytes of memory that weights and caches may take
  double memory_bandwidth;  // bytes a second
  double tokens_of_30;      // committed by a round of 30 drafts
};
// Published: 19 tokens a round (Qwen 32B) and 23 (Llama 70B); for 24B an acceptance of 0.8 at length 30 is read as 0.8 x 30 + 1.
constexpr shape shapes[] = {{"24B, RTX PRO 6000", 1, 40, 48 * gigabyte, 91 * gigabyte, 1790 * gigabyte, 25},
                            {"32B, RTX PRO 6000", 1, 64, 65 * gigabyte, 91 * gigabyte, 1790 * gigabyte, 19},
                            {"70B, 2 x H100 NVL", 2, 80, 141 * gigabyte, 178 * gigabyte, 7800 * gigabyte, 23}};

double acceptance_for(double tokens, std::uint32_t length) {
  double below = 0;
  double above = 1;
  for (int i = 0; i < 50; ++i) {
    const double middle = (below + above) / 2;
    (expected_tokens(middle, length) < tokens ? below : above) = middle;
  }
  return above;
}

/// Tokens a second of `batch` requests that never end, with room for `transient` full caches.
double simulated_rate(offload_cost cost, double transient, std::uint32_t length, double acceptance) {
  simulator_options options;
  options.cost = cost;
  options.schedule.link = static_cast<std::uint64_t>(cost.link_bandwidth * cost.iteration_seconds(length + 1.0));
  options.schedule.transient = static_cast<std::uint64_t>(transient * cost.full_cache);
  options.schedule.resident = static_cast<std::uint64_t>(cost.batch * cost.full_cache * cost.draft_ratio);
  options.schedule.max_requests = cost.batch;
  auto simulator = offload_simulator<fixed_draft_length>::make(options);
  if (!simulator) return 0;
  for (std::uint32_t i = 0; i < cost.batch; ++i)
    if (!simulator->submit({i, 1'000'000, acceptance}, fixed_draft_length(length))) return 0;
  for (int i = 0; i < 500; ++i) (void)simulator->step();
  const simulator_report before = simulator->report();
  for (int i = 0; i < 3000; ++i) (void)simulator->step();
  const simulator_report& after = simulator->report();
  return static_cast<double>(after.tokens - before.tokens) / (after.seconds - before.seconds);
}

void gain() {
  std::printf(
      "| model, device | context | full cache | batch, full | batch, drafts | link | copy: length 30 | best | refinement: length 30 | best "
      "|\n");
  std::printf("|---|---|---|---|---|---|---|---|---|---|\n");
  for (const shape& each : shapes) {
    for (const double context : {16384.0, 32768.0}) {
      offload_cost cost;
      cost.weights = each.weights;
      cost.full_cache = context * each.layers * 2 * 8 * 128 * 2;
      cost.memory_bandwidth = each.memory_bandwidth;
      const double acceptance = acceptance_for(each.tokens_of_30, 30);
      const double caches = each.device - each.weights;
      const double transient = caches < 3 * cost.full_cache ? 1 : 2;
      const double plain_batch = std::floor(caches / cost.full_cache);
      cost.batch = static_cast<std::uint32_t>(plain_batch);
      const double plain = plain_batch / cost.plain_seconds();
      cost.batch = static_cast<std::uint32_t>((caches - transient * cost.full_cache) / (cost.full_cache * cost.draft_ratio));
      for (const double link : {128.0, 64.0, 40.0, 1.2}) {
        if (link == 128 && each.devices == 1) continue;  // a link of its own for each device
        cost.link_bandwidth = link * gigabyte;
        std::printf("| %s | %.0fk | %.1f GB | %.0f | %u | %g GB/s |", each.name, context / 1024, cost.full_cache / gigabyte, plain_batch,
                    cost.batch, link);
        for (const double transfer : {1.0, 0.39}) {
          cost.transfer_ratio = transfer;
          double best = 0;
          std::uint32_t best_at = 0;
          for (const std::uint32_t length : {6u, 9u, 13u, 19u, 26u, 30u, 36u, 50u, 70u, 100u}) {
            const double rate = simulated_rate(cost, transient, length, acceptance);
            if (rate > best) best = rate, best_at = length;
          }
          std::printf(" %.2f | %.2f at %u |", simulated_rate(cost, transient, 30, acceptance) / plain, best / plain, best_at);
        }
        std::printf("\n");
      }
    }
  }
  // A prefix that crosses a slow link once: plain decoding needs all of it here, drafting the draft cache only, and the full one stays
  // where verification happens. Transfer and decoding of different requests overlap.
  std::printf(
      "\n| model, device | prefix | tokens | full, link | full, decoding | drafts, link | drafts, decoding | gain at 1.2 GB/s "
      "|\n|---|---|---|---|---|---|---|---|\n");
  for (const shape& each : shapes) {
    for (const double answer : {512.0, 2048.0}) {
      offload_cost cost;
      cost.weights = each.weights;
      cost.full_cache = 16384 * each.layers * 2 * 8 * 128 * 2;
      cost.memory_bandwidth = each.memory_bandwidth;
      cost.link_bandwidth = 1.2 * gigabyte;
      const double caches = each.device - each.weights;
      cost.batch = static_cast<std::uint32_t>(caches / cost.full_cache);
      const double link = cost.full_cache / cost.link_bandwidth;
      const double plain = answer * cost.plain_seconds() / cost.batch;
      cost.batch = static_cast<std::uint32_t>(caches / (cost.full_cache * cost.draft_ratio));
      // The far node drafts; the near node's verification takes about as long as one of its iterations.
      const double iteration = (cost.weights + cost.batch * cost.full_cache * cost.draft_ratio) / cost.memory_bandwidth;
      const double drafting = answer / each.tokens_of_30 * 31 * iteration / cost.batch;
      std::printf("| %s | 16k | %.0f | %.2f s | %.2f s | %.2f s | %.2f s | %.2f |\n", each.name, answer, link, plain,
                  link * cost.draft_ratio, drafting, std::max(link, plain) / std::max(link * cost.draft_ratio, drafting));
    }
  }
}

/// The probability that the draft at `position` (from 1) after `committed` tokens is accepted.
using acceptance_law = double (*)(double committed, std::uint32_t position);

struct named_law {
  const char* name;
  acceptance_law law;
};
constexpr named_law laws[] = {{"0", [](double, std::uint32_t) { return 0.0; }},
                              {"0.3", [](double, std::uint32_t) { return 0.3; }},
                              {"0.5", [](double, std::uint32_t) { return 0.5; }},
                              {"0.7", [](double, std::uint32_t) { return 0.7; }},
                              {"0.8", [](double, std::uint32_t) { return 0.8; }},
                              {"0.9", [](double, std::uint32_t) { return 0.9; }},
                              {"0.95", [](double, std::uint32_t) { return 0.95; }},
                              {"0.97", [](double, std::uint32_t) { return 0.97; }},
                              {"0.98", [](double, std::uint32_t) { return 0.98; }},
                              {"0.99", [](double, std::uint32_t) { return 0.99; }},
                              {"0.95 falling 2 % a position", [](double, std::uint32_t i) { return 0.95 * std::pow(0.98, i - 1.0); }},
                              {"0.99 falling 1 % a position", [](double, std::uint32_t i) { return 0.99 * std::pow(0.99, i - 1.0); }},
                              {"0.95 and 0.3 by turns", [](double n, std::uint32_t) { return std::fmod(n, 2048) < 1024 ? 0.95 : 0.3; }},
                              {"0.7 and 0.98 by turns", [](double n, std::uint32_t) { return std::fmod(n, 2048) < 1024 ? 0.7 : 0.98; }},
                              {"0.62 to 0.98, a sine", [](double n, std::uint32_t) { return 0.8 + 0.18 * std::sin(n / 300); }}};

struct tabulated_cost {
  std::vector<double> seconds;
  [[nodiscard]] double round_seconds(std::uint32_t length) const noexcept { return seconds[length]; }
};

double fixed_rate(const tabulated_cost& cost, acceptance_law law, std::uint32_t length, double tokens) {
  double committed = 0;
  double seconds = 0;
  while (committed < tokens) {
    double survival = 1;
    double expected = 1;
    for (std::uint32_t i = 1; i <= length; ++i) expected += survival *= law(committed, i);
    committed += expected;
    seconds += cost.round_seconds(length);
  }
  return committed / seconds;
}

class counter {
 public:
  explicit counter(std::uint64_t seed) : state_(seed) {}
  double operator()() { return kvexact::detail::unit_number(kvexact::detail::split_mix(state_)); }

 private:
  std::uint64_t state_;
};

double adaptive_rate(adaptive_draft_length<tabulated_cost>& policy, const tabulated_cost& cost, acceptance_law law, double tokens,
                     counter& random) {
  double committed = 0;
  double seconds = 0;
  while (committed < tokens) {
    const std::uint32_t length = policy.next(128);
    std::uint32_t accepted = 0;
    while (accepted < length && random() < law(committed, accepted + 1)) ++accepted;
    policy.observe({length, accepted});
    committed += accepted + 1;
    seconds += cost.round_seconds(length);
  }
  return committed / seconds;
}

void lengths() {
  struct setting {
    char name[64];
    tabulated_cost cost;
  };
  std::vector<setting> settings;
  const auto add = [&](const auto& cost, auto... name) {
    setting& added = settings.emplace_back();
    std::snprintf(added.name, sizeof(added.name), name...);
    for (std::uint32_t length = 0; length <= 128; ++length) added.cost.seconds.push_back(cost.round_seconds(length));
  };
  for (const double link : {1.2, 40.0, 64.0, 900.0})
    for (const std::uint32_t batch : {1u, 4u, 10u, 32u})
      add(offload_cost{48 * gigabyte, 4 * gigabyte, 0.25, 1, 1790 * gigabyte, link * gigabyte, batch}, "%g GB/s, batch %u", link, batch);
  for (const double draft : {0.02, 0.1, 0.3, 0.6}) add(measured_cost{draft, 1, 0.005, 0, 1}, "no link, draft step %g", draft);

  constexpr double tokens = 4096;
  constexpr int runs = 4;
  std::printf(
      "| setting | acceptance | best fixed length | its gain | adaptive, first 4096 tokens | of the best | later | of the best "
      "|\n|---|---|---|---|---|---|---|---|\n");
  double least[2] = {9, 9};
  double slowest_run = 9;
  double slowest_part = 9;
  int rows = 0;
  int within[2] = {0, 0};
  for (const setting& each : settings) {
    for (const named_law& law : laws) {
      double best = 0;
      std::uint32_t best_at = 0;
      for (std::uint32_t length = 0; length <= 128; ++length) {
        const double rate = fixed_rate(each.cost, law.law, length, tokens);
        if (rate > best) best = rate, best_at = length;
      }
      double rates[2] = {0, 0};
      const double plain = each.cost.round_seconds(0);
      for (int run = 0; run < runs; ++run) {
        adaptive_draft_length policy(each.cost);
        counter random(static_cast<std::uint64_t>(1000 * run + 7));
        double seconds = 0;
        for (int part = 0; part < 8; ++part) {
          const double rate = adaptive_rate(policy, each.cost, law.law, tokens, random);
          seconds += 1 / rate;
          slowest_run = std::min(slowest_run, (part + 1) * plain / seconds);
          slowest_part = std::min(slowest_part, rate * plain);
          if (part == 0) rates[0] += rate / runs;
          if (part >= 4) rates[1] += rate / (4 * runs);
        }
      }
      ++rows;
      for (int phase = 0; phase < 2; ++phase) {
        least[phase] = std::min(least[phase], rates[phase] / best);
        within[phase] += rates[phase] >= 0.95 * best;
      }
      std::printf("| %s | %s | %u | %.3f | %.3f | %.3f | %.3f | %.3f |\n", each.name, law.name, best_at, best * plain, rates[0] * plain,
                  rates[0] / best, rates[1] * plain, rates[1] / best);
    }
  }
  const char* const phases[] = {"first 4096 tokens", "after 16384 tokens"};
  std::printf("\n");
  for (int phase = 0; phase < 2; ++phase)
    std::printf("%s: %d of %d rows within 5 %% of the best fixed length, least %.3f\n", phases[phase], within[phase], rows, least[phase]);
  std::printf("slowest run, at any multiple of 4096 tokens: %.3f x plain; slowest 4096 tokens in between: %.3f\n", slowest_run,
              slowest_part);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "gain") == 0) {
    gain();
  } else if (argc == 2 && std::strcmp(argv[1], "lengths") == 0) {
    lengths();
  } else {
    std::fprintf(stderr, "usage: %s gain | lengths\n", argv[0]);
    return 1;
  }
}

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/counter_random.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/drafter.hpp>
#include <kvexact/speculative/round.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/stop_conditions.hpp>

namespace kvexact::test {

using tokens = std::vector<token_id>;

/// A language model without a cache, whose logits are a hash of the whole prefix: `shared` is the seed of what it has in common with other
/// models, `own` that of the rest, of which `distance` says how much it counts.
struct toy_model {
  std::size_t size = 3;
  std::uint64_t shared = 1;
  std::uint64_t own = 1;
  double distance = 0.5;

  [[nodiscard]] std::size_t vocabulary() const noexcept { return size; }
  [[nodiscard]] std::uint64_t max_draft() const noexcept { return 100; }
  [[nodiscard]] result<void> synchronise(std::span<const token_id>) noexcept { return {}; }
  [[nodiscard]] result<void> logits(std::span<const token_id> committed, std::span<const token_id> pending,
                                    std::span<float> rows) const noexcept {
    const std::size_t length = committed.size() + pending.size();
    const std::size_t first = length + 1 - rows.size() / size;
    if (first < committed.size()) return error{error_code::invalid_argument, "logits before the newest committed token"};
    counter_random prefix(0);
    for (std::size_t i = 0; i <= length; ++i) {
      const counter_random common = prefix.fork(shared);
      const counter_random special = prefix.fork(own).fork(own);
      for (std::size_t token = 0; i >= first && token < size; ++token) {
        const double value = 4 * common.uniform(token, {}) - 2 + distance * (4 * special.uniform(token, {}) - 2);
        rows[(i - first) * size + token] = static_cast<float>(value);
      }
      if (i < length) prefix = prefix.fork(i < committed.size() ? committed[i] : pending[i - committed.size()]);
    }
    return {};
  }
};

/// Proposes tokens without a distribution: those after the newest one, in order.
struct point_drafter {
  std::size_t vocabulary = 3;

  [[nodiscard]] std::uint64_t max_draft() const noexcept { return 100; }
  [[nodiscard]] result<void> synchronise(std::span<const token_id>) noexcept { return {}; }
  template <class Rule, class Sampler>
  [[nodiscard]] result<void> propose(const draft_request<Rule, Sampler>& request, draft_block& block) noexcept {
    for (std::size_t i = 0; i < request.wanted; ++i) {
      const auto token = static_cast<token_id>((request.committed.back() + block.size() + 1) % vocabulary);
      if (auto pushed = block.push(token, distribution::point(token)); !pushed) return pushed;
    }
    return {};
  }
};

/// One request on models without caches.
template <class Rule, class Sampler = standard_sampler, class Bytes = no_token_bytes>
struct toy_request {
  toy_model model;
  Rule rule;
  request_state<Sampler> state;
  stop_conditions<Bytes> stops;
  tokens sequence;
  std::size_t draft_length = 0;
  std::uint64_t max_rollback = 100;

  /// One round, whose tokens are appended to the sequence.
  template <class Drafter>
  settled_round<Sampler> round(Drafter& drafter) {
    auto settled = try_round(drafter);
    REQUIRE(settled);
    return *settled;
  }

  /// Until the request ends.
  template <class Drafter>
  const tokens& decode(Drafter&& drafter) {
    while (stops.remaining(state.progress) > 0) round(drafter);
    return sequence;
  }

 private:
  template <class Drafter>
  result<settled_round<Sampler>> try_round(Drafter& drafter) {
    auto block = draft_block::make(draft_length, model.size);
    if (!block) return block.error();
    const auto wanted = static_cast<std::size_t>(clamp_draft_length(draft_length, stops.remaining(state.progress), max_rollback));
    const Rule of_round = rule.for_round(sequence.size());
    if (auto done = drafter.synchronise(sequence); !done) return done.error();
    if (auto done = drafter.propose(draft_request<Rule, Sampler>{sequence, {}, wanted, of_round, state.sampler}, *block); !done)
      return done.error();
    const draft_view drafts = block->view();
    std::vector<float> logits((drafts.tokens.size() + 1) * model.size);
    if (auto done = model.logits(sequence, drafts.tokens, logits); !done) return done.error();
    tokens out(drafts.tokens.size() + 1);
    auto settled = settle_round(state, drafts, logit_rows{logits, model.size}, rule, stops, out);
    if (!settled) return settled;
    if (settled->proposed > wanted) return error{error_code::out_of_range, "more drafts than wanted"};
    sequence.insert(sequence.end(), out.begin(), out.begin() + static_cast<std::ptrdiff_t>(settled->committed));
    state = settled->after;
    return settled;
  }
};

}  // namespace kvexact::test

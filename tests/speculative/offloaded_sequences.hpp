// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/compression/quantised.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/speculative/ngram_drafter.hpp>
#include <kvexact/speculative/offloaded_batch.hpp>

#include "any_drafter.hpp"
#include "offloaded_toy.hpp"
#include "toy_engine.hpp"

namespace kvexact::test {

using int4 = draft_cache<quantised<bf16, symmetric<4>, symmetric<4>>>;
using self_drafter = model_drafter<compressed_model<offloaded_toy, int4>>;
using decoder = speculative_decoder<offloaded_toy, any_drafter<greedy>, greedy, fixed_draft_length>;

constexpr std::uint64_t token_bytes_of = 2ULL * toy_engine::layer_count * toy_engine::heads * toy_engine::dim * sizeof(bf16);

inline int4 made_int4(const cache_shape& shape) {
  return *int4::make(shape, {{.keys = {.group_channels = 4}, .values = {.group_channels = 4}}});
}
inline any_drafter<greedy> self(offloaded_toy& engine) {
  return self_drafter(compressed_model<offloaded_toy, int4>(engine, made_int4(engine.shape())));
}
inline any_drafter<greedy> lookup(offloaded_toy&) { return *ngram_drafter::make({}); }
/// Never drafts.
struct dead_drafter {
  [[nodiscard]] std::uint64_t max_draft() const noexcept { return 8; }
  result<void> synchronise(std::span<const token_id>) noexcept { return error{error_code::output_failed, "a drafter that is dead"}; }
  result<void> propose(const draft_request<greedy, standard_sampler>&, draft_block&) noexcept { return {}; }
};
inline any_drafter<greedy> dead(offloaded_toy&) { return dead_drafter(); }

struct offloaded_sequence {
  std::uint64_t id;
  std::vector<token_id> expected;  // of plain decoding, the prompt included
  std::unique_ptr<toy_engine> reference;
  std::unique_ptr<offloaded_toy> engine;
  std::unique_ptr<decoder> decoding;
};

struct offload_setting {
  std::uint32_t slots = 2;  // full caches on the device
  std::uint32_t draft_length = 4;
  std::uint64_t new_tokens = 12;
  double loads_per_iteration = 0.4;
  std::uint32_t patience = 8;
  std::vector<token_id> ends = {};
  std::size_t shortest_prompt = 8;
  std::uint64_t small = ~std::uint64_t{0};  // this sequence's engine has room for 20 tokens
  any_drafter<greedy> (*drafts)(offloaded_toy&) = self;
};

/// Sequences with prompts of several lengths, each with an engine of its own, on one link. `Link` is a `cache_loader` that is made of a
/// fault_plan&, which the engines have, too; it knows `add(request, offloaded_toy&)`, the `patience` of a wait, and `pause()` for something
/// to come.
template <class Link>
struct offloaded_sequences {
  using batch = offloaded_batch<decoder, Link>;

  offload_setting chosen;
  device_memory memory;
  fault_plan faults;
  Link link;
  std::vector<offloaded_sequence> sequences;
  std::map<std::uint64_t, std::vector<token_id>> seen;  ///< committed, by what the batch said
  std::uint64_t accepted = 0;

  offloaded_sequences(std::size_t count, const offload_setting& of) : chosen(of), memory{of.slots}, link(faults) {
    for (std::uint64_t id = 0; id < count; ++id) add(id);
  }
  void add(std::uint64_t id) {
    const auto sampler = *standard_sampler::make({.temperature = 0});
    const auto seed = static_cast<std::uint32_t>(id + 1);
    const stop_conditions<> stops{.end_tokens = chosen.ends, .max_new_tokens = chosen.new_tokens};
    offloaded_sequence made{id, {}, std::make_unique<toy_engine>(toy_engine::options{.seed = seed}), nullptr, nullptr};
    for (std::size_t i = 0; i < chosen.shortest_prompt + 3 * (id % 3); ++i) made.expected.push_back(static_cast<token_id>((i * i + id) % 12));
    const auto prompt = made.expected;
    REQUIRE(made.reference->forward(std::span(prompt).first(prompt.size() - 1), {}));
    std::vector<float> logits(12);
    for (bool going = true; going;) {
      REQUIRE(made.reference->forward(std::span(made.expected).last(1), logits));
      made.expected.push_back(static_cast<token_id>(std::ranges::max_element(logits) - logits.begin()));
      going = made.expected.size() < prompt.size() + chosen.new_tokens &&
              std::ranges::find(chosen.ends, made.expected.back()) == chosen.ends.end();
    }
    const auto wait = [this, id](std::uint32_t layer) { return link.wait(id, layer, Link::patience); };
    made.engine = std::make_unique<offloaded_toy>(toy_engine::options{.capacity = id == chosen.small ? 20U : 56U, .seed = seed, .faults = &faults}, memory, wait);
    made.decoding =
        std::make_unique<decoder>(*decoder::make(*made.engine, chosen.drafts(*made.engine), {}, fixed_draft_length(chosen.draft_length),
                                                 {.sampler = sampler, .stops = stops, .longest_draft = 6}));
    REQUIRE(made.decoding->begin(prompt));
    link.add(id, *made.engine);
    link.release(id);
    sequences.push_back(std::move(made));
  }
  static std::uint64_t bytes_of(const offloaded_sequence& of) { return token_bytes_of * of.engine->capacity(); }
  batch made_batch() {
    const std::uint64_t full = bytes_of(sequences.front());
    return *batch::make(link, {.link = static_cast<std::uint64_t>(chosen.loads_per_iteration * static_cast<double>(full)),
                               .transient = chosen.slots * full,
                               .resident = 1000,
                               .horizon = 64,
                               .max_requests = 16,
                               .patience = chosen.patience});
  }
  void submit_all(batch& to) {
    for (offloaded_sequence& each : sequences)
      REQUIRE(to.submit(*each.decoding, {.id = each.id, .full = bytes_of(each), .draft = 10, .transfer = bytes_of(each)}));
  }
  /// Until all have ended. Gives the failures.
  std::vector<error> run(batch& of) {
    std::vector<error> failures;
    for (int idle = 0, busy = 0; of.size() > 0; of.is_idle() ? ++idle : ++busy) {
      REQUIRE(busy < 2000);
      REQUIRE(idle < 60000);
      if (of.is_idle()) link.pause();
      for (const batch_event& each : of.iterate()) {
        if (each.failure) failures.push_back(*each.failure);
        if (each.round) seen[each.id].insert(seen[each.id].end(), each.round->committed.begin(), each.round->committed.end());
        if (each.round) accepted += each.round->accepted;
      }
      for (const offloaded_sequence& each : sequences)
        REQUIRE(std::ranges::equal(each.decoding->tokens(), std::span(each.expected).first(each.decoding->tokens().size())));
    }
    return failures;
  }
  void check_all() {
    for (const offloaded_sequence& each : sequences) {
      CAPTURE(each.id);
      CHECK(std::ranges::equal(each.decoding->tokens(), each.expected));
      CHECK(std::ranges::equal(seen[each.id], std::span(each.expected).last(seen[each.id].size())));
      // The reference has no rows for the newest token either.
      CHECK(each.engine->length() == each.expected.size() - 1);
      CHECK(each.engine->has_home_rows_of(*each.reference));
    }
    CHECK(memory.free == chosen.slots);
    CHECK(memory.refused == 0);
  }
};

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/compression/snap_kv.hpp>
#include <kvexact/compression/uncompressed.hpp>
#include <kvexact/speculative/compressed_model.hpp>
#include <kvexact/speculative/drafter.hpp>

#include "toy_engine.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

using snap = draft_cache<first_layers<1, uncompressed<bf16>>, snap_kv<bf16>>;
using model = compressed_model<toy_engine, snap>;
static_assert(logit_model<model>);

snap made_snap(const toy_engine& engine) {
  return *snap::make(engine.shape(), {{}, {.eviction = {.sinks = 1, .budget = 6, .window = 4, .interval = 8, .max_rollback = 12, .query_heads = toy_engine::shared}}});
}
std::vector<token_id> some_tokens(std::size_t count) {
  std::mt19937 random(1);
  std::vector<token_id> tokens;
  while (tokens.size() < count) tokens.push_back(static_cast<token_id>(random() % 12));
  return tokens;
}
std::vector<float> logits_of(model& of, std::span<const token_id> committed, const std::vector<token_id>& pending, std::size_t rows) {
  std::vector<float> logits(rows * of.vocabulary());
  REQUIRE(of.logits(committed, pending, logits));
  return logits;
}
std::vector<std::uint64_t> positions_of(const snap& cache, std::uint32_t layer, std::uint32_t head) {
  const std::size_t count = cache.entries(layer, head);
  std::vector<std::uint64_t> positions(count);
  std::vector<float> keys(count * toy_engine::dim), values(keys);
  REQUIRE(cache.materialise(layer, head, {positions, keys, values}));
  return positions;
}

}  // namespace

TEST_CASE("compressed_model: what was drafted, taken back or failed before leaves no trace") {
  const auto tokens = some_tokens(60);
  fault_plan faults;
  toy_engine full({.seed = 2, .faults = &faults});
  model used(full, made_snap(full));
  std::mt19937 random(3);
  for (std::size_t length = 1; length <= 60; length += 1 + random() % 5) {
    CAPTURE(length);
    const auto committed = std::span(tokens).first(length);
    if (length - 1 > full.length()) REQUIRE(full.forward(committed.subspan(full.length(), length - 1 - full.length()), {}));
    // Faults at all places, until a call gets through.
    for (std::uint64_t failing = random() % 3;; failing += 1 + random() % 9) {
      faults = {.calls = 0, .failing = failing};
      if (used.synchronise(committed)) break;
    }
    const auto pending = some_tokens(8);
    std::vector<float> row(used.vocabulary()), expected(row);
    for (std::uint64_t failing = random() % 3;; failing += 1 + random() % 9) {
      faults = {.calls = 0, .failing = failing};
      if (used.logits(committed, std::span(pending).first(2), row)) break;
    }
    faults = {};
    model fresh(full, made_snap(full));
    REQUIRE(fresh.synchronise(committed));
    REQUIRE(fresh.logits(committed, std::span(pending).first(2), expected));
    CHECK(row == expected);
    // One by one, in blocks, and another continuation of the same beginning.
    const auto whole = logits_of(fresh, committed, pending, 4);
    std::vector<token_id> other = pending;
    other[6] = (other[6] + 1) % 12;
    CHECK(logits_of(used, committed, other, 9) != logits_of(fresh, committed, pending, 9));
    CHECK(logits_of(used, committed, pending, 4) == whole);
    CHECK(logits_of(used, committed, {}, 1) == logits_of(fresh, committed, {}, 1));
    for (std::uint32_t head = 0; head < toy_engine::heads; ++head) CHECK(positions_of(used.cache(), 1, head) == positions_of(fresh.cache(), 1, head));
  }
}

TEST_CASE("compressed_model: attention is observed for the tokens of the target") {
  const auto tokens = some_tokens(60);
  toy_engine full({.seed = 2});
  REQUIRE(full.forward(tokens, {}));
  model seen(full, made_snap(full));
  std::vector<token_id> committed = tokens;
  committed.push_back(0);
  REQUIRE(seen.synchronise(committed));
  snap unseen = made_snap(full);
  for (std::uint32_t l = 0; l < 2; ++l) REQUIRE(unseen.append(l, full.rows(l, 0), 60));
  CHECK(positions_of(seen.cache(), 1, 0) != positions_of(unseen, 1, 0));  // without attention, the oldest stay
  CHECK(full.steps_run() > 20);  // of 60 tokens, those of the windows
  CHECK(full.steps_run() < 45);
}

TEST_CASE("compressed_model: what it does not know") {
  const auto tokens = some_tokens(20);
  toy_engine full({.seed = 2});
  REQUIRE(full.forward(std::span(tokens).first(19), {}));
  model of(full, made_snap(full));
  std::vector<float> row(12), rows(36);
  CHECK(of.logits(tokens, {}, row).error().code == error_code::invalid_argument);
  REQUIRE(of.synchronise(tokens));
  CHECK(of.logits({}, {}, row).error().code == error_code::invalid_argument);
  CHECK(of.logits(tokens, {}, rows).error().code == error_code::invalid_argument);
  CHECK(of.logits(tokens, {}, std::span(row).first(5)).error().code == error_code::invalid_argument);
  // More than can be taken back.
  CHECK(of.logits(tokens, some_tokens(12), row).error().code == error_code::out_of_range);
  REQUIRE(of.logits(tokens, some_tokens(11), row));
  REQUIRE(of.synchronise(tokens));
}

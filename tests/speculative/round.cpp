// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/round.hpp>

#include "toy_models.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

standard_sampler sampler_of(const sampling_parameters& parameters) {
  const auto made = standard_sampler::make(parameters);
  REQUIRE(made);
  return *made;
}

/// Greedy decoding where verification gives `rows`, after a prompt of 4 tokens.
struct greedy_round {
  tokens rows;
  std::uint64_t generated = 0;
  stop_conditions<> stops = {};
  tokens committed = {};

  settled_round<standard_sampler> settle(const tokens& drafts) {
    const request_state<standard_sampler> before{sampler_of({}), {.length = 4 + generated, .generated = generated}};
    tokens out(drafts.size() + 1, 99);
    const auto settled = settle_round(before, {drafts, {}}, argmax_rows{rows, {}}, greedy{}, stops, out);
    REQUIRE(settled);
    CHECK(settled->proposed == drafts.size());
    CHECK(settled->after.progress.length == before.progress.length + settled->committed);
    CHECK(settled->after.progress.generated == before.progress.generated + settled->committed);
    CHECK(settled->after.cache_length() == settled->after.progress.length - 1);
    committed.assign(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(settled->committed));
    return *settled;
  }
};

}  // namespace

TEST_CASE("settle_round: rejection at the first, a middle, the last, and no position") {
  struct expectation {
    tokens drafts;
    std::size_t accepted;
    tokens committed;
  };
  for (const auto& [drafts, accepted, committed] : std::vector<expectation>{
           {{0, 2, 3}, 0, {1}}, {{1, 0, 3}, 1, {1, 2}}, {{1, 2, 0}, 2, {1, 2, 3}}, {{1, 2, 3}, 3, {1, 2, 3, 4}}, {{}, 0, {1}}}) {
    greedy_round round{{1, 2, 3, 4}};
    const auto settled = round.settle(drafts);
    CHECK(settled.accepted == accepted);
    CHECK(settled.rejected == (accepted < drafts.size()));
    CHECK(round.committed == committed);
    CHECK_FALSE(settled.stop);
  }
}

TEST_CASE("settle_round: an end token inside a block cuts it") {
  greedy_round round{{1, 7, 3, 4}};
  round.stops.end_tokens = {7};
  const auto settled = round.settle({1, 7, 3});
  CHECK(round.committed == tokens{1, 7});
  CHECK(settled.accepted == 2);
  CHECK_FALSE(settled.rejected);
  CHECK(settled.stop.reason == stop_reason::end_token);
  CHECK(settled.after.cache_length() == 5);
}

TEST_CASE("settle_round: an end token as the verifier's own") {
  greedy_round round{{1, 7}};
  round.stops.end_tokens = {7};
  CHECK(round.settle({1}).stop.reason == stop_reason::end_token);
  CHECK(round.committed == tokens{1, 7});
  CHECK(round.settle({1}).accepted == 1);
  CHECK(round.settle({}).stop.reason == stop_reason::none);
}

TEST_CASE("settle_round: a draft's end token that is not accepted ends nothing") {
  greedy_round round{{1, 2, 3}};
  round.stops.end_tokens = {7};
  const auto settled = round.settle({1, 7});
  CHECK(round.committed == tokens{1, 2});
  CHECK_FALSE(settled.stop);
}

TEST_CASE("settle_round: budgets count tokens, also where the draft was too long") {
  for (std::uint64_t budget = 1; budget <= 6; ++budget) {
    greedy_round round{{1, 2, 3, 4}};
    round.stops.max_new_tokens = budget;
    const auto settled = round.settle({1, 2, 3});
    CHECK(settled.committed == std::min<std::uint64_t>(budget, 4));
    CHECK(settled.accepted == std::min<std::uint64_t>(budget, 3));
    CHECK(settled.stop.reason == (budget <= 4 ? stop_reason::max_new_tokens : stop_reason::none));

    greedy_round full{{1, 2, 3, 4}};
    full.stops.context_length = 4 + budget;
    CHECK(full.settle({1, 2, 3}).committed == std::min<std::uint64_t>(budget, 4));
  }
}

TEST_CASE("settle_round: a stop string across blocks, and one that only rejected drafts had") {
  struct letters {
    [[nodiscard]] std::string_view operator()(token_id token) const noexcept { return std::string_view("abcdefghij").substr(token, 1); }
  };
  stop_conditions<letters> stops;
  const std::vector<std::string_view> texts{"cde"};
  auto strings = stop_strings::make(texts);
  REQUIRE(strings);
  stops.strings = *strings;

  request_state<standard_sampler> state{sampler_of({}), {.length = 4}};
  tokens out(4);
  const auto settle = [&](const tokens& drafts, const tokens& rows) {
    const auto settled = settle_round(state, {drafts, {}}, argmax_rows{rows, {}}, greedy{}, stops, out);
    REQUIRE(settled);
    state = settled->after;
    return settled->stop.reason;
  };
  // c; then "de" is drafted but "f" committed; then c d | e f.
  CHECK(settle({}, {2}) == stop_reason::none);
  CHECK(settle({3, 4}, {5, 0, 0}) == stop_reason::none);
  CHECK(settle({4}, {0, 0}) == stop_reason::none);
  CHECK(settle({2, 3}, {2, 3, 2}) == stop_reason::none);
  CHECK(settle({3}, {3, 4}) == stop_reason::stop_string);
  CHECK(state.progress.length == 4 + 8);
}

TEST_CASE("settle_round: penalties see committed tokens only") {
  const request_state<standard_sampler> before{sampler_of({.temperature = 0, .presence_penalty = 10}), {.length = 1}};
  // Token 3, then whatever was not committed before: 2, 1, 0.
  const std::vector<float> row{1, 2, 3, 4};
  const auto rows = [&](std::size_t n) {
    std::vector<float> logits;
    for (std::size_t i = 0; i < n; ++i) logits.insert(logits.end(), row.begin(), row.end());
    return logits;
  };
  tokens out(4);
  // Drafts 3, 2 are accepted; 0 is rejected for 1.
  auto logits = rows(4);
  const tokens drafts{3, 2, 0};
  auto settled = settle_round(before, {drafts, {}}, logit_rows{logits, 4}, greedy{}, stop_conditions<>{}, out);
  REQUIRE(settled);
  CHECK(settled->committed == 3);
  CHECK(tokens(out.begin(), out.begin() + 3) == tokens{3, 2, 1});
  // So 0 is the only token without a penalty.
  logits = rows(1);
  settled = settle_round(settled->after, {}, logit_rows{logits, 4}, greedy{}, stop_conditions<>{}, out);
  REQUIRE(settled);
  CHECK(out[0] == 0);
  // The state before is what it was.
  logits = rows(1);
  settled = settle_round(before, {}, logit_rows{logits, 4}, greedy{}, stop_conditions<>{}, out);
  REQUIRE(settled);
  CHECK(out[0] == 3);
}

TEST_CASE("settle_round: the smallest gap of the rows that were read") {
  const request_state<standard_sampler> before{sampler_of({.temperature = 0}), {.length = 1}};
  std::vector<float> logits{0, 4, 1, /**/ 5, 2, 0, /**/ 1, 1, 0};
  tokens out(3);
  const tokens drafts{1, 2};
  const auto settled = settle_round(before, {drafts, {}}, logit_rows{logits, 3}, greedy{}, stop_conditions<>{}, out);
  REQUIRE(settled);
  CHECK(settled->committed == 2);
  CHECK(settled->smallest_gap == 3);
  const std::vector<float> gaps{4, 2};
  const tokens rows{1, 2};
  const auto of_engine =
      settle_round(before, {std::span(drafts).first(1), {}}, argmax_rows{rows, gaps}, greedy{}, stop_conditions<>{}, out);
  REQUIRE(of_engine);
  CHECK(of_engine->smallest_gap == 2);
}

TEST_CASE("settle_round: NaN is an error that names the position, where plain decoding would meet it") {
  constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
  const request_state<standard_sampler> before{sampler_of({.presence_penalty = 1}), {.length = 5}};
  const auto settle = [](const request_state<standard_sampler>& state, std::vector<float> logits, const tokens& drafts) {
    tokens out(drafts.size() + 1);
    return settle_round(state, {drafts, {}}, logit_rows{logits, 3}, greedy{}, stop_conditions<>{}, out);
  };
  const auto failed = settle(before, {not_a_number, 1, 2}, {});
  REQUIRE_FALSE(failed);
  CHECK(failed.error().code == error_code::invalid_argument);
  CHECK(failed.error().token == 5);
  CHECK(settle(before, {0, 1, 2}, {}));
  // Behind an accepted draft: the draft is committed, the next round fails.
  const auto accepted = settle(before, {0, 4, 1, /**/ 5, not_a_number, 0}, {1});
  REQUIRE(accepted);
  CHECK(accepted->committed == 1);
  CHECK_FALSE(accepted->rejected);
  CHECK(accepted->after.cache_length() == 5);
  const auto next = settle(accepted->after, {5, not_a_number, 0}, {});
  REQUIRE_FALSE(next);
  CHECK(next.error().token == 6);
  // A row that is not reached does no harm.
  const auto rejected = settle(before, {0, 1, 4, /**/ not_a_number, not_a_number, 0}, {1});
  REQUIRE(rejected);
  CHECK(rejected->rejected);
}

TEST_CASE("settle_round: calls that no round can make") {
  const auto refuses = [](const auto& before, const draft_view& drafts, std::size_t rows, std::size_t room, const auto& rule) {
    std::vector<float> logits(rows * 3, 1);
    tokens out(room);
    const auto settled = settle_round(before, drafts, logit_rows{logits, 3}, rule, stop_conditions<>{.max_new_tokens = 8}, out);
    return !settled && settled.error().code == error_code::invalid_argument;
  };
  const request_state<standard_sampler> good{sampler_of({}), {.length = 5}};
  const tokens drafts{1, 0};
  const std::vector<distribution> points{distribution::point(1), distribution::point(0)};
  const std::vector<distribution> others{distribution::point(2), distribution::point(0)};
  const speculative_sampling sampling(1);
  CHECK_FALSE(refuses(good, {drafts, points}, 3, 3, sampling));
  CHECK_FALSE(refuses(good, {drafts, {}}, 3, 3, greedy{}));
  CHECK_FALSE(refuses(good, {drafts, points}, 9, 9, sampling));
  CHECK(refuses(good, {drafts, points}, 2, 3, sampling));
  CHECK(refuses(good, {drafts, points}, 3, 2, sampling));
  CHECK(refuses(good, {drafts, {}}, 3, 3, sampling));
  CHECK(refuses(good, {drafts, others}, 3, 3, sampling));
  CHECK(refuses(request_state<standard_sampler>{sampler_of({}), {}}, {}, 1, 1, greedy{}));
  CHECK(refuses(request_state<standard_sampler>{sampler_of({}), {.length = 13, .generated = 8}}, {}, 1, 1, greedy{}));
  CHECK(refuses(request_state<standard_sampler>{sampler_of({}), {.length = 5, .ended = stop_reason::end_token}}, {}, 1, 1, greedy{}));
}

TEST_CASE("settle_round: a draft that is not in the vocabulary is rejected") {
  const request_state<standard_sampler> before{sampler_of({}), {.length = 5}};
  const tokens drafts{77};
  const std::vector<distribution> points{distribution::point(77)};
  const auto first_token = [&](const auto& rule) {
    std::vector<float> logits(2 * 3, 1);
    tokens out(2, 99);
    const auto settled = settle_round(before, {drafts, points}, logit_rows{logits, 3}, rule, stop_conditions<>{}, out);
    REQUIRE(settled);
    CHECK(settled->rejected);
    CHECK(settled->committed == 1);
    return out[0];
  };
  CHECK(first_token(greedy{}) == 0);
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    CHECK(first_token(speculative_sampling(seed)) < 3);
    CHECK(first_token(sample_and_match(seed)) < 3);
  }
}

TEST_CASE("clamp_draft_length: by the tokens that are still wanted and the rows that can be taken back") {
  CHECK(clamp_draft_length(8, 100, 100) == 8);
  CHECK(clamp_draft_length(8, 5, 100) == 4);
  CHECK(clamp_draft_length(8, 1, 100) == 0);
  CHECK(clamp_draft_length(8, 0, 100) == 0);
  CHECK(clamp_draft_length(8, 100, 3) == 3);
  CHECK(clamp_draft_length(0, 100, 3) == 0);
}

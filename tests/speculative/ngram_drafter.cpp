// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/ngram_drafter.hpp>
#include <kvexact/speculative/sampler.hpp>

#include "toy_models.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

/// What is proposed after these tokens, wherever the border between committed and pending ones lies.
tokens proposed(const tokens& sequence, std::size_t wanted, const ngram_drafter::options& options = {}) {
  auto drafter = ngram_drafter::make(options);
  const auto sampler = standard_sampler::make({});
  REQUIRE(drafter);
  REQUIRE(sampler);
  REQUIRE(drafter->synchronise(sequence));
  const greedy rule;
  tokens found;
  for (std::size_t committed = 0; committed <= sequence.size(); ++committed) {
    auto block = draft_block::make(wanted, 0);
    REQUIRE(block);
    const std::span<const token_id> all(sequence);
    REQUIRE(drafter->propose(draft_request<greedy, standard_sampler>{all.first(committed), all.subspan(committed), wanted, rule, *sampler},
                             *block));
    const draft_view drafts = block->view();
    for (std::size_t i = 0; i < drafts.tokens.size(); ++i) CHECK(drafts.distributions[i].mass(drafts.tokens[i]) == 1);
    if (committed > 0) CHECK(std::ranges::equal(found, drafts.tokens));
    found.assign(drafts.tokens.begin(), drafts.tokens.end());
    // One at a time: what has been drafted is no place to look at.
    auto one_by_one = draft_block::make(wanted, 0);
    REQUIRE(one_by_one);
    const draft_request<greedy, standard_sampler> single{all.first(committed), all.subspan(committed), 1, rule, *sampler};
    for (std::size_t i = 0; i < wanted; ++i) REQUIRE(drafter->propose(single, *one_by_one));
    CHECK(std::ranges::equal(found, one_by_one->view().tokens));
  }
  return found;
}

}  // namespace

TEST_CASE("ngram_drafter: what followed the newest tokens, of several places the last") {
  CHECK(proposed({1, 2, 3, 4, 9, 1, 2, 5, 6, 8, 1, 2}, 2) == tokens{5, 6});
  // Three equal tokens count for more than two that are newer.
  CHECK(proposed({7, 1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 1, 2}, 3) == tokens{3, 4, 9});
  // But no more than the longest.
  CHECK(proposed({7, 1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 1, 2}, 3, {.longest = 2}) == tokens{5, 6, 7});
}

TEST_CASE("ngram_drafter: a loop is continued") {
  CHECK(proposed({5, 1, 2, 1, 2}, 5) == tokens{1, 2, 1, 2, 1});
  CHECK(proposed({4, 4}, 3) == tokens{4, 4, 4});
}

TEST_CASE("ngram_drafter: nothing where nothing occurs again") {
  CHECK(proposed({1, 2, 3}, 4).empty());
  CHECK(proposed({1}, 4).empty());
  CHECK(proposed({}, 4).empty());
  CHECK(proposed({1, 2, 3, 2}, 0).empty());
  CHECK(proposed({1, 2, 3, 9, 4, 3}, 1) == tokens{9});
  CHECK(proposed({1, 2, 3, 9, 4, 3}, 1, {.shortest = 2}).empty());
}

TEST_CASE("ngram_drafter: the window") {
  const tokens sequence{1, 2, 5, 5, 5, 1};
  CHECK(proposed(sequence, 1, {.window = 6}) == tokens{2});
  CHECK(proposed(sequence, 1, {.window = 5}).empty());
  CHECK(proposed(sequence, 1, {.window = 0}).empty());
}

TEST_CASE("ngram_drafter: options and the end on request") {
  CHECK_FALSE(ngram_drafter::make({.shortest = 0}));
  CHECK_FALSE(ngram_drafter::make({.longest = 2, .shortest = 3}));
  auto drafter = ngram_drafter::make({});
  const auto sampler = standard_sampler::make({});
  auto block = draft_block::make(4, 0);
  REQUIRE((drafter && sampler && block));
  const greedy rule;
  const tokens sequence{4, 4};
  const draft_request<greedy, standard_sampler> request{sequence, {}, 4, rule, *sampler, [](void*, double top) { return top < 1; }};
  REQUIRE(drafter->propose(request, *block));
  CHECK(block->size() == 1);
}

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/chain.hpp>
#include <kvexact/speculative/model_drafter.hpp>
#include <kvexact/speculative/sampler.hpp>

#include "toy_models.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

const tokens committed{1, 0, 2};
const toy_model small{4, 1, 2};
const toy_model middle{4, 1, 3};

standard_sampler sampler_of(const sampling_parameters& parameters) {
  const auto made = standard_sampler::make(parameters);
  REQUIRE(made);
  return *made;
}

draft_block block_of(std::size_t capacity) {
  auto made = draft_block::make(capacity, 4);
  REQUIRE(made);
  return std::move(*made);
}

auto chain_of(std::size_t draft_length) {
  auto made = chain_level<model_drafter<toy_model>, toy_model>::make(model_drafter(small), middle, draft_length);
  REQUIRE(made);
  return std::move(*made);
}

/// A model of which calls can be made to fail.
struct failing_model : toy_model {
  int* calls_left = nullptr;

  [[nodiscard]] result<void> logits(std::span<const token_id> before, std::span<const token_id> pending,
                                    std::span<float> rows) const noexcept {
    if ((*calls_left)-- <= 0) return error{error_code::output_failed, "an injected fault"};
    return toy_model::logits(before, pending, rows);
  }
};

}  // namespace

TEST_CASE("chain_level: passes on its own law at each token, after all tokens before it") {
  const standard_sampler sampler = sampler_of({.presence_penalty = 0.5F});
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    for (std::size_t draft_length = 0; draft_length <= 3; ++draft_length) {
      const speculative_sampling rule(seed);
      auto chain = chain_of(draft_length);
      draft_block block = block_of(5);
      const tokens pending{3};
      REQUIRE(chain.propose(draft_request<speculative_sampling, standard_sampler>{committed, pending, 5, rule, sampler}, block));
      const draft_view drafts = block.view();
      REQUIRE(drafts.tokens.size() == 5);
      tokens before = pending;
      standard_sampler ahead = sampler;
      for (std::size_t i = 0; i < 5; ++i) {
        std::vector<float> row(4);
        REQUIRE(middle.logits(committed, before, row));
        const auto next = ahead.next(row);
        REQUIRE(next);
        CHECK(std::ranges::equal(next->target.weights(), drafts.distributions[i].weights()));
        CHECK(drafts.distributions[i].mass(drafts.tokens[i]) > 0);
        before.push_back(drafts.tokens[i]);
        REQUIRE(ahead.commit(drafts.tokens[i]));
      }
    }
  }
}

TEST_CASE("chain_level: sample_and_match proposes what its own model would have drawn") {
  const standard_sampler sampler = sampler_of({.presence_penalty = 2});
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const sample_and_match rule(seed);
    const draft_request<sample_and_match, standard_sampler> request{committed, {}, 5, rule, sampler};
    draft_block alone = block_of(5);
    REQUIRE(model_drafter(middle).propose(request, alone));
    for (std::size_t draft_length = 0; draft_length <= 4; ++draft_length) {
      draft_block block = block_of(5);
      auto chain = chain_of(draft_length);
      REQUIRE(chain.propose(request, block));
      CHECK(std::ranges::equal(block.view().tokens, alone.view().tokens));
    }
  }
}

TEST_CASE("chain_level and model_drafter: tokens asked for one at a time") {
  const standard_sampler sampler = sampler_of({.presence_penalty = 2});
  const tokens pending{3};
  const auto same = [&](auto together, auto one_by_one, const auto& rule) {
    using Rule = std::remove_cvref_t<decltype(rule)>;
    draft_block expected = block_of(5), block = block_of(5);
    REQUIRE(together.propose(draft_request<Rule, standard_sampler>{committed, pending, 5, rule, sampler}, expected));
    for (const std::size_t wanted : {1U, 1U, 2U, 0U, 1U})
      REQUIRE(one_by_one.propose(draft_request<Rule, standard_sampler>{committed, pending, wanted, rule, sampler}, block));
    REQUIRE(block.size() == 5);
    CHECK(std::ranges::equal(block.view().tokens, expected.view().tokens));
    for (std::size_t i = 0; i < 5; ++i)
      CHECK(std::ranges::equal(block.view().distributions[i].weights(), expected.view().distributions[i].weights()));
  };
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    same(model_drafter(middle), model_drafter(middle), speculative_sampling(seed));
    same(model_drafter(middle), model_drafter(middle), sample_and_match(seed));
    same(chain_of(2), chain_of(2), sample_and_match(seed));
    // Other random numbers decide where there is nothing from below, by the same law.
    same(chain_of(0), chain_of(0), speculative_sampling(seed));
  }
}

TEST_CASE("chain_level and model_drafter: no more is wanted of tokens asked for one at a time either") {
  struct counter {
    int left;
    static bool more(void* context, double) { return --static_cast<counter*>(context)->left > 0; }
  };
  const standard_sampler sampler = sampler_of({.temperature = 0});
  const greedy rule;
  const auto check = [&](auto drafter) {
    draft_block block = block_of(5);
    counter stop{3};
    for (int i = 0; i < 5 && stop.left > 0; ++i)
      REQUIRE(drafter.propose(draft_request<greedy, standard_sampler>{committed, {}, 1, rule, sampler, &counter::more, &stop}, block));
    CHECK(block.size() == 3);
    CHECK(stop.left == 0);
  };
  check(chain_of(2));
  check(model_drafter(middle));
}

TEST_CASE("chain_level and model_drafter: end where no more is wanted, and never exceed what is") {
  struct counter {
    int left;
    static bool more(void* context, double top) {
      CHECK((top > 0.25 && top < 1));
      return --static_cast<counter*>(context)->left > 0;
    }
  };
  const standard_sampler sampler = sampler_of({.temperature = 0});
  const greedy rule;
  const auto check = [&](auto drafter) {
    for (int wanted = 0; wanted <= 5; ++wanted) {
      draft_block block = block_of(5);
      REQUIRE(
          drafter.propose(draft_request<greedy, standard_sampler>{committed, {}, static_cast<std::size_t>(wanted), rule, sampler}, block));
      CHECK(block.size() == static_cast<std::size_t>(wanted));
      if (wanted == 0) continue;
      counter stop{wanted};
      block.clear();
      REQUIRE(drafter.propose(draft_request<greedy, standard_sampler>{committed, {}, 5, rule, sampler, &counter::more, &stop}, block));
      CHECK(block.size() == static_cast<std::size_t>(wanted));
    }
  };
  check(chain_of(2));
  check(model_drafter(middle));
}

TEST_CASE("chain_level and model_drafter: errors are passed on, and the next proposal is as if nothing had happened") {
  const standard_sampler sampler = sampler_of({});
  const sample_and_match rule(3);
  const draft_request<sample_and_match, standard_sampler> request{committed, {}, 4, rule, sampler};
  draft_block expected = block_of(4);
  REQUIRE(chain_of(2).propose(request, expected));
  int calls_left = 0;
  auto chain = chain_level<model_drafter<failing_model>, failing_model>::make(model_drafter(failing_model{small, &calls_left}),
                                                                              failing_model{middle, &calls_left}, 2);
  REQUIRE(chain);
  int failures = 0;
  for (int calls = 0;; ++calls) {
    calls_left = calls;
    draft_block block = block_of(4);
    const auto proposed = chain->propose(request, block);
    if (proposed) break;
    CHECK(proposed.error().code == error_code::output_failed);
    ++failures;
    calls_left = 1000;
    block.clear();
    REQUIRE(chain->synchronise(committed));
    REQUIRE(chain->propose(request, block));
    CHECK(std::ranges::equal(block.view().tokens, expected.view().tokens));
  }
  CHECK(failures >= 4);
}

TEST_CASE("chain_level: asks for no draft that cannot be used") {
  const standard_sampler sampler = sampler_of({});
  const greedy rule;
  int below = 1000;
  int own = 1000;
  auto chain = chain_level<model_drafter<failing_model>, failing_model>::make(model_drafter(failing_model{small, &below}),
                                                                              failing_model{middle, &own}, 3);
  REQUIRE(chain);
  draft_block block = block_of(5);
  REQUIRE(chain->propose(draft_request<greedy, standard_sampler>{committed, {}, 1, rule, sampler}, block));
  CHECK(below == 1000);
  CHECK(own == 999);
}

TEST_CASE("chain_level and model_drafter: a block without room") {
  const standard_sampler sampler = sampler_of({});
  const greedy rule;
  draft_block block = block_of(2);
  const draft_request<greedy, standard_sampler> request{committed, {}, 3, rule, sampler};
  CHECK(chain_of(1).propose(request, block).error().code == error_code::invalid_argument);
  block.clear();
  CHECK(model_drafter(small).propose(request, block).error().code == error_code::invalid_argument);
  auto other = draft_block::make(3, 5);
  REQUIRE(other);
  CHECK(model_drafter(small).propose(request, *other).error().code == error_code::invalid_argument);
}

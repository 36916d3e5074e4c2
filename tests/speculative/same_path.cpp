// SPDX-License-Identifier: Apache-2.0
// Greedy decoding, and sampling by sample_and_match: the very tokens of plain decoding, whatever is drafted.
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/chain.hpp>
#include <kvexact/speculative/model_drafter.hpp>
#include <kvexact/speculative/ngram_drafter.hpp>
#include <kvexact/speculative/sampler.hpp>

#include "any_drafter.hpp"
#include "toy_models.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

struct letters {
  [[nodiscard]] std::string_view operator()(token_id token) const noexcept { return std::string_view("abcdefgh").substr(token % 8, 1); }
};

/// A request that differs with the seed in everything: model, parameters, stop conditions.
template <class Rule>
toy_request<Rule, standard_sampler, letters> request_of(std::uint64_t seed, const Rule& rule, std::size_t draft_length) {
  sampling_parameters parameters;
  if (seed % 2 == 1)
    parameters = {.temperature = 0.8F, .top_p = 0.95F, .repetition_penalty = 1.2F, .frequency_penalty = 0.2F, .penalty_window = 5};
  if (seed % 8 == 4) parameters.temperature = 0;
  if (seed % 5 == 2) parameters.top_k = 3;
  auto sampler = standard_sampler::make(parameters);
  REQUIRE(sampler);
  const tokens prompt{static_cast<token_id>(seed % 3), 1, 2};
  REQUIRE(sampler->read_prompt(prompt));
  toy_request<Rule, standard_sampler, letters> made{
      {4 + seed % 5, seed, 1}, rule, {*sampler, {.length = prompt.size()}}, {}, prompt, draft_length, 3 + seed % 4};
  made.stops.max_new_tokens = 9;
  made.stops.context_length = 8 + seed % 6;
  if (seed % 3 == 0) made.stops.end_tokens = {0};
  if (seed % 4 == 1) {
    static const auto strings = stop_strings::make(std::vector<std::string_view>{"ab", "ccc", "dbd"});
    REQUIRE(strings);
    made.stops.strings = *strings;
  }
  return made;
}

template <class Rule>
void check_same_path(std::uint64_t seed, const Rule& rule) {
  auto plain = request_of(seed, rule, 0);
  any_drafter<Rule> none(point_drafter{});
  plain.decode(none);
  const auto check = [&](std::size_t draft_length, any_drafter<Rule> drafter) {
    auto request = request_of(seed, rule, draft_length);
    request.decode(drafter);
    CHECK(request.sequence == plain.sequence);
    CHECK(request.state.progress.ended == plain.state.progress.ended);
  };
  const toy_model small{plain.model.size, seed, 2, 0.8};
  const toy_model compressed{plain.model.size, seed, 3, 0.5};
  check(1 + seed % 4, model_drafter(small));
  if (seed % 4 == 0) check(1 + seed % 7, point_drafter{plain.model.size});
  if (seed % 4 == 1) check(1 + seed % 7, *ngram_drafter::make({}));
  if (seed % 4 >= 2)
    check(1 + seed % 6, *chain_level<model_drafter<toy_model>, toy_model>::make(model_drafter(small), compressed, seed % 3));
}

}  // namespace

TEST_CASE("same path: sample_and_match gives the tokens of plain sampling with the same seed") {
  for (std::uint64_t seed = 0; seed < 1600; ++seed) check_same_path(seed, sample_and_match(seed));
}

TEST_CASE("same path: greedy, and temperature 0 under any rule") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) check_same_path(seed, greedy{});
  for (std::uint64_t seed = 4; seed < 400; seed += 8) check_same_path(seed, speculative_sampling(seed));
}

TEST_CASE("same path: fewer rounds than tokens") {
  std::size_t rounds = 0;
  std::size_t generated = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    auto request = request_of(seed, sample_and_match(seed), 4);
    model_drafter drafter(toy_model{request.model.size, seed, 1, 0.5});  // the target itself
    while (request.stops.remaining(request.state.progress) > 0) {
      const auto settled = request.round(drafter);
      CHECK_FALSE(settled.rejected);
      ++rounds;
      generated += settled.committed;
    }
  }
  CHECK(generated > 2 * rounds);
}

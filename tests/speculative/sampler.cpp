// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/sampler.hpp>

using namespace kvexact;

namespace {

constexpr float none = -std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

standard_sampler made(const sampling_parameters& parameters) {
  const auto sampler = standard_sampler::make(parameters);
  REQUIRE(sampler);
  return *sampler;
}

}  // namespace

TEST_CASE("sampler: by default the softmax of the logits") {
  std::vector<float> logits{1, 3, none, 2};
  const auto next = made({}).next(logits);
  REQUIRE(next);
  const double total = 1 + std::exp(-1.0) + std::exp(-2.0);
  CHECK(next->target.mass(1) == doctest::Approx(1 / total).epsilon(1e-7));
  CHECK(next->target.mass(0) == doctest::Approx(std::exp(-2.0) / total).epsilon(1e-7));
  CHECK(next->target.mass(2) == 0);
  CHECK(next->gap == 1);
}

TEST_CASE("sampler: temperature 0 is greedy, after the penalties") {
  auto sampler = made({.temperature = 0, .repetition_penalty = 2});
  std::vector<float> logits{4, 4, 3};
  auto next = sampler.next(logits);
  REQUIRE(next);
  CHECK(next->target.is_point());
  CHECK(next->target.mode() == 0);
  CHECK(next->gap == 0);
  REQUIRE(sampler.commit(0));
  REQUIRE(sampler.read_prompt(std::vector<token_id>{1}));
  logits = {4, 4, 3};
  next = sampler.next(logits);
  REQUIRE(next);
  CHECK(next->target.mode() == 2);
  CHECK(next->gap == 1);
}

TEST_CASE("sampler: penalties, temperature, min-p, top-k, top-p") {
  // The temperature decides what min-p and top-p keep.
  std::vector<float> logits{4, 3, 2, 1};
  auto next = made({.temperature = 2, .min_p = 0.3F}).next(logits);
  REQUIRE(next);
  CHECK(next->target.mass(2) > 0);  // exp(-1) > 0.3, but exp(-2) is not
  CHECK(next->target.mass(3) == 0);
  CHECK(next->gap == 0.5F);
  // Top-p counts the probabilities that top-k leaves: 0.5 of two tokens, where it was 0.25 of four.
  logits = {1, 1, 1, 1};
  next = made({.top_k = 2, .top_p = 0.5F}).next(logits);
  REQUIRE(next);
  CHECK(next->target.mass(0) == 1);
  // And what min-p leaves.
  logits = {std::log(0.4F), std::log(0.3F), std::log(0.15F), std::log(0.15F)};
  next = made({.min_p = 0.5F, .top_p = 0.55F}).next(logits);
  REQUIRE(next);
  CHECK(next->target.mass(0) == 1);
  // Penalties come before the temperature.
  auto sampler = made({.temperature = 0.5F, .presence_penalty = 1});
  REQUIRE(sampler.commit(0));
  logits = {4, 4};
  next = sampler.next(logits);
  REQUIRE(next);
  CHECK(next->gap == 2);
}

TEST_CASE("sampler: NaN is named, also where a processor would have removed it") {
  for (const sampling_parameters& parameters :
       std::vector<sampling_parameters>{{}, {.temperature = 0}, {.top_k = 1}, {.min_p = 0.9F}, {.top_p = 0.1F}}) {
    for (const float wrong : {not_a_number, -not_a_number}) {
      std::vector<float> logits{1, 9, wrong, 2};
      const auto next = made(parameters).next(logits);
      REQUIRE_FALSE(next);
      CHECK(next.error().code == error_code::invalid_argument);
    }
    std::vector<float> impossible(3, none);
    CHECK_FALSE(made(parameters).next(impossible));
  }
}

TEST_CASE("sampler: parameters outside their range") {
  constexpr float infinite = std::numeric_limits<float>::infinity();
  for (const sampling_parameters& parameters : std::vector<sampling_parameters>{{.temperature = -1},
                                                                                {.temperature = infinite},
                                                                                {.temperature = not_a_number},
                                                                                {.min_p = -0.1F},
                                                                                {.min_p = 1.1F},
                                                                                {.top_p = 0},
                                                                                {.top_p = 1.1F},
                                                                                {.top_p = not_a_number},
                                                                                {.repetition_penalty = 0},
                                                                                {.repetition_penalty = infinite},
                                                                                {.presence_penalty = not_a_number},
                                                                                {.frequency_penalty = infinite}}) {
    const auto sampler = standard_sampler::make(parameters);
    REQUIRE_FALSE(sampler);
    CHECK(sampler.error().code == error_code::invalid_argument);
  }
  CHECK(standard_sampler::make({.temperature = 0, .min_p = 1, .top_k = 1, .top_p = 1e-30F}));
}

TEST_CASE("sampler: any chain, in the order of llama.cpp too") {
  basic_sampler sampler(processor_chain(top_k{3}, top_p{0.9F}, min_p{0.1F}, temperature{0.5F}));
  static_assert(token_sampler<decltype(sampler)>);
  std::vector<float> logits{3, 2, 1, 0};
  REQUIRE(sampler.commit(0));
  const auto next = sampler.next(logits);
  REQUIRE(next);
  CHECK(next->target.mass(1) == doctest::Approx(std::exp(-2.0) / (1 + std::exp(-2.0))).epsilon(1e-6));
  CHECK(next->target.mass(2) == 0);
}

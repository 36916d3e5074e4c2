// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/acceptance.hpp>

using namespace kvexact;

namespace {

constexpr double below_1 = 1 - 0x1p-53;

/// One number for each purpose.
struct scripted {
  std::array<double, 3> numbers{};

  [[nodiscard]] double uniform(std::uint64_t, random_purpose purpose) const noexcept { return numbers[static_cast<std::size_t>(purpose)]; }
  [[nodiscard]] scripted fork(std::uint64_t) const noexcept { return *this; }
};

basic_speculative_sampling<scripted> sampling_with(double draft, double accept, double replace) {
  return basic_speculative_sampling(scripted{{draft, accept, replace}});
}

/// One number for each token.
struct scripted_times {
  std::array<double, 3> numbers{};

  [[nodiscard]] double uniform(std::uint64_t token, random_purpose) const noexcept { return numbers[static_cast<std::size_t>(token)]; }
  [[nodiscard]] scripted_times fork(std::uint64_t) const noexcept { return *this; }
};

struct weights {
  std::vector<float> values;
  operator distribution() const {
    const auto made = distribution::dense(values);
    REQUIRE(made);
    return *made;
  }
};

}  // namespace

TEST_CASE("greedy: the most probable token") {
  const weights target{{1, 3, 3, 2}};
  const weights draft{{5, 1, 1, 1}};
  const greedy rule;
  CHECK(rule.draw(0, target) == 1);
  CHECK(rule.draft(0, draft) == 0);
  CHECK(rule.accepts(0, 1, target, draft));
  CHECK_FALSE(rule.accepts(0, 2, target, draft));
  CHECK(rule.replace(0, target, draft) == 1);
}

TEST_CASE("speculative_sampling: accepts below p / q, strictly") {
  const weights target{{1, 3}};
  const weights draft{{1, 1}};
  CHECK(sampling_with(0, 0.5 - 0x1p-53, 0).accepts(0, 0, target, draft));
  CHECK_FALSE(sampling_with(0, 0.5, 0).accepts(0, 0, target, draft));
  CHECK(sampling_with(0, below_1, 0).accepts(0, 1, target, draft));
}

TEST_CASE("speculative_sampling: a token that cannot follow is not accepted at 0 either") {
  const weights target{{0, 1}};
  const weights draft{{1, 1}};
  CHECK_FALSE(sampling_with(0, 0, 0).accepts(0, 0, target, draft));
  CHECK_FALSE(sampling_with(0, 0, 0).accepts(0, 2, target, distribution::point(2)));
  CHECK(sampling_with(0, 0, 0).accepts(0, 1, target, draft));
}

TEST_CASE("speculative_sampling: equal distributions accept everything, whatever the scale of the weights") {
  std::vector<float> values;
  std::vector<float> scaled;
  for (int i = 1; i < 200; ++i) {
    values.push_back(1 / static_cast<float>(i));
    scaled.push_back(4 / static_cast<float>(i));
  }
  for (token_id token = 0; token < values.size(); ++token) {
    CHECK(sampling_with(0, below_1, 0).accepts(0, token, weights{values}, weights{values}));
    CHECK(sampling_with(0, below_1, 0).accepts(0, token, weights{values}, weights{scaled}));
  }
  // No residual: the target itself.
  CHECK(sampling_with(0, 0, 0).replace(0, weights{{0, 1, 1}}, weights{{0, 1, 1}}) == 1);
  CHECK(sampling_with(0, 0, below_1).replace(0, weights{{0, 1, 1}}, weights{{0, 2, 2}}) == 2);
}

TEST_CASE("speculative_sampling: a rejected token is replaced from max(p - q, 0)") {
  // p - q = 0.3, -0.4, 0.1, 0: normalised 3/4 and 1/4.
  const weights target{{5, 1, 3, 1}};
  const weights draft{{2, 5, 2, 1}};
  CHECK(sampling_with(0, 0, 0).replace(0, target, draft) == 0);
  CHECK(sampling_with(0, 0, 0.7499).replace(0, target, draft) == 0);
  CHECK(sampling_with(0, 0, 0.7501).replace(0, target, draft) == 2);
  CHECK(sampling_with(0, 0, below_1).replace(0, target, draft) == 2);
}

TEST_CASE("speculative_sampling: drafts without a distribution") {
  const weights target{{1, 2, 1}};
  const auto draft = distribution::point(1);
  CHECK(sampling_with(0.9, 0, 0).draft(0, draft) == 1);
  CHECK(sampling_with(0, 0.4999, 0).accepts(0, 1, target, draft));
  CHECK_FALSE(sampling_with(0, 0.5, 0).accepts(0, 1, target, draft));
  CHECK(sampling_with(0, 0, 0.4999).replace(0, target, draft) == 0);
  CHECK(sampling_with(0, 0, 0.5001).replace(0, target, draft) == 2);
}

TEST_CASE("speculative_sampling: a target of one token is greedy decoding") {
  const auto target = distribution::point(2);
  const weights draft{{1, 1, 1}};
  CHECK(sampling_with(0, below_1, 0).accepts(0, 2, target, draft));
  CHECK_FALSE(sampling_with(0, 0, 0).accepts(0, 1, target, draft));
  CHECK(sampling_with(0, 0, 0.1).replace(0, target, draft) == 2);
  CHECK(sampling_with(0, 0, 0.1).draw(0, target) == 2);
}

TEST_CASE("speculative_sampling: rounds do not share random numbers") {
  const std::vector<float> values(1000, 1);
  const weights flat{values};
  const speculative_sampling rule(1);
  CHECK(rule.for_round(3).draft(8, flat) == rule.for_round(3).draft(8, flat));
  CHECK(rule.for_round(3).draft(8, flat) != rule.for_round(4).draft(8, flat));
  CHECK(rule.for_round(3).draw(8, flat) != rule.for_round(3).for_round(3).draw(8, flat));
}

TEST_CASE("sample_and_match: one random number a position, in all rounds") {
  const std::vector<float> values(1000, 1);
  const weights flat{values};
  const sample_and_match rule(1);
  for (std::uint64_t position = 0; position < 5; ++position) {
    const token_id token = rule.draw(position, flat);
    CHECK(rule.for_round(3).for_round(9).draft(position, flat) == token);
    CHECK(rule.replace(position, flat, flat) == token);
    CHECK(rule.accepts(position, token, flat, flat));
    CHECK_FALSE(rule.accepts(position, token + 1, flat, flat));
    CHECK(rule.draw(position + 1, flat) != token);
    CHECK(sample_and_match(2).draw(position, flat) != token);
  }
}

TEST_CASE("sample_and_match: draws from the distribution") {
  // The probability of each token: how many of its own numbers let it win, averaged over those of the two others.
  constexpr int n = 50;
  for (const std::vector<float>& values : {std::vector<float>{1, 2, 1}, {0.1F, 0, 0.7F}, {5, 1, 0.01F}, {0, 1, 1}}) {
    const weights target{values};
    const distribution expected = target;
    for (token_id token = 0; token < 3; ++token) {
      double sum = 0;
      for (int i = 0; i < n * n; ++i) {
        scripted_times times;
        times.numbers[(token + 1) % 3] = (i % n + 0.5) / n;
        times.numbers[(token + 2) % 3] = (static_cast<double>(i / n) + 0.5) / n;
        const auto wins = [&](double number) {
          times.numbers[token] = number;
          return basic_sample_and_match(times).draw(0, target) == token;
        };
        double low = 0;
        double high = 1;
        for (int step = 0; step < 30; ++step) (wins((low + high) / 2) ? low : high) = (low + high) / 2;
        sum += low;
      }
      CHECK(sum / (n * n) == doctest::Approx(expected.mass(token)).epsilon(3e-3).scale(1));
    }
  }
}

TEST_CASE("sample_and_match: draws of similar distributions agree, in a large vocabulary too") {
  constexpr std::size_t vocabulary = 500;
  constexpr int positions = 1000;
  std::vector<float> values;
  std::vector<float> others;
  for (std::size_t i = 0; i < vocabulary; ++i) {
    values.push_back(static_cast<float>(counter_random(1).uniform(i, {})));
    others.push_back(values.back() * static_cast<float>(0.8 + 0.4 * counter_random(2).uniform(i, {})));
  }
  const auto target = distribution::dense(values);
  const auto draft = distribution::dense(others);
  REQUIRE((target && draft));
  double distance = 0;
  for (token_id token = 0; token < vocabulary; ++token) distance += std::abs(target->mass(token) - draft->mass(token)) / 2;
  const sample_and_match rule(3);
  int agree = 0;
  for (std::uint64_t position = 0; position < positions; ++position) agree += rule.draft(position, *draft) == rule.draw(position, *target);
  const double bound = (1 - distance) / (1 + distance);
  CHECK(agree > positions * bound - 5 * std::sqrt(positions * bound * (1 - bound)));
}

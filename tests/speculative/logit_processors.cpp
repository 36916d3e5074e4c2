// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/counter_random.hpp>
#include <kvexact/speculative/logit_processors.hpp>

using namespace kvexact;

namespace {

constexpr float none = -std::numeric_limits<float>::infinity();

using row = std::vector<float>;

row processed(const auto& processor, row logits) {
  processor.apply(logits);
  return logits;
}

/// Logits of all sizes and signs, with some equal ones, zeros and minus infinities.
row random_logits(std::uint64_t seed, std::size_t size) {
  row logits;
  for (std::size_t i = 0; i < size; ++i) {
    const counter_random random = counter_random(seed).fork(i);
    const double kind = random.uniform(0, random_purpose::accept);
    const auto value = static_cast<float>(20 * random.uniform(0, {}) - 14);
    logits.push_back(kind < 0.1   ? none
                     : kind < 0.2 ? 0
                     : kind < 0.3 ? -0.0F
                     : kind < 0.6 ? std::round(value)
                     : kind < 0.7 ? value * 1e-20F
                                  : value);
  }
  logits[size / 2] = 2;
  return logits;
}

/// Sorts, and keeps from the front until `enough(kept probability, kept tokens)`.
template <class Enough>
row kept_by_sorting(row logits, Enough enough) {
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  double total = 0;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit - logits[order[0]]));
  double mass = 0;
  row kept(logits.size(), none);
  for (std::size_t i = 0; i < order.size() && !enough(mass, i); ++i) {
    kept[order[i]] = logits[order[i]];
    mass += std::exp(static_cast<double>(logits[order[i]] - logits[order[0]])) / total;
  }
  return kept;
}

}  // namespace

TEST_CASE("temperature: divides the differences") {
  CHECK(processed(temperature{2}, {1, 5, none, -3}) == row{-2, 0, none, -4});
  CHECK(processed(temperature{1}, {1, 5, none}) == row{1, 5, none});
  CHECK(processed(temperature{std::numeric_limits<float>::min()}, {100, 300, 300}) == row{none, 0, 0});
}

TEST_CASE("top_k: against a sort, of equals the lowest index") {
  CHECK(processed(top_k{2}, {1, 3, 3, 3, 2}) == row{none, 3, 3, none, none});
  CHECK(processed(top_k{1}, {-0.0F, 0.0F}) == row{0, none});
  CHECK(processed(top_k{0}, {1, 2}) == row{1, 2});
  CHECK(processed(top_k{2}, {1, 2}) == row{1, 2});
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const row logits = random_logits(seed, 3 + seed);
    for (std::uint32_t k = 1; k <= logits.size(); k += 1 + k / 4)
      CHECK(processed(top_k{k}, logits) == kept_by_sorting(logits, [&](double, std::size_t tokens) { return tokens >= k; }));
  }
}

TEST_CASE("top_p: against a sort, the token that crosses the mass included") {
  const float half = std::log(0.5F);
  const float quarter = std::log(0.25F);
  CHECK(processed(top_p{0.4F}, {quarter, half, quarter}) == row{none, half, none});
  CHECK(processed(top_p{0.6F}, {quarter, half, quarter}) == row{quarter, half, none});
  CHECK(processed(top_p{1}, {quarter, half, -100}) == row{quarter, half, -100});
  CHECK(processed(top_p{1e-30F}, {1, 2, 2}) == row{none, 2, none});
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const row logits = random_logits(seed, 3 + seed);
    for (const float p : {0.01F, 0.3F, 0.61F, 0.9F, 0.99F, 0.99999F})
      CHECK(processed(top_p{p}, logits) == kept_by_sorting(logits, [&](double mass, std::size_t tokens) {
              return tokens > 0 && mass >= static_cast<double>(p) * (1 - 1e-7);
            }));
  }
}

TEST_CASE("min_p: by the share of the largest probability") {
  CHECK(processed(min_p{0.5F}, {3, 3 - 0.69F, 3 - 0.70F, none}) == row{3, 3 - 0.69F, none, none});
  CHECK(processed(min_p{1}, {3, 2, 3}) == row{3, none, 3});
  CHECK(processed(min_p{0}, {3, -1000}) == row{3, -1000});
}

TEST_CASE("repetition_penalty: divides positive and multiplies negative logits, once, in the prompt and after") {
  repetition_penalty penalty(2);
  REQUIRE(penalty.read_prompt(0));
  REQUIRE(penalty.commit(1));
  REQUIRE(penalty.commit(1));
  REQUIRE(penalty.commit(3));
  REQUIRE(penalty.commit(9));
  CHECK(processed(penalty, {4, -4, 4, none}) == row{2, -8, 4, none});
}

TEST_CASE("count_penalty: once for presence, each time for frequency") {
  count_penalty penalty(1, 0.5F);
  REQUIRE(penalty.commit(1));
  REQUIRE(penalty.commit(2));
  REQUIRE(penalty.commit(1));
  REQUIRE(penalty.commit(9));
  CHECK(processed(penalty, {4, 4, -4, none}) == row{4, 2, -5.5F, none});
}

TEST_CASE("penalties: a window forgets, a copy looks ahead alone") {
  repetition_penalty penalty(2, 2);
  for (const token_id token : {0U, 1U, 2U}) REQUIRE(penalty.commit(token));
  CHECK(processed(penalty, {4, 4, 4}) == row{4, 2, 2});
  repetition_penalty ahead = penalty;
  REQUIRE(ahead.commit(0));
  CHECK(processed(ahead, {4, 4, 4}) == row{2, 4, 2});
  CHECK(processed(penalty, {4, 4, 4}) == row{4, 2, 2});
}

TEST_CASE("processor_chain: in order, and every processor that reads tokens") {
  processor_chain chain(count_penalty(1, 0), repetition_penalty(2), temperature{0.5F});
  REQUIRE(chain.read_prompt(2));
  REQUIRE(chain.commit(0));
  CHECK(processed(chain, {5, 0, 8}) == row{-4, -8, 0});
  CHECK(processed(processor_chain(top_k{2}, top_p{0.6F}), {2, 2, 2}) == row{2, 2, none});
  CHECK(processed(processor_chain<>(), {1, 2}) == row{1, 2});
}

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/speculative_decoder.hpp>

#include "toy_engine.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr std::size_t new_tokens = 40;
const std::vector<token_id> prompt{3, 1, 4, 1, 5, 9, 2, 6};

/// Can take back `max_rollback` tokens, or go back to its checkpoint.
class recurrent_engine : public toy_engine {
 public:
  explicit recurrent_engine(const options& chosen) : toy_engine(chosen), faults_(chosen.faults) {}

  result<void> checkpoint() noexcept {
    if (const auto fault = next(); !fault) return fault;
    saved_ = *this;
    return {};
  }
  result<void> restore() noexcept {
    if (const auto fault = next(); !fault) return fault;
    REQUIRE(saved_);
    static_cast<toy_engine&>(*this) = *saved_;
    ++restored;
    return {};
  }
  int restored = 0;

 private:
  result<void> next() noexcept { return faults_ == nullptr ? result<void>() : faults_->next(); }

  fault_plan* faults_;
  std::optional<toy_engine> saved_;
};
static_assert(checkpointing_decoder<recurrent_engine> && !checkpointing_decoder<toy_engine>);

/// Has memory for positions below `room`.
struct paged_engine : toy_engine {
  using toy_engine::toy_engine;
  result<void> reserve(std::uint64_t length) noexcept {
    most = std::max(most, length);
    return length <= room ? result<void>() : result<void>(error{error_code::out_of_memory, "no pages are free"});
  }
  std::uint64_t room = 0, most = 0;
};
static_assert(reserving_decoder<paged_engine> && !reserving_decoder<toy_engine>);

std::vector<token_id> plain(toy_engine& engine) {
  std::vector<token_id> tokens = prompt;
  REQUIRE(engine.forward(std::span(tokens).first(tokens.size() - 1), {}));
  std::vector<float> logits(engine.vocabulary());
  for (std::size_t i = 0; i < new_tokens; ++i) {
    REQUIRE(engine.forward(std::span(tokens).last(1), logits));
    tokens.push_back(static_cast<token_id>(std::ranges::max_element(logits) - logits.begin()));
  }
  return tokens;
}

/// Proposes what is right, but for one token in four.
class half_knowing {
 public:
  half_knowing(std::vector<token_id> known, std::uint32_t seed) : known_(std::move(known)), random_(seed) {}
  [[nodiscard]] std::uint64_t max_draft() const noexcept { return 16; }
  result<void> synchronise(std::span<const token_id>) noexcept { return {}; }
  template <class Rule, class Sampler>
  result<void> propose(const draft_request<Rule, Sampler>& request, draft_block& block) noexcept {
    for (std::size_t i = 0; i < request.wanted; ++i) {
      const token_id right = known_[request.length() + block.size()], token = random_() % 4 == 0 ? right ^ 1U : right;
      if (const auto pushed = block.push(token, distribution::point(token)); !pushed) return pushed;
    }
    return {};
  }

 private:
  std::vector<token_id> known_;
  std::mt19937 random_;
};

bool have_same_rows(const toy_engine& a, const toy_engine& b) {
  std::vector<std::byte> of_a, of_b;
  for (std::uint64_t t = 0; t < std::min(a.length(), b.length()); ++t) {
    detail::read_rows(a, t, of_a);
    detail::read_rows(b, t, of_b);
    if (of_a != of_b) return false;
  }
  return a.length() == b.length();
}

template <class Engine>
auto decoder_on(Engine& engine, const std::vector<token_id>& expected, std::uint32_t seed) {
  return *speculative_decoder<Engine, half_knowing>::make(
      engine, half_knowing(expected, seed), greedy(), fixed_draft_length(6),
      {.sampler = *standard_sampler::make({.temperature = 0}), .stops = {.max_new_tokens = new_tokens}});
}

}  // namespace

TEST_CASE("speculative_decoder: an engine that cannot be cut goes back to its checkpoint") {
  toy_engine reference({});
  const std::vector<token_id> expected = plain(reference);
  int restored_at_most = 0;
  for (const std::uint64_t rollback : {0U, 1U, 3U, 6U, 7U}) {
    CAPTURE(rollback);
    recurrent_engine engine({.max_rollback = rollback});
    auto decoder = decoder_on(engine, expected, 5);
    REQUIRE(decoder.begin(prompt));
    while (!decoder.stop()) {
      REQUIRE(decoder.round());
      REQUIRE(engine.length() == decoder.tokens().size() - 1);
    }
    CHECK(std::ranges::equal(decoder.tokens(), expected));
    CHECK(have_same_rows(engine, reference));
    if (rollback == 0) restored_at_most = engine.restored;
    CHECK((rollback == 7 ? engine.restored == 0 : engine.restored <= restored_at_most));
  }
  CHECK(restored_at_most > 0);
}

TEST_CASE("speculative_decoder: a fault at each call of an engine with checkpoints") {
  toy_engine reference({});
  const std::vector<token_id> expected = plain(reference);
  fault_plan faults;
  bool done = false;
  for (std::uint64_t failing = 0; !done; ++failing) {
    CAPTURE(failing);
    faults = {};
    recurrent_engine engine({.max_rollback = 1, .faults = &faults});
    auto decoder = decoder_on(engine, expected, 6);
    REQUIRE(decoder.begin(prompt));
    faults = {.calls = 0, .failing = failing};
    while (!decoder.stop()) {
      const auto report = decoder.round();
      CHECK((report || report.error().code == error_code::output_failed));
    }
    REQUIRE(decoder.synchronise());
    CHECK(std::ranges::equal(decoder.tokens(), expected));
    CHECK(have_same_rows(engine, reference));
    done = faults.calls <= failing;
  }
}

TEST_CASE("speculative_decoder: no checkpoint helps a fixed width") {
  recurrent_engine engine({.max_rollback = 3});
  const auto made = speculative_decoder<recurrent_engine, half_knowing>::make(engine, half_knowing({}, 1), greedy(), fixed_draft_length(2),
                                                                             {.sampler = *standard_sampler::make({}), .fixed_width = 4});
  REQUIRE_FALSE(made);
  CHECK(made.error().code == error_code::invalid_argument);
}

TEST_CASE("speculative_decoder: nothing is drafted that the engine has no room for") {
  toy_engine reference({});
  const std::vector<token_id> expected = plain(reference);
  paged_engine engine(toy_engine::options{});
  auto decoder = decoder_on(engine, expected, 7);
  REQUIRE(decoder.begin(prompt));
  std::size_t proposed = 0;
  for (int rounds = 0; !decoder.stop(); ++rounds) {
    const std::uint64_t length = engine.length();
    const bool has_room = rounds % 3 != 2;
    engine.room = has_room ? engine.capacity() : length + 1;
    engine.most = 0;
    const auto report = decoder.round();
    REQUIRE(report);
    proposed += report->proposed;
    if (engine.most == 0) continue;  // no draft was wanted at the end
    CHECK(report->draft_error.has_value() == !has_room);
    CHECK(report->proposed == (has_room ? engine.most - length - 1 : 0));
  }
  CHECK(proposed > 5);
  CHECK(std::ranges::equal(decoder.tokens(), expected));
}

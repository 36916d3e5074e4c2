// SPDX-License-Identifier: Apache-2.0
// The law of what is generated, exactly: all runs of small models, compared with plain decoding.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/chain.hpp>
#include <kvexact/speculative/model_drafter.hpp>
#include <kvexact/speculative/sampler.hpp>

#include "any_drafter.hpp"
#include "decision_tree.hpp"
#include "toy_models.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

using law = std::map<tokens, double>;

const tokens prompt{1, 0};

struct example {
  std::size_t vocabulary = 3;
  std::uint64_t generated = 4;
  std::size_t draft_length = 2;
  sampling_parameters parameters = {};

  [[nodiscard]] toy_model target() const { return {vocabulary, 1, 2}; }
  [[nodiscard]] toy_model compressed() const { return {vocabulary, 1, 3}; }
  [[nodiscard]] toy_model small() const { return {vocabulary, 1, 4, 1.0}; }
  [[nodiscard]] standard_sampler sampler() const {
    auto made = standard_sampler::make(parameters);
    REQUIRE(made);
    REQUIRE(made->read_prompt(prompt));
    return *made;
  }
};

void add_plain(const example& of, const standard_sampler& sampler, const tokens& sequence, double probability, law& sum) {
  if (sequence.size() == prompt.size() + of.generated) {
    sum[sequence] += probability;
    return;
  }
  std::vector<float> logits(of.vocabulary);
  REQUIRE(of.target().logits(sequence, {}, logits));
  const auto next = sampler.next(logits);
  REQUIRE(next);
  for (token_id token = 0; token < of.vocabulary; ++token) {
    if (next->target.mass(token) == 0) continue;
    standard_sampler read = sampler;
    REQUIRE(read.commit(token));
    tokens longer = sequence;
    longer.push_back(token);
    add_plain(of, read, longer, probability * next->target.mass(token), sum);
  }
}

law plain_law(const example& of) {
  law sum;
  add_plain(of, of.sampler(), prompt, 1, sum);
  return sum;
}

template <class Rule>
toy_request<Rule> request_of(const example& of, const Rule& rule) {
  toy_request<Rule> made{of.target(), rule, {of.sampler(), {}}, {}, prompt, of.draft_length, 100};
  made.state.progress.length = prompt.size();
  made.stops.max_new_tokens = of.generated;
  return made;
}

template <template <class> class Rule>
using drafter_maker = std::function<any_drafter<enumerated<Rule>>()>;

/// Round by round: the random numbers of different rounds are independent.
template <template <class> class Rule>
law speculative_law(const example& of, const drafter_maker<Rule>& make_drafter) {
  decision_tree none;
  using request = toy_request<enumerated<Rule>>;
  std::map<tokens, std::pair<double, request>> open;
  open.emplace(prompt, std::pair(1.0, request_of(of, enumerated<Rule>(none))));
  law sum;
  while (!open.empty()) {
    const auto [probability, before] = open.extract(open.begin()).mapped();
    for (decision_tree tree; tree.next_run();) {
      request now = before;
      now.rule = enumerated<Rule>(tree);
      auto drafter = make_drafter();
      now.round(drafter);
      const double both = probability * tree.probability();
      if (now.stops.remaining(now.state.progress) == 0) {
        sum[now.sequence] += both;
      } else {
        open.try_emplace(now.sequence, 0.0, now).first->second.first += both;
      }
    }
  }
  return sum;
}

/// All rounds at once.
template <template <class> class Rule>
law speculative_law_of_whole_runs(const example& of, const drafter_maker<Rule>& make_drafter, bool& reused) {
  law sum;
  decision_tree tree;
  while (tree.next_run()) {
    auto request = request_of(of, enumerated<Rule>(tree));
    const tokens sequence = request.decode(make_drafter());
    sum[sequence] += tree.probability();
  }
  reused = tree.reused();
  return sum;
}

double difference(const law& a, const law& b) {
  double largest = 0;
  for (const auto& [sequence, probability] : a) {
    const auto at = b.find(sequence);
    largest = std::max(largest, std::abs(probability - (at == b.end() ? 0 : at->second)));
  }
  for (const auto& [sequence, probability] : b) {
    if (!a.contains(sequence)) largest = std::max(largest, probability);
  }
  return largest;
}

auto small_of(const example& of) {
  return [=] { return model_drafter(of.small()); };
}

/// Small model, then compressed cache: with the target a chain of three levels.
struct chain_of {
  example of;
  std::size_t draft_length = 1;

  [[nodiscard]] auto operator()() const {
    auto made = chain_level<model_drafter<toy_model>, toy_model>::make(model_drafter(of.small()), of.compressed(), draft_length);
    REQUIRE(made);
    return std::move(*made);
  }
};

std::vector<sampling_parameters> interesting_parameters() {
  sampling_parameters penalties{.temperature = 0.9F, .repetition_penalty = 1.5F, .presence_penalty = 0.3F, .frequency_penalty = 0.4F};
  sampling_parameters windowed = penalties;
  windowed.penalty_window = 2;
  windowed.top_k = 2;
  return {{},
          {.temperature = 0.7F, .top_k = 2},
          {.temperature = 1.3F, .top_p = 0.8F},
          {.min_p = 0.3F},
          penalties,
          windowed,
          {.temperature = 0}};
}

/// Draws the replacement from the target as it is.
template <class Random>
struct without_residual : basic_speculative_sampling<Random> {
  using basic = basic_speculative_sampling<Random>;
  explicit without_residual(Random random) noexcept : basic(random) {}
  [[nodiscard]] without_residual for_round(std::uint64_t length) const noexcept {
    without_residual forked = *this;
    static_cast<basic&>(forked) = basic::for_round(length);
    return forked;
  }
  [[nodiscard]] token_id replace(std::uint64_t position, const distribution& target, const distribution&) const noexcept {
    return this->draw(position, target);
  }
};

/// Says that its tokens come from another model than they do.
template <class Drafter>
struct misattributed {
  Drafter drafter;
  toy_model claimed;

  [[nodiscard]] std::uint64_t max_draft() const noexcept { return drafter.max_draft(); }
  [[nodiscard]] result<void> synchronise(std::span<const token_id> committed) noexcept { return drafter.synchronise(committed); }
  template <class Rule, class Sampler>
  [[nodiscard]] result<void> propose(const draft_request<Rule, Sampler>& request, draft_block& block) noexcept {
    auto real = draft_block::make(request.wanted, claimed.size);
    if (!real) return real.error();
    if (auto proposed = drafter.propose(request, *real); !proposed) return proposed;
    const auto drafts = real->view().tokens;
    for (std::size_t i = 0; i < drafts.size(); ++i) {
      const auto row = block.next_row();
      if (auto run = claimed.logits(request.committed, drafts.first(i), row); !run) return run;
      const auto next = request.sampler.next(row);
      if (!next) return next.error();
      if (auto pushed = block.push(drafts[i], next->target); !pushed) return pushed;
    }
    return {};
  }
};

template <class Make>
auto misattributed_to(const toy_model& claimed, Make make) {
  return [=] { return misattributed<decltype(make())>{make(), claimed}; };
}

}  // namespace

TEST_CASE("exact law: every draft length, vocabulary and length") {
  for (const std::size_t vocabulary : {2U, 3U, 5U}) {
    for (const std::uint64_t generated : {1U, 3U, 4U}) {
      for (std::size_t draft_length = 0; draft_length <= 4; ++draft_length) {
        const example of{vocabulary, generated, draft_length};
        CAPTURE(vocabulary);
        CAPTURE(generated);
        CAPTURE(draft_length);
        const law plain = plain_law(of);
        CHECK(difference(speculative_law<basic_speculative_sampling>(of, small_of(of)), plain) < 1e-12);
      }
    }
  }
}

TEST_CASE("exact law: temperature, truncation and penalties") {
  for (const sampling_parameters& parameters : interesting_parameters()) {
    for (const std::size_t draft_length : {1U, 2U, 4U}) {
      const example of{draft_length == 2 ? 5U : 4U, 4, draft_length, parameters};
      const law plain = plain_law(of);
      CHECK(difference(speculative_law<basic_speculative_sampling>(of, small_of(of)), plain) < 1e-12);
      CHECK(difference(speculative_law<basic_speculative_sampling>(of, [&] { return point_drafter{of.vocabulary}; }), plain) < 1e-12);
    }
  }
}

TEST_CASE("exact law: a chain of three levels") {
  for (const sampling_parameters& parameters : interesting_parameters()) {
    for (std::size_t below = 0; below <= 2; ++below) {
      const example of{3, 3, 2, parameters};
      const law plain = plain_law(of);
      CHECK(difference(speculative_law<basic_speculative_sampling>(of, chain_of{of, below}), plain) < 1e-12);
    }
  }
  const example longer{3, 4, 3};
  CHECK(difference(speculative_law<basic_speculative_sampling>(longer, chain_of{longer, 2}), plain_law(longer)) < 1e-12);
}

TEST_CASE("exact law: whole runs, and no random number decides twice") {
  bool reused = true;
  const example of{3, 3, 2};
  CHECK(difference(speculative_law_of_whole_runs<basic_speculative_sampling>(of, small_of(of), reused), plain_law(of)) < 1e-12);
  CHECK_FALSE(reused);
  const example few{2, 3, 2};
  CHECK(difference(speculative_law_of_whole_runs<basic_speculative_sampling>(few, chain_of{few, 1}, reused), plain_law(few)) < 1e-12);
  CHECK_FALSE(reused);
}

TEST_CASE("exact law: what is wrong is seen") {
  const example of{3, 3, 2};
  const law plain = plain_law(of);
  CHECK(difference(speculative_law<without_residual>(of, small_of(of)), plain) > 1e-3);
  // A level that passes on the distribution of the level below, and the small model with that of the level above.
  CHECK(difference(speculative_law<basic_speculative_sampling>(of, misattributed_to(of.small(), chain_of{of, 1})), plain) > 1e-3);
  CHECK(difference(speculative_law<basic_speculative_sampling>(of, misattributed_to(of.compressed(), small_of(of))), plain) > 1e-3);
  CHECK(difference(speculative_law<basic_speculative_sampling>(of, misattributed_to(of.compressed(), chain_of{of, 1})), plain) < 1e-12);
}

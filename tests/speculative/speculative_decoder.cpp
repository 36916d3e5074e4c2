// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/compression/h2o.hpp>
#include <kvexact/compression/quantised.hpp>
#include <kvexact/compression/snap_kv.hpp>
#include <kvexact/compression/streaming_llm.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/compression/uncompressed.hpp>
#include <kvexact/speculative/chain.hpp>
#include <kvexact/speculative/engine_model.hpp>
#include <kvexact/speculative/ngram_drafter.hpp>
#include <kvexact/speculative/speculative_decoder.hpp>

#include "any_drafter.hpp"
#include "toy_engine.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

const std::vector<token_id> prompt{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4};

using exact = draft_cache<uncompressed<bf16>>;
using int4 = draft_cache<quantised<bf16, symmetric<4>, symmetric<4>>>;
using streaming = draft_cache<streaming_llm<bf16>>;
using snap = draft_cache<first_layers<1, uncompressed<bf16>>, snap_kv<bf16>>;
using heavy = draft_cache<h2o<bf16>>;

constexpr dropper_options small_dropper{.sinks = 1, .budget = 6, .window = 4, .interval = 8, .max_rollback = 12, .query_heads = toy_engine::shared};

template <class Cache>
Cache made(const toy_engine& engine, const typename Cache::options& options = {}) {
  return *Cache::make(engine.shape(), options);
}
exact made_exact(const toy_engine& engine) { return made<exact>(engine); }
int4 made_int4(const toy_engine& engine) { return made<int4>(engine, {{.keys = {.group_channels = 4}, .values = {.group_channels = 4}}}); }
streaming made_streaming(const toy_engine& engine) { return made<streaming>(engine, {{.sinks = 1, .window = 6, .interval = 4, .max_rollback = 9}}); }
snap made_snap(const toy_engine& engine) { return made<snap>(engine, {{}, {.eviction = small_dropper}}); }
heavy made_heavy(const toy_engine& engine) { return made<heavy>(engine, {small_dropper}); }

standard_sampler sampler_of(float temperature, float penalty = 1) {
  return *standard_sampler::make({.temperature = temperature, .top_p = 0.95F, .repetition_penalty = penalty});
}

/// Always the same, or a length that changes all the time, 0 included; a round's drafting ends early after `sure` drafts.
class test_length {
 public:
  [[nodiscard]] static test_length always(std::uint32_t length) { return test_length(0, length); }
  [[nodiscard]] static test_length random(std::uint32_t seed) { return test_length(seed, ~0U); }
  [[nodiscard]] std::uint32_t next(std::uint32_t most) noexcept {
    return std::min(most, length_ != ~0U ? length_ : static_cast<std::uint32_t>(random_() % 9));
  }
  void observe(const draft_outcome& outcome) noexcept {
    proposed += outcome.proposed;
    accepted += outcome.accepted;
    asked_ = 0;
  }
  [[nodiscard]] bool stop_early(double) noexcept { return ++asked_ == sure; }
  std::uint64_t proposed = 0, accepted = 0;
  std::uint32_t sure = ~0U;

 private:
  test_length(std::uint32_t seed, std::uint32_t length) : random_(seed), length_(length) {}

  std::mt19937 random_;
  std::uint32_t length_;
  std::uint32_t asked_ = 0;
};

/// One token after another on the full cache, in the plainest form.
template <class Rule, class Sampler>
std::vector<token_id> plain(toy_engine& engine, const Rule& rule, Sampler sampler, std::uint64_t count, const std::vector<token_id>& end_tokens = {}) {
  std::vector<token_id> tokens = prompt;
  REQUIRE(sampler.read_prompt(prompt));
  REQUIRE(engine.forward(std::span(tokens).first(tokens.size() - 1), {}));
  std::vector<float> logits(engine.vocabulary());
  for (std::uint64_t i = 0; i < count; ++i) {
    REQUIRE(engine.forward(std::span(tokens).last(1), logits));
    const auto next = sampler.next(logits);
    REQUIRE(next);
    const token_id token = rule.for_round(tokens.size()).draw(tokens.size(), next->target);
    REQUIRE(sampler.commit(token));
    tokens.push_back(token);
    if (std::ranges::find(end_tokens, token) != end_tokens.end()) break;
  }
  return tokens;
}

bool have_same_rows(const toy_engine& a, const toy_engine& b) {
  if (a.length() != b.length()) return false;
  std::vector<std::byte> of_a, of_b;
  for (std::uint64_t t = 0; t < a.length(); ++t) {
    detail::read_rows(a, t, of_a);
    detail::read_rows(b, t, of_b);
    if (of_a != of_b) return false;
  }
  return true;
}

/// The draft cache after `synchronise` is one that was only ever given the target's rows.
template <class Cache>
bool holds_rows_of(const Cache& cache, const toy_engine& engine, const Cache& fresh) {
  Cache expected = fresh;
  for (std::uint32_t l = 0; l < cache.shape().layers(); ++l) {
    REQUIRE(expected.append(l, engine.rows(l, 0), engine.length()));
    for (std::uint32_t h = 0; h < toy_engine::heads; ++h) {
      const std::size_t count = cache.entries(l, h);
      if (count != expected.entries(l, h)) return false;
      std::vector<std::uint64_t> p(count), q(count);
      std::vector<float> k(count * toy_engine::dim), v(k), x(k), y(k);
      REQUIRE(cache.materialise(l, h, {p, k, v}));
      REQUIRE(expected.materialise(l, h, {q, x, y}));
      if (p != q || k != x || v != y) return false;
    }
  }
  return true;
}

template <class Rule>
using decoder_of = speculative_decoder<toy_engine, any_drafter<Rule>, Rule, test_length>;

template <class Rule>
decoder_of<Rule> decoder_on(toy_engine& full, any_drafter<Rule> drafts, const Rule& rule, const test_length& length, typename decoder_of<Rule>::options options) {
  return *decoder_of<Rule>::make(full, std::move(drafts), rule, length, std::move(options));
}

/// Decodes with drafts and without, and compares tokens and rows. Returns accepted and proposed drafts.
template <class MakeDrafter, class Rule>
std::pair<std::uint64_t, std::uint64_t> compare(std::uint32_t seed, MakeDrafter&& make_drafter, const Rule& rule, const standard_sampler& sampler) {
  CAPTURE(seed);
  toy_engine full({.seed = seed}), reference({.seed = seed});
  const auto expected = plain(reference, rule, sampler, 60);
  auto decoder = decoder_on<Rule>(full, make_drafter(full), rule, test_length::random(seed),
                                  {.sampler = sampler, .stops = {.max_new_tokens = 60}, .longest_draft = 8});
  REQUIRE(decoder.begin(prompt));
  std::vector<token_id> tokens = prompt;
  while (!decoder.stop()) {
    const auto report = decoder.round();
    REQUIRE(report);
    CHECK(report->committed.size() >= 1);
    CHECK(report->committed.size() <= report->accepted + 1);
    tokens.insert(tokens.end(), report->committed.begin(), report->committed.end());
    REQUIRE(full.length() == tokens.size() - 1);
  }
  CHECK(decoder.stop().reason == stop_reason::max_new_tokens);
  CHECK(tokens == expected);
  CHECK(std::ranges::equal(decoder.tokens(), expected));
  CHECK(have_same_rows(full, reference));
  REQUIRE(decoder.synchronise());
  return {decoder.length_policy().accepted, decoder.length_policy().proposed};
}

template <class Cache>
auto self(toy_engine& engine, Cache cache) {
  return model_drafter(compressed_model<toy_engine, Cache>(engine, std::move(cache)));
}
template <class Cache>
auto self(Cache (*make_cache)(const toy_engine&)) {
  return [make_cache](toy_engine& engine) { return self(engine, make_cache(engine)); };
}

/// Repeats the newest token; each call whose number the period divides fails, a proposal after its first token.
struct failing_drafter {
  std::uint32_t period;
  std::uint32_t calls = 0;

  [[nodiscard]] std::uint64_t max_draft() const noexcept { return 8; }
  result<void> synchronise(std::span<const token_id>) noexcept { return next(); }
  template <class Rule>
  result<void> propose(const draft_request<Rule, standard_sampler>& request, draft_block& block) noexcept {
    for (std::size_t i = 0; i < request.wanted; ++i) {
      const auto pushed = block.push(request.committed.back(), distribution::point(request.committed.back()));
      if (!pushed) return pushed;
      if (const auto fault = next(); !fault) return fault;
    }
    return {};
  }
  result<void> next() noexcept {
    return ++calls % period == 0 ? result<void>(error{error_code::output_failed, "an injected fault"}) : result<void>();
  }
};
/// Gives one token more than wanted, or tokens from beyond the vocabulary.
struct lying_drafter {
  token_id first;

  [[nodiscard]] std::uint64_t max_draft() const noexcept { return 8; }
  result<void> synchronise(std::span<const token_id>) noexcept { return {}; }
  template <class Rule>
  result<void> propose(const draft_request<Rule, standard_sampler>& request, draft_block& block) noexcept {
    for (std::size_t i = 0; i < request.wanted + (first < 12 ? 1 : 0); ++i) {
      if (const auto pushed = block.push(first, distribution::point(first)); !pushed) return pushed;
    }
    return {};
  }
};

}  // namespace

TEST_CASE("speculative_decoder: tokens and rows are those of plain decoding, whatever drafts") {
  const auto all = [](const auto& rule, const standard_sampler& sampler) {
    for (std::uint32_t seed = 1; seed <= 8; ++seed) {
      const auto [accepted, proposed] = compare(seed, self(made_exact), rule, sampler);
      CHECK(accepted == proposed);  // nothing is lost: every draft must be accepted
      compare(seed, self(made_int4), rule, sampler);
      compare(seed, self(made_streaming), rule, sampler);
      compare(seed, self(made_snap), rule, sampler);
      compare(seed, self(made_heavy), rule, sampler);
      compare(seed, [](toy_engine&) { return *ngram_drafter::make({}); }, rule, sampler);
      compare(seed, [seed](toy_engine&) { return model_drafter(engine_model(toy_engine({.seed = seed + 100}))); }, rule, sampler);
      compare(
          seed,
          [](toy_engine& engine) {
            using model = compressed_model<toy_engine, int4>;
            return *chain_level<ngram_drafter, model>::make(*ngram_drafter::make({}), model(engine, made_int4(engine)), 4);
          },
          rule, sampler);
    }
  };
  all(greedy(), sampler_of(0));
  all(greedy(), sampler_of(0, 1.3F));
  all(sample_and_match(42), sampler_of(0.9F));
  all(sample_and_match(43), sampler_of(1.2F, 1.3F));
}

TEST_CASE("speculative_decoder: lossy drafts are accepted often") {
  std::uint64_t accepted = 0, proposed = 0;
  for (std::uint32_t seed = 1; seed <= 8; ++seed) {
    const auto [of_seed, out_of] = compare(seed, self(made_int4), greedy(), sampler_of(0));
    accepted += of_seed;
    proposed += out_of;
  }
  CHECK(static_cast<double>(accepted) > 0.6 * static_cast<double>(proposed));
}

TEST_CASE("speculative_decoder: the draft cache takes its rows from verification") {
  toy_engine full({.seed = 3});
  auto decoder = decoder_on<greedy>(full, self(full, made_int4(full)), {}, test_length::random(1),
                                    {.sampler = sampler_of(0), .stops = {.max_new_tokens = 50}});
  REQUIRE(decoder.begin(prompt));
  while (!decoder.stop()) {
    REQUIRE(decoder.round());
    REQUIRE(decoder.synchronise());
    REQUIRE(holds_rows_of(decoder.drafts().as<model_drafter<compressed_model<toy_engine, int4>>>().model().cache(), full, made_int4(full)));
  }
}

TEST_CASE("speculative_decoder: speculative sampling emits the tokens that settling rounds by hand does") {
  // Its law is tested elsewhere; here, that the same drafts give the same tokens again, and other seeds others.
  const auto decode = [](std::uint64_t seed) {
    toy_engine full({.seed = 2});
    auto decoder = decoder_on<speculative_sampling>(full, self(full, made_int4(full)), speculative_sampling(seed), test_length::always(4),
                                                    {.sampler = sampler_of(1), .stops = {.max_new_tokens = 80}});
    REQUIRE(decoder.begin(prompt));
    CHECK(decoder.level() == guarantee::distribution);
    while (!decoder.stop()) REQUIRE(decoder.round());
    return std::vector<token_id>(decoder.tokens().begin(), decoder.tokens().end());
  };
  CHECK(decode(1) == decode(1));
  CHECK(decode(1) != decode(2));
}

TEST_CASE("speculative_decoder: an end token inside a block cuts the block and the cache") {
  bool in_a_block = false;
  for (std::uint32_t seed = 1; seed <= 12; ++seed) {
    for (token_id end = 0; end < 12; ++end) {
      toy_engine full({.seed = seed}), reference({.seed = seed});
      const auto expected = plain(reference, greedy(), sampler_of(0), 40, {end});
      auto decoder = decoder_on<greedy>(full, self(full, made_exact(full)), {}, test_length::always(7),
                                        {.sampler = sampler_of(0), .stops = {.end_tokens = {end}, .max_new_tokens = 40}});
      REQUIRE(decoder.begin(prompt));
      while (!decoder.stop()) {
        const auto report = decoder.round();
        REQUIRE(report);
        in_a_block |= report->stop.reason == stop_reason::end_token && report->committed.size() <= report->accepted && report->accepted < report->proposed;
      }
      CHECK(std::ranges::equal(decoder.tokens(), expected));
      CHECK(have_same_rows(full, reference));
      CHECK(decoder.round().error().code == error_code::invalid_argument);
    }
  }
  CHECK(in_a_block);
}

TEST_CASE("speculative_decoder: a fault anywhere loses no token, invents none, and decoding goes on") {
  toy_engine reference({.seed = 5});
  const auto expected = plain(reference, greedy(), sampler_of(0), 24);
  std::uint64_t faults_seen = 0;
  for (std::uint64_t failing = 0;; ++failing) {
    CAPTURE(failing);
    fault_plan faults{.calls = 0, .failing = failing};
    toy_engine full({.seed = 5, .faults = &faults});
    using model = compressed_model<toy_engine, snap>;
    using chain = chain_level<model_drafter<engine_model<toy_engine>>, model>;
    auto drafts = *chain::make(model_drafter(engine_model(toy_engine({.seed = 6, .faults = &faults}))), model(full, made_snap(full)), 3);
    auto decoder = decoder_on<greedy>(full, std::move(drafts), {}, test_length::random(9),
                                      {.sampler = sampler_of(0), .stops = {.max_new_tokens = 24}, .longest_draft = 6});
    bool failed = false;
    const auto survives = [&](const auto& outcome) {
      if (outcome) return true;
      REQUIRE(outcome.error().code == error_code::output_failed);
      REQUIRE(!failed);
      failed = true;
      return false;
    };
    while (!survives(decoder.begin(prompt))) {
    }
    while (!decoder.stop()) {
      const std::size_t before = decoder.tokens().size();
      const auto report = decoder.round();
      if (!survives(report)) CHECK(decoder.tokens().size() == before);
      if (report && report->draft_error) (void)survives(result<void>(*report->draft_error));
      REQUIRE(std::ranges::equal(decoder.tokens(), std::span(expected).first(decoder.tokens().size())));
    }
    CHECK(std::ranges::equal(decoder.tokens(), expected));
    while (!survives(decoder.synchronise())) {
    }
    CHECK(have_same_rows(full, reference));
    faults_seen += failed ? 1 : 0;
    if (faults.calls <= failing) break;
  }
  CHECK(faults_seen > 50);
}

TEST_CASE("speculative_decoder: a drafter that fails costs drafts and nothing else") {
  toy_engine reference({.seed = 5});
  const auto expected = plain(reference, greedy(), sampler_of(0), 24);
  for (const std::uint32_t period : {1U, 2U, 3U, 7U}) {
    CAPTURE(period);
    toy_engine full({.seed = 5});
    auto decoder = decoder_on<greedy>(full, failing_drafter{period}, {}, test_length::always(3),
                                      {.sampler = sampler_of(0), .stops = {.max_new_tokens = 24}});
    REQUIRE(decoder.begin(prompt));
    std::size_t errors = 0, drafts = 0;
    while (!decoder.stop()) {
      const auto report = decoder.round();
      REQUIRE(report);
      errors += report->draft_error ? 1 : 0;
      drafts += report->proposed;
      if (report->draft_error) CHECK(report->draft_error->code == error_code::output_failed);
    }
    CHECK(std::ranges::equal(decoder.tokens(), expected));
    CHECK(have_same_rows(full, reference));
    CHECK(errors > 0);
    CHECK((period == 1) == (drafts == 0));
    CHECK((period == 1) == (errors == 24));
  }
}

TEST_CASE("speculative_decoder: drafts that no engine can run") {
  toy_engine full({.seed = 5}), reference({.seed = 5});
  const auto expected = plain(reference, greedy(), sampler_of(0), 10);
  for (const token_id first : {token_id{11}, token_id{12}}) {
    full = toy_engine({.seed = 5});
    auto decoder = decoder_on<greedy>(full, lying_drafter{first}, {}, test_length::always(3),
                                      {.sampler = sampler_of(0), .stops = {.max_new_tokens = 10}});
    REQUIRE(decoder.begin(prompt));
    while (!decoder.stop()) {
      const auto report = decoder.round();
      REQUIRE(report);
      CHECK(report->proposed == 0);
      if (!decoder.stop()) CHECK(report->draft_error->code == error_code::invalid_argument);
    }
    CHECK(std::ranges::equal(decoder.tokens(), expected));
  }
}

TEST_CASE("speculative_decoder: drafts that their own law cannot give") {
  struct outlaw {
    std::vector<float> law = std::vector<float>(12, 1.0F);
    [[nodiscard]] std::uint64_t max_draft() const noexcept { return 8; }
    result<void> synchronise(std::span<const token_id>) noexcept { return {}; }
    result<void> propose(const draft_request<speculative_sampling, standard_sampler>&, draft_block& block) noexcept {
      law[5] = 0;
      return block.push(5, *distribution::dense(law));
    }
  };
  toy_engine full({.seed = 5});
  auto decoder = decoder_on<speculative_sampling>(full, outlaw(), speculative_sampling(1), test_length::always(3),
                                                  {.sampler = sampler_of(1), .stops = {.max_new_tokens = 10}});
  REQUIRE(decoder.begin(prompt));
  while (!decoder.stop()) {
    const auto report = decoder.round();
    REQUIRE(report);
    CHECK(report->proposed == 0);
  }
  CHECK(decoder.tokens().size() == prompt.size() + 10);
}

TEST_CASE("speculative_decoder: nothing to generate, and prompts of unknown tokens") {
  toy_engine full({.seed = 5});
  const auto begun = [&](const stop_conditions<>& stops) {
    full = toy_engine({.seed = 5});
    auto decoder = decoder_on<greedy>(full, *ngram_drafter::make({}), {}, test_length::always(3), {.sampler = sampler_of(0), .stops = stops});
    REQUIRE(decoder.begin(prompt));
    CHECK(decoder.round().error().code == error_code::invalid_argument);
    return decoder.stop().reason;
  };
  CHECK(begun({.max_new_tokens = 0}) == stop_reason::max_new_tokens);
  CHECK(begun({.context_length = prompt.size()}) == stop_reason::context_full);
  full = toy_engine({.seed = 5});
  auto decoder = decoder_on<greedy>(full, *ngram_drafter::make({}), {}, test_length::always(3), {.sampler = sampler_of(0)});
  for (const std::size_t at : {std::size_t{0}, prompt.size() - 1}) {
    auto unknown = prompt;
    unknown[at] = 12;
    const auto refused = decoder.begin(unknown);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().token == static_cast<std::int64_t>(at));
  }
  CHECK(full.length() == 0);
  CHECK(decoder.begin(prompt));
}

TEST_CASE("speculative_decoder: a round in its phases") {
  toy_engine reference({.seed = 3});
  const auto expected = plain(reference, greedy(), sampler_of(0), 40);
  fault_plan faults;
  toy_engine full({.seed = 3, .faults = &faults}), whole({.seed = 3});
  const auto on = [](toy_engine& engine) {
    return decoder_on<greedy>(engine, self(engine, made_int4(engine)), {}, test_length::always(4),
                              {.sampler = sampler_of(0), .stops = {.max_new_tokens = 40}, .longest_draft = 6});
  };
  auto decoder = on(full), at_once = on(whole);
  CHECK(decoder.verify().error().code == error_code::invalid_argument);
  CHECK(decoder.draft(1).error().code == error_code::invalid_argument);
  CHECK(decoder.forget_rows().error().code == error_code::invalid_argument);
  CHECK(decoder.most_drafts() == 0);
  REQUIRE(decoder.begin(prompt));
  REQUIRE(at_once.begin(prompt));
  for (int round = 0; !decoder.stop(); ++round) {
    CAPTURE(round);
    const auto most = decoder.most_drafts();
    CHECK(most == std::min(6U, static_cast<std::uint32_t>(expected.size() - decoder.tokens().size() - 1)));
    const std::uint64_t rows = full.rows_run();
    for (int i = 0; i < 4; ++i) REQUIRE(decoder.draft(1));
    CHECK(full.rows_run() == rows);
    CHECK(decoder.drafted() == std::min(4U, most));
    const std::size_t before = decoder.tokens().size();
    // A pass fails, later than its first layer; the drafts are verified by the next.
    faults.failing = faults.calls + 2;
    CHECK(decoder.verify().error().code == error_code::output_failed);
    CHECK(decoder.tokens().size() == before);
    CHECK(decoder.drafted() == std::min(4U, most));
    if (round == 2) REQUIRE(decoder.forget_rows());
    if (round == 3) decoder.discard();
    const auto report = decoder.verify();
    REQUIRE(report);
    CHECK(report->proposed == (round == 2 || round == 3 ? 0 : std::min(4U, most)));
    if (round < 2) {
      const auto same = at_once.round();
      REQUIRE(same);
      CHECK(std::ranges::equal(report->committed, same->committed));
      CHECK(report->accepted == same->accepted);
    }
    CHECK(decoder.drafted() == 0);
    if (!decoder.stop()) CHECK(decoder.draft(1).error().code == error_code::invalid_argument);
    REQUIRE(decoder.synchronise());
  }
  CHECK(std::ranges::equal(decoder.tokens(), expected));
  CHECK(have_same_rows(full, reference));
  // Nothing more than the policy and the drafter want, however often they are asked.
  toy_engine other({.seed = 3});
  auto few = decoder_on<greedy>(other, *ngram_drafter::make({.longest = 9, .shortest = 9}), {}, test_length::always(4),
                                {.sampler = sampler_of(0)});
  REQUIRE(few.begin(prompt));
  REQUIRE(few.draft(3));
  CHECK(few.drafted() == 0);
  toy_engine unsure({.seed = 3});
  auto shorter = on(unsure);
  shorter.length_policy().sure = 2;
  REQUIRE(shorter.begin(prompt));
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 4; ++i) REQUIRE(shorter.draft(1));
    CHECK(shorter.drafted() == 2);
    REQUIRE(shorter.verify());
    REQUIRE(shorter.synchronise());
  }
}

TEST_CASE("speculative_decoder: guarantee levels, and what they are for") {
  const auto level_of = [&](const toy_engine::options& options, std::uint32_t fixed_width) {
    toy_engine full(options);
    auto decoder = decoder_on<greedy>(full, *ngram_drafter::make({}), {}, test_length::always(5),
                                      {.sampler = sampler_of(0), .longest_draft = 8, .fixed_width = fixed_width});
    CHECK(decoder.probe().error().code == error_code::invalid_argument);
    REQUIRE(decoder.begin(prompt));
    CHECK(decoder.level() == guarantee::path);
    REQUIRE(decoder.probe());
    CHECK(full.length() == prompt.size() - 1);
    return decoder.level();
  };
  CHECK(level_of({}, 0) == guarantee::row_invariant);
  CHECK(level_of({.width_dependent = true}, 0) == guarantee::path);
  CHECK(level_of({.width_dependent = true}, 6) == guarantee::replay);
  CHECK(level_of({.pad_dependent = true}, 6) == guarantee::path);

  // At a fixed width, decoding without drafts on an engine that depends on the width has the very rows of decoding with them.
  for (std::uint32_t seed = 1; seed <= 6; ++seed) {
    const auto decode = [&](std::uint32_t length, std::uint32_t fixed_width, toy_engine& full) {
      auto decoder = decoder_on<greedy>(full, *ngram_drafter::make({}), {}, test_length::always(length),
                                        {.sampler = sampler_of(0), .stops = {.max_new_tokens = 60}, .longest_draft = 5, .fixed_width = fixed_width});
      REQUIRE(decoder.begin(prompt));
      while (!decoder.stop()) REQUIRE(decoder.round());
      return std::vector<token_id>(decoder.tokens().begin(), decoder.tokens().end());
    };
    toy_engine a({.seed = seed, .width_dependent = true}), b({.seed = seed, .width_dependent = true});
    CHECK(decode(0, 6, a) == decode(5, 6, b));
    CHECK(have_same_rows(a, b));
  }
}

TEST_CASE("speculative_decoder: a cache that is computed again ends replay at a fixed width") {
  toy_engine full({.width_dependent = true});
  auto decoder = decoder_on<greedy>(full, *ngram_drafter::make({}), {}, test_length::always(3), {.sampler = sampler_of(0), .fixed_width = 4});
  REQUIRE(decoder.begin(prompt));
  REQUIRE(decoder.probe());
  CHECK(decoder.level() == guarantee::replay);
  REQUIRE(decoder.forget_rows());
  CHECK(decoder.level() == guarantee::path);
}

TEST_CASE("speculative_decoder: a short prompt is no excuse for a probe") {
  toy_engine full({.pad_dependent = true});
  auto decoder = decoder_on<greedy>(full, *ngram_drafter::make({}), {}, test_length::always(5), {.sampler = sampler_of(0), .longest_draft = 8});
  REQUIRE(decoder.begin(std::span(prompt).first(1)));
  CHECK(!decoder.probe()->invariant());
  CHECK(decoder.level() == guarantee::path);
}

TEST_CASE("speculative_decoder: never more rows than the engine can take back") {
  toy_engine reference({.seed = 4});
  const auto expected = plain(reference, greedy(), sampler_of(0), 30);
  for (std::uint64_t failing = 0; failing < 60; ++failing) {
    CAPTURE(failing);
    fault_plan faults{.calls = 0, .failing = failing};
    toy_engine full({.seed = 4, .max_rollback = 4, .faults = &faults});
    auto decoder = decoder_on<greedy>(full, self(full, made_exact(full)), {}, test_length::always(7), {.sampler = sampler_of(0), .stops = {.max_new_tokens = 30}});
    while (!decoder.begin(prompt)) {
    }
    while (!decoder.stop()) {
      if (const auto report = decoder.round()) CHECK(report->proposed <= 3);
    }
    CHECK(std::ranges::equal(decoder.tokens(), expected));
  }
  toy_engine small({.max_rollback = 4}), none({.max_rollback = 0});
  const auto refused = [](toy_engine& engine, std::uint32_t width) {
    return decoder_of<greedy>::make(engine, *ngram_drafter::make({}), {}, test_length::always(0), {.sampler = sampler_of(0), .fixed_width = width}).error().code;
  };
  CHECK(refused(small, 5) == error_code::invalid_argument);
  CHECK(refused(none, 0) == error_code::invalid_argument);
}

TEST_CASE("speculative_decoder: a small model whose cache is full drafts no more") {
  toy_engine full({.seed = 4}), reference({.seed = 4});
  const auto expected = plain(reference, greedy(), sampler_of(0), 40);
  auto decoder = decoder_on<greedy>(full, model_drafter(engine_model(toy_engine({.capacity = 30, .seed = 4}))), {}, test_length::always(4),
                                    {.sampler = sampler_of(0), .stops = {.max_new_tokens = 40}});
  REQUIRE(decoder.begin(prompt));
  while (!decoder.stop()) REQUIRE(decoder.round());
  CHECK(std::ranges::equal(decoder.tokens(), expected));
  CHECK(decoder.length_policy().accepted > 5);
}

TEST_CASE("speculative_decoder: prefixes in the cache, ends of the cache, and calls out of order") {
  toy_engine full({.capacity = 30, .seed = 4}), reference({.seed = 4});
  const auto expected = plain(reference, greedy(), sampler_of(0), 11);
  REQUIRE(full.forward(std::span(prompt).first(12), {}));  // rows of the prompt from elsewhere
  const std::uint64_t rows_before = full.rows_run();
  auto decoder = decoder_on<greedy>(full, self(full, made_exact(full)), {}, test_length::always(4), {.sampler = sampler_of(0)});
  CHECK(decoder.round().error().code == error_code::invalid_argument);
  CHECK(decoder.synchronise().error().code == error_code::invalid_argument);
  CHECK(decoder.begin({}).error().code == error_code::invalid_argument);
  CHECK(decoder.begin(std::span(prompt).first(12)).error().code == error_code::invalid_argument);
  REQUIRE(decoder.begin(prompt));
  CHECK(full.rows_run() == rows_before + 7);
  CHECK(decoder.begin(prompt).error().code == error_code::invalid_argument);
  // 30 rows: 31 tokens can be committed, then there is no room for the row of the newest.
  while (decoder.tokens().size() < 31) REQUIRE(decoder.round());
  CHECK(std::ranges::equal(decoder.tokens(), expected));
  CHECK(decoder.round().error().code == error_code::out_of_range);
  CHECK(std::ranges::equal(decoder.tokens(), expected));
  CHECK(full.length() == 30);

  toy_engine other({});
  const auto refused = decoder_of<greedy>::make(other, *ngram_drafter::make({}), {}, test_length::always(0), {.sampler = sampler_of(0), .pad = 12});
  CHECK(refused.error().code == error_code::invalid_argument);
}

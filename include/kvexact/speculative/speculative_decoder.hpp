// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/compressed_model.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/draft_length.hpp>
#include <kvexact/speculative/drafter.hpp>
#include <kvexact/speculative/guarantee.hpp>
#include <kvexact/speculative/model_drafter.hpp>
#include <kvexact/speculative/round.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/stop_conditions.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// What a round of a `speculative_decoder` did.
struct round_report {
  std::span<const token_id> committed;  ///< the new tokens, at least one; valid until the next `verify` or `round`
  std::size_t proposed = 0;
  std::size_t accepted = 0;
  stop_event stop;
  float smallest_gap = std::numeric_limits<float>::infinity();  ///< between the two largest logits, of the rows that were read
  std::optional<error> draft_error;                             ///< of the drafter, where that ended the drafting of the round
};

/// Decodes one sequence: drafts, verifies the drafts in one pass over the full cache, and commits what decoding on the full cache alone
/// would have given. `Drafter` and `Length` decide how fast that is; which tokens come out, `Engine`, `Rule` and the sampler alone.
///
/// `round` does all of a round. Its phases can be called one by one where something is to happen between them, such as bringing a full
/// cache from where it lives: `synchronise` brings engine and drafter to the committed tokens, `draft`, any number of times, adds drafts,
/// `verify` runs them through the engine and commits. `draft` does not touch the engine's rows, `synchronise` and `verify` do. Policies are
/// asked with `length_policy().next(most_drafts())`, once a round, before the first drafts.
///
/// Verification is a transaction. On an error nothing has been committed, the drafts stay, and the engine may hold rows of the pass, which
/// the next call takes back; so it can simply be called again, or after `discard` without the drafts. Between rounds the engine has K and V
/// rows, written by verification, for all committed tokens but the last.
///
/// An error of the drafter costs drafts, nothing else: the round goes on with those that it has, perhaps none, and the next one begins by
/// mending the drafter's state.
///
/// Where the engine cannot be cut behind the accepted drafts (`checkpointing_decoder`), it goes back to before the pass and runs them
/// again.
///
/// The engine outlives the decoder and stays where it is; nobody else changes it meanwhile.
template <positional_decoder Engine, class Drafter, acceptance_rule Rule = greedy, draft_length_policy Length = fixed_draft_length,
          token_sampler Sampler = standard_sampler, token_bytes Bytes = no_token_bytes>
class speculative_decoder {
  static_assert(drafter<Drafter, Rule, Sampler>, "kvexact: speculative_decoder must be given a drafter (speculative/drafter.hpp)");

 public:
  struct options {
    Sampler sampler;
    stop_conditions<Bytes> stops = {};
    std::uint32_t longest_draft = 32;
    /// Not 0: all passes of verification have this number of rows, copies of `pad` after the drafts, so that engines whose rows depend on
    /// the width can be replayed (`guarantee::replay`). Drafts are shorter; a sequence ends so many rows before the engine's cache is full.
    std::uint32_t fixed_width = 0;
    token_id pad = 0;
  };

  /// Errors: invalid_argument (no vocabulary, a pad outside of it, an engine that cannot take back a pass by any means), out_of_memory.
  [[nodiscard]] static result<speculative_decoder> make(Engine& engine, Drafter drafts, Rule rule, Length length, options chosen) noexcept {
    if (chosen.fixed_width > 0) chosen.longest_draft = std::min(chosen.longest_draft, chosen.fixed_width - 1);
    if (engine.vocabulary() == 0 || chosen.pad >= engine.vocabulary())
      return error{error_code::invalid_argument, "the pad of a fixed width is a token of the vocabulary"};
    // Not even with checkpoints if the width is fixed: tokens that run again would have another.
    if (std::max(chosen.fixed_width, checkpointing_decoder<Engine> ? 0U : 1U) > engine.max_rollback())
      return error{error_code::invalid_argument, "the engine must be able to take back a pass, and at least one token"};
    auto block = draft_block::make(chosen.longest_draft, engine.vocabulary());
    if (!block) return block.error();
    speculative_decoder made(engine, std::move(drafts), std::move(rule), std::move(length), std::move(chosen), *std::move(block));
    try {
      const std::size_t rows = made.options_.fixed_width > 0 ? made.options_.fixed_width : std::size_t{made.options_.longest_draft} + 1;
      made.logits_.resize(rows * engine.vocabulary());
      made.input_.resize(rows);
      made.settled_.resize(std::size_t{made.options_.longest_draft} + 1);
    } catch (...) {
      return error{error_code::out_of_memory, "rows of logits"};
    }
    return made;
  }

  /// Takes the prompt, at least one token; the engine may have rows for its beginning already (a prefix cache), which are believed. Runs
  /// all of it but the last token, and gives its rows to the drafter; if that fails, the next `synchronise` does so. After an error it can
  /// be called again with the same prompt. Errors: invalid_argument (no tokens, rows for all of the prompt or more, a sequence begun
  /// before), those of the engine, out_of_memory.
  [[nodiscard]] result<void> begin(std::span<const token_id> prompt) noexcept {
    if (begun_) return error{error_code::invalid_argument, "the sequence has begun"};
    if (prompt.empty()) return error{error_code::invalid_argument, "a prompt has at least one token"};
    if (engine_->length() >= prompt.size())
      return error{error_code::invalid_argument, "the engine has rows for more than the prompt"};
    for (std::size_t i = 0; i < prompt.size(); ++i) {
      if (prompt[i] >= engine_->vocabulary())
        return error{error_code::invalid_argument, "a token of the prompt is not in the vocabulary"}.at_token(static_cast<std::int64_t>(i));
    }
    try {
      tokens_.assign(prompt.begin(), prompt.end());
      state_.emplace(request_state<Sampler>{options_.sampler, {.length = prompt.size()}});
    } catch (...) {
      return error{error_code::out_of_memory, "the tokens of a prompt"};
    }
    auto done = state_->sampler.read_prompt(prompt);
    if (done) done = synchronise_engine();
    if (!done) {
      state_.reset();
      tokens_.clear();
      return done;
    }
    begun_ = true;
    if (options_.stops.remaining(state_->progress) == 0)
      stop_.reason = options_.stops.max_new_tokens == 0 ? stop_reason::max_new_tokens : stop_reason::context_full;
    (void)synchronise_drafter();
    return {};
  }

  /// All committed tokens, the prompt included.
  [[nodiscard]] std::span<const token_id> tokens() const noexcept { return tokens_; }
  /// Why the sequence has ended, or none.
  [[nodiscard]] const stop_event& stop() const noexcept { return stop_; }
  [[nodiscard]] const Drafter& drafts() const noexcept { return drafter_; }
  [[nodiscard]] Length& length_policy() noexcept { return length_; }

  /// Probes the engine at the end of the sequence, with its tokens, for the widths that rounds have; see `probe_row_invariance` and
  /// `probe_fixed_width`. What it finds goes into `level()`. The engine needs room for twice the widest pass, and must be able to take it back.
  [[nodiscard]] result<row_probe> probe() noexcept {
    if (!begun_) return error{error_code::invalid_argument, "a probe needs the tokens of a prompt"};
    const auto synchronised = synchronise_engine();
    if (!synchronised) return synchronised.error();
    // As many tokens as the widest pass, whatever the prompt's length.
    for (std::size_t i = 0; i < input_.size(); ++i) input_[i] = tokens_[i % tokens_.size()];
    const auto longest = static_cast<std::uint32_t>(input_.size());
    const std::uint32_t widths[] = {std::min(2U, longest), std::min(3U, longest), (longest + 1) / 2, longest};
    const auto found = options_.fixed_width > 1 ? probe_fixed_width(*engine_, input_, options_.fixed_width, options_.pad)
                                                : probe_row_invariance(*engine_, input_, widths);
    invariant_ = found && found->invariant();
    return found;
  }

  /// The guarantee that holds: of the rule alone, until `probe` has found more.
  [[nodiscard]] guarantee level() const noexcept {
    if (Rule::reads_draft) return guarantee::distribution;
    if (!invariant_) return guarantee::path;
    return options_.fixed_width > 0 ? guarantee::replay : guarantee::row_invariant;
  }

  /// One round from its beginning, with as many drafts as the policy wants: at least one more token. Drafts of a round that failed are
  /// dropped. Errors: those of `verify`.
  [[nodiscard]] result<round_report> round() noexcept {
    const auto ready = expect_going();
    if (!ready) return ready.error();
    discard();
    const auto synchronised = synchronise_engine();
    if (!synchronised) return synchronised.error();
    auto drafted = synchronise_drafter();
    if (drafted) drafted = draft(length_.next(most_drafts()));
    auto report = verify();
    if (report && !drafted) report->draft_error = drafted.error();
    return report;
  }

  /// Brings engine and drafter to the committed tokens. A drafter that has them already is left as it is. Errors: invalid_argument (not
  /// begun), those of the engine and, after all is done for the engine, of the drafter.
  [[nodiscard]] result<void> synchronise() noexcept {
    if (!state_) return error{error_code::invalid_argument, "the sequence has not begun"};
    const auto done = synchronise_engine();
    if (!done) return done;
    return synchronise_drafter();
  }

  /// The most drafts that the round can have, those of `drafted` included; 0 if the drafter is not synchronised.
  [[nodiscard]] std::uint32_t most_drafts() const noexcept {
    if (!state_ || !drafter_limit_) return 0;
    const std::uint64_t length = state_->cache_length(), room = engine_->capacity() - std::min(engine_->capacity(), length);
    std::uint64_t held = std::min<std::uint64_t>({options_.longest_draft, *drafter_limit_, room == 0 ? 0 : room - 1});
    // After an error the row of the newest token is taken back, too.
    if constexpr (!checkpointing_decoder<Engine>) held = std::min(held, engine_->max_rollback() - 1);
    return static_cast<std::uint32_t>(clamp_draft_length(held, options_.stops.remaining(state_->progress), held));
  }
  /// Drafts that wait for verification.
  [[nodiscard]] std::size_t drafted() const noexcept { return block_.size(); }

  /// Adds up to `wanted` drafts, fewer where the drafter, the policy or `most_drafts` ends the drafting of the round. Errors:
  /// invalid_argument (not begun, ended, the drafter not synchronised), those of the engine's `reserve`, and those of the drafter; after
  /// the last, drafting has ended, with the drafts that there are.
  [[nodiscard]] result<void> draft(std::uint32_t wanted) noexcept {
    const auto ready = expect_going();
    if (!ready) return ready;
    if (!drafter_limit_) return drafter_limit_.error();
    const std::size_t before = block_.size(), most = std::max<std::size_t>(most_drafts(), before);
    wanted = static_cast<std::uint32_t>(std::min<std::size_t>(wanted, most - before));
    if (wanted == 0 || stopped_early_) return {};
    if constexpr (reserving_decoder<Engine>) {
      // What could not be verified need not be drafted.
      const std::size_t rows = std::max<std::size_t>(options_.fixed_width, before + wanted + 1);
      if (const auto room = engine_->reserve(state_->cache_length() + rows); !room) return room;
    }
    const Rule rule = rule_.for_round(tokens_.size());
    draft_request<Rule, Sampler> request{tokens_, {}, wanted, rule, state_->sampler};
    if constexpr (stops_early<Length>) {
      request.context = this;
      request.more = [](void* context, double top_probability) {
        auto& self = *static_cast<speculative_decoder*>(context);
        self.stopped_early_ = self.length_.stop_early(top_probability);
        return !self.stopped_early_;
      };
    }
    auto done = drafter_.propose(request, block_);
    if (block_.size() > before + wanted || !can_be_verified(block_.view())) {
      // They could not be verified, however often that is tried.
      block_.clear();
      done = error{error_code::invalid_argument, "a drafter gave too many tokens, or one that is not in the vocabulary or in its law"};
    }
    if (!done) drafter_limit_ = done.error();
    return done;
  }
  /// Drops the drafts.
  void discard() noexcept {
    block_.clear();
    stopped_early_ = false;
  }

  /// Verifies the drafts, if there are none as plain decoding does, and commits: at least one more token. The drafter is not synchronised
  /// then. Errors: invalid_argument (not begun, ended), out_of_range (the engine's cache is full), those of engine, sampler and rule (the
  /// token is the position), out_of_memory.
  [[nodiscard]] result<round_report> verify() noexcept {
    const auto ready = expect_going();
    if (!ready) return ready.error();
    const auto synchronised = synchronise_engine();
    if (!synchronised) return synchronised.error();
    const draft_view drafts = block_.view();
    try {
      const std::size_t needed = tokens_.size() + drafts.tokens.size() + 1;
      if (needed > tokens_.capacity()) tokens_.reserve(std::max(needed, 2 * tokens_.capacity()));
    } catch (...) {
      return error{error_code::out_of_memory, "the tokens of a sequence"};
    }
    const auto run = run_engine(drafts);
    if (!run) return run.error();
    auto settled = settle_round(*state_, drafts, logit_rows{std::span(logits_).first((drafts.tokens.size() + 1) * engine_->vocabulary()), engine_->vocabulary()},
                                rule_, options_.stops, settled_);
    if (!settled) return settled.error();

    // From here on nothing fails that matters: what the engine does not take back now, the next call takes back.
    *state_ = std::move(settled->after);
    stop_ = settled->stop;
    tokens_.insert(tokens_.end(), settled_.begin(), settled_.begin() + static_cast<std::ptrdiff_t>(settled->committed));
    length_.observe({static_cast<std::uint32_t>(settled->proposed), static_cast<std::uint32_t>(settled->accepted), !settled->rejected});
    discard();
    drafter_limit_ = not_synchronised;
    (void)synchronise_engine();
    return round_report{std::span<const token_id>(tokens_).last(settled->committed), settled->proposed, settled->accepted, settled->stop,
                        settled->smallest_gap, std::nullopt};
  }

  /// Drops the drafts and all of the engine's rows, which the next `synchronise` or `verify` computes again from the committed tokens, in
  /// one pass: the same bits where rows do not depend on the width, so `guarantee::replay` ends here. The engine is truncated to 0 even
  /// if it has no rows. Errors: invalid_argument (not begun), those of the engine, which must be able to take back so many.
  [[nodiscard]] result<void> forget_rows() noexcept {
    if (!state_) return error{error_code::invalid_argument, "the sequence has not begun"};
    discard();
    if (options_.fixed_width > 0) invariant_ = false;
    return engine_->truncate(0);
  }

 private:
  speculative_decoder(Engine& engine, Drafter drafts, Rule rule, Length length, options chosen, draft_block block) noexcept
      : engine_(&engine), drafter_(std::move(drafts)), rule_(std::move(rule)), length_(std::move(length)), options_(std::move(chosen)),
        block_(std::move(block)) {}

  static constexpr error not_synchronised{error_code::invalid_argument, "the drafter does not have the newest tokens yet: synchronise"};

  [[nodiscard]] result<void> expect_going() const noexcept {
    if (!begun_) return error{error_code::invalid_argument, "the sequence has not begun"};
    if (stop_) return error{error_code::invalid_argument, "the sequence has ended"};
    return {};
  }
  [[nodiscard]] bool can_be_verified(const draft_view& drafts) const noexcept {
    for (std::size_t i = 0; i < drafts.tokens.size(); ++i) {
      if (drafts.tokens[i] >= engine_->vocabulary()) return false;
      if (Rule::reads_draft && drafts.distributions[i].mass(drafts.tokens[i]) == 0) return false;
    }
    return true;
  }
  [[nodiscard]] result<void> synchronise_engine() noexcept {
    const std::uint64_t goal = state_->cache_length();
    if (engine_->length() > goal) {
      if (const auto done = take_back(goal); !done) return done;
    }
    if (engine_->length() == goal) return {};
    const auto from = static_cast<std::size_t>(engine_->length());
    return engine_->forward(std::span<const token_id>(tokens_).subspan(from, static_cast<std::size_t>(goal) - from), {});
  }
  /// To `length`, or to before the last pass where the engine cannot be cut there.
  [[nodiscard]] result<void> take_back(std::uint64_t length) noexcept {
    if constexpr (checkpointing_decoder<Engine>) {
      if (engine_->length() - length > engine_->max_rollback()) return engine_->restore();
    }
    return engine_->truncate(length);
  }
  [[nodiscard]] result<void> synchronise_drafter() noexcept {
    if (drafter_limit_) return {};
    const auto done = drafter_.synchronise(tokens_);
    drafter_limit_ = done ? result<std::uint64_t>(drafter_.max_draft()) : done.error();
    return done;
  }

  /// Runs the newest committed token and the drafts.
  [[nodiscard]] result<void> run_engine(const draft_view& drafts) noexcept {
    const std::size_t rows = options_.fixed_width > 0 ? options_.fixed_width : drafts.tokens.size() + 1;
    std::fill(input_.begin(), input_.end(), options_.pad);
    input_[0] = tokens_.back();
    std::copy(drafts.tokens.begin(), drafts.tokens.end(), input_.begin() + 1);
    if constexpr (checkpointing_decoder<Engine>) {
      if (rows > engine_->max_rollback()) {
        if (const auto done = engine_->checkpoint(); !done) return done;
      }
    }
    return engine_->forward(std::span<const token_id>(input_).first(rows), std::span(logits_).first(rows * engine_->vocabulary()));
  }

  Engine* engine_;
  Drafter drafter_;
  Rule rule_;
  Length length_;
  options options_;
  draft_block block_;
  std::vector<float> logits_;       // [rows, vocabulary]
  std::vector<token_id> input_;     // [rows]
  std::vector<token_id> settled_;   // [longest draft + 1]
  std::vector<token_id> tokens_;
  std::optional<request_state<Sampler>> state_;
  stop_event stop_;
  result<std::uint64_t> drafter_limit_ = not_synchronised;  // drafts of a round; why it cannot draft
  bool stopped_early_ = false;                              // the policy has ended the drafting of this round
  bool begun_ = false;
  bool invariant_ = false;
};

/// The model drafts for itself on a compressed cache, verifies on the full one: `Cache` is a `draft_cache`.
template <class Engine, class Cache, acceptance_rule Rule = greedy, draft_length_policy Length = fixed_draft_length>
using self_speculative_decoder = speculative_decoder<Engine, model_drafter<compressed_model<Engine, Cache>>, Rule, Length>;

}  // namespace kvexact

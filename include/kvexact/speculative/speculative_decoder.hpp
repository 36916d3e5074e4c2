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

/// What a call of `speculative_decoder::round` did.
struct round_report {
  std::span<const token_id> committed;  ///< the new tokens, at least one; valid until the next call
  std::size_t proposed = 0;
  std::size_t accepted = 0;
  stop_event stop;
  float smallest_gap = std::numeric_limits<float>::infinity();  ///< between the two largest logits, of the rows that were read
};

/// Decodes one sequence: drafts, verifies the drafts in one pass over the full cache, and commits what decoding on the full cache alone would
/// have given. `Drafter` and `Length` decide how fast that is; which tokens come out, `Engine`, `Rule` and the sampler alone.
///
/// A round is a transaction. On an error nothing has been committed, and the next call begins by bringing the caches back to the committed
/// tokens, so it can simply be called again. Between rounds the engine has K and V rows, written by verification, for all committed tokens
/// but the last.
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

  /// Errors: invalid_argument (no vocabulary, a pad outside of it, an engine that cannot take back a pass), out_of_memory.
  [[nodiscard]] static result<speculative_decoder> make(Engine& engine, Drafter drafts, Rule rule, Length length, options chosen) noexcept {
    if (chosen.fixed_width > 0) chosen.longest_draft = std::min(chosen.longest_draft, chosen.fixed_width - 1);
    if (engine.vocabulary() == 0 || chosen.pad >= engine.vocabulary())
      return error{error_code::invalid_argument, "the pad of a fixed width is a token of the vocabulary"};
    if (std::max(chosen.fixed_width, 1U) > engine.max_rollback())
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

  /// Takes the prompt, at least one token; the engine may have rows for its beginning already (a prefix cache), which are believed. Runs all of
  /// it but the last token. After an error it can be called again with the same prompt. Errors: invalid_argument (no tokens, rows for all of the
  /// prompt or more, a sequence begun before), those of engine and drafter, out_of_memory.
  [[nodiscard]] result<void> begin(std::span<const token_id> prompt) noexcept {
    if (begun_) return error{error_code::invalid_argument, "the sequence has begun"};
    if (prompt.empty()) return error{error_code::invalid_argument, "a prompt has at least one token"};
    if (engine_->length() >= prompt.size())
      return error{error_code::invalid_argument, "the engine has rows for more than the prompt"};
    try {
      tokens_.assign(prompt.begin(), prompt.end());
      state_.emplace(request_state<Sampler>{options_.sampler, {.length = prompt.size()}});
    } catch (...) {
      return error{error_code::out_of_memory, "the tokens of a prompt"};
    }
    const auto read = state_->sampler.read_prompt(prompt);
    if (!read) return read;
    const auto done = synchronise();
    begun_ = static_cast<bool>(done);
    return done;
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
    const auto synchronised = synchronise();
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

  /// One round: at least one more token. Errors: invalid_argument (not begun, ended), out_of_range (the engine's cache is full), those of
  /// engine, drafter, sampler and rule (the token is the position), out_of_memory; then nothing has been committed.
  [[nodiscard]] result<round_report> round() noexcept {
    if (!begun_) return error{error_code::invalid_argument, "the sequence has not begun"};
    if (stop_) return error{error_code::invalid_argument, "the sequence has ended"};
    const auto synchronised = synchronise();
    if (!synchronised) return synchronised.error();
    const auto drafted = draft();
    if (!drafted) return drafted.error();
    const draft_view drafts = block_.view();
    try {
      const std::size_t needed = tokens_.size() + drafts.tokens.size() + 1;
      if (needed > tokens_.capacity()) tokens_.reserve(std::max(needed, 2 * tokens_.capacity()));
    } catch (...) {
      return error{error_code::out_of_memory, "the tokens of a sequence"};
    }
    const auto verified = verify(drafts);
    if (!verified) return verified.error();
    auto settled = settle_round(*state_, drafts, logit_rows{std::span(logits_).first((drafts.tokens.size() + 1) * engine_->vocabulary()), engine_->vocabulary()},
                                rule_, options_.stops, settled_);
    if (!settled) return settled.error();

    // From here on nothing fails that matters: what the engine does not take back now, the next call takes back.
    *state_ = std::move(settled->after);
    stop_ = settled->stop;
    tokens_.insert(tokens_.end(), settled_.begin(), settled_.begin() + static_cast<std::ptrdiff_t>(settled->committed));
    length_.observe({static_cast<std::uint32_t>(settled->proposed), static_cast<std::uint32_t>(settled->accepted), !settled->rejected});
    (void)engine_->truncate(state_->cache_length());
    return round_report{std::span<const token_id>(tokens_).last(settled->committed), settled->proposed, settled->accepted, settled->stop,
                        settled->smallest_gap};
  }

  /// Brings engine and drafter to the committed tokens, as each round does at its beginning; of use after an error, or to leave the drafter's
  /// cache complete at the end.
  [[nodiscard]] result<void> synchronise() noexcept {
    if (!state_) return error{error_code::invalid_argument, "the sequence has not begun"};
    const std::uint64_t goal = state_->cache_length();
    if (engine_->length() > goal) {
      const auto done = engine_->truncate(goal);
      if (!done) return done;
    }
    if (engine_->length() < goal) {
      const auto from = static_cast<std::size_t>(engine_->length());
      const auto done = engine_->forward(std::span<const token_id>(tokens_).subspan(from, static_cast<std::size_t>(goal) - from), {});
      if (!done) return done;
    }
    return drafter_.synchronise(tokens_);
  }

 private:
  speculative_decoder(Engine& engine, Drafter drafts, Rule rule, Length length, options chosen, draft_block block) noexcept
      : engine_(&engine), drafter_(std::move(drafts)), rule_(std::move(rule)), length_(std::move(length)), options_(std::move(chosen)),
        block_(std::move(block)) {}

  [[nodiscard]] std::uint64_t room() const noexcept { return engine_->capacity() - std::min(engine_->capacity(), state_->cache_length()); }

  [[nodiscard]] result<void> draft() noexcept {
    // After an error the row of the newest token is taken back, too.
    const std::uint64_t held = std::min<std::uint64_t>({options_.longest_draft, drafter_.max_draft(), engine_->max_rollback() - 1, room() == 0 ? 0 : room() - 1});
    const std::uint64_t most = clamp_draft_length(held, options_.stops.remaining(state_->progress), held);
    const std::uint32_t wanted = std::min(length_.next(static_cast<std::uint32_t>(most)), static_cast<std::uint32_t>(most));
    block_.clear();
    if (wanted == 0) return {};
    const Rule rule = rule_.for_round(tokens_.size());
    draft_request<Rule, Sampler> request{tokens_, {}, wanted, rule, state_->sampler};
    if constexpr (stops_early<Length>) {
      request.context = &length_;
      request.more = [](void* policy, double top_probability) { return !static_cast<Length*>(policy)->stop_early(top_probability); };
    }
    return drafter_.propose(request, block_);
  }

  /// Runs the newest committed token and the drafts.
  [[nodiscard]] result<void> verify(const draft_view& drafts) noexcept {
    const std::size_t rows = options_.fixed_width > 0 ? options_.fixed_width : drafts.tokens.size() + 1;
    std::fill(input_.begin(), input_.end(), options_.pad);
    input_[0] = tokens_.back();
    std::copy(drafts.tokens.begin(), drafts.tokens.end(), input_.begin() + 1);
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
  bool begun_ = false;
  bool invariant_ = false;
};

/// The model drafts for itself on a compressed cache, verifies on the full one: `Cache` is a `draft_cache`.
template <class Engine, class Cache, acceptance_rule Rule = greedy, draft_length_policy Length = fixed_draft_length>
using self_speculative_decoder = speculative_decoder<Engine, model_drafter<compressed_model<Engine, Cache>>, Rule, Length>;

}  // namespace kvexact

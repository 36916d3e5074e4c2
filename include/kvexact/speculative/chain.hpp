// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/drafter.hpp>
#include <kvexact/speculative/probabilities.hpp>
#include <kvexact/speculative/round.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// A level between the smallest drafter and the full cache: a `drafter` that has the drafts of `Below` verified by its own model, and
/// proposes the outcome. That has the law of its own model, so this law is what it passes on, never that of the drafts below. Levels nest:
/// `chain_level<chain_level<model_drafter<A>, B>, C>`.
template <class Below, logit_model Model>
class chain_level {
 public:
  /// `draft_length`: most tokens that are asked for at a time from below; with 0 the model drafts by itself. Errors: out_of_memory.
  [[nodiscard]] static result<chain_level> make(Below below, Model model, std::size_t draft_length) noexcept {
    auto drafts = draft_block::make(draft_length, model.vocabulary());
    if (!drafts) return drafts.error();
    chain_level made(std::move(below), std::move(model), std::move(*drafts));
    try {
      made.rows_.resize((draft_length + 1) * made.model_.vocabulary());
    } catch (...) {
      return error{error_code::out_of_memory, "rows of logits"};
    }
    return made;
  }

  [[nodiscard]] const Below& below() const noexcept { return below_; }
  [[nodiscard]] const Model& model() const noexcept { return model_; }
  [[nodiscard]] std::uint64_t max_draft() const noexcept { return std::min(below_.max_draft(), model_.max_draft()); }
  [[nodiscard]] result<void> synchronise(std::span<const token_id> committed) noexcept {
    if (auto done = model_.synchronise(committed); !done) return done;
    return below_.synchronise(committed);
  }

  /// Makes rounds of its own until there are as many tokens as wanted. For a single one it asks below for nothing. Errors: those below, of
  /// the model, and of `settle_round`.
  template <acceptance_rule Rule, token_sampler Sampler>
  [[nodiscard]] result<void> propose(const draft_request<Rule, Sampler>& request, draft_block& block) noexcept {
    static_assert(drafter<Below, Rule, Sampler>, "kvexact: chain_level must be given a drafter (speculative/drafter.hpp)");
    try {
      const std::span<const token_id> held = block.view().tokens;
      pending_.assign(request.pending.begin(), request.pending.end());
      pending_.insert(pending_.end(), held.begin(), held.end());
      Sampler ahead = request.sampler;
      for (const token_id token : held) {
        if (auto read = ahead.commit(token); !read) return read;
      }
      const std::size_t goal = held.size() + request.wanted;
      for (bool going = request.wanted > 0; going;) {
        const std::size_t before = pending_.size();
        const std::size_t length = request.committed.size() + before;
        const Rule rule = request.rule.for_round(length);
        // A round gives one token more than it accepts.
        const std::size_t wanted = std::min(drafts_.capacity(), goal - block.size() - 1);
        drafts_.clear();
        if (wanted > 0) {
          const draft_request<Rule, Sampler> below{request.committed, pending_, wanted, rule, ahead};
          if (auto proposed = below_.propose(below, drafts_); !proposed) return proposed;
        }
        const draft_view drafts = drafts_.view();
        pending_.reserve(before + drafts.tokens.size() + 1);
        pending_.insert(pending_.end(), drafts.tokens.begin(), drafts.tokens.end());
        const std::size_t vocabulary = model_.vocabulary();
        level_rows rows{{std::span(rows_).first((drafts.tokens.size() + 1) * vocabulary), vocabulary}, request.more != nullptr};
        if (auto run = model_.logits(request.committed, pending_, rows.logits); !run) return run;

        pending_.resize(before);
        const auto emit = [&](token_id token, const distribution& law) -> result<bool> {
          if (auto pushed = block.push(token, law); !pushed) return pushed.error();
          pending_.push_back(token);
          going = (request.more == nullptr || request.more(request.context, rows.top_probability)) && block.size() < goal;
          return going;
        };
        const auto judged = detail::judge(length, drafts, rows, rule, ahead, emit);
        if (!judged) return judged.error();
      }
      return {};
    } catch (...) {
      return error{error_code::out_of_memory, "draft tokens"};
    }
  }

 private:
  /// Notes the largest probability of the row that was read last, before the sampler changes it.
  struct level_rows : logit_rows {
    bool noting = false;
    double top_probability = 1;

    [[nodiscard]] result<next_token> next(std::size_t row, const token_sampler auto& sampler) noexcept {
      if (noting) top_probability = detail::top_probability(logits.subspan(row * vocabulary, vocabulary));
      return logit_rows::next(row, sampler);
    }
  };

  chain_level(Below below, Model model, draft_block drafts) noexcept
      : below_(std::move(below)), model_(std::move(model)), drafts_(std::move(drafts)) {}

  Below below_;
  Model model_;
  draft_block drafts_;
  std::vector<token_id> pending_;
  std::vector<float> rows_;
};

}  // namespace kvexact

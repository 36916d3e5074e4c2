// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/probabilities.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/stop_conditions.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// All that a request carries from round to round, besides its tokens and its caches.
template <token_sampler Sampler>
struct request_state {
  Sampler sampler;      ///< has read the prompt
  stop_state progress;  ///< starts with the length of the prompt

  /// Rows in the caches between rounds: one less than tokens, since the newest token has not been run yet. Verification runs it and the
  /// drafts; all rows from here on are taken back.
  [[nodiscard]] std::uint64_t cache_length() const noexcept { return progress.length == 0 ? 0 : progress.length - 1; }
};

/// The longest draft, up to `wanted`, of which no token is in vain: verification gives one token more than it accepts, `remaining` are
/// wanted in all (`stop_conditions::remaining`), and a rejected draft is a row to be taken back.
[[nodiscard]] constexpr std::uint64_t clamp_draft_length(std::uint64_t wanted, std::uint64_t remaining,
                                                         std::uint64_t max_rollback) noexcept {
  return std::min({wanted, remaining == 0 ? 0 : remaining - 1, max_rollback});
}

/// What verification says: row i is the next token after the newest committed one and i drafts, for i = 0 up to and including the number of
/// drafts. A row is asked for once, in order, with a sampler that has read all tokens before it. Rows may be more than needed.
template <class V, class Sampler>
concept verified_rows = requires(V& rows, const V& seen, std::size_t row, const Sampler& sampler) {
  { seen.size() } noexcept -> std::same_as<std::size_t>;
  { rows.next(row, sampler) } noexcept -> std::same_as<result<next_token>>;
};

/// Logits [rows, vocabulary], which are used up.
struct logit_rows {
  std::span<float> logits;
  std::size_t vocabulary = 0;

  [[nodiscard]] std::size_t size() const noexcept { return vocabulary == 0 ? 0 : logits.size() / vocabulary; }
  [[nodiscard]] result<next_token> next(std::size_t row, const token_sampler auto& sampler) noexcept {
    return sampler.next(logits.subspan(row * vocabulary, vocabulary));
  }
};

/// For greedy decoding where the engine gives the most probable tokens only; the sampler is not asked. `gaps` [rows] may be empty.
struct argmax_rows {
  std::span<const token_id> tokens;
  std::span<const float> gaps;

  [[nodiscard]] std::size_t size() const noexcept { return tokens.size(); }
  [[nodiscard]] result<next_token> next(std::size_t row, const token_sampler auto&) noexcept {
    return next_token{distribution::point(tokens[row]), gaps.empty() ? std::numeric_limits<float>::infinity() : gaps[row]};
  }
};

/// How far the drafts of a round went.
struct judgement {
  std::size_t accepted = 0;  ///< drafts that are now tokens of the sequence
  bool rejected = false;     ///< whether a draft was; if not, acceptance is known only to have lasted for `accepted` drafts
  float smallest_gap = std::numeric_limits<float>::infinity();  ///< of the rows that were read (`next_token::gap`)
};

/// What a round did. `committed` counts the tokens it added: the accepted drafts and the verifier's own token (recovered or bonus); not the
/// latter where an accepted draft ended the request, or where the row after it was no distribution.
template <token_sampler Sampler>
struct settled_round : judgement {
  std::size_t proposed = 0;
  std::size_t committed = 0;
  stop_event stop;
  request_state<Sampler> after;
};

namespace detail {

/// Goes through a block, up to and including the verifier's own token. `rule` is that of the round, `commit(token, target)` takes each
/// token and says whether to go on; `sampler` reads them. `length`: tokens before the block.
template <acceptance_rule Rule, token_sampler Sampler, verified_rows<Sampler> Rows, class Commit>
[[nodiscard]] result<judgement> judge(std::uint64_t length, const draft_view& drafts, Rows& rows, const Rule& rule, Sampler& sampler,
                                      Commit commit) noexcept {
  if (rows.size() <= drafts.tokens.size()) return error{error_code::invalid_argument, "verification gave fewer rows than drafts and one"};
  if (Rule::reads_draft && drafts.distributions.size() != drafts.tokens.size())
    return error{error_code::invalid_argument, "the rule reads the distributions of the drafts, one for each"};
  judgement outcome;
  for (std::size_t row = 0;; ++row) {
    const std::uint64_t position = length + row;
    const auto failed_here = [position](const error& failure) { return failure.at_token(static_cast<std::int64_t>(position)); };
    const auto next = rows.next(row, sampler);
    if (!next) {
      // Plain decoding would have had the tokens before, and failed here, as the next round will.
      if (row > 0) return outcome;
      return failed_here(next.error());
    }
    outcome.smallest_gap = std::min(outcome.smallest_gap, next->gap);

    token_id token = 0;
    const bool own = row == drafts.tokens.size();
    if (own) {
      token = rule.draw(position, next->target);
    } else {
      token = drafts.tokens[row];
      const distribution draft = Rule::reads_draft ? drafts.distributions[row] : distribution::point(token);
      if (!(draft.mass(token) > 0)) return failed_here({error_code::invalid_argument, "a draft token that its distribution cannot give"});
      if (rule.accepts(position, token, next->target, draft)) {
        ++outcome.accepted;
      } else {
        outcome.rejected = true;
        token = rule.replace(position, next->target, draft);
      }
    }
    if (const auto read = sampler.commit(token); !read) return failed_here(read.error());
    const result<bool> go_on = commit(token, next->target);
    if (!go_on) return failed_here(go_on.error());
    if (own || outcome.rejected || !*go_on) return outcome;
  }
}

}  // namespace detail

/// Settles a round: judges the drafts by the verified rows, and says what is committed. At least one token is, in `tokens`, which must have
/// room for one more than there are drafts. Without drafts this is plain decoding. Nothing but `tokens` and `rows` is changed: the
/// round is published by taking `after`, and after an error it can be done again from `before`.
///
/// Errors: invalid_argument if the request has no token yet or has ended, if there are too few rows or too little room, if the first row is
/// not a distribution, or if a draft's distribution is missing or cannot give the draft; out_of_memory. Those of a row name its position.
template <acceptance_rule Rule, token_sampler Sampler, verified_rows<Sampler> Rows, token_bytes Bytes>
[[nodiscard]] result<settled_round<Sampler>> settle_round(const request_state<Sampler>& before, const draft_view& drafts, Rows rows,
                                                          const Rule& rule, const stop_conditions<Bytes>& stops,
                                                          std::span<token_id> tokens) noexcept {
  if (before.progress.length == 0) return error{error_code::invalid_argument, "a request has at least one token"};
  if (stops.remaining(before.progress) == 0) return error{error_code::invalid_argument, "the request has ended"};
  if (tokens.size() <= drafts.tokens.size()) return error{error_code::invalid_argument, "no room for the drafts and one token"};
  std::optional<settled_round<Sampler>> settled;
  try {
    settled.emplace(settled_round<Sampler>{{}, drafts.tokens.size(), 0, {}, before});
  } catch (...) {
    return error{error_code::out_of_memory, "the state of a request"};
  }
  const auto commit = [&](token_id token, const distribution&) -> result<bool> {
    tokens[settled->committed++] = token;
    settled->stop = stops.feed(settled->after.progress, token);
    return !settled->stop;
  };
  const std::uint64_t length = before.progress.length;
  const auto judged = detail::judge(length, drafts, rows, rule.for_round(length), settled->after.sampler, commit);
  if (!judged) return judged.error();
  static_cast<judgement&>(*settled) = *judged;
  return std::move(*settled);
}

}  // namespace kvexact

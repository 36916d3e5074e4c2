// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/logit_processors.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// What a verifier asks a drafter for: up to `wanted` tokens after `committed`, `pending` and the drafts that the block holds already,
/// where pending tokens are what the verifier has itself proposed to one above. `rule` is that of the asking round; `sampler` has read the
/// committed and pending tokens and is copied to read drafts.
template <acceptance_rule Rule, token_sampler Sampler>
struct draft_request {
  std::span<const token_id> committed;
  std::span<const token_id> pending;
  std::size_t wanted = 0;
  const Rule& rule;
  const Sampler& sampler;
  /// Asked after each token, with the largest probability of the row of logits that it comes from; false ends the proposal. May be null.
  bool (*more)(void* context, double top_probability) = nullptr;
  void* context = nullptr;

  [[nodiscard]] std::size_t length() const noexcept { return committed.size() + pending.size(); }
};

/// Proposes tokens for one sequence.
///
/// - `max_draft()`: the most tokens that it can propose, and take back.
/// - `synchronise(committed)`: makes its own state that of the committed tokens, whatever has happened since: rejected drafts, a call that
///   failed. Called before each round, while the rows of the full cache can be read.
/// - `propose(request, block)`: adds at most `wanted` tokens behind those that the block holds, which are its own of this round, each with
///   the distribution that it was really drawn from; the block has room for them. Fewer, or none, is ordinary; when to end may depend on
///   the tokens proposed so far, never on what would come next. The full cache may be elsewhere meanwhile.
///
/// An error leaves a state that `synchronise` can mend; tokens that were added before it are drafts like others. It cannot change which
/// tokens are committed.
template <class D, class Rule, class Sampler>
concept drafter = std::movable<D> && requires(D& drafts, const D& seen, std::span<const token_id> committed,
                                              const draft_request<Rule, Sampler>& request, draft_block& block) {
  { seen.max_draft() } noexcept -> std::same_as<std::uint64_t>;
  { drafts.synchronise(committed) } noexcept -> std::same_as<result<void>>;
  { drafts.propose(request, block) } noexcept -> std::same_as<result<void>>;
};

/// A model that drafts, or verifies the drafts of a smaller one. `max_draft` and `synchronise` are those of a drafter.
///
/// - `logits(committed, pending, rows)`: `rows` [n, vocabulary] get the logits after the last n prefixes of committed + pending, of which
///   the longest is the whole and the shortest `committed` or longer. `committed` is that of the last `synchronise`; `pending` differs from
///   call to call, and the model finds itself how much of it its cache still holds.
template <class M>
concept logit_model = std::movable<M> && requires(M& model, const M& seen, std::span<const token_id> tokens, std::span<float> rows) {
  { seen.vocabulary() } noexcept -> std::same_as<std::size_t>;
  { seen.max_draft() } noexcept -> std::same_as<std::uint64_t>;
  { model.synchronise(tokens) } noexcept -> std::same_as<result<void>>;
  { model.logits(tokens, tokens, rows) } noexcept -> std::same_as<result<void>>;
};

namespace detail {

/// The probability of the most probable token, of logits [vocabulary] with at least one that is finite.
[[nodiscard]] inline double top_probability(std::span<const float> logits) noexcept {
  const float largest = largest_of(logits);
  double sum = 0;
  for (const float logit : logits) sum += static_cast<double>(std::exp(logit - largest));
  return 1 / sum;
}

}  // namespace detail

}  // namespace kvexact

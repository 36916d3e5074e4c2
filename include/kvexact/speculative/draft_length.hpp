// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include <kvexact/speculative/cost_model.hpp>

namespace kvexact {

/// How a round ended. `censored`: the verifier did not reject the draft after the accepted ones, it was cut off (a stop condition, a
/// budget, a fault), so that nothing is known of it. Rounds whose drafts were all accepted need no mark.
struct draft_outcome {
  std::uint32_t proposed = 0;
  std::uint32_t accepted = 0;
  bool censored = false;
};

/// How many tokens to draft for one request. Any answer gives the same tokens; only the speed differs.
///
/// - `next(most)`: drafts of the next round, at most `most` (what budget, context and rollback leave); 0 is a step of plain decoding.
/// - `observe(outcome)`: what became of it. Every `next` is followed by one `observe` or, if the round failed, by the next `next`.
///
///   adaptive_draft_length policy(cost);
///   const std::uint32_t length = policy.next(most);
///   ... draft, verify ...
///   policy.observe({length, accepted, stopped});
template <class P>
concept draft_length_policy = std::copyable<P> && requires(P& policy, std::uint32_t most, const draft_outcome& outcome) {
  { policy.next(most) }
  noexcept->std::same_as<std::uint32_t>;
  { policy.observe(outcome) }
  noexcept->std::same_as<void>;
};

/// A policy that may end a round's drafting early. `stop_early(top_probability)` is called after each draft with the largest probability
/// by the logits of the model that drafts, before any processor; true: draft no more in this round.
template <class P>
concept stops_early = draft_length_policy<P> && requires(P& policy, double top_probability) {
  { policy.stop_early(top_probability) }
  noexcept->std::same_as<bool>;
};

/// Always the same length.
class fixed_draft_length {
 public:
  explicit fixed_draft_length(std::uint32_t length) noexcept : length_(length) {}
  [[nodiscard]] std::uint32_t next(std::uint32_t most) noexcept { return std::min(length_, most); }
  void observe(const draft_outcome&) noexcept {}

 private:
  std::uint32_t length_;
};

/// Any policy, whose rounds end early where the drafter has become unsure: once the product of the top probabilities of a round's drafts,
/// a guess of the chance that the verifier takes them all, is below `least`.
template <draft_length_policy Policy>
class early_stopping {
 public:
  early_stopping(Policy policy, double least) noexcept : policy_(std::move(policy)), least_(least) {}
  [[nodiscard]] std::uint32_t next(std::uint32_t most) noexcept {
    chance_ = 1;
    return policy_.next(most);
  }
  void observe(const draft_outcome& outcome) noexcept { policy_.observe(outcome); }
  [[nodiscard]] bool stop_early(double top_probability) noexcept { return (chance_ *= top_probability) < least_; }

 private:
  Policy policy_;
  double least_;
  double chance_ = 1;
};

/// What `adaptive_draft_length` starts from, and how far it trusts it. A step is a step of plain decoding.
struct adaptive_options {
  std::uint32_t longest = 128;
  double acceptance = 0.8;   ///< of a draft, before anything was seen
  double confidence = 4;     ///< in that, as a number of drafts
  double memory = 1024;      ///< drafts after which a decision of the verifier counts 1/e
  double hysteresis = 0.02;  ///< by how much faster another length must be
  double tolerance = 0.02;   ///< steps that may be lost for each committed token
  double allowance = 4;      ///< steps that may be lost beside, from the start
  double reserve = 128;      ///< steps gained that count for later losses, at most
};

/// Drafts as many tokens as commit the most a second, by a `round_cost` and by what it has seen accepted.
///
/// Acceptance is estimated by position in the block, in groups that widen with the distance (1, 2, 3, 4-5, 6-7, 8-11, ...); a group seen
/// little follows the mean of all. A decision of the verifier is a success or a failure; drafts after the first failure and those cut off
/// tell nothing. Old decisions fade, and are dropped where the newest contradict them.
///
/// Where no length pays, it decodes plainly and probes now and then: with the longest block that costs about as little as any, and twice as
/// many drafts as long as all are accepted. Steps lost against plain decoding, by the cost it was given, are booked on a balance that
/// `tolerance` fills; a length is taken only if it covers the loss to be expected from a cautious estimate. So N tokens lose at most about
/// tolerance N + allowance + reserve / 4 and one round.
template <round_cost Cost>
class adaptive_draft_length {
 public:
  explicit adaptive_draft_length(const Cost& cost, const adaptive_options& options = {}) noexcept
      : cost_(cost), options_(options), balance_(options.allowance), probe_balance_(options.allowance) {}

  /// What rounds cost from now on: when the batch or the load of the machine has changed.
  void set_cost(const Cost& cost) noexcept { cost_ = cost; }

  [[nodiscard]] std::uint32_t next(std::uint32_t most) noexcept {
    const double plain = cost_.round_seconds(0);
    const double cheap = cost_.round_seconds(1) * 1.05;
    const std::uint32_t longest = std::min(most, options_.longest);
    const double covered = balance_ < -options_.reserve / 4 ? -std::numeric_limits<double>::infinity() : std::max(balance_, 0.0);
    const double mean = pooled(0);
    const double low = pooled(doubt);
    chain expected;
    chain cautious;
    rated_length best{0, 1 / plain};
    double kept = current_ == 0 ? best.rate : 0;
    std::uint32_t probe = 0;
    bool can_pay = false;
    for (std::uint32_t length = 0; length++ < longest;) {
      const counts& seen = groups_[group(length)];
      expected.extend(seen.mean(mean));
      cautious.extend(seen.mean(low));
      const double seconds = cost_.round_seconds(length);
      const double loss = seconds / plain - cautious.tokens;
      can_pay = can_pay || seconds < (length + 1.0) * plain;
      if (loss > covered) continue;
      const double rate = expected.tokens / seconds;
      if (rate > best.rate) best = {length, rate};
      if (length == current_) kept = rate;
      if ((length <= probe_ || seconds <= cheap) && loss <= probe_balance_) probe = length;
    }
    if (kept * (1 + options_.hysteresis) < best.rate) current_ = best.length;
    current_ = std::min(current_, longest);
    probing_ = current_ == 0 && probe > 0 && can_pay;
    return probing_ ? probe : current_;
  }

  void observe(const draft_outcome& outcome) noexcept {
    const bool failed = outcome.accepted < outcome.proposed && !outcome.censored;
    const std::uint32_t decisions = outcome.accepted + (failed ? 1 : 0);
    const double tokens = outcome.accepted + 1.0;
    const double lost = cost_.round_seconds(outcome.proposed) / cost_.round_seconds(0) - tokens;
    balance_ = std::min(options_.reserve, balance_ + options_.tolerance * tokens - lost);
    probe_balance_ = std::min(options_.reserve / 4, probe_balance_ + options_.tolerance * tokens - (probing_ ? lost : 0));
    if (probing_) probe_ = failed ? 1 : 2 * std::min(outcome.proposed, options_.longest);
    if (decisions == 0) return;
    const double fade = std::exp(decisions / -options_.memory);
    for (counts& each : groups_) each.fade(fade);
    all_.fade(fade);
    newest_.fade(std::exp(decisions / -recent));
    for (std::uint32_t position = 1; position <= decisions; ++position) {
      const bool accepted = position <= outcome.accepted;
      groups_[group(position)].add(accepted);
      all_.add(accepted);
      newest_.add(accepted);
    }
    forget_if_changed();
  }

  /// The estimate for the draft at `position` (from 1) of a block, given that those before it were accepted.
  [[nodiscard]] double acceptance(std::uint32_t position) const noexcept { return groups_[group(position)].mean(pooled(0)); }

 private:
  struct counts {
    double decisions = 0;
    double accepted = 0;
    void fade(double factor) noexcept {
      decisions *= factor;
      accepted *= factor;
    }
    void add(bool success) noexcept {
      decisions += 1;
      accepted += success ? 1 : 0;
    }
    /// As if `neighbour` more decisions had come out like `other`.
    [[nodiscard]] double mean(double other) const noexcept { return (accepted + neighbour * other) / (decisions + neighbour); }
  };
  /// Tokens of a round, by the acceptance of one draft after another.
  struct chain {
    double survival = 1;
    double tokens = 1;
    void extend(double acceptance) noexcept {
      survival *= acceptance;
      tokens += survival;
    }
  };
  // Set by simulation; half or twice of each gives about the same.
  static constexpr double neighbour = 32;
  static constexpr double doubt = 0.5;        // failures that a cautious estimate adds
  static constexpr double recent = 32;        // decisions that count as the newest
  static constexpr double contradiction = 4;  // standard deviations
  static constexpr std::size_t group_count = 24;

  [[nodiscard]] static std::size_t group(std::uint32_t position) noexcept {
    if (position < 2) return 0;
    const auto octave = static_cast<std::uint32_t>(std::bit_width(position)) - 1;
    return std::min(group_count - 1, std::size_t{2 * octave - 1 + (position >> (octave - 1) & 1)});
  }
  [[nodiscard]] double pooled(double failures) const noexcept {
    return (all_.accepted + options_.confidence * options_.acceptance) / (all_.decisions + options_.confidence + failures);
  }
  void forget_if_changed() noexcept {
    const double mean = (all_.accepted + 1) / (all_.decisions + 2);
    const double newest = newest_.accepted / newest_.decisions;
    const double deviation = std::sqrt(mean * (1 - mean) / newest_.decisions);
    if (newest_.decisions < recent / 2 || std::abs(newest - mean) < contradiction * deviation) return;
    const double fade = newest_.decisions / all_.decisions;
    for (counts& each : groups_) {
      each.fade(fade);
      each.accepted = each.decisions * newest;
    }
    all_ = newest_;
  }

  Cost cost_;
  adaptive_options options_;
  std::array<counts, group_count> groups_{};
  counts all_;
  counts newest_;
  double balance_;        // steps, of all rounds
  double probe_balance_;  // steps, of probes alone
  std::uint32_t current_ = 0;
  std::uint32_t probe_ = 1;
  bool probing_ = false;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/acceptance.hpp>

namespace kvexact::test {

/// Runs a random program through all that it can do, with the exact probability of each run. What a random number decides is found by
/// bisection: its use must be monotone in it, and no number may be used twice.
class decision_tree {
 public:
  using key = std::tuple<std::uint64_t, std::uint64_t, random_purpose>;  // path of forks, position, purpose
  /// Whether there is a run that has not been made; starts it.
  bool next_run() {
    if (started_) {
      while (!decisions_.empty() && ++decisions_.back().chosen == decisions_.back().pieces.size()) decisions_.pop_back();
      if (decisions_.empty()) return false;
    }
    started_ = true;
    depth_ = 0;
    probability_ = 1;
    asked_.clear();
    return true;
  }

  /// Probability of the run so far.
  [[nodiscard]] double probability() const { return probability_; }
  /// Whether a random number was used twice in any run.
  [[nodiscard]] bool reused() const { return reused_; }

  /// What `outcome(u)` gives in this run for the random number `name`.
  template <class Outcome>
  auto decide(const key& name, Outcome outcome) {
    reused_ |= !asked_.insert(name).second;
    if (depth_ == decisions_.size()) decisions_.push_back({pieces_of(outcome), 0});
    const decision& now = decisions_[depth_++];
    const auto [low, high] = now.pieces[now.chosen];
    probability_ *= high - low;
    return outcome(low);
  }

 private:
  struct interval {
    double low;
    double high;
  };
  struct decision {
    std::vector<interval> pieces;
    std::size_t chosen;
  };

  template <class Outcome>
  static std::vector<interval> pieces_of(Outcome outcome) {
    std::vector<interval> pieces;
    constexpr double last = 1 - 0x1p-53;
    for (double low = 0; low < 1;) {
      const auto value = outcome(low);
      double same = low;
      double other = outcome(last) == value ? 1 : last;
      while (other < 1 && other - same > 0x1p-52) {
        const double middle = (same + other) / 2;
        (outcome(middle) == value ? same : other) = middle;
      }
      pieces.push_back({low, other});
      low = other;
    }
    return pieces;
  }

  bool started_ = false;
  bool reused_ = false;
  double probability_ = 1;
  std::size_t depth_ = 0;
  std::vector<decision> decisions_;
  std::set<key> asked_;
};

/// Tells which random number a rule asks for and answers with a given one.
struct asked_random {
  double value = 0;
  std::uint64_t path = 0;
  decision_tree::key* asked = nullptr;

  [[nodiscard]] double uniform(std::uint64_t position, random_purpose purpose) const noexcept {
    *asked = {path, position, purpose};
    return value;
  }
  [[nodiscard]] asked_random fork(std::uint64_t key) const noexcept { return {value, path * 1000 + key + 1, asked}; }
};

/// A rule whose random numbers come from a decision tree.
template <template <class> class Rule>
class enumerated {
 public:
  using rule = Rule<asked_random>;
  static constexpr bool reads_draft = rule::reads_draft;

  explicit enumerated(decision_tree& tree) noexcept : tree_(&tree) {}

  [[nodiscard]] enumerated for_round(std::uint64_t length) const noexcept {
    enumerated forked = *this;
    forked.rounds_.push_back(length);
    return forked;
  }
  [[nodiscard]] token_id draw(std::uint64_t position, const distribution& target) const noexcept {
    return decide([&](const rule& of) { return of.draw(position, target); });
  }
  [[nodiscard]] token_id draft(std::uint64_t position, const distribution& draft) const noexcept {
    return decide([&](const rule& of) { return of.draft(position, draft); });
  }
  [[nodiscard]] bool accepts(std::uint64_t position, token_id token, const distribution& target, const distribution& draft) const noexcept {
    return decide([&](const rule& of) { return of.accepts(position, token, target, draft); });
  }
  [[nodiscard]] token_id replace(std::uint64_t position, const distribution& target, const distribution& draft) const noexcept {
    return decide([&](const rule& of) { return of.replace(position, target, draft); });
  }

 private:
  template <class Call>
  auto decide(Call call) const noexcept {
    decision_tree::key asked;
    const auto outcome = [&](double value) {
      rule of(asked_random{value, 0, &asked});
      for (const std::uint64_t length : rounds_) of = of.for_round(length);
      return call(of);
    };
    outcome(0);
    return tree_->decide(asked, outcome);
  }

  decision_tree* tree_;
  std::vector<std::uint64_t> rounds_;
};

}  // namespace kvexact::test

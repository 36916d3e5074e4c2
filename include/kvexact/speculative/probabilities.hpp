// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

namespace detail {

/// The inverse of the cumulative distribution of weight(0), ..., weight(size - 1) at `uniform` in [0, 1), where `total` is their sum in
/// this order. Never an index of weight 0, unless all are; 1 counts as just below.
template <class Weight>
[[nodiscard]] token_id inverse_cumulative(std::size_t size, double total, double uniform, Weight weight) noexcept {
  const double goal = uniform * total;
  double sum = 0;
  token_id last = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const double mass = weight(static_cast<token_id>(i));
    if (mass == 0) continue;
    last = static_cast<token_id>(i);
    sum += mass;
    if (goal < sum) break;
  }
  return last;
}

}  // namespace detail

/// A distribution over the vocabulary: a view of weights [vocabulary] that need not sum to 1, or all mass on one token (what an n-gram
/// drafter and greedy decoding give). Probabilities are weights over their sum, both in double, so that accept rules are exact although
/// weights are floats. The weights must outlive the view.
class distribution {
 public:
  /// Errors: invalid_argument if a weight is NaN, infinite or negative, or if all are 0.
  [[nodiscard]] static result<distribution> dense(std::span<const float> weights) noexcept {
    double total = 0;
    bool valid = true;
    for (const float weight : weights) {
      valid &= weight >= 0 && weight <= std::numeric_limits<float>::max();
      total += static_cast<double>(weight);
    }
    if (!valid) return error{error_code::invalid_argument, "a weight of a distribution is negative or not finite"};
    if (!(total > 0)) return error{error_code::invalid_argument, "all weights of a distribution are 0"};
    return distribution(weights, 0, total);
  }

  [[nodiscard]] static distribution point(token_id token) noexcept { return distribution({}, token, 1); }

  [[nodiscard]] bool is_point() const noexcept { return weights_.empty(); }
  /// Empty for a point.
  [[nodiscard]] std::span<const float> weights() const noexcept { return weights_; }

  /// The probability of a token, 0 outside the vocabulary.
  [[nodiscard]] double mass(token_id token) const noexcept {
    if (is_point()) return token == token_ ? 1.0 : 0.0;
    return token < weights_.size() ? static_cast<double>(weights_[token]) / total_ : 0.0;
  }

  /// The same distribution as a view of `memory` [vocabulary], to which the weights are copied. Precondition: not a point.
  [[nodiscard]] distribution copied_to(std::span<float> memory) const noexcept {
    if (memory.data() != weights_.data()) std::ranges::copy(weights_, memory.begin());
    return distribution(memory.first(weights_.size()), 0, total_);
  }

  /// The most probable token; of equals the lowest.
  [[nodiscard]] token_id mode() const noexcept {
    if (is_point()) return token_;
    return static_cast<token_id>(std::ranges::max_element(weights_) - weights_.begin());
  }

  /// Inverse of the cumulative distribution at `uniform` in [0, 1), in index order. Never gives a token of probability 0.
  [[nodiscard]] token_id draw(double uniform) const noexcept {
    if (is_point()) return token_;
    return detail::inverse_cumulative(weights_.size(), total_, uniform,
                                      [&](token_id token) { return static_cast<double>(weights_[token]); });
  }

 private:
  distribution(std::span<const float> weights, token_id token, double total) noexcept : weights_(weights), token_(token), total_(total) {}

  std::span<const float> weights_;
  token_id token_;
  double total_;
};

/// The largest logit (of equals the lowest index), and how far the next one lies below it: infinite if there is no other.
struct top_two_logits {
  token_id first = 0;
  float gap = 0;
};

/// Of logits [vocabulary]; -infinity is a token that cannot follow. Errors: invalid_argument for NaN, and where no token can follow.
[[nodiscard]] inline result<top_two_logits> top_two(std::span<const float> logits) noexcept {
  constexpr float none = -std::numeric_limits<float>::infinity();
  float first = none;
  float second = none;
  std::size_t index = 0;
  bool nan = false;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    nan |= std::isnan(logits[i]);
    if (logits[i] > first) {
      second = first;
      first = logits[i];
      index = i;
    } else {
      second = std::max(second, logits[i]);
    }
  }
  if (nan) return error{error_code::invalid_argument, "a logit is not a number"};
  if (first == none) return error{error_code::invalid_argument, "all logits are minus infinity"};
  return top_two_logits{static_cast<token_id>(index), first == second ? 0.0F : first - second};
}

/// Turns logits [vocabulary] into weights exp(logit - largest) in place, and gives their distribution. Errors: as for `top_two`; infinite
/// logits, too.
[[nodiscard]] inline result<distribution> softmax(std::span<float> logits) noexcept {
  const auto top = top_two(logits);
  if (!top) return top.error();
  const float largest = logits[top->first];
  if (largest == std::numeric_limits<float>::infinity()) return error{error_code::invalid_argument, "a logit is infinite"};
  for (float& logit : logits) logit = std::exp(logit - largest);
  return distribution::dense(logits);
}

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <kvexact/speculative/counter_random.hpp>
#include <kvexact/speculative/probabilities.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// How draft tokens are drawn, judged and replaced. A rule is a value without state: what it says depends on its arguments and its seed.
/// `position` is that of the token in the sequence, `target` what the verifier gives there, `draft` what the draft token was drawn from.
///
/// - `for_round(length)`: the rule for a round that starts with `length` tokens, of which the other functions are called. Random numbers of
///   different rounds are independent, whatever the draft lengths depended on; a drafter that makes rounds of its own forks the rule of the
///   round that asked it once more.
/// - `draw(position, target)`: the verifier's own token, where all drafts before are accepted or there are none.
/// - `draft(position, draft)`: a draft token.
/// - `accepts(position, token, target, draft)`, and if not, `replace(position, target, draft)`: the verifier's token instead.
/// - `reads_draft`: whether the last two look at `draft`. Otherwise drafters may keep it to themselves.
template <class R>
concept acceptance_rule = std::copyable<R> &&
    requires(const R& rule, std::uint64_t position, token_id token, const distribution& target, const distribution& draft) {
  { R::reads_draft } -> std::convertible_to<bool>;
  { rule.for_round(position) } noexcept -> std::same_as<R>;
  { rule.draw(position, target) } noexcept -> std::same_as<token_id>;
  { rule.draft(position, draft) } noexcept -> std::same_as<token_id>;
  { rule.accepts(position, token, target, draft) } noexcept -> std::same_as<bool>;
  { rule.replace(position, target, draft) } noexcept -> std::same_as<token_id>;
};

/// The most probable token, of equals the lowest. With a target of more than one token, ties are those of its weights, not of the logits.
struct greedy {
  static constexpr bool reads_draft = false;

  [[nodiscard]] greedy for_round(std::uint64_t) const noexcept { return {}; }
  [[nodiscard]] token_id draw(std::uint64_t, const distribution& target) const noexcept { return target.mode(); }
  [[nodiscard]] token_id draft(std::uint64_t, const distribution& draft) const noexcept { return draft.mode(); }
  [[nodiscard]] bool accepts(std::uint64_t, token_id token, const distribution& target, const distribution&) const noexcept {
    return token == target.mode();
  }
  [[nodiscard]] token_id replace(std::uint64_t, const distribution& target, const distribution&) const noexcept { return target.mode(); }
};

/// Speculative sampling (arXiv 2211.17192): emits tokens with the distribution of the target. A draft token is accepted with probability
/// min(1, p / q), a rejected one replaced by a draw from max(p - q, 0), normalised.
template <random_source Random>
class basic_speculative_sampling {
 public:
  static constexpr bool reads_draft = true;

  explicit basic_speculative_sampling(Random random) noexcept : random_(random) {}
  explicit basic_speculative_sampling(std::uint64_t seed) noexcept requires std::constructible_from<Random, std::uint64_t> : random_(seed) {
  }

  [[nodiscard]] basic_speculative_sampling for_round(std::uint64_t length) const noexcept {
    return basic_speculative_sampling(random_.fork(length));
  }
  [[nodiscard]] token_id draw(std::uint64_t position, const distribution& target) const noexcept {
    return target.draw(random_.uniform(position, random_purpose::replace));
  }
  [[nodiscard]] token_id draft(std::uint64_t position, const distribution& draft) const noexcept {
    return draft.draw(random_.uniform(position, random_purpose::draft));
  }
  [[nodiscard]] bool accepts(std::uint64_t position, token_id token, const distribution& target, const distribution& draft) const noexcept {
    // Strictly less: a token that cannot follow is not accepted at 0 either.
    return random_.uniform(position, random_purpose::accept) * draft.mass(token) < target.mass(token);
  }
  [[nodiscard]] token_id replace(std::uint64_t position, const distribution& target, const distribution& draft) const noexcept {
    const double uniform = random_.uniform(position, random_purpose::replace);
    const auto residual = [&](token_id token) { return std::max(target.mass(token) - draft.mass(token), 0.0); };
    const std::size_t size = target.weights().size();
    double total = 0;
    for (std::size_t i = 0; i < size; ++i) total += residual(static_cast<token_id>(i));
    // 0 for a point, which has no weights, and where both are equal but for rounding.
    return total > 0 ? detail::inverse_cumulative(size, total, uniform, residual) : target.draw(uniform);
  }

 private:
  Random random_;
};

using speculative_sampling = basic_speculative_sampling<counter_random>;

/// The tokens of plain decoding with the same seed, whatever the drafts: at a position the same random numbers decide in every round and at
/// every level, and a draft is accepted where drafter and verifier draw the same token. Each token has an exponential waiting time, with
/// its weight as the rate, and the first one wins (the Gumbel-max trick). Of all ways to draw without looking at the other distribution
/// this agrees often, with probability (1 - d) / (1 + d) or more at total variation distance d (arXiv 2408.07978); the inverse of the
/// cumulative distribution would hardly do so in a large vocabulary.
template <random_source Random>
class basic_sample_and_match {
 public:
  static constexpr bool reads_draft = false;

  explicit basic_sample_and_match(Random random) noexcept : random_(random) {}
  explicit basic_sample_and_match(std::uint64_t seed) noexcept requires std::constructible_from<Random, std::uint64_t> : random_(seed) {}

  [[nodiscard]] basic_sample_and_match for_round(std::uint64_t) const noexcept { return *this; }
  [[nodiscard]] token_id draw(std::uint64_t position, const distribution& target) const noexcept {
    if (target.is_point()) return target.mode();
    const Random at_position = random_.fork(position);
    const std::span<const float> weights = target.weights();
    double earliest = std::numeric_limits<double>::infinity();
    token_id first = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (weights[i] == 0) continue;
      const double weight = static_cast<double>(weights[i]);
      const double uniform = at_position.uniform(i, random_purpose::replace);
      // -log(1 - u) is at least u: most tokens need no logarithm.
      if (uniform >= earliest * weight) continue;
      const double time = -std::log1p(-uniform) / weight;
      if (time < earliest) {
        earliest = time;
        first = static_cast<token_id>(i);
      }
    }
    return first;
  }
  [[nodiscard]] token_id draft(std::uint64_t position, const distribution& draft) const noexcept { return draw(position, draft); }
  [[nodiscard]] bool accepts(std::uint64_t position, token_id token, const distribution& target, const distribution&) const noexcept {
    return token == draw(position, target);
  }
  [[nodiscard]] token_id replace(std::uint64_t position, const distribution& target, const distribution&) const noexcept {
    return draw(position, target);
  }

 private:
  Random random_;
};

using sample_and_match = basic_sample_and_match<counter_random>;

static_assert(acceptance_rule<greedy> && acceptance_rule<speculative_sampling> && acceptance_rule<sample_and_match>);

}  // namespace kvexact

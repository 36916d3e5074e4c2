// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <tuple>
#include <utility>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/token.hpp>
#include <kvexact/speculative/token_counts.hpp>

namespace kvexact {

/// Changes the logits of the next token, minus infinity where it cannot follow; at least one token stays possible.
///
/// - `apply(logits)`: [vocabulary], without NaN, in place.
/// - `commit(token)`, optional: the token has been added to the sequence. Errors: out_of_memory.
/// - `read_prompt(token)`, optional: a token of the prompt, in order, before anything is committed. Errors: out_of_memory.
///
/// A processor is a value: whoever looks ahead over draft tokens commits them to a copy and drops it. So no processor ever sees a token
/// that was rejected.
template <class P>
concept logit_processor = std::copyable<P> && requires(const P& processor, std::span<float> logits) {
  { processor.apply(logits) } noexcept -> std::same_as<void>;
};

namespace detail {

/// An integer that is ordered as the values are; both zeros are equal.
[[nodiscard]] inline std::uint32_t ordered_bits(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value + 0.0F);
  return (bits >> 31) != 0 ? ~bits : bits | 0x8000'0000U;
}

/// Keeps the largest logits until their weights sum to `goal`, of equal ones those with lower index, and sets all others to minus infinity.
/// `weight(logit)` is at least 0. The limit is found digit by digit: three passes, and no memory.
template <class Weight>
void keep_largest(std::span<float> logits, double goal, Weight weight) noexcept {
  struct digit {
    int shift;
    std::uint32_t count;
  };
  constexpr std::array<digit, 3> digits{{{21, 2048}, {10, 2048}, {0, 1024}}};
  std::array<double, 2048> sums;
  std::uint32_t limit = 0;
  std::uint32_t known = 0;  // the bits of `limit` that are
  double above = 0;         // weight of all logits above those that begin like `limit`
  for (const auto& [shift, count] : digits) {
    sums.fill(0);
    for (const float logit : logits) {
      const std::uint32_t bits = ordered_bits(logit);
      if ((bits & known) == limit) sums[(bits >> shift) % count] += weight(logit);
    }
    std::uint32_t value = count - 1;
    while (value > 0 && above + sums[value] < goal) above += sums[value--];
    limit |= value << shift;
    known |= (count - 1) << shift;
  }
  for (float& logit : logits) {
    const std::uint32_t bits = ordered_bits(logit);
    if (bits > limit) continue;
    if (bits == limit && above < goal) {
      above += weight(logit);
    } else {
      logit = -std::numeric_limits<float>::infinity();
    }
  }
}

/// Minus infinity if there are none.
[[nodiscard]] inline float largest_of(std::span<const float> logits) noexcept {
  float largest = -std::numeric_limits<float>::infinity();
  for (const float logit : logits) {
    if (logit > largest) largest = logit;  // a branch that is rarely taken; max_element is five times as slow
  }
  return largest;
}

}  // namespace detail

/// Divides by `value` > 0, after subtracting the largest, so that nothing overflows.
struct temperature {
  float value = 1;

  void apply(std::span<float> logits) const noexcept {
    if (value == 1) return;
    const float largest = detail::largest_of(logits);
    for (float& logit : logits) logit = (logit - largest) / value;
  }
};

/// Keeps the `count` largest logits, of equal ones those with lower index; 0: all.
struct top_k {
  std::uint32_t count = 0;

  void apply(std::span<float> logits) const noexcept {
    if (count == 0 || count >= logits.size()) return;
    detail::keep_largest(logits, count, [](float) { return 1.0; });
  }
};

/// Keeps the fewest most probable tokens with at least this `mass`, of equal ones those with lower index (nucleus sampling); 1: all.
struct top_p {
  float mass = 1;

  void apply(std::span<float> logits) const noexcept {
    if (mass >= 1) return;
    const float largest = detail::largest_of(logits);
    const auto weight = [largest](float logit) { return static_cast<double>(std::exp(logit - largest)); };
    double total = 0;
    for (const float logit : logits) total += weight(logit);
    detail::keep_largest(logits, static_cast<double>(mass) * total, weight);
  }
};

/// Keeps the tokens with at least this `share` of the largest probability; 0: all.
struct min_p {
  float share = 0;

  void apply(std::span<float> logits) const noexcept {
    if (share <= 0) return;
    const float limit = detail::largest_of(logits) + std::log(share);
    for (float& logit : logits) {
      if (logit < limit) logit = -std::numeric_limits<float>::infinity();
    }
  }
};

/// Divides positive and multiplies negative logits of all tokens that occur by `factor` (CTRL, arXiv 1909.05858); prompt included.
class repetition_penalty {
 public:
  explicit repetition_penalty(float factor = 1, std::size_t window = 0) noexcept : factor_(factor), counts_(window) {}

  [[nodiscard]] result<void> read_prompt(token_id token) noexcept { return commit(token); }
  [[nodiscard]] result<void> commit(token_id token) noexcept {
    if (factor_ == 1) return {};
    return counts_.add(token);
  }
  void apply(std::span<float> logits) const noexcept {
    for (const auto& [token, count] : counts_.entries()) {
      if (token >= logits.size()) return;
      float& logit = logits[token];
      logit = logit > 0 ? logit / factor_ : logit * factor_;
    }
  }

 private:
  float factor_;
  token_counts counts_;
};

/// Subtracts `presence` from the logit of each generated token that occurs, and `frequency` for every time that it does.
class count_penalty {
 public:
  explicit count_penalty(float presence = 0, float frequency = 0, std::size_t window = 0) noexcept
      : presence_(presence), frequency_(frequency), counts_(window) {}

  [[nodiscard]] result<void> commit(token_id token) noexcept {
    if (presence_ == 0 && frequency_ == 0) return {};
    return counts_.add(token);
  }
  void apply(std::span<float> logits) const noexcept {
    for (const auto& [token, count] : counts_.entries()) {
      if (token >= logits.size()) return;
      logits[token] -= presence_ + frequency_ * static_cast<float>(count);
    }
  }

 private:
  float presence_;
  float frequency_;
  token_counts counts_;
};

/// Several processors, one after the other.
template <logit_processor... Processors>
class processor_chain {
 public:
  processor_chain() = default;
  explicit processor_chain(Processors... processors) noexcept requires(sizeof...(Processors) > 0) : processors_(std::move(processors)...) {}

  void apply(std::span<float> logits) const noexcept {
    std::apply([&](const auto&... processor) { (processor.apply(logits), ...); }, processors_);
  }
  [[nodiscard]] result<void> commit(token_id token) noexcept {
    return for_each([token](auto& processor) -> result<void> {
      if constexpr (requires { processor.commit(token); }) return processor.commit(token);
      return {};
    });
  }
  [[nodiscard]] result<void> read_prompt(token_id token) noexcept {
    return for_each([token](auto& processor) -> result<void> {
      if constexpr (requires { processor.read_prompt(token); }) return processor.read_prompt(token);
      return {};
    });
  }

 private:
  /// Until the first error.
  template <class Action>
  [[nodiscard]] result<void> for_each(Action action) noexcept {
    result<void> outcome;
    std::apply([&](auto&... processor) { static_cast<void>(((outcome = action(processor), static_cast<bool>(outcome)) && ...)); },
               processors_);
    return outcome;
  }

  std::tuple<Processors...> processors_;
};

}  // namespace kvexact

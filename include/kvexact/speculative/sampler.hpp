// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/logit_processors.hpp>
#include <kvexact/speculative/probabilities.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// What is sampled from at one position. `gap`: how far the second largest logit lies below the largest, after all processors; a small one
/// says that rounding could have changed the token.
struct next_token {
  distribution target;
  float gap = 0;
};

/// From the logits of an engine to the distribution of the next token, given the tokens so far.
///
/// - `next(logits)`: [vocabulary]; uses them up: the distribution is a view of the same memory. Errors: those of `top_two` and `softmax`.
/// - `commit(token)`: the sequence is longer by this token. Errors: out_of_memory.
///
/// A sampler is a value: to look ahead over draft tokens, commit them to a copy.
template <class S>
concept token_sampler = std::copyable<S> && requires(S& sampler, const S& seen, std::span<float> logits, token_id token) {
  { seen.next(logits) } noexcept -> std::same_as<result<next_token>>;
  { sampler.commit(token) } noexcept -> std::same_as<result<void>>;
};

/// The `token_sampler` of a logit processor, mostly a `processor_chain`. Greedy: all mass on the largest logit, of equals the lowest index.
template <logit_processor Processor>
class basic_sampler {
 public:
  explicit basic_sampler(Processor processor, bool greedy = false) noexcept : processor_(std::move(processor)), greedy_(greedy) {}

  [[nodiscard]] result<next_token> next(std::span<float> logits) const noexcept {
    // Before a processor could hide a NaN.
    if (const auto valid = top_two(logits); !valid) return valid.error();
    processor_.apply(logits);
    const auto top = top_two(logits);
    if (!top) return top.error();
    if (greedy_) return next_token{distribution::point(top->first), top->gap};
    const auto target = softmax(logits);
    if (!target) return target.error();
    return next_token{*target, top->gap};
  }
  [[nodiscard]] result<void> commit(token_id token) noexcept {
    if constexpr (requires { processor_.commit(token); }) return processor_.commit(token);
    return {};
  }
  [[nodiscard]] result<void> read_prompt(std::span<const token_id> prompt) noexcept {
    if constexpr (requires(token_id token) { processor_.read_prompt(token); }) {
      for (const token_id token : prompt) {
        if (auto read = processor_.read_prompt(token); !read) return read;
      }
    }
    return {};
  }

 private:
  Processor processor_;
  bool greedy_;
};

/// The usual parameters; the defaults change nothing.
struct sampling_parameters {
  float temperature = 1;  ///< 0: greedy
  float min_p = 0;        ///< 0 to 1; 0: off
  std::uint32_t top_k = 0;
  float top_p = 1;               ///< above 0, up to 1
  float repetition_penalty = 1;  ///< above 0
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::size_t penalty_window = 0;  ///< newest tokens that penalties see; 0: all
};

/// In the order of vLLM: penalties, temperature, min-p, top-k, top-p. llama.cpp takes the temperature last, and min-p after top-k and
/// top-p; where that order is wanted: `basic_sampler<processor_chain<..., top_k, top_p, min_p, temperature>>`.
class standard_sampler : public basic_sampler<processor_chain<repetition_penalty, count_penalty, temperature, min_p, top_k, top_p>> {
 public:
  /// Errors: invalid_argument for a parameter outside its range.
  [[nodiscard]] static result<standard_sampler> make(const sampling_parameters& wanted) noexcept {
    const auto within = [](float value, float low, float high) { return value >= low && value <= high; };
    constexpr float most = std::numeric_limits<float>::max();
    if (!within(wanted.temperature, 0, most)) return error{error_code::invalid_argument, "the temperature is at least 0"};
    if (!within(wanted.min_p, 0, 1)) return error{error_code::invalid_argument, "min_p lies between 0 and 1"};
    if (!(wanted.top_p > 0) || wanted.top_p > 1) return error{error_code::invalid_argument, "top_p lies above 0 and is at most 1"};
    if (!(wanted.repetition_penalty > 0) || !within(wanted.repetition_penalty, 0, most))
      return error{error_code::invalid_argument, "the repetition penalty lies above 0"};
    if (!std::isfinite(wanted.presence_penalty) || !std::isfinite(wanted.frequency_penalty))
      return error{error_code::invalid_argument, "a penalty is not finite"};
    return standard_sampler(wanted);
  }

 private:
  using chain = processor_chain<repetition_penalty, count_penalty, temperature, min_p, top_k, top_p>;

  explicit standard_sampler(const sampling_parameters& wanted) noexcept
      : basic_sampler(chain(repetition_penalty(wanted.repetition_penalty, wanted.penalty_window),
                            count_penalty(wanted.presence_penalty, wanted.frequency_penalty, wanted.penalty_window),
                            temperature{wanted.temperature == 0 ? 1 : wanted.temperature}, min_p{wanted.min_p}, top_k{wanted.top_k},
                            top_p{wanted.top_p}),
                      wanted.temperature == 0) {}
};

static_assert(token_sampler<standard_sampler>);

}  // namespace kvexact

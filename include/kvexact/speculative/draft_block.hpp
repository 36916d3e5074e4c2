// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/probabilities.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// Draft tokens, and the distribution that each was really drawn from. `distributions` is [tokens], or empty for rules that do not read it.
struct draft_view {
  std::span<const token_id> tokens;
  std::span<const distribution> distributions;
};

/// Memory for the draft tokens of a round and their distributions; allocates in `make` only.
class draft_block {
 public:
  /// `vocabulary` may be 0 where all distributions are points. Errors: out_of_memory.
  [[nodiscard]] static result<draft_block> make(std::size_t max_tokens, std::size_t vocabulary) noexcept {
    if (vocabulary != 0 && max_tokens > std::numeric_limits<std::size_t>::max() / sizeof(float) / vocabulary)
      return error{error_code::out_of_memory, "a block of draft tokens"};
    draft_block made;
    try {
      made.capacity_ = max_tokens;
      made.vocabulary_ = vocabulary;
      made.weights_.resize(max_tokens * vocabulary);
      made.tokens_.reserve(max_tokens);
      made.distributions_.reserve(max_tokens);
    } catch (...) {
      return error{error_code::out_of_memory, "a block of draft tokens"};
    }
    return made;
  }

  // Distributions are views of the weights, which a move leaves where they are.
  draft_block(draft_block&&) noexcept = default;
  draft_block& operator=(draft_block&&) noexcept = default;

  [[nodiscard]] std::size_t size() const noexcept { return tokens_.size(); }
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] draft_view view() const noexcept { return {tokens_, distributions_}; }
  void clear() noexcept {
    tokens_.clear();
    distributions_.clear();
  }

  /// Memory [vocabulary] for the logits of the next token; a distribution made of them is not copied by `push`. Empty if the
  /// block is full.
  [[nodiscard]] std::span<float> next_row() noexcept {
    if (size() == capacity_) return {};
    return std::span(weights_).subspan(size() * vocabulary_, vocabulary_);
  }

  /// Adds a token; weights that lie elsewhere are copied. Errors: invalid_argument if the block is full or the vocabulary another one.
  [[nodiscard]] result<void> push(token_id token, const distribution& drawn_from) noexcept {
    if (size() == capacity()) return error{error_code::invalid_argument, "the block of draft tokens is full"};
    if (drawn_from.is_point()) {
      distributions_.push_back(drawn_from);
    } else {
      if (drawn_from.weights().size() != vocabulary_) return error{error_code::invalid_argument, "a draft has another vocabulary"};
      distributions_.push_back(drawn_from.copied_to(next_row()));
    }
    tokens_.push_back(token);
    return {};
  }

 private:
  draft_block() noexcept = default;

  std::size_t capacity_ = 0;
  std::size_t vocabulary_ = 0;
  std::vector<float> weights_;
  std::vector<token_id> tokens_;
  std::vector<distribution> distributions_;
};

}  // namespace kvexact

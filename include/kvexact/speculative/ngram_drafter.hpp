// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/drafter.hpp>
#include <kvexact/speculative/probabilities.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// Prompt lookup: finds where the newest tokens have occurred before, the most of them, of several such places the last, and proposes what
/// followed there; where that runs into the end of the sequence, it goes on with the drafts, so that a loop is continued. Needs no model,
/// and has no state.
class ngram_drafter {
 public:
  struct options {
    std::uint32_t longest = 3;       ///< most tokens that are looked for
    std::uint32_t shortest = 1;      ///< fewest tokens for which anything is proposed
    std::uint64_t window = 1 << 16;  ///< newest tokens that are searched
  };

  /// Errors: invalid_argument for a shortest of 0 or more than the longest.
  [[nodiscard]] static result<ngram_drafter> make(const options& chosen) noexcept {
    if (chosen.shortest == 0 || chosen.shortest > chosen.longest)
      return error{error_code::invalid_argument, "n-grams have at least one token, and the shortest no more than the longest"};
    return ngram_drafter(chosen);
  }

  [[nodiscard]] std::uint64_t max_draft() const noexcept { return std::numeric_limits<std::uint64_t>::max(); }
  [[nodiscard]] result<void> synchronise(std::span<const token_id>) noexcept { return {}; }

  /// The place is found without the drafts that the block holds. Errors: invalid_argument for a full block.
  template <class Rule, class Sampler>
  [[nodiscard]] result<void> propose(const draft_request<Rule, Sampler>& request, draft_block& block) noexcept {
    const sequence tokens{request.committed, request.pending};
    const std::size_t follows = continuation(tokens);
    if (follows == tokens.size()) return {};
    const std::size_t first = follows + block.size();
    for (std::size_t i = first; i < first + request.wanted; ++i) {
      const token_id token = i < tokens.size() ? tokens[i] : block.view().tokens[i - tokens.size()];
      if (auto pushed = block.push(token, distribution::point(token)); !pushed) return pushed;
      if (request.more != nullptr && !request.more(request.context, 1)) break;
    }
    return {};
  }

 private:
  struct sequence {
    std::span<const token_id> committed;
    std::span<const token_id> pending;

    [[nodiscard]] std::size_t size() const noexcept { return committed.size() + pending.size(); }
    [[nodiscard]] token_id operator[](std::size_t i) const noexcept {
      return i < committed.size() ? committed[i] : pending[i - committed.size()];
    }
  };

  explicit ngram_drafter(const options& chosen) noexcept : options_(chosen) {}

  /// The position behind the place that is found, or the size of the sequence.
  [[nodiscard]] std::size_t continuation(const sequence& tokens) const noexcept {
    const std::size_t size = tokens.size();
    const std::size_t oldest = size - static_cast<std::size_t>(std::min<std::uint64_t>(size, options_.window));
    std::size_t found = size;
    std::size_t longest = options_.shortest - 1;
    for (std::size_t end = size; end-- > oldest + std::max<std::size_t>(1, longest) && longest < options_.longest;) {
      std::size_t same = 0;
      while (same < options_.longest && oldest + same < end && tokens[end - 1 - same] == tokens[size - 1 - same]) ++same;
      if (same > longest) {
        longest = same;
        found = end;
      }
    }
    return found;
  }

  options options_;
};

}  // namespace kvexact

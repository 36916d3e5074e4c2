// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// Why a request ends. Where several reasons meet in one token, the first of this list counts.
enum class stop_reason : std::uint8_t {
  none,
  end_token,
  stop_string,
  max_new_tokens,
  context_full,
};

/// `matched_bytes`: length of the stop string (the longest of those that end at the same byte), `trailing_bytes`: how much of the newest
/// token lies behind it. Both are 0 for other reasons.
struct stop_event {
  stop_reason reason = stop_reason::none;
  std::size_t matched_bytes = 0;
  std::size_t trailing_bytes = 0;

  [[nodiscard]] explicit operator bool() const noexcept { return reason != stop_reason::none; }
};

/// Finds the first of several strings in bytes that come in pieces of any length: the automaton of Aho and Corasick, whose state is one
/// number. Takes 1 KiB for each byte of the strings.
class stop_strings {
 public:
  using state = std::uint32_t;  ///< 0: nothing read

  stop_strings() noexcept = default;

  /// Errors: invalid_argument for an empty string; out_of_memory.
  [[nodiscard]] static result<stop_strings> make(std::span<const std::string_view> strings) noexcept {
    stop_strings made;
    try {
      for (const std::string_view text : strings) {
        if (text.empty()) return error{error_code::invalid_argument, "a stop string is empty"};
        made.insert(text);
      }
      made.close();
    } catch (...) {
      return error{error_code::out_of_memory, "the stop strings"};
    }
    return made;
  }

  [[nodiscard]] state next(state at, char byte) const noexcept {
    return nodes_.empty() ? 0 : nodes_[at].next[static_cast<unsigned char>(byte)];
  }
  /// Bytes of the longest string that ends here, or 0.
  [[nodiscard]] std::size_t matched(state at) const noexcept { return nodes_.empty() ? 0 : nodes_[at].matched; }
  /// Bytes read last that could still become part of a string: a text that is shown while it grows must keep them back.
  [[nodiscard]] std::size_t undecided(state at) const noexcept { return nodes_.empty() ? 0 : nodes_[at].depth; }

 private:
  struct node {
    std::array<state, 256> next{};
    std::size_t depth = 0;
    std::size_t matched = 0;
  };

  void insert(std::string_view text) {
    if (nodes_.empty()) nodes_.emplace_back();
    state at = 0;
    for (const char byte : text) {
      const auto index = static_cast<unsigned char>(byte);
      if (nodes_[at].next[index] == 0) {
        const std::size_t depth = nodes_[at].depth + 1;
        nodes_[at].next[index] = static_cast<state>(nodes_.size());
        nodes_.emplace_back().depth = depth;
      }
      at = nodes_[at].next[index];
    }
    nodes_[at].matched = text.size();
  }

  /// Breadth first: every missing edge becomes that of the longest proper suffix that is a node, too.
  void close() {
    std::vector<std::pair<state, state>> order;  // a node and its suffix
    order.reserve(nodes_.size());
    if (!nodes_.empty()) order.emplace_back(0, 0);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto [at, suffix] = order[i];
      if (nodes_[at].matched == 0) nodes_[at].matched = nodes_[suffix].matched;
      for (std::size_t byte = 0; byte < 256; ++byte) {
        const state beyond = at == 0 ? 0 : nodes_[suffix].next[byte];
        state& next = nodes_[at].next[byte];
        if (next == 0) {
          next = beyond;
        } else {
          order.emplace_back(next, beyond);
        }
      }
    }
  }

  std::vector<node> nodes_;
};

/// The bytes of a token, for stop strings.
template <class B>
concept token_bytes = std::copyable<B> && requires(const B& bytes, token_id token) {
  { bytes(token) } noexcept -> std::convertible_to<std::string_view>;
};

/// For requests without stop strings.
struct no_token_bytes {
  [[nodiscard]] std::string_view operator()(token_id) const noexcept { return {}; }
};

/// How far a request has come: a plain value, copied to look ahead.
struct stop_state {
  std::uint64_t length = 0;     ///< tokens of the sequence, prompt included
  std::uint64_t generated = 0;  ///< tokens after the prompt
  stop_strings::state text = 0;
  stop_reason ended = stop_reason::none;
};

/// When a request ends. Stop strings are looked for in what is generated, not in the prompt. Read only once it is made.
template <token_bytes Bytes = no_token_bytes>
struct stop_conditions {
  std::vector<token_id> end_tokens = {};
  stop_strings strings = {};
  std::uint64_t max_new_tokens = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t context_length = std::numeric_limits<std::uint64_t>::max();  ///< most tokens of the sequence, prompt included
  Bytes bytes = {};

  /// How many tokens may still be generated; 0 once the request has ended.
  [[nodiscard]] std::uint64_t remaining(const stop_state& state) const noexcept {
    if (state.ended != stop_reason::none) return 0;
    const std::uint64_t budget = max_new_tokens - std::min(max_new_tokens, state.generated);
    const std::uint64_t context = context_length - std::min(context_length, state.length);
    return std::min(budget, context);
  }

  /// Takes the next committed token.
  [[nodiscard]] stop_event feed(stop_state& state, token_id token) const noexcept {
    ++state.length;
    ++state.generated;
    const stop_event event = read(state, token);
    state.ended = event.reason;
    return event;
  }

 private:
  [[nodiscard]] stop_event read(stop_state& state, token_id token) const noexcept {
    if (std::ranges::find(end_tokens, token) != end_tokens.end()) return {stop_reason::end_token};
    const std::string_view text = bytes(token);
    for (std::size_t i = 0; i < text.size(); ++i) {
      state.text = strings.next(state.text, text[i]);
      if (const std::size_t matched = strings.matched(state.text); matched != 0)
        return {stop_reason::stop_string, matched, text.size() - i - 1};
    }
    if (state.generated >= max_new_tokens) return {stop_reason::max_new_tokens};
    if (state.length >= context_length) return {stop_reason::context_full};
    return {};
  }
};

}  // namespace kvexact

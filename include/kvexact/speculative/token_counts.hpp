// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// How often each token occurs among the newest `window` of those added; a window of 0 is unlimited.
class token_counts {
 public:
  struct entry {
    token_id token;
    std::uint32_t count;
  };

  explicit token_counts(std::size_t window = 0) noexcept : window_(window) {}

  /// Errors: out_of_memory; the counts are of no use then.
  [[nodiscard]] result<void> add(token_id token) noexcept {
    try {
      if (window_ != 0 && newest_.size() == window_) {
        forget(newest_[oldest_]);
        newest_[oldest_] = token;
        oldest_ = (oldest_ + 1) % window_;
      } else if (window_ != 0) {
        newest_.push_back(token);
      }
      const auto at = find(token);
      if (at != entries_.end() && at->token == token) {
        ++at->count;
      } else {
        entries_.insert(at, {token, 1});
      }
    } catch (...) {
      return error{error_code::out_of_memory, "counts of tokens"};
    }
    return {};
  }

  /// In increasing order of the tokens, each count at least 1.
  [[nodiscard]] std::span<const entry> entries() const noexcept { return entries_; }

 private:
  [[nodiscard]] std::vector<entry>::iterator find(token_id token) noexcept {
    return std::ranges::lower_bound(entries_, token, {}, &entry::token);
  }
  void forget(token_id token) noexcept {
    const auto at = find(token);
    if (--at->count == 0) entries_.erase(at);
  }

  std::size_t window_;
  std::size_t oldest_ = 0;
  std::vector<token_id> newest_;  // a ring once it is full; empty without a window
  std::vector<entry> entries_;
};

}  // namespace kvexact

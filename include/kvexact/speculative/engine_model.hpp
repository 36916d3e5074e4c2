// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// Another model, of the same vocabulary as the target and with a cache of its own, as a `logit_model`: the external small drafter. Rows of
/// drafts that were committed stay in its cache.
template <positional_decoder Engine>
class engine_model {
 public:
  /// An engine without tokens.
  explicit engine_model(Engine engine) noexcept : engine_(std::move(engine)) {}

  [[nodiscard]] const Engine& engine() const noexcept { return engine_; }
  [[nodiscard]] std::size_t vocabulary() const noexcept { return engine_.vocabulary(); }
  /// 0 once the sequence is longer than this model's cache.
  [[nodiscard]] std::uint64_t max_draft() const noexcept {
    return is_beyond_ ? 0 : std::min(engine_.max_rollback(), engine_.capacity() - engine_.length());
  }

  result<void> synchronise(std::span<const token_id> committed) noexcept {
    is_beyond_ = committed.size() > engine_.capacity();
    if (is_beyond_) return {};
    if (committed.empty()) return run({}, {}, {});
    return run(committed.first(committed.size() - 1), {}, {});
  }
  result<void> logits(std::span<const token_id> committed, std::span<const token_id> pending, std::span<float> rows) noexcept {
    return run(committed, pending, rows);
  }

 private:
  result<void> run(std::span<const token_id> committed, std::span<const token_id> pending, std::span<float> rows) noexcept {
    if (engine_.vocabulary() == 0) return error{error_code::invalid_argument, "a model without a vocabulary"};
    const std::size_t length = committed.size() + pending.size(), wanted = rows.size() / engine_.vocabulary();
    if (wanted > length) return error{error_code::invalid_argument, "logits of more tokens than there are"};
    // A call that failed leaves tokens behind that the engine has not taken.
    tokens_.resize(std::min(tokens_.size(), static_cast<std::size_t>(engine_.length())));
    const auto token_at = [&](std::size_t i) { return i < committed.size() ? committed[i] : pending[i - committed.size()]; };
    std::size_t same = 0;
    while (same < std::min(tokens_.size(), length - wanted) && tokens_[same] == token_at(same)) ++same;
    if (same < engine_.length()) {
      const auto done = engine_.truncate(same);
      if (!done) return done;
      tokens_.resize(same);
    }
    if (same == length) return {};
    try {
      for (std::size_t i = same; i < length; ++i) tokens_.push_back(token_at(i));
    } catch (...) {
      return error{error_code::out_of_memory, "tokens of a draft model"};
    }
    return engine_.forward(std::span(tokens_).subspan(same), rows);
  }

  Engine engine_;
  std::vector<token_id> tokens_;  ///< whose rows the engine has
  bool is_beyond_ = false;
};

}  // namespace kvexact

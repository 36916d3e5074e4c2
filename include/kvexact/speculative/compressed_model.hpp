// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/speculative/token.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// The target's own model on a compressed cache, as a `logit_model` (VeriCache, arXiv 2605.17613). `Cache` is a `draft_cache`, empty when it is
/// handed over. The engine, which has `vocabulary()` besides, outlives this object and stays where it is.
///
/// Rows that drafting wrote were computed on lossy rows before them: `synchronise` takes them back, and takes the rows of the committed tokens
/// from the target. Where the cache observes attention, such a token runs through the model once more, on the draft cache, for its attention
/// alone.
template <readable_cache Engine, class Cache>
  requires token_stepper<Engine, Cache>
class compressed_model {
  static_assert(std::same_as<typename Engine::scalar, typename Cache::scalar>,
                "kvexact: the draft cache of a compressed_model must have the engine's number format");

 public:
  compressed_model(Engine& target, Cache cache) noexcept : target_(&target), cache_(std::move(cache)) {}

  [[nodiscard]] const Cache& cache() const noexcept { return cache_; }
  [[nodiscard]] std::size_t vocabulary() const noexcept { return target_->vocabulary(); }
  [[nodiscard]] std::uint64_t max_draft() const noexcept { return cache_.max_rollback(); }

  result<void> synchronise(std::span<const token_id> committed) noexcept {
    const std::uint64_t goal = committed.empty() ? 0 : committed.size() - 1;
    const auto taken_back = take_back(0);
    if (!taken_back) return taken_back;
    while (verified_ < goal) {
      std::uint64_t end = verified_;
      while (end < goal && !observes_anywhere(cache_, end)) ++end;
      for (std::uint32_t l = 0; l < cache_.shape().layers(); ++l) {
        const std::uint64_t begin = cache_.length(l);  // a call that failed may have got further in some layers
        if (begin >= end) continue;
        const auto done = cache_.append(l, target_->rows(l, begin), end - begin);
        if (!done) return done;
      }
      verified_ = end;
      if (verified_ == goal) break;
      drafted_beyond_ = true;
      replay again{&cache_, target_, verified_, {}};
      const auto done = target_->step(committed[static_cast<std::size_t>(verified_)], verified_, again, {});
      if (!done) return done;
      drafted_beyond_ = false;
      ++verified_;
    }
    return {};
  }

  /// The committed tokens must be those of the last `synchronise`.
  result<void> logits(std::span<const token_id> committed, std::span<const token_id> pending, std::span<float> rows) noexcept {
    const std::size_t wanted = vocabulary() == 0 ? 0 : rows.size() / vocabulary();
    if (committed.empty() || committed.size() - 1 != verified_ || wanted > pending.size() + 1 || wanted * vocabulary() != rows.size())
      return error{error_code::invalid_argument, "logits of tokens that the draft cache is not synchronised with"};
    if (pending.size() >= max_draft()) return error{error_code::out_of_range, "more drafts than the draft cache can take back"};
    try {
      drafted_.reserve(pending.size() + 1);
    } catch (...) {
      return error{error_code::out_of_memory, "tokens of a draft cache"};
    }
    const auto token_at = [&](std::size_t i) { return i == 0 ? committed.back() : pending[i - 1]; };
    std::size_t same = 0;  // tokens that have their rows, and of which no logits are asked
    const std::size_t first = pending.size() + 1 - wanted;
    while (same < std::min(drafted_.size(), first) && drafted_[same] == token_at(same)) ++same;
    const auto taken_back = take_back(same);
    if (!taken_back) return taken_back;
    for (std::size_t i = same; i <= pending.size(); ++i) {
      drafted_beyond_ = true;
      const auto out = i < first ? std::span<float>() : rows.subspan((i - first) * vocabulary(), vocabulary());
      const auto done = target_->step(token_at(i), verified_ + i, cache_, out);
      if (!done) return done;
      drafted_beyond_ = false;
      drafted_.push_back(token_at(i));
    }
    return {};
  }

 private:
  /// The draft cache for a token whose rows the target has, and whose attention is all that is wanted.
  struct replay {
    Cache* cache;
    const Engine* target;
    std::uint64_t position;
    std::vector<float> weights;

    result<void> append(std::uint32_t layer, const layer_tensors<const typename Cache::scalar>&, std::uint64_t) noexcept {
      return cache->append(layer, target->rows(layer, position), 1);
    }
    result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) noexcept {
      return attend_observed(*cache, layer, head, position, call, weights);
    }
  };

  static_assert(token_stepper<Engine, replay>, "kvexact: step of an engine must take any cache: a template (engine/positional_decoder.hpp)");

  /// Keeps the first `kept` tokens behind the verified ones.
  result<void> take_back(std::size_t kept) noexcept {
    if (drafted_.size() <= kept && !drafted_beyond_) return {};
    std::uint64_t longest = 0;
    for (std::uint32_t l = 0; l < cache_.shape().layers(); ++l) longest = std::max(longest, cache_.length(l));
    if (longest > verified_ + kept) {
      const auto done = cache_.truncate(verified_ + kept);
      if (!done) return done;
    }
    drafted_.resize(std::min(drafted_.size(), kept));
    drafted_beyond_ = false;
    return {};
  }

  Engine* target_;
  Cache cache_;
  std::uint64_t verified_ = 0;       ///< rows of the cache that come from the target
  std::vector<token_id> drafted_;    ///< whose rows follow
  bool drafted_beyond_ = false;      ///< some layers may hold one token more
};

}  // namespace kvexact

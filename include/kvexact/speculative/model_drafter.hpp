// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/drafter.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// Drafts one token after the other with a model: a small one, or the target's own on a compressed cache.
template <logit_model Model>
class model_drafter {
 public:
  explicit model_drafter(Model model) noexcept : model_(std::move(model)) {}

  [[nodiscard]] const Model& model() const noexcept { return model_; }
  [[nodiscard]] std::uint64_t max_draft() const noexcept { return model_.max_draft(); }
  [[nodiscard]] result<void> synchronise(std::span<const token_id> committed) noexcept { return model_.synchronise(committed); }

  /// Errors: those of the model and of the sampler; invalid_argument for a block that is full or of another vocabulary; out_of_memory.
  template <acceptance_rule Rule, token_sampler Sampler>
  [[nodiscard]] result<void> propose(const draft_request<Rule, Sampler>& request, draft_block& block) noexcept {
    try {
      const std::span<const token_id> held = block.view().tokens;
      pending_.assign(request.pending.begin(), request.pending.end());
      pending_.insert(pending_.end(), held.begin(), held.end());
      Sampler ahead = request.sampler;
      for (const token_id token : held) {
        if (auto read = ahead.commit(token); !read) return read;
      }
      for (std::size_t i = 0; i < request.wanted; ++i) {
        const std::span<float> row = block.next_row();
        if (row.size() != model_.vocabulary())
          return error{error_code::invalid_argument, "a block of drafts has no room, or another vocabulary"};
        if (auto run = model_.logits(request.committed, pending_, row); !run) return run;
        const double top = request.more == nullptr ? 1 : detail::top_probability(row);
        const auto next = ahead.next(row);
        if (!next) return next.error();
        const token_id token = request.rule.draft(request.committed.size() + pending_.size(), next->target);
        if (auto pushed = block.push(token, next->target); !pushed) return pushed;
        if (request.more != nullptr && !request.more(request.context, top)) break;
        if (auto read = ahead.commit(token); !read) return read;
        pending_.push_back(token);
      }
      return {};
    } catch (...) {
      return error{error_code::out_of_memory, "draft tokens"};
    }
  }

 private:
  Model model_;
  std::vector<token_id> pending_;
};

}  // namespace kvexact

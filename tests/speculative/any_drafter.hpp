// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/drafter.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact::test {

/// Any drafter for one rule, so that the decoder is compiled once for all of them.
template <class Rule>
class any_drafter {
 public:
  template <class D>
    requires(!std::same_as<D, any_drafter>) && drafter<D, Rule, standard_sampler>
  any_drafter(D drafts) : held_(std::make_unique<holder<D>>(std::move(drafts))) {}

  [[nodiscard]] std::uint64_t max_draft() const noexcept { return held_->max_draft(); }
  result<void> synchronise(std::span<const token_id> committed) noexcept { return held_->synchronise(committed); }
  result<void> propose(const draft_request<Rule, standard_sampler>& request, draft_block& block) noexcept { return held_->propose(request, block); }

  template <class D>
  [[nodiscard]] const D& as() const {
    return dynamic_cast<const holder<D>&>(*held_).drafts;
  }

 private:
  struct base {
    virtual ~base() = default;
    [[nodiscard]] virtual std::uint64_t max_draft() const = 0;
    virtual result<void> synchronise(std::span<const token_id> committed) = 0;
    virtual result<void> propose(const draft_request<Rule, standard_sampler>& request, draft_block& block) = 0;
  };
  template <class D>
  struct holder final : base {
    explicit holder(D own) : drafts(std::move(own)) {}
    [[nodiscard]] std::uint64_t max_draft() const override { return drafts.max_draft(); }
    result<void> synchronise(std::span<const token_id> committed) override { return drafts.synchronise(committed); }
    result<void> propose(const draft_request<Rule, standard_sampler>& request, draft_block& block) override { return drafts.propose(request, block); }
    D drafts;
  };

  std::unique_ptr<base> held_;
};

}  // namespace kvexact::test

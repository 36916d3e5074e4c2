// expect: kvexact: chain_level must be given a drafter (speculative/drafter.hpp)
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/speculative/chain.hpp>

struct my_model {
  std::size_t vocabulary() const noexcept;
  std::uint64_t max_draft() const noexcept;
  kvexact::result<void> synchronise(std::span<const kvexact::token_id> committed) noexcept;
  kvexact::result<void> logits(std::span<const kvexact::token_id> committed, std::span<const kvexact::token_id> pending, std::span<float> rows) noexcept;
};

// A model is no drafter: model_drafter makes one of it.
using level = kvexact::chain_level<my_model, my_model>;

auto draft(level& drafts, const kvexact::draft_request<kvexact::greedy, kvexact::standard_sampler>& request, kvexact::draft_block& block) {
  return drafts.propose(request, block);
}

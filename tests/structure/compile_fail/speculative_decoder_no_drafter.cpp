// expect: kvexact: speculative_decoder must be given a drafter (speculative/drafter.hpp)
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/speculative/speculative_decoder.hpp>

struct my_engine {
  std::uint32_t vocabulary() const noexcept;
  std::uint64_t length() const noexcept;
  std::uint64_t capacity() const noexcept;
  std::uint64_t max_rollback() const noexcept;
  kvexact::result<void> forward(std::span<const std::uint32_t> tokens, std::span<float> logits) noexcept;
  kvexact::result<void> truncate(std::uint64_t length) noexcept;
};

// Proposes, but cannot be brought back to the committed tokens.
struct never_synchronises {
  std::uint64_t max_draft() const noexcept;
  kvexact::result<void> propose(const kvexact::draft_request<kvexact::greedy, kvexact::standard_sampler>& request, kvexact::draft_block& block) noexcept;
};

using decoder = kvexact::speculative_decoder<my_engine, never_synchronises>;
constexpr auto size = sizeof(decoder);

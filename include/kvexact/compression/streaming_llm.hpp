// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <kvexact/compression/dropper.hpp>

namespace kvexact {

struct streaming_llm_options {
  std::uint32_t sinks = 4;
  std::uint32_t window = 256;
  std::uint32_t interval = 16;  ///< tokens between two evictions, at least 1: the head holds up to this many more than sinks + window
  std::uint32_t max_rollback = 32;
};

/// StreamingLLM (arXiv 2309.17453): the first few tokens, on which attention rests whatever they say, and the newest ones. No attention is
/// needed. Entries keep their absolute positions; the paper counts them anew within the cache.
class keep_newest {
 public:
  using options = streaming_llm_options;
  struct summary {};
  struct memory {};

  [[nodiscard]] static result<keep_newest> make(const layer_shape&, const options& chosen) noexcept {
    return keep_newest(
        {.sinks = chosen.sinks, .budget = 0, .window = chosen.window, .interval = chosen.interval, .max_rollback = chosen.max_rollback});
  }

  [[nodiscard]] const dropper_options& eviction() const noexcept { return eviction_; }

 private:
  explicit keep_newest(const dropper_options& eviction) noexcept : eviction_(eviction) {}

  dropper_options eviction_;
};

/// `streaming_llm<bf16>::make(shape, {.sinks = 4, .window = 512})`
template <cache_scalar Scalar>
using streaming_llm = dropper<Scalar, keep_newest>;

static_assert(layer_compressor<streaming_llm<bf16>> && !observes_attention<streaming_llm<bf16>>);

}  // namespace kvexact

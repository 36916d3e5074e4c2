// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <common/outcome.hpp>
#include <kvexact/speculative/speculative_decoder.hpp>

#include "sequence_engine.hpp"

namespace kvexact::examples {

using seconds = std::chrono::duration<double>;
inline double since(std::chrono::steady_clock::time_point start) { return seconds(std::chrono::steady_clock::now() - start).count(); }

/// What to decode, and how.
struct request {
  std::vector<std::uint32_t> prompt;
  std::uint64_t max_tokens = 64;
  std::vector<std::uint32_t> ends;
  sampling_parameters sampling;
  std::uint64_t seed = 0;
  std::uint32_t longest_draft = 16;
};

struct generated {
  std::vector<std::uint32_t> tokens;  ///< after the prompt
  std::size_t draft_bytes = 0;        ///< of the compressed cache at the end, if there is one
  std::size_t rounds = 0, proposed = 0, accepted = 0;
  float smallest_gap = std::numeric_limits<float>::infinity();
  double seconds = 0;
  const char* level = "";
};

inline failure as_failure(const error& why) { return {why.code, why.message()}; }

/// All rounds of a sequence; `rule` and `length` as chosen, `drafts` any.
template <class Drafter, class Rule, class Length>
outcome<generated> decode(sequence_engine& engine, Drafter drafts, Rule rule, Length length, const request& wanted, bool probe) {
  const auto sampler = standard_sampler::make(wanted.sampling);
  if (!sampler) return as_failure(sampler.error());
  auto made = speculative_decoder<sequence_engine, Drafter, Rule, Length>::make(
      engine, std::move(drafts), std::move(rule), std::move(length),
      {.sampler = *sampler, .stops = {.end_tokens = wanted.ends, .max_new_tokens = wanted.max_tokens}, .longest_draft = wanted.longest_draft});
  if (!made) return as_failure(made.error());
  const auto begun = made->begin(wanted.prompt);
  if (!begun) return as_failure(begun.error());
  if (probe) {
    const auto found = made->probe();
    if (!found) return as_failure(found.error());
  }
  generated all;
  const auto start = std::chrono::steady_clock::now();
  while (!made->stop()) {
    const auto report = made->round();
    if (!report) return as_failure(report.error());
    all.tokens.insert(all.tokens.end(), report->committed.begin(), report->committed.end());
    ++all.rounds;
    all.proposed += report->proposed;
    all.accepted += report->accepted;
    all.smallest_gap = std::min(all.smallest_gap, report->smallest_gap);
  }
  all.seconds = since(start);
  all.level = to_string(made->level());
  if constexpr (requires { made->drafts().model().cache().bytes(); }) all.draft_bytes = made->drafts().model().cache().bytes();
  return all;
}

/// A drafter that never drafts.
struct no_drafter {
  [[nodiscard]] std::uint64_t max_draft() const noexcept { return 0; }
  result<void> synchronise(std::span<const token_id>) noexcept { return {}; }
  template <class Rule, class Sampler>
  result<void> propose(const draft_request<Rule, Sampler>&, draft_block&) noexcept {
    return {};
  }
};

/// Whether two engines hold the same keys and values, bit by bit.
[[nodiscard]] inline bool equal_rows(const sequence_engine& a, const sequence_engine& b) {
  if (a.length() != b.length()) return false;
  std::vector<std::byte> of_a, of_b;
  for (std::uint64_t t = 0; t < a.length(); ++t) {
    kvexact::detail::read_rows(a, t, of_a);
    kvexact::detail::read_rows(b, t, of_b);
    if (of_a != of_b) return false;
  }
  return true;
}

}  // namespace kvexact::examples

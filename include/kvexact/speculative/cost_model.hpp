// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>

namespace kvexact {

/// What a round of speculative decoding takes, as a draft length is chosen by it.
///
/// `round_seconds(length)`: drafting `length` tokens and verifying them, up to the moment when the next round can begin; with length 0 a
/// step of plain decoding on the full cache. Positive, finite, and not falling with the length.
template <class C>
concept round_cost = std::copyable<C> && requires(const C& cost, std::uint32_t length) {
  { cost.round_seconds(length) }
  noexcept->std::same_as<double>;
};

/// A round by what was measured, all in seconds and for the batch as it is: a draft step, a verification of width w (of w - 1 drafts) as
/// verify + (w - 1) verify_row, and the transfer of a full cache, which runs beside both. A step of plain decoding is `plain`.
struct measured_cost {
  double draft = 0;
  double verify = 0;
  double verify_row = 0;
  double transfer = 0;
  double plain = 0;

  [[nodiscard]] double round_seconds(std::uint32_t length) const noexcept {
    if (length == 0) return plain;
    return std::max(length * (draft + verify_row) + verify, transfer);
  }
};

/// A batch whose draft caches are resident and whose full caches come over a link when they verify, where only the traffic of memory and
/// link counts. Sizes in bytes, bandwidths in bytes a second.
struct offload_cost {
  double weights = 0;         ///< of the model
  double full_cache = 0;      ///< of one request
  double draft_ratio = 0.25;  ///< draft cache / full cache
  double transfer_ratio = 1;  ///< what crosses the link / full cache: 1 for a plain copy, refinement bits / 16 for a refinement
  double memory_bandwidth = 1;
  double link_bandwidth = 1;
  std::uint32_t batch = 1;

  /// One iteration of the batch when each request verifies once in `period` iterations, staggered, and drafts in the others:
  /// max((weights + batch full (draft_ratio + 1 / period)) / memory, batch full transfer_ratio / (period link)).
  [[nodiscard]] double iteration_seconds(double period) const noexcept {
    const double caches = batch * full_cache;
    return std::max((weights + caches * (draft_ratio + 1 / period)) / memory_bandwidth,
                    caches * transfer_ratio / (period * link_bandwidth));
  }
  /// Plain decoding of the batch, with its full caches resident.
  [[nodiscard]] double plain_seconds() const noexcept { return (weights + batch * full_cache) / memory_bandwidth; }
  /// A round drafts in `length` iterations and verifies in one more.
  [[nodiscard]] double round_seconds(std::uint32_t length) const noexcept {
    return length == 0 ? plain_seconds() : (length + 1.0) * iteration_seconds(length + 1.0);
  }
  /// The shortest period whose iterations do not wait for the link; 0 where none does.
  [[nodiscard]] double hidden_period() const noexcept {
    const double caches = batch * full_cache;
    return std::max(0.0, caches * (transfer_ratio * memory_bandwidth / link_bandwidth - 1) / (weights + draft_ratio * caches));
  }
};

/// Tokens that a round commits, where each draft is accepted with probability `acceptance` in [0, 1], the verifier's own token included:
/// (1 - a^(length + 1)) / (1 - a).
[[nodiscard]] inline double expected_tokens(double acceptance, std::uint32_t length) noexcept {
  const double rejected = 1 - acceptance;
  if (rejected * (length + 1.0) < 1e-8) return length + 1.0;
  return (1 - std::pow(acceptance, length + 1.0)) / rejected;
}

/// A draft length, and the committed tokens a second that it is expected to give.
struct rated_length {
  std::uint32_t length = 0;
  double rate = 0;
};

/// The best of the lengths 0 to `longest`; the shorter one of equals.
template <round_cost Cost>
[[nodiscard]] rated_length best_length(const Cost& cost, double acceptance, std::uint32_t longest) noexcept {
  rated_length best{0, 1 / cost.round_seconds(0)};
  for (std::uint32_t length = 0; length++ < longest;) {
    const double rate = expected_tokens(acceptance, length) / cost.round_seconds(length);
    if (rate > best.rate) best = {length, rate};
  }
  return best;
}

/// The acceptance from which on some length up to `longest` is faster than plain decoding; 1 if none ever is.
template <round_cost Cost>
[[nodiscard]] double break_even_acceptance(const Cost& cost, std::uint32_t longest) noexcept {
  double below = 0;
  double above = 1;
  for (int i = 0; i < 40; ++i) {
    const double middle = (below + above) / 2;
    (best_length(cost, middle, longest).length > 0 ? above : below) = middle;
  }
  return above;
}

}  // namespace kvexact

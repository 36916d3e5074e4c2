// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvexact/compression/compressor.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

namespace detail {

/// Scores (at least one) become weights that sum to 1; returns the logarithm of the sum of exp(score).
inline float softmax(std::span<float> scores) noexcept {
  const float most = *std::max_element(scores.begin(), scores.end());
  double mass = 0;
  for (float& each : scores) {
    each = std::exp(each - most);
    mass += static_cast<double>(each);
  }
  for (float& each : scores) each = static_cast<float>(static_cast<double>(each) / mass);
  return static_cast<float>(static_cast<double>(most) + std::log(mass));
}

/// Whether a call fits a head of `entries` entries; see `attends_on_codes` for the errors.
[[nodiscard]] inline result<void> expect_call(const layer_shape& shape, std::uint32_t head, std::size_t entries, const attention_call& call) noexcept {
  const std::size_t queries = call.log_mass.size();
  if (head >= shape.kv_heads || queries == 0 || call.queries.size() != queries * shape.key_dim || call.out.size() != queries * shape.value_dim)
    return error{error_code::shape_mismatch, "queries or room for the outcome of attention have another size"};
  if (entries == 0) return error{error_code::invalid_argument, "attention over no tokens"};
  return {};
}

/// Adds what the same query finds in other positions: `out` [value_dim] and `log_mass` of both, each weighted by its mass. A log_mass of
/// -infinity stands for no positions.
inline void merge_attention(std::span<float> out, float& log_mass, std::span<const float> other, float other_mass) noexcept {
  const float most = std::max(log_mass, other_mass);
  if (std::isinf(most)) return;
  const float mine = std::exp(log_mass - most), theirs = std::exp(other_mass - most);
  for (std::size_t c = 0; c < out.size(); ++c) out[c] = (mine * out[c] + theirs * other[c]) / (mine + theirs);
  log_mass = most + std::log(mine + theirs);
}

}  // namespace detail

/// Attention over what a compressor gives back of a head, and what it summarises. `weights` [query heads, entries], if not empty, receives
/// the softmax over the entries, for `observes_attention`. Errors: shape_mismatch (sizes), invalid_argument (nothing to attend to), out_of_memory.
template <layer_compressor C>
[[nodiscard]] result<void> attend_materialised(const C& cache, std::uint32_t head, const attention_call& call,
                                               std::span<float> weights = {}) noexcept {
  const std::size_t queries = call.log_mass.size(), count = cache.entries(head);
  const std::size_t key_dim = cache.shape().key_dim, value_dim = cache.shape().value_dim;
  const auto usable = detail::expect_call(cache.shape(), head, count, call);
  if (!usable) return usable;
  if (!weights.empty() && weights.size() != queries * count)
    return error{error_code::shape_mismatch, "room for the weights of attention has another size"};
  try {
    std::vector<std::uint64_t> positions(count);
    std::vector<float> keys(count * key_dim), values(count * value_dim), scores(count);
    const auto done = cache.materialise(head, {positions, keys, values});
    if (!done) return done;
    for (std::size_t q = 0; q < queries; ++q) {
      for (std::size_t i = 0; i < count; ++i) {
        float sum = 0;
        for (std::size_t c = 0; c < key_dim; ++c) sum += call.queries[q * key_dim + c] * keys[i * key_dim + c];
        scores[i] = sum;
      }
      call.log_mass[q] = detail::softmax(scores);
      const auto out = call.out.subspan(q * value_dim, value_dim);
      std::fill(out.begin(), out.end(), 0.0F);
      for (std::size_t i = 0; i < count; ++i) {
        if (!weights.empty()) weights[q * count + i] = scores[i];
        for (std::size_t c = 0; c < value_dim; ++c) out[c] += scores[i] * values[i * value_dim + c];
      }
    }
    if constexpr (summarises_attention<C>) {
      std::vector<float> other(queries * value_dim), mass(queries);
      const auto summarised = cache.summarise(head, {call.queries, other, mass});
      if (!summarised) return summarised;
      for (std::size_t q = 0; q < queries; ++q)
        detail::merge_attention(call.out.subspan(q * value_dim, value_dim), call.log_mass[q], std::span(other).subspan(q * value_dim, value_dim), mass[q]);
    }
  } catch (...) {
    return error{error_code::out_of_memory, "scratch memory"};
  }
  return {};
}

/// The same, on codes where the compressor can.
template <layer_compressor C>
[[nodiscard]] result<void> attend(const C& cache, std::uint32_t head, const attention_call& call) noexcept {
  if constexpr (attends_on_codes<C>) {
    return cache.attend(head, call);
  } else {
    return attend_materialised(cache, head, call);
  }
}

}  // namespace kvexact

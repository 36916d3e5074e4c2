// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/entropy/frequency_table.hpp>
#include <kvexact/residual/table_builder.hpp>

namespace kvexact {

/// Symbols seen in one context of a residual model.
template <class Grid>
struct context_counts {
  std::int32_t context = 0;
  std::array<std::uint64_t, static_cast<std::size_t>(Grid::alphabet)> counts{};
};

/// Most tables that a model may have.
inline constexpr std::uint32_t most_clustered_tables = 4096;

/// Few tables for many contexts, and which context uses which.
struct table_clusters {
  std::vector<frequency_table> tables;
  std::vector<std::uint16_t> table_of;  ///< one for each context given
};

namespace detail {

/// Bits of each symbol under a table; symbols without a frequency are escaped.
template <class Grid>
[[nodiscard]] std::array<float, static_cast<std::size_t>(Grid::alphabet)> symbol_bits(const frequency_table& table) noexcept {
  std::array<float, static_cast<std::size_t>(Grid::alphabet)> bits{};
  const auto bits_of = [&](int s) { return static_cast<float>(table.precision() - std::log2(static_cast<double>(table.frequency(s)))); };
  const float escape = bits_of(Grid::escape_symbol);
  for (int s = 0; s < Grid::escape_symbol; ++s)
    bits[static_cast<std::size_t>(s)] = table.frequency(s) > 0 ? bits_of(s) : escape + static_cast<float>(Grid::format::bit_count);
  bits[static_cast<std::size_t>(Grid::escape_symbol)] = escape;
  return bits;
}

}  // namespace detail

/// Groups contexts whose distributions are so alike that one table serves them, since decoding speed depends on how many tables are in
/// use at a time. Distributions are counts plus the published mixture worth `prior_strength` counts, so contexts that were never seen
/// find a table too. From the most frequent context down, each takes the table that codes it best, or founds a new one where that would
/// cost more than `tolerance` bits a value and `table_bits` bits in all; then tables are made anew from all their contexts, and the
/// contexts choose once more.
/// Errors: unsupported (more than `most_clustered_tables`), out_of_memory, those of frequency_table.
template <class Grid>
[[nodiscard]] result<table_clusters> cluster_contexts(std::span<const context_counts<Grid>> contexts, int precision) noexcept {
  constexpr double prior_strength = 16;
  constexpr double tolerance = 0.002;
  constexpr double table_bits = 250;
  constexpr std::size_t alphabet = static_cast<std::size_t>(Grid::alphabet);
  using weights = std::array<float, alphabet>;
  try {
    std::vector<std::array<double, alphabet>> prior(static_cast<std::size_t>(Grid::contexts));
    for (std::size_t c = 0; c < prior.size(); ++c) prior[c] = integrate_density<Grid>(static_cast<std::int32_t>(c), density::mixture());
    std::vector<double> seen(contexts.size());
    for (std::size_t i = 0; i < contexts.size(); ++i)
      seen[i] = std::accumulate(contexts[i].counts.begin(), contexts[i].counts.end(), 0.0, [](double sum, std::uint64_t n) { return sum + static_cast<double>(n); });
    std::vector<std::size_t> order(contexts.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return seen[a] > seen[b]; });

    const auto weigh = [&](std::size_t i) {
      weights sum;
      const auto& expected = prior[static_cast<std::size_t>(contexts[i].context)];
      for (std::size_t s = 0; s < alphabet; ++s)
        sum[s] = static_cast<float>(static_cast<double>(contexts[i].counts[s]) + prior_strength * expected[s]);
      return sum;
    };
    const auto cost = [](const weights& weight, const weights& bits) {
      std::array<float, 16> sum{};  // several sums, so that the loop vectorises
      for (std::size_t s = 0; s < alphabet; s += sum.size())
        for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += weight[s + k] * bits[s + k];
      return std::accumulate(sum.begin(), sum.end(), 0.0);
    };
    static_assert(alphabet % 16 == 0);

    table_clusters clusters;
    clusters.table_of.resize(contexts.size());
    std::vector<weights> bits;
    const auto best_table = [&](const weights& weight) {
      std::pair<double, std::size_t> best{INFINITY, 0};
      for (std::size_t t = 0; t < bits.size(); ++t) best = std::min(best, {cost(weight, bits[t]), t});
      return best;
    };
    for (const std::size_t i : order) {
      const weights weight = weigh(i);
      const auto [best_cost, best] = best_table(weight);
      clusters.table_of[i] = static_cast<std::uint16_t>(best);
      if (!bits.empty() && seen[i] == 0) continue;
      const auto own = blend_counts(contexts[i].counts, prior[static_cast<std::size_t>(contexts[i].context)], prior_strength, precision);
      if (!own) return own.error();
      const weights own_bits = detail::symbol_bits<Grid>(*own);
      if (best_cost - cost(weight, own_bits) <= tolerance * seen[i] + table_bits) continue;
      if (clusters.tables.size() == most_clustered_tables) return error{error_code::unsupported, "more than 4096 frequency tables"};
      clusters.table_of[i] = static_cast<std::uint16_t>(clusters.tables.size());
      clusters.tables.push_back(*own);
      bits.push_back(own_bits);
    }

    std::vector<std::array<std::uint64_t, alphabet>> merged(clusters.tables.size());
    std::vector<std::array<double, alphabet>> merged_prior(clusters.tables.size());
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      if (seen[i] == 0) continue;
      const std::size_t t = clusters.table_of[i];
      for (std::size_t s = 0; s < alphabet; ++s) {
        merged[t][s] += contexts[i].counts[s];
        merged_prior[t][s] += prior[static_cast<std::size_t>(contexts[i].context)][s];
      }
    }
    for (std::size_t t = 0; t < merged.size(); ++t) {
      // Where nothing was seen at all, the one table stays what it is.
      if (std::all_of(merged[t].begin(), merged[t].end(), [](std::uint64_t n) { return n == 0; })) continue;
      const auto table = blend_counts(merged[t], merged_prior[t], prior_strength, precision);
      if (!table) return table.error();
      clusters.tables[t] = *table;
      bits[t] = detail::symbol_bits<Grid>(*table);
    }
    for (const std::size_t i : order) clusters.table_of[i] = static_cast<std::uint16_t>(best_table(weigh(i)).second);
    return clusters;
  } catch (...) {
    return error{error_code::out_of_memory, "frequency tables"};
  }
}

}  // namespace kvexact

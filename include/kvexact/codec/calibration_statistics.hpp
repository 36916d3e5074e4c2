// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <kvexact/bitstream/bit_io.hpp>
#include <kvexact/codec/profile_data.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/entropy/frequency_table.hpp>
#include <kvexact/numeric/fixed_point.hpp>
#include <kvexact/residual/residual_model.hpp>
#include <kvexact/residual/table_clusters.hpp>
#include <kvexact/tensor/tile.hpp>

namespace kvexact::detail {

/// Of finite values only.
struct running_average {
  std::uint64_t count = 0;
  double sum = 0;

  void add(double value) noexcept {
    if (!std::isfinite(value)) return;
    ++count;
    sum += value;
  }
  [[nodiscard]] double average() const noexcept { return count == 0 ? 0.0 : sum / static_cast<double>(count); }
};

/// log2 of the root of a mean square in 1/256 octave.
[[nodiscard]] inline std::int16_t log2_of_root(double mean_square) noexcept {
  const double octaves = mean_square > 0 ? 128.0 * std::log2(mean_square) : -std::numeric_limits<double>::infinity();
  return static_cast<std::int16_t>(std::lrint(std::clamp(octaves, -32768.0, 32767.0)));
}

/// Factor of a storage scale: what is not positive, finite and normal counts as 1.
[[nodiscard]] inline double factor_of(std::uint32_t storage_scale) noexcept {
  return is_positive_normal(storage_scale) ? static_cast<double>(std::bit_cast<float>(storage_scale)) : 1.0;
}

/// Counts the symbols of one model, and makes its tables from them.
template <class Residual>
class symbol_counter {
 public:
  using residual = Residual;
  using bits_type = typename residual::bits_type;
  static constexpr std::size_t own_contexts = residual::contexts - residual::shared_contexts;

  explicit symbol_counter(std::size_t tiles) : contexts_(residual::shared_contexts + tiles * own_contexts) {
    for (std::size_t i = 0; i < contexts_.size(); ++i) {
      const std::size_t own = i < residual::shared_contexts ? i : residual::shared_contexts + (i - residual::shared_contexts) % own_contexts;
      contexts_[i].context = static_cast<std::int32_t>(own);
    }
  }

  /// `values` and `means` (real units) as the tile lies; `token_scales`: one a token, or null.
  void count(const tile_shape& where, std::size_t tile, const bits_type* values, const std::uint32_t* means, const std::int16_t* sigmas,
             const std::int32_t* token_scales, std::uint32_t storage_scale) {
    const auto tokens = static_cast<std::size_t>(where.tokens.size());
    const integer_divider divide(storage_scale);
    const std::int32_t shift = is_positive_normal(storage_scale) ? log2_in_256ths(storage_scale) : 0;
    typename residual::row row;
    std::array<std::int32_t, row_lanes> row_sigmas{};
    std::array<std::uint32_t, row_lanes> row_means{};
    std::array<std::uint8_t, row_lanes> symbols{};
    std::array<std::byte, 256> scratch{};
    for (std::size_t c = 0; c < where.channels(); ++c) {
      for (std::size_t first = 0; first < tokens; first += row_lanes) {
        const std::size_t n = std::min<std::size_t>(row_lanes, tokens - first);
        for (std::size_t i = 0; i < row_lanes; ++i) {
          const std::size_t t = std::min(first + i, tokens - 1);
          row_means[i] = divide(means[c * where.stride + t]);
          row_sigmas[i] = sigmas[c] - shift + (token_scales != nullptr ? token_scales[t] : 0);
        }
        residual::prepare(row_means.data(), row_sigmas.data(), row);
        bit_writer raw(scratch);
        const bits_type* const from = values + c * where.stride + first;
        residual::to_symbols(from, row, symbols.data(), static_cast<int>(n));
        residual::put_raw(from, row, symbols.data(), raw, static_cast<int>(n));
        raw_bits_ += raw.bits();
        values_ += n;
        for (std::size_t i = 0; i < n; ++i) {
          const auto context = static_cast<std::size_t>(row.context[i]);
          ++contexts_[context + (context < residual::shared_contexts ? 0 : tile * own_contexts)].counts[symbols[i]];
        }
      }
    }
  }

  /// Tables of `precision` bits, and the code length, for the model. Errors: those of cluster_contexts.
  [[nodiscard]] result<void> build(model_parameters& model, int precision) const {
    constexpr std::size_t alphabet = static_cast<std::size_t>(residual::alphabet);
    auto clusters = cluster_contexts<residual>(contexts_, precision);
    if (!clusters) return clusters.error();
    double bits = static_cast<double>(raw_bits_);
    std::vector<std::array<float, alphabet>> symbol_bits;
    for (const frequency_table& table : clusters->tables) symbol_bits.push_back(detail::symbol_bits<residual>(table));
    for (std::size_t i = 0; i < contexts_.size(); ++i) {
      for (std::size_t s = 0; s < alphabet; ++s)
        bits += static_cast<double>(contexts_[i].counts[s]) * static_cast<double>(symbol_bits[clusters->table_of[i]][s]);
    }
    model.bits_per_value_q8 = static_cast<std::uint32_t>(std::lrint(256 * bits / static_cast<double>(std::max<std::uint64_t>(values_, 1))));
    const auto shared_end = clusters->table_of.begin() + residual::shared_contexts;
    model.shared_tables.assign(clusters->table_of.begin(), shared_end);
    model.tile_tables.assign(shared_end, clusters->table_of.end());
    model.tables = std::move(clusters->tables);
    return {};
  }

 private:
  std::vector<context_counts<residual>> contexts_;  // the shared ones, then the others tile by tile
  std::uint64_t values_ = 0;
  std::uint64_t raw_bits_ = 0;
};

}  // namespace kvexact::detail

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact {

/// Neighbouring channels of a tile.
struct channel_run {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

/// Channels of one tile that are coded together, one after the other through the runs: some rotary pairs of a head, whole heads, or all.
struct channel_block {
  std::uint32_t head = 0;                ///< the first one
  std::uint32_t first = 0;               ///< number of channels of the tile that are coded before
  std::uint32_t count = 0;
  std::array<channel_run, 2> both{};     ///< half-split pairs make two runs
  std::uint32_t runs_used = 1;

  [[nodiscard]] std::span<const channel_run> runs() const noexcept { return std::span(both).first(runs_used); }
  /// Channel of the `i`-th in coding order, i < count.
  [[nodiscard]] std::uint32_t channel(std::uint32_t i) const noexcept {
    return i < both[0].count ? both[0].first + i : both[1].first + (i - both[0].count);
  }
};

/// The whole tile as one block.
[[nodiscard]] inline channel_block whole_tile(std::uint32_t channels) noexcept { return {0, 0, channels, {{{0, channels}, {}}}, 1}; }

/// Cuts the channels of a tile of `heads` heads with `dim` dimensions, the first `rotation.dim()` of them rotated if it holds keys, into blocks
/// of `size` channels within each head; partners of a rotary pair stay together. 0: one block. Throws std::bad_alloc.
[[nodiscard]] inline std::vector<channel_block> cut_into_blocks(std::uint32_t heads, std::uint32_t dim, cache_part part, const rotary& rotation,
                                                                std::uint32_t size) {
  if (size == 0) return {whole_tile(heads * dim)};
  std::vector<channel_block> blocks;
  std::uint32_t coded = 0;
  const auto add = [&](std::uint32_t head, channel_run a, channel_run b = {}) {
    blocks.push_back({head, coded, a.count + b.count, {{a, b}}, b.count > 0 ? 2U : 1U});
    coded += a.count + b.count;
  };
  const std::uint32_t rotated = part == cache_part::key ? rotation.dim() : 0;
  for (std::uint32_t head = 0; head < heads; ++head) {
    const std::uint32_t base = head * dim;
    if (size >= dim) {
      add(head, {base, dim});
      continue;
    }
    const std::uint32_t pairs_at_once = std::max(size / 2, 1U);
    for (std::uint32_t pair = 0; pair < rotated / 2; pair += pairs_at_once) {
      const std::uint32_t pairs = std::min(pairs_at_once, rotated / 2 - pair);
      if (rotation.pairing() == rotary_pairing::interleaved) {
        add(head, {base + 2 * pair, 2 * pairs});
      } else {
        add(head, {base + pair, pairs}, {base + rotated / 2 + pair, pairs});
      }
    }
    for (std::uint32_t d = rotated; d < dim; d += size) add(head, {base + d, std::min(size, dim - d)});
  }
  return blocks;
}

}  // namespace kvexact

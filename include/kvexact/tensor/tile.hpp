// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// One (layer, part) of a token range in coding order: [channel, token] with tokens contiguous and `stride` scalars from one channel to
/// the next. Channel = head * dim + index.
struct tile_shape {
  std::uint32_t layer = 0;
  cache_part part = cache_part::key;
  index_range tokens;
  std::uint32_t heads = 0;
  std::uint32_t dim = 0;
  std::size_t stride = 0;

  [[nodiscard]] constexpr std::uint32_t channels() const noexcept { return heads * dim; }
};

namespace detail {

/// Calls visit(row of a cache, first scalar of its channel in the tile, token index, number of tokens) block by block, so that the rows
/// stay in the first-level cache while they are transposed.
template <kv_cache Cache, class Visit>
void for_each_block(const Cache& cache, const tile_shape& shape, Visit&& visit) noexcept {
  constexpr std::uint64_t block = 32;
  std::array<typename Cache::value_type*, block> rows{};
  for (std::uint32_t head = 0; head < shape.heads; ++head) {
    for (std::uint64_t first = 0; first < shape.tokens.size(); first += block) {
      const std::uint64_t count = std::min(block, shape.tokens.size() - first);
      for (std::uint64_t t = 0; t < count; ++t) rows[t] = cache.row(shape.layer, shape.part, shape.tokens.begin + first + t, head);
      visit(rows.data(), static_cast<std::size_t>(head) * shape.dim, static_cast<std::size_t>(first), static_cast<std::size_t>(count));
    }
  }
}

}  // namespace detail

/// Copies the bits of a tile out of a cache, transposed. `out`: channels * stride.
template <kv_cache Cache, class Bits>
void gather_tile(const Cache& cache, const tile_shape& shape, Bits* out) noexcept {
  detail::for_each_block(cache, shape, [&](auto* const* rows, std::size_t channel, std::size_t first, std::size_t count) {
    for (std::uint32_t d = 0; d < shape.dim; ++d) {
      Bits* const to = out + (channel + d) * shape.stride + first;
      for (std::size_t t = 0; t < count; ++t) to[t] = static_cast<Bits>(rows[t][d].bits);
    }
  });
}

/// Copies the part of a tile that lies in `wanted` into a cache. `in`: channels * stride.
template <kv_cache Cache, class Bits>
void scatter_tile(const Cache& cache, const tile_shape& shape, index_range wanted, const Bits* in) noexcept {
  tile_shape inside = shape;
  inside.tokens = {std::max(shape.tokens.begin, wanted.begin), std::min(shape.tokens.end, wanted.end)};
  if (inside.tokens.begin >= inside.tokens.end) return;
  const auto skipped = static_cast<std::size_t>(inside.tokens.begin - shape.tokens.begin);
  detail::for_each_block(cache, inside, [&](auto* const* rows, std::size_t channel, std::size_t first, std::size_t count) {
    for (std::uint32_t d = 0; d < shape.dim; ++d) {
      const Bits* const from = in + (channel + d) * shape.stride + skipped + first;
      for (std::size_t t = 0; t < count; ++t) rows[t][d].bits = from[t];
    }
  });
}

}  // namespace kvexact

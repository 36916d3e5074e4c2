// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include <kvexact/codec/stream_format.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/residual/residual_model.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// How a stream is cut into chunks. A chunk is what is checked, lost or fetched as a whole.
struct chunk_options {
  /// Chunks end at multiples of this many tokens; rounded up to a multiple of `row_lanes`, at least one row.
  std::uint32_t tokens_per_chunk = 256;
  /// Layers go into one chunk up to this many values, so that its fixed cost (some 200 bytes) stays small. At most 2^21.
  std::uint32_t values_per_chunk = 1U << 19;
};

namespace detail {

/// Cuts the tokens [begin, end) over all layers into chunks and calls visit(record) for each until it returns false.
template <class Visit>
void for_each_chunk(const cache_shape& shape, chunk_options options, index_range tokens, Visit&& visit) {
  std::uint64_t widest = 1;
  for (const layer_shape& layer : shape.all()) widest = std::max<std::uint64_t>(widest, layer.channels());
  const std::uint64_t most_values = std::min<std::uint64_t>(options.values_per_chunk, max_chunk_values);
  const std::uint64_t most_rows = std::max<std::uint64_t>(max_chunk_values / widest / row_lanes, 1);
  const std::uint64_t rows = std::clamp<std::uint64_t>((std::uint64_t{options.tokens_per_chunk} + row_lanes - 1) / row_lanes, 1, most_rows);
  const std::uint64_t step = rows * row_lanes;
  for (std::uint64_t token = tokens.begin; token < tokens.end;) {
    const std::uint64_t band_end = std::min(tokens.end, token / step * step + step);
    for (std::uint64_t layer = 0; layer < shape.layers();) {
      std::uint64_t end = layer + 1;
      while (end < shape.layers() && padded_values(shape, {layer, end + 1}, band_end - token) <= most_values) ++end;
      chunk_record record;
      record.layer_begin = static_cast<std::uint32_t>(layer);
      record.layer_count = static_cast<std::uint32_t>(end - layer);
      record.token_begin = token;
      record.token_count = static_cast<std::uint32_t>(band_end - token);
      if (!visit(record)) return;
      layer = end;
    }
    token = band_end;
  }
}

}  // namespace detail
}  // namespace kvexact

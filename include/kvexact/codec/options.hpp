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
  /// Chunks end at multiples of this many tokens; rounded up to a multiple of `row_lanes`, at least one row. No more than keep a layer
  /// within 2^21 values and a closed loop's correction within 2^24 numbers.
  std::uint32_t tokens_per_chunk = 256;
  /// Layers go into one chunk up to this many values, so that its fixed cost (some 200 bytes) stays small. At most 2^21.
  std::uint32_t values_per_chunk = 1U << 19;
};

namespace detail {

/// Cuts the tokens [begin, end) over all layers into chunks and calls visit(record) for each until it returns false. Values count
/// without padding, so that a few tokens of a wide model still share a chunk's fixed cost; padding only limits the size.
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
    const std::uint64_t band = band_end - token;
    for (std::uint32_t layer = 0; layer < shape.layers();) {
      std::uint32_t end = layer;
      std::uint64_t channels = 0;
      do {
        channels += shape.layer(end++).channels();
      } while (end < shape.layers() && (channels + shape.layer(end).channels()) * band <= most_values &&
               (channels + shape.layer(end).channels()) * pad_to_rows(band) <= max_chunk_values);
      chunk_record record;
      record.layer_begin = layer;
      record.layer_count = end - layer;
      record.token_begin = token;
      record.token_count = static_cast<std::uint32_t>(band);
      if (!visit(record)) return;
      layer = end;
    }
    token = band_end;
  }
}

}  // namespace detail
}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include <kvexact/compression/compressor.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact::detail {

/// What all compressors check and read the same way.

template <class Scalar>
[[nodiscard]] const Scalar* row_of(const strided_tensor<const Scalar>& from, std::uint64_t token, std::uint32_t head) noexcept {
  return from.data + static_cast<std::ptrdiff_t>(token) * from.token_stride + static_cast<std::ptrdiff_t>(head) * from.head_stride;
}

/// Whether rows can be appended to a cache of `length` tokens; see `layer_compressor` for the errors.
template <class Scalar>
[[nodiscard]] result<void> expect_rows(const layer_shape& shape, const layer_tensors<const Scalar>& rows, std::uint64_t length,
                                       std::uint64_t tokens) noexcept {
  if (tokens == 0) return {};
  for (const cache_part part : cache_parts) {
    if (shape.channels(part) > 0 && rows.part(part).data == nullptr)
      return error{error_code::invalid_argument, "no keys or no values to append"};
  }
  if (tokens > std::numeric_limits<std::uint32_t>::max()) return error{error_code::out_of_range, "too many tokens in one call"};
  for (const cache_part part : cache_parts) {
    if (shape.channels(part) == 0) continue;
    for (std::uint64_t t = 0; t < tokens; ++t) {
      for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
        const Scalar* const row = row_of(rows.part(part), t, h);
        for (std::uint32_t c = 0; c < shape.dim(part); ++c) {
          if (row[c].is_finite()) continue;
          return error{error_code::invalid_argument, part == cache_part::key ? "a key is not finite" : "a value is not finite"}.at_token(
              static_cast<std::int64_t>(length + t));
        }
      }
    }
  }
  return {};
}

[[nodiscard]] inline result<void> expect_room(const layer_shape& shape, std::uint32_t head, std::size_t entries,
                                              const materialised_head& out) noexcept {
  if (head >= shape.kv_heads || out.positions.size() != entries || out.keys.size() != entries * shape.key_dim ||
      out.values.size() != entries * shape.value_dim)
    return error{error_code::shape_mismatch, "the room for a head's entries has another size"};
  return {};
}

}  // namespace kvexact::detail

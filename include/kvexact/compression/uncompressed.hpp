// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvexact/compression/buffer.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/rows.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// Every position as it came: for layers that bear no loss, and to compare with.
template <class Scalar>
class uncompressed {
 public:
  using scalar = Scalar;
  struct options {};

  /// Errors: invalid_argument (a layer without heads, keys or values), out_of_range (too many channels), out_of_memory.
  [[nodiscard]] static result<uncompressed> make(const layer_shape& shape, const options& = {}) noexcept {
    if (const auto fits = cache_shape::uniform(1, shape); !fits) return fits.error();
    if (shape.value_dim == 0) return error{error_code::invalid_argument, "uncompressed needs keys and values"};
    return uncompressed(shape);
  }

  [[nodiscard]] const layer_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
  /// All of it.
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return ~std::uint64_t{0}; }
  [[nodiscard]] std::size_t entries(std::uint32_t) const noexcept { return static_cast<std::size_t>(length_); }
  [[nodiscard]] std::size_t bytes() const noexcept { return sizeof(*this) + detail::bytes_of(keys_) + detail::bytes_of(values_); }

  result<void> append(const layer_tensors<const Scalar>& rows, std::uint64_t tokens) noexcept {
    const auto usable = detail::expect_rows(shape_, rows, length_, tokens);
    if (!usable) return usable;
    try {
      for (const cache_part part : cache_parts)
        detail::reserve_sparingly(rows_of(part), static_cast<std::size_t>(length_ + tokens) * shape_.channels(part));
    } catch (...) {
      return error{error_code::out_of_memory, "the draft cache of a layer"};
    }
    for (const cache_part part : cache_parts) {
      for (std::uint64_t t = 0; t < tokens; ++t) {
        for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
          const Scalar* const row = detail::row_of(rows.part(part), t, h);
          rows_of(part).insert(rows_of(part).end(), row, row + shape_.dim(part));
        }
      }
    }
    length_ += tokens;
    return {};
  }

  result<void> truncate(std::uint64_t length) noexcept {
    if (length > length_) return error{error_code::out_of_range, "a cache cannot be truncated to more than it holds"};
    for (const cache_part part : cache_parts) rows_of(part).resize(static_cast<std::size_t>(length) * shape_.channels(part));
    length_ = length;
    return {};
  }

  result<void> materialise(std::uint32_t head, const materialised_head& out) const noexcept {
    const auto usable = detail::expect_room(shape_, head, entries(head), out);
    if (!usable) return usable;
    for (std::size_t t = 0; t < entries(head); ++t) {
      out.positions[t] = t;
      for (std::size_t c = 0; c < shape_.key_dim; ++c)
        out.keys[t * shape_.key_dim + c] = keys_[(t * shape_.kv_heads + head) * shape_.key_dim + c].to_float();
      for (std::size_t c = 0; c < shape_.value_dim; ++c)
        out.values[t * shape_.value_dim + c] = values_[(t * shape_.kv_heads + head) * shape_.value_dim + c].to_float();
    }
    return {};
  }

 private:
  explicit uncompressed(const layer_shape& shape) noexcept : shape_(shape) {}

  [[nodiscard]] std::vector<Scalar>& rows_of(cache_part part) noexcept { return part == cache_part::key ? keys_ : values_; }

  layer_shape shape_;
  std::uint64_t length_ = 0;
  std::vector<Scalar> keys_, values_;  // [length, heads, dim]
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// One tensor of a block pool: [block, slot, head, dim] (NHD) or [block, head, slot, dim] (HND); dim contiguous, strides in scalars.
template <class T>
struct block_pool {
  T* data = nullptr;
  std::ptrdiff_t block_stride = 0;
  std::ptrdiff_t slot_stride = 0;
  std::ptrdiff_t head_stride = 0;

  [[nodiscard]] static constexpr block_pool nhd(T* data, std::uint32_t block_size, std::uint32_t heads, std::uint32_t dim) noexcept {
    const auto slot = static_cast<std::ptrdiff_t>(heads) * dim;
    return {data, slot * block_size, slot, dim};
  }
  [[nodiscard]] static constexpr block_pool hnd(T* data, std::uint32_t block_size, std::uint32_t heads, std::uint32_t dim) noexcept {
    const auto head = static_cast<std::ptrdiff_t>(block_size) * dim;
    return {data, head * heads, dim, head};
  }
};

/// The pools of one layer.
template <class T>
struct layer_pools {
  block_pool<T> key;
  block_pool<T> value;

  [[nodiscard]] constexpr const block_pool<T>& part(cache_part which) const noexcept { return which == cache_part::key ? key : value; }
};

/// Where one sequence's tokens live in the pools: `block_table[i]` holds tokens [i * block_size, (i + 1) * block_size).
struct block_layout {
  std::span<const std::int32_t> block_table;
  std::uint32_t block_size = 0;
  std::uint32_t pool_blocks = 0;  ///< blocks in each pool; every id must be below it

  /// Sequence `index` of a batch in CSR form: its block ids are `indices[indptr[index] .. indptr[index + 1])`.
  /// Errors: out_of_range (index, indptr not inside indices or decreasing).
  [[nodiscard]] static result<block_layout> from_csr(std::span<const std::int32_t> indptr, std::span<const std::int32_t> indices,
                                                     std::size_t index, std::uint32_t block_size, std::uint32_t pool_blocks) noexcept {
    if (indptr.size() < 2 || index > indptr.size() - 2) return error{error_code::out_of_range, "sequence outside indptr"};
    const std::int32_t begin = indptr[index];
    const std::int32_t end = indptr[index + 1];
    if (begin < 0 || end < begin || static_cast<std::size_t>(end) > indices.size())
      return error{error_code::out_of_range, "indptr points outside indices"};
    return block_layout{indices.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)), block_size, pool_blocks};
  }

  /// Tokens held when the last block holds `last_block_len` of them (1 to block_size; ignored when there is no block).
  [[nodiscard]] std::uint64_t tokens(std::uint32_t last_block_len) const noexcept {
    return block_table.empty() ? 0 : (block_table.size() - 1) * std::uint64_t{block_size} + last_block_len;
  }
};

/// Non-owning view of one sequence of a paged cache (vLLM, FlashInfer). Tokens count from 0. Shape, pools and block table must outlive
/// the view.
template <class T>
class paged_kv_cache_view {
 public:
  using value_type = T;

  /// `tokens`: how many the sequence has; the last block may be partly filled.
  /// Errors: shape_mismatch (number of layers), invalid_argument (block size 0, null data), out_of_range (block table too short for
  /// `tokens`, or an id outside the pool; `token` is the first of that block).
  [[nodiscard]] static result<paged_kv_cache_view> make(const cache_shape& shape, std::span<const layer_pools<T>> pools,
                                                        block_layout layout, std::uint64_t tokens) noexcept {
    if (pools.size() != shape.layers()) return error{error_code::shape_mismatch, "one entry per layer is needed"};
    if (layout.block_size == 0) return error{error_code::invalid_argument, "block size 0"};
    const std::uint64_t blocks = tokens / layout.block_size + (tokens % layout.block_size != 0);
    if (blocks > layout.block_table.size()) return error{error_code::out_of_range, "the block table is too short for the tokens"};
    for (std::uint64_t b = 0; b < blocks; ++b) {
      const std::int32_t id = layout.block_table[static_cast<std::size_t>(b)];
      if (id < 0 || static_cast<std::uint32_t>(id) >= layout.pool_blocks)
        return error{error_code::out_of_range, "block id outside the pool", -1, static_cast<std::int64_t>(b * layout.block_size)};
    }
    for (std::uint32_t l = 0; l < shape.layers() && tokens > 0; ++l) {
      for (const cache_part part : cache_parts) {
        if (shape.layer(l).channels(part) > 0 && pools[l].part(part).data == nullptr)
          return error{error_code::invalid_argument, "a layer has no data", l};
      }
    }
    return paged_kv_cache_view(shape, pools, layout, tokens);
  }

  [[nodiscard]] const cache_shape& shape() const noexcept { return *shape_; }
  [[nodiscard]] index_range tokens() const noexcept { return {0, tokens_}; }
  [[nodiscard]] T* row(std::uint32_t layer, cache_part part, std::uint64_t token, std::uint32_t head) const noexcept {
    const block_pool<T>& pool = pools_[layer].part(part);
    const std::int32_t block = layout_.block_table[static_cast<std::size_t>(token / layout_.block_size)];
    return pool.data + static_cast<std::ptrdiff_t>(block) * pool.block_stride +
           static_cast<std::ptrdiff_t>(token % layout_.block_size) * pool.slot_stride +
           static_cast<std::ptrdiff_t>(head) * pool.head_stride;
  }

 private:
  paged_kv_cache_view(const cache_shape& shape, std::span<const layer_pools<T>> pools, block_layout layout, std::uint64_t tokens) noexcept
      : shape_(&shape), pools_(pools), layout_(layout), tokens_(tokens) {}

  const cache_shape* shape_;
  std::span<const layer_pools<T>> pools_;
  block_layout layout_;
  std::uint64_t tokens_;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvexact/tensor/kv_cache_view.hpp>
#include <kvexact/tensor/paged_kv_cache_view.hpp>

namespace kvexact::test {

/// What a scalar must read as: a number that differs between neighbours in every coordinate and seldom repeats.
template <class T>
[[nodiscard]] constexpr T scalar_at(std::uint32_t layer, cache_part part, std::uint64_t token, std::uint32_t head,
                                    std::uint32_t d) noexcept {
  std::uint64_t mixed = ((token * 67 + head) * 263 + d) * 4 + 2 * std::uint64_t{layer} + static_cast<std::uint64_t>(part);
  mixed *= 0x9e3779b97f4a7c15U;
  return T::from_bits(static_cast<typename T::bits_type>(mixed >> 40));
}

enum class layout { nhd, hnd, nhd_padded, hnd_padded };
inline constexpr layout layouts[]{layout::nhd, layout::hnd, layout::nhd_padded, layout::hnd_padded};

/// Tensors in one buffer, between guards: every scalar that no view may touch reads `guard`.
template <class T>
class owned_cache {
 public:
  static constexpr typename T::bits_type guard = static_cast<typename T::bits_type>(0xa5c3);

  owned_cache(const cache_shape& shape, index_range tokens, layout order) : shape_(shape), tokens_(tokens) {
    std::vector<std::size_t> starts;
    std::size_t size = pad;
    for (const layer_shape& layer : shape.all()) {
      for (const cache_part part : cache_parts) {
        starts.push_back(size);
        strides_.push_back(strides(order, tokens.size(), layer.kv_heads, layer.dim(part)));
        size += extent(layer.kv_heads, tokens.size() + 1, strides_.back()) + pad;
      }
    }
    memory_.assign(size, T::from_bits(guard));
    for (std::uint32_t l = 0; l < shape.layers(); ++l) {
      layer_tensors<T> tensors{strides_[2 * l], strides_[2 * l + 1]};
      tensors.key.data = memory_.data() + starts[2 * l];
      if (shape.layer(l).value_dim > 0) tensors.value.data = memory_.data() + starts[2 * l + 1];
      layers_.push_back(tensors);
      readers_.push_back({{tensors.key.data, tensors.key.token_stride, tensors.key.head_stride},
                          {tensors.value.data, tensors.value.token_stride, tensors.value.head_stride}});
    }
  }
  owned_cache(const owned_cache&) = delete;

  void fill() {
    for_each([](T& scalar, std::uint32_t l, cache_part part, std::uint64_t t, std::uint32_t h, std::uint32_t d) {
      scalar = scalar_at<T>(l, part, t, h, d);
    });
  }

  [[nodiscard]] kv_cache_view<T> view() const { return *kv_cache_view<T>::make(shape_, layers_, tokens_); }
  [[nodiscard]] kv_cache_view<const T> reader() const { return *kv_cache_view<const T>::make(shape_, readers_, tokens_); }
  [[nodiscard]] const std::vector<layer_tensors<T>>& layers() const { return layers_; }
  [[nodiscard]] std::vector<T>& memory() { return memory_; }

  /// Calls visit(scalar, layer, part, token, head, d) with addresses computed here, not by the view.
  template <class Visit>
  void for_each(Visit&& visit) {
    for (std::uint32_t l = 0; l < shape_.layers(); ++l) {
      for (const cache_part part : cache_parts) {
        const strided_tensor<T>& tensor = layers_[l].part(part);
        for (std::uint64_t t = 0; t < tokens_.size(); ++t) {
          for (std::uint32_t h = 0; h < shape_.layer(l).kv_heads; ++h) {
            for (std::uint32_t d = 0; d < shape_.layer(l).dim(part); ++d) {
              const auto at = static_cast<std::size_t>(tensor.data - memory_.data()) + t * static_cast<std::size_t>(tensor.token_stride) +
                              h * static_cast<std::size_t>(tensor.head_stride) + d;
              visit(memory_[at], l, part, tokens_.begin + t, h, d);
            }
          }
        }
      }
    }
  }

 private:
  static constexpr std::size_t pad = 11;

  [[nodiscard]] static strided_tensor<T> strides(layout order, std::uint64_t tokens, std::uint32_t heads, std::uint32_t dim) {
    const auto per_token = static_cast<std::ptrdiff_t>(heads) * dim;
    switch (order) {
      case layout::nhd: return strided_tensor<T>::nhd(nullptr, heads, dim);
      case layout::hnd: return strided_tensor<T>::hnd(nullptr, tokens + 1, dim);
      case layout::nhd_padded: return {nullptr, per_token + 3 * heads + 5, static_cast<std::ptrdiff_t>(dim) + 3};
      case layout::hnd_padded: break;
    }
    return {nullptr, static_cast<std::ptrdiff_t>(dim) + 2,
            (static_cast<std::ptrdiff_t>(dim) + 2) * static_cast<std::ptrdiff_t>(tokens + 3)};
  }
  [[nodiscard]] static std::size_t extent(std::uint32_t heads, std::uint64_t tokens, const strided_tensor<T>& tensor) {
    return static_cast<std::size_t>(tensor.token_stride) * static_cast<std::size_t>(tokens) +
           static_cast<std::size_t>(tensor.head_stride) * heads;
  }

  cache_shape shape_;
  index_range tokens_;
  std::vector<strided_tensor<T>> strides_;
  std::vector<T> memory_;
  std::vector<layer_tensors<T>> layers_;
  std::vector<layer_tensors<const T>> readers_;
};

/// Block pools of every (layer, part), each in memory of its own.
template <class T>
class owned_pools {
 public:
  static constexpr typename T::bits_type guard = owned_cache<T>::guard;

  owned_pools(const cache_shape& shape, std::uint32_t block_size, std::uint32_t blocks, bool heads_first)
      : shape_(shape), block_size_(block_size), heads_first_(heads_first), memory_(2 * std::size_t{shape.layers()}) {
    for (std::uint32_t l = 0; l < shape.layers(); ++l) {
      layer_pools<T> pools;
      for (const cache_part part : cache_parts) {
        std::vector<T>& memory = memory_[2 * l + static_cast<std::size_t>(part)];
        const layer_shape& layer = shape.layer(l);
        if (layer.dim(part) == 0) continue;
        memory.assign(std::size_t{blocks} * block_size * layer.channels(part), T::from_bits(guard));
        const auto pool = heads_first ? block_pool<T>::hnd(memory.data(), block_size, layer.kv_heads, layer.dim(part))
                                      : block_pool<T>::nhd(memory.data(), block_size, layer.kv_heads, layer.dim(part));
        (part == cache_part::key ? pools.key : pools.value) = pool;
      }
      pools_.push_back(pools);
    }
  }
  owned_pools(const owned_pools&) = delete;

  [[nodiscard]] const std::vector<layer_pools<T>>& pools() const { return pools_; }

  /// The scalar at a place in a block, addressed from the axis order in the docstring of `block_pool`.
  [[nodiscard]] T& at(std::uint32_t layer, cache_part part, std::uint32_t block, std::uint32_t slot, std::uint32_t head, std::uint32_t d) {
    const layer_shape& shape = shape_.layer(layer);
    const std::size_t row = heads_first_ ? (std::size_t{block} * shape.kv_heads + head) * block_size_ + slot
                                         : (std::size_t{block} * block_size_ + slot) * shape.kv_heads + head;
    return memory_[2 * layer + static_cast<std::size_t>(part)].at(row * shape.dim(part) + d);
  }

  void fill(const std::vector<std::int32_t>& block_table, std::uint64_t tokens) {
    for (std::uint32_t l = 0; l < shape_.layers(); ++l)
      for (const cache_part part : cache_parts)
        for (std::uint64_t t = 0; t < tokens; ++t)
          for (std::uint32_t h = 0; h < shape_.layer(l).kv_heads; ++h)
            for (std::uint32_t d = 0; d < shape_.layer(l).dim(part); ++d)
              at(l, part, static_cast<std::uint32_t>(block_table[t / block_size_]), static_cast<std::uint32_t>(t % block_size_), h, d) =
                  scalar_at<T>(l, part, t, h, d);
  }

  [[nodiscard]] std::size_t guards() const {
    std::size_t count = 0;
    for (const auto& memory : memory_)
      for (const T& scalar : memory) count += scalar.bits == guard ? 1U : 0U;
    return count;
  }

 private:
  cache_shape shape_;
  std::uint32_t block_size_;
  bool heads_first_;
  std::vector<std::vector<T>> memory_;
  std::vector<layer_pools<T>> pools_;
};

}  // namespace kvexact::test

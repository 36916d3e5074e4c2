// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// What the codec needs to know of a cache in memory, contiguous or paged. Token numbers are absolute positions; the view holds
/// those of `tokens()`. `row` points at the `dim` contiguous scalars of one (layer, part, token, head); its arguments must be valid.
template <class V>
concept kv_cache = requires(const V& view, std::uint32_t index, cache_part part, std::uint64_t token) {
  typename V::value_type;
  { view.shape() } noexcept -> std::same_as<const cache_shape&>;
  { view.tokens() } noexcept -> std::same_as<index_range>;
  { view.row(index, part, token, index) } noexcept -> std::same_as<typename V::value_type*>;
};

/// One tensor [token, head, dim] in memory, dim contiguous; strides in scalars. `data` points at the view's first token.
template <class T>
struct strided_tensor {
  T* data = nullptr;
  std::ptrdiff_t token_stride = 0;
  std::ptrdiff_t head_stride = 0;

  /// (token, head, dim) order, as vLLM, TensorRT and the safetensors dumps of the tool have it.
  [[nodiscard]] static constexpr strided_tensor nhd(T* data, std::uint32_t heads, std::uint32_t dim) noexcept {
    return {data, static_cast<std::ptrdiff_t>(heads) * dim, dim};
  }
  /// (head, token, dim) order; `capacity` is the number of tokens for which memory is laid out.
  [[nodiscard]] static constexpr strided_tensor hnd(T* data, std::uint64_t capacity, std::uint32_t dim) noexcept {
    return {data, dim, static_cast<std::ptrdiff_t>(capacity) * dim};
  }
};

/// K and V of one layer. `value.data` may be null where the layer stores no V.
template <class T>
struct layer_tensors {
  strided_tensor<T> key;
  strided_tensor<T> value;

  [[nodiscard]] constexpr const strided_tensor<T>& part(cache_part which) const noexcept {
    return which == cache_part::key ? key : value;
  }
};

/// Non-owning view of a cache with one tensor per (layer, part). `T` is a number format, const for reading. The shape and the layer
/// array must outlive the view.
template <class T>
class kv_cache_view {
 public:
  using value_type = T;

  /// `layers`: one entry per layer of `shape`, each holding the tokens of `tokens`.
  /// Errors: shape_mismatch (number of layers), invalid_argument (null data, a reversed range).
  [[nodiscard]] static result<kv_cache_view> make(const cache_shape& shape, std::span<const layer_tensors<T>> layers,
                                                  index_range tokens) noexcept {
    if (layers.size() != shape.layers()) return error{error_code::shape_mismatch, "one entry per layer is needed"};
    if (tokens.end < tokens.begin) return error{error_code::invalid_argument, "the token range is reversed"};
    for (std::uint32_t l = 0; l < shape.layers() && tokens.size() > 0; ++l) {
      for (const cache_part part : cache_parts) {
        if (shape.layer(l).channels(part) > 0 && layers[l].part(part).data == nullptr)
          return error{error_code::invalid_argument, "a layer has no data", l};
      }
    }
    return kv_cache_view(shape, layers, tokens);
  }

  [[nodiscard]] const cache_shape& shape() const noexcept { return *shape_; }
  [[nodiscard]] index_range tokens() const noexcept { return tokens_; }
  [[nodiscard]] T* row(std::uint32_t layer, cache_part part, std::uint64_t token, std::uint32_t head) const noexcept {
    const strided_tensor<T>& tensor = layers_[layer].part(part);
    return tensor.data + static_cast<std::ptrdiff_t>(token - tokens_.begin) * tensor.token_stride +
           static_cast<std::ptrdiff_t>(head) * tensor.head_stride;
  }

 private:
  kv_cache_view(const cache_shape& shape, std::span<const layer_tensors<T>> layers, index_range tokens) noexcept
      : shape_(&shape), layers_(layers), tokens_(tokens) {}

  const cache_shape* shape_;
  std::span<const layer_tensors<T>> layers_;
  index_range tokens_;
};

}  // namespace kvexact

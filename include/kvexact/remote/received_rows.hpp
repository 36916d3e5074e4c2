// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// The engine of a node that does not have the full cache, as `compressed_model` takes it: its model steps on draft caches, and its "full
/// cache" is the rows that have come from elsewhere last.
///
/// `Engine` has `vocabulary()` and is a `token_stepper`.
template <class Engine, class Scalar>
class received_rows {
 public:
  using scalar = Scalar;

  /// For rows of up to `most` tokens at a time. The engine outlives this object. Errors: out_of_memory.
  [[nodiscard]] static result<received_rows> make(Engine& engine, const cache_shape& shape, std::uint64_t most) noexcept {
    received_rows made(engine);
    try {
      made.shape_ = shape;
      for (const layer_shape& layer : shape.all()) {
        made.keys_.emplace_back(static_cast<std::size_t>(most) * layer.channels(cache_part::key));
        made.values_.emplace_back(static_cast<std::size_t>(most) * layer.channels(cache_part::value));
      }
      for (std::uint32_t l = 0; l < shape.layers(); ++l) {
        const auto [heads, key_dim, value_dim] = shape.layer(l);
        made.layers_.push_back({strided_tensor<Scalar>::nhd(made.keys_[l].data(), heads, key_dim),
                                strided_tensor<Scalar>::nhd(made.values_[l].data(), heads, value_dim)});
      }
    } catch (...) {
      return error{error_code::out_of_memory, "rows from another machine"};
    }
    return made;
  }
  // Tensors point into vectors, which a move leaves where they are.
  received_rows(received_rows&&) noexcept = default;
  received_rows& operator=(received_rows&&) noexcept = default;

  /// Where the rows of `tokens`, at most as many as it was made for, are written; those before are gone.
  [[nodiscard]] result<kv_cache_view<Scalar>> replace(index_range tokens) noexcept {
    tokens_ = tokens;
    return kv_cache_view<Scalar>::make(shape_, layers_, tokens);
  }

  [[nodiscard]] std::uint32_t vocabulary() const noexcept { return engine_->vocabulary(); }
  [[nodiscard]] const cache_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return tokens_.end; }
  [[nodiscard]] layer_tensors<const Scalar> rows(std::uint32_t layer, std::uint64_t position) const noexcept {
    const auto [heads, key_dim, value_dim] = shape_.layer(layer);
    const auto skipped = static_cast<std::size_t>(position - tokens_.begin);
    return {strided_tensor<const Scalar>::nhd(keys_[layer].data() + skipped * heads * key_dim, heads, key_dim),
            strided_tensor<const Scalar>::nhd(values_[layer].data() + skipped * heads * value_dim, heads, value_dim)};
  }
  template <class Cache>
  result<void> step(std::uint32_t token, std::uint64_t position, Cache& cache, std::span<float> logits) noexcept {
    return engine_->step(token, position, cache, logits);
  }

 private:
  explicit received_rows(Engine& engine) noexcept : engine_(&engine) {}

  Engine* engine_;
  cache_shape shape_;
  std::vector<std::vector<Scalar>> keys_, values_;  // [layer][token, head, dim]
  std::vector<layer_tensors<Scalar>> layers_;
  index_range tokens_;
};

}  // namespace kvexact

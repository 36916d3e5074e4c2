// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>

namespace kvexact {

/// Keys or values of a layer. The numbers are the order in which the codec visits them.
enum class cache_part : std::uint8_t { key = 0, value = 1 };

inline constexpr std::array<cache_part, 2> cache_parts{cache_part::key, cache_part::value};

/// Shape of one layer's cache. `value_dim` 0 means that the layer stores no V (latent attention keeps one tensor only).
struct layer_shape {
  std::uint32_t kv_heads = 0;
  std::uint32_t key_dim = 0;
  std::uint32_t value_dim = 0;

  [[nodiscard]] constexpr std::uint32_t dim(cache_part part) const noexcept { return part == cache_part::key ? key_dim : value_dim; }
  /// Scalars a token has in this part: kv_heads * dim.
  [[nodiscard]] constexpr std::uint32_t channels(cache_part part) const noexcept { return kv_heads * dim(part); }
  /// Scalars a token has in this layer.
  [[nodiscard]] constexpr std::uint32_t channels() const noexcept { return kv_heads * (key_dim + value_dim); }

  friend constexpr bool operator==(const layer_shape&, const layer_shape&) noexcept = default;
};

/// Shapes of all layers, which may differ. Immutable once made; a default one has no layers and fits nothing.
class cache_shape {
 public:
  cache_shape() noexcept = default;

  static constexpr std::uint32_t max_layers = 1U << 14;
  /// Most scalars of one token in one layer; keeps one token of one layer inside a chunk.
  static constexpr std::uint32_t max_channels = 1U << 16;

  /// Errors: invalid_argument (no layers, a layer without heads or keys), out_of_range (more than `max_layers` or `max_channels`),
  /// out_of_memory.
  [[nodiscard]] static result<cache_shape> make(std::span<const layer_shape> layers) noexcept {
    if (layers.empty()) return error{error_code::invalid_argument, "a cache shape needs at least one layer"};
    if (layers.size() > max_layers) return error{error_code::out_of_range, "too many layers"};
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto [heads, key_dim, value_dim] = layers[l];
      const auto where = static_cast<std::int64_t>(l);
      if (heads == 0 || key_dim == 0) return error{error_code::invalid_argument, "a layer needs heads and a key dimension", where};
      const std::uint64_t dims = std::uint64_t{key_dim} + value_dim;
      if (heads > max_channels || dims > max_channels || heads * dims > max_channels)
        return error{error_code::out_of_range, "too many channels in a layer", where};
    }
    try {
      return cache_shape(std::vector<layer_shape>(layers.begin(), layers.end()));
    } catch (...) {
      return error{error_code::out_of_memory, "cache shape"};
    }
  }

  /// `layers` times the same layer.
  [[nodiscard]] static result<cache_shape> uniform(std::uint32_t layers, layer_shape layer) noexcept {
    if (layers > max_layers) return error{error_code::out_of_range, "too many layers"};
    try {
      return make(std::vector<layer_shape>(layers, layer));
    } catch (...) {
      return error{error_code::out_of_memory, "cache shape"};
    }
  }

  [[nodiscard]] std::uint32_t layers() const noexcept { return static_cast<std::uint32_t>(layers_.size()); }
  [[nodiscard]] const layer_shape& layer(std::uint32_t l) const noexcept { return layers_[l]; }
  [[nodiscard]] std::span<const layer_shape> all() const noexcept { return layers_; }

  /// Scalars of one token over all layers.
  [[nodiscard]] std::uint64_t channels() const noexcept {
    std::uint64_t sum = 0;
    for (const layer_shape& layer : layers_) sum += layer.channels();
    return sum;
  }

  friend bool operator==(const cache_shape&, const cache_shape&) noexcept = default;

 private:
  explicit cache_shape(std::vector<layer_shape> layers) noexcept : layers_(std::move(layers)) {}

  std::vector<layer_shape> layers_;
};

/// Compares a cache's shape with an expected one; the error names the first layer that differs.
[[nodiscard]] inline result<void> expect_shape(const cache_shape& actual, const cache_shape& expected) noexcept {
  if (actual.layers() != expected.layers()) return error{error_code::shape_mismatch, "number of layers differs"};
  for (std::uint32_t l = 0; l < actual.layers(); ++l) {
    if (actual.layer(l) != expected.layer(l)) return error{error_code::shape_mismatch, "heads or dimensions of a layer differ", l};
  }
  return {};
}

/// Half-open range of layers or tokens.
struct index_range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  [[nodiscard]] constexpr std::uint64_t size() const noexcept { return end - begin; }
  friend constexpr bool operator==(const index_range&, const index_range&) noexcept = default;
};

}  // namespace kvexact

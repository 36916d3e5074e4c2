// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <common/outcome.hpp>
#include <common/safetensors.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <kvexact/numeric/number_format.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

// A KV cache as a safetensors file: tensors layers.N.k (keys as cached) and layers.N.v, shape [tokens, heads, head_dim], one number format
// for all; layers.N.v may be absent. For fp8, F32 tensors layers.N.k_scale and layers.N.v_scale of one element may stand beside them.

namespace kvexact::examples {

[[nodiscard]] inline std::string tensor_name(std::uint32_t layer, cache_part part, bool scale = false) {
  return "layers." + std::to_string(layer) + (part == cache_part::key ? ".k" : ".v") + (scale ? "_scale" : "");
}

[[nodiscard]] constexpr dtype dtype_of(number_format format) noexcept {
  switch (format) {
    case number_format::bfloat16: return dtype::bf16;
    case number_format::float16: return dtype::f16;
    case number_format::float8_e4m3: return dtype::f8_e4m3;
    case number_format::float8_e5m2: return dtype::f8_e5m2;
  }
  return dtype::u8;
}

[[nodiscard]] constexpr std::optional<number_format> number_format_named(dtype type) noexcept {
  switch (type) {
    case dtype::bf16: return number_format::bfloat16;
    case dtype::f16: return number_format::float16;
    case dtype::f8_e4m3: return number_format::float8_e4m3;
    case dtype::f8_e5m2: return number_format::float8_e5m2;
    default: return std::nullopt;
  }
}

/// What a cache file holds; `tensors` and `scales` go tile by tile (layer 0 K, layer 0 V, layer 1 K, ...).
struct cache_description {
  cache_shape shape;
  number_format format = number_format::bfloat16;
  std::uint64_t tokens = 0;
  std::vector<std::uint32_t> scales;  ///< bits of binary32; empty if the file has none

  /// Bytes of the values and scales, without any header.
  [[nodiscard]] std::uint64_t value_bytes() const noexcept {
    return tokens * shape.channels() * dtype_size(dtype_of(format)) + 4 * scales.size();
  }
};

/// A cache file opened for reading.
class cache_file {
 public:
  [[nodiscard]] static outcome<cache_file> open(const std::string& path) {
    auto file = safetensors_file::open(path);
    if (!file) return file.error();
    cache_file cache(*std::move(file));
    if (auto read = cache.read(); !read) return read.error();
    return cache;
  }

  [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }
  [[nodiscard]] const cache_description& about() const noexcept { return about_; }

  /// Pointers for a view of all tokens; `T` is the file's number format. They live as long as this object.
  template <class T>
  [[nodiscard]] std::vector<layer_tensors<const T>> layers() const {
    std::vector<layer_tensors<const T>> layers(about_.shape.layers());
    for (std::uint32_t l = 0; l < about_.shape.layers(); ++l) {
      const layer_shape& shape = about_.shape.layer(l);
      layers[l].key = strided_tensor<const T>::nhd(data<T>(l, cache_part::key), shape.kv_heads, shape.key_dim);
      if (shape.value_dim > 0) layers[l].value = strided_tensor<const T>::nhd(data<T>(l, cache_part::value), shape.kv_heads, shape.value_dim);
    }
    return layers;
  }

 private:
  explicit cache_file(safetensors_file file) : file_(std::move(file)) {}

  template <class T>
  [[nodiscard]] const T* data(std::uint32_t layer, cache_part part) const {
    // An empty tensor may have no address, but a view wants one.
    static const T nothing{};
    const auto values = file_.find(tensor_name(layer, part))->template as<T>();
    return values.empty() ? &nothing : values.data();
  }

  [[nodiscard]] failure bad(error_code code, const std::string& text) const { return {code, path() + ": " + text}; }

  [[nodiscard]] status read() {
    std::vector<layer_shape> layers;
    std::size_t known = 0;
    for (std::uint32_t l = 0;; ++l) {
      const tensor* const key = file_.find(tensor_name(l, cache_part::key));
      if (key == nullptr) break;
      layer_shape shape;
      for (const cache_part part : cache_parts) {
        const tensor* const values = file_.find(tensor_name(l, part));
        if (values == nullptr) continue;
        ++known;
        if (auto added = add(*values, part, l == 0 && part == cache_part::key, shape); !added) return added;
        if (auto added = add_scale(l, part, known == 1); !added) return added;
      }
      layers.push_back(shape);
      if (layers.size() > cache_shape::max_layers) return bad(error_code::out_of_range, "too many layers");
    }
    if (layers.empty()) {
      const std::string instead = file_.tensors().empty() ? "no tensors" : "the first tensor is " + in_quotes(file_.tensors().front().name);
      return bad(error_code::invalid_argument, "no tensor 'layers.0.k' (" + instead + "); a cache has tensors layers.N.k and layers.N.v");
    }
    if (known + about_.scales.size() != file_.tensors().size()) return unknown_tensor(static_cast<std::uint32_t>(layers.size()));
    auto shape = cache_shape::make(layers);
    if (!shape) return bad(shape.error().code, shape.error().message());
    about_.shape = *std::move(shape);
    return done;
  }

  [[nodiscard]] status add(const tensor& values, cache_part part, bool first, layer_shape& shape) {
    const std::string who = "tensor " + in_quotes(values.name) + ": ";
    const auto format = number_format_named(values.type);
    if (!format) return bad(error_code::dtype_mismatch, who + "a cache holds BF16, F16, F8_E4M3 or F8_E5M2, not " + std::string(dtype_name(values.type)));
    if (values.shape.size() != 3) return bad(error_code::shape_mismatch, who + values.description() + " should be [tokens, heads, head_dim]");
    if (first) {
      about_.format = *format;
      about_.tokens = values.shape[0];
    }
    if (*format != about_.format) return bad(error_code::dtype_mismatch, who + "other number format than 'layers.0.k'");
    if (values.shape[0] != about_.tokens) return bad(error_code::shape_mismatch, who + "other number of tokens than 'layers.0.k'");
    const std::uint64_t heads = values.shape[1];
    const std::uint64_t dim = values.shape[2];
    if (heads == 0 || dim == 0 || heads > cache_shape::max_channels || dim > cache_shape::max_channels)
      return bad(error_code::out_of_range, who + values.description() + " has no or too many heads or dimensions");
    if (part == cache_part::value && heads != shape.kv_heads) return bad(error_code::shape_mismatch, who + "other number of heads than the keys");
    shape.kv_heads = static_cast<std::uint32_t>(heads);
    (part == cache_part::key ? shape.key_dim : shape.value_dim) = static_cast<std::uint32_t>(dim);
    return done;
  }

  [[nodiscard]] status add_scale(std::uint32_t layer, cache_part part, bool first) {
    const std::string name = tensor_name(layer, part, true);
    const tensor* const scale = file_.find(name);
    if (scale == nullptr) {
      if (about_.scales.empty()) return done;
      return bad(error_code::corrupt, "tensor " + in_quotes(name) + " is missing, though other tensors have a scale");
    }
    const std::string who = "tensor " + in_quotes(name) + ": ";
    if (!first && about_.scales.empty()) return bad(error_code::corrupt, who + "there is a scale here, but not for 'layers.0.k'");
    if (dtype_size(dtype_of(about_.format)) != 1) return bad(error_code::dtype_mismatch, who + "only fp8 caches have scales");
    if (scale->type != dtype::f32 || scale->shape.size() != 1 || scale->shape[0] != 1)
      return bad(error_code::shape_mismatch, who + scale->description() + " should be F32 [1], one scale per layer and part");
    about_.scales.push_back(std::bit_cast<std::uint32_t>(scale->as<float>()[0]));
    return done;
  }

  [[nodiscard]] status unknown_tensor(std::uint32_t layers) const {
    for (const tensor& each : file_.tensors()) {
      bool expected = false;
      for (std::uint32_t l = 0; l < layers && !expected; ++l) {
        for (const cache_part part : cache_parts) {
          expected = expected || each.name == tensor_name(l, part) || each.name == tensor_name(l, part, true);
        }
      }
      if (!expected)
        return bad(error_code::invalid_argument, "tensor " + in_quotes(each.name) +
                                                     " is not part of a cache (layers.N.k, layers.N.v and their _scale, N without gaps) and would be lost");
    }
    return bad(error_code::invalid_argument, "scales without values");
  }

  safetensors_file file_;
  cache_description about_;
};

/// A cache file being written; appears under its name at `commit`.
class cache_output {
 public:
  [[nodiscard]] static outcome<cache_output> create(const std::string& path, const cache_description& about) {
    std::vector<tensor_info> infos;
    for (std::uint32_t l = 0; l < about.shape.layers(); ++l) {
      for (const cache_part part : cache_parts) {
        const layer_shape& shape = about.shape.layer(l);
        if (shape.channels(part) > 0) infos.push_back({tensor_name(l, part), dtype_of(about.format), {about.tokens, shape.kv_heads, shape.dim(part)}});
      }
    }
    const std::size_t tiles = infos.size();
    for (std::size_t i = 0; i < about.scales.size(); ++i) infos.push_back({infos[i].name + "_scale", dtype::f32, {1}});
    auto writer = safetensors_writer::create(path, infos);
    if (!writer) return writer.error();
    for (std::size_t i = 0; i < about.scales.size(); ++i) writer->as<float>(tiles + i)[0] = std::bit_cast<float>(about.scales[i]);
    return cache_output(*std::move(writer), about.shape);
  }

  template <class T>
  [[nodiscard]] std::vector<layer_tensors<T>> layers() {
    static T nothing{};
    std::vector<layer_tensors<T>> layers(shape_.layers());
    std::size_t tile = 0;
    for (std::uint32_t l = 0; l < shape_.layers(); ++l) {
      for (const cache_part part : cache_parts) {
        const layer_shape& shape = shape_.layer(l);
        if (shape.channels(part) == 0) continue;
        const auto values = writer_.template as<T>(tile++);
        (part == cache_part::key ? layers[l].key : layers[l].value) =
            strided_tensor<T>::nhd(values.empty() ? &nothing : values.data(), shape.kv_heads, shape.dim(part));
      }
    }
    return layers;
  }

  [[nodiscard]] status commit() { return writer_.commit(); }

 private:
  cache_output(safetensors_writer writer, const cache_shape& shape) : writer_(std::move(writer)), shape_(shape) {}

  safetensors_writer writer_;
  cache_shape shape_;
};

}  // namespace kvexact::examples

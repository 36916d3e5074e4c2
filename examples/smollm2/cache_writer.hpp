// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <common/outcome.hpp>
#include <common/safetensors.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/fp16.hpp>
#include <kvexact/numeric/fp8_e4m3.hpp>
#include <kvexact/numeric/fp8_e5m2.hpp>

#include "engine.hpp"

namespace kvexact::examples {

/// Writes the KV cache of a sequence as safetensors: `layers.N.k` (rotated) and `layers.N.v`, [tokens, kv_heads, head_dim], position 0
/// first. The engine itself always attends to its bf16 cache; the other formats are what a cache of that format would have stored:
///   bf16      the engine's own values
///   f16       the float sums before any rounding (keys rotated in float), rounded once, as engines do that compute in float
///   f8_e4m3,  the bf16 values divided by a scale = amax / largest finite value of the format, one per layer and K or V (1 where all
///   f8_e5m2   values are zero), rounded; the scales are F32 tensors `layers.N.k_scale` and `layers.N.v_scale` of shape [1]
class cache_writer {
 public:
  [[nodiscard]] static outcome<cache_writer> create(const std::string& path, const model_shape& shape, std::size_t tokens,
                                                    dtype format) noexcept {
    const bool scaled = format == dtype::f8_e4m3 || format == dtype::f8_e5m2;
    if (!scaled && format != dtype::bf16 && format != dtype::f16) {
      return failure{error_code::unsupported, std::string("no cache holds ") + std::string(dtype_name(format))};
    }
    std::vector<tensor_info> infos;
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      for (const char* const part : {".k", ".v"}) {
        const std::string name = "layers." + std::to_string(layer) + part;
        infos.push_back({name, format, {tokens, shape.kv_heads, shape.head_dim}});
        if (scaled) infos.push_back({name + "_scale", dtype::f32, {1}});
      }
    }
    auto file = safetensors_writer::create(path, infos);
    if (!file) return file.error();
    return cache_writer(std::move(*file), shape, tokens, format);
  }

  /// Stores a layer: `sums` is what `engine::keys_values` gave for all tokens, `cache` what was made of it.
  void write(std::size_t layer, const key_value_sums& sums, const kv_cache& cache) noexcept {
    const auto keys = cache.keys(layer, tokens_), values = cache.values(layer, tokens_);
    switch (format_) {
      case dtype::bf16:
        std::copy(keys.begin(), keys.end(), file_.as<bf16>(2 * layer).begin());
        std::copy(values.begin(), values.end(), file_.as<bf16>(2 * layer + 1).begin());
        break;
      case dtype::f16: {
        std::vector<float> rotated = sums.keys;
        for (std::size_t token = 0; token < tokens_; ++token) {
          cache.rotary().rotate(std::span(rotated).subspan(token * kv_width_, kv_width_), token);
        }
        std::transform(rotated.begin(), rotated.end(), file_.as<fp16>(2 * layer).begin(), fp16::from_float);
        std::transform(sums.values.begin(), sums.values.end(), file_.as<fp16>(2 * layer + 1).begin(), fp16::from_float);
        break;
      }
      case dtype::f8_e4m3:
        write_scaled<fp8_e4m3>(4 * layer, keys);
        write_scaled<fp8_e4m3>(4 * layer + 2, values);
        break;
      default:
        write_scaled<fp8_e5m2>(4 * layer, keys);
        write_scaled<fp8_e5m2>(4 * layer + 2, values);
        break;
    }
  }

  [[nodiscard]] status commit() noexcept { return file_.commit(); }

 private:
  cache_writer(safetensors_writer file, const model_shape& shape, std::size_t tokens, dtype format) noexcept
      : file_(std::move(file)), kv_width_(shape.kv_width()), tokens_(tokens), format_(format) {}

  template <class Format>
  void write_scaled(std::size_t index, std::span<const bf16> values) noexcept {
    const float largest = Format::from_bits(Format::max_finite).to_float();
    float amax = 0;
    for (const bf16 value : values) amax = std::max(amax, std::fabs(value.to_float()));
    const float scale = amax > 0 ? amax / largest : 1.0F;
    file_.as<float>(index + 1)[0] = scale;
    std::uint64_t saturated = 0;  // amax / scale may come out an ulp above the largest value, no more
    std::transform(values.begin(), values.end(), file_.as<Format>(index).begin(),
                   [&](bf16 value) { return Format::from_float_saturating(value.to_float() / scale, saturated); });
  }

  safetensors_writer file_;
  std::size_t kv_width_, tokens_;
  dtype format_;
};

}  // namespace kvexact::examples

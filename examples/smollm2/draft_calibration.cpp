// SPDX-License-Identifier: Apache-2.0
#include "draft_calibration.hpp"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include <common/safetensors.hpp>
#include <kvexact/compression/channel_statistics.hpp>
#include <kvexact/compression/echo_calibration.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact::examples {

namespace {

failure as_failure(const error& why) { return {why.code, why.message()}; }

layer_shape shape_of_layer(const model_shape& shape) {
  const auto dim = static_cast<std::uint32_t>(shape.head_dim);
  return {static_cast<std::uint32_t>(shape.kv_heads), dim, dim};
}
layer_tensors<const bf16> rows_of(const kv_cache& cache, std::size_t layer, std::size_t tokens, const layer_shape& shape) {
  return {strided_tensor<const bf16>::nhd(cache.keys(layer, tokens).data(), shape.kv_heads, shape.key_dim),
          strided_tensor<const bf16>::nhd(cache.values(layer, tokens).data(), shape.kv_heads, shape.value_dim)};
}

/// W_h^T W_h for the columns W_h [width, head_dim] of each head.
std::vector<float> head_grams(std::span<const bf16> weights, const model_shape& shape) {
  const std::size_t dim = shape.head_dim, square = dim * dim;
  std::vector<float> grams(shape.heads * square), row(shape.width);
  for (std::size_t output = 0; output < shape.width; ++output) {
    for (std::size_t c = 0; c < shape.width; ++c) row[c] = weights[output * shape.width + c].to_float();
    for (std::size_t head = 0; head < shape.heads; ++head) {
      for (std::size_t i = 0; i < square; ++i) grams[head * square + i] += row[head * dim + i / dim] * row[head * dim + i % dim];
    }
  }
  return grams;
}

/// Maps of the group of layers that begins with `first`.
outcome<std::shared_ptr<const echo_group>> fit_echo(const model_shape& shape, const kv_cache& cache, std::size_t first, std::size_t tokens) {
  const layer_shape each = shape_of_layer(shape);
  const std::size_t count = std::min(echo_layers, shape.layers - first);
  std::vector<layer_tensors<const bf16>> rows;
  for (std::size_t l = first; l < first + count; ++l) rows.push_back(rows_of(cache, l, tokens, each));
  const auto rotation = rotary::from_base(rotary_pairing::interleaved, each.key_dim, static_cast<double>(shape.rope_base));
  if (!rotation) return as_failure(rotation.error());
  auto calibration = echo_calibration<bf16>::make(std::vector<layer_shape>(count, each), *rotation);
  if (!calibration) return as_failure(calibration.error());
  const auto added = calibration->add(rows, 0, tokens);
  if (!added) return as_failure(added.error());
  const auto maps = calibration->fit({.kept_keys = each.channels(cache_part::key) / 2, .kept_values = each.channels(cache_part::value) / 2});
  if (!maps) return as_failure(maps.error());
  return *maps;
}

}  // namespace

outcome<draft_calibration> calibrate(engine& model, const std::string& folder, std::span<const std::uint32_t> ids) {
  try {
    if (ids.empty()) return failure{error_code::invalid_argument, "calibration needs some tokens"};
    const model_shape& shape = model.shape();
    auto cache = model.make_cache(ids.size());
    if (!cache) return cache.error();
    const auto hidden = model.forward(ids, 0, *cache);
    if (!hidden) return hidden.error();
    const auto file = safetensors_file::open(folder + "/model.safetensors");
    if (!file) return file.error();
    draft_calibration made;
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      auto statistics = channel_statistics::make(shape_of_layer(shape));
      if (!statistics) return as_failure(statistics.error());
      const auto added = statistics->add(rows_of(*cache, layer, ids.size(), shape_of_layer(shape)), ids.size());
      if (!added) return as_failure(added.error());
      made.key_means.push_back(*statistics->means(cache_part::key));
      made.value_means.push_back(*statistics->means(cache_part::value));
      const tensor* const output = file->find("blk." + std::to_string(layer) + ".attn_output.weight");
      if (output == nullptr) return failure{error_code::corrupt, folder + ": an output projection is missing"};
      made.output_grams.push_back(head_grams(output->as<bf16>(), shape));
    }
    for (std::size_t layer = 0; layer + 1 < shape.layers; layer += echo_layers) {
      const auto maps = fit_echo(shape, *cache, layer, ids.size());
      if (!maps) return maps.error();
      made.echo.push_back(*maps);
    }
    return made;
  } catch (const std::exception& caught) {
    return failure{error_code::out_of_memory, std::string("cannot calibrate: ") + caught.what()};
  }
}

}  // namespace kvexact::examples

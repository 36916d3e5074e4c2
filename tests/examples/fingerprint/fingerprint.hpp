// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>
#include <xxhash.h>

#include <smollm2/engine.hpp>
#include <smollm2/layerwise_engine.hpp>

#include <common/outcome.hpp>
#include <kvexact/tensor/cache_shape.hpp>

#include "../small_model.hpp"

namespace kvexact::examples::fingerprint {

struct named_options {
  const char* name;
  engine_options options;
};

/// Every way to compute a layer. With exact layers, the layer after them starts from what they left.
inline std::vector<named_options> ways() {
  return {{"bf16", {}},
          {"bf16_window", {.window = {4, 24}}},
          {"fp8", {.precision = precision::fp8}},
          {"int8_unrotated", {.precision = precision::int8, .rotated = false}},
          {"int8", {.precision = precision::int8}},
          {"int8_window", {.precision = precision::int8, .window = {4, 24}}},
          {"int8_exact_projections", {.precision = precision::int8, .exact_projections = true}},
          {"int8_group_32", {.precision = precision::int8, .exact_layers = 1, .group = 32}}};
}

inline std::vector<std::uint32_t> small_model_tokens() { return small_model::some_tokens(96); }

/// XXH64 over the predictions of all layers of a `layerwise_engine`. Its cache gets these predictions, somewhat changed, and its hidden
/// states get corrections, so that whatever differs anywhere spreads; tokens come in two ranges.
inline outcome<std::uint64_t> of(engine& model, std::span<const std::uint32_t> ids) {
  auto cache = model.make_cache(ids.size());
  if (!cache) return cache.error();
  layerwise_engine predictor(model, *cache, {ids.begin(), ids.end()});
  std::uint64_t hash = 0;
  for (const std::uint64_t end : {ids.size() * 2 / 5, ids.size()}) {
    const index_range tokens{predictor.tokens(), end};
    std::vector<float> keys(tokens.size() * model.shape().kv_width()), values(keys.size());
    auto going = predictor.begin(tokens);
    for (std::uint32_t layer = 0; going && layer < model.shape().layers; ++layer) {
      going = predictor.predict(layer, keys, values);
      const auto seed = static_cast<unsigned>(2 * layer + (tokens.begin != 0 ? 1 : 0));
      for (auto* const rows : {&keys, &values}) {
        hash = XXH64(rows->data(), rows->size() * sizeof(float), hash);
        const auto noise = small_model::normal_floats(rows->size(), seed, 0.0625F);
        for (std::size_t i = 0; i < noise.size(); ++i) (*rows)[i] += noise[i];
      }
      const auto correction = small_model::normal_floats(tokens.size() * predictor.hidden_width(), seed, 0.015625F);
      if (going) going = predictor.advance(layer, keys, values, correction);
    }
    if (!going) return failure{going.error().code, going.error().message()};
  }
  return hash;
}

/// The fingerprints of all ways to compute a model, in their order.
inline outcome<std::vector<std::pair<std::string, std::uint64_t>>> of_all(const std::string& path, std::span<const std::uint32_t> ids,
                                                                          unsigned threads, instruction_set isa) {
  std::vector<std::pair<std::string, std::uint64_t>> all;
  for (auto [name, options] : ways()) {
    options.threads = threads;
    options.isa = isa;
    auto model = engine::load(path, options);
    if (!model) return model.error();
    const auto hash = of(*model, ids);
    if (!hash) return hash.error();
    all.emplace_back(name, *hash);
  }
  return all;
}

}  // namespace kvexact::examples::fingerprint

// SPDX-License-Identifier: Apache-2.0
// The type list of the conformance suite. A new compressor is one line here.
#include <memory>
#include <utility>
#include <vector>

#include <kvexact/compression/centred.hpp>
#include <kvexact/compression/echo_kv.hpp>
#include <kvexact/compression/h2o.hpp>
#include <kvexact/compression/kivi.hpp>
#include <kvexact/compression/kvarn.hpp>
#include <kvexact/compression/outlier_split.hpp>
#include <kvexact/compression/quantised.hpp>
#include <kvexact/compression/rest_kv.hpp>
#include <kvexact/compression/scaled_float.hpp>
#include <kvexact/compression/snap_kv.hpp>
#include <kvexact/compression/src.hpp>
#include <kvexact/compression/streaming_llm.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/compression/turbo_quant.hpp>
#include <kvexact/compression/turbo_quant_product.hpp>
#include <kvexact/compression/uncompressed.hpp>

#include "any_compressor.hpp"
#include "whole_group.hpp"

namespace kvexact::test {

namespace {

template <class C>
std::unique_ptr<any_compressor> made(const layer_shape& shape, const typename C::options& options) {
  auto cache = C::make(shape, options);
  REQUIRE_MESSAGE(cache, cache.error().message());
  return std::make_unique<wrapped<C>>(*std::move(cache));
}

template <class Format>
using both = quantised<bf16, Format, Format>;

/// Means and outliers that fit any of the suite's shapes.
std::vector<float> some_means(std::uint32_t heads, std::uint32_t dim) { return std::vector<float>(std::size_t{heads} * dim, 0.25F); }
std::vector<std::uint32_t> some_channels(std::uint32_t heads) {
  std::vector<std::uint32_t> channels;
  for (std::uint32_t h = 0; h < heads; ++h) channels.insert(channels.end(), {1, 2, 3, 5});
  return channels;
}
dropper_options small_dropper(std::uint32_t query_heads) {
  return {.sinks = 2, .budget = 10, .window = 6, .interval = 8, .max_rollback = 7, .query_heads = query_heads};
}

/// Half of the channels are kept, the others are 0.9 of the same channel of the first layer.
std::shared_ptr<const echo_group> some_echo(const layer_shape& shape) {
  echo_group maps{*rotary::from_base(rotary_pairing::interleaved, 6, 1000.0), {{}}};
  for (const cache_part part : cache_parts) {
    echo_map& map = maps.followers[0][static_cast<std::size_t>(part)];
    const std::uint32_t channels = shape.channels(part);
    for (std::uint32_t c = 0; c < channels; c += 2) map.kept.push_back(c);
    map.bias.assign(channels - map.kept.size(), 0.0F);
    map.weights.assign(map.bias.size() * (channels + map.kept.size()), 0.0F);
    for (std::size_t i = 0; i < map.bias.size(); ++i) map.weights[i * (channels + map.kept.size()) + 2 * i + 1] = 0.9F;
  }
  return std::make_shared<const echo_group>(std::move(maps));
}

}  // namespace

const std::vector<listed_compressor>& all_compressors() {
  static const std::vector<listed_compressor> all{
      {"uncompressed", [](const layer_shape& s, std::uint32_t) { return made<uncompressed<bf16>>(s, {}); }},
      {"e4m3", [](const layer_shape& s, std::uint32_t) { return made<both<scaled_float<fp8_e4m3>>>(s, {}); }},
      {"e5m2, sinks", [](const layer_shape& s, std::uint32_t) { return made<both<scaled_float<fp8_e5m2>>>(s, {.keys = {}, .values = {}, .sinks = 3}); }},
      {"int8", [](const layer_shape& s, std::uint32_t) { return made<both<symmetric<8>>>(s, {}); }},
      {"int4, tail", [](const layer_shape& s, std::uint32_t) { return made<both<symmetric<4>>>(s, {.keys = {}, .values = {}, .tail = 11}); }},
      {"int3", [](const layer_shape& s, std::uint32_t) { return made<both<asymmetric<3>>>(s, {}); }},
      {"int2, no rollback", [](const layer_shape& s, std::uint32_t) { return made<both<asymmetric<2>>>(s, {.keys = {}, .values = {}, .max_rollback = 0}); }},
      {"KIVI 4, 2", [](const layer_shape& s, std::uint32_t) { return made<kivi<bf16, 4, 2>>(s, {.keys = {8}, .values = {}, .sinks = 8, .tail = 5, .max_rollback = 10}); }},
      {"KIVI 2, 2", [](const layer_shape& s, std::uint32_t) { return made<kivi<bf16, 2, 2>>(s, {.keys = {}, .values = {}, .tail = 64}); }},
      {"TurboQuant 4, 3", [](const layer_shape& s, std::uint32_t) { return made<quantised<bf16, turbo_quant<4>, turbo_quant<3>>>(s, {}); }},
      {"TurboQuant 2, Haar, unbiased", [](const layer_shape& s, std::uint32_t) {
         const turbo_quant<2>::options options{.rotation = {.kind = rotation_kind::haar}, .unbiased = true};
         return made<both<turbo_quant<2>>>(s, {.keys = options, .values = options});
       }},
      {"TurboQuant prod 3", [](const layer_shape& s, std::uint32_t) { return made<both<turbo_quant_product<3>>>(s, {}); }},
      {"TurboQuant outliers", [](const layer_shape& s, std::uint32_t) {
         using split = outlier_split<turbo_quant<3>, turbo_quant<2>>;
         const split::options options{.channels = some_channels(s.kv_heads), .outliers = {}, .rest = {}};
         return made<both<split>>(s, {.keys = options, .values = options});
       }},
      {"TurboQuant centred", [](const layer_shape& s, std::uint32_t) {
         return made<both<centred<turbo_quant<4>>>>(s, {.keys = {.means = some_means(s.kv_heads, s.key_dim), .inner = {}},
                                                        .values = {.means = some_means(s.kv_heads, s.value_dim), .inner = {}},
                                                        .tail = 16});
       }},
      {"KVarN 4, 2", [](const layer_shape& s, std::uint32_t) {
         return made<quantised<bf16, kvarn<4, cache_part::key>, kvarn<2, cache_part::value>>>(
             s, {.keys = {.group_tokens = 16}, .values = {.group_tokens = 16}, .sinks = 16, .tail = 16});
       }},
      {"EchoKV", [](const layer_shape& s, std::uint32_t) { return made<whole_group<echo_kv<bf16>, 2>>(s, {.maps = some_echo(s)}); }},
      {"StreamingLLM", [](const layer_shape& s, std::uint32_t) { return made<streaming_llm<bf16>>(s, {.sinks = 2, .window = 16, .interval = 8, .max_rollback = 7}); }},
      {"H2O", [](const layer_shape& s, std::uint32_t q) { return made<h2o<bf16>>(s, small_dropper(q)); }},
      {"SnapKV", [](const layer_shape& s, std::uint32_t q) { return made<snap_kv<bf16>>(s, {.eviction = small_dropper(q)}); }},
      {"SnapKV on int4", [](const layer_shape& s, std::uint32_t q) {
         return made<quantised_dropper<bf16, window_attention, symmetric<4>, symmetric<4>>>(
             s, {.rule = {.eviction = small_dropper(q)}, .keys = {}, .values = {}});
       }},
      {"H2O on TurboQuant 4, 3", [](const layer_shape& s, std::uint32_t q) {
         return made<quantised_dropper<bf16, accumulated_attention, turbo_quant<4>, turbo_quant<3>>>(
             s, {.rule = small_dropper(q), .keys = {}, .values = {}});
       }},
      {"SRC", [](const layer_shape& s, std::uint32_t q) { return made<src<bf16>>(s, {.eviction = small_dropper(q), .rank = 2}); }},
      {"ReST-KV", [](const layer_shape& s, std::uint32_t q) { return made<rest_kv<bf16>>(s, {.eviction = small_dropper(q)}); }},
  };
  return all;
}

}  // namespace kvexact::test

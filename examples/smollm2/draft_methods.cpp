// SPDX-License-Identifier: Apache-2.0
#include "draft_methods.hpp"

#include <algorithm>

#include <kvexact/compression/centred.hpp>
#include <kvexact/compression/h2o.hpp>
#include <kvexact/compression/kivi.hpp>
#include <kvexact/compression/kvarn.hpp>
#include <kvexact/compression/quantised.hpp>
#include <kvexact/compression/rest_kv.hpp>
#include <kvexact/compression/scaled_float.hpp>
#include <kvexact/compression/snap_kv.hpp>
#include <kvexact/compression/streaming_llm.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/compression/turbo_quant.hpp>
#include <kvexact/compression/uncompressed.hpp>

namespace kvexact::examples {

namespace {

using made_layer = result<std::unique_ptr<draft_layer>>;

template <class C>
made_layer make_layer(const layer_shape& shape, const typename C::options& options) {
  auto made = C::make(shape, options);
  if (!made) return made.error();
  return std::unique_ptr<draft_layer>(std::make_unique<draft_layer_of<C>>(*std::move(made)));
}
template <class C>
draft_method method(const char* name, const char* needs, const typename C::options& options) {
  return {name, needs, [options](const layer_shape& shape, std::size_t, const draft_setting&) { return make_layer<C>(shape, options); }};
}
/// Keys without their mean, which is calibrated.
template <int KeyBits, int ValueBits>
draft_method centred_turbo(const char* name) {
  using C = quantised<bf16, centred<turbo_quant<KeyBits>>, turbo_quant<ValueBits>>;
  return {name, "key means", [](const layer_shape& shape, std::size_t layer, const draft_setting& setting) {
            return make_layer<C>(shape, {.keys = {.means = setting.key_means[layer], .inner = {}}, .values = {}, .tail = tail});
          }};
}
/// Keeps a part of the prompt, decided at its end.
dropper_options prompt_eviction(const draft_setting& setting, double part) {
  constexpr std::uint32_t sinks = 4, window = 32, interval = 64;
  const auto kept = static_cast<std::uint32_t>(part * static_cast<double>(setting.context));
  return {.sinks = sinks,
          .budget = std::max(kept, sinks + window + 1) - sinks - window,
          .window = window,
          .first_eviction = setting.context - 1,
          .interval = interval,
          .query_heads = setting.query_heads};
}

}  // namespace

std::vector<draft_method> all_draft_methods() {
  using int8 = quantised<bf16, symmetric<8>, symmetric<8>>;
  using int4 = quantised<bf16, symmetric<4>, symmetric<4>>;
  using rounded3 = quantised<bf16, asymmetric<3>, asymmetric<3>>;
  using rounded2 = quantised<bf16, asymmetric<2>, asymmetric<2>>;
  using fp8 = quantised<bf16, scaled_float<fp8_e4m3>, scaled_float<fp8_e4m3>>;
  return {
      method<uncompressed<bf16>>("none", "-", {}),
      method<fp8>("fp8 e4m3, groups of 32", "-", {.keys = {}, .values = {}, .tail = tail}),
      method<int8>("int8, groups of 64", "-", {.keys = {64}, .values = {64}, .tail = tail}),
      method<int4>("int4, groups of 32", "-", {.keys = {32}, .values = {32}, .tail = tail}),
      method<int4>("int4, groups of 64", "-", {.keys = {64}, .values = {64}, .tail = tail}),
      method<kivi<bf16, 4, 4>>("KIVI 4, 4", "groups of 32 tokens", {.keys = {32}, .values = {32}, .tail = tail}),
      method<kivi<bf16, 4, 4>>("KIVI 4, 4, groups of 64", "groups of 64 tokens", {.keys = {64}, .values = {64}, .tail = tail}),
      method<quantised<bf16, turbo_quant<4>, turbo_quant<4>>>("TurboQuant 4, 4", "-", {.keys = {}, .values = {}, .tail = tail}),
      centred_turbo<4, 4>("TurboQuant 4, 4, keys centred"),
      method<quantised<bf16, kvarn<4, cache_part::key>, kvarn<4, cache_part::value>>>(
          "KVarN 4, 4", "tiles of 64 tokens", {.keys = {.group_tokens = 64}, .values = {.group_tokens = 64}, .tail = tail}),
      method<kivi<bf16, 4, 2>>("KIVI 4, 2", "groups of 32 tokens", {.keys = {32}, .values = {32}, .tail = tail}),
      centred_turbo<4, 3>("TurboQuant 4, 3, keys centred"),
      centred_turbo<3, 3>("TurboQuant 3, 3, keys centred"),
      method<rounded3>("int3, groups of 32", "-", {.keys = {32}, .values = {32}, .tail = tail}),
      method<quantised<bf16, kvarn<3, cache_part::key>, kvarn<3, cache_part::value>>>(
          "KVarN 3, 3", "tiles of 64 tokens", {.keys = {.group_tokens = 64}, .values = {.group_tokens = 64}, .tail = tail}),
      method<kivi<bf16, 2, 2>>("KIVI 2, 2", "groups of 32 tokens", {.keys = {32}, .values = {32}, .tail = tail}),
      method<rounded2>("int2, groups of 32", "-", {.keys = {32}, .values = {32}, .tail = tail}),
      method<quantised<bf16, kvarn<2, cache_part::key>, kvarn<2, cache_part::value>>>(
          "KVarN 2, 2", "tiles of 64 tokens", {.keys = {.group_tokens = 64}, .values = {.group_tokens = 64}, .tail = tail}),
      {"StreamingLLM, a quarter", "-",
       [](const layer_shape& shape, std::size_t, const draft_setting& setting) {
         return make_layer<streaming_llm<bf16>>(shape, {.window = static_cast<std::uint32_t>(setting.context / 4)});
       }},
      {"SnapKV, a quarter", "attention of 32 queries",
       [](const layer_shape& shape, std::size_t, const draft_setting& setting) {
         return make_layer<snap_kv<bf16>>(shape, {.eviction = prompt_eviction(setting, 0.25)});
       }},
      {"ReST-KV, a quarter", "attention of 32 queries",
       [](const layer_shape& shape, std::size_t, const draft_setting& setting) {
         return make_layer<rest_kv<bf16>>(shape, {.eviction = prompt_eviction(setting, 0.25)});
       }},
      {"H2O, a quarter", "attention of all queries",
       [](const layer_shape& shape, std::size_t, const draft_setting& setting) {
         return make_layer<h2o<bf16>>(shape, prompt_eviction(setting, 0.25));
       }},
  };
}

}  // namespace kvexact::examples

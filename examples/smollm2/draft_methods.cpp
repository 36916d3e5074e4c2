// SPDX-License-Identifier: Apache-2.0
#include "draft_methods.hpp"

#include <algorithm>

#include <kvexact/compression/centred.hpp>
#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/compression/echo_kv.hpp>
#include <kvexact/compression/h2o.hpp>
#include <kvexact/compression/kivi.hpp>
#include <kvexact/compression/kvarn.hpp>
#include <kvexact/compression/quantised.hpp>
#include <kvexact/compression/rest_kv.hpp>
#include <kvexact/compression/scaled_float.hpp>
#include <kvexact/compression/snap_kv.hpp>
#include <kvexact/compression/src.hpp>
#include <kvexact/compression/streaming_llm.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/compression/turbo_quant.hpp>
#include <kvexact/compression/uncompressed.hpp>

namespace kvexact::examples {

namespace {

template <class C>
result<any_draft_cache> as_any(result<C> made) {
  if (!made) return made.error();
  return any_draft_cache(*std::move(made));
}
/// Layers alike.
template <class C>
draft_method method(const char* name, const char* needs, const typename C::options& options) {
  return {name, needs, [options](const cache_shape& shape, const draft_setting&) { return as_any(draft_cache<C>::make(shape, {options})); }};
}
/// Options that depend on the setting: choose(layer, setting).
template <class C, class Choose>
draft_method chosen(const char* name, const char* needs, Choose choose) {
  return {name, needs, [choose](const cache_shape& shape, const draft_setting& setting) {
            return as_any(draft_cache<C>::make(shape, [&](std::uint32_t layer) { return typename draft_cache<C>::options{choose(layer, setting)}; }));
          }};
}
template <int KeyBits, int ValueBits>
draft_method turbo(const char* name, std::uint64_t sinks = 0) {
  return method<quantised<bf16, turbo_quant<KeyBits>, turbo_quant<ValueBits>>>(name, "-", {.keys = {}, .values = {}, .sinks = sinks, .tail = tail});
}
draft_method calibrated(draft_method method) {
  method.is_calibrated = true;
  return method;
}
/// Keys without their mean, which is calibrated.
template <int KeyBits, int ValueBits>
draft_method centred_turbo(const char* name, std::uint64_t sinks = 0) {
  using C = quantised<bf16, centred<turbo_quant<KeyBits>>, turbo_quant<ValueBits>>;
  return calibrated(chosen<C>(name, "key means", [sinks](std::uint32_t layer, const draft_setting& setting) {
    return typename C::options{.keys = {.means = setting.calibration->key_means[layer], .inner = {}}, .values = {}, .sinks = sinks, .tail = tail};
  }));
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
      turbo<4, 4>("TurboQuant 4, 4"),
      turbo<4, 4>("TurboQuant 4, 4, 4 exact sinks", 4),
      centred_turbo<4, 4>("TurboQuant 4, 4, keys centred"),
      centred_turbo<4, 4>("TurboQuant 4, 4, keys centred, 4 exact sinks", 4),
      method<quantised<bf16, kvarn<4, cache_part::key>, kvarn<4, cache_part::value>>>(
          "KVarN 4, 4", "tiles of 64 tokens", {.keys = {.group_tokens = 64}, .values = {.group_tokens = 64}, .tail = tail}),
      method<kivi<bf16, 4, 2>>("KIVI 4, 2", "groups of 32 tokens", {.keys = {32}, .values = {32}, .tail = tail}),
      turbo<4, 3>("TurboQuant 4, 3"),
      centred_turbo<4, 3>("TurboQuant 4, 3, keys centred"),
      turbo<3, 3>("TurboQuant 3, 3"),
      centred_turbo<3, 3>("TurboQuant 3, 3, keys centred"),
      method<rounded3>("int3, groups of 32", "-", {.keys = {32}, .values = {32}, .tail = tail}),
      method<quantised<bf16, kvarn<3, cache_part::key>, kvarn<3, cache_part::value>>>(
          "KVarN 3, 3", "tiles of 64 tokens", {.keys = {.group_tokens = 64}, .values = {.group_tokens = 64}, .tail = tail}),
      method<kivi<bf16, 2, 2>>("KIVI 2, 2", "groups of 32 tokens", {.keys = {32}, .values = {32}, .tail = tail}),
      method<rounded2>("int2, groups of 32", "-", {.keys = {32}, .values = {32}, .tail = tail}),
      method<quantised<bf16, kvarn<2, cache_part::key>, kvarn<2, cache_part::value>>>(
          "KVarN 2, 2", "tiles of 64 tokens", {.keys = {.group_tokens = 64}, .values = {.group_tokens = 64}, .tail = tail}),
      {"EchoKV, pairs of layers, half of every second one", "maps of layers",
       [](const cache_shape& shape, const draft_setting& setting) {
         using C = draft_cache<echo_kv<bf16>>;
         return as_any(C::make(shape, [&](std::uint32_t layer) { return C::options{{.maps = setting.calibration->echo[layer / echo_layers]}}; }));
       },
       true},
      chosen<streaming_llm<bf16>>("StreamingLLM, a quarter", "-", [](std::uint32_t, const draft_setting& setting) {
        return streaming_llm<bf16>::options({.window = static_cast<std::uint32_t>(setting.context / 4)});
      }),
      chosen<snap_kv<bf16>>("SnapKV, a quarter", "attention of 32 queries", [](std::uint32_t, const draft_setting& setting) {
        return snap_kv<bf16>::options({.eviction = prompt_eviction(setting, 0.25)});
      }),
      chosen<quantised_dropper<bf16, window_attention, symmetric<4>, symmetric<4>>>(
          "SnapKV, a quarter in int4", "attention of 32 queries", [](std::uint32_t, const draft_setting& setting) {
            return quantised_dropper<bf16, window_attention, symmetric<4>, symmetric<4>>::options{
                .rule = {.eviction = prompt_eviction(setting, 0.25)}, .keys = {32}, .values = {32}};
          }),
      chosen<quantised_dropper<bf16, window_attention, turbo_quant<4>, turbo_quant<4>>>(
          "SnapKV, a quarter in TurboQuant 4, 4", "attention of 32 queries", [](std::uint32_t, const draft_setting& setting) {
            return quantised_dropper<bf16, window_attention, turbo_quant<4>, turbo_quant<4>>::options{
                .rule = {.eviction = prompt_eviction(setting, 0.25)}, .keys = {}, .values = {}};
          }),
      chosen<src<bf16>>("SRC, a quarter", "queries and attention of 32 tokens", [](std::uint32_t, const draft_setting& setting) {
        return src<bf16>::options{.eviction = prompt_eviction(setting, 0.25), .rank = 4};
      }),
      chosen<rest_kv<bf16>>("ReST-KV, a quarter", "attention of 32 queries", [](std::uint32_t, const draft_setting& setting) {
        return rest_kv<bf16>::options({.eviction = prompt_eviction(setting, 0.25)});
      }),
      calibrated(chosen<rest_kv<bf16>>("ReST-KV with the output projection, a quarter", "attention of 32 queries", [](std::uint32_t layer, const draft_setting& setting) {
        return rest_kv<bf16>::options({.eviction = prompt_eviction(setting, 0.25), .output_gram = setting.calibration->output_grams[layer]});
      })),
      chosen<h2o<bf16>>("H2O, a quarter", "attention of all queries", [](std::uint32_t, const draft_setting& setting) {
        return h2o<bf16>::options(prompt_eviction(setting, 0.25));
      }),
  };
}

}  // namespace kvexact::examples

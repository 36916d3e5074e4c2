// SPDX-License-Identifier: Apache-2.0
// Values a second, one thread: packing and unpacking of heads of 64 and 128 channels. "x q4_0" is the ratio to ggml's q4_0 measured just
// before, if KVEXACT_GGML names a libggml-base.so (llama-cpp-python and llama.cpp bring one).
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvexact/compression/asymmetric.hpp>
#include <kvexact/compression/asymmetric_by_channel.hpp>
#include <kvexact/compression/kvarn.hpp>
#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/rotation.hpp>
#include <kvexact/compression/scaled_float.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/compression/turbo_quant.hpp>

using namespace kvexact;

namespace {

constexpr std::size_t values_at_once = 1 << 16;  // 256 KiB of floats: beyond the first cache, within the second

std::vector<float> some_values() {
  detail::normal_numbers random(1);
  std::vector<float> made(values_at_once);
  for (float& each : made) each = static_cast<float>(random.next());
  return made;
}

/// Seconds of processor time: what else runs on the machine does not count.
double now() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

/// Rates of q4_0, 0 until they are measured.
double peer_pack = 0, peer_unpack = 0;

struct ggml_functions {
  void (*quantise)(const float*, void*, std::int64_t) = nullptr;
  void (*dequantise)(const void*, float*, std::int64_t) = nullptr;
};
ggml_functions load_ggml() {
  ggml_functions found;
  const char* const path = std::getenv("KVEXACT_GGML");
  void* const library = path != nullptr ? dlopen(path, RTLD_NOW) : nullptr;
  if (library == nullptr) return found;
  found.quantise = reinterpret_cast<decltype(found.quantise)>(dlsym(library, "quantize_row_q4_0_ref"));
  found.dequantise = reinterpret_cast<decltype(found.dequantise)>(dlsym(library, "dequantize_row_q4_0"));
  return found;
}

/// Runs `body` and reports values a second; returns that rate.
template <class Body>
double measure(benchmark::State& state, double peer, Body&& body) {
  const auto start = now();
  std::size_t rounds = 0;
  for (auto _ : state) {
    body();
    benchmark::ClobberMemory();
    ++rounds;
  }
  const double rate = static_cast<double>(rounds * values_at_once) / (now() - start);
  state.SetItemsProcessed(static_cast<std::int64_t>(rounds * values_at_once));
  if (peer > 0) state.counters["x q4_0"] = rate / peer;
  return rate;
}

void q4_0_pack(benchmark::State& state) {
  static const ggml_functions ggml = load_ggml();
  if (ggml.quantise == nullptr) return state.SkipWithError("KVEXACT_GGML names no libggml-base.so");
  const std::vector<float> values = some_values();
  std::vector<std::byte> packed(values_at_once / 32 * 18);
  peer_pack = measure(state, 0, [&] { ggml.quantise(values.data(), packed.data(), values_at_once); });
}
void q4_0_unpack(benchmark::State& state) {
  static const ggml_functions ggml = load_ggml();
  if (ggml.quantise == nullptr || ggml.dequantise == nullptr) return state.SkipWithError("KVEXACT_GGML names no libggml-base.so");
  std::vector<float> values = some_values();
  std::vector<std::byte> packed(values_at_once / 32 * 18);
  ggml.quantise(values.data(), packed.data(), values_at_once);
  peer_unpack = measure(state, 0, [&] { ggml.dequantise(packed.data(), values.data(), values_at_once); });
}

template <quantiser Q>
void pack(benchmark::State& state) {
  const auto format = *Q::make(1, static_cast<std::uint32_t>(state.range(0)), typename Q::options{});
  const std::vector<float> values = some_values();
  std::vector<float> scratch(format.scratch_floats());
  std::vector<std::byte> packed(values_at_once / format.dim() / format.group_tokens() * format.packed_bytes());
  measure(state, peer_pack, [&] { format.pack(0, values, packed, scratch); });
}
template <quantiser Q>
void unpack(benchmark::State& state) {
  const auto format = *Q::make(1, static_cast<std::uint32_t>(state.range(0)), typename Q::options{});
  std::vector<float> values = some_values(), scratch(format.scratch_floats());
  std::vector<std::byte> packed(values_at_once / format.dim() / format.group_tokens() * format.packed_bytes());
  format.pack(0, values, packed, scratch);
  measure(state, peer_unpack, [&] { format.unpack(0, packed, values, scratch); });
}

using fp8 = scaled_float<fp8_e4m3>;
using int8 = symmetric<8>;
using int4 = symmetric<4>;
using kivi_keys = asymmetric_by_channel<4>;
using kivi_values = asymmetric<4>;
using turbo4 = turbo_quant<4>;
using turbo3 = turbo_quant<3>;
using kvarn_keys = kvarn<4, cache_part::key>;

}  // namespace

BENCHMARK(q4_0_pack);
BENCHMARK(pack<turbo4>)->Arg(64)->Arg(128);
BENCHMARK(pack<turbo3>)->Arg(128);
BENCHMARK(pack<int8>)->Arg(64);
BENCHMARK(pack<int4>)->Arg(64);
BENCHMARK(pack<kivi_keys>)->Arg(64);
BENCHMARK(pack<kivi_values>)->Arg(64);
BENCHMARK(pack<kvarn_keys>)->Arg(64);
BENCHMARK(pack<fp8>)->Arg(64);
BENCHMARK(q4_0_unpack);
BENCHMARK(unpack<turbo4>)->Arg(64)->Arg(128);
BENCHMARK(unpack<turbo3>)->Arg(128);
BENCHMARK(unpack<int8>)->Arg(64);
BENCHMARK(unpack<int4>)->Arg(64);
BENCHMARK(unpack<kivi_keys>)->Arg(64);
BENCHMARK(unpack<kivi_values>)->Arg(64);
BENCHMARK(unpack<kvarn_keys>)->Arg(64);
BENCHMARK(unpack<fp8>)->Arg(64);

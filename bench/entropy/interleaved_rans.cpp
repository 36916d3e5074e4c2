// SPDX-License-Identifier: Apache-2.0
// Encode and decode speed and code length loss of interleaved_rans by lane count, precision, number of tables and instruction set.
#include <string>

#include <kvexact/entropy/interleaved_rans.hpp>

#include "workload.hpp"

namespace {

using namespace kvexact;
using namespace kvexact::bench;

template <class Coder>
KVEXACT_ALWAYS_INLINE result<std::span<const std::byte>> encode_rows(const table_set<Coder::precision>& model, const workload& data,
                                                                     std::span<std::byte> buffer) {
  typename Coder::encoder encoder(buffer);
  for (std::size_t r = symbol_total / Coder::lanes; r-- > 0;) {
    encoder.put_row(model, data.contexts.data() + r * Coder::lanes, data.symbols.data() + r * Coder::lanes, Coder::lanes);
  }
  return encoder.finish();
}

template <class Coder>
KVEXACT_ALWAYS_INLINE bool decode_rows(const table_set<Coder::precision>& model, const workload& data, std::span<const std::byte> coded,
                                       std::vector<std::uint8_t>& out) {
  auto decoder = Coder::decoder::open(coded);
  for (std::size_t r = 0; r < symbol_total / Coder::lanes; ++r) {
    decoder->get_row(model, data.contexts.data() + r * Coder::lanes, out.data() + r * Coder::lanes, Coder::lanes);
  }
  return static_cast<bool>(decoder->finish());
}

template <class Coder, isa Isa>
struct kernels {
  static auto encode(const table_set<Coder::precision>& model, const workload& data, std::span<std::byte> buffer) {
    return encode_rows<Coder>(model, data, buffer);
  }
  static bool decode(const table_set<Coder::precision>& model, const workload& data, std::span<const std::byte> coded,
                     std::vector<std::uint8_t>& out) {
    return decode_rows<Coder>(model, data, coded, out);
  }
};

#ifdef KVEXACT_BENCH_X86
template <class Coder>
struct kernels<Coder, isa::avx2> {
  KVEXACT_BENCH_AVX2 static auto encode(const table_set<Coder::precision>& model, const workload& data, std::span<std::byte> buffer) {
    return encode_rows<Coder>(model, data, buffer);
  }
  KVEXACT_BENCH_AVX2 static bool decode(const table_set<Coder::precision>& model, const workload& data, std::span<const std::byte> coded,
                                        std::vector<std::uint8_t>& out) {
    return decode_rows<Coder>(model, data, coded, out);
  }
};

template <class Coder>
struct kernels<Coder, isa::avx512> {
  KVEXACT_BENCH_AVX512 static auto encode(const table_set<Coder::precision>& model, const workload& data, std::span<std::byte> buffer) {
    return encode_rows<Coder>(model, data, buffer);
  }
  KVEXACT_BENCH_AVX512 static bool decode(const table_set<Coder::precision>& model, const workload& data, std::span<const std::byte> coded,
                                          std::vector<std::uint8_t>& out) {
    return decode_rows<Coder>(model, data, coded, out);
  }
};
#endif

template <int Lanes, int Precision, isa Isa>
void decode(benchmark::State& state, std::size_t tables) {
  using coder = interleaved_rans<Lanes, Precision>;
  const auto& data = get_workload(tables);
  const auto model = table_set<Precision>::build(data.tables(Precision));
  std::vector<std::byte> buffer(coder::max_coded_bytes(symbol_total));
  const auto coded = kernels<coder, isa::baseline>::encode(*model, data, buffer);
  std::vector<std::uint8_t> out(symbol_total);
  bool ok = true;
  measure(state, symbol_total, [&] { ok = kernels<coder, Isa>::decode(*model, data, *coded, out) && ok; });
  if (!ok || out != data.symbols) state.SkipWithError("decoded symbols differ");
}

template <int Lanes, int Precision, isa Isa>
void encode(benchmark::State& state, std::size_t tables) {
  using coder = interleaved_rans<Lanes, Precision>;
  const auto& data = get_workload(tables);
  const auto frequency_tables = data.tables(Precision);
  const auto model = table_set<Precision>::build(frequency_tables);
  std::vector<std::byte> buffer(coder::max_coded_bytes(symbol_total));
  bool ok = true;
  measure(state, symbol_total, [&] { ok = static_cast<bool>(kernels<coder, Isa>::encode(*model, data, buffer)) && ok; });
  if (!ok) state.SkipWithError("encoder failed");
  state.counters["loss_bits"] = data.loss(frequency_tables);
}

template <int Lanes, int Precision, isa Isa>
void add(const char* isa_name) {
  if (!supported(Isa)) return;
  for (const std::size_t tables : {std::size_t{1}, std::size_t{13}, std::size_t{500}}) {
    const std::string name = "/lanes:" + std::to_string(Lanes) + "/precision:" + std::to_string(Precision) +
                             "/tables:" + std::to_string(tables) + "/" + isa_name;
    benchmark::RegisterBenchmark(("decode" + name).c_str(), decode<Lanes, Precision, Isa>, tables)->UseManualTime()->MinTime(0.1);
    benchmark::RegisterBenchmark(("encode" + name).c_str(), encode<Lanes, Precision, Isa>, tables)->UseManualTime()->MinTime(0.1);
  }
}

template <int Lanes, int Precision>
void add_all() {
  add<Lanes, Precision, isa::baseline>("baseline");
#ifdef KVEXACT_BENCH_X86
  add<Lanes, Precision, isa::avx2>("avx2");
  add<Lanes, Precision, isa::avx512>("avx512");
#endif
}

[[maybe_unused]] const bool registered = [] {
  add_all<32, 12>();
  add_all<16, 12>();
  add_all<64, 12>();
  add_all<32, 11>();
  add_all<32, 13>();
  add_all<32, 14>();
  return true;
}();

}  // namespace

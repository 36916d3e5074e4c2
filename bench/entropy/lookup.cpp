// SPDX-License-Identifier: Apache-2.0
// Ways to find the symbol of a slot, in the same row decoder on the same coded bytes: the lookup is no part of the format.
#include <array>
#include <string>
#include <utility>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/entropy/interleaved_rans.hpp>

#include "workload.hpp"

namespace {

using namespace kvexact;
using namespace kvexact::bench;

constexpr int lanes = 32;

struct found {
  std::uint32_t symbol, frequency, offset;
};

/// The library's slots: 4 bytes up to 12 bits of precision, else 8.
template <int P>
struct packed_slots {
  explicit packed_slots(const std::vector<frequency_table>& tables) : set(*table_set<P>::build(tables, build_for::decode)) {}
  KVEXACT_ALWAYS_INLINE found find(std::size_t context, std::uint32_t v) const {
    const auto slot = set.slots()[(static_cast<std::uint32_t>(context) << P) + v];
    return {slot.symbol(), slot.frequency(), slot.offset()};
  }
  [[nodiscard]] std::size_t bytes() const { return table_set<P>::memory_bytes(set.size(), build_for::decode); }
  table_set<P> set;
};

/// Slots of 8 bytes with a whole field for each number: nothing to unpack.
template <int P>
struct wide_slots {
  struct slot {
    std::uint32_t frequency;
    std::uint16_t offset;
    std::uint16_t symbol;
  };
  explicit wide_slots(const std::vector<frequency_table>& tables) {
    for (const auto& table : tables) {
      for (int s = 0; s < table.symbol_count(); ++s) {
        for (std::uint32_t i = 0; i < table.frequency(s); ++i) {
          slots.push_back({table.frequency(s), static_cast<std::uint16_t>(i), static_cast<std::uint16_t>(s)});
        }
      }
    }
  }
  KVEXACT_ALWAYS_INLINE found find(std::size_t context, std::uint32_t v) const {
    const slot s = slots[(static_cast<std::uint32_t>(context) << P) + v];
    return {s.symbol, s.frequency, s.offset};
  }
  [[nodiscard]] std::size_t bytes() const { return slots.size() * sizeof(slot); }
  std::vector<slot> slots;
};

/// One byte a slot for the symbol, then its range by a second lookup: a quarter or an eighth of the memory.
template <int P>
struct symbol_slots {
  struct range {
    std::uint16_t start, frequency_minus_1;
  };
  explicit symbol_slots(const std::vector<frequency_table>& tables) {
    for (const auto& table : tables) {
      for (int s = 0; s < table.symbol_count(); ++s) symbols.insert(symbols.end(), table.frequency(s), static_cast<std::uint8_t>(s));
      for (int s = 0; s < 256; ++s) {
        ranges.push_back({static_cast<std::uint16_t>(table.start(s)), static_cast<std::uint16_t>(table.frequency(s) - 1)});
      }
    }
  }
  KVEXACT_ALWAYS_INLINE found find(std::size_t context, std::uint32_t v) const {
    const std::uint8_t symbol = symbols[(static_cast<std::uint32_t>(context) << P) + v];
    const range r = ranges[(static_cast<std::uint32_t>(context) << 8) + symbol];
    return {symbol, r.frequency_minus_1 + 1U, v - r.start};
  }
  [[nodiscard]] std::size_t bytes() const { return symbols.size() + ranges.size() * sizeof(range); }
  std::vector<std::uint8_t> symbols;
  std::vector<range> ranges;
};

/// Binary search, seven steps without a branch, over the cumulative counts of 128 symbols.
template <int P>
struct cumulative_search {
  explicit cumulative_search(const std::vector<frequency_table>& tables) {
    for (const auto& table : tables) {
      auto& row = starts.emplace_back();
      for (int s = 0; s <= 128; ++s) row[static_cast<std::size_t>(s)] = static_cast<std::uint16_t>(table.start(s));
    }
  }
  KVEXACT_ALWAYS_INLINE found find(std::size_t context, std::uint32_t v) const {
    const std::uint16_t* row = starts[context].data();
    std::uint32_t s = 0;
    for (std::uint32_t step = 64; step > 0; step /= 2) s += step & (0U - (row[s + step] <= v ? 1U : 0U));
    return {s, static_cast<std::uint32_t>(row[s + 1] - row[s]), v - row[s]};
  }
  [[nodiscard]] std::size_t bytes() const { return starts.size() * sizeof(starts[0]); }
  std::vector<std::array<std::uint16_t, 130>> starts;
};

/// The first symbol of each of 128 equal ranges of slots, then a walk over the cumulative counts.
template <int P>
struct two_level {
  struct table_type {
    std::array<std::uint16_t, 130> starts;
    std::array<std::uint8_t, 128> first;
  };
  explicit two_level(const std::vector<frequency_table>& tables) {
    for (const auto& table : tables) {
      auto& row = rows.emplace_back();
      for (int s = 0; s <= 128; ++s) row.starts[static_cast<std::size_t>(s)] = static_cast<std::uint16_t>(table.start(s));
      std::uint8_t s = 0;
      for (std::uint32_t bucket = 0; bucket < 128; ++bucket) {
        while (row.starts[s + 1U] <= bucket << (P - 7)) ++s;
        row.first[bucket] = s;
      }
    }
  }
  KVEXACT_ALWAYS_INLINE found find(std::size_t context, std::uint32_t v) const {
    const table_type& row = rows[context];
    std::uint32_t s = row.first[v >> (P - 7)];
    while (row.starts[s + 1] <= v) ++s;
    return {s, static_cast<std::uint32_t>(row.starts[s + 1] - row.starts[s]), v - row.starts[s]};
  }
  [[nodiscard]] std::size_t bytes() const { return rows.size() * sizeof(rows[0]); }
  std::vector<table_type> rows;
};

/// Decodes whole rows; stops before the last words, which nobody checks here. Returns the number of rows.
template <int P, class Lookup>
KVEXACT_ALWAYS_INLINE std::size_t decode_rows(const Lookup& lookup, const workload& data, std::span<const std::byte> coded,
                                              std::vector<std::uint8_t>& out) {
  scalar_lanes<lanes> states;
  for (int i = 0; i < lanes; ++i) states.set_lane(i, load_little_endian<std::uint32_t>(coded.data() + 4 * i));
  const std::byte* next = coded.data() + 4 * lanes;
  const std::byte* const end = coded.data() + coded.size();
  std::size_t row = 0;
  for (; row < symbol_total / lanes && end - next >= 2 * lanes; ++row) {
    const std::uint16_t* contexts = data.contexts.data() + row * lanes;
    std::array<std::uint32_t, lanes> x, symbol, frequency, offset;
    for (int i = 0; i < lanes; ++i) x[static_cast<std::size_t>(i)] = states.lane(i);
    for (std::size_t i = 0; i < lanes; ++i) {
      const found f = lookup.find(contexts[i], x[i] & ((1U << P) - 1));
      symbol[i] = f.symbol;
      frequency[i] = f.frequency;
      offset[i] = f.offset;
    }
    for (std::size_t i = 0; i < lanes; ++i) x[i] = frequency[i] * (x[i] >> P) + offset[i];
    for (std::size_t i = 0; i < lanes; ++i) out[row * lanes + i] = static_cast<std::uint8_t>(symbol[i]);
    for (int i = 0; i < lanes; ++i) states.set_lane(i, x[static_cast<std::size_t>(i)]);
    next += 2 * states.refill(next);
  }
  return row;
}

template <int P, class Lookup, isa Isa>
struct kernel {
  static std::size_t run(const Lookup& lookup, const workload& data, std::span<const std::byte> coded, std::vector<std::uint8_t>& out) {
    return decode_rows<P>(lookup, data, coded, out);
  }
};

#ifdef KVEXACT_BENCH_X86
template <int P, class Lookup>
struct kernel<P, Lookup, isa::avx2> {
  KVEXACT_BENCH_AVX2 static std::size_t run(const Lookup& lookup, const workload& data, std::span<const std::byte> coded,
                                            std::vector<std::uint8_t>& out) {
    return decode_rows<P>(lookup, data, coded, out);
  }
};

template <int P, class Lookup>
struct kernel<P, Lookup, isa::avx512> {
  KVEXACT_BENCH_AVX512 static std::size_t run(const Lookup& lookup, const workload& data, std::span<const std::byte> coded,
                                              std::vector<std::uint8_t>& out) {
    return decode_rows<P>(lookup, data, coded, out);
  }
};
#endif

template <int P, class Lookup, isa Isa>
void decode(benchmark::State& state, std::size_t tables) {
  using coder = interleaved_rans<lanes, P>;
  const workload& data = get_workload(tables);
  const auto frequency_tables = data.tables(P);
  const auto model = table_set<P>::build(frequency_tables, build_for::encode);
  std::vector<std::byte> buffer(coder::max_coded_bytes(symbol_total));
  typename coder::encoder encoder(buffer);
  for (std::size_t r = symbol_total / lanes; r-- > 0;) {
    encoder.put_row(*model, data.contexts.data() + r * lanes, data.symbols.data() + r * lanes, lanes);
  }
  const auto coded = encoder.finish();
  const Lookup lookup(frequency_tables);
  std::vector<std::uint8_t> out(symbol_total);
  std::size_t rows = 0;
  measure(state, symbol_total, [&] { rows = kernel<P, Lookup, Isa>::run(lookup, data, *coded, out); });
  if (rows + 10 < symbol_total / lanes ||
      !std::equal(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(rows * lanes), data.symbols.begin())) {
    state.SkipWithError("decoded symbols differ");
  }
  state.counters["KiB"] = static_cast<double>(lookup.bytes()) / 1024;
}

template <int P, class Lookup, isa Isa>
void add(const std::string& name, const char* isa_name) {
  if (!supported(Isa)) return;
  for (const std::size_t tables : {std::size_t{1}, std::size_t{13}, std::size_t{500}}) {
    const std::string full = name + "/precision:" + std::to_string(P) + "/tables:" + std::to_string(tables) + "/" + isa_name;
    benchmark::RegisterBenchmark(full.c_str(), decode<P, Lookup, Isa>, tables)->UseManualTime()->MinTime(0.1);
  }
}

template <int P, class Lookup>
void add_all(const std::string& name) {
  add<P, Lookup, isa::baseline>(name, "baseline");
#ifdef KVEXACT_BENCH_X86
  add<P, Lookup, isa::avx2>(name, "avx2");
  add<P, Lookup, isa::avx512>(name, "avx512");
#endif
}

[[maybe_unused]] const bool registered = [] {
  add_all<12, packed_slots<12>>("packed_slots");
  add_all<12, wide_slots<12>>("wide_slots");
  add_all<12, symbol_slots<12>>("symbol_slots");
  add_all<12, cumulative_search<12>>("cumulative_search");
  add_all<12, two_level<12>>("two_level");
  add_all<14, packed_slots<14>>("packed_slots");
  add_all<14, symbol_slots<14>>("symbol_slots");
  add_all<14, cumulative_search<14>>("cumulative_search");
  add_all<14, two_level<14>>("two_level");
  return true;
}();

}  // namespace

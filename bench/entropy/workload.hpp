// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvexact/entropy/frequency_table.hpp>

// The kernels are instantiated once for the baseline and once for each instruction set, so that the same source is compared.
#if defined(__x86_64__) && defined(__GNUC__)
#define KVEXACT_BENCH_X86 1
#define KVEXACT_BENCH_AVX2 [[gnu::target("avx2,bmi,bmi2")]]
#define KVEXACT_BENCH_AVX512 [[gnu::target("avx2,bmi,bmi2,avx512f,avx512bw,avx512vl,avx512dq")]]
#endif

namespace kvexact::bench {

/// What residual coding gives an entropy coder: `table_count` Gaussian-like tables of 101 symbols whose sigma runs from 4 to 8
/// cells, and symbols drawn from the true distributions, each with a table drawn at random.
struct workload {
  std::vector<std::vector<double>> density;  // true probability of each symbol, table by table
  std::vector<std::uint16_t> contexts;
  std::vector<std::uint8_t> symbols;

  static constexpr int symbol_count = 101;

  workload(std::size_t table_count, std::size_t symbol_total) : contexts(symbol_total), symbols(symbol_total) {
    for (std::size_t t = 0; t < table_count; ++t) {
      const double sigma = 4.0 * std::exp2((static_cast<double>(t) + 0.5) / static_cast<double>(table_count));
      std::vector<double> p(symbol_count);
      double sum = 0;
      for (int s = 0; s < symbol_count; ++s) {
        // A little probability everywhere: real residuals have heavier tails than a Gaussian.
        p[static_cast<std::size_t>(s)] = std::exp(-0.5 * std::pow((s - symbol_count / 2) / sigma, 2)) + 1e-5;
        sum += p[static_cast<std::size_t>(s)];
      }
      for (double& value : p) value /= sum;
      density.push_back(std::move(p));
    }
    std::mt19937_64 random(7);
    std::vector<std::discrete_distribution<int>> draw;
    for (const auto& p : density) draw.emplace_back(p.begin(), p.end());
    for (std::size_t i = 0; i < symbol_total; ++i) {
      contexts[i] = static_cast<std::uint16_t>(random() % table_count);
      symbols[i] = static_cast<std::uint8_t>(draw[contexts[i]](random));
    }
  }

  [[nodiscard]] std::vector<frequency_table> tables(int precision) const {
    std::vector<frequency_table> all;
    for (const auto& p : density) {
      std::vector<std::uint64_t> counts;
      for (const double value : p) counts.push_back(static_cast<std::uint64_t>(value * 1e12) + 1);
      all.push_back(*frequency_table::from_counts(counts, precision));
    }
    return all;
  }

  /// Mean bits a symbol that coding with `tables` costs beyond the entropy of the true distributions.
  [[nodiscard]] double loss(const std::vector<frequency_table>& tables) const {
    double bits = 0;
    for (std::size_t t = 0; t < tables.size(); ++t) {
      for (int s = 0; s < symbol_count; ++s) {
        const double p = density[t][static_cast<std::size_t>(s)];
        bits += p * (std::log2(p) + tables[t].precision() - std::log2(static_cast<double>(tables[t].frequency(s))));
      }
    }
    return bits / static_cast<double>(tables.size());
  }
};

inline constexpr std::size_t symbol_total = std::size_t{1} << 18;

/// The workload of `symbol_total` symbols with that many tables, made once.
inline const workload& get_workload(std::size_t tables) {
  static std::map<std::size_t, std::unique_ptr<workload>> cache;
  auto& entry = cache[tables];
  if (!entry) entry = std::make_unique<workload>(tables, symbol_total);
  return *entry;
}

/// Instruction sets that a kernel is compiled for; the attributes are KVEXACT_BENCH_AVX2 and KVEXACT_BENCH_AVX512.
enum class isa { baseline, avx2, avx512 };

inline bool supported([[maybe_unused]] isa set) {
#ifdef KVEXACT_BENCH_X86
  if (set == isa::avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  if (set == isa::avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return set == isa::baseline;
}

/// Seconds that a memcpy of `bytes` bytes takes now: the best of a few.
inline double memcpy_seconds(std::size_t bytes) {
  std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes);
  double best = 1e9;
  for (int i = 0; i < 9; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::DoNotOptimize(to.data());
    benchmark::ClobberMemory();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

/// Runs `work` once an iteration and reports G values/s (best iteration) and the speed relative to a memcpy of two bytes a value,
/// measured next to it.
template <class Work>
void measure(benchmark::State& state, std::size_t values, Work&& work) {
  double best = 1e9;
  const double copy_before = memcpy_seconds(2 * values);
  for (auto _ : state) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    benchmark::ClobberMemory();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    state.SetIterationTime(seconds);
    best = std::min(best, seconds);
  }
  const double copy = std::min(copy_before, memcpy_seconds(2 * values));
  state.counters["Gvalues/s"] = static_cast<double>(values) / best / 1e9;
  state.counters["of_memcpy"] = copy / best;
}

}  // namespace kvexact::bench

// SPDX-License-Identifier: Apache-2.0
// Speed of integer_gemm by shape and instruction set, in 10^9 multiply-adds a second, and as a share of what multiply-add instructions do
// in registers alone (peak), measured next to it.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/intrinsics.hpp>
#include <kvexact/numeric/integer_gemm.hpp>

namespace {

using namespace kvexact;

/// Seconds of the fastest of `times` calls.
template <class Work>
double fastest(int times, Work&& work) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < times; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    benchmark::ClobberMemory();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

#ifdef KVEXACT_TARGET_AVX512

constexpr std::size_t peak_steps = 20000;
using chains = std::make_index_sequence<12>;  // enough for the latency of a multiplication, few enough for 16 registers

template <std::size_t... I>
std::int32_t peak_sse2(std::index_sequence<I...>) {
  __m128i x[]{_mm_set1_epi16(I)...};
  const __m128i factor = _mm_set1_epi16(3);
  for (std::size_t k = 0; k < peak_steps; ++k) ((x[I] = _mm_madd_epi16(x[I], factor)), ...);
  ((x[0] = _mm_xor_si128(x[0], x[I])), ...);
  return _mm_cvtsi128_si32(x[0]);
}

template <std::size_t... I>
[[gnu::target("avx2,bmi,bmi2")]] std::int32_t peak_avx2(std::index_sequence<I...>) {
  __m256i x[]{_mm256_set1_epi16(I)...};
  const __m256i factor = _mm256_set1_epi16(3);
  for (std::size_t k = 0; k < peak_steps; ++k) ((x[I] = _mm256_madd_epi16(x[I], factor)), ...);
  ((x[0] = _mm256_xor_si256(x[0], x[I])), ...);
  return _mm_cvtsi128_si32(_mm256_castsi256_si128(x[0]));
}

template <std::size_t... I>
KVEXACT_TARGET_AVX512 std::int32_t peak_avx512(std::index_sequence<I...>) {
  __m512i x[]{_mm512_set1_epi16(I)...};
  const __m512i factor = _mm512_set1_epi16(3);
  for (std::size_t k = 0; k < peak_steps; ++k) ((x[I] = _mm512_madd_epi16(x[I], factor)), ...);
  ((x[0] = _mm512_xor_si512(x[0], x[I])), ...);
  return _mm_cvtsi128_si32(_mm512_castsi512_si128(x[0]));
}

/// Multiply-adds a second that the instruction set can do.
double peak(instruction_set set) {
  const auto seconds = [](auto run) { return fastest(9, [&] { benchmark::DoNotOptimize(run(chains{})); }); };
  constexpr double steps = static_cast<double>(peak_steps * chains::size());
  if (set == instruction_set::avx512) return steps * 32 / seconds([](auto each) { return peak_avx512(each); });
  if (set == instruction_set::avx2) return steps * 16 / seconds([](auto each) { return peak_avx2(each); });
  return steps * 8 / seconds([](auto each) { return peak_sse2(each); });
}

#else

double peak(instruction_set) { return std::numeric_limits<double>::quiet_NaN(); }

#endif

struct shape {
  std::size_t rows, depth, columns;
};

void multiply(benchmark::State& state, instruction_set set, shape size) {
  std::vector<std::int16_t> a(size.rows * size.depth);
  std::vector<std::int16_t> b(size.columns * size.depth);
  std::vector<std::int32_t> out(size.rows * size.columns);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<std::int16_t>(static_cast<int>(i * 7919 % 255) - 127);
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<std::int16_t>(static_cast<int>(i * 104729 % 255) - 127);
  const auto work = [&] {
    run_on<integer_gemm>(set, a.data(), size.depth, size.rows, b.data(), size.depth, size.columns, size.depth, out.data(), size.columns);
  };
  double best = std::numeric_limits<double>::infinity();
  const double peak_before = peak(set);
  for (auto _ : state) best = std::min(best, fastest(1, work));
  const double speed = static_cast<double>(size.rows * size.depth * size.columns) / best;
  state.counters["Gmadd/s"] = speed / 1e9;
  state.counters["of_peak"] = speed / std::max(peak_before, peak(set));
}

[[maybe_unused]] const bool registered = [] {
  const std::array<const char*, 3> names{"baseline", "avx2", "avx512"};
  for (const instruction_set set : {instruction_set::baseline, instruction_set::avx2, instruction_set::avx512}) {
    if (set > best_instruction_set()) continue;
    // Maps of small and large models over the tokens of a chunk or a part of it, and the sums of a fit.
    for (const shape size : {shape{192, 1152, 256}, {192, 1152, 32}, {192, 200, 256}, {128, 6144, 64}, {64, 8192, 64}, {64, 256, 64}}) {
      const std::string name = "multiply/rows:" + std::to_string(size.rows) + "/depth:" + std::to_string(size.depth) +
                               "/columns:" + std::to_string(size.columns) + "/" + names[static_cast<std::size_t>(set)];
      benchmark::RegisterBenchmark(name.c_str(), multiply, set, size)->MinTime(0.2);
    }
  }
  return true;
}();

}  // namespace

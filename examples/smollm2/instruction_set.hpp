// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <kvexact/core/config.hpp>

namespace kvexact::examples {

/// What a kernel is compiled for. It never changes a result (a test compares them).
enum class instruction_set { baseline, avx2, avx512 };

#if defined(__x86_64__)
/// The best one this machine and its operating system have.
[[nodiscard]] inline instruction_set detect_instruction_set() noexcept {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return instruction_set::avx512;
  }
  return __builtin_cpu_supports("avx2") ? instruction_set::avx2 : instruction_set::baseline;
}
#else
[[nodiscard]] inline instruction_set detect_instruction_set() noexcept { return instruction_set::baseline; }
#endif

namespace detail {

/// What kernels are told of an instruction set: how many floats a register holds, and how many registers of sums leave room for the rest.
struct baseline_registers {
  static constexpr std::size_t register_lanes = 4, rows = 8;
};
struct avx2_registers {
  static constexpr std::size_t register_lanes = 8, rows = 8;
};
struct avx512_registers {
  static constexpr std::size_t register_lanes = 16, rows = 16;
};

#if defined(__x86_64__)
// The kernel's always-inlined body becomes part of these functions and is compiled for their instruction set.
template <class Kernel>
[[gnu::noinline, gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void run_avx512(const Kernel& kernel) noexcept {
  kernel.template run<avx512_registers>();
}
template <class Kernel>
[[gnu::noinline, gnu::target("avx2")]] void run_avx2(const Kernel& kernel) noexcept {
  kernel.template run<avx2_registers>();
}
#endif
template <class Kernel>
[[gnu::noinline]] void run_baseline(const Kernel& kernel) noexcept {
  kernel.template run<baseline_registers>();
}

}  // namespace detail

/// Runs `kernel.run<Registers>()`, compiled for `isa`.
template <class Kernel>
void run(instruction_set isa, const Kernel& kernel) noexcept {
#if defined(__x86_64__)
  if (isa == instruction_set::avx512) return detail::run_avx512(kernel);
  if (isa == instruction_set::avx2) return detail::run_avx2(kernel);
#endif
  static_cast<void>(isa);
  detail::run_baseline(kernel);
}

}  // namespace kvexact::examples

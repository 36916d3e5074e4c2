// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

#include <kvexact/core/config.hpp>

namespace kvexact {

/// Instruction sets for which hot loops are compiled. The choice never changes a result.
enum class instruction_set : std::uint8_t { baseline, avx2, avx512 };

#ifdef KVEXACT_TARGET_AVX512

/// The widest instruction set that the processor has and the operating system has enabled.
[[nodiscard]] inline instruction_set best_instruction_set() noexcept {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return instruction_set::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return instruction_set::avx2;
  return instruction_set::baseline;
}

namespace detail {

template <class Kernel, class... Arguments>
[[gnu::target("avx2,bmi,bmi2")]] void run_avx2(Arguments&&... arguments) noexcept {
  if constexpr (requires { Kernel::run_avx2(std::forward<Arguments>(arguments)...); }) {
    Kernel::run_avx2(std::forward<Arguments>(arguments)...);
  } else {
    Kernel::run(std::forward<Arguments>(arguments)...);
  }
}

template <class Kernel, class... Arguments>
KVEXACT_TARGET_AVX512 void run_avx512(Arguments&&... arguments) noexcept {
  if constexpr (requires { Kernel::run_avx512(std::forward<Arguments>(arguments)...); }) {
    Kernel::run_avx512(std::forward<Arguments>(arguments)...);
  } else {
    Kernel::run(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace detail

/// Calls Kernel::run(arguments...), which must be KVEXACT_ALWAYS_INLINE with everything it calls, compiled for `set`. A kernel that has
/// functions run_avx2(arguments...) or run_avx512(arguments...) of the same meaning, compiled for these, is called by that name.
template <class Kernel, class... Arguments>
void run_on(instruction_set set, Arguments&&... arguments) noexcept {
  switch (set) {
    case instruction_set::avx512: return detail::run_avx512<Kernel>(std::forward<Arguments>(arguments)...);
    case instruction_set::avx2: return detail::run_avx2<Kernel>(std::forward<Arguments>(arguments)...);
    case instruction_set::baseline: break;
  }
  Kernel::run(std::forward<Arguments>(arguments)...);
}

#else

[[nodiscard]] inline instruction_set best_instruction_set() noexcept { return instruction_set::baseline; }

template <class Kernel, class... Arguments>
void run_on(instruction_set, Arguments&&... arguments) noexcept {
  Kernel::run(std::forward<Arguments>(arguments)...);
}

#endif

}  // namespace kvexact

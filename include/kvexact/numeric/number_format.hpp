// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>

#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/fp16.hpp>
#include <kvexact/numeric/fp8_e4m3.hpp>
#include <kvexact/numeric/fp8_e5m2.hpp>

namespace kvexact {

/// Number of a format in streams and profiles.
enum class number_format : std::uint32_t { bfloat16 = 1, float16 = 2, float8_e4m3 = 3, float8_e5m2 = 4 };

/// The name that safetensors files use, or "unknown".
[[nodiscard]] constexpr const char* to_string(number_format format) noexcept {
  switch (format) {
    case number_format::bfloat16: return "BF16";
    case number_format::float16: return "F16";
    case number_format::float8_e4m3: return "F8_E4M3";
    case number_format::float8_e5m2: return "F8_E5M2";
  }
  return "unknown";
}

/// A scalar type that a cache may hold.
template <class T>
concept cache_scalar = std::same_as<T, bf16> || std::same_as<T, fp16> || std::same_as<T, fp8_e4m3> || std::same_as<T, fp8_e5m2>;

template <cache_scalar T>
inline constexpr number_format number_format_of = std::same_as<T, bf16>       ? number_format::bfloat16
                                                  : std::same_as<T, fp16>     ? number_format::float16
                                                  : std::same_as<T, fp8_e4m3> ? number_format::float8_e4m3
                                                                              : number_format::float8_e5m2;

/// Formats whose tensors come with a storage scale: value = number * scale.
template <cache_scalar T>
inline constexpr bool has_storage_scale = sizeof(T) == 1;

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/compression/packed_codes.hpp>
#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/scale.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>

namespace kvexact {

/// Integers from -(2^(Bits-1) - 1) to 2^(Bits-1) - 1, token by token, one fp16 scale for every `group_channels` consecutive channels:
/// Bits + 16 / group_channels bits a value. 8 bits are int8, 4 are int4.
template <int Bits>
class symmetric {
  static_assert(Bits >= 2 && Bits <= 8, "kvexact: symmetric has 2 to 8 bits");

 public:
  struct options {
    std::uint32_t group_channels = 32;
  };

  [[nodiscard]] static result<symmetric> make(std::uint32_t heads, std::uint32_t dim, const options& chosen = {}) noexcept {
    if (heads == 0 || dim == 0) return error{error_code::invalid_argument, "symmetric needs heads and channels"};
    if (chosen.group_channels == 0) return error{error_code::invalid_argument, "a group of symmetric needs channels"};
    return symmetric(dim, chosen.group_channels);
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return dim_; }
  [[nodiscard]] std::uint32_t group_channels() const noexcept { return group_; }
  [[nodiscard]] std::uint32_t group_tokens() const noexcept { return 1; }
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return code_bytes() + 2 * groups(); }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return (std::size_t{dim_} + 3) / 4; }

  std::uint64_t pack(std::uint32_t, std::span<const float> values, std::span<std::byte> packed, std::span<float> scratch) const noexcept {
    std::uint64_t saturated = 0;
    run_on<pack_kernel>(best_instruction_set(), *this, values, packed.data(), reinterpret_cast<std::uint8_t*>(scratch.data()), saturated);
    return saturated;
  }
  void unpack(std::uint32_t, std::span<const std::byte> packed, std::span<float> values, std::span<float> scratch) const noexcept {
    run_on<unpack_kernel>(best_instruction_set(), *this, packed.data(), values, reinterpret_cast<std::uint8_t*>(scratch.data()));
  }

  [[nodiscard]] std::size_t working_floats() const noexcept { return dim_; }
  void prepare(std::uint32_t, std::span<const float> query, std::span<float> prepared, std::span<float>) const noexcept {
    std::copy(query.begin(), query.end(), prepared.begin());
  }
  void dot(std::span<const float> prepared, std::span<const std::byte> packed, std::span<float> scores) const noexcept {
    run_on<dot_kernel>(best_instruction_set(), *this, prepared.data(), packed.data(), scores[0]);
  }
  void add_weighted(std::span<const float> weights, std::span<const std::byte> packed, std::span<float> sums) const noexcept {
    run_on<add_kernel>(best_instruction_set(), *this, weights[0], packed.data(), sums.data());
  }
  void finish(std::uint32_t, float, std::span<const float> sums, std::span<float> out, std::span<float>) const noexcept {
    std::copy_n(sums.begin(), dim_, out.begin());
  }

 private:
  static constexpr int largest = (1 << (Bits - 1)) - 1;

  symmetric(std::uint32_t dim, std::uint32_t group) noexcept : dim_(dim), group_(std::min(group, dim)) {}

  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t code_bytes() const noexcept { return detail::packed_code_bytes(dim_, Bits); }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t groups() const noexcept { return (dim_ - 1) / group_ + 1; }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t end_of(std::size_t g) const noexcept {
    const std::size_t end = (g + 1) * group_;
    return end < dim_ ? end : dim_;
  }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE float scale_of(const std::byte* packed, std::size_t g) const noexcept {
    return detail::load_fp16(packed + code_bytes() + 2 * g);
  }

  struct pack_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const symmetric& by, std::span<const float> values, std::byte* packed, std::uint8_t* codes,
                                          std::uint64_t& saturated) noexcept {
      for (std::size_t row = 0; row * by.dim_ < values.size(); ++row) {
        const float* const from = values.data() + row * by.dim_;
        std::byte* const to = packed + row * by.packed_bytes();
        for (std::size_t g = 0; g < by.groups(); ++g) {
          const std::size_t begin = g * by.group_, end = by.end_of(g);
          float amax = 0;
          for (std::size_t c = begin; c < end; ++c) {
            const float magnitude = from[c] < 0 ? -from[c] : from[c];
            amax = magnitude > amax ? magnitude : amax;
          }
          const fp16 stored = detail::fp16_at_least(amax / largest);
          detail::store_fp16(to + by.code_bytes() + 2 * g, stored);
          const float scale = stored.to_float();
          if (stored.bits == fp16::max_finite) saturated += count_beyond(from, begin, end, scale * largest);
          const float divisor = scale > 0 ? scale : 1;
          for (std::size_t c = begin; c < end; ++c) {
            float code = from[c] / divisor;
            code = code < -largest ? -largest : code > largest ? largest : code;
            codes[c] = static_cast<std::uint8_t>(static_cast<int>(detail::round_quotient(code)) + largest);
          }
        }
        detail::pack_codes<Bits>(codes, by.dim_, to);
      }
    }
    KVEXACT_NO_INLINE static std::uint64_t count_beyond(const float* from, std::size_t begin, std::size_t end, float limit) noexcept {
      return static_cast<std::uint64_t>(std::count_if(from + begin, from + end, [&](float value) { return std::fabs(value) > limit; }));
    }
  };
  struct unpack_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const symmetric& by, const std::byte* packed, std::span<float> values, std::uint8_t* codes) noexcept {
      for (std::size_t row = 0; row * by.dim_ < values.size(); ++row) {
        const std::byte* const from = packed + row * by.packed_bytes();
        float* const to = values.data() + row * by.dim_;
        detail::unpack_codes<Bits>(from, by.dim_, codes);
        for (std::size_t g = 0; g < by.groups(); ++g) {
          const float scale = by.scale_of(from, g);
          for (std::size_t c = g * by.group_; c < by.end_of(g); ++c) to[c] = scale * static_cast<float>(codes[c] - largest);
        }
      }
    }
  };
  struct dot_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const symmetric& by, const float* prepared, const std::byte* packed, float& score) noexcept {
      float sum = 0;
      for (detail::code_runs<Bits> run(packed, by.dim_, by.group_); run.next();) {
        float part = 0;
        for (std::size_t c = run.begin; c < run.end; ++c) part += prepared[c] * static_cast<float>(run.codes[c - run.begin] - largest);
        sum += by.scale_of(packed, run.group) * part;
      }
      score = sum;
    }
  };
  struct add_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const symmetric& by, float weight, const std::byte* packed, float* sums) noexcept {
      for (detail::code_runs<Bits> run(packed, by.dim_, by.group_); run.next();) {
        const float scaled = weight * by.scale_of(packed, run.group);
        for (std::size_t c = run.begin; c < run.end; ++c) sums[c] += scaled * static_cast<float>(run.codes[c - run.begin] - largest);
      }
    }
  };

  std::uint32_t dim_, group_;
};

}  // namespace kvexact

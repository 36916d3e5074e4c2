// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
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

namespace detail {

/// Step and offset of asymmetric rounding to nearest: value = code * step + offset, codes from 0 to 2^Bits - 1, the offset rounded down to
/// fp16 and the step up, so that they cover [least, most].
template <int Bits>
struct affine {
  static constexpr int top = (1 << Bits) - 1;

  fp16 step, offset;

  [[nodiscard]] KVEXACT_ALWAYS_INLINE static affine covering(float least, float most) noexcept {
    const fp16 offset = fp16_at_most(least);
    return {fp16_at_least((most - offset.to_float()) / top), offset};
  }
  [[nodiscard]] bool may_saturate() const noexcept {
    return step.bits == fp16::max_finite || (offset.bits & fp16::magnitude_mask) == fp16::max_finite;
  }
};

/// The code of a value, as a float; a step of 0 stands for 1.
template <int Bits>
[[nodiscard]] KVEXACT_ALWAYS_INLINE float affine_code(float value, float step, float offset) noexcept {
  float code = (value - offset) / step;
  code = code < 0 ? 0 : code > affine<Bits>::top ? affine<Bits>::top : code;
  return round_quotient(code);
}

}  // namespace detail

/// Asymmetric rounding to nearest, token by token: every `group_channels` consecutive channels have an fp16 step and an fp16 offset;
/// Bits + 32 / group_channels bits a value. KIVI (arXiv 2402.02750) stores values this way.
template <int Bits>
class asymmetric {
  static_assert(Bits >= 1 && Bits <= 8, "kvexact: asymmetric has 1 to 8 bits");

 public:
  struct options {
    std::uint32_t group_channels = 32;
  };

  [[nodiscard]] static result<asymmetric> make(std::uint32_t heads, std::uint32_t dim, const options& chosen = {}) noexcept {
    if (heads == 0 || dim == 0) return error{error_code::invalid_argument, "asymmetric needs heads and channels"};
    if (chosen.group_channels < 2) return error{error_code::invalid_argument, "a group of asymmetric needs two channels: one is its own minimum"};
    return asymmetric(dim, chosen.group_channels);
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return dim_; }
  [[nodiscard]] std::uint32_t group_channels() const noexcept { return group_; }
  [[nodiscard]] std::uint32_t group_tokens() const noexcept { return 1; }
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return code_bytes() + 4 * groups(); }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return (std::size_t{dim_} + 3) / 4; }

  std::uint64_t pack(std::uint32_t, std::span<const float> values, std::span<std::byte> packed, std::span<float> scratch) const noexcept {
    std::uint64_t saturated = 0;
    run_on<pack_kernel>(best_instruction_set(), *this, values, packed.data(), reinterpret_cast<std::uint8_t*>(scratch.data()), saturated);
    return saturated;
  }
  void unpack(std::uint32_t, std::span<const std::byte> packed, std::span<float> values, std::span<float>) const noexcept {
    run_on<unpack_kernel>(best_instruction_set(), *this, packed.data(), values);
  }

  /// Behind a query stand the sums of its groups, which the offsets are multiplied with; behind a sum, the offsets of its groups.
  [[nodiscard]] std::size_t working_floats() const noexcept { return dim_ + groups(); }
  void prepare(std::uint32_t, std::span<const float> query, std::span<float> prepared, std::span<float>) const noexcept {
    std::copy(query.begin(), query.end(), prepared.begin());
    std::fill(prepared.begin() + dim_, prepared.begin() + static_cast<std::ptrdiff_t>(working_floats()), 0.0F);
    for (std::size_t c = 0; c < dim_; ++c) prepared[dim_ + c / group_] += query[c];
  }
  void dot(std::span<const float> prepared, std::span<const std::byte> packed, std::span<float> scores) const noexcept {
    run_on<dot_kernel>(best_instruction_set(), *this, prepared.data(), packed.data(), scores[0]);
  }
  void add_weighted(std::span<const float> weights, std::span<const std::byte> packed, std::span<float> sums) const noexcept {
    run_on<add_kernel>(best_instruction_set(), *this, weights[0], packed.data(), sums.data());
  }
  void finish(std::uint32_t, float, std::span<const float> sums, std::span<float> out, std::span<float>) const noexcept {
    for (std::size_t c = 0; c < dim_; ++c) out[c] = sums[c] + sums[dim_ + c / group_];
  }

 private:
  using affine = detail::affine<Bits>;

  asymmetric(std::uint32_t dim, std::uint32_t group) noexcept : dim_(dim), group_(std::min(group, dim)) {}

  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t code_bytes() const noexcept { return detail::packed_code_bytes(dim_, Bits); }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t groups() const noexcept { return (dim_ - 1) / group_ + 1; }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE float step_of(const std::byte* packed, std::size_t g) const noexcept {
    return detail::load_fp16(packed + code_bytes() + 4 * g);
  }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE float offset_of(const std::byte* packed, std::size_t g) const noexcept {
    return detail::load_fp16(packed + code_bytes() + 4 * g + 2);
  }

  struct pack_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const asymmetric& by, std::span<const float> values, std::byte* packed, std::uint8_t* codes,
                                          std::uint64_t& saturated) noexcept {
      for (std::size_t row = 0; row * by.dim_ < values.size(); ++row) {
        const float* const from = values.data() + row * by.dim_;
        std::byte* const to = packed + row * by.packed_bytes();
        for (std::size_t g = 0; g < by.groups(); ++g) {
          const std::size_t begin = g * by.group_, end = begin + by.group_ < by.dim_ ? begin + by.group_ : by.dim_;
          float least = from[begin], most = from[begin];
          for (std::size_t c = begin; c < end; ++c) {
            least = from[c] < least ? from[c] : least;
            most = from[c] > most ? from[c] : most;
          }
          const affine found = affine::covering(least, most);
          detail::store_fp16(to + by.code_bytes() + 4 * g, found.step);
          detail::store_fp16(to + by.code_bytes() + 4 * g + 2, found.offset);
          const float offset = found.offset.to_float(), step = found.step.to_float();
          if (found.may_saturate()) saturated += count_beyond(from, begin, end, offset, offset + step * affine::top);
          const float divisor = step > 0 ? step : 1;
          for (std::size_t c = begin; c < end; ++c)
            codes[c] = static_cast<std::uint8_t>(static_cast<int>(detail::affine_code<Bits>(from[c], divisor, offset)));
        }
        detail::pack_codes<Bits>(codes, by.dim_, to);
      }
    }
    KVEXACT_NO_INLINE static std::uint64_t count_beyond(const float* from, std::size_t begin, std::size_t end, float least, float most) noexcept {
      return static_cast<std::uint64_t>(std::count_if(from + begin, from + end, [&](float value) { return value < least || value > most; }));
    }
  };
  struct unpack_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const asymmetric& by, const std::byte* packed, std::span<float> values) noexcept {
      for (std::size_t row = 0; row * by.dim_ < values.size(); ++row) {
        const std::byte* const from = packed + row * by.packed_bytes();
        float* const to = values.data() + row * by.dim_;
        for (detail::code_runs<Bits> run(from, by.dim_, by.group_); run.next();) {
          const float step = by.step_of(from, run.group), offset = by.offset_of(from, run.group);
          for (std::size_t c = run.begin; c < run.end; ++c) to[c] = static_cast<float>(run.codes[c - run.begin]) * step + offset;
        }
      }
    }
  };
  struct dot_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const asymmetric& by, const float* prepared, const std::byte* packed, float& score) noexcept {
      float sum = 0;
      for (std::size_t g = 0; g < by.groups(); ++g) sum += by.offset_of(packed, g) * prepared[by.dim_ + g];
      for (detail::code_runs<Bits> run(packed, by.dim_, by.group_); run.next();) {
        float part = 0;
        for (std::size_t c = run.begin; c < run.end; ++c) part += prepared[c] * static_cast<float>(run.codes[c - run.begin]);
        sum += by.step_of(packed, run.group) * part;
      }
      score = sum;
    }
  };
  struct add_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const asymmetric& by, float weight, const std::byte* packed, float* sums) noexcept {
      for (std::size_t g = 0; g < by.groups(); ++g) sums[by.dim_ + g] += weight * by.offset_of(packed, g);
      for (detail::code_runs<Bits> run(packed, by.dim_, by.group_); run.next();) {
        const float scaled = weight * by.step_of(packed, run.group);
        for (std::size_t c = run.begin; c < run.end; ++c) sums[c] += scaled * static_cast<float>(run.codes[c - run.begin]);
      }
    }
  };

  std::uint32_t dim_, group_;
};

}  // namespace kvexact

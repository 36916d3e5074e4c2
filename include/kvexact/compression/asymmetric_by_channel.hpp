// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/compression/asymmetric.hpp>
#include <kvexact/compression/packed_codes.hpp>
#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/scale.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>

namespace kvexact {

/// Asymmetric rounding to nearest, channel by channel: every channel of `group_tokens` aligned tokens has an fp16 step and an fp16 offset;
/// Bits + 32 / group_tokens bits a value. KIVI (arXiv 2402.02750) stores keys this way, whose outliers stay in their channels.
template <int Bits>
class asymmetric_by_channel {
  static_assert(Bits >= 1 && Bits <= 8, "kvexact: asymmetric_by_channel has 1 to 8 bits");

 public:
  struct options {
    std::uint32_t group_tokens = 32;
  };

  [[nodiscard]] static result<asymmetric_by_channel> make(std::uint32_t heads, std::uint32_t dim, const options& chosen = {}) noexcept {
    if (heads == 0 || dim == 0) return error{error_code::invalid_argument, "asymmetric_by_channel needs heads and channels"};
    if (chosen.group_tokens < 2)
      return error{error_code::invalid_argument, "a group of asymmetric_by_channel needs two tokens: one is its own minimum"};
    if (chosen.group_tokens > 1U << 16) return error{error_code::invalid_argument, "a group of asymmetric_by_channel has too many tokens"};
    return asymmetric_by_channel(dim, chosen.group_tokens);
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return dim_; }
  [[nodiscard]] std::uint32_t group_tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return tokens_ * row_bytes() + 4 * std::size_t{dim_}; }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return 2 * std::size_t{dim_} + (std::size_t{dim_} + 3) / 4; }

  std::uint64_t pack(std::uint32_t, std::span<const float> values, std::span<std::byte> packed, std::span<float> scratch) const noexcept {
    std::uint64_t saturated = 0;
    run_on<pack_kernel>(best_instruction_set(), *this, values, packed.data(), scratch.data(), saturated);
    return saturated;
  }
  void unpack(std::uint32_t, std::span<const std::byte> packed, std::span<float> values, std::span<float> scratch) const noexcept {
    run_on<unpack_kernel>(best_instruction_set(), *this, packed.data(), values, scratch.data());
  }

  [[nodiscard]] std::size_t working_floats() const noexcept { return dim_; }
  void prepare(std::uint32_t, std::span<const float> query, std::span<float> prepared, std::span<float>) const noexcept {
    std::copy(query.begin(), query.end(), prepared.begin());
  }
  void dot(std::span<const float> prepared, std::span<const std::byte> packed, std::span<float> scores) const noexcept {
    run_on<dot_kernel>(best_instruction_set(), *this, prepared.data(), packed.data(), scores.data());
  }
  void add_weighted(std::span<const float> weights, std::span<const std::byte> packed, std::span<float> sums) const noexcept {
    run_on<add_kernel>(best_instruction_set(), *this, weights.data(), packed.data(), sums.data());
  }
  void finish(std::uint32_t, float, std::span<const float> sums, std::span<float> out, std::span<float>) const noexcept {
    std::copy_n(sums.begin(), dim_, out.begin());
  }

 private:
  using affine = detail::affine<Bits>;
  static constexpr std::size_t run_channels = 64;

  asymmetric_by_channel(std::uint32_t dim, std::uint32_t tokens) noexcept : dim_(dim), tokens_(tokens) {}

  /// Each token's codes start at a byte.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t row_bytes() const noexcept { return detail::packed_code_bytes(dim_, Bits); }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE float step_of(const std::byte* packed, std::size_t c) const noexcept {
    return detail::load_fp16(packed + tokens_ * row_bytes() + 4 * c);
  }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE float offset_of(const std::byte* packed, std::size_t c) const noexcept {
    return detail::load_fp16(packed + tokens_ * row_bytes() + 4 * c + 2);
  }

  struct pack_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const asymmetric_by_channel& by, std::span<const float> values, std::byte* packed, float* scratch,
                                          std::uint64_t& saturated) noexcept {
      const std::size_t dim = by.dim_, group = dim * by.tokens_;
      float* const least = scratch;
      float* const most = scratch + dim;
      auto* const codes = reinterpret_cast<std::uint8_t*>(scratch + 2 * dim);
      for (const float* from = values.data(); from != values.data() + values.size(); from += group, packed += by.packed_bytes()) {
        for (std::size_t c = 0; c < dim; ++c) least[c] = most[c] = from[c];
        for (std::size_t t = 1; t < by.tokens_; ++t) {
          for (std::size_t c = 0; c < dim; ++c) {
            const float value = from[t * dim + c];
            least[c] = value < least[c] ? value : least[c];
            most[c] = value > most[c] ? value : most[c];
          }
        }
        for (std::size_t c = 0; c < dim; ++c) {
          const affine found = affine::covering(least[c], most[c]);
          std::byte* const at = packed + by.tokens_ * by.row_bytes() + 4 * c;
          detail::store_fp16(at, found.step);
          detail::store_fp16(at + 2, found.offset);
          const float offset = found.offset.to_float(), step = found.step.to_float();
          if (found.may_saturate()) saturated += count_beyond(from + c, by.tokens_, dim, offset, offset + step * affine::top);
          least[c] = offset;
          most[c] = step > 0 ? step : 1;
        }
        for (std::size_t t = 0; t < by.tokens_; ++t) {
          for (std::size_t c = 0; c < dim; ++c)
            codes[c] = static_cast<std::uint8_t>(static_cast<int>(detail::affine_code<Bits>(from[t * dim + c], most[c], least[c])));
          detail::pack_codes<Bits>(codes, dim, packed + t * by.row_bytes());
        }
      }
    }
    KVEXACT_NO_INLINE static std::uint64_t count_beyond(const float* from, std::size_t tokens, std::size_t dim, float least, float most) noexcept {
      std::uint64_t count = 0;
      for (std::size_t t = 0; t < tokens; ++t) count += from[t * dim] < least || from[t * dim] > most;
      return count;
    }
  };
  struct unpack_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const asymmetric_by_channel& by, const std::byte* packed, std::span<float> values,
                                          float* scratch) noexcept {
      const std::size_t dim = by.dim_, group = dim * by.tokens_;
      float* const steps = scratch;
      float* const offsets = scratch + dim;
      for (float* to = values.data(); to != values.data() + values.size(); to += group, packed += by.packed_bytes()) {
        for (std::size_t c = 0; c < dim; ++c) {
          steps[c] = by.step_of(packed, c);
          offsets[c] = by.offset_of(packed, c);
        }
        for (std::size_t t = 0; t < by.tokens_; ++t) {
          for (detail::code_runs<Bits> run(packed + t * by.row_bytes(), dim, dim); run.next();)
            for (std::size_t c = run.begin; c < run.end; ++c)
              to[t * dim + c] = static_cast<float>(run.codes[c - run.begin]) * steps[c] + offsets[c];
        }
      }
    }
  };
  struct dot_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const asymmetric_by_channel& by, const float* prepared, const std::byte* packed,
                                          float* scores) noexcept {
      float scaled[run_channels];
      for (std::size_t t = 0; t < by.tokens_; ++t) scores[t] = 0;
      for (std::size_t begin = 0; begin < by.dim_; begin += run_channels) {
        const std::size_t count = by.dim_ - begin < run_channels ? by.dim_ - begin : run_channels;
        float base = 0;
        for (std::size_t i = 0; i < count; ++i) {
          scaled[i] = prepared[begin + i] * by.step_of(packed, begin + i);
          base += prepared[begin + i] * by.offset_of(packed, begin + i);
        }
        for (std::size_t t = 0; t < by.tokens_; ++t) {
          std::uint8_t codes[run_channels];
          detail::unpack_codes<Bits>(packed + t * by.row_bytes() + begin * Bits / 8, count, codes);
          float sum = base;
          for (std::size_t i = 0; i < count; ++i) sum += scaled[i] * static_cast<float>(codes[i]);
          scores[t] += sum;
        }
      }
    }
  };
  struct add_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const asymmetric_by_channel& by, const float* weights, const std::byte* packed,
                                          float* sums) noexcept {
      float total = 0;
      for (std::size_t t = 0; t < by.tokens_; ++t) total += weights[t];
      for (std::size_t begin = 0; begin < by.dim_; begin += run_channels) {
        const std::size_t count = by.dim_ - begin < run_channels ? by.dim_ - begin : run_channels;
        float sum[run_channels] = {};
        for (std::size_t t = 0; t < by.tokens_; ++t) {
          std::uint8_t codes[run_channels];
          detail::unpack_codes<Bits>(packed + t * by.row_bytes() + begin * Bits / 8, count, codes);
          for (std::size_t i = 0; i < count; ++i) sum[i] += weights[t] * static_cast<float>(codes[i]);
        }
        for (std::size_t i = 0; i < count; ++i)
          sums[begin + i] += sum[i] * by.step_of(packed, begin + i) + total * by.offset_of(packed, begin + i);
      }
    }
  };

  std::uint32_t dim_, tokens_;
};

}  // namespace kvexact

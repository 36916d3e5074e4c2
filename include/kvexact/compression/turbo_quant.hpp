// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <kvexact/compression/lloyd_max.hpp>
#include <kvexact/compression/packed_codes.hpp>
#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/rotation.hpp>
#include <kvexact/compression/scale.hpp>
#include <kvexact/compression/turbo_quant_avx512.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>

namespace kvexact {

/// TurboQuant (arXiv 2504.19874, "mse"): each vector is rotated at random; then its coordinates are nearly those of a random point of a
/// sphere, and each is rounded to the best 2^Bits values for that. Stored are the codes and the vector's norm as fp16: Bits + 16 / dim
/// bits a value. The expected squared error relative to the vector is `distortion()`, whatever the vectors look like.
///
/// The norm covers the whole vector: channels with a large mean or far larger than others take precision from the rest. Take means off first
/// (`centred`), or give such channels a quantiser of their own (`outlier_split`).
template <int Bits>
class turbo_quant {
  static_assert(Bits >= 1 && Bits <= 8, "kvexact: turbo_quant has 1 to 8 bits");

 public:
  struct options {
    rotation_options rotation;
    /// Store norm / <u, v>, for the unit vector u and what stands for it, v, instead of the norm: products with any vector then have the
    /// right expectation, at a little more squared error.
    bool unbiased = false;
  };

  [[nodiscard]] static result<turbo_quant> make(std::uint32_t heads, std::uint32_t dim, const options& chosen = {}) noexcept {
    if (heads == 0) return error{error_code::invalid_argument, "turbo_quant needs heads"};
    auto table = lloyd_max_table::make(dim, Bits);
    if (!table) return table.error();
    auto rotation = orthonormal_rotation::make(dim, chosen.rotation);
    if (!rotation) return rotation.error();
    return turbo_quant(*table, *std::move(rotation), chosen.unbiased);
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return rotation_.dim(); }
  [[nodiscard]] std::uint32_t group_tokens() const noexcept { return 1; }
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return code_bytes() + 2; }
  /// Expected squared error of a unit vector (a random rotation, the norm exact).
  [[nodiscard]] double distortion() const noexcept { return distortion_; }
  [[nodiscard]] const orthonormal_rotation& rotation() const noexcept { return rotation_; }
  /// Of each code, for a unit vector; and the magnitudes from which on the next one is taken, the last of which means nothing.
  [[nodiscard]] const std::array<float, (std::size_t{1} << Bits)>& values() const noexcept { return values_; }
  [[nodiscard]] const std::array<float, (std::size_t{1} << (Bits - 1))>& thresholds() const noexcept { return thresholds_; }
  [[nodiscard]] bool unbiased() const noexcept { return unbiased_; }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return 2 * std::size_t{dim()} + (std::size_t{dim()} + 3) / 4; }

  std::uint64_t pack(std::uint32_t, std::span<const float> values, std::span<std::byte> packed, std::span<float> scratch) const noexcept {
    std::uint64_t saturated = 0;
    run_on<pack_kernel>(best_instruction_set(), *this, values, packed.data(), scratch.data(), saturated);
    return saturated;
  }
  void unpack(std::uint32_t, std::span<const std::byte> packed, std::span<float> values, std::span<float> scratch) const noexcept {
    run_on<unpack_kernel>(best_instruction_set(), *this, packed.data(), values, scratch.data());
  }

  /// Products and sums are those of rotated vectors.
  [[nodiscard]] std::size_t working_floats() const noexcept { return dim(); }
  void prepare(std::uint32_t, std::span<const float> query, std::span<float> prepared, std::span<float> scratch) const noexcept {
    std::copy(query.begin(), query.end(), prepared.begin());
    rotation_.forward(prepared.data(), scratch.data());
  }
  void dot(std::span<const float> prepared, std::span<const std::byte> packed, std::span<float> scores) const noexcept {
    run_on<dot_kernel>(best_instruction_set(), *this, prepared.data(), packed.data(), scores[0]);
  }
  void add_weighted(std::span<const float> weights, std::span<const std::byte> packed, std::span<float> sums) const noexcept {
    run_on<add_kernel>(best_instruction_set(), *this, weights[0], packed.data(), sums.data());
  }
  void finish(std::uint32_t, float, std::span<const float> sums, std::span<float> out, std::span<float> scratch) const noexcept {
    std::copy(sums.begin(), sums.begin() + dim(), out.begin());
    rotation_.backward(out.data(), scratch.data());
  }

 private:
  static constexpr std::size_t norm_lanes = 8;
  static constexpr std::size_t half = std::size_t{1} << (Bits - 1);

  turbo_quant(const lloyd_max_table& table, orthonormal_rotation rotation, bool unbiased) noexcept
      : rotation_(std::move(rotation)), distortion_(table.distortion()), unbiased_(unbiased) {
    for (std::size_t i = 0; i < half; ++i) {
      values_[half + i] = table.values()[i];
      values_[half - 1 - i] = -table.values()[i];
    }
    std::copy(table.thresholds().begin(), table.thresholds().end(), thresholds_.begin());
  }

  [[nodiscard]] KVEXACT_ALWAYS_INLINE std::size_t code_bytes() const noexcept { return detail::packed_code_bytes(rotation_.dim(), Bits); }

#ifdef KVEXACT_TARGET_AVX512
  /// Usual numbers of channels, in registers of 16: 32, 64, 80, 96, 128, 192, 256. Others go the plain way.
  using usual_registers = std::index_sequence<2, 4, 5, 6, 8, 12, 16>;
  /// Calls Kernel::in_registers<n>(arguments...) for vectors that fill n registers, if n is usual; whether it did.
  template <class Kernel, std::size_t... Registers, class... Arguments>
  [[nodiscard]] bool run_in_registers(std::index_sequence<Registers...>, Arguments&&... arguments) const noexcept {
    const std::size_t filled = rotation_.avx512_registers();
    return ((filled == Registers && (Kernel::template in_registers<Registers>(arguments...), true)) || ...);
  }
#endif

  struct pack_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const turbo_quant& by, std::span<const float> values, std::byte* packed, float* scratch,
                                          std::uint64_t& saturated) noexcept {
      const std::size_t dim = by.rotation_.dim();
      float* const rotated = scratch;
      auto* const codes = reinterpret_cast<std::uint8_t*>(scratch + 2 * dim);
      for (const float* from = values.data(); from != values.data() + values.size(); from += dim, packed += by.packed_bytes()) {
        double squares[norm_lanes] = {};
        add_squares(from, dim, squares);
        const float norm = norm_of(squares);
        for (std::size_t c = 0; c < dim; ++c) rotated[c] = from[c];
        by.rotation_.forward(rotated, scratch + dim);
        float limits[half];
        by.scale_thresholds(norm, limits);
        code(rotated, dim, limits, codes);
        detail::pack_codes<Bits>(codes, dim, packed);
        by.store_norm(rotated, codes, norm, packed, saturated);
      }
    }
#ifdef KVEXACT_TARGET_AVX512
    KVEXACT_TARGET_AVX512 static void run_avx512(const turbo_quant& by, std::span<const float> values, std::byte* packed, float* scratch,
                                                 std::uint64_t& saturated) noexcept {
      if constexpr (Bits <= 4)
        if (by.template run_in_registers<pack_kernel>(usual_registers{}, by, values, packed, scratch, saturated)) return;
      run(by, values, packed, scratch, saturated);
    }
    template <std::size_t Registers>
    KVEXACT_TARGET_AVX512 static void in_registers(const turbo_quant& by, std::span<const float> values, std::byte* packed, float* scratch,
                                                   std::uint64_t& saturated) noexcept {
      using avx512 = detail::turbo_quant_avx512;
      constexpr std::size_t dim = 16 * Registers;
      auto* const codes = reinterpret_cast<std::uint8_t*>(scratch + dim);
      const __m512 tree = avx512::tree<Bits>(by.thresholds_.data());
      for (const float* from = values.data(); from != values.data() + values.size(); from += dim, packed += by.packed_bytes()) {
        double squares[norm_lanes];
        avx512::squares(from, dim, squares);
        const float norm = norm_of(squares);
        __m512 rotated[Registers];
        for (std::size_t r = 0; r < Registers; ++r) rotated[r] = _mm512_loadu_ps(from + 16 * r);
        by.rotation_.forward_avx512(rotated);
        const __m512 limits = _mm512_mul_ps(tree, _mm512_set1_ps(norm));
        for (std::size_t r = 0; r < Registers; ++r) {
          const __m128i found = avx512::code<Bits>(rotated[r], limits);
          avx512::pack<Bits>(found, packed + r * 2 * Bits);
          if (!by.unbiased_) continue;
          _mm512_storeu_ps(scratch + 16 * r, rotated[r]);
          _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * r), found);
        }
        by.store_norm(scratch, codes, norm, packed, saturated);
      }
    }
#endif
  };
  /// Squares of floats are exact in double, so that fused or not, each of the partial sums has the same bits.
  KVEXACT_ALWAYS_INLINE static void add_squares(const float* vector, std::size_t dim, double* sums) noexcept {
    for (std::size_t c = 0; c < dim; ++c) sums[c % norm_lanes] += double{vector[c]} * double{vector[c]};
  }
  [[nodiscard]] KVEXACT_ALWAYS_INLINE static float norm_of(const double* squares) noexcept {
    double sum = 0;
    for (std::size_t lane = 0; lane < norm_lanes; ++lane) sum += squares[lane];
    return static_cast<float>(std::sqrt(sum));
  }
  KVEXACT_ALWAYS_INLINE void scale_thresholds(float norm, float* limits) const noexcept {
    for (std::size_t k = 0; k + 1 < half; ++k) limits[k] = thresholds_[k] * norm;
  }
  /// Nearest values of rotated channels, by magnitude; the top half of the codes is positive.
  KVEXACT_ALWAYS_INLINE static void code(const float* rotated, std::size_t dim, const float* limits, std::uint8_t* codes) noexcept {
    for (std::size_t c = 0; c < dim; ++c) {
      const float magnitude = rotated[c] < 0 ? -rotated[c] : rotated[c];
      std::int32_t found = half;
      for (std::size_t k = 0; k + 1 < half; ++k) found += magnitude >= limits[k] ? 1 : 0;
      codes[c] = static_cast<std::uint8_t>(rotated[c] < 0 ? static_cast<std::int32_t>(2 * half - 1) - found : found);
    }
  }
  KVEXACT_ALWAYS_INLINE void store_norm(const float* rotated, const std::uint8_t* codes, float norm, std::byte* packed,
                                        std::uint64_t& saturated) const noexcept {
    if (unbiased_ && norm > 0) norm *= stretch(rotated, codes, norm);
    detail::store_fp16(packed + code_bytes(), fp16::from_float_saturating(norm, saturated));
  }
  /// 1 / <u, v>.
  KVEXACT_NO_INLINE float stretch(const float* rotated, const std::uint8_t* codes, float norm) const noexcept {
    double product = 0;
    for (std::size_t c = 0; c < dim(); ++c) product += double{rotated[c]} * double{values_[codes[c]]};
    return static_cast<float>(norm / product);
  }

  struct unpack_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const turbo_quant& by, const std::byte* packed, std::span<float> values, float* scratch) noexcept {
      const std::size_t dim = by.rotation_.dim();
      for (float* to = values.data(); to != values.data() + values.size(); to += dim, packed += by.packed_bytes()) {
        const float norm = detail::load_fp16(packed + by.code_bytes());
        float scaled[2 * half];
        for (std::size_t k = 0; k < 2 * half; ++k) scaled[k] = by.values_[k] * norm;
        for (detail::code_runs<Bits> run(packed, dim, dim); run.next();)
          for (std::size_t c = run.begin; c < run.end; ++c) to[c] = scaled[run.codes[c - run.begin]];
        by.rotation_.backward(to, scratch);
      }
    }
#ifdef KVEXACT_TARGET_AVX512
    KVEXACT_TARGET_AVX512 static void run_avx512(const turbo_quant& by, const std::byte* packed, std::span<float> values,
                                                 float* scratch) noexcept {
      if constexpr (Bits <= 4)
        if (by.template run_in_registers<unpack_kernel>(usual_registers{}, by, packed, values)) return;
      run(by, packed, values, scratch);
    }
    template <std::size_t Registers>
    KVEXACT_TARGET_AVX512 static void in_registers(const turbo_quant& by, const std::byte* packed, std::span<float> values) noexcept {
      using avx512 = detail::turbo_quant_avx512;
      const __m512 table = _mm512_maskz_loadu_ps((1U << (2 * half)) - 1, by.values_.data());
      for (float* to = values.data(); to != values.data() + values.size(); to += 16 * Registers, packed += by.packed_bytes()) {
        const __m512 scaled = _mm512_mul_ps(table, _mm512_set1_ps(detail::load_fp16(packed + by.code_bytes())));
        __m512 vector[Registers];
        for (std::size_t r = 0; r < Registers; ++r) vector[r] = avx512::look_up<Bits>(packed + r * 2 * Bits, scaled);
        by.rotation_.backward_avx512(vector);
        for (std::size_t r = 0; r < Registers; ++r) _mm512_storeu_ps(to + 16 * r, vector[r]);
      }
    }
#endif
  };
  struct dot_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const turbo_quant& by, const float* prepared, const std::byte* packed, float& score) noexcept {
      const std::size_t dim = by.rotation_.dim();
      float sum = 0;
      for (detail::code_runs<Bits> run(packed, dim, dim); run.next();)
        for (std::size_t c = run.begin; c < run.end; ++c) sum += prepared[c] * by.values_[run.codes[c - run.begin]];
      score = sum * detail::load_fp16(packed + by.code_bytes());
    }
  };
  struct add_kernel {
    KVEXACT_ALWAYS_INLINE static void run(const turbo_quant& by, float weight, const std::byte* packed, float* sums) noexcept {
      const std::size_t dim = by.rotation_.dim();
      const float scaled = weight * detail::load_fp16(packed + by.code_bytes());
      for (detail::code_runs<Bits> run(packed, dim, dim); run.next();)
        for (std::size_t c = run.begin; c < run.end; ++c) sums[c] += scaled * by.values_[run.codes[c - run.begin]];
    }
  };

  orthonormal_rotation rotation_;
  std::array<float, 2 * half> values_{};
  std::array<float, half> thresholds_{};
  double distortion_;
  bool unbiased_;
};

}  // namespace kvexact

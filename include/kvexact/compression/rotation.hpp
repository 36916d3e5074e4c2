// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numbers>
#include <utility>
#include <vector>

#include <kvexact/compression/hadamard_avx512.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/split_mix.hpp>

namespace kvexact {

namespace detail {

/// Normal numbers by Box and Muller's transform; those of the standard library differ between libraries.
class normal_numbers {
 public:
  explicit normal_numbers(std::uint64_t seed) noexcept : state_(seed) {}
  [[nodiscard]] double next() noexcept {
    const double u = (static_cast<double>(split_mix(state_) >> 11) + 1) * 0x1p-53;
    const double v = unit_number(split_mix(state_));
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
  }

 private:
  std::uint64_t state_;
};

}  // namespace detail

/// How a vector is rotated before it is quantised, so that no coordinate stands out.
enum class rotation_kind : std::uint8_t {
  hadamard,  ///< rounds of random signs and a Walsh-Hadamard transform: dim * log2(dim) additions a round
  haar,      ///< a uniformly random orthonormal matrix: dim^2 multiplications
};

struct rotation_options {
  rotation_kind kind = rotation_kind::hadamard;
  std::uint32_t rounds = 0;  ///< of hadamard, 1 to 8; 0 for what is enough: 2, or 4 where the number of channels is no power of two
  std::uint64_t seed = 1;
};

/// An orthonormal matrix of any size, the same for the same options on every machine (a Haar matrix: but for the C library's logarithm and
/// cosine). Where `dim` is no power of two, each round transforms the first and then the last 2^floor(log2(dim)) coordinates. One round
/// is not enough for sparse vectors: it takes a unit vector to equal magnitudes, which a quantiser for spheres serves badly.
class orthonormal_rotation {
 public:
  static constexpr std::uint32_t most_haar_channels = 1024;

  /// Errors: invalid_argument (no channels, rounds out of range), out_of_range (a Haar matrix of more than `most_haar_channels`),
  /// out_of_memory.
  [[nodiscard]] static result<orthonormal_rotation> make(std::uint32_t dim, const rotation_options& chosen = {}) noexcept {
    if (dim == 0) return error{error_code::invalid_argument, "a rotation needs channels"};
    if (chosen.rounds > 8) return error{error_code::invalid_argument, "a rotation has 1 to 8 rounds"};
    if (chosen.kind == rotation_kind::haar && dim > most_haar_channels)
      return error{error_code::out_of_range, "a Haar rotation has too many channels"};
    const std::uint32_t rounds = chosen.rounds != 0 ? chosen.rounds : std::has_single_bit(dim) ? 2 : 4;
    try {
      std::vector<float> table = chosen.kind == rotation_kind::haar ? haar_matrix(dim, chosen.seed) : signs(std::size_t{dim} * rounds, chosen.seed);
      return orthonormal_rotation(dim, rounds, chosen.kind, std::make_shared<const std::vector<float>>(std::move(table)));
    } catch (...) {
      return error{error_code::out_of_memory, "a rotation's table"};
    }
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return dim_; }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return dim_; }
  [[nodiscard]] rotation_kind kind() const noexcept { return kind_; }
  [[nodiscard]] std::uint32_t rounds() const noexcept { return rounds_; }
  /// What a transform is multiplied with: 1 / sqrt(2^floor(log2(dim))).
  [[nodiscard]] float norm() const noexcept { return norm_; }
  /// Signs [rounds, dim] of hadamard, 1 or -1; the matrix [dim, dim] of haar.
  [[nodiscard]] const std::vector<float>& table() const noexcept { return *table_; }

  /// Rotates a vector [dim] in place.
  KVEXACT_ALWAYS_INLINE void forward(float* vector, float* scratch) const noexcept {
    if (kind_ == rotation_kind::haar) return multiply(vector, scratch, dim_, 1);
    for (std::size_t r = 0; r < rounds_; ++r) {
      flip(vector, r);
      transform(vector, scratch);
      if (block_ != dim_) transform(vector + (dim_ - block_), scratch);
    }
  }
  /// The inverse of `forward`.
  KVEXACT_ALWAYS_INLINE void backward(float* vector, float* scratch) const noexcept {
    if (kind_ == rotation_kind::haar) return multiply(vector, scratch, 1, dim_);
    for (std::size_t r = rounds_; r-- > 0;) {
      if (block_ != dim_) transform(vector + (dim_ - block_), scratch);
      transform(vector, scratch);
      flip(vector, r);
    }
  }

#ifdef KVEXACT_TARGET_AVX512
  /// Registers that a vector fills; 0 if it is not rotated by the functions below.
  [[nodiscard]] std::size_t avx512_registers() const noexcept { return kind_ == rotation_kind::hadamard && dim_ % 16 == 0 ? dim_ / 16 : 0; }
  /// The same bits, of a vector in registers.
  template <std::size_t Registers>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE void forward_avx512(__m512 (&vector)[Registers]) const noexcept {
    constexpr std::size_t block = std::bit_floor(Registers);
    for (std::size_t r = 0; r < rounds_; ++r) {
      flip_avx512(vector, r);
      detail::hadamard_avx512::transform<block>(vector, _mm512_set1_ps(norm_));
      if constexpr (block != Registers) detail::hadamard_avx512::transform<block>(vector + (Registers - block), _mm512_set1_ps(norm_));
    }
  }
  template <std::size_t Registers>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE void backward_avx512(__m512 (&vector)[Registers]) const noexcept {
    constexpr std::size_t block = std::bit_floor(Registers);
    for (std::size_t r = rounds_; r-- > 0;) {
      if constexpr (block != Registers) detail::hadamard_avx512::transform<block>(vector + (Registers - block), _mm512_set1_ps(norm_));
      detail::hadamard_avx512::transform<block>(vector, _mm512_set1_ps(norm_));
      flip_avx512(vector, r);
    }
  }
#endif

 private:
  orthonormal_rotation(std::uint32_t dim, std::uint32_t rounds, rotation_kind kind, std::shared_ptr<const std::vector<float>> table) noexcept
      : dim_(dim), block_(std::bit_floor(dim)), rounds_(rounds), kind_(kind), norm_(static_cast<float>(1 / std::sqrt(block_))),
        table_(std::move(table)) {}

  [[nodiscard]] static std::vector<float> signs(std::size_t count, std::uint64_t seed) {
    std::vector<float> made(count);
    for (float& sign : made) sign = (detail::split_mix(seed) >> 63) != 0 ? -1.0F : 1.0F;
    return made;
  }
  /// Rows of normal numbers, made orthonormal one after another (twice, which is enough for double precision).
  [[nodiscard]] static std::vector<float> haar_matrix(std::uint32_t dim, std::uint64_t seed) {
    const std::size_t n = dim;
    std::vector<double> rows(n * n);
    detail::normal_numbers random(seed);
    for (double& each : rows) each = random.next();
    for (std::size_t i = 0; i < n; ++i) {
      double* const row = rows.data() + i * n;
      for (int pass = 0; pass < 2; ++pass) {
        for (std::size_t j = 0; j < i; ++j) {
          const double* const other = rows.data() + j * n;
          const double product = product_of(row, other, n);
          for (std::size_t c = 0; c < n; ++c) row[c] -= product * other[c];
        }
      }
      const double norm = std::sqrt(product_of(row, row, n));
      for (std::size_t c = 0; c < n; ++c) row[c] /= norm;
    }
    return std::vector<float>(rows.begin(), rows.end());
  }
  /// By eight sums, which do not wait for one another.
  [[nodiscard]] static double product_of(const double* a, const double* b, std::size_t count) noexcept {
    constexpr std::size_t lanes = 8;
    double sums[lanes] = {}, total = 0;
    std::size_t c = 0;
    for (; c + lanes <= count; c += lanes)
      for (std::size_t lane = 0; lane < lanes; ++lane) sums[lane] += a[c + lane] * b[c + lane];
    for (; c < count; ++c) total += a[c] * b[c];
    for (const double sum : sums) total += sum;
    return total;
  }

  KVEXACT_ALWAYS_INLINE void flip(float* vector, std::size_t round) const noexcept {
    const float* const signs = table_->data() + round * dim_;
    for (std::size_t c = 0; c < dim_; ++c) vector[c] *= signs[c];
  }
#ifdef KVEXACT_TARGET_AVX512
  template <std::size_t Registers>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE void flip_avx512(__m512 (&vector)[Registers], std::size_t round) const noexcept {
    const float* const signs = table_->data() + round * dim_;
    for (std::size_t r = 0; r < Registers; ++r) vector[r] = _mm512_mul_ps(vector[r], _mm512_loadu_ps(signs + 16 * r));
  }
#endif
  /// Every stage adds and subtracts neighbours and shuffles all places alike, which compilers turn into vector instructions.
  KVEXACT_ALWAYS_INLINE void transform(float* vector, float* scratch) const noexcept {
    float* from = vector;
    float* to = scratch;
    for (std::size_t size = 1; size < block_; size *= 2) {
      stage(from, to, block_ / 2);
      float* const last = from;
      from = to;
      to = last;
    }
    for (std::size_t c = 0; c < block_; ++c) vector[c] = from[c] * norm_;
  }
  KVEXACT_ALWAYS_INLINE static void stage(const float* __restrict from, float* __restrict to, std::size_t half) noexcept {
    for (std::size_t i = 0; i < half; ++i) {
      const float a = from[2 * i], b = from[2 * i + 1];
      to[i] = a + b;
      to[half + i] = a - b;
    }
  }
  /// Products of two floats are exact in double, so that fused or not, each sum has the same bits.
  KVEXACT_ALWAYS_INLINE void multiply(float* vector, float* scratch, std::size_t row_stride, std::size_t column_stride) const noexcept {
    for (std::size_t r = 0; r < dim_; ++r) {
      double sum = 0;
      for (std::size_t c = 0; c < dim_; ++c)
        sum += static_cast<double>((*table_)[r * row_stride + c * column_stride]) * static_cast<double>(vector[c]);
      scratch[r] = static_cast<float>(sum);
    }
    for (std::size_t c = 0; c < dim_; ++c) vector[c] = scratch[c];
  }

  std::uint32_t dim_, block_, rounds_;
  rotation_kind kind_;
  float norm_;
  std::shared_ptr<const std::vector<float>> table_;
};

}  // namespace kvexact

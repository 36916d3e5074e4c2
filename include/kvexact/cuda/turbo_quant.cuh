// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include <kvexact/compression/packed_codes.hpp>
#include <kvexact/compression/rotation.hpp>
#include <kvexact/compression/scale.hpp>
#include <kvexact/compression/turbo_quant.hpp>
#include <kvexact/cuda/device_quantiser.cuh>

namespace kvexact::cuda {

/// `orthonormal_rotation` by lanes: the Hadamard kind, with its additions and subtractions.
struct hadamard_rotation {
  static constexpr std::uint32_t most_rounds = 8;

  std::uint32_t dim, block, rounds;
  float norm;
  std::uint8_t signs[most_rounds][most_channels / octet_channels];  ///< [round][octet]: a bit that is set turns a channel's sign

  /// Errors: unsupported (a Haar matrix, or a size that lanes cannot have).
  [[nodiscard]] static result<hadamard_rotation> make(const orthonormal_rotation& host) noexcept {
    if (const auto fits = expect_octets(host.dim()); !fits) return fits.error();
    if (host.kind() != rotation_kind::hadamard) return error{error_code::unsupported, "kernels rotate by Hadamard transforms only"};
    hadamard_rotation made{host.dim(), std::bit_floor(host.dim()), host.rounds(), host.norm(), {}};
    for (std::uint32_t r = 0; r < made.rounds; ++r) {
      for (std::uint32_t c = 0; c < made.dim; ++c) {
        const unsigned turned = host.table()[std::size_t{r} * made.dim + c] < 0 ? 1 : 0;
        made.signs[r][c / 8] = static_cast<std::uint8_t>(made.signs[r][c / 8] | turned << c % 8);
      }
    }
    return made;
  }

  template <lockstep_lanes L>
  KVEXACT_HOST_DEVICE void forward(const L& lanes, per_lane<L, octet>& row) const noexcept {
    for (std::uint32_t r = 0; r < rounds; ++r) {
      flip(lanes, row, r);
      transform(lanes, row, 0);
      if (block != dim) transform(lanes, row, dim - block);
    }
  }
  template <lockstep_lanes L>
  KVEXACT_HOST_DEVICE void backward(const L& lanes, per_lane<L, octet>& row) const noexcept {
    for (std::uint32_t r = rounds; r-- > 0;) {
      if (block != dim) transform(lanes, row, dim - block);
      transform(lanes, row, 0);
      flip(lanes, row, r);
    }
  }

  template <lockstep_lanes L>
  KVEXACT_HOST_DEVICE void flip(const L& lanes, per_lane<L, octet>& row, std::uint32_t round) const noexcept {
    lanes.each([&](int lane, octet& own) {
      const unsigned turned = signs[round][lane];
      for (int k = 0; k < octet_channels; ++k) own.v[k] = (turned >> k & 1) != 0 ? -own.v[k] : own.v[k];
    }, row);
  }
  /// Of the `block` channels from `first` on: neighbours at the distances 1, 2, 4 within lanes, the further ones between them.
  template <lockstep_lanes L>
  KVEXACT_HOST_DEVICE void transform(const L& lanes, per_lane<L, octet>& row, std::uint32_t first) const noexcept {
    const int begin = static_cast<int>(first) / octet_channels, count = static_cast<int>(block) / octet_channels;
    const auto takes_part = [&](int lane) { return lane >= begin && lane < begin + count; };
    lanes.each([&](int lane, octet& own) {
      if (!takes_part(lane)) return;
      for (int half = 1; half < octet_channels; half *= 2) {
        for (int k = 0; k < octet_channels; ++k) {
          if ((k & half) != 0) continue;
          const float a = own.v[k], b = own.v[k + half];
          own.v[k] = a + b;
          own.v[k + half] = a - b;
        }
      }
    }, row);
    for (int half = 1; half < count; half *= 2) {
      const auto partner = [&](int lane) { return takes_part(lane) ? begin + ((lane - begin) ^ half) : lane; };
      const per_lane<L, octet> other = lanes.shuffle(row, partner);
      lanes.each([&](int lane, octet& own, const octet& its) {
        if (!takes_part(lane)) return;
        const bool upper = ((lane - begin) & half) != 0;
        for (int k = 0; k < octet_channels; ++k) own.v[k] = upper ? its.v[k] - own.v[k] : own.v[k] + its.v[k];
      }, row, other);
    }
    lanes.each([&](int lane, octet& own) {
      if (!takes_part(lane)) return;
      for (int k = 0; k < octet_channels; ++k) own.v[k] = product(own.v[k], norm);
    }, row);
  }
};

/// `kvexact::turbo_quant` by lanes, for Hadamard rotations and without `unbiased`.
template <int Bits>
struct turbo_quant {
  using line = scaled_line;
  static constexpr int half = 1 << (Bits - 1);

  std::uint32_t dim;
  hadamard_rotation rotation;
  float codebook[2 * half];
  float thresholds[half];  ///< the last one is not used

  /// Errors: unsupported.
  [[nodiscard]] static result<turbo_quant> make(const kvexact::turbo_quant<Bits>& host) noexcept {
    if (host.unbiased()) return error{error_code::unsupported, "kernels do not make turbo_quant unbiased"};
    const auto rotation = hadamard_rotation::make(host.rotation());
    if (!rotation) return rotation.error();
    turbo_quant made{host.dim(), *rotation, {}, {}};
    for (std::size_t k = 0; k < host.values().size(); ++k) made.codebook[k] = host.values()[k];
    for (std::size_t k = 0; k < host.thresholds().size(); ++k) made.thresholds[k] = host.thresholds()[k];
    return made;
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE std::uint32_t group_tokens() const noexcept { return 1; }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::size_t code_bytes() const noexcept { return kvexact::detail::packed_code_bytes(dim, Bits); }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::size_t packed_bytes() const noexcept { return code_bytes() + 2; }

  template <lockstep_lanes L, class Number>
  KVEXACT_HOST_DEVICE void quantise(const L& lanes, const Number* row, std::ptrdiff_t, std::byte* packed) const noexcept {
    const per_lane<L, float> norms = norm_of(lanes, row);
    per_lane<L, octet> rotated{};
    lanes.each([&](int lane, octet& own) {
      if (lane < octets_of(*this)) own = load_octet(row, lane);
    }, rotated);
    rotate(lanes, rotated);
    lanes.each([&](int lane, const octet& own, const float& norm) {
      if (lane >= octets_of(*this)) return;
      octet_codes codes;
      for (int k = 0; k < octet_channels; ++k) codes[k] = half;
      for (int t = 0; t + 1 < half; ++t) {
        const float limit = product(thresholds[t], norm);
        for (int k = 0; k < octet_channels; ++k) codes[k] += (own.v[k] < 0 ? -own.v[k] : own.v[k]) >= limit ? 1 : 0;
      }
      for (int k = 0; k < octet_channels; ++k) codes[k] = own.v[k] < 0 ? 2 * half - 1 - codes[k] : codes[k];
      store_codes<Bits>(codes, packed + lane * Bits);
      unsigned saturated = 0;
      if (lane == 0) kvexact::detail::store_fp16(packed + code_bytes(), fp16::from_float_saturating(norm, saturated));
    }, rotated, norms);
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE line load_line(const std::byte* packed, int) const noexcept {
    return {load_scale(packed + code_bytes())};
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE octet load_numbers(const std::byte* packed, std::uint32_t, int lane) const noexcept {
    octet_codes codes;
    load_codes<Bits>(packed + lane * Bits, codes);
    octet made;
    for (int k = 0; k < octet_channels; ++k) made.v[k] = codebook[codes[k]];
    return made;
  }

  template <lockstep_lanes L>
  KVEXACT_HOST_DEVICE void rotate(const L& lanes, per_lane<L, octet>& row) const noexcept {
    rotation.forward(lanes, row);
  }
  template <lockstep_lanes L>
  KVEXACT_HOST_DEVICE void rotate_back(const L& lanes, per_lane<L, octet>& row) const noexcept {
    rotation.backward(lanes, row);
  }

  /// In the host's order: lane k < 8 sums the squares, which are exact in double, of channels k, k + 8, ...; then these are summed.
  template <lockstep_lanes L, class Number>
  [[nodiscard]] KVEXACT_HOST_DEVICE per_lane<L, float> norm_of(const L& lanes, const Number* row) const noexcept {
    per_lane<L, double> squares{}, sums{};
    lanes.each([&](int lane, double& sum) {
      for (auto c = static_cast<std::uint32_t>(lane % 8); c < dim; c += 8) {
        const double value = clipped_value(row[c]);
        sum += value * value;
      }
    }, squares);
    for (int k = 0; k < 8; ++k) {
      const per_lane<L, double> part = lanes.shuffle(squares, [&](int) { return k; });
      lanes.each([](int, double& sum, const double& own) { sum += own; }, sums, part);
    }
    per_lane<L, float> norms{};
    lanes.each([](int, float& norm, const double& sum) { norm = static_cast<float>(std::sqrt(sum)); }, norms, sums);
    return norms;
  }
};

static_assert(device_quantiser<turbo_quant<4>>);

}  // namespace kvexact::cuda

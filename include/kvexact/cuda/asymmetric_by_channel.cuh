// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvexact/compression/asymmetric_by_channel.hpp>
#include <kvexact/compression/packed_codes.hpp>
#include <kvexact/cuda/asymmetric.cuh>
#include <kvexact/cuda/device_quantiser.cuh>

namespace kvexact::cuda {

/// `kvexact::asymmetric_by_channel` by lanes, which never need each other: each has all tokens of its channels.
template <int Bits>
struct asymmetric_by_channel : unrotated {
  using line = affine_octet;

  std::uint32_t dim, tokens;

  [[nodiscard]] static result<asymmetric_by_channel> make(const kvexact::asymmetric_by_channel<Bits>& host) noexcept {
    if (const auto fits = expect_octets(host.dim()); !fits) return fits.error();
    return asymmetric_by_channel{{}, host.dim(), host.group_tokens()};
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE std::uint32_t group_tokens() const noexcept { return tokens; }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::size_t row_bytes() const noexcept { return kvexact::detail::packed_code_bytes(dim, Bits); }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::size_t packed_bytes() const noexcept { return tokens * row_bytes() + 4 * std::size_t{dim}; }

  template <lockstep_lanes L, class Number>
  KVEXACT_HOST_DEVICE void quantise(const L& lanes, const Number* rows, std::ptrdiff_t stride, std::byte* packed) const noexcept {
    lanes.each([&](int lane) {
      if (lane >= octets_of(*this)) return;
      value_range ranges[octet_channels];
      for (int k = 0; k < octet_channels; ++k) ranges[k] = value_range::nothing();
      for (std::uint32_t t = 0; t < tokens; ++t) {
        const octet own = load_octet(rows + t * stride, lane);
        for (int k = 0; k < octet_channels; ++k) ranges[k] = ranges[k].followed_by({own.v[k], own.v[k]});
      }
      affine_line by[octet_channels];
      for (int k = 0; k < octet_channels; ++k) {
        const auto stored = affine_covering<Bits>(ranges[k]);
        store_affine(stored, affine_at(packed, lane) + 4 * k);
        by[k] = line_of(stored);
      }
      for (std::uint32_t t = 0; t < tokens; ++t) {
        const octet own = load_octet(rows + t * stride, lane);
        octet_codes codes;
        for (int k = 0; k < octet_channels; ++k) codes[k] = affine_code_of<Bits>(own.v[k], by[k]);
        store_codes<Bits>(codes, packed + t * row_bytes() + lane * Bits);
      }
    });
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE line load_line(const std::byte* packed, int lane) const noexcept {
    line made;
    for (int k = 0; k < octet_channels; ++k) {
      const affine_line channel = load_affine(affine_at(packed, lane) + 4 * k);
      made.step.v[k] = channel.step;
      made.offset.v[k] = channel.offset;
    }
    return made;
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE octet load_numbers(const std::byte* packed, std::uint32_t row, int lane) const noexcept {
    octet_codes codes;
    load_codes<Bits>(packed + row * row_bytes() + lane * Bits, codes);
    octet made;
    for (int k = 0; k < octet_channels; ++k) made.v[k] = static_cast<float>(codes[k]);
    return made;
  }

 private:
  /// Where the steps and offsets of a lane's channels are.
  template <class Byte>
  [[nodiscard]] KVEXACT_HOST_DEVICE Byte* affine_at(Byte* packed, int lane) const noexcept {
    return packed + tokens * row_bytes() + lane * (4 * octet_channels);
  }
};

static_assert(device_quantiser<asymmetric_by_channel<4>>);

}  // namespace kvexact::cuda

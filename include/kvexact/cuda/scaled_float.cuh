// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvexact/compression/scale.hpp>
#include <kvexact/compression/scaled_float.hpp>
#include <kvexact/cuda/device_quantiser.cuh>

namespace kvexact::cuda {

/// `kvexact::scaled_float` by lanes, with groups of 8, 16, 32, ... channels, one of all, or no stored scales.
template <class Format>
struct scaled_float : unrotated {
  using line = scaled_line;

  std::uint32_t dim;
  channel_groups groups;
  bool stores_scales;
  float scale;  ///< where none are stored

  [[nodiscard]] static result<scaled_float> make(const kvexact::scaled_float<Format>& host) noexcept {
    const bool stores_scales = host.chosen().group_channels != 0;
    const auto groups = channel_groups::make(host.dim(), stores_scales ? host.chosen().group_channels : host.dim());
    if (!groups) return groups.error();
    return scaled_float{{}, host.dim(), *groups, stores_scales, host.chosen().scale};
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE std::uint32_t group_tokens() const noexcept { return 1; }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::size_t packed_bytes() const noexcept {
    return dim + (stores_scales ? 2 * std::size_t{groups.count()} : 0);
  }

  template <lockstep_lanes L, class Number>
  KVEXACT_HOST_DEVICE void quantise(const L& lanes, const Number* row, std::ptrdiff_t, std::byte* packed) const noexcept {
    const float top = finite_value(Format::from_bits(Format::max_finite));
    per_lane<L, octet> values{};
    per_lane<L, float> amax = load_with_magnitudes(lanes, dim, row, values);
    if (stores_scales) amax = largest_of_lanes(lanes, amax, groups.run(lanes.count()));
    lanes.each([&](int lane, const octet& own, const float& most) {
      if (lane >= octets_of(*this)) return;
      float by = scale;
      if (stores_scales) {
        const fp16 stored = kvexact::detail::fp16_at_least(quotient(most, top));
        if (groups.is_first(lane)) kvexact::detail::store_fp16(packed + dim + 2 * groups.of(lane), stored);
        by = finite_value(stored);
      }
      for (int k = 0; k < octet_channels; ++k) {
        unsigned saturated = 0;
        const float scaled = by > 0 ? quotient(own.v[k], by) : 0.0F;
        packed[lane * octet_channels + k] = static_cast<std::byte>(Format::from_float_saturating(scaled, saturated).bits);
      }
    }, values, amax);
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE line load_line(const std::byte* packed, int lane) const noexcept {
    return {stores_scales ? load_scale(packed + dim + 2 * groups.of(lane)) : scale};
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE octet load_numbers(const std::byte* packed, std::uint32_t, int lane) const noexcept {
    octet made;
    for (int k = 0; k < octet_channels; ++k)
      made.v[k] = finite_value(Format::from_bits(static_cast<std::uint8_t>(packed[lane * octet_channels + k])));
    return made;
  }
};

static_assert(device_quantiser<scaled_float<fp8_e4m3>>);

}  // namespace kvexact::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvexact/compression/packed_codes.hpp>
#include <kvexact/compression/scale.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/cuda/device_quantiser.cuh>

namespace kvexact::cuda {

/// `kvexact::symmetric` by lanes, with groups of 8, 16, 32, ... channels or one of all.
template <int Bits>
struct symmetric : unrotated {
  using line = scaled_line;
  static constexpr int largest = (1 << (Bits - 1)) - 1;

  std::uint32_t dim;
  channel_groups groups;

  [[nodiscard]] static result<symmetric> make(const kvexact::symmetric<Bits>& host) noexcept {
    const auto groups = channel_groups::make(host.dim(), host.group_channels());
    if (!groups) return groups.error();
    return symmetric{{}, host.dim(), *groups};
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE std::uint32_t group_tokens() const noexcept { return 1; }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::size_t code_bytes() const noexcept { return kvexact::detail::packed_code_bytes(dim, Bits); }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::size_t packed_bytes() const noexcept { return code_bytes() + 2 * std::size_t{groups.count()}; }

  template <lockstep_lanes L, class Number>
  KVEXACT_HOST_DEVICE void quantise(const L& lanes, const Number* row, std::ptrdiff_t, std::byte* packed) const noexcept {
    per_lane<L, octet> values{};
    per_lane<L, float> amax = load_with_magnitudes(lanes, dim, row, values);
    amax = largest_of_lanes(lanes, amax, groups.run(lanes.count()));
    lanes.each([&](int lane, const octet& own, const float& most) {
      if (lane >= octets_of(*this)) return;
      const fp16 stored = kvexact::detail::fp16_at_least(quotient(most, largest));
      if (groups.is_first(lane)) kvexact::detail::store_fp16(packed + code_bytes() + 2 * groups.of(lane), stored);
      const float scale = finite_value(stored), divisor = scale > 0 ? scale : 1;
      octet_codes codes;
      for (int k = 0; k < octet_channels; ++k) {
        float code = quotient(own.v[k], divisor);
        code = code < -largest ? -largest : code > largest ? largest : code;
        codes[k] = static_cast<std::uint32_t>(static_cast<int>(kvexact::detail::round_quotient(code)) + largest);
      }
      store_codes<Bits>(codes, packed + lane * Bits);
    }, values, amax);
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE line load_line(const std::byte* packed, int lane) const noexcept {
    return {load_scale(packed + code_bytes() + 2 * groups.of(lane))};
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE octet load_numbers(const std::byte* packed, std::uint32_t, int lane) const noexcept {
    octet_codes codes;
    load_codes<Bits>(packed + lane * Bits, codes);
    octet made;
    for (int k = 0; k < octet_channels; ++k) made.v[k] = static_cast<float>(static_cast<int>(codes[k]) - largest);
    return made;
  }
};

static_assert(device_quantiser<symmetric<4>>);

}  // namespace kvexact::cuda

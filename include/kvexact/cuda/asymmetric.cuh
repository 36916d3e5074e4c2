// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include <kvexact/compression/asymmetric.hpp>
#include <kvexact/compression/packed_codes.hpp>
#include <kvexact/compression/scale.hpp>
#include <kvexact/cuda/device_quantiser.cuh>

namespace kvexact::cuda {

/// The smallest and the largest of values that are met in order: the first one of those that are equal, since zeros have signs.
struct value_range {
  float least, most;

  [[nodiscard]] KVEXACT_HOST_DEVICE static value_range nothing() noexcept {
    return {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()};
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE value_range followed_by(const value_range& later) const noexcept {
    return {later.least < least ? later.least : least, later.most > most ? later.most : most};
  }
};

/// The step and the offset that cover a range, as `kvexact::detail::affine::covering` finds them.
template <int Bits>
[[nodiscard]] KVEXACT_HOST_DEVICE kvexact::detail::affine<Bits> affine_covering(const value_range& range) noexcept {
  const fp16 offset = kvexact::detail::fp16_at_most(range.least);
  return {kvexact::detail::fp16_at_least(quotient(range.most - finite_value(offset), kvexact::detail::affine<Bits>::top)), offset};
}
template <int Bits>
KVEXACT_HOST_DEVICE void store_affine(const kvexact::detail::affine<Bits>& by, std::byte* at) noexcept {
  kvexact::detail::store_fp16(at, by.step);
  kvexact::detail::store_fp16(at + 2, by.offset);
}
[[nodiscard]] KVEXACT_HOST_DEVICE inline affine_line load_affine(const std::byte* at) noexcept {
  return {load_scale(at), load_scale(at + 2)};
}
template <int Bits>
[[nodiscard]] KVEXACT_HOST_DEVICE affine_line line_of(const kvexact::detail::affine<Bits>& by) noexcept {
  return {finite_value(by.step), finite_value(by.offset)};
}

template <int Bits>
[[nodiscard]] KVEXACT_HOST_DEVICE std::uint32_t affine_code_of(float value, const affine_line& by) noexcept {
  constexpr int top = kvexact::detail::affine<Bits>::top;
  float code = quotient(value - by.offset, by.step > 0 ? by.step : 1);
  code = code < 0 ? 0 : code > top ? top : code;
  return static_cast<std::uint32_t>(static_cast<int>(kvexact::detail::round_quotient(code)));
}

/// `kvexact::asymmetric` by lanes, with groups of 8, 16, 32, ... channels or one of all.
template <int Bits>
struct asymmetric : unrotated {
  using line = affine_line;

  std::uint32_t dim;
  channel_groups groups;

  [[nodiscard]] static result<asymmetric> make(const kvexact::asymmetric<Bits>& host) noexcept {
    const auto groups = channel_groups::make(host.dim(), host.group_channels());
    if (!groups) return groups.error();
    return asymmetric{{}, host.dim(), *groups};
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE std::uint32_t group_tokens() const noexcept { return 1; }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::size_t code_bytes() const noexcept { return kvexact::detail::packed_code_bytes(dim, Bits); }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::size_t packed_bytes() const noexcept { return code_bytes() + 4 * std::size_t{groups.count()}; }

  template <lockstep_lanes L, class Number>
  KVEXACT_HOST_DEVICE void quantise(const L& lanes, const Number* row, std::ptrdiff_t, std::byte* packed) const noexcept {
    per_lane<L, octet> values{};
    per_lane<L, value_range> ranges{};
    lanes.each([&](int lane, octet& own, value_range& range) {
      range = value_range::nothing();
      if (lane >= octets_of(*this)) return;
      own = load_octet(row, lane);
      for (int k = 0; k < octet_channels; ++k) range = range.followed_by({own.v[k], own.v[k]});
    }, values, ranges);
    ranges = combine_lanes<value_range>(lanes, ranges, groups.run(lanes.count()),
                                        [](const value_range& a, const value_range& b) { return a.followed_by(b); });
    lanes.each([&](int lane, const octet& own, const value_range& range) {
      if (lane >= octets_of(*this)) return;
      const auto stored = affine_covering<Bits>(range);
      if (groups.is_first(lane)) store_affine(stored, packed + code_bytes() + 4 * groups.of(lane));
      const affine_line by = line_of(stored);
      octet_codes codes;
      for (int k = 0; k < octet_channels; ++k) codes[k] = affine_code_of<Bits>(own.v[k], by);
      store_codes<Bits>(codes, packed + lane * Bits);
    }, values, ranges);
  }

  [[nodiscard]] KVEXACT_HOST_DEVICE line load_line(const std::byte* packed, int lane) const noexcept {
    return load_affine(packed + code_bytes() + 4 * groups.of(lane));
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE octet load_numbers(const std::byte* packed, std::uint32_t, int lane) const noexcept {
    octet_codes codes;
    load_codes<Bits>(packed + lane * Bits, codes);
    octet made;
    for (int k = 0; k < octet_channels; ++k) made.v[k] = static_cast<float>(codes[k]);
    return made;
  }
};

static_assert(device_quantiser<asymmetric<4>>);

}  // namespace kvexact::cuda

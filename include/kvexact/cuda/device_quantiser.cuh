// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <kvexact/core/config.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/cuda/lockstep_lanes.cuh>
#include <kvexact/cuda/octet.cuh>

namespace kvexact::cuda {

/// A quantiser as lanes compute it, with the groups and bytes of the one on the host that `make` takes it from: a plain aggregate of
/// parameters, which kernels take by value. Lane i has octet i of every row; lanes from dim / 8 on have none. `dim` is a multiple of 8, at
/// most 256 (`unsupported` otherwise).
///
/// - `quantise(lanes, rows, stride, packed)`: packs one group, whose rows are `stride` numbers apart: finite ones; magnitudes above 1e30
///   count as 1e30, as in `quantised`. Codes and scales have the bits that the host's quantiser gives.
/// - `line`, what a lane's codes mean, and `load_line(packed, lane)`, for all rows of a group; `load_numbers(packed, row, lane)`, the codes
///   as numbers. `line::values(numbers)` are the octet's values, `dot` their product with a query's octet, `add` adds their multiple.
/// - `rotate(lanes, row)` and `rotate_back(lanes, row)`: between rows as they are and as they are quantised.
template <class Q>
concept device_quantiser =
    std::is_trivially_copyable_v<Q> && std::is_aggregate_v<Q> &&
    requires(const Q& format, const std::byte* packed, int lane, std::uint32_t row, const typename Q::line& line, octet numbers,
             float weight) {
      { format.dim } -> std::convertible_to<std::uint32_t>;
      { format.group_tokens() } noexcept -> std::same_as<std::uint32_t>;
      { format.packed_bytes() } noexcept -> std::same_as<std::size_t>;
      { format.load_line(packed, lane) } noexcept -> std::same_as<typename Q::line>;
      { format.load_numbers(packed, row, lane) } noexcept -> std::same_as<octet>;
      { line.values(numbers) } noexcept -> std::same_as<octet>;
      { line.dot(numbers, numbers) } noexcept -> std::same_as<float>;
      { line.add(numbers, weight, numbers) } noexcept;
    };

/// Octets of a row: the lanes that have a part in it.
template <class Q>
[[nodiscard]] KVEXACT_HOST_DEVICE int octets_of(const Q& format) noexcept {
  return static_cast<int>(format.dim) / octet_channels;
}

/// Lanes for rows of `dim` channels.
[[nodiscard]] KVEXACT_HOST_DEVICE constexpr int lanes_for(std::uint32_t dim) noexcept {
  return dim <= 8 * octet_channels ? 8 : dim <= 16 * octet_channels ? 16 : 32;
}

[[nodiscard]] inline result<void> expect_octets(std::uint32_t dim) noexcept {
  if (dim == 0 || dim % octet_channels != 0 || dim > most_channels)
    return error{error_code::unsupported, "kernels take rows of a multiple of 8 channels, 256 at most"};
  return {};
}

/// Whether `bytes` are those of `tokens` tokens.
template <class Q>
[[nodiscard]] result<void> expect_packed(const Q& format, std::uint64_t tokens, std::uint32_t heads, std::size_t bytes) noexcept {
  if (heads == 0 || tokens % format.group_tokens() != 0)
    return error{error_code::invalid_argument, "no heads, or tokens that are no whole groups"};
  const std::size_t group_bytes = heads * format.packed_bytes();
  if (bytes % group_bytes != 0 || bytes / group_bytes != tokens / format.group_tokens())
    return error{error_code::shape_mismatch, "quantised tokens take another number of bytes"};
  return {};
}

/// How the channels of a row are divided among scales: `channels` consecutive ones have one, the last ones maybe fewer.
struct channel_groups {
  std::uint32_t dim, channels;

  /// Errors: unsupported (more than one group, of another size than 8, 16, 32, ... channels).
  [[nodiscard]] static result<channel_groups> make(std::uint32_t dim, std::uint32_t channels) noexcept {
    if (const auto fits = expect_octets(dim); !fits) return fits.error();
    if (channels < dim && (channels < octet_channels || (channels & (channels - 1)) != 0))
      return error{error_code::unsupported, "kernels take groups of 8, 16, 32, ... channels, or one of all"};
    return channel_groups{dim, channels < dim ? channels : dim};
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE std::uint32_t count() const noexcept { return (dim - 1) / channels + 1; }
  /// The group of a lane; the lane that stores what the group shares; the lanes that have to agree on it, of `lanes` in all.
  [[nodiscard]] KVEXACT_HOST_DEVICE std::uint32_t of(int lane) const noexcept {
    return static_cast<std::uint32_t>(lane) * octet_channels / channels;
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE bool is_first(int lane) const noexcept {
    return static_cast<std::uint32_t>(lane) * octet_channels % channels == 0;
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE int run(int lanes) const noexcept {
    return channels < dim ? static_cast<int>(channels) / octet_channels : lanes;
  }
};

/// Loads a row [dim], and gives the largest magnitude in each lane.
template <lockstep_lanes L, class Number>
[[nodiscard]] KVEXACT_HOST_DEVICE per_lane<L, float> load_with_magnitudes(const L& lanes, std::uint32_t dim, const Number* row,
                                                                         per_lane<L, octet>& values) noexcept {
  per_lane<L, float> amax{};
  lanes.each([&](int lane, octet& own, float& most) {
    if (lane >= static_cast<int>(dim / octet_channels)) return;
    own = load_octet(row, lane);
    for (int k = 0; k < octet_channels; ++k) {
      const float magnitude = own.v[k] < 0 ? -own.v[k] : own.v[k];
      most = magnitude > most ? magnitude : most;
    }
  }, values, amax);
  return amax;
}

/// Values are numbers times a scale.
struct scaled_line {
  float scale;

  [[nodiscard]] KVEXACT_HOST_DEVICE octet values(const octet& numbers) const noexcept {
    octet made;
    for (int k = 0; k < octet_channels; ++k) made.v[k] = product(scale, numbers.v[k]);
    return made;
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE float dot(const octet& numbers, const octet& query) const noexcept {
    float sum = 0;
    for (int k = 0; k < octet_channels; ++k) sum += query.v[k] * numbers.v[k];
    return scale * sum;
  }
  KVEXACT_HOST_DEVICE void add(const octet& numbers, float weight, octet& sums) const noexcept {
    const float scaled = weight * scale;
    for (int k = 0; k < octet_channels; ++k) sums.v[k] += scaled * numbers.v[k];
  }
};

/// Values are codes times a step, plus an offset: fused or not, since the product of a code and an fp16 step is exact.
struct affine_line {
  float step, offset;

  [[nodiscard]] KVEXACT_HOST_DEVICE octet values(const octet& numbers) const noexcept {
    octet made;
    for (int k = 0; k < octet_channels; ++k) made.v[k] = numbers.v[k] * step + offset;
    return made;
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE float dot(const octet& numbers, const octet& query) const noexcept {
    float sum = 0, total = 0;
    for (int k = 0; k < octet_channels; ++k) {
      sum += query.v[k] * numbers.v[k];
      total += query.v[k];
    }
    return step * sum + offset * total;
  }
  KVEXACT_HOST_DEVICE void add(const octet& numbers, float weight, octet& sums) const noexcept {
    const float scaled = weight * step, shift = weight * offset;
    for (int k = 0; k < octet_channels; ++k) sums.v[k] += scaled * numbers.v[k] + shift;
  }
};

/// The same with a step and an offset for each channel.
struct affine_octet {
  octet step, offset;

  [[nodiscard]] KVEXACT_HOST_DEVICE octet values(const octet& numbers) const noexcept {
    octet made;
    for (int k = 0; k < octet_channels; ++k) made.v[k] = numbers.v[k] * step.v[k] + offset.v[k];
    return made;
  }
  [[nodiscard]] KVEXACT_HOST_DEVICE float dot(const octet& numbers, const octet& query) const noexcept {
    const octet own = values(numbers);
    float sum = 0;
    for (int k = 0; k < octet_channels; ++k) sum += query.v[k] * own.v[k];
    return sum;
  }
  KVEXACT_HOST_DEVICE void add(const octet& numbers, float weight, octet& sums) const noexcept {
    const octet own = values(numbers);
    for (int k = 0; k < octet_channels; ++k) sums.v[k] += weight * own.v[k];
  }
};

/// What quantisers inherit that store rows as they are, token by token.
struct unrotated {
  template <lockstep_lanes L>
  KVEXACT_HOST_DEVICE static void rotate(const L&, per_lane<L, octet>&) noexcept {}
  template <lockstep_lanes L>
  KVEXACT_HOST_DEVICE static void rotate_back(const L&, per_lane<L, octet>&) noexcept {}
};

}  // namespace kvexact::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/config.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/cuda/device_quantiser.cuh>
#include <kvexact/cuda/lockstep_lanes.cuh>
#include <kvexact/cuda/octet.cuh>
#include <kvexact/cuda/warp_lanes.cuh>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact::cuda {

/// Gives back the rows of one group, `stride` numbers apart: the floats that the host's quantiser gives, rounded to Number.
template <lockstep_lanes L, device_quantiser Q, class Number>
KVEXACT_HOST_DEVICE void dequantise_group(const L& lanes, const Q& format, const std::byte* packed, Number* rows,
                                          std::ptrdiff_t stride) noexcept {
  per_lane<L, typename Q::line> lines{};
  lanes.each([&](int lane, typename Q::line& line) {
    if (lane < octets_of(format)) line = format.load_line(packed, lane);
  }, lines);
  for (std::uint32_t t = 0; t < format.group_tokens(); ++t) {
    per_lane<L, octet> values{};
    lanes.each([&](int lane, octet& own, const typename Q::line& line) {
      if (lane < octets_of(format)) own = line.values(format.load_numbers(packed, t, lane));
    }, values, lines);
    format.rotate_back(lanes, values);
    lanes.each([&](int lane, const octet& own) {
      if (lane >= octets_of(format)) return;
      for (int k = 0; k < octet_channels; ++k) rows[t * stride + lane * octet_channels + k] = nearest<Number>(own.v[k]);
    }, values);
  }
}

/// Group `piece / heads` of head `piece % heads`, if it is one of `groups`, from rows into packed groups [group][head][packed_bytes].
template <lockstep_lanes L, device_quantiser Q, class Number>
KVEXACT_HOST_DEVICE void quantise_piece(const L& lanes, const Q& format, const strided_tensor<const Number>& rows, std::uint64_t groups,
                                        std::uint32_t heads, std::byte* packed, std::uint64_t piece) noexcept {
  if (piece / heads >= groups) return;
  const auto token = static_cast<std::ptrdiff_t>(piece / heads * format.group_tokens()), head = static_cast<std::ptrdiff_t>(piece % heads);
  const Number* const first = rows.data + token * rows.token_stride + head * rows.head_stride;
  format.quantise(lanes, first, rows.token_stride, packed + piece * format.packed_bytes());
}
/// The other way round.
template <lockstep_lanes L, device_quantiser Q, class Number>
KVEXACT_HOST_DEVICE void dequantise_piece(const L& lanes, const Q& format, const std::byte* packed, std::uint64_t groups,
                                          std::uint32_t heads, const strided_tensor<Number>& rows, std::uint64_t piece) noexcept {
  if (piece / heads >= groups) return;
  const auto token = static_cast<std::ptrdiff_t>(piece / heads * format.group_tokens()), head = static_cast<std::ptrdiff_t>(piece % heads);
  Number* const first = rows.data + token * rows.token_stride + head * rows.head_stride;
  dequantise_group(lanes, format, packed + piece * format.packed_bytes(), first, rows.token_stride);
}

#ifdef __CUDACC__

template <device_quantiser Q, class Number>
__global__ void quantise_kernel(const __grid_constant__ Q parameters, strided_tensor<const Number> rows, std::uint64_t groups,
                                std::uint32_t heads, std::byte* packed) {
  const Q& format = in_shared_memory(parameters);
  const warp_lanes lanes(lanes_for(format.dim));
  quantise_piece(lanes, format, rows, groups, heads, packed, piece_of_work(lanes));
}
template <device_quantiser Q, class Number>
__global__ void dequantise_kernel(const __grid_constant__ Q parameters, const std::byte* packed, std::uint64_t groups, std::uint32_t heads,
                                  strided_tensor<Number> rows) {
  const Q& format = in_shared_memory(parameters);
  const warp_lanes lanes(lanes_for(format.dim));
  dequantise_piece(lanes, format, packed, groups, heads, rows, piece_of_work(lanes));
}

/// Quantises rows in device memory, float, bf16 or fp16, of whole groups: `packed` receives [group][head][packed_bytes], the bytes that
/// `quantised::packed` has for them on the host. Values must be finite; others make their own group meaningless. Those too large for the
/// format become the nearest that it has, and are not counted. Work is queued on `stream`.
/// Errors: invalid_argument (no heads, no whole groups, null rows), shape_mismatch (the size of `packed`), out_of_range, device_error.
template <device_quantiser Q, class Number>
[[nodiscard]] result<void> quantise(const Q& format, const strided_tensor<const Number>& rows, std::uint64_t tokens, std::uint32_t heads,
                                    std::span<std::byte> packed, cudaStream_t stream) noexcept {
  if (const auto fits = expect_packed(format, tokens, heads, packed.size()); !fits) return fits;
  if (tokens > 0 && rows.data == nullptr) return error{error_code::invalid_argument, "rows on a device without data"};
  const std::uint64_t groups = tokens / format.group_tokens();
  return launch(quantise_kernel<Q, Number>, groups * heads, lanes_for(format.dim), stream, format, rows, groups, heads, packed.data());
}

/// The way back, rounded to `Number`: as floats, the bits that the host's quantiser gives. Errors: the same.
template <device_quantiser Q, class Number>
[[nodiscard]] result<void> dequantise(const Q& format, std::span<const std::byte> packed, std::uint64_t tokens, std::uint32_t heads,
                                      const strided_tensor<Number>& rows, cudaStream_t stream) noexcept {
  if (const auto fits = expect_packed(format, tokens, heads, packed.size()); !fits) return fits;
  if (tokens > 0 && rows.data == nullptr) return error{error_code::invalid_argument, "rows on a device without data"};
  const std::uint64_t groups = tokens / format.group_tokens();
  return launch(dequantise_kernel<Q, Number>, groups * heads, lanes_for(format.dim), stream, format, packed.data(), groups, heads, rows);
}

#endif

}  // namespace kvexact::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/cuda/attend.cuh>
#include <kvexact/cuda/device_quantiser.cuh>
#include <kvexact/cuda/quantise.cuh>
#include <kvexact/tensor/kv_cache_view.hpp>

#include "emulated_lanes.hpp"

namespace kvexact::test {

/// Runs the kernels' pieces of work one after another on the host, and a few more, as a last block does.
struct emulated_device {
  static constexpr std::uint64_t idle = 3;

  template <class Q, class Number>
  static void quantise(const Q& format, const strided_tensor<const Number>& rows, std::size_t, std::uint64_t tokens, std::uint32_t heads,
                       std::span<std::byte> packed) {
    const std::uint64_t groups = tokens / format.group_tokens();
    for (std::uint64_t piece = 0; piece < groups * heads + idle; ++piece)
      cuda::quantise_piece(emulated_lanes(cuda::lanes_for(format.dim)), format, rows, groups, heads, packed.data(), piece);
  }
  template <class Q, class Number>
  static void dequantise(const Q& format, std::span<const std::byte> packed, std::uint64_t tokens, std::uint32_t heads,
                         const strided_tensor<Number>& rows, std::size_t) {
    const std::uint64_t groups = tokens / format.group_tokens();
    for (std::uint64_t piece = 0; piece < groups * heads + idle; ++piece)
      cuda::dequantise_piece(emulated_lanes(cuda::lanes_for(format.dim)), format, packed.data(), groups, heads, rows, piece);
  }
  template <class K, class V>
  static void attend(const K& keys, const V& values, const cuda::attention_call& call) {
    std::vector<float> parts(cuda::attention_workspace_floats(values, call.tokens, call.log_mass.size()));
    const std::uint64_t pieces = cuda::attention_parts(call.tokens) * call.log_mass.size();
    for (std::uint64_t piece = 0; piece < pieces + idle; ++piece)
      cuda::attend_piece(emulated_lanes(cuda::lanes_for(keys, values)), keys, values, call, parts.data(), piece);
    for (std::uint64_t piece = 0; piece < call.log_mass.size() + idle; ++piece)
      cuda::merge_piece(emulated_lanes(cuda::lanes_for(values.dim)), values, call, parts.data(), piece);
  }
};

}  // namespace kvexact::test

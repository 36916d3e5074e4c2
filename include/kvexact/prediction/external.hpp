// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <kvexact/numeric/bf16.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// The caller predicts the cache, for example by running a quantised copy of the model over the same tokens ("speculative KV coding",
/// F. Finn, May 2026, open loop), and hands it in as bf16 in the layout of the cache itself (keys rotated). Any bf16 is allowed; a NaN
/// or an infinity predicts zero. Each chunk stores a fingerprint of the predictions it was coded with.
struct external {
  static constexpr std::uint32_t id = 2;
  static constexpr const char* name = "external";
  static constexpr dependency needs = dependency::none;
  static constexpr bool needs_prediction = true;

  template <kv_cache Prediction>
  static void predict(const tile_shape& shape, const tile_parameters&, const Prediction& prediction, std::uint32_t* out) noexcept {
    static_assert(std::same_as<std::remove_const_t<typename Prediction::value_type>, bf16>, "kvexact: predictions must be bf16");
    gather_tile(prediction, shape, out);
    const auto tokens = static_cast<std::size_t>(shape.tokens.size());
    for (std::size_t c = 0; c < shape.channels(); ++c) {
      std::uint32_t* const row = out + c * shape.stride;
      for (std::size_t t = 0; t < tokens; ++t) row[t] <<= 16;  // bf16 is the upper half of binary32
      std::fill(row + tokens, row + shape.stride, 0U);
    }
  }
};

static_assert(tile_predictor<external, kv_cache_view<const bf16>>);

}  // namespace kvexact

// expect: kvexact: the Predictor of a codec must satisfy kvexact::tile_predictor or be a mapped_predictor (prediction/predictor.hpp)
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

// Predicts single tiles, but may throw.
struct throwing : kvexact::channel_mean {
  static void predict(const kvexact::tile_shape&, const kvexact::tile_parameters&, const kvexact::no_prediction&, std::uint32_t*) {}
};

constexpr auto format = kvexact::codec<throwing, kvexact::value_grid<kvexact::bf16>, kvexact::interleaved_rans<>>::format;

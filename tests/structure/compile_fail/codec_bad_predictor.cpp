// expect: kvexact: the Predictor of a codec must satisfy kvexact::tile_predictor or be a mapped_predictor (prediction/predictor.hpp)
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

struct guesses_nothing {
  static constexpr std::uint32_t id = 99;
};

constexpr auto format = kvexact::codec<guesses_nothing, kvexact::value_grid<kvexact::bf16>, kvexact::interleaved_rans<>>::format;

// expect: kvexact: the ResidualModel of a codec must satisfy kvexact::residual_model (residual/residual_model.hpp)
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

struct no_residual {
  using format = kvexact::bf16;
};

constexpr auto format = kvexact::codec<kvexact::channel_mean, no_residual, kvexact::interleaved_rans<>>::format;

// expect: kvexact: the EntropyCoder of a codec must satisfy kvexact::entropy_coder (entropy/entropy_coder.hpp)
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

struct no_coder {
  static constexpr int lanes = 32;
  static constexpr int precision = 12;
};

constexpr auto format = kvexact::codec<kvexact::channel_mean, kvexact::value_grid<kvexact::bf16>, no_coder>::format;

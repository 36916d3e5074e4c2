// expect: kvexact: the EntropyCoder of a codec must have kvexact::row_lanes lanes
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

constexpr auto format = kvexact::codec<kvexact::channel_mean, kvexact::value_grid<kvexact::bf16>, kvexact::interleaved_rans<16>>::format;

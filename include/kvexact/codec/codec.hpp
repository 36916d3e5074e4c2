// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>

#include <kvexact/codec/profile.hpp>
#include <kvexact/codec/stream_decoder.hpp>
#include <kvexact/codec/stream_encoder.hpp>
#include <kvexact/entropy/entropy_coder.hpp>
#include <kvexact/entropy/interleaved_rans.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/prediction/channel_mean.hpp>
#include <kvexact/prediction/closed_loop.hpp>
#include <kvexact/prediction/cross_layer.hpp>
#include <kvexact/prediction/external.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/residual/residual_model.hpp>
#include <kvexact/residual/value_grid.hpp>

namespace kvexact {

/// A lossless codec for KV caches, put together from three policies at compile time:
///
/// - `Predictor` guesses the values (`channel_mean`, `external`, `cross_layer`, `closed_loop`),
/// - `ResidualModel` turns what the guess missed into symbols and raw bits (`value_grid<Format>`),
/// - `EntropyCoder` codes the symbols (`interleaved_rans<>`, `range_coder<>`).
///
/// The codec itself is only a name for the combination. Work is done by
///
///     using codec = kvexact::codec_without_model<kvexact::bf16>;
///     kvexact::calibrate<codec>       // caches -> profile, once a model; in its own header, codec/calibrate.hpp
///     kvexact::profile<codec>         // the profile, ready for use, shared by all below
///     kvexact::stream_encoder<codec, Sink>
///     kvexact::stream_decoder<codec>
///
/// Exactness: decoding gives back every bit of what was encoded, or an error.
template <class Predictor, class ResidualModel, class EntropyCoder>
struct codec {
  static_assert(tile_predictor<Predictor> || tile_predictor<Predictor, kv_cache_view<const bf16>> || mapped_predictor<Predictor>,
                "kvexact: the Predictor of a codec must satisfy kvexact::tile_predictor or be a mapped_predictor (prediction/predictor.hpp)");
  static_assert(residual_model<ResidualModel>,
                "kvexact: the ResidualModel of a codec must satisfy kvexact::residual_model (residual/residual_model.hpp)");
  static_assert(entropy_coder<EntropyCoder>,
                "kvexact: the EntropyCoder of a codec must satisfy kvexact::entropy_coder (entropy/entropy_coder.hpp)");
  static_assert(EntropyCoder::lanes == row_lanes, "kvexact: the EntropyCoder of a codec must have kvexact::row_lanes lanes");
  static_assert(EntropyCoder::precision <= 15, "kvexact: the EntropyCoder of a codec must have at most 15 bits of precision");

  using predictor_type = Predictor;
  using residual_model_type = ResidualModel;
  using entropy_coder_type = EntropyCoder;
  using scalar = typename ResidualModel::format;
  static constexpr number_format format = number_format_of<scalar>;
};

/// The usual choice where no model runs beside: each layer is predicted from those below it. Nothing but the profile is needed to decode.
template <cache_scalar Scalar>
using codec_without_model = codec<cross_layer<channel_mean>, value_grid<Scalar>, interleaved_rans<>>;

/// The caller hands in a predicted cache, the same for encoding and decoding; each layer's prediction is sharpened by those below it.
template <cache_scalar Scalar>
using codec_with_prediction = codec<cross_layer<external>, value_grid<Scalar>, interleaved_rans<>>;

/// The caller hands in an engine that predicts layer by layer and learns the exact values as they become known: the smallest streams.
template <cache_scalar Scalar>
using codec_closed_loop = codec<closed_loop, value_grid<Scalar>, interleaved_rans<>>;

/// Channel statistics only: any layers and tokens decode alone, small profiles, the fastest.
template <cache_scalar Scalar>
using plain_codec_without_model = codec<channel_mean, value_grid<Scalar>, interleaved_rans<>>;

/// The published method ("speculative KV coding", F. Finn, May 2026): a predicted cache as it is.
template <cache_scalar Scalar>
using plain_codec_with_prediction = codec<external, value_grid<Scalar>, interleaved_rans<>>;

}  // namespace kvexact

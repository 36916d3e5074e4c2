// expect: kvexact: the prediction must be a kv_cache of bf16, for closed_loop a layerwise_predictor (engine/layerwise_predictor.hpp)
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

struct any_sink {
  bool operator()(std::span<const std::byte>) { return true; }
};

auto append(kvexact::stream_encoder<kvexact::codec_closed_loop<kvexact::bf16>, any_sink>& encoder,
            const kvexact::kv_cache_view<const kvexact::bf16>& cache) {
  return encoder.append(cache, cache);
}

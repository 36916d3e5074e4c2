// expect: kvexact: the prediction must be a kv_cache of bf16, for closed_loop a layerwise_predictor (engine/layerwise_predictor.hpp)
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

struct no_cache {};

auto decode(const kvexact::stream_decoder<kvexact::codec_with_prediction<kvexact::bf16>>& decoder,
            const kvexact::kv_cache_view<kvexact::bf16>& cache, std::span<std::byte> memory) {
  return decoder.decode(cache, memory, no_cache{});
}

// expect: kvexact: this codec's predictor needs a predicted cache or an engine as second argument of append
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

struct any_sink {
  bool operator()(std::span<const std::byte>) { return true; }
};

auto append(kvexact::stream_encoder<kvexact::codec_with_prediction<kvexact::bf16>, any_sink>& encoder,
            const kvexact::kv_cache_view<const kvexact::bf16>& cache) {
  return encoder.append(cache);
}

// expect: kvexact: the cache must hold the codec's number format
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

struct any_sink {
  bool operator()(std::span<const std::byte>) { return true; }
};

auto append(kvexact::stream_encoder<kvexact::codec_without_model<kvexact::bf16>, any_sink>& encoder,
            const kvexact::kv_cache_view<const kvexact::fp16>& cache) {
  return encoder.append(cache);
}

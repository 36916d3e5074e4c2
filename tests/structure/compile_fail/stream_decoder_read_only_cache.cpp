// expect: kvexact: the cache must hold the codec's number format and be writable
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

auto decode(const kvexact::stream_decoder<kvexact::codec_without_model<kvexact::bf16>>& decoder,
            const kvexact::kv_cache_view<const kvexact::bf16>& cache, std::span<std::byte> memory) {
  return decoder.decode(cache, memory);
}

// expect: kvexact: the caches must hold the codec's number format
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/calibrate.hpp>
#include <kvexact/codec/codec.hpp>

auto make(const kvexact::cache_shape& shape, const kvexact::kv_cache_view<const kvexact::fp16>& cache) {
  const std::vector<kvexact::calibration_example<kvexact::kv_cache_view<const kvexact::fp16>>> examples{{cache}};
  return kvexact::calibrate<kvexact::plain_codec_without_model<kvexact::bf16>>(shape, {}, examples);
}

// expect: kvexact: this codec's predictor needs a predicted cache (closed_loop: a pointer to an engine) with each example
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/calibrate.hpp>
#include <kvexact/codec/codec.hpp>

auto make(const kvexact::cache_shape& shape, const kvexact::kv_cache_view<const kvexact::bf16>& cache) {
  const std::vector<kvexact::calibration_example<kvexact::kv_cache_view<const kvexact::bf16>>> examples{{cache}};
  return kvexact::calibrate<kvexact::codec_with_prediction<kvexact::bf16>>(shape, {}, examples);
}

// expect: kvexact: this codec's predictor needs a predicted cache as second argument of observe
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

auto observe(kvexact::calibrator<kvexact::codec_with_prediction<kvexact::bf16>>& calibrator,
             const kvexact::kv_cache_view<const kvexact::bf16>& cache) {
  return calibrator.observe(cache);
}

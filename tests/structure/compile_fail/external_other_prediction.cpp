// expect: kvexact: predictions must be bf16
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/numeric/fp16.hpp>
#include <kvexact/prediction/external.hpp>

void predict(const kvexact::tile_shape& shape, const kvexact::tile_parameters& parameters,
             const kvexact::kv_cache_view<const kvexact::fp16>& prediction, std::uint32_t* out) {
  kvexact::external::predict(shape, parameters, prediction, out);
}

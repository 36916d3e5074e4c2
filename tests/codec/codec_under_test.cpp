// SPDX-License-Identifier: Apache-2.0
#include "codec_under_test.hpp"

#include <doctest/doctest.h>

namespace kvexact::test {

template <class Scalar, codec_kind Kind>
const codec_under_test& instance_of();  // see codec_instance.hpp

const codec_under_test& codec_for(number_format format, codec_kind kind) {
  REQUIRE((!is_mapped(kind) || has_maps(format)));
  return with_scalar(format, [&]<class Scalar>() -> const codec_under_test& {
    if constexpr (has_maps(number_format_of<Scalar>)) {
      switch (kind) {
        case codec_kind::cross_layer: return instance_of<Scalar, codec_kind::cross_layer>();
        case codec_kind::cross_layer_external: return instance_of<Scalar, codec_kind::cross_layer_external>();
        case codec_kind::closed_loop: return instance_of<Scalar, codec_kind::closed_loop>();
        case codec_kind::channel_mean:
        case codec_kind::external: break;
      }
    }
    if (kind == codec_kind::external) return instance_of<Scalar, codec_kind::external>();
    return instance_of<Scalar, codec_kind::channel_mean>();
  });
}

}  // namespace kvexact::test

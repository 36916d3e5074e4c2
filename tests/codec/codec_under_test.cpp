// SPDX-License-Identifier: Apache-2.0
#include "codec_under_test.hpp"

namespace kvexact::test {

template <class Scalar, codec_kind Kind>
const codec_under_test& instance_of();  // see codec_instance.hpp

const codec_under_test& codec_for(number_format format, codec_kind kind) {
  return with_scalar(format, [&]<class Scalar>() -> const codec_under_test& {
    switch (kind) {
      case codec_kind::channel_mean: return instance_of<Scalar, codec_kind::channel_mean>();
      case codec_kind::external: return instance_of<Scalar, codec_kind::external>();
      case codec_kind::cross_layer: return instance_of<Scalar, codec_kind::cross_layer>();
      case codec_kind::cross_layer_external: return instance_of<Scalar, codec_kind::cross_layer_external>();
      case codec_kind::closed_loop: break;
    }
    return instance_of<Scalar, codec_kind::closed_loop>();
  });
}

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#include "codec_instance.hpp"

namespace kvexact::test {

const codec_under_test& codec_with_range_coder() {
  static const codec_instance<codec<external, value_grid<fp8_e4m3>, range_coder<>>, codec_kind::external> instance;
  return instance;
}

}  // namespace kvexact::test

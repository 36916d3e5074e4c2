// SPDX-License-Identifier: Apache-2.0
#include "codec_instance.hpp"

namespace kvexact::test {

template const codec_under_test& instance_of<fp8_e5m2, codec_kind::channel_mean>();
template const codec_under_test& instance_of<fp8_e5m2, codec_kind::external>();

}  // namespace kvexact::test

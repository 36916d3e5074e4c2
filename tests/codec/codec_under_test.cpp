// SPDX-License-Identifier: Apache-2.0
#include "codec_under_test.hpp"

namespace kvexact::test {

template <class Scalar>
const codec_under_test& instance_of(bool with_prediction);
template <>
const codec_under_test& instance_of<bf16>(bool with_prediction);
template <>
const codec_under_test& instance_of<fp16>(bool with_prediction);
template <>
const codec_under_test& instance_of<fp8_e4m3>(bool with_prediction);
template <>
const codec_under_test& instance_of<fp8_e5m2>(bool with_prediction);

const codec_under_test& codec_for(number_format format, bool with_prediction) {
  return with_scalar(format, [&]<class Scalar>() -> const codec_under_test& { return instance_of<Scalar>(with_prediction); });
}

}  // namespace kvexact::test

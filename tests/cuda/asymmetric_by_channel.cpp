// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/cuda/asymmetric_by_channel.cuh>

#include "device_checks.hpp"
#include "emulated_device.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("asymmetric_by_channel: the bits of the host's quantiser") {
  emulated_device device;
  check_sizes<float>(device, by_channel_pair<4>);
  check_sizes<float>(device, by_channel_pair<3>);
  check_sizes<float>(device, by_channel_pair<2>);
}

TEST_CASE("asymmetric_by_channel: sizes that lanes do not take") {
  CHECK(cuda::asymmetric_by_channel<4>::make(*asymmetric_by_channel<4>::make(1, 20, {32})).error().code == error_code::unsupported);
}

// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/cuda/symmetric.cuh>

#include "device_checks.hpp"
#include "emulated_device.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("symmetric: the bits of the host's quantiser") {
  emulated_device device;
  check_sizes<float>(device, symmetric_pair<8>);
  check_sizes<float>(device, symmetric_pair<4>);
}

TEST_CASE("symmetric: sizes that lanes do not take") {
  const auto refused = [](std::uint32_t dim, std::uint32_t group) {
    return cuda::symmetric<4>::make(*symmetric<4>::make(1, dim, {group})).error().code;
  };
  CHECK(refused(12, 12) == error_code::unsupported);
  CHECK(refused(264, 32) == error_code::unsupported);
  CHECK(refused(64, 4) == error_code::unsupported);
  CHECK(refused(96, 48) == error_code::unsupported);
  CHECK(cuda::symmetric<4>::make(*symmetric<4>::make(1, 48, {1000})));
}

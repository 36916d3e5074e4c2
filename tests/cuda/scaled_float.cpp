// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/cuda/scaled_float.cuh>

#include "device_checks.hpp"
#include "emulated_device.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("scaled_float: the bits of the host's quantiser") {
  emulated_device device;
  check_sizes<float>(device, [](std::uint32_t dim, std::uint32_t group) { return scaled_float_pair<fp8_e4m3>(dim, group); });
  check_sizes<float>(device, [](std::uint32_t dim, std::uint32_t group) { return scaled_float_pair<fp8_e5m2>(dim, group); });
}

TEST_CASE("scaled_float: one scale for all") {
  emulated_device device;
  check_sizes<float>(device, [](std::uint32_t dim, std::uint32_t) { return scaled_float_pair<fp8_e4m3>(dim, 0, 0.037F); });
}

TEST_CASE("scaled_float: sizes that lanes do not take") {
  CHECK(cuda::scaled_float<fp8_e4m3>::make(*scaled_float<fp8_e4m3>::make(1, 20, {0})).error().code == error_code::unsupported);
  CHECK(cuda::scaled_float<fp8_e4m3>::make(*scaled_float<fp8_e4m3>::make(1, 64, {12})).error().code == error_code::unsupported);
}

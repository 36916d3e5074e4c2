// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/cuda/quantise.cuh>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/fp16.hpp>

#include "device_checks.hpp"
#include "emulated_device.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("quantise: rows of bf16 and fp16, back into them") {
  emulated_device device;
  check_sizes<bf16>(device, symmetric_pair<4>);
  check_sizes<fp16>(device, by_channel_pair<2>);
}

// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/cuda/asymmetric.cuh>

#include "device_checks.hpp"
#include "emulated_device.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("asymmetric: the bits of the host's quantiser") {
  emulated_device device;
  check_sizes<float>(device, asymmetric_pair<4>);
  check_sizes<float>(device, asymmetric_pair<3>);
  check_sizes<float>(device, asymmetric_pair<2>);
}

TEST_CASE("asymmetric: of equal values the first one counts") {
  const cuda::value_range zeros = cuda::value_range{-0.0F, -0.0F}.followed_by({0.0F, 0.0F});
  CHECK(std::signbit(zeros.least));
  CHECK(std::signbit(zeros.most));
  const auto nothing = cuda::value_range::nothing();
  const cuda::value_range some = nothing.followed_by({2, 2}).followed_by({-1, -1}).followed_by(nothing);
  CHECK(some.least == -1);
  CHECK(some.most == 2);
}

TEST_CASE("asymmetric: sizes that lanes do not take") {
  CHECK(cuda::asymmetric<4>::make(*asymmetric<4>::make(1, 20, {20})).error().code == error_code::unsupported);
  CHECK(cuda::asymmetric<4>::make(*asymmetric<4>::make(1, 64, {24})).error().code == error_code::unsupported);
}

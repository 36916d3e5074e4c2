// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/compression/asymmetric_by_channel.hpp>
#include <kvexact/cuda/asymmetric_by_channel.cuh>
#include <kvexact/cuda/device_quantiser.cuh>

using namespace kvexact;

TEST_CASE("device_quantiser: a packed size is that of whole groups of every head") {
  const auto format = *cuda::asymmetric_by_channel<2>::make(*asymmetric_by_channel<2>::make(1, 64, {32}));
  const std::size_t bytes = format.packed_bytes();
  CHECK(cuda::expect_packed(format, 64, 3, 6 * bytes));
  CHECK(cuda::expect_packed(format, 0, 3, 0));
  CHECK(cuda::expect_packed(format, 64, 0, 0).error().code == error_code::invalid_argument);
  CHECK(cuda::expect_packed(format, 65, 3, 6 * bytes).error().code == error_code::invalid_argument);
  for (const std::size_t wrong : {std::size_t{0}, 5 * bytes, 6 * bytes - 1, 6 * bytes + 1, 6 * bytes + 3})
    CHECK(cuda::expect_packed(format, 64, 3, wrong).error().code == error_code::shape_mismatch);
}

TEST_CASE("device_quantiser: lanes for rows") {
  CHECK(cuda::lanes_for(8) == 8);
  CHECK(cuda::lanes_for(64) == 8);
  CHECK(cuda::lanes_for(72) == 16);
  CHECK(cuda::lanes_for(128) == 16);
  CHECK(cuda::lanes_for(136) == 32);
  CHECK(cuda::lanes_for(256) == 32);
}

TEST_CASE("device_quantiser: groups of channels") {
  const auto groups = *cuda::channel_groups::make(80, 32);  // of lanes 0 to 3, 4 to 7, and 8 and 9
  CHECK(groups.count() == 3);
  CHECK(groups.of(3) == 0);
  CHECK(groups.of(4) == 1);
  CHECK(groups.of(9) == 2);
  CHECK(groups.is_first(8));
  CHECK(!groups.is_first(9));
  CHECK(groups.run(16) == 4);
  for (const std::uint32_t more : {80U, 1000U}) {
    const auto one = *cuda::channel_groups::make(80, more);
    CHECK(one.count() == 1);
    CHECK(one.of(9) == 0);
    CHECK(!one.is_first(9));
    CHECK(one.run(16) == 16);
  }
}

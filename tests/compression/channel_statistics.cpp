// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/channel_statistics.hpp>
#include <kvexact/numeric/bf16.hpp>

#include "dropper_driver.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("channel_statistics: means and the loudest channels of each head") {
  constexpr layer_shape shape{2, 4, 3};
  example_layer layer(shape, 1, 10, 1);
  for (std::uint64_t t = 0; t < 10; ++t) {
    for (std::uint32_t h = 0; h < 2; ++h) {
      for (std::uint32_t c = 0; c < 4; ++c)
        layer.keys[(t * 2 + h) * 4 + c] = bf16::from_float((t % 2 == 0 ? 1.0F : -1.0F) * static_cast<float>(h == 0 ? c + 1 : 4 - c) + 0.5F);
      for (std::uint32_t c = 0; c < 3; ++c) layer.values[(t * 2 + h) * 3 + c] = bf16::from_float(static_cast<float>(c == 1 ? -8 : 2));
    }
  }
  auto statistics = *channel_statistics::make(shape);
  CHECK(statistics.means(cache_part::key).error().code == error_code::not_calibrated);
  CHECK(statistics.loudest(cache_part::key, 1).error().code == error_code::not_calibrated);
  REQUIRE(statistics.add(layer.rows(0), 4));
  REQUIRE(statistics.add(layer.rows(4), 6));
  CHECK(statistics.tokens() == 10);
  CHECK(*statistics.means(cache_part::key) == std::vector<float>(8, 0.5F));
  CHECK(*statistics.means(cache_part::value) == std::vector<float>{2, -8, 2, 2, -8, 2});
  CHECK(*statistics.loudest(cache_part::key, 2) == std::vector<std::uint32_t>{2, 3, 0, 1});
  CHECK(*statistics.loudest(cache_part::value, 2) == std::vector<std::uint32_t>{0, 1, 0, 1});  // of equal ones the first
  CHECK(statistics.loudest(cache_part::value, 4).error().code == error_code::invalid_argument);
  const layer_tensors<const bf16> keys_only{layer.rows(0).key, {}};
  auto latent = *channel_statistics::make({2, 4, 0});
  REQUIRE(latent.add(keys_only, 10));
  CHECK(latent.means(cache_part::value)->empty());
  CHECK(latent.loudest(cache_part::value, 0)->empty());
  CHECK(*latent.loudest(cache_part::key, 1) == std::vector<std::uint32_t>{3, 0});
  layer.values[5] = bf16::from_bits(0x7f80);
  CHECK(statistics.add(layer.rows(0), 4).error().token == 10);
  CHECK(statistics.tokens() == 10);
}

// SPDX-License-Identifier: Apache-2.0
#include <concepts>
#include <string>

#include <doctest/doctest.h>

#include <kvexact/prediction/cross_layer.hpp>

using namespace kvexact;

static_assert(mapped_predictor<cross_layer<channel_mean>> && mapped_predictor<cross_layer<external>>);
static_assert(!tile_predictor<cross_layer<channel_mean>> && !tile_predictor<cross_layer<external>>);
static_assert(std::same_as<cross_layer<channel_mean>::base, channel_mean> && std::same_as<cross_layer<external>::base, external>);

TEST_CASE("cross_layer: needs lower layers, and what its base needs") {
  CHECK(cross_layer<channel_mean>::needs == dependency::lower_layers);
  CHECK(cross_layer<external>::needs == dependency::lower_layers);
  CHECK(cross_layer<channel_mean>::needs_prediction == channel_mean::needs_prediction);
  CHECK(cross_layer<external>::needs_prediction == external::needs_prediction);
  CHECK(std::string(cross_layer<channel_mean>::name) != cross_layer<external>::name);
}

// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/prediction/channel_mean.hpp>
#include <kvexact/prediction/closed_loop.hpp>
#include <kvexact/prediction/cross_layer.hpp>
#include <kvexact/prediction/external.hpp>

using namespace kvexact;

static_assert(mapped_predictor<closed_loop> && !tile_predictor<closed_loop>);
static_assert(closed_loop::needs == dependency::all_previous && closed_loop::needs_prediction);

// What streams depend on: these may never change.
TEST_CASE("closed_loop: the numbers of all predictors are those of the format") {
  CHECK(channel_mean::id == 1);
  CHECK(external::id == 2);
  CHECK(cross_layer<channel_mean>::id == 3);
  CHECK(cross_layer<external>::id == 4);
  CHECK(closed_loop::id == 5);
}

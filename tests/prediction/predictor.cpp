// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <doctest/doctest.h>

#include <kvexact/prediction/predictor.hpp>

using namespace kvexact;

namespace {

struct zeros {
  static constexpr std::uint32_t id = 99;
  static constexpr const char* name = "zeros";
  static constexpr dependency needs = dependency::none;
  static constexpr bool needs_prediction = false;

  template <class Prediction>
  static void predict(const tile_shape& shape, const tile_parameters&, const Prediction&, std::uint32_t* out) noexcept {
    for (std::size_t i = 0; i < shape.channels() * shape.stride; ++i) out[i] = 0;
  }
};

struct may_throw : zeros {
  static void predict(const tile_shape&, const tile_parameters&, const no_prediction&, std::uint32_t*) {}
};

struct without_dependency {
  static constexpr std::uint32_t id = 99;
  static constexpr const char* name = "without_dependency";
  [[maybe_unused]] static constexpr bool needs_prediction = false;
  static void predict(const tile_shape&, const tile_parameters&, const no_prediction&, std::uint32_t*) noexcept {}
};

struct only_without_prediction : zeros {
  static void predict(const tile_shape&, const tile_parameters&, const no_prediction&, std::uint32_t*) noexcept {}
};

/// Has a predict, but what it says of its dependency rules that out.
struct says_it_needs_more : zeros {
  static constexpr dependency needs = dependency::lower_layers;
};

struct some_prediction {};

}  // namespace

static_assert(predictor<zeros> && tile_predictor<zeros> && tile_predictor<zeros, some_prediction> && !mapped_predictor<zeros>);
static_assert(predictor<may_throw> && !tile_predictor<may_throw>);
static_assert(!predictor<without_dependency> && !tile_predictor<without_dependency> && !mapped_predictor<without_dependency>);
static_assert(tile_predictor<only_without_prediction> && !tile_predictor<only_without_prediction, some_prediction>);
static_assert(mapped_predictor<says_it_needs_more> && !tile_predictor<says_it_needs_more>);
static_assert(!predictor<int>);

TEST_CASE("predictor: a user's type is enough") {
  const rotary rotation;
  std::uint32_t out[6] = {1, 2, 3, 4, 5, 6};
  zeros::predict({0, cache_part::key, {0, 1}, 2, 1, 2}, {{}, &rotation}, no_prediction{}, out);
  CHECK(out[3] == 0);
  CHECK(out[4] == 5);
}

TEST_CASE("predictor: dependencies are numbered for streams") {
  CHECK(static_cast<int>(dependency::none) == 0);
  CHECK(static_cast<int>(dependency::lower_layers) == 1);
  CHECK(static_cast<int>(dependency::all_previous) == 2);
}

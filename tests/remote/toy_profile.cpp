// SPDX-License-Identifier: Apache-2.0
#include "toy_profile.hpp"

#include <doctest/doctest.h>

#include <kvexact/codec/calibrate.hpp>
#include <kvexact/codec/profile_data.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

#include "speculative/toy_engine.hpp"

namespace kvexact::test {

std::vector<std::byte> toy_profile_file(std::uint32_t seed) {
  constexpr std::uint64_t tokens = 300;
  toy_engine engine({.seed = seed});
  std::vector<std::uint32_t> ids;
  for (std::uint64_t t = 0; t < tokens; ++t) ids.push_back(static_cast<std::uint32_t>(t * t % 11));
  REQUIRE(engine.forward(ids, {}));
  std::vector<layer_tensors<const bf16>> layers;
  for (std::uint32_t l = 0; l < engine.shape().layers(); ++l) layers.push_back(engine.rows(l, 0));
  const auto view = kv_cache_view<const bf16>::make(engine.shape(), layers, {0, tokens});
  const std::vector<calibration_example<kv_cache_view<const bf16>>> examples{{*view}};
  const auto data = calibrate<toy_codec>(engine.shape(), {}, examples);
  REQUIRE(data);
  return *serialize_profile(*data);
}

}  // namespace kvexact::test

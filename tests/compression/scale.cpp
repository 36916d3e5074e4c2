// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include <doctest/doctest.h>

#include <kvexact/compression/scale.hpp>

using namespace kvexact;
using namespace kvexact::detail;

TEST_CASE("scale: fp16 bounds are the nearest on their side") {
  for (std::uint32_t bits = 0; bits <= fp16::max_finite; ++bits) {
    const float here = fp16::from_bits(static_cast<std::uint16_t>(bits)).to_float();
    for (const float value : {here, -here}) {
      REQUIRE(fp16_at_least(value).to_float() == value);
      REQUIRE(fp16_at_most(value).to_float() == value);
    }
    if (bits == fp16::max_finite) continue;
    const float next = fp16::from_bits(static_cast<std::uint16_t>(bits + 1)).to_float();
    for (const float part : {0.001F, 0.5F, 0.999F}) {
      const float between = here + part * (next - here);
      REQUIRE(fp16_at_least(between).to_float() == next);
      REQUIRE(fp16_at_most(between).to_float() == here);
      REQUIRE(fp16_at_least(-between).to_float() == -here);
      REQUIRE(fp16_at_most(-between).to_float() == -next);
    }
  }
  CHECK(fp16_at_least(1e9F).to_float() == 65504);
  CHECK(fp16_at_most(-1e9F).to_float() == -65504);
  CHECK(fp16_at_least(-1e9F).to_float() == -65504);
}

TEST_CASE("scale: quotients are rounded to nearest, ties to even") {
  for (const float value : {0.0F, 0.5F, 1.5F, 2.5F, -0.5F, -1.5F, 0.49999997F, 7.3F, -7.6F, 254.5F, 4194303.0F})
    CHECK(round_quotient(value) == std::nearbyint(value));
}

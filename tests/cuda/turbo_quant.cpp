// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/cuda/turbo_quant.cuh>

#include "device_checks.hpp"
#include "emulated_device.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("turbo_quant: the bits of the host's quantiser") {
  emulated_device device;
  check_sizes<float>(device, [](std::uint32_t dim, std::uint32_t) { return turbo_quant_pair<4>(dim); });
  check_sizes<float>(device, [](std::uint32_t dim, std::uint32_t) { return turbo_quant_pair<3>(dim); });
  check_sizes<float>(device, [](std::uint32_t dim, std::uint32_t) { return turbo_quant_pair<2>(dim); });
}

TEST_CASE("turbo_quant: any number of rounds") {
  emulated_device device;
  for (const std::uint32_t rounds : {1U, 8U}) {
    const auto pair = turbo_quant_pair<4>(72, {rotation_kind::hadamard, rounds, 11});
    check_same_bits<float>(device, pair.host, pair.format);
  }
}

TEST_CASE("turbo_quant: squares are summed in the host's order") {
  // Those of channels 0, 8, ... are (1 + 2^-24)^2: a norm between two floats, of which the even one is 1. The others together make it
  // larger; one after another, each is lost in double precision.
  for (const bool large_first : {true, false}) {
    std::vector<float> row(32);
    const float large[4] = {1, 0x1p-12F, 0x1p-12F, 0x1p-24F};
    for (std::size_t k = 0; k < 8; ++k) {
      const std::size_t place = large_first ? k : 7 - k;
      for (std::size_t i = 0; i < 4; ++i) row[8 * i + place] = k == 0 ? large[i] : i == 0 ? 0x1p-27F : 0;
    }
    const auto norms = turbo_quant_pair<4>(32).format.norm_of(emulated_lanes(8), row.data());
    for (std::size_t lane = 0; lane < 8; ++lane) CHECK(norms[lane] == (large_first ? 1 : 1 + 0x1p-23F));
  }
}

TEST_CASE("turbo_quant: what lanes do not do") {
  const auto refused = [](std::uint32_t dim, const turbo_quant<4>::options& options) {
    return cuda::turbo_quant<4>::make(*turbo_quant<4>::make(1, dim, options)).error().code;
  };
  CHECK(refused(20, {}) == error_code::unsupported);
  CHECK(refused(264, {}) == error_code::unsupported);
  CHECK(refused(64, {{rotation_kind::haar}}) == error_code::unsupported);
  CHECK(refused(64, {{}, true}) == error_code::unsupported);
}

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvexact/codec/codec.hpp>

namespace kvexact::test {

using toy_codec = plain_codec_without_model<bf16>;

/// Calibrated on rows of a `toy_engine` with this seed; compiled once for all tests.
std::vector<std::byte> toy_profile_file(std::uint32_t seed);

}  // namespace kvexact::test

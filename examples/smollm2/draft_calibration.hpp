// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <common/outcome.hpp>
#include <kvexact/compression/echo_kv.hpp>

#include "engine.hpp"

namespace kvexact::examples {

/// Layers of a group of EchoKV.
inline constexpr std::size_t echo_layers = 2;

/// What methods are calibrated with, of each layer.
struct draft_calibration {
  std::vector<std::vector<float>> key_means, value_means;  ///< over some text, [kv_heads, head_dim]
  std::vector<std::vector<float>> output_grams;            ///< W^T W of the output projection's part of each head, [heads, head_dim, head_dim]
  std::vector<std::shared_ptr<const echo_group>> echo;         ///< half of the channels kept, for each `echo_layers` layers
};

/// `folder`: where `model` is from; `ids`: text to calibrate on.
[[nodiscard]] outcome<draft_calibration> calibrate(engine& model, const std::string& folder, std::span<const std::uint32_t> ids);

}  // namespace kvexact::examples

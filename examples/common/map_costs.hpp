// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <kvexact/prediction/layer_maps.hpp>
#include <kvexact/prediction/quantised_matrix.hpp>

namespace kvexact::examples {

/// What maps add to a profile and to the work of coding.
struct map_costs {
  std::uint64_t bytes = 0;          ///< in the profile
  std::uint64_t multiply_adds = 0;  ///< of 8-bit weights with 8-bit features, for each token
};

[[nodiscard]] inline map_costs costs_of(const layer_maps& maps) noexcept {
  map_costs costs;
  const auto add = [&costs](const quantised_matrix& matrix) {
    costs.bytes += 4 * matrix.scales.size() + matrix.weights.size();
    costs.multiply_adds += matrix.weights.size();
  };
  if (maps.empty()) return costs;
  costs.bytes = 5 * 4;  // what kind of maps they are
  for (const tile_map& tile : maps.tiles) {
    costs.bytes += 4 + 4 * (tile.feature_scales.size() + tile.missed_scales.size());
    add(tile.inner);
    for (const quantised_matrix& block : tile.blocks) add(block);
  }
  for (const quantised_matrix& gain : maps.gains) add(gain);
  return costs;
}

}  // namespace kvexact::examples

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "draft_quality.hpp"

namespace kvexact::examples {

/// Newest tokens that quantisers leave exact.
inline constexpr std::uint64_t tail = 32;

/// The methods of the comparison, from no loss to much; the first one is the full cache.
std::vector<draft_method> all_draft_methods();

}  // namespace kvexact::examples

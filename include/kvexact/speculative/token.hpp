// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvexact {

/// An index into the vocabulary.
using token_id = std::uint32_t;

}  // namespace kvexact

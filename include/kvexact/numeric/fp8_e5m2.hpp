// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/numeric/small_float.hpp>

namespace kvexact {

/// OCP 8-bit E5M2: largest finite 57344, infinities and NaNs as in IEEE 754.
using fp8_e5m2 = small_float<5, 2, float_specials::ieee>;

}  // namespace kvexact

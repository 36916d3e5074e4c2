// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/numeric/small_float.hpp>

namespace kvexact {

/// OCP 8-bit E4M3: largest finite 448, no infinities, NaN is S.1111.111.
using fp8_e4m3 = small_float<4, 3, float_specials::nan_only>;

}  // namespace kvexact

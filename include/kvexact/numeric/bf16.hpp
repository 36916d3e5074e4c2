// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/numeric/small_float.hpp>

namespace kvexact {

/// bfloat16: the upper half of a float.
using bf16 = small_float<8, 7, float_specials::ieee>;

}  // namespace kvexact

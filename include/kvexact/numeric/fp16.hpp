// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/numeric/small_float.hpp>

namespace kvexact {

/// IEEE 754 binary16.
using fp16 = small_float<5, 10, float_specials::ieee>;

}  // namespace kvexact

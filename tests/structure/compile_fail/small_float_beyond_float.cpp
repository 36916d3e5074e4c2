// expect: kvexact: a small_float without infinities must be narrower than float
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/numeric/small_float.hpp>

constexpr kvexact::small_float<8, 7, kvexact::float_specials::nan_only> beyond_float{};

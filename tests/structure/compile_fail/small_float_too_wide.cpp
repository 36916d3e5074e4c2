// expect: kvexact: small_float has 4 to 8 exponent bits, 2 to 10 mantissa bits and at most 16 bits in all
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/numeric/small_float.hpp>

constexpr kvexact::small_float<8, 10, kvexact::float_specials::ieee> nineteen_bits{};

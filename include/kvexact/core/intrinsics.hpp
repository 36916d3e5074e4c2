// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/core/config.hpp>

#ifdef KVEXACT_TARGET_AVX512

// The intrinsics of g++ 12 start from registers that they leave undefined on purpose, and then it warns of them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#endif

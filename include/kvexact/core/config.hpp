// SPDX-License-Identifier: Apache-2.0
#pragma once

/// KVEXACT_ALWAYS_INLINE: for kernels that are instantiated inside functions compiled for another instruction set, where a call
/// would fall back to the baseline. Sanitizers make the inlined code so large that plain inlining must do there.
#if defined(__SANITIZE_ADDRESS__)
#define KVEXACT_ALWAYS_INLINE inline
#elif defined(__GNUC__) || defined(__clang__)
#define KVEXACT_ALWAYS_INLINE [[gnu::always_inline]] inline
#elif defined(_MSC_VER)
#define KVEXACT_ALWAYS_INLINE __forceinline
#else
#define KVEXACT_ALWAYS_INLINE inline
#endif

/// KVEXACT_NO_INLINE: for rare paths beside a kernel, so that they are compiled once.
#if defined(__GNUC__) || defined(__clang__)
#define KVEXACT_NO_INLINE [[gnu::noinline]]
#elif defined(_MSC_VER)
#define KVEXACT_NO_INLINE __declspec(noinline)
#else
#define KVEXACT_NO_INLINE
#endif

/// KVEXACT_HOST_DEVICE: on functions that kernels call, too. Other compilers than nvcc compile the same function for the host.
#ifdef __CUDACC__
#define KVEXACT_HOST_DEVICE __host__ __device__
#else
#define KVEXACT_HOST_DEVICE
#endif

/// KVEXACT_TARGET_AVX512: on functions that use AVX-512 intrinsics; defined where they can be compiled. Such functions can be inlined into
/// one another only, so no other function may lie between the kernel and an intrinsic.
#if defined(__x86_64__) && defined(__GNUC__)
#define KVEXACT_TARGET_AVX512 [[gnu::target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512dq,avx512vl")]]
#endif

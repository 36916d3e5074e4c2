// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/core/config.hpp>
#include <kvexact/core/intrinsics.hpp>

#ifdef KVEXACT_TARGET_AVX512

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include <kvexact/entropy/entropy_model.hpp>

namespace kvexact::detail {

/// Two registers of 32-bit numbers as one of their lower (`Half` 0) or upper (1) 16 bits, in order.
template <int Half>
KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE __m512i join_halves(__m512i low, __m512i high) noexcept {
  alignas(64) static constexpr std::array<std::uint16_t, 32> index = [] {
    std::array<std::uint16_t, 32> numbers{};
    for (std::size_t i = 0; i < 32; ++i) numbers[i] = static_cast<std::uint16_t>(2 * i + Half);
    return numbers;
  }();
  return _mm512_permutex2var_epi16(low, _mm512_load_si512(index.data()), high);
}

/// The steps of `lane_vector` for decoding with 32 lanes, in two registers.
class lanes_avx512 {
 public:
  static constexpr int count = 32;

  /// `Lanes` is any lane vector of 32 lanes.
  template <class Lanes>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static lanes_avx512 load(const Lanes& from) noexcept {
    alignas(64) std::array<std::uint32_t, count> x;
    for (int i = 0; i < count; ++i) x[static_cast<std::size_t>(i)] = from.lane(i);
    lanes_avx512 lanes;
    lanes.low_ = _mm512_load_si512(x.data());
    lanes.high_ = _mm512_load_si512(x.data() + 16);
    return lanes;
  }
  template <class Lanes>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE void store(Lanes& to) const noexcept {
    alignas(64) std::array<std::uint32_t, count> x;
    _mm512_store_si512(x.data(), low_);
    _mm512_store_si512(x.data() + 16, high_);
    for (int i = 0; i < count; ++i) to.set_lane(i, x[static_cast<std::size_t>(i)]);
  }

  /// `contexts` and the symbols given are 16-bit lanes.
  template <int P>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE __m512i advance(const decode_slot<P>* slots, __m512i contexts) noexcept {
    static_assert(sizeof(decode_slot<P>) == 4);
    const __m512i low = advance_half<P>(slots, _mm512_castsi512_si256(contexts), low_);
    const __m512i high = advance_half<P>(slots, _mm512_extracti64x4_epi64(contexts, 1), high_);
    return _mm512_srli_epi16(join_halves<1>(low, high), 2 * decode_slot<P>::field_bits - 16);
  }

  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE int refill(const std::byte* words) noexcept {
    const int used = refill_half(words, low_);
    return used + refill_half(words + 2 * used, high_);
  }

 private:
  template <int P>
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static __m512i advance_half(const decode_slot<P>* slots, __m256i contexts,
                                                                           __m512i& x) noexcept {
    const __m512i mask = _mm512_set1_epi32((1 << P) - 1);
    const __m512i field = _mm512_set1_epi32(static_cast<int>(decode_slot<P>::field_mask));
    const __m512i first = _mm512_slli_epi32(_mm512_cvtepu16_epi32(contexts), P);
    const __m512i slot = _mm512_i32gather_epi32(_mm512_or_si512(first, _mm512_and_si512(x, mask)), slots, 4);
    const __m512i quotient = _mm512_srli_epi32(x, P);
    const __m512i less_one = _mm512_and_si512(_mm512_srli_epi32(slot, decode_slot<P>::field_bits), field);
    const __m512i frequency = _mm512_add_epi32(less_one, _mm512_set1_epi32(1));
    x = _mm512_add_epi32(_mm512_mullo_epi32(frequency, quotient), _mm512_and_si512(slot, field));
    return slot;
  }
  KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE static int refill_half(const std::byte* words, __m512i& x) noexcept {
    const __mmask16 needs = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(0x10000));
    const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
    x = _mm512_mask_or_epi32(x, needs, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(needs, next));
    return std::popcount(static_cast<std::uint32_t>(needs));
  }

  __m512i low_;
  __m512i high_;
};

}  // namespace kvexact::detail

#endif

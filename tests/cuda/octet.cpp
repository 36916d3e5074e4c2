// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include <doctest/doctest.h>

#include <kvexact/compression/packed_codes.hpp>
#include <kvexact/cuda/octet.cuh>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/fp16.hpp>
#include <kvexact/numeric/fp8_e4m3.hpp>
#include <kvexact/numeric/fp8_e5m2.hpp>

using namespace kvexact;

namespace {

template <class Number>
void check_finite_values() {
  int checked = 0;
  for (std::uint32_t bits = 0; bits < 1U << Number::bit_count; ++bits) {
    const auto number = Number::from_bits(static_cast<typename Number::bits_type>(bits));
    if (!number.is_finite()) continue;
    ++checked;
    if (std::bit_cast<std::uint32_t>(cuda::finite_value(number)) != std::bit_cast<std::uint32_t>(number.to_float())) FAIL_CHECK(bits);
  }
  CHECK(checked == 2 * (Number::max_finite + 1));
}

template <int Bits>
void check_codes() {
  CAPTURE(Bits);
  for (std::uint32_t seed = 0; seed < 50; ++seed) {
    cuda::octet_codes codes, back;
    std::uint8_t plain[8];
    for (std::uint32_t k = 0; k < 8; ++k) {
      codes[k] = (seed * 2654435761U >> (2 * k)) & ((1U << Bits) - 1);
      plain[k] = static_cast<std::uint8_t>(codes[k]);
    }
    std::byte expected[Bits], packed[Bits];
    detail::pack_codes<Bits>(plain, 8, expected);
    cuda::store_codes<Bits>(codes, packed);
    cuda::load_codes<Bits>(packed, back);
    for (int b = 0; b < Bits; ++b) REQUIRE(packed[b] == expected[b]);
    for (int k = 0; k < 8; ++k) REQUIRE(back[k] == codes[k]);
  }
}

}  // namespace

TEST_CASE("octet: every finite number has its value") {
  check_finite_values<bf16>();
  check_finite_values<fp16>();
  check_finite_values<fp8_e4m3>();
  check_finite_values<fp8_e5m2>();
  CHECK(cuda::finite_value(-1.5F) == -1.5F);
}

TEST_CASE("octet: values are clipped as those of draft caches are") {
  CHECK(cuda::clipped_value(std::numeric_limits<float>::max()) == 1e30F);
  CHECK(cuda::clipped_value(-2e30F) == -1e30F);
  CHECK(cuda::clipped_value(bf16::from_bits(bf16::max_finite)) == 1e30F);
  CHECK(cuda::clipped_value(9e29F) == 9e29F);
}

TEST_CASE("octet: codes lie in bytes as those of the host do") {
  check_codes<1>();
  check_codes<2>();
  check_codes<3>();
  check_codes<4>();
  check_codes<5>();
  check_codes<6>();
  check_codes<7>();
  check_codes<8>();
}

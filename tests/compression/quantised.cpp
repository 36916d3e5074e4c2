// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/kivi.hpp>
#include <kvexact/compression/kvarn.hpp>
#include <kvexact/compression/quantised.hpp>
#include <kvexact/compression/symmetric.hpp>
#include <kvexact/compression/turbo_quant.hpp>
#include <kvexact/numeric/fp16.hpp>

#include "dropper_driver.hpp"
#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr layer_shape shape{2, 20, 12};
using small_kivi = kivi<bf16, 2, 3>;

small_kivi make_kivi(std::uint64_t sinks, std::uint64_t tail, std::uint64_t max_rollback) {
  return *small_kivi::make(shape, {.keys = {8}, .values = {6}, .sinks = sinks, .tail = tail, .max_rollback = max_rollback});
}
template <class C>
void check_same_packed(const C& a, const C& b) {
  for (const cache_part part : cache_parts) {
    REQUIRE(a.quantised_end(part) == b.quantised_end(part));
    const auto x = a.packed(part), y = b.packed(part);
    REQUIRE(std::equal(x.begin(), x.end(), y.begin(), y.end()));
  }
}

}  // namespace

TEST_CASE("quantised: a group is quantised when all its tokens are older than the tail, wherever calls end") {
  const example_layer layer(shape, 1, 200, 1);
  for (const std::uint64_t tail : {0U, 1U, 13U}) {
    for (const std::uint64_t sinks : {0U, 16U}) {
      small_kivi cache = make_kivi(sinks, tail, 5);
      for (std::uint64_t length = 0; length < 200;) {
        const std::uint64_t step = std::min<std::uint64_t>(1 + length % 11, 200 - length);
        REQUIRE(cache.append(layer.rows(length), step));
        length += step;
        const std::uint64_t old = length < tail ? 0 : length - tail;
        REQUIRE(cache.quantised_end(cache_part::key) == std::max(sinks, old / 8 * 8));
        REQUIRE(cache.quantised_end(cache_part::value) == std::max(sinks, old));
        const auto state = state_of(cache);
        for (std::uint32_t head = 0; head < 2; ++head) {
          for (std::uint64_t t = 0; t < length; ++t) {
            const bool key_exact = t < sinks || t >= cache.quantised_end(cache_part::key);
            const bool value_exact = t < sinks || t >= cache.quantised_end(cache_part::value);
            const auto same = [&](const float* got, const bf16* expected, std::uint32_t dim) {
              return std::equal(got, got + dim, expected, [](float a, bf16 b) { return a == b.to_float(); });
            };
            REQUIRE(same(&state[head].keys[t * 20], layer.key(t, head), 20) == key_exact);
            REQUIRE(same(&state[head].values[t * 12], layer.value(t, head), 12) == value_exact);
          }
        }
      }
    }
  }
}

TEST_CASE("quantised: the same groups, bit by bit, in any chunks and after any truncation") {
  const example_layer layer(shape, 1, 300, 2), other(shape, 1, 300, 3);
  small_kivi once = make_kivi(8, 20, 16);
  REQUIRE(once.append(layer.rows(0), 300));
  small_kivi pieces = make_kivi(8, 20, 16);
  for (std::uint64_t length = 0; length < 300; ++length) {
    REQUIRE(pieces.append(layer.rows(length), 1));
    const std::uint64_t wrong = length * 7 % 17;
    if (length + 1 + wrong <= 300) REQUIRE(pieces.append(other.rows(length + 1), wrong));
    REQUIRE(pieces.truncate(length + 1));
    small_kivi straight = make_kivi(8, 20, 16);
    REQUIRE(straight.append(layer.rows(0), length + 1));
    check_same_packed(straight, pieces);
  }
  check_same_packed(once, pieces);
}

TEST_CASE("quantised: heads and groups are what the quantisers make of them") {
  const example_layer layer(shape, 1, 64, 4);
  small_kivi cache = make_kivi(0, 0, 0);
  REQUIRE(cache.append(layer.rows(0), 64));
  const auto format = *asymmetric_by_channel<2>::make(2, 20, {8});
  for (std::size_t group = 0; group < 8; ++group) {
    for (std::uint32_t head = 0; head < 2; ++head) {
      std::vector<float> values;
      for (std::uint64_t t = 0; t < 8; ++t)
        for (std::size_t c = 0; c < 20; ++c) values.push_back(layer.key(8 * group + t, head)[c].to_float());
      const auto expected = packed_by(format, values, head);
      const auto at = cache.packed(cache_part::key).subspan((group * 2 + head) * format.packed_bytes(), format.packed_bytes());
      CHECK(std::equal(at.begin(), at.end(), expected.begin(), expected.end()));
    }
  }
}

TEST_CASE("quantised: a 4096-token draft cache in 4 bits, everything counted") {
  constexpr layer_shape layer_of_smollm2{3, 64, 64};
  const example_layer layer(layer_of_smollm2, 1, 4096, 5);
  const double exact = 2.0 * static_cast<double>(layer.keys.size() + layer.values.size());
  const auto ratio_of = [&]<class C>(const typename C::options& options) {
    auto cache = *C::make(layer_of_smollm2, options);
    REQUIRE(cache.append(layer.rows(0), 4096));
    return static_cast<double>(cache.bytes()) / exact;
  };
  using turbo = quantised<bf16, turbo_quant<4>, turbo_quant<4>>;
  CHECK(ratio_of.operator()<turbo>({}) <= 0.3);
  using int4 = quantised<bf16, symmetric<4>, symmetric<4>>;
  CHECK(ratio_of.operator()<int4>({.keys = {64}, .values = {64}}) <= 0.3);
  CHECK(ratio_of.operator()<kivi<bf16, 4, 4>>({.keys = {64}, .values = {64}, .tail = 64}) <= 0.35);
  using norms = quantised<bf16, kvarn<4, cache_part::key>, kvarn<4, cache_part::value>>;
  CHECK(ratio_of.operator()<norms>({.keys = {}, .values = {}, .tail = 64}) <= 0.35);
}

TEST_CASE("quantised: values beyond a format are counted") {
  using unscaled = quantised<fp16, symmetric<4>, symmetric<4>>;
  auto cache = *unscaled::make({1, 2, 2}, {});
  const std::vector<fp16> rows(2, fp16::from_float(65504));
  const layer_tensors<const fp16> tensors{strided_tensor<const fp16>::nhd(rows.data(), 1, 2), strided_tensor<const fp16>::nhd(rows.data(), 1, 2)};
  REQUIRE(cache.append(tensors, 1));
  CHECK(cache.saturated() == 0);
  using bare = quantised<bf16, symmetric<4>, symmetric<4>>;
  auto wide = *bare::make({1, 2, 2}, {});
  const std::vector<bf16> large(2, bf16::from_float(1e20F));
  REQUIRE(wide.append({strided_tensor<const bf16>::nhd(large.data(), 1, 2), strided_tensor<const bf16>::nhd(large.data(), 1, 2)}, 1));
  CHECK(wide.saturated() == 4);
}

TEST_CASE("quantised: unusable options and shapes") {
  const auto code = [](const layer_shape& of, const small_kivi::options& options) { return small_kivi::make(of, options).error().code; };
  CHECK(code({2, 20, 0}, {}) == error_code::invalid_argument);
  CHECK(code({0, 20, 12}, {}) == error_code::invalid_argument);
  CHECK(code({65536, 65536, 65536}, {}) == error_code::out_of_range);
  CHECK(code(shape, {.keys = {8}, .values = {}, .sinks = 4}) == error_code::invalid_argument);
  CHECK(code(shape, {.keys = {1}, .values = {}}) == error_code::invalid_argument);
  CHECK(code(shape, {.keys = {}, .values = {1}}) == error_code::invalid_argument);
  for (const std::uint64_t huge : {small_kivi::most_tail + 1, ~std::uint64_t{0}}) {
    CHECK(code(shape, {.keys = {}, .values = {}, .tail = huge}) == error_code::out_of_range);
    CHECK(code(shape, {.keys = {}, .values = {}, .max_rollback = huge}) == error_code::out_of_range);
    CHECK(code(shape, {.keys = {}, .values = {}, .sinks = huge}) == error_code::out_of_range);
  }
}

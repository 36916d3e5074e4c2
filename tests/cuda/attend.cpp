// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/attention.hpp>
#include <kvexact/compression/kivi.hpp>
#include <kvexact/cuda/attend.cuh>
#include <kvexact/numeric/bf16.hpp>

#include "device_checks.hpp"
#include "emulated_device.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

template <class K, class V>
void check(const K& keys, const V& values, std::initializer_list<std::uint64_t> lengths) {
  emulated_device device;
  for (const std::uint64_t tokens : lengths) check_attention(device, keys.host, keys.format, values.host, values.format, tokens);
}

}  // namespace

TEST_CASE("attend: agrees with attention to what the host's quantisers give back") {
  check(turbo_quant_pair<4>(128), turbo_quant_pair<4>(128), {1, 5, 16, 70, 200});
  check(turbo_quant_pair<4>(80), turbo_quant_pair<4>(64), {66});
  check(by_channel_pair<4>(96, 32), asymmetric_pair<4>(96, 32), {32, 96});
  check(scaled_float_pair<fp8_e4m3>(64, 32), symmetric_pair<4>(192, 64), {37});
}

TEST_CASE("attend: parts that begin inside groups of both") {
  check(by_channel_pair<4>(64, 48), asymmetric_pair<4>(64, 32), {96});
  check(asymmetric_pair<4>(64, 32), by_channel_pair<4>(64, 24), {72});
}

TEST_CASE("attend: the number of tokens decides on the parts") {
  CHECK(cuda::attention_parts(0) == 0);
  CHECK(cuda::attention_parts(1) == 1);
  CHECK(cuda::attention_parts(64) == 1);
  CHECK(cuda::attention_parts(65) == 2);
  CHECK(cuda::attention_parts(64 * 256) == 256);
  CHECK(cuda::tokens_per_part(64 * 256 + 1) == 128);
  CHECK(cuda::attention_parts(64 * 256 + 1) == 129);
  CHECK(cuda::attention_parts(1U << 24) == 256);
}

TEST_CASE("attend: with the exact tail merged in, it is the attention of the draft cache") {
  constexpr std::uint32_t heads = 2, dim = 64;
  constexpr std::uint64_t length = 150, tail = 22;  // 128 tokens are quantised
  auto cache = *kivi<bf16, 4, 4>::make({heads, dim, dim}, {.keys = {32}, .values = {32}, .tail = tail});
  detail::normal_numbers random(8);
  const auto rows_of = [&] {
    std::vector<bf16> made(length * heads * dim);
    for (bf16& each : made) each = bf16::from_float(static_cast<float>(random.next()));
    return made;
  };
  const std::vector<bf16> key_rows = rows_of(), value_rows = rows_of();
  const auto tensor_of = [&](const std::vector<bf16>& rows) { return strided_tensor<const bf16>::nhd(rows.data(), heads, dim); };
  REQUIRE(cache.append({tensor_of(key_rows), tensor_of(value_rows)}, length));
  const std::uint64_t tokens = cache.quantised_end(cache_part::key);
  REQUIRE(tokens == length - tail);
  REQUIRE(tokens == cache.quantised_end(cache_part::value));

  std::vector<float> queries(heads * dim), out(queries.size()), log_mass(heads);
  for (float& each : queries) each = static_cast<float>(random.next()) / 8;
  emulated_device device;
  const auto keys = cache.packed(cache_part::key), values = cache.packed(cache_part::value);
  device.attend(by_channel_pair<4>(dim, 32).format, asymmetric_pair<4>(dim, 32).format,
                cuda::attention_call{keys, values, tokens, heads, queries, out, log_mass});
  for (std::uint32_t h = 0; h < heads; ++h) {
    const auto query = std::span(queries).subspan(h * dim, dim), own = std::span(out).subspan(h * dim, dim);
    std::vector<float> scores(tail), other(dim), expected(dim), expected_mass(1);
    for (std::size_t t = 0; t < tail; ++t)
      for (std::size_t c = 0; c < dim; ++c) scores[t] += query[c] * key_rows[((tokens + t) * heads + h) * dim + c].to_float();
    const float other_mass = detail::softmax(scores);
    for (std::size_t t = 0; t < tail; ++t)
      for (std::size_t c = 0; c < dim; ++c) other[c] += scores[t] * value_rows[((tokens + t) * heads + h) * dim + c].to_float();
    detail::merge_attention(own, log_mass[h], other, other_mass);

    REQUIRE(cache.attend(h, {query, expected, expected_mass}));
    CHECK(log_mass[h] == doctest::Approx(expected_mass[0]).epsilon(1e-6));
    for (std::size_t c = 0; c < dim; ++c) CHECK(std::abs(own[c] - expected[c]) < 2e-6F);
  }
}

TEST_CASE("attend: sizes that do not fit") {
  const auto keys = by_channel_pair<2>(64, 32).format;
  const auto values = symmetric_pair<4>(80, 80).format;
  std::vector<std::byte> packed_keys(2 * 2 * keys.packed_bytes()), packed_values(2 * 64 * values.packed_bytes());
  std::vector<float> queries(4 * 64), out(4 * 80), log_mass(4);
  const cuda::attention_call good{packed_keys, packed_values, 64, 2, queries, out, log_mass};
  const std::size_t room = cuda::attention_workspace_floats(values, 64, 4);
  CHECK(room == 4 * 82);
  CHECK(cuda::expect_attention(keys, values, good, room));
  CHECK(cuda::expect_attention(keys, values, good, room - 1).error().code == error_code::workspace_too_small);
  const auto refused = [&](auto change) {
    cuda::attention_call call = good;
    change(call);
    const auto fits = cuda::expect_attention(keys, values, call, room);
    REQUIRE(!fits);
    return fits.error().code;
  };
  CHECK(refused([](auto& call) { call.tokens = 0; }) == error_code::invalid_argument);
  CHECK(refused([](auto& call) { call.tokens = 63; }) == error_code::invalid_argument);
  CHECK(refused([](auto& call) { call.tokens = 96; }) == error_code::shape_mismatch);
  CHECK(refused([](auto& call) { call.kv_heads = 0; }) == error_code::invalid_argument);
  CHECK(refused([](auto& call) { call.values = call.values.first(1); }) == error_code::shape_mismatch);
  CHECK(refused([](auto& call) { call.log_mass = {}; }) == error_code::invalid_argument);
  CHECK(refused([](auto& call) { call.log_mass = call.log_mass.first(3); }) == error_code::invalid_argument);
  CHECK(refused([](auto& call) { call.log_mass = call.log_mass.first(2); }) == error_code::shape_mismatch);
  CHECK(refused([](auto& call) { call.out = call.out.first(1); }) == error_code::shape_mismatch);
}

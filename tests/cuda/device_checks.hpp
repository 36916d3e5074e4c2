// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/rotation.hpp>
#include <kvexact/cuda/asymmetric.cuh>
#include <kvexact/cuda/asymmetric_by_channel.cuh>
#include <kvexact/cuda/attend.cuh>
#include <kvexact/cuda/scaled_float.cuh>
#include <kvexact/cuda/symmetric.cuh>
#include <kvexact/cuda/turbo_quant.cuh>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/fp16.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

// What holds for a device holds for its emulation: `Device` has quantise, dequantise and attend, which take memory of the host.
namespace kvexact::test {

/// Rows [tokens, heads, dim]. Each row, or each channel, is random or of a kind that quantisers treat in a way of its own.
inline std::vector<float> awkward_rows(std::size_t tokens, std::size_t heads, std::size_t dim, bool by_channel) {
  detail::normal_numbers random(3);
  std::vector<float> made(tokens * heads * dim);
  for (std::size_t r = 0; r < tokens * heads; ++r) {
    for (std::size_t channel = 0; channel < dim; ++channel) {
      const auto normal = static_cast<float>(random.next());
      const std::size_t c = by_channel ? r / heads : channel;
      float& each = made[r * dim + channel];
      switch ((by_channel ? channel : r) % 16) {
        case 1: each = 0.0F; break;
        case 2: each = -0.0F; break;
        case 3: each = c % 7 == 3 ? 0.0F : -0.0F; break;
        case 4: each = c % 5 == 1 ? -0.0F : 0.0F; break;
        case 5: each = normal * 1e-39F; break;                                     // subnormal, scales vanish
        case 6: each = normal * 1e-7F; break;                                      // scales are subnormal as fp16
        case 7: each = -2.71828F; break;                                           // all equal
        case 8: each = c == 13 % dim ? 1.0F : 0.0F; break;
        case 9: each = 1e4F + normal; break;                                       // an offset far larger than the range
        case 10: each = normal * 1e5F; break;                                      // norms beyond fp16
        case 11: each = normal < 0 ? -3e38F : 1e30F; break;                        // clipped
        case 12: each = normal * (c % 32 == 5 ? 1000.0F : 1.0F); break;            // outliers
        case 13: each = static_cast<float>(static_cast<int>(c % 31) - 15); break;  // halves of steps
        case 14: each = c % 9 == 0 ? normal * 1e-41F : -0.0F; break;
        default: each = normal; break;
      }
    }
  }
  return made;
}
/// The nearest number, finite.
template <class Number>
Number finite_number(float value) {
  if constexpr (std::is_same_v<Number, float>) {
    return value;
  } else {
    unsigned saturated = 0;
    return Number::from_float_saturating(value, saturated);
  }
}

/// Rows [tokens, heads, dim] of a kind, and what the host's quantiser makes of them.
template <class Host, class Number>
struct quantised_rows {
  std::uint64_t tokens;
  std::uint32_t heads;
  std::vector<Number> rows;
  std::vector<std::byte> packed;  ///< [group][head][packed_bytes]
  std::vector<float> back;        ///< [token, head, dim]

  quantised_rows(const Host& host, std::uint64_t token_count, std::uint32_t head_count, const std::vector<float>& values)
      : tokens(token_count), heads(head_count), back(values.size()) {
    const std::size_t dim = host.dim(), group = host.group_tokens(), bytes = host.packed_bytes();
    for (const float value : values) rows.push_back(finite_number<Number>(value));
    packed.resize(tokens / group * heads * bytes);
    std::vector<float> stage(group * dim), scratch(host.scratch_floats());
    for (std::size_t g = 0; g < tokens / group; ++g) {
      for (std::uint32_t h = 0; h < heads; ++h) {
        const auto place = [&](std::size_t t) { return ((g * group + t) * heads + h) * dim; };
        for (std::size_t t = 0; t < group; ++t)
          for (std::size_t c = 0; c < dim; ++c) stage[t * dim + c] = std::clamp(to_float(rows[place(t) + c]), -1e30F, 1e30F);
        const auto own = std::span(packed).subspan((g * heads + h) * bytes, bytes);
        host.pack(h, stage, own, scratch);
        host.unpack(h, own, stage, scratch);
        for (std::size_t t = 0; t < group; ++t)
          std::copy_n(stage.begin() + static_cast<std::ptrdiff_t>(t * dim), dim, back.begin() + static_cast<std::ptrdiff_t>(place(t)));
      }
    }
  }
  static float to_float(Number number) {
    if constexpr (std::is_same_v<Number, float>) {
      return number;
    } else {
      return number.to_float();
    }
  }
};

/// Bytes and numbers have the bits of the host's, rows in either order.
template <class Number, class Device, class Host, class OnDevice>
void check_same_bits(Device& device, const Host& host, const OnDevice& format) {
  constexpr std::uint32_t heads = 2;
  const std::uint32_t dim = host.dim();
  CAPTURE(dim);
  REQUIRE(format.dim == dim);
  REQUIRE(format.packed_bytes() == host.packed_bytes());
  REQUIRE(format.group_tokens() == host.group_tokens());
  const std::uint64_t tokens = host.group_tokens() == 1 ? 33 : 3 * host.group_tokens();
  const quantised_rows<Host, Number> expected(host, tokens, heads, awkward_rows(tokens, heads, dim, host.group_tokens() > 1));

  std::vector<Number> by_head(expected.rows.size());  // [head, token, dim]
  for (std::uint64_t t = 0; t < tokens; ++t)
    for (std::uint32_t h = 0; h < heads; ++h)
      for (std::uint32_t c = 0; c < dim; ++c) by_head[(h * tokens + t) * dim + c] = expected.rows[(t * heads + h) * dim + c];
  for (const auto& rows : {strided_tensor<const Number>::nhd(expected.rows.data(), heads, dim),
                           strided_tensor<const Number>::hnd(by_head.data(), tokens, dim)}) {
    std::vector<std::byte> packed(expected.packed.size(), std::byte{0xa5});
    device.quantise(format, rows, expected.rows.size(), tokens, heads, packed);
    const auto place = std::mismatch(packed.begin(), packed.end(), expected.packed.begin()).first;
    const auto difference = static_cast<std::size_t>(place - packed.begin());
    CAPTURE(difference / host.packed_bytes() / heads);  // the group
    CAPTURE(difference % host.packed_bytes());
    CHECK(difference == packed.size());
  }

  std::vector<float> back(expected.rows.size(), -1.0F);
  device.dequantise(format, expected.packed, tokens, heads, strided_tensor<float>::nhd(back.data(), heads, dim), back.size());
  CHECK(std::memcmp(back.data(), expected.back.data(), back.size() * sizeof(float)) == 0);
  if constexpr (!std::is_same_v<Number, float>) {
    std::vector<Number> rounded(back.size());
    device.dequantise(format, expected.packed, tokens, heads, strided_tensor<Number>::hnd(rounded.data(), tokens, dim), rounded.size());
    bool same = true;
    for (std::uint64_t t = 0; t < tokens; ++t)
      for (std::uint32_t h = 0; h < heads; ++h)
        for (std::uint32_t c = 0; c < dim; ++c)
          same = same && rounded[(h * tokens + t) * dim + c].bits == Number::from_float(expected.back[(t * heads + h) * dim + c]).bits;
    CHECK(same);
  }
}

/// Attention of six query heads to two KV heads, in double precision, against a device's. `keys` and `values` are [token, head, dim].
inline void check_outcome(std::uint64_t tokens, const std::vector<float>& keys, const std::vector<float>& values,
                          const cuda::attention_call& call) {
  const std::size_t query_heads = call.log_mass.size(), kv_heads = call.kv_heads;
  const std::size_t key_dim = call.queries.size() / query_heads, value_dim = call.out.size() / query_heads;
  CAPTURE(key_dim);
  CAPTURE(value_dim);
  CAPTURE(tokens);
  for (std::size_t q = 0; q < query_heads; ++q) {
    CAPTURE(q);
    const std::size_t h = q / (query_heads / kv_heads);
    std::vector<double> scores(tokens), expected(value_dim);
    double most = -1e300, mass = 0, longest_key = 0, query_length = 0, largest_value = 0;
    for (std::size_t c = 0; c < key_dim; ++c) query_length = std::hypot(query_length, call.queries[q * key_dim + c]);
    for (std::size_t t = 0; t < tokens; ++t) {
      double length = 0;
      for (std::size_t c = 0; c < key_dim; ++c) {
        const double key = keys[(t * kv_heads + h) * key_dim + c];
        scores[t] += key * static_cast<double>(call.queries[q * key_dim + c]);
        length = std::hypot(length, key);
      }
      most = std::max(most, scores[t]);
      longest_key = std::max(longest_key, length);
    }
    for (const double score : scores) mass += std::exp(score - most);
    for (std::size_t t = 0; t < tokens; ++t) {
      for (std::size_t c = 0; c < value_dim; ++c) {
        const double value = values[(t * kv_heads + h) * value_dim + c];
        expected[c] += std::exp(scores[t] - most) / mass * value;
        largest_value = std::max(largest_value, std::fabs(value));
      }
    }
    const double tolerance = 1e-6 * (1 + query_length * longest_key);
    for (std::size_t c = 0; c < value_dim; ++c)
      REQUIRE(std::fabs(static_cast<double>(call.out[q * value_dim + c]) - expected[c]) <= tolerance * largest_value);
    CHECK(std::fabs(static_cast<double>(call.log_mass[q]) - (most + std::log(mass))) <= tolerance);
  }
}

/// Attention on codes is attention to what the host's quantisers give back.
template <class Device, class HostK, class HostV, class K, class V>
void check_attention(Device& device, const HostK& host_keys, const K& keys, const HostV& host_values, const V& values,
                     std::uint64_t tokens) {
  constexpr std::uint32_t kv_heads = 2, query_heads = 6;
  detail::normal_numbers random(tokens + keys.dim);
  const auto normal = [&](std::size_t count, double scale) {
    std::vector<float> made(count);
    for (float& each : made) each = static_cast<float>(random.next() * scale);
    return made;
  };
  const quantised_rows<HostK, float> k(host_keys, tokens, kv_heads, normal(tokens * kv_heads * keys.dim, 1));
  const quantised_rows<HostV, float> v(host_values, tokens, kv_heads, normal(tokens * kv_heads * values.dim, 1));
  // From nearly even weights to scores whose exp is infinite.
  std::vector<float> queries = normal(query_heads * keys.dim, 0.25 / std::sqrt(keys.dim));
  for (std::size_t i = 0; i < queries.size(); ++i) queries[i] = std::ldexp(queries[i], static_cast<int>(i / keys.dim) * 2);
  std::vector<float> out(query_heads * values.dim), log_mass(query_heads);
  const cuda::attention_call call{k.packed, v.packed, tokens, kv_heads, queries, out, log_mass};
  device.attend(keys, values, call);
  check_outcome(tokens, k.back, v.back, call);
}

/// A quantiser and what devices have for it.
template <class Host, class OnDevice>
struct quantiser_pair {
  Host host;
  OnDevice format;

  explicit quantiser_pair(const Host& made) : host(made), format(*OnDevice::make(made)) {}
};
template <int Bits>
auto symmetric_pair(std::uint32_t dim, std::uint32_t group) {
  return quantiser_pair<symmetric<Bits>, cuda::symmetric<Bits>>(*symmetric<Bits>::make(1, dim, {group}));
}
template <class Format>
auto scaled_float_pair(std::uint32_t dim, std::uint32_t group, float scale = 1) {
  return quantiser_pair<scaled_float<Format>, cuda::scaled_float<Format>>(*scaled_float<Format>::make(1, dim, {group, scale}));
}
template <int Bits>
auto asymmetric_pair(std::uint32_t dim, std::uint32_t group) {
  return quantiser_pair<asymmetric<Bits>, cuda::asymmetric<Bits>>(*asymmetric<Bits>::make(1, dim, {group}));
}
template <int Bits>
auto by_channel_pair(std::uint32_t dim, std::uint32_t tokens) {
  using host = asymmetric_by_channel<Bits>;
  return quantiser_pair<host, cuda::asymmetric_by_channel<Bits>>(*host::make(1, dim, {tokens}));
}
template <int Bits>
auto turbo_quant_pair(std::uint32_t dim, const rotation_options& rotation = {}) {
  return quantiser_pair<turbo_quant<Bits>, cuda::turbo_quant<Bits>>(*turbo_quant<Bits>::make(1, dim, {rotation, false}));
}

/// The same for the usual sizes of rows and groups, and the least and the most of both: `make` gives a pair for each.
template <class Number, class Device, class Make>
void check_sizes(Device& device, const Make& make) {
  struct row_size {
    std::uint32_t dim, group;
  };
  for (const row_size size : {row_size{64, 32}, {128, 64}, {80, 32}, {96, 64}, {96, 96}, {8, 8}, {256, 16}}) {
    CAPTURE(size.group);
    const auto pair = make(size.dim, size.group);
    check_same_bits<Number>(device, pair.host, pair.format);
  }
}

}  // namespace kvexact::test

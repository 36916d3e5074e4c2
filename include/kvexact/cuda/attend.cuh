// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <kvexact/core/config.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/cuda/device_quantiser.cuh>
#include <kvexact/cuda/lockstep_lanes.cuh>
#include <kvexact/cuda/octet.cuh>
#include <kvexact/cuda/warp_lanes.cuh>

namespace kvexact::cuda {

/// Tokens of each part that a long cache is cut into, so that many processors share it (flash-decoding): at most 256 parts. Depends on
/// nothing but the length, so that an outcome does neither.
[[nodiscard]] KVEXACT_HOST_DEVICE constexpr std::uint64_t tokens_per_part(std::uint64_t tokens) noexcept {
  std::uint64_t size = 64;
  while (size < tokens / 256 + (tokens % 256 == 0 ? 0 : 1)) size *= 2;
  return size;
}
[[nodiscard]] KVEXACT_HOST_DEVICE constexpr std::uint64_t attention_parts(std::uint64_t tokens) noexcept {
  return tokens == 0 ? 0 : (tokens - 1) / tokens_per_part(tokens) + 1;
}
/// Floats that a part leaves: sums of values [dim] in the quantiser's rotation, each value times exp(score - most); the sum of these
/// factors; and the largest score.
[[nodiscard]] KVEXACT_HOST_DEVICE constexpr std::size_t part_floats(std::uint32_t value_dim) noexcept { return std::size_t{value_dim} + 2; }

/// The groups of one head.
struct packed_head {
  const std::byte* data;
  std::size_t stride;  ///< bytes from a group to the next

  [[nodiscard]] KVEXACT_HOST_DEVICE const std::byte* group(std::uint64_t index) const noexcept { return data + index * stride; }
};

/// Attention of a query [key_dim] to tokens from `begin` to `end` of one head, into `part` [part_floats]. As many tokens as there are lanes
/// at a time: first their scores, one a lane, then what they do to the sums.
template <lockstep_lanes L, device_quantiser K, device_quantiser V>
KVEXACT_HOST_DEVICE void attend_part(const L& lanes, const K& keys, const V& values, const packed_head& packed_keys,
                                     const packed_head& packed_values, const float* query, std::uint64_t begin, std::uint64_t end,
                                     float* part) noexcept {
  per_lane<L, octet> queries{}, sums{};
  per_lane<L, float> most{}, mass{};
  per_lane<L, typename K::line> key_lines{};
  per_lane<L, typename V::line> value_lines{};
  lanes.each([&](int lane, octet& own, float& largest) {
    if (lane < octets_of(keys)) own = load_octet(query, lane);
    largest = -std::numeric_limits<float>::infinity();
  }, queries, most);
  keys.rotate(lanes, queries);

  const auto step = static_cast<std::uint64_t>(lanes.count());
  for (std::uint64_t first = begin; first < end; first += step) {
    const int here = static_cast<int>(end - first < step ? end - first : step);
    per_lane<L, float> scores{};
    lanes.each([](int, float& score) { score = -std::numeric_limits<float>::infinity(); }, scores);
    for (int i = 0; i < here; ++i) {
      const std::uint64_t token = first + static_cast<std::uint64_t>(i);
      const auto row = static_cast<std::uint32_t>(token % keys.group_tokens());
      const std::byte* const group = packed_keys.group(token / keys.group_tokens());
      per_lane<L, float> products{};
      lanes.each([&](int lane, float& dot, typename K::line& line, const octet& own) {
        if (lane >= octets_of(keys)) return;
        if (token == begin || row == 0) line = keys.load_line(group, lane);
        dot = line.dot(keys.load_numbers(group, row, lane), own);
      }, products, key_lines, queries);
      products = sum_of_lanes(lanes, products);
      lanes.each([&](int lane, float& score, const float& dot) { score = lane == i ? dot : score; }, scores, products);
    }

    const per_lane<L, float> largest = largest_of_lanes(lanes, scores, lanes.count());
    per_lane<L, float> weights{};
    lanes.each([](int, float& weight, const float& score, float& old, const float& found, float& total, octet& sum) {
      const float now = found > old ? found : old, shrink = std::exp(old - now);
      weight = std::exp(score - now);
      total *= shrink;
      for (int k = 0; k < octet_channels; ++k) sum.v[k] *= shrink;
      old = now;
    }, weights, scores, most, largest, mass, sums);
    const per_lane<L, float> added = sum_of_lanes(lanes, weights);
    lanes.each([](int, float& total, const float& own) { total += own; }, mass, added);

    for (int i = 0; i < here; ++i) {
      const std::uint64_t token = first + static_cast<std::uint64_t>(i);
      const auto row = static_cast<std::uint32_t>(token % values.group_tokens());
      const std::byte* const group = packed_values.group(token / values.group_tokens());
      const per_lane<L, float> weight = lanes.shuffle(weights, [&](int) { return i; });
      lanes.each([&](int lane, octet& sum, typename V::line& line, const float& own) {
        if (lane >= octets_of(values)) return;
        if (token == begin || row == 0) line = values.load_line(group, lane);
        line.add(values.load_numbers(group, row, lane), own, sum);
      }, sums, value_lines, weight);
    }
  }

  lanes.each([&](int lane, const octet& sum, const float& total, const float& largest) {
    for (int k = 0; lane < octets_of(values) && k < octet_channels; ++k) part[lane * octet_channels + k] = sum.v[k];
    if (lane != 0) return;
    part[values.dim] = total;
    part[values.dim + 1] = largest;
  }, sums, mass, most);
}

/// What all parts [count, part_floats] of a query's attention come to.
template <lockstep_lanes L, device_quantiser V>
KVEXACT_HOST_DEVICE void merge_parts(const L& lanes, const V& values, const float* parts, std::uint64_t count, float* out,
                                     float* log_mass) noexcept {
  const std::size_t stride = part_floats(values.dim);
  const auto mass_of = [&](std::uint64_t p) { return parts[p * stride + values.dim]; };
  const auto most_of = [&](std::uint64_t p) { return parts[p * stride + values.dim + 1]; };
  const auto step = static_cast<std::uint64_t>(lanes.count());
  per_lane<L, float> most{}, mass{};
  lanes.each([&](int lane, float& own) {
    own = -std::numeric_limits<float>::infinity();
    for (auto p = static_cast<std::uint64_t>(lane); p < count; p += step) own = most_of(p) > own ? most_of(p) : own;
  }, most);
  most = largest_of_lanes(lanes, most, lanes.count());
  lanes.each([&](int lane, float& own, const float& largest) {
    for (auto p = static_cast<std::uint64_t>(lane); p < count; p += step) own += std::exp(most_of(p) - largest) * mass_of(p);
  }, mass, most);
  mass = sum_of_lanes(lanes, mass);

  per_lane<L, octet> sums{};
  lanes.each([&](int lane, octet& sum, const float& largest, const float& total) {
    if (lane >= octets_of(values)) return;
    for (std::uint64_t p = 0; p < count; ++p) {
      const float weight = std::exp(most_of(p) - largest) / total;
      const float* const own = parts + p * stride + lane * octet_channels;
      for (int k = 0; k < octet_channels; ++k) sum.v[k] += weight * own[k];
    }
  }, sums, most, mass);
  values.rotate_back(lanes, sums);
  lanes.each([&](int lane, const octet& sum, const float& largest, const float& total) {
    for (int k = 0; lane < octets_of(values) && k < octet_channels; ++k) out[lane * octet_channels + k] = sum.v[k];
    if (lane == 0) *log_mass = largest + std::log(total);
  }, sums, most, mass);
}

/// What query heads attend to, all of it in device memory: `tokens` tokens of `keys` and of `values`, [group][kv head][packed_bytes] as
/// `quantised::packed` has them, whole groups of both. Query head q belongs to KV head q / (query heads / kv heads). `queries`
/// [query heads, key_dim] are scaled and rotated for their positions. Gives `out` [query heads, value_dim] and `log_mass` [query heads], as
/// `kvexact::attention_call`; `merge_attention` adds what exact rows of other tokens come to.
struct attention_call {
  std::span<const std::byte> keys, values;
  std::uint64_t tokens = 0;
  std::uint32_t kv_heads = 0;
  std::span<const float> queries;
  std::span<float> out;
  std::span<float> log_mass;
};

/// Floats of device memory that `attend` needs.
template <device_quantiser V>
[[nodiscard]] std::size_t attention_workspace_floats(const V& values, std::uint64_t tokens, std::size_t query_heads) noexcept {
  return static_cast<std::size_t>(attention_parts(tokens)) * query_heads * part_floats(values.dim);
}

template <device_quantiser K, device_quantiser V>
[[nodiscard]] KVEXACT_HOST_DEVICE int lanes_for(const K& keys, const V& values) noexcept {
  return lanes_for(keys.dim > values.dim ? keys.dim : values.dim);
}

/// Part `piece / query heads` of query head `piece % query heads`, if there is one: heads that read the same run at the same time.
template <lockstep_lanes L, device_quantiser K, device_quantiser V>
KVEXACT_HOST_DEVICE void attend_piece(const L& lanes, const K& keys, const V& values, const attention_call& call, float* parts,
                                      std::uint64_t piece) noexcept {
  const std::uint64_t count = attention_parts(call.tokens), query_heads = call.log_mass.size();
  const std::uint64_t head = piece % query_heads, part = piece / query_heads, kv_head = head / (query_heads / call.kv_heads);
  if (part >= count) return;
  const packed_head packed_keys{call.keys.data() + kv_head * keys.packed_bytes(), call.kv_heads * keys.packed_bytes()};
  const packed_head packed_values{call.values.data() + kv_head * values.packed_bytes(), call.kv_heads * values.packed_bytes()};
  const std::uint64_t size = tokens_per_part(call.tokens), begin = part * size, left = call.tokens - begin;
  attend_part(lanes, keys, values, packed_keys, packed_values, call.queries.data() + head * keys.dim, begin,
              begin + (left < size ? left : size), parts + (head * count + part) * part_floats(values.dim));
}
/// What becomes of query head `piece`, if there is one.
template <lockstep_lanes L, device_quantiser V>
KVEXACT_HOST_DEVICE void merge_piece(const L& lanes, const V& values, const attention_call& call, const float* parts,
                                     std::uint64_t piece) noexcept {
  if (piece >= call.log_mass.size()) return;
  const std::uint64_t count = attention_parts(call.tokens);
  merge_parts(lanes, values, parts + piece * count * part_floats(values.dim), count, call.out.data() + piece * values.dim,
              call.log_mass.data() + piece);
}

/// Whether all sizes fit. Errors: those of `attend`.
template <device_quantiser K, device_quantiser V>
[[nodiscard]] result<void> expect_attention(const K& keys, const V& values, const attention_call& call,
                                            std::size_t workspace_floats) noexcept {
  const std::size_t query_heads = call.log_mass.size();
  if (call.tokens == 0) return error{error_code::invalid_argument, "attention over no tokens"};
  if (const auto fits = expect_packed(keys, call.tokens, call.kv_heads, call.keys.size()); !fits) return fits;
  if (const auto fits = expect_packed(values, call.tokens, call.kv_heads, call.values.size()); !fits) return fits;
  if (query_heads == 0 || query_heads % call.kv_heads != 0)
    return error{error_code::invalid_argument, "the number of query heads is no multiple of that of KV heads"};
  if (call.queries.size() != query_heads * keys.dim || call.out.size() != query_heads * values.dim)
    return error{error_code::shape_mismatch, "queries or room for the outcome of attention have another size"};
  if (workspace_floats < attention_workspace_floats(values, call.tokens, query_heads))
    return error{error_code::workspace_too_small, "the workspace of attention on a device"};
  return {};
}

#ifdef __CUDACC__

template <device_quantiser K, device_quantiser V>
struct quantiser_pair {
  K keys;
  V values;
};

template <device_quantiser K, device_quantiser V>
__global__ void attend_kernel(const __grid_constant__ quantiser_pair<K, V> parameters, attention_call call, float* parts) {
  const auto& [keys, values] = in_shared_memory(parameters);
  const warp_lanes lanes(lanes_for(keys, values));
  attend_piece(lanes, keys, values, call, parts, piece_of_work(lanes));
}
template <device_quantiser V>
__global__ void merge_kernel(const __grid_constant__ V parameters, attention_call call, const float* parts) {
  const V& values = in_shared_memory(parameters);
  const warp_lanes lanes(lanes_for(values.dim));
  merge_piece(lanes, values, call, parts, piece_of_work(lanes));
}

/// Attention on codes; `workspace` has `attention_workspace_floats`. What the host's `quantised::attend` gives, but for rounding: with
/// e = 1e-6 * (1 + |query| * |longest key|), log_mass is within e of what unpacked keys and values would give in real numbers, and out
/// within e times the largest value. The order of additions depends on nothing but the sizes. Work is queued on `stream`.
/// Errors: invalid_argument (no tokens, no heads, query heads that are no multiple, tokens that are no whole groups), shape_mismatch
/// (sizes), workspace_too_small, out_of_range, device_error.
template <device_quantiser K, device_quantiser V>
[[nodiscard]] result<void> attend(const K& keys, const V& values, const attention_call& call, std::span<float> workspace,
                                  cudaStream_t stream) noexcept {
  if (const auto fits = expect_attention(keys, values, call, workspace.size()); !fits) return fits;
  const std::uint64_t query_heads = call.log_mass.size(), pieces = attention_parts(call.tokens) * query_heads;
  const quantiser_pair<K, V> parameters{keys, values};
  const auto done = launch(attend_kernel<K, V>, pieces, lanes_for(keys, values), stream, parameters, call, workspace.data());
  if (!done) return done;
  return launch(merge_kernel<V>, query_heads, lanes_for(values.dim), stream, values, call, workspace.data());
}

#endif

}  // namespace kvexact::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/dropper.hpp>
#include <kvexact/numeric/bf16.hpp>

namespace kvexact::test {

/// A sequence of one layer with the queries of its tokens. Keys grow with the spread, so that attention is peaked.
struct example_layer {
  layer_shape shape;
  std::uint32_t query_heads = 1;  // of one KV head
  std::vector<bf16> keys;         // [token, head, key_dim]
  std::vector<bf16> values;       // [token, head, value_dim]
  std::vector<float> queries;     // [token, head, query head, key_dim]

  example_layer(const layer_shape& layer, std::uint32_t heads_each, std::uint64_t tokens, std::uint32_t seed, float spread = 1.0F)
      : shape(layer), query_heads(heads_each) {
    std::mt19937 random(seed);
    const auto next = [&] { return (static_cast<float>(random() >> 8) * 0x1p-24F - 0.5F) * 3.4F; };
    for (std::uint64_t i = 0; i < tokens * layer.channels(cache_part::key); ++i) keys.push_back(bf16::from_float(next() * spread));
    for (std::uint64_t i = 0; i < tokens * layer.channels(cache_part::value); ++i) values.push_back(bf16::from_float(next()));
    for (std::uint64_t i = 0; i < tokens * layer.channels(cache_part::key) * heads_each; ++i) queries.push_back(next());
  }

  [[nodiscard]] layer_tensors<const bf16> rows(std::uint64_t token) const {
    return {strided_tensor<const bf16>::nhd(keys.data() + token * shape.channels(cache_part::key), shape.kv_heads, shape.key_dim),
            strided_tensor<const bf16>::nhd(values.data() + token * shape.channels(cache_part::value), shape.kv_heads, shape.value_dim)};
  }
  [[nodiscard]] const bf16* key(std::uint64_t token, std::uint32_t head) const {
    return keys.data() + (token * shape.kv_heads + head) * shape.key_dim;
  }
  [[nodiscard]] const bf16* value(std::uint64_t token, std::uint32_t head) const {
    return values.data() + (token * shape.kv_heads + head) * shape.value_dim;
  }

  /// Attention of the queries of `position` on the tokens `on` of a head: [query heads, tokens].
  [[nodiscard]] std::vector<float> attention(std::uint64_t position, std::uint32_t head, std::span<const std::uint64_t> on) const {
    std::vector<float> weights;
    for (std::uint32_t q = 0; q < query_heads; ++q) {
      const float* const query = queries.data() + ((position * shape.kv_heads + head) * query_heads + q) * shape.key_dim;
      std::vector<double> scores;
      for (const std::uint64_t token : on) {
        double score = 0;
        for (std::uint32_t d = 0; d < shape.key_dim; ++d) score += static_cast<double>(query[d]) * key(token, head)[d].to_float();
        scores.push_back(std::exp(score / std::sqrt(double{static_cast<double>(shape.key_dim)})));
      }
      double sum = 0;
      for (const double score : scores) sum += score;
      for (const double score : scores) weights.push_back(static_cast<float>(score / sum));
    }
    return weights;
  }
};

struct head_state {
  std::vector<std::uint64_t> positions;
  std::vector<float> keys;
  std::vector<float> values;
  std::vector<float> summary = {};  // output and log-mass of what stands for other positions, at a few queries

  friend bool operator==(const head_state&, const head_state&) = default;
};

template <layer_compressor C>
head_state state_of(const C& cache, std::uint32_t head) {
  const std::size_t entries = cache.entries(head);
  head_state state{std::vector<std::uint64_t>(entries), std::vector<float>(entries * cache.shape().key_dim),
                   std::vector<float>(entries * cache.shape().value_dim)};
  REQUIRE(cache.materialise(head, {state.positions, state.keys, state.values}));
  if constexpr (summarises_attention<C>) {
    const std::size_t key_dim = cache.shape().key_dim, value_dim = cache.shape().value_dim, count = key_dim + 1;
    std::vector<float> queries(count * key_dim);
    for (std::size_t q = 0; q < key_dim; ++q) queries[q * key_dim + q] = 1;
    state.summary.resize(count * (value_dim + 1));
    const std::span room(state.summary);
    REQUIRE(cache.summarise(head, {queries, room.first(count * value_dim), room.last(count)}));
  }
  return state;
}

template <layer_compressor C>
std::vector<head_state> state_of(const C& cache) {
  std::vector<head_state> all;
  for (std::uint32_t head = 0; head < cache.shape().kv_heads; ++head) all.push_back(state_of(cache, head));
  return all;
}

/// Hands the attention of the newest token over, as an engine does.
template <layer_compressor C>
void observe_newest(C& cache, const example_layer& layer) {
  if constexpr (observes_attention<C>) {
    const std::uint64_t position = cache.length() - 1;
    for (std::uint32_t head = 0; head < layer.shape.kv_heads; ++head) {
      const auto weights = layer.attention(position, head, state_of(cache, head).positions);
      const std::size_t each = std::size_t{layer.query_heads} * layer.shape.key_dim;
      const auto begin = layer.queries.begin() + static_cast<std::ptrdiff_t>((position * layer.shape.kv_heads + head) * each);
      std::vector<float> queries(begin, begin + static_cast<std::ptrdiff_t>(each));
      for (float& query : queries) query /= std::sqrt(static_cast<float>(layer.shape.key_dim));
      REQUIRE(cache.observe({head, position, weights, queries}));
    }
  }
}

/// Appends tokens of `layer` up to `length` one by one, with their attention.
template <layer_compressor C>
void decode(C& cache, const example_layer& layer, std::uint64_t length) {
  while (cache.length() < length) {
    REQUIRE(cache.append(layer.rows(cache.length()), 1));
    observe_newest(cache, layer);
  }
}

/// What all queries of a head paid to all tokens: rows[position][query head][token], 0 for tokens that were dropped or not there yet.
using attention_history = std::vector<std::vector<std::vector<double>>>;

/// The mean over the query heads of what a query paid to a token, rounded as it is held.
inline double mean_weight(const std::vector<std::vector<double>>& query, std::uint64_t token) {
  float sum = 0;
  for (const auto& weights : query) sum += static_cast<float>(weights[token]);
  return static_cast<double>(bf16::from_float(sum / static_cast<float>(query.size())).to_float());
}

/// Scores of all tokens in `held` at a boundary.
using reference_scores = std::function<std::vector<double>(std::uint32_t head, std::uint64_t boundary,
                                                           const std::vector<std::uint64_t>& held, const attention_history&)>;

/// The rule of `dropper_options` in its plainest form, from the whole history: what a head holds at every length up to `tokens`.
inline std::vector<std::vector<std::uint64_t>> reference_positions(const example_layer& layer, const dropper_options& options,
                                                                   std::uint32_t head, std::uint64_t tokens,
                                                                   const reference_scores& scores) {
  std::vector<std::vector<std::uint64_t>> at_length{{}};
  std::vector<std::uint64_t> held;
  attention_history history;
  const std::uint64_t usual = std::uint64_t{options.sinks} + options.budget + options.window + options.interval;
  std::uint64_t boundary = options.first_eviction == 0 ? usual : options.first_eviction;
  for (std::uint64_t position = 0; position < tokens; ++position) {
    if (position == boundary) {
      const std::vector<double> worth = scores(head, boundary, held, history);
      std::vector<std::pair<double, std::uint64_t>> ranked;
      std::vector<std::uint64_t> kept;
      for (std::size_t i = 0; i < held.size(); ++i) {
        if (held[i] < options.sinks || held[i] + options.window >= boundary)
          kept.push_back(held[i]);
        else
          ranked.emplace_back(-worth[i], held[i]);
      }
      std::ranges::sort(ranked);
      for (std::size_t i = 0; i < std::min<std::size_t>(ranked.size(), options.budget); ++i) kept.push_back(ranked[i].second);
      std::ranges::sort(kept);
      held = kept;
      boundary += options.interval;
    }
    held.push_back(position);
    at_length.push_back(held);
    const auto weights = layer.attention(position, head, held);
    history.emplace_back(layer.query_heads, std::vector<double>(tokens));
    for (std::uint32_t q = 0; q < layer.query_heads; ++q) {
      for (std::size_t i = 0; i < held.size(); ++i) history[position][q][held[i]] = weights[q * held.size() + i];
    }
  }
  return at_length;
}

/// Decodes the layer and compares what is held with the reference at every length.
template <observes_attention C>
void check_against_reference(C& cache, const example_layer& layer, const dropper_options& options, std::uint64_t tokens,
                             const reference_scores& scores) {
  std::vector<std::vector<std::vector<std::uint64_t>>> expected;
  for (std::uint32_t head = 0; head < layer.shape.kv_heads; ++head)
    expected.push_back(reference_positions(layer, options, head, tokens, scores));
  for (std::uint64_t length = 1; length <= tokens; ++length) {
    decode(cache, layer, length);
    for (std::uint32_t head = 0; head < layer.shape.kv_heads; ++head) {
      CAPTURE(length);
      CAPTURE(head);
      REQUIRE(state_of(cache, head).positions == expected[head][length]);
    }
  }
}

}  // namespace kvexact::test

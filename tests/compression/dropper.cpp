// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/asymmetric_by_channel.hpp>
#include <kvexact/compression/centred.hpp>
#include <kvexact/compression/dropper.hpp>
#include <kvexact/compression/h2o.hpp>
#include <kvexact/compression/rest_kv.hpp>
#include <kvexact/compression/scaled_float.hpp>
#include <kvexact/compression/snap_kv.hpp>
#include <kvexact/compression/streaming_llm.hpp>
#include <kvexact/compression/symmetric.hpp>

#include "dropper_driver.hpp"
#include "heap_meter.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr layer_shape shape{2, 6, 4};  // key_dim != value_dim
constexpr std::uint32_t query_heads = 3;

using packed_snap_kv = quantised_dropper<bf16, window_attention, symmetric<4>, symmetric<8>>;

/// Options of any dropper. A StreamingLLM keeps as many entries as the others do.
template <class C>
typename C::options options_of(const dropper_options& common) {
  if constexpr (std::same_as<C, streaming_llm<bf16>>) {
    return {
        .sinks = common.sinks, .window = common.window + common.budget, .interval = common.interval, .max_rollback = common.max_rollback};
  } else if constexpr (std::same_as<C, h2o<bf16>>) {
    return common;
  } else if constexpr (std::same_as<C, packed_snap_kv>) {
    return {.rule = {.eviction = common}, .keys = {}, .values = {}};
  } else {
    typename C::options options;
    options.eviction = common;
    return options;
  }
}

template <class C>
C make(const dropper_options& common, const layer_shape& layer = shape) {
  auto made = C::make(layer, options_of<C>(common));
  REQUIRE(made);
  return *std::move(made);
}

/// Small enough for several evictions in 80 tokens, and to take back more than one of them.
dropper_options small_options(std::uint32_t max_rollback, std::uint32_t interval = 4) {
  return {.sinks = 2,
          .budget = 5,
          .window = std::min(3U, interval),
          .interval = interval,
          .max_rollback = max_rollback,
          .query_heads = query_heads};
}

/// How many tokens a head gives at a length.
std::size_t expected_entries(const dropper_options& common, std::uint64_t length) {
  const std::uint64_t kept = std::uint64_t{common.sinks} + common.budget + common.window;
  const std::uint64_t first = common.first_eviction == 0 ? kept + common.interval : common.first_eviction;
  if (length <= first) return static_cast<std::size_t>(length);
  const std::uint64_t boundary = first + (length - 1 - first) / common.interval * common.interval;
  return static_cast<std::size_t>(std::min(kept, boundary) + length - boundary);
}

}  // namespace

#define ALL_DROPPERS streaming_llm<bf16>, h2o<bf16>, snap_kv<bf16>, rest_kv<bf16>
#define OBSERVING_DROPPERS h2o<bf16>, snap_kv<bf16>, rest_kv<bf16>

TEST_CASE_TEMPLATE("dropper: sinks and window stay, positions are absolute, rows are exact", C, ALL_DROPPERS) {
  const example_layer layer(shape, query_heads, 80, 1);
  for (const std::uint64_t first : {0U, 6U, 9U, 30U}) {
    if (first != 0 && std::same_as<C, streaming_llm<bf16>>) continue;
    dropper_options common = small_options(2);
    common.first_eviction = first;
    C cache = make<C>(common);
    for (std::uint64_t length = 1; length <= 80; ++length) {
      decode(cache, layer, length);
      for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
        CAPTURE(length);
        const head_state state = state_of(cache, head);
        REQUIRE(state.positions.size() == expected_entries(common, length));
        REQUIRE(std::ranges::adjacent_find(state.positions, std::greater_equal<>()) == state.positions.end());
        for (std::uint64_t each = 0; each < std::min<std::uint64_t>(common.sinks, length); ++each) CHECK(state.positions[each] == each);
        for (std::uint64_t back = 1; back <= std::min<std::uint64_t>(common.window, length); ++back)
          CHECK(state.positions[state.positions.size() - back] == length - back);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < state.positions.size(); ++i) {
          for (std::uint32_t d = 0; d < shape.key_dim; ++d)
            wrong += state.keys[i * shape.key_dim + d] != layer.key(state.positions[i], head)[d].to_float();
          for (std::uint32_t d = 0; d < shape.value_dim; ++d)
            wrong += state.values[i * shape.value_dim + d] != layer.value(state.positions[i], head)[d].to_float();
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE_TEMPLATE("dropper: chunks of any size give the same as tokens one by one", C, ALL_DROPPERS) {
  const example_layer layer(shape, query_heads, 90, 2);
  C single = make<C>(small_options(3));
  std::vector<std::vector<head_state>> expected{state_of(single)};
  for (std::uint64_t length = 1; length <= 90; ++length) {
    REQUIRE(single.append(layer.rows(length - 1), 1));
    expected.push_back(state_of(single));
  }
  for (const std::uint64_t chunk : {1U, 2U, 3U, 5U, 16U, 17U, 44U, 90U}) {
    C cache = make<C>(small_options(3));
    while (cache.length() < 90) {
      REQUIRE(cache.append(layer.rows(cache.length()), std::min<std::uint64_t>(chunk, 90 - cache.length())));
      CHECK(state_of(cache) == expected[cache.length()]);
    }
  }
}

TEST_CASE_TEMPLATE("dropper: tokens that observe nothing may come in chunks", C, snap_kv<bf16>, rest_kv<bf16>) {
  const example_layer layer(shape, query_heads, 200, 3);
  dropper_options common = small_options(3);
  common.interval = 11;
  C single = make<C>(common);
  C cache = make<C>(common);
  std::uint64_t chunks = 0;
  while (cache.length() < 200) {
    std::uint64_t tokens = 1;
    while (cache.length() + tokens < 200 && !cache.observes(cache.length() + tokens - 1)) ++tokens;
    chunks += tokens > 1 ? 1 : 0;
    REQUIRE(cache.append(layer.rows(cache.length()), tokens));
    if (cache.observes(cache.length() - 1)) observe_newest(cache, layer);
    decode(single, layer, cache.length());
    REQUIRE(state_of(cache) == state_of(single));
  }
  CHECK(chunks > 10);
}

TEST_CASE_TEMPLATE("dropper: append after truncate is never having appended", C, ALL_DROPPERS) {
  const example_layer layer(shape, query_heads, 130, 4);
  const example_layer other(shape, query_heads, 130, 5);
  for (const std::uint32_t rollback : {0U, 1U, 2U, 4U, 7U, 30U}) {
    CAPTURE(rollback);
    const dropper_options common = small_options(rollback, rollback == 7 ? 1 : 4);
    C straight = make<C>(common);
    C cache = make<C>(common);
    for (std::uint64_t length = 1; length <= 100; ++length) {
      CAPTURE(length);
      decode(straight, layer, length);
      decode(cache, layer, length);
      // Drafts of another continuation, taken back at once, then in two steps.
      const std::uint64_t drafts = length % (rollback + 1);
      for (const bool twice : {false, true}) {
        while (cache.length() < length + drafts) {
          REQUIRE(cache.append(other.rows(cache.length()), 1));
          observe_newest(cache, other);
        }
        if (twice) REQUIRE(cache.truncate(length + drafts / 2));
        REQUIRE(cache.truncate(length));
        CHECK(cache.length() == length);
        REQUIRE(state_of(cache) == state_of(straight));
      }
      // As many as can be, in one call, without attention, across several boundaries.
      REQUIRE(cache.append(other.rows(length), rollback));
      REQUIRE(cache.truncate(length));
      REQUIRE(state_of(cache) == state_of(straight));
    }
  }
}

TEST_CASE_TEMPLATE("dropper: the newest tokens are taken back and decided on anew", C, ALL_DROPPERS) {
  const example_layer layer(shape, query_heads, 120, 6);
  for (const std::uint32_t rollback : {1U, 5U, 13U}) {
    CAPTURE(rollback);
    std::vector<std::vector<head_state>> expected{{}};
    C straight = make<C>(small_options(rollback));
    for (std::uint64_t length = 1; length <= 90; ++length) {
      decode(straight, layer, length);
      expected.push_back(state_of(straight));
    }
    C cache = make<C>(small_options(rollback));
    for (std::uint64_t length = rollback; length <= 90; length += 3) {
      decode(cache, layer, length);
      for (std::uint64_t back = 1; back <= rollback; ++back) {
        REQUIRE(cache.truncate(length - back));
        REQUIRE(length - back == cache.length());
        if (length > back) REQUIRE(state_of(cache) == expected[length - back]);
        decode(cache, layer, length);
        REQUIRE(state_of(cache) == expected[length]);
      }
    }
  }
}

TEST_CASE_TEMPLATE("dropper: no truncation beyond max_rollback, or to more than there is", C, ALL_DROPPERS) {
  const example_layer layer(shape, query_heads, 40, 7);
  C cache = make<C>(small_options(5));
  CHECK(cache.max_rollback() == 5);
  CHECK(cache.truncate(1).error().code == error_code::out_of_range);
  REQUIRE(cache.truncate(0));
  decode(cache, layer, 3);
  REQUIRE(cache.truncate(0));
  decode(cache, layer, 30);
  const auto before = state_of(cache);
  CHECK(cache.truncate(31).error().code == error_code::out_of_range);
  CHECK(cache.truncate(24).error().code == error_code::out_of_range);
  CHECK(cache.length() == 30);
  CHECK(state_of(cache) == before);
  REQUIRE(cache.truncate(27));
  // The greatest length so far counts, not the present one.
  CHECK(cache.truncate(24).error().code == error_code::out_of_range);
  REQUIRE(cache.truncate(25));
  REQUIRE(cache.truncate(25));
  decode(cache, layer, 30);
  CHECK(state_of(cache) == before);
}

TEST_CASE("dropper: attention over the kept suffix is attention after eviction of the prefix") {
  // Keys are turned by their absolute positions, and stay so.
  example_layer layer({1, 8, 5}, 2, 60, 8);
  for (std::uint64_t token = 0; token < 60; ++token) {
    for (std::uint32_t d = 0; d < 8; d += 2) {
      bf16* const pair = layer.keys.data() + token * 8 + d;
      const double angle = static_cast<double>(token) * std::pow(100.0, -0.25 * d);
      const double a = pair[0].to_float();
      const double b = pair[1].to_float();
      pair[0] = bf16::from_float(static_cast<float>(a * std::cos(angle) - b * std::sin(angle)));
      pair[1] = bf16::from_float(static_cast<float>(a * std::sin(angle) + b * std::cos(angle)));
    }
  }
  auto made = streaming_llm<bf16>::make(layer.shape, {.sinks = 0, .window = 12, .interval = 7, .max_rollback = 0});
  REQUIRE(made);
  for (std::uint64_t length = 1; length <= 60; ++length) {
    decode(*made, layer, length);
    const head_state held = state_of(*made, 0);
    std::vector<std::uint64_t> suffix;
    for (std::uint64_t token = length - held.positions.size(); token < length; ++token) suffix.push_back(token);
    REQUIRE(held.positions == suffix);
    const auto weights = layer.attention(length - 1, 0, suffix);
    for (std::uint32_t q = 0; q < 2; ++q) {
      std::vector<double> scores;
      double mass = 0;
      for (std::size_t i = 0; i < suffix.size(); ++i) {
        double score = 0;
        for (std::uint32_t d = 0; d < 8; ++d)
          score += static_cast<double>(layer.queries[((length - 1) * 2 + q) * 8 + d]) * held.keys[i * 8 + d];
        scores.push_back(std::exp(score / std::sqrt(8.0)));
        mass += scores.back();
      }
      for (std::uint32_t d = 0; d < 5; ++d) {
        double dense = 0;
        double kept = 0;
        for (std::size_t i = 0; i < suffix.size(); ++i) {
          dense += static_cast<double>(weights[q * suffix.size() + i]) * layer.value(suffix[i], 0)[d].to_float();
          kept += scores[i] / mass * static_cast<double>(held.values[i * 5 + d]);
        }
        CHECK(std::abs(dense - kept) < 1e-5);
      }
    }
  }
}

TEST_CASE_TEMPLATE("dropper: bytes are what has been allocated, and bounded", C, ALL_DROPPERS) {
  const example_layer layer(shape, query_heads, 120, 9);
  for (const std::uint64_t first : {0U, 5U, 60U}) {
    dropper_options common = small_options(6);
    if (!std::same_as<C, streaming_llm<bf16>>) common.first_eviction = first;
    std::size_t most = 0;
    std::optional<C> cache;
    const heap_meter meter;
    cache = make<C>(common);
    CHECK(cache->bytes() == meter.live() + sizeof(C));
    for (std::uint64_t length = 1; length <= 120; ++length) {
      decode(*cache, layer, length);
      REQUIRE(cache->bytes() == meter.live() + sizeof(C));
      if (length > 80) most = std::max(most, cache->bytes());
      if (length % 7 == 0 && length > 6) {
        REQUIRE(cache->truncate(length - 4));
        CHECK(cache->bytes() == meter.live() + sizeof(C));
        decode(*cache, layer, length);
      }
    }
    // sinks + budget + window + interval + max_rollback entries; what waits to be folded is at most 6 rows.
    const std::size_t entries = 2 + 5 + 3 + 4 + 6;
    const std::size_t lanes = std::same_as<C, rest_kv<bf16>> ? 3 : 1;
    CHECK(most <= sizeof(C) + shape.kv_heads * (entries * (2 * 6 + 2 * 4 + 8 + 4 * lanes) + 200 + 6 * (2 * entries * lanes) + 10 * 64));
    cache.reset();
    CHECK(meter.live() == 0);
  }
}

TEST_CASE_TEMPLATE("dropper: a long first stretch is given up after its eviction", C, OBSERVING_DROPPERS) {
  const example_layer layer(shape, query_heads, 400, 10);
  dropper_options common = small_options(2);
  common.first_eviction = 300;
  C cache = make<C>(common);
  REQUIRE(cache.append(layer.rows(0), 299));
  decode(cache, layer, 302);
  const std::size_t before = cache.bytes();
  decode(cache, layer, 304);
  CHECK(cache.bytes() < before / 4);
  // In one call, entries are never more than the tokens of the first stretch.
  dropper_options short_first = small_options(2);
  C whole = make<C>(short_first);
  const heap_meter meter;
  REQUIRE(whole.append(layer.rows(0), 400));
  CHECK(meter.peak() < 4000);
}

TEST_CASE_TEMPLATE("dropper: where no memory is left nothing changes", C, ALL_DROPPERS, packed_snap_kv) {
  const example_layer layer(shape, query_heads, 60, 11);
  const dropper_options common = small_options(4);
  std::size_t failures = 0;
  bool made_it = false;
  for (std::size_t allowed = 0; !made_it; ++allowed) {
    C straight = make<C>(common);
    C cache = make<C>(common);
    decode(straight, layer, 20);
    decode(cache, layer, 20);
    const auto before = state_of(cache);
    std::optional<result<void>> outcome;
    {
      const heap_meter meter(allowed);
      outcome = cache.append(layer.rows(20), 23);
      made_it = !meter.failed();
    }
    if (made_it) break;
    ++failures;
    // Only giving memory back may fail unnoticed.
    if (*outcome) {
      REQUIRE(straight.append(layer.rows(20), 23));
    } else {
      CHECK(outcome->error().code == error_code::out_of_memory);
      CHECK(state_of(cache) == before);
    }
    decode(cache, layer, 60);
    decode(straight, layer, 60);
    CHECK(state_of(cache) == state_of(straight));
  }
  CHECK(failures > 0);
  for (std::size_t allowed = 0; allowed < 2; ++allowed) {
    const auto options = options_of<C>(common);
    bool failed = false;
    error_code code{};
    {
      const heap_meter meter(allowed);
      const auto made = C::make(shape, options);
      failed = meter.failed();
      if (!made) code = made.error().code;
    }
    if (failed) CHECK(code == error_code::out_of_memory);
  }
}

TEST_CASE_TEMPLATE("dropper: attention that finds no memory can be handed over again", C, OBSERVING_DROPPERS) {
  const example_layer layer(shape, query_heads, 60, 12);
  C straight = make<C>(small_options(4));
  C cache = make<C>(small_options(4));
  std::size_t failures = 0;
  for (std::uint64_t length = 1; length <= 60; ++length) {
    decode(straight, layer, length);
    REQUIRE(cache.append(layer.rows(length - 1), 1));
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
      const auto weights = layer.attention(length - 1, head, state_of(cache, head).positions);
      for (std::size_t allowed = 0;; ++allowed) {
        std::optional<result<void>> outcome;
        {
          const heap_meter meter(allowed);
          outcome = cache.observe({head, length - 1, weights});
        }
        if (*outcome) break;
        ++failures;
        REQUIRE(outcome->error().code == error_code::out_of_memory);
      }
    }
    REQUIRE(state_of(cache) == state_of(straight));
  }
  CHECK(failures > 60);
}

TEST_CASE_TEMPLATE("dropper: values that are not finite are refused by token", C, ALL_DROPPERS) {
  const example_layer good(shape, query_heads, 60, 13);
  C cache = make<C>(small_options(2));
  decode(cache, good, 20);
  const auto before = state_of(cache);
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const bool in_key : {true, false}) {
      example_layer layer = good;
      if (in_key)
        layer.keys[(27 * 2 + 1) * 6 + 5] = bf16::from_float(bad);
      else
        layer.values[(27 * 2 + 1) * 4 + 3] = bf16::from_float(bad);
      const auto refused = cache.append(layer.rows(20), 20);
      REQUIRE_FALSE(refused);
      CHECK(refused.error().code == error_code::invalid_argument);
      CHECK(refused.error().token == 27);
      CHECK(cache.length() == 20);
      CHECK(state_of(cache) == before);
      REQUIRE(cache.append(layer.rows(20), 0));
    }
  }
  CHECK(cache.append({{}, good.rows(20).value}, 1).error().code == error_code::invalid_argument);
  CHECK(cache.append({good.rows(20).key, {}}, 1).error().code == error_code::invalid_argument);
  CHECK(cache.append({}, 1).error().code == error_code::invalid_argument);
  REQUIRE(cache.append({}, 0));
  CHECK(cache.append(good.rows(20), C::max_tokens - 19).error().code == error_code::out_of_range);
  CHECK(cache.append(good.rows(20), ~std::uint64_t{0}).error().code == error_code::out_of_range);
  CHECK(state_of(cache) == before);
}

TEST_CASE_TEMPLATE("dropper: attention that does not fit is refused", C, OBSERVING_DROPPERS) {
  const example_layer layer(shape, query_heads, 60, 14);
  C cache = make<C>(small_options(2));
  const std::vector<float> none;
  CHECK(cache.observe({0, 0, none}).error().code == error_code::out_of_range);
  REQUIRE(cache.append(layer.rows(0), 13));
  REQUIRE(cache.observes(12));
  const std::vector<float> weights = layer.attention(12, 0, state_of(cache, 0).positions);
  CHECK(cache.observe({2, 12, weights}).error().code == error_code::out_of_range);
  CHECK(cache.observe({0, 11, weights}).error().code == error_code::out_of_range);
  CHECK(cache.observe({0, 13, weights}).error().code == error_code::out_of_range);
  CHECK(cache.observe({0, 12, std::span(weights).first(weights.size() - 1)}).error().code == error_code::shape_mismatch);
  CHECK(cache.observe({0, 12, std::span(weights).first(13)}).error().code == error_code::shape_mismatch);
  for (const float bad : {NAN, INFINITY, -1e-30F, 1.1F}) {
    auto wrong = weights;
    wrong[17] = bad;
    const auto refused = cache.observe({0, 12, wrong});
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == error_code::invalid_argument);
    CHECK(refused.error().token == 12);
  }
  REQUIRE(cache.observe({0, 12, weights}));
  CHECK(cache.observe({0, 12, weights}).error().code == error_code::invalid_argument);
  CHECK(cache.observe({0, 12, weights}).error().token == 12);
  REQUIRE(cache.observe({1, 12, layer.attention(12, 1, state_of(cache, 1).positions)}));
}

TEST_CASE_TEMPLATE("dropper: attention once folded is not taken again", C, OBSERVING_DROPPERS) {
  const example_layer layer(shape, query_heads, 60, 15);
  C cache = make<C>(small_options(0));
  decode(cache, layer, 14);
  const auto weights = layer.attention(13, 0, state_of(cache, 0).positions);
  CHECK(cache.observe({0, 13, weights}).error().code == error_code::invalid_argument);
}

TEST_CASE("dropper: rows in few bits are those of their quantiser, and the same ones are kept") {
  using keys = centred<symmetric<4>>;
  using values = symmetric<8>;
  const example_layer layer(shape, query_heads, 80, 21);
  std::vector<float> means(std::size_t{shape.kv_heads} * shape.key_dim, 0.5F);
  std::fill(means.begin() + shape.key_dim, means.end(), -2.0F);  // of the other head
  auto made = quantised_dropper<bf16, window_attention, keys, values>::make(
      shape, {.rule = {.eviction = small_options(3)}, .keys = {.means = means, .inner = {3}}, .values = {2}});
  const auto key_format = keys::make(shape.kv_heads, shape.key_dim, {.means = means, .inner = {3}});
  const auto value_format = values::make(shape.kv_heads, shape.value_dim, {2});
  REQUIRE((made && key_format && value_format));
  const auto expected = [&](const auto& format, std::uint32_t head, const bf16* row) {
    std::vector<float> numbers, scratch(format.scratch_floats());
    for (std::uint32_t c = 0; c < format.dim(); ++c) numbers.push_back(row[c].to_float());
    std::vector<std::byte> packed(format.packed_bytes());
    format.pack(head, numbers, packed, scratch);
    format.unpack(head, packed, numbers, scratch);
    return numbers;
  };
  auto exact = make<snap_kv<bf16>>(small_options(3));
  for (std::uint64_t length = 1; length <= 80; ++length) {
    decode(*made, layer, length);
    decode(exact, layer, length);
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
      const head_state state = state_of(*made, head);
      REQUIRE(state.positions == state_of(exact, head).positions);
      std::vector<float> all_keys, all_values;
      for (const std::uint64_t position : state.positions) {
        for (const float each : expected(*key_format, head, layer.key(position, head))) all_keys.push_back(each);
        for (const float each : expected(*value_format, head, layer.value(position, head))) all_values.push_back(each);
      }
      REQUIRE(state.keys == all_keys);
      REQUIRE(state.values == all_values);
    }
  }
  CHECK(made->saturated() == 0);
}

TEST_CASE("dropper: a scorer reads the values that the cache gives back") {
  using e4m3 = scaled_float<fp8_e4m3>;
  const e4m3::options plain{.group_channels = 0, .scale = 512};  // to integers
  const example_layer layer(shape, query_heads, 80, 22);
  example_layer rounded = layer;
  for (bf16& each : rounded.values) each = bf16::from_float(512 * fp8_e4m3::from_float(each.to_float() / 512).to_float());
  const auto kept = [](auto&& cache, const example_layer& from) {
    REQUIRE(cache);
    std::vector<std::vector<std::uint64_t>> positions;
    for (std::uint64_t length = 1; length <= 80; ++length) {
      decode(*cache, from, length);
      positions.push_back(state_of(*cache, 0).positions);
    }
    return positions;
  };
  const rest_kv_options options{.eviction = small_options(2)};
  using packed_rest_kv = quantised_dropper<bf16, output_change, e4m3, e4m3>;
  const auto packed = kept(packed_rest_kv::make(shape, {.rule = options, .keys = plain, .values = plain}), layer);
  CHECK(packed == kept(rest_kv<bf16>::make(shape, options), rounded));
  CHECK(packed != kept(rest_kv<bf16>::make(shape, options), layer));
}

TEST_CASE("dropper: rows in few bits are clipped, exact ones are not") {
  example_layer layer(shape, query_heads, 10, 23);
  layer.keys[0] = bf16::from_float(3e38F);
  layer.values[1] = bf16::from_float(-3e38F);
  auto exact = make<snap_kv<bf16>>(small_options(1));
  auto packed = make<packed_snap_kv>(small_options(1));
  REQUIRE(exact.append(layer.rows(0), 10));
  REQUIRE(packed.append(layer.rows(0), 10));
  CHECK(state_of(exact, 0).keys[0] == layer.keys[0].to_float());
  CHECK(exact.saturated() == 0);
  CHECK(packed.saturated() == 4);  // both, and both again as more than an fp16 scale can stand for
  const head_state state = state_of(packed, 0);
  CHECK(state.keys[0] == 7 * 65504.0F);
  CHECK(state.values[1] == -127 * 65504.0F);
}

TEST_CASE("dropper: quantisers of single tokens only") {
  using by_channel = asymmetric_by_channel<4>;
  using grouped = quantised_dropper<bf16, window_attention, by_channel, symmetric<4>>;
  const auto made = grouped::make(shape, {.rule = {.eviction = small_options(1)}, .keys = {}, .values = {}});
  REQUIRE_FALSE(made);
  CHECK(made.error().code == error_code::invalid_argument);
  const auto no_values = packed_snap_kv::make({2, 6, 0}, options_of<packed_snap_kv>(small_options(1)));
  REQUIRE_FALSE(no_values);
  CHECK(no_values.error().code == error_code::invalid_argument);
}

TEST_CASE_TEMPLATE("dropper: empty and tiny", C, ALL_DROPPERS) {
  for (const layer_shape& tiny : {layer_shape{1, 1, 1}, layer_shape{3, 1, 2}}) {
    const example_layer layer(tiny, 1, 12, 16);
    C cache = make<C>({.sinks = 0, .budget = 0, .window = 1, .interval = 1, .max_rollback = 0}, tiny);
    CHECK(cache.shape() == tiny);
    CHECK(cache.length() == 0);
    CHECK(cache.entries(0) == 0);
    REQUIRE(cache.materialise(0, {}));
    REQUIRE(cache.append({}, 0));
    for (std::uint64_t length = 1; length <= 12; ++length) {
      decode(cache, layer, length);
      const head_state state = state_of(cache, tiny.kv_heads - 1);
      std::vector<std::uint64_t> expected{length - 1};
      if (length > 1) expected.insert(expected.begin(), length - 2);
      CHECK(state.positions == expected);
    }
    CHECK(cache.entries(tiny.kv_heads) == 0);
    std::array<std::uint64_t, 3> positions{};
    std::array<float, 8> numbers{};
    const auto room = [&](std::size_t entries, std::size_t keys, std::size_t values) {
      return materialised_head{std::span(positions).first(entries), std::span(numbers).first(keys), std::span(numbers).first(values)};
    };
    REQUIRE(cache.materialise(0, room(2, 2, 2 * tiny.value_dim)));
    CHECK(cache.materialise(0, room(3, 2, 2 * tiny.value_dim)).error().code == error_code::shape_mismatch);
    CHECK(cache.materialise(0, room(2, 3, 2 * tiny.value_dim)).error().code == error_code::shape_mismatch);
    CHECK(cache.materialise(0, room(2, 2, 2 * tiny.value_dim + 1)).error().code == error_code::shape_mismatch);
    CHECK(cache.materialise(tiny.kv_heads, {}).error().code == error_code::shape_mismatch);
  }
}

TEST_CASE_TEMPLATE("dropper: a layer that stores keys only", C, streaming_llm<bf16>, h2o<bf16>, snap_kv<bf16>) {
  const layer_shape keys_only{2, 5, 0};
  const example_layer layer(keys_only, query_heads, 60, 17);
  C cache = make<C>(small_options(3), keys_only);
  for (std::uint64_t length = 1; length <= 60; ++length) {
    decode(cache, layer, length);
    CHECK(state_of(cache, 0).values.empty());
    CHECK(cache.entries(0) == expected_entries(small_options(3), length));
  }
  REQUIRE(cache.append({layer.rows(0).key, {}}, 1));
}

TEST_CASE_TEMPLATE("dropper: rows of any strides", C, ALL_DROPPERS) {
  const example_layer layer(shape, query_heads, 40, 18);
  // (head, token, dim), room for 50 tokens.
  std::vector<bf16> keys(shape.kv_heads * 50 * shape.key_dim);
  std::vector<bf16> values(shape.kv_heads * 50 * shape.value_dim);
  for (std::uint64_t token = 0; token < 40; ++token) {
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
      std::copy_n(layer.key(token, head), shape.key_dim, keys.begin() + static_cast<std::ptrdiff_t>((head * 50 + token) * shape.key_dim));
      std::copy_n(layer.value(token, head), shape.value_dim,
                  values.begin() + static_cast<std::ptrdiff_t>((head * 50 + token) * shape.value_dim));
    }
  }
  C one = make<C>(small_options(3));
  C other = make<C>(small_options(3));
  REQUIRE(one.append(layer.rows(0), 40));
  REQUIRE(other.append({strided_tensor<const bf16>::hnd(keys.data(), 50, shape.key_dim),
                        strided_tensor<const bf16>::hnd(values.data(), 50, shape.value_dim)},
                       40));
  CHECK(state_of(one) == state_of(other));
}

TEST_CASE_TEMPLATE("dropper: sequences are separate, and may be moved", C, ALL_DROPPERS) {
  const example_layer layer(shape, query_heads, 60, 19);
  const example_layer other(shape, query_heads, 60, 20);
  C alone = make<C>(small_options(3));
  C first = make<C>(small_options(3));
  C second = make<C>(small_options(3));
  for (std::uint64_t length = 1; length <= 60; ++length) {
    decode(alone, layer, length);
    decode(first, layer, length);
    decode(second, other, length);
    if (length % 5 == 0) {
      C moved = std::move(first);
      first = std::move(moved);
    }
    REQUIRE(state_of(first) == state_of(alone));
  }
}

TEST_CASE_TEMPLATE("dropper: options that cannot be", C, OBSERVING_DROPPERS) {
  const auto code = [](dropper_options common, const layer_shape& layer = shape) {
    const auto made = C::make(layer, options_of<C>(common));
    return made ? error_code{} : made.error().code;
  };
  const dropper_options good = small_options(2);
  CHECK(code(good) == error_code{});
  CHECK(code(good, {0, 4, 4}) == error_code::invalid_argument);
  CHECK(code(good, {1, 0, 4}) == error_code::invalid_argument);
  CHECK(code(good, {1U << 16, 4, 4}) == error_code::out_of_range);
  dropper_options bad = good;
  bad.interval = 0;
  CHECK(code(bad) == error_code::invalid_argument);
  bad = good;
  bad.query_heads = 0;
  CHECK(code(bad) == error_code::invalid_argument);
  bad.query_heads = 1U << 17;
  CHECK(code(bad) == error_code::out_of_range);
  bad = good;
  bad.first_eviction = (std::uint64_t{1} << 32) - 3;
  CHECK(code(bad) == error_code{});
  bad.first_eviction += 1;
  CHECK(code(bad) == error_code::out_of_range);
  bad.first_eviction = ~std::uint64_t{0};
  CHECK(code(bad) == error_code::out_of_range);
  bad = good;
  bad.budget = ~0U;
  CHECK(code(bad) == error_code::out_of_range);
  bad = good;
  bad.max_rollback = ~0U;
  CHECK(code(bad) == error_code::out_of_range);
}

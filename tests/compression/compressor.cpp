// SPDX-License-Identifier: Apache-2.0
// The conformance suite: what every compressor promises, on all of them (compressors.cpp).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "any_compressor.hpp"
#include "heap_meter.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr std::uint32_t query_heads = 3;
/// Several KV heads, keys wider than values or as wide, no powers of two.
const layer_shape shapes[] = {{2, 12, 9}, {1, 16, 16}};

struct setting {
  const listed_compressor* compressor;
  const layer_shape* shape;

  [[nodiscard]] std::unique_ptr<any_compressor> make() const { return compressor->make(*shape, query_heads); }
  [[nodiscard]] example_layer layer(std::uint64_t tokens, std::uint32_t seed) const { return {*shape, query_heads, tokens, seed}; }
};
template <class Check>
void for_all(Check&& check) {
  for (const listed_compressor& each : all_compressors()) {
    for (const layer_shape& shape : shapes) {
      CAPTURE(each.name);
      CAPTURE(shape.kv_heads);
      check(setting{&each, &shape});
    }
  }
}

bool are_equal(const std::vector<head_state>& a, const std::vector<head_state>& b) {
  const auto bits = [](const std::vector<float>& x, const std::vector<float>& y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), [](float p, float q) { return std::bit_cast<std::uint32_t>(p) == std::bit_cast<std::uint32_t>(q); });
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const head_state& x, const head_state& y) {
    return x.positions == y.positions && bits(x.keys, y.keys) && bits(x.values, y.values) && bits(x.summary, y.summary);
  });
}

}  // namespace

TEST_CASE("compressor: tokens in any chunks give what one call gives") {
  for_all([](const setting& with) {
    const example_layer layer = with.layer(150, 1);
    const auto once = with.make();
    once->decode(layer, 150);
    std::mt19937 random(2);
    for (int round = 0; round < 4; ++round) {
      const auto pieces = with.make();
      while (pieces->length() < 150) {
        const std::uint64_t next = std::min<std::uint64_t>(150, pieces->length() + (round == 0 ? 1 : random() % 40));
        pieces->decode(layer, next);
        REQUIRE(pieces->append(layer.rows(std::min<std::uint64_t>(next, 149)), 0));
      }
      CHECK(are_equal(once->state(), pieces->state()));
    }
  });
}

TEST_CASE("compressor: what is truncated was never there") {
  for_all([](const setting& with) {
    const example_layer layer = with.layer(150, 3), other = with.layer(150, 4);
    std::vector<std::vector<head_state>> plain;
    const auto straight = with.make();
    plain.push_back(straight->state());
    while (straight->length() < 120) {
      straight->decode(layer, straight->length() + 1);
      plain.push_back(straight->state());
    }
    const auto back = with.make();
    std::mt19937 random(5);
    while (back->length() < 120) {
      // Some tokens that stay, then some that are taken back, as a round of speculation does.
      const std::uint64_t kept = std::min<std::uint64_t>(120, back->length() + 1 + random() % 5);
      back->decode(layer, kept);
      const std::uint64_t most = std::min<std::uint64_t>(back->max_rollback(), 20);
      back->decode(other, kept + (most == 0 ? 0 : random() % (most + 1)));
      REQUIRE(back->truncate(kept));
      REQUIRE(back->length() == kept);
      REQUIRE(are_equal(back->state(), plain[static_cast<std::size_t>(kept)]));
    }
  });
}

TEST_CASE("compressor: a truncation too far back is refused and changes nothing") {
  for_all([](const setting& with) {
    const example_layer layer = with.layer(400, 6);
    const auto cache = with.make();
    cache->decode(layer, 400);
    const auto before = cache->state();
    CHECK(cache->truncate(401).error().code == error_code::out_of_range);
    if (cache->max_rollback() < 100) {
      for (const std::uint64_t length : {std::uint64_t{0}, std::uint64_t{1}, 399 - cache->max_rollback() - 90})
        CHECK(cache->truncate(length).error().code == error_code::out_of_range);
      CHECK(cache->length() == 400);
      CHECK(are_equal(before, cache->state()));
      REQUIRE(cache->truncate(400 - cache->max_rollback()));
      CHECK(cache->length() == 400 - cache->max_rollback());
    } else {
      REQUIRE(cache->truncate(0));
      CHECK(cache->length() == 0);
    }
  });
}

TEST_CASE("compressor: bytes are those that were allocated") {
  for_all([](const setting& with) {
    const example_layer layer = with.layer(300, 7);
    const auto cache = with.make();
    const std::size_t empty = cache->bytes();
    const heap_meter meter;
    for (std::uint64_t length = 1; length <= 300; length += 1 + length / 7) {
      cache->decode(layer, length);
      CHECK(cache->bytes() == empty + meter.live());
    }
    REQUIRE(cache->truncate(cache->length() - std::min<std::uint64_t>(cache->max_rollback(), 5)));
    CHECK(cache->bytes() == empty + meter.live());
    cache->decode(layer, 300);
    CHECK(cache->bytes() == empty + meter.live());
  });
}

TEST_CASE("compressor: where memory ends, nothing has changed, and it may go on") {
  for_all([](const setting& with) {
    const example_layer layer = with.layer(90, 8);
    const auto expected = with.make();
    expected->decode(layer, 80);
    const auto at_80 = expected->state();
    for (std::size_t allowed = 0;; ++allowed) {
      const auto cache = with.make();
      cache->decode(layer, 40);
      const auto before = cache->state();
      if (cache->observes()) break;  // their own tests do this
      result<void> outcome;
      bool failed = false;
      {
        const heap_meter meter(allowed);
        outcome = cache->append(layer.rows(40), 40);
        failed = meter.failed();
      }
      if (!failed) {
        CHECK(outcome);
        CHECK(are_equal(at_80, cache->state()));
        break;
      }
      REQUIRE(outcome.error().code == error_code::out_of_memory);
      REQUIRE(cache->length() == 40);
      REQUIRE(are_equal(before, cache->state()));
      REQUIRE(cache->append(layer.rows(40), 40));
      REQUIRE(are_equal(at_80, cache->state()));
    }
  });
}

TEST_CASE("compressor: sequences share nothing") {
  for_all([](const setting& with) {
    const example_layer first = with.layer(110, 9), second = with.layer(77, 10);
    const auto a = with.make(), b = with.make(), alone = with.make();
    for (std::uint64_t length = 1; length <= 110; ++length) {
      a->decode(first, length);
      if (length <= 77) b->decode(second, length);
    }
    alone->decode(second, 77);
    CHECK(are_equal(b->state(), alone->state()));
    CHECK(b->length() == 77);
  });
}

TEST_CASE("compressor: positions are absolute and increasing, the newest are there") {
  for_all([](const setting& with) {
    const example_layer layer = with.layer(130, 11);
    const auto cache = with.make();
    for (std::uint64_t length = 1; length <= 130; ++length) {
      cache->decode(layer, length);
      const auto state = cache->state();
      for (std::uint32_t head = 0; head < with.shape->kv_heads; ++head) {
        const auto& positions = state[head].positions;
        REQUIRE(!positions.empty());
        REQUIRE(positions.size() == cache->entries(head));
        REQUIRE(positions.back() == length - 1);
        REQUIRE(std::adjacent_find(positions.begin(), positions.end(), std::greater_equal<>()) == positions.end());
      }
    }
  });
}

TEST_CASE("compressor: every entry is near the token of its position") {
  for_all([](const setting& with) {
    const example_layer layer = with.layer(100, 12);
    const auto cache = with.make();
    cache->decode(layer, 100);
    const auto state = cache->state();
    for (std::uint32_t head = 0; head < with.shape->kv_heads; ++head) {
      for (std::size_t i = 0; i < state[head].positions.size(); ++i) {
        const auto near = [&](const float* got, const bf16* expected, std::uint32_t dim) {
          double error = 0, squares = 0;
          for (std::uint32_t c = 0; c < dim; ++c) {
            error += std::pow(static_cast<double>(got[c]) - static_cast<double>(expected[c].to_float()), 2);
            squares += std::pow(static_cast<double>(expected[c].to_float()), 2);
          }
          return error < 0.95 * squares;  // nothing at all would be 1
        };
        CHECK(near(&state[head].keys[i * with.shape->key_dim], layer.key(state[head].positions[i], head), with.shape->key_dim));
        CHECK(near(&state[head].values[i * with.shape->value_dim], layer.value(state[head].positions[i], head), with.shape->value_dim));
      }
    }
  });
}

TEST_CASE("compressor: nothing, and very little") {
  for_all([](const setting& with) {
    const auto cache = with.make();
    CHECK(cache->length() == 0);
    CHECK(cache->entries(0) == 0);
    CHECK(cache->state().size() == with.shape->kv_heads);
    REQUIRE(cache->truncate(0));
    REQUIRE(cache->append({}, 0));
    std::vector<float> query(with.shape->key_dim), out(with.shape->value_dim), mass(1);
    CHECK(cache->attend(0, {query, out, mass}).error().code == error_code::invalid_argument);
    const example_layer layer = with.layer(1, 13);
    cache->decode(layer, 1);
    CHECK(cache->entries(0) == 1);
    REQUIRE(cache->attend(0, {query, out, mass}));
    CHECK(std::equal(out.begin(), out.end(), cache->state()[0].values.begin(), [](float a, float b) { return std::fabs(a - b) < 1e-5F; }));
    CHECK(mass[0] == 0);
  });
}

TEST_CASE("compressor: values that are no numbers are refused by name, and nothing has changed") {
  for_all([](const setting& with) {
    for (const std::uint16_t odd : std::initializer_list<std::uint16_t>{0x7fc0, 0xff81, 0x7f80, 0xff80}) {
      for (const bool in_key : {true, false}) {
        const example_layer good = with.layer(60, 14);
        const auto cache = with.make();
        cache->decode(good, 30);
        const auto before = cache->state();
        example_layer bad = good;
        (in_key ? bad.keys : bad.values)[(40 * with.shape->kv_heads + with.shape->kv_heads) * (in_key ? with.shape->key_dim : with.shape->value_dim) - 1] =
            bf16::from_bits(odd);
        const auto outcome = cache->append(bad.rows(30), 20);
        REQUIRE(!outcome);
        CHECK(outcome.error().code == error_code::invalid_argument);
        CHECK(outcome.error().token == 40);
        CHECK(cache->length() == 30);
        CHECK(are_equal(before, cache->state()));
        cache->decode(good, 60);
        const auto straight = with.make();
        straight->decode(good, 60);
        CHECK(are_equal(straight->state(), cache->state()));
      }
    }
  });
}

TEST_CASE("compressor: wrong sizes are refused") {
  for_all([](const setting& with) {
    const example_layer layer = with.layer(20, 15);
    const auto cache = with.make();
    CHECK(cache->append({}, 1).error().code == error_code::invalid_argument);
    layer_tensors<const bf16> half = layer.rows(0);
    half.value.data = nullptr;
    CHECK(cache->append(half, 1).error().code == error_code::invalid_argument);
    cache->decode(layer, 20);
    std::vector<std::uint64_t> positions(20);
    std::vector<float> keys(20 * with.shape->key_dim), values(20 * with.shape->value_dim);
    const auto code = [&](std::uint32_t head, const materialised_head& out) { return cache->materialise(head, out).error().code; };
    CHECK(code(with.shape->kv_heads, {positions, keys, values}) == error_code::shape_mismatch);
    CHECK(code(0, {std::span(positions).first(19), keys, values}) == error_code::shape_mismatch);
    CHECK(code(0, {positions, std::span(keys).first(1), values}) == error_code::shape_mismatch);
    CHECK(code(0, {positions, keys, {}}) == error_code::shape_mismatch);
    std::vector<float> query(with.shape->key_dim), out(with.shape->value_dim), mass(1);
    const auto attended = [&](const attention_call& call) { return cache->attend(0, call).error().code; };
    CHECK(attended({query, out, {}}) == error_code::shape_mismatch);
    CHECK(attended({std::span<const float>(query).first(3), out, mass}) == error_code::shape_mismatch);
    CHECK(attended({query, std::span(out).first(3), mass}) == error_code::shape_mismatch);
  });
}

TEST_CASE("compressor: the largest values stay finite") {
  for_all([](const setting& with) {
    for (const float largest : {3e38F, -3e38F, 1e31F}) {
      example_layer layer = with.layer(60, 18);
      for (std::size_t i = 0; i < layer.keys.size(); i += 7) layer.keys[i] = bf16::from_float(largest);
      for (std::size_t i = 0; i < layer.values.size(); i += 5) layer.values[i] = bf16::from_float(-largest);
      const auto cache = with.make();
      if (cache->observes()) return;  // they keep rows as they are
      cache->decode(layer, 60);
      for (const head_state& head : cache->state()) {
        for (const float each : head.keys) REQUIRE(std::isfinite(each));
        for (const float each : head.values) REQUIRE(std::isfinite(each));
      }
    }
  });
}

TEST_CASE("compressor: attention on codes is attention on what they stand for") {
  std::size_t on_codes = 0;
  for_all([&](const setting& with) {
    const example_layer layer = with.layer(100, 16);
    const auto cache = with.make();
    on_codes += cache->on_codes();
    for (const std::uint64_t length : {1U, 5U, 40U, 100U}) {
      cache->decode(layer, length);
      const std::size_t key_dim = with.shape->key_dim, value_dim = with.shape->value_dim;
      for (std::uint32_t head = 0; head < with.shape->kv_heads; ++head) {
        const auto queries = std::span(layer.queries).subspan(head * query_heads * key_dim, query_heads * key_dim);
        std::vector<float> out(query_heads * value_dim), mass(query_heads), expected(out.size()), expected_mass(query_heads);
        REQUIRE(cache->attend(head, {queries, out, mass}));
        REQUIRE(cache->attend_materialised(head, {queries, expected, expected_mass}));
        for (std::size_t i = 0; i < out.size(); ++i) CHECK(std::fabs(out[i] - expected[i]) < 2e-5);
        for (std::size_t q = 0; q < query_heads; ++q) CHECK(std::fabs(mass[q] - expected_mass[q]) < 2e-5);
      }
    }
  });
  CHECK(on_codes >= 16);
}

TEST_CASE("compressor: strided rows are read like dense ones") {
  for_all([](const setting& with) {
    const example_layer layer = with.layer(70, 17);
    const auto dense = with.make(), strided = with.make();
    if (dense->observes()) return;
    dense->decode(layer, 70);
    // HND with room for more tokens.
    const auto moved = [&](const std::vector<bf16>& from, std::uint32_t dim) {
      std::vector<bf16> to(std::size_t{with.shape->kv_heads} * 100 * dim, bf16::from_bits(0x7fc0));
      for (std::size_t t = 0; t < 70; ++t)
        for (std::size_t h = 0; h < with.shape->kv_heads; ++h)
          std::copy_n(from.begin() + static_cast<std::ptrdiff_t>((t * with.shape->kv_heads + h) * dim), dim,
                      to.begin() + static_cast<std::ptrdiff_t>((h * 100 + t) * dim));
      return to;
    };
    const std::vector<bf16> keys = moved(layer.keys, with.shape->key_dim), values = moved(layer.values, with.shape->value_dim);
    REQUIRE(strided->append({strided_tensor<const bf16>::hnd(keys.data(), 100, with.shape->key_dim),
                             strided_tensor<const bf16>::hnd(values.data(), 100, with.shape->value_dim)},
                            70));
    CHECK(are_equal(dense->state(), strided->state()));
  });
}

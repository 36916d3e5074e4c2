// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <smollm2/engine.hpp>
#include <smollm2/layerwise_engine.hpp>

#include <kvexact/engine/layerwise_predictor.hpp>
#include <kvexact/numeric/bf16.hpp>

#include "small_model.hpp"
#include "temporary_folder.hpp"

using namespace kvexact;
using namespace kvexact::examples;
using namespace kvexact::examples::small_model;

namespace {

using floats = std::vector<float>;

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

floats to_floats(std::span<const bf16> values) {
  floats out(values.size());
  std::ranges::transform(values, out.begin(), &bf16::to_float);
  return out;
}

/// An engine with a cache, and what the target makes of the same tokens.
struct fixture {
  explicit fixture(std::size_t n, const std::vector<std::string>& zeroed = {}) : ids(some_tokens(n)), path(folder / "model") {
    REQUIRE(write_model(path, model_tensors(), model_metadata(), zeroed));
    target.emplace_back(load({}));
    target_cache.emplace_back(cache(n));
    REQUIRE(target[0].forward(ids, 0, target_cache[0]));
  }

  engine load(const engine_options& options) const {
    auto loaded = engine::load(path, options);
    REQUIRE(loaded);
    return std::move(*loaded);
  }
  kv_cache cache(std::size_t capacity) const {
    auto made = target[0].make_cache(capacity);
    REQUIRE(made);
    return std::move(*made);
  }
  /// The exact keys and values of these tokens.
  floats keys(std::size_t layer, index_range tokens) const { return rows(target_cache[0].keys(layer, tokens.end), tokens); }
  floats values(std::size_t layer, index_range tokens) const { return rows(target_cache[0].values(layer, tokens.end), tokens); }

  static floats rows(std::span<const bf16> all, index_range tokens) { return to_floats(all.subspan(tokens.begin * kv_width)); }

  temporary_folder folder;
  std::vector<std::uint32_t> ids;
  std::string path;
  std::vector<engine> target;
  std::vector<kv_cache> target_cache;
};

/// The same correction for a (layer, token), however tokens are cut.
floats correction(std::size_t layer, index_range tokens) {
  floats all;
  for (std::uint64_t token = tokens.begin; token < tokens.end; ++token) {
    const floats row = normal_floats(width, static_cast<unsigned>(1000 * layer + token), 0.02F);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

struct prediction {
  floats keys[layers], values[layers];
};

/// Drives an engine over ranges that end at `ends`, feeding the target's keys and values and the corrections (or none).
prediction drive(layerwise_engine& predictor, const fixture& exact, const std::vector<std::uint64_t>& ends, bool corrected = true) {
  prediction all;
  for (const std::uint64_t end : ends) {
    const index_range tokens{predictor.tokens(), end};
    REQUIRE(predictor.begin(tokens));
    floats keys(tokens.size() * kv_width), values(keys.size());
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      REQUIRE(predictor.predict(layer, keys, values));
      all.keys[layer].insert(all.keys[layer].end(), keys.begin(), keys.end());
      all.values[layer].insert(all.values[layer].end(), values.begin(), values.end());
      const floats more = corrected ? correction(layer, tokens) : floats{};
      REQUIRE(predictor.advance(layer, exact.keys(layer, tokens), exact.values(layer, tokens), more));
    }
    CHECK(predictor.tokens() == end);
  }
  return all;
}

bool operator==(const prediction& a, const prediction& b) {
  for (std::size_t layer = 0; layer < layers; ++layer) {
    if (!same_bits(a.keys[layer], b.keys[layer]) || !same_bits(a.values[layer], b.values[layer])) return false;
  }
  return true;
}

template <class T>
void refused(const result<T>& got, error_code code) {
  REQUIRE_FALSE(got);
  CHECK(to_string(got.error().code) == std::string(to_string(code)));
}

}  // namespace

TEST_CASE("layerwise_engine: predictions are the layer's sums, keys turned, nothing rounded") {
  const fixture with(20);
  engine model = with.load({.precision = precision::int8});
  kv_cache cache = with.cache(20);
  layerwise_engine predictor(model, cache, with.ids);
  CHECK(predictor.tokens() == 0);
  CHECK(predictor.hidden_width() == width);
  REQUIRE(predictor.begin({0, 20}));
  floats keys(20 * kv_width), values(keys.size());
  REQUIRE(predictor.predict(0, keys, values));

  key_value_sums sums;
  const auto hidden = model.embed(with.ids);
  REQUIRE(hidden);
  model.keys_values(0, *hidden, sums);
  for (std::size_t token = 0; token < 20; ++token) cache.rotary().rotate(std::span(sums.keys).subspan(token * kv_width, kv_width), token);
  CHECK(same_bits(keys, sums.keys));
  CHECK(same_bits(values, sums.values));
  CHECK(std::ranges::any_of(keys, [](float v) { return bf16::from_float(v).to_float() != v; }));
}

TEST_CASE("layerwise_engine: the cache takes the exact keys and values, and the next layers feel them and the correction") {
  const fixture with(70);
  engine model = with.load({.precision = precision::int8});
  kv_cache cache = with.cache(70);
  layerwise_engine plain(model, cache, with.ids);
  const prediction expected = drive(plain, with, {70}, false);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    CHECK(same_bits(to_floats(cache.keys(layer, 70)), with.keys(layer, {0, 70})));
    CHECK(same_bits(to_floats(cache.values(layer, 70)), with.values(layer, {0, 70})));
  }
  layerwise_engine corrected_by_zero(model, cache, with.ids);
  REQUIRE(corrected_by_zero.begin({0, 70}));
  floats keys_of_1(70 * kv_width), values_of_1(keys_of_1.size());
  REQUIRE(corrected_by_zero.advance(0, with.keys(0, {0, 70}), with.values(0, {0, 70}), floats(70 * width)));
  REQUIRE(corrected_by_zero.predict(1, keys_of_1, values_of_1));
  CHECK(same_bits(values_of_1, expected.values[1]));

  layerwise_engine corrected(model, cache, with.ids);
  const prediction other = drive(corrected, with, {70});
  CHECK(same_bits(other.keys[0], expected.keys[0]));
  CHECK_FALSE(same_bits(other.keys[1], expected.keys[1]));

  // A change of the values of token 30 reaches the tokens from 30 on.
  layerwise_engine changed(model, cache, with.ids);
  REQUIRE(changed.begin({0, 70}));
  floats values = with.values(0, {0, 70});
  for (float& value : std::span(values).subspan(30 * kv_width, kv_width)) value += 100;
  REQUIRE(changed.advance(0, with.keys(0, {0, 70}), values, floats(70 * width)));
  REQUIRE(changed.predict(1, keys_of_1, values_of_1));
  for (std::size_t token = 0; token < 70; ++token) {
    const auto row = [&](const floats& all) { return std::span(all).subspan(token * kv_width, kv_width); };
    CHECK(same_bits(row(values_of_1), row(expected.values[1])) == (token < 30));
  }
  // Numbers that are no bf16 values are rounded.
  layerwise_engine rounded(model, cache, with.ids);
  REQUIRE(rounded.begin({0, 70}));
  const floats odd(70 * kv_width, 1.001F), even(70 * kv_width, -0.3F);
  REQUIRE(rounded.advance(0, odd, even, floats(70 * width)));
  CHECK(cache.keys(0, 70)[5].bits == bf16::from_float(1.001F).bits);
  CHECK(cache.values(0, 70)[5].bits == bf16::from_float(-0.3F).bits);
}

TEST_CASE("layerwise_engine: the correction by its formula") {
  // Without outputs, the rest of a layer adds zeros.
  const fixture with(50, {"blk.0.attn_output.weight", "blk.0.ffn_down.weight"});
  engine model = with.load({.precision = precision::int8});
  kv_cache cache = with.cache(50);
  layerwise_engine predictor(model, cache, with.ids);
  REQUIRE(predictor.begin({0, 50}));
  const floats before = to_floats(predictor.hidden()), more = correction(7, {0, 50});
  REQUIRE(predictor.advance(0, with.keys(0, {0, 50}), with.values(0, {0, 50}), more));
  const floats after = to_floats(predictor.hidden());
  std::size_t otherwise = 0;
  for (std::size_t row = 0; row < before.size(); row += width) {
    double squares = 0;
    for (std::size_t i = row; i < row + width; ++i) squares += std::pow(static_cast<double>(before[i]), 2);
    const double rms = std::sqrt(squares / width + static_cast<double>(epsilon));
    for (std::size_t i = row; i < row + width; ++i) {
      const double expected = static_cast<double>(before[i]) + rms * static_cast<double>(more[i]);
      CHECK(std::fabs(static_cast<double>(after[i]) - expected) <= std::fabs(expected) / 256 + 1e-6);
      otherwise += after[i] != bf16::from_float(static_cast<float>(expected)).to_float();
    }
  }
  CHECK(otherwise < before.size() / 1000);  // a sum near a tie may go the other way
}

TEST_CASE("layerwise_engine: above its depth hidden states change by corrections alone") {
  const fixture with(30);
  engine model = with.load({.precision = precision::int8, .depth = 1});
  kv_cache cache = with.cache(30);
  layerwise_engine predictor(model, cache, with.ids);
  REQUIRE(predictor.begin({0, 30}));
  const auto advance = [&](std::uint32_t layer, const floats& more) {
    REQUIRE(predictor.advance(layer, with.keys(layer, {0, 30}), with.values(layer, {0, 30}), more));
    return to_floats(predictor.hidden());
  };
  const floats input = to_floats(predictor.hidden()), after_0 = advance(0, {});
  CHECK_FALSE(same_bits(after_0, input));
  CHECK(same_bits(advance(1, {}), after_0));
  REQUIRE(predictor.begin({0, 30}));
  CHECK(same_bits(advance(0, {}), after_0));
  CHECK_FALSE(same_bits(advance(1, correction(1, {0, 30})), after_0));
}

TEST_CASE("layerwise_engine: the same bits however tokens are cut into ranges") {
  const fixture with(256);
  for (const engine_options& options : {engine_options{.precision = precision::int8},
                                        {.precision = precision::int8, .exact_layers = 1, .window = {4, 40}, .group = 32},
                                        {.precision = precision::fp8, .window = {20, 7}},
                                        {.window = {0, 64}}}) {
    engine model = with.load(options);
    kv_cache cache = with.cache(256);
    layerwise_engine whole(model, cache, with.ids);
    const prediction expected = drive(whole, with, {256});
    for (const auto& ends : std::vector<std::vector<std::uint64_t>>{{100, 256}, {64, 128, 192, 256}, {1, 2, 3, 20, 20, 255, 256}}) {
      kv_cache fresh = with.cache(300);
      layerwise_engine chunked(model, fresh, with.ids);
      CHECK(drive(chunked, with, ends) == expected);
    }
  }
}

TEST_CASE("layerwise_engine: a range given up halfway and begun again has the same bits") {
  const fixture with(60);
  engine model = with.load({.precision = precision::int8});
  kv_cache cache = with.cache(60), other = with.cache(60);
  layerwise_engine straight(model, cache, with.ids), stumbling(model, other, with.ids);
  const prediction expected = drive(straight, with, {30, 60});
  const floats rows(30 * kv_width, 0.5F);
  REQUIRE(stumbling.begin({0, 30}));
  REQUIRE(stumbling.advance(0, rows, rows, floats(30 * width, 1.0F)));
  REQUIRE(stumbling.advance(1, rows, rows, floats(30 * width, 1.0F)));
  CHECK(stumbling.tokens() == 0);
  prediction actual = drive(stumbling, with, {30});
  REQUIRE(stumbling.begin({30, 50}));
  const prediction second = drive(stumbling, with, {60});
  for (std::size_t layer = 0; layer < layers; ++layer) {
    actual.keys[layer].insert(actual.keys[layer].end(), second.keys[layer].begin(), second.keys[layer].end());
    actual.values[layer].insert(actual.values[layer].end(), second.values[layer].begin(), second.values[layer].end());
  }
  CHECK(actual == expected);
}

TEST_CASE("layerwise_engine: exact layers predict the target's cache bit by bit, whatever they are fed and corrected with") {
  const fixture with(90);
  for (const auto kind : {precision::int8, precision::fp8, precision::bf16}) {
    for (const std::size_t exact : {0U, 1U, 2U, 3U}) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(exact);
      engine model = with.load({.precision = kind, .exact_layers = exact, .window = {2, 10}});
      kv_cache cache = with.cache(90);
      layerwise_engine predictor(model, cache, with.ids);
      const prediction actual = drive(predictor, with, {37, 90});
      for (std::size_t layer = 0; layer < layers; ++layer) {
        CHECK(same_bits(actual.keys[layer], with.keys(layer, {0, 90})) == (layer < exact));
        CHECK(same_bits(actual.values[layer], with.values(layer, {0, 90})) == (layer < exact));
      }
    }
  }
  engine model = with.load({.precision = precision::int8, .exact_layers = layers});
  kv_cache cache = with.cache(90);
  layerwise_engine predictor(model, cache, with.ids);
  floats rough(90 * kv_width, 0.25F), keys(rough.size()), values(rough.size());
  for (const bool predicting : {true, false}) {
    REQUIRE(predictor.begin({0, 90}));
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      if (predicting || layer + 1 == layers) REQUIRE(predictor.predict(layer, keys, values));
      if (layer + 1 < layers) REQUIRE(predictor.advance(layer, rough, rough, correction(layer, {0, 90})));
    }
    CHECK(same_bits(keys, with.keys(layers - 1, {0, 90})));
    CHECK(same_bits(values, with.values(layers - 1, {0, 90})));
  }
}

TEST_CASE("layerwise_engine: wrong calls") {
  const fixture with(20);
  engine model = with.load({.precision = precision::int8});
  kv_cache cache = with.cache(18);
  layerwise_engine predictor(model, cache, with.ids);
  floats rows(10 * kv_width), hidden(10 * width);

  refused(predictor.predict(0, rows, rows), error_code::invalid_argument);  // no range
  refused(predictor.advance(0, rows, rows, hidden), error_code::invalid_argument);
  refused(predictor.begin({1, 5}), error_code::out_of_range);
  refused(predictor.begin({0, 19}), error_code::out_of_range);  // the cache
  kv_cache larger = with.cache(40);
  layerwise_engine roomy(model, larger, with.ids);
  refused(roomy.begin({0, 21}), error_code::out_of_range);  // the ids
  refused(roomy.begin({0, ~std::uint64_t{0}}), error_code::out_of_range);

  REQUIRE(predictor.begin({0, 10}));
  refused(predictor.predict(1, rows, rows), error_code::invalid_argument);
  refused(predictor.advance(1, rows, rows, hidden), error_code::invalid_argument);
  floats shorter(rows.size() - 1), fewer(hidden.size() - 1);
  refused(predictor.predict(0, shorter, rows), error_code::invalid_argument);
  refused(predictor.predict(0, rows, shorter), error_code::invalid_argument);
  refused(predictor.advance(0, shorter, rows, hidden), error_code::invalid_argument);
  refused(predictor.advance(0, rows, shorter, hidden), error_code::invalid_argument);
  refused(predictor.advance(0, rows, rows, fewer), error_code::invalid_argument);
  for (std::uint32_t layer = 0; layer < layers; ++layer) {  // after all that, nothing is lost
    REQUIRE(predictor.predict(layer, rows, rows));
    REQUIRE(predictor.advance(layer, rows, rows, hidden));
    refused(predictor.advance(layer, rows, rows, hidden), error_code::invalid_argument);
  }
  CHECK(predictor.tokens() == 10);
  refused(predictor.predict(layers, rows, rows), error_code::invalid_argument);
  refused(predictor.begin({0, 10}), error_code::out_of_range);
  refused(predictor.begin({10, 9}), error_code::out_of_range);
  CHECK(predictor.begin({10, 18}));

  std::vector<std::uint32_t> unknown = with.ids;
  unknown[3] = vocabulary;
  layerwise_engine strange(model, larger, unknown);
  CHECK(strange.begin({0, 3}));
  refused(strange.begin({0, 4}), error_code::out_of_range);
  refused(strange.predict(0, std::span(rows).first(4 * kv_width), std::span(rows).first(4 * kv_width)), error_code::invalid_argument);
}

TEST_CASE("layerwise_pair: the error of the hidden states, and what taking it away does") {
  const fixture with(60);
  engine model = with.load({.precision = precision::fp8}), target = with.load({});
  kv_cache cache = with.cache(60), target_cache = with.cache(60);
  layerwise_pair pair(layerwise_engine(model, cache, with.ids), target, target_cache);
  kv_cache check_cache = with.cache(60);
  auto target_hidden = target.embed(with.ids);
  REQUIRE(target_hidden);
  key_value_sums sums;

  CHECK(pair.hidden_width() == width);
  REQUIRE(pair.begin({0, 60}));
  floats keys(60 * kv_width), values(keys.size()), error(60 * width), next(error.size());
  layerwise_engine alone(model, check_cache, with.ids);
  REQUIRE(alone.begin({0, 60}));
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    REQUIRE(pair.predict(layer, keys, values));
    REQUIRE(pair.hidden_error(layer, error));
    const floats ours = to_floats(alone.hidden()), theirs = to_floats(*target_hidden);
    double size = 0;
    for (std::size_t row = 0; row < error.size(); row += width) {
      double squares = 0;
      for (std::size_t i = row; i < row + width; ++i) squares += std::pow(static_cast<double>(ours[i]), 2);
      const double rms = std::sqrt(squares / width + static_cast<double>(epsilon));
      for (std::size_t i = row; i < row + width; ++i) {
        const double expected = (static_cast<double>(theirs[i]) - static_cast<double>(ours[i])) / rms;
        CHECK(static_cast<double>(error[i]) == doctest::Approx(expected).epsilon(1e-5));
        size += expected * expected;
      }
    }
    CHECK((size > 0) == (layer > 0));
    const floats exact_keys = with.keys(layer, {0, 60}), exact_values = with.values(layer, {0, 60});
    const floats more = layer == 1 ? floats(error.size()) : error;  // corrected but for layer 1
    REQUIRE(pair.advance(layer, exact_keys, exact_values, more));
    REQUIRE(alone.advance(layer, exact_keys, exact_values, more));
    if (layer + 1 < layers) {
      target.keys_values(layer, *target_hidden, sums);
      target_cache.write(layer, 0, sums);
      target.rest(layer, *target_hidden, 0, target_cache);
    }
  }
  CHECK(pair.tokens() == 60);

  // With the whole error taken away, the target's own weights would go on exactly.
  engine same = with.load({.window = {0, 1000}});
  kv_cache same_cache = with.cache(60);
  layerwise_pair twin(layerwise_engine(same, same_cache, with.ids), target, target_cache);
  REQUIRE(twin.begin({0, 60}));
  const floats kick = correction(0, {0, 60});
  REQUIRE(twin.advance(0, with.keys(0, {0, 60}), with.values(0, {0, 60}), kick));
  REQUIRE(twin.hidden_error(1, error));
  CHECK(std::ranges::any_of(error, [](float v) { return std::fabs(v) > 0.01F; }));
  REQUIRE(twin.advance(1, with.keys(1, {0, 60}), with.values(1, {0, 60}), error));
  REQUIRE(twin.hidden_error(2, next));
  const auto power = [](const floats& all) {
    double sum = 0;
    for (const float v : all) sum += static_cast<double>(v) * static_cast<double>(v);
    return sum;
  };
  CHECK(power(next) < power(error) / 20);  // what is left is the rounding of the corrected states
}

TEST_CASE("layerwise_pair: sequences of one range each share their caches") {
  const fixture with(50);
  engine model = with.load({.precision = precision::int8, .exact_layers = 1, .window = {2, 20}}), target = with.load({});
  std::vector<std::vector<std::uint32_t>> sequences{
      with.ids, {with.ids.rbegin(), with.ids.rend()}, {with.ids.begin(), with.ids.begin() + 9}};
  const auto errors = [&](bool shared) {
    std::vector<kv_cache> caches;
    for (std::size_t i = 0; i < (shared ? 2 : 6); ++i) caches.push_back(with.cache(50));
    std::vector<layerwise_pair> pairs;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const std::size_t at = shared ? 0 : 2 * i;
      pairs.emplace_back(layerwise_engine(model, caches[at], sequences[i]), target, caches[at + 1]);
      REQUIRE(pairs.back().begin({0, sequences[i].size()}));
    }
    std::vector<floats> all;
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        const std::size_t n = sequences[i].size();
        floats keys(n * kv_width), values(keys.size()), error(n * width);
        REQUIRE(pairs[i].predict(layer, keys, values));
        REQUIRE(pairs[i].hidden_error(layer, error));
        all.insert(all.end(), {keys, values, error});
      }
      for (std::size_t i = 0; i < pairs.size(); ++i) {
        const std::size_t n = sequences[i].size();
        REQUIRE(pairs[i].advance(layer, all[all.size() - 9 + 3 * i], all[all.size() - 8 + 3 * i], correction(layer, {0, n})));
      }
    }
    return all;
  };
  CHECK(errors(true) == errors(false));
}

TEST_CASE("layerwise_pair: wrong calls") {
  const fixture with(20);
  engine model = with.load({.precision = precision::int8}), target = with.load({});
  kv_cache cache = with.cache(20), small = with.cache(10);
  layerwise_pair pair(layerwise_engine(model, cache, with.ids), target, small);
  floats rows(10 * kv_width), hidden(10 * width);
  refused(pair.hidden_error(0, hidden), error_code::invalid_argument);
  refused(pair.begin({0, 11}), error_code::out_of_range);
  refused(pair.begin({2, 5}), error_code::out_of_range);
  REQUIRE(pair.begin({0, 10}));
  refused(pair.hidden_error(1, hidden), error_code::invalid_argument);
  refused(pair.hidden_error(0, std::span(hidden).first(9 * width)), error_code::invalid_argument);
  refused(pair.predict(1, rows, rows), error_code::invalid_argument);
  refused(pair.advance(1, rows, rows, hidden), error_code::invalid_argument);
  CHECK(pair.hidden_error(0, hidden));

  const std::string narrower = with.folder / "other";
  auto specs = model_tensors();
  std::erase_if(specs, [](const tensor_spec& spec) { return spec.name.starts_with("blk.2."); });
  auto metadata = model_metadata();
  metadata["layers"] = "2";
  REQUIRE(write_model(narrower, specs, metadata));
  auto other = engine::load(narrower);
  REQUIRE(other);
  auto other_cache = other->make_cache(20);
  REQUIRE(other_cache);
  layerwise_pair mixed(layerwise_engine(model, cache, with.ids), *other, *other_cache);
  refused(mixed.begin({0, 10}), error_code::shape_mismatch);
}

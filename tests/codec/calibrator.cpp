// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "allocation_meter.hpp"
#include "codec_under_test.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

template <class T>
error error_of(const result<T>& outcome) {
  REQUIRE(!outcome);
  return outcome.error();
}
template <class T>
error_code code_of(const result<T>& outcome) {
  return error_of(outcome).code;
}

std::uint16_t nan_of(number_format format) {
  return with_scalar(format, []<class Scalar>() { return static_cast<std::uint16_t>(Scalar::quiet_nan); });
}

}  // namespace

TEST_CASE("calibrator: needs a finite value and all of its passes") {
  for (const codec_under_test* const codec : all_codecs()) {
    CAPTURE(codec->name());
    const example good = make_example(tiny_shape(), 10, codec->format(), 1);
    const example none = make_example(tiny_shape(), 0, codec->format(), 1);
    example all_nan = good;
    all_nan.cache.for_each([&](std::uint16_t& bits, auto...) { bits = nan_of(codec->format()); });

    auto calibrator = *codec->calibrate(tiny_shape());
    CHECK(code_of(calibrator->finish()) == error_code::not_calibrated);
    CHECK(code_of(calibrator->next_pass()) == error_code::not_calibrated);
    REQUIRE(calibrator->observe(none.cache, codec->prediction_of(none)));
    CHECK(code_of(calibrator->next_pass()) == error_code::not_calibrated);
    REQUIRE(calibrator->observe(all_nan.cache, codec->prediction_of(all_nan)));
    CHECK(code_of(calibrator->next_pass()) == error_code::not_calibrated);
    // What was refused can be made good.
    for (int pass = 0; pass < codec->passes(); ++pass) {
      CHECK(code_of(calibrator->finish()) == error_code::not_calibrated);
      REQUIRE(calibrator->observe(good.cache, codec->prediction_of(good)));
      REQUIRE(calibrator->next_pass());
    }
    CHECK(calibrator->finish());
  }
}

TEST_CASE("calibrator: finds the means and the spreads") {
  // Two channels with 1, 3 and with -8, 8, beside NaNs and infinities, which count as nothing.
  const cache_shape shape = make_shape({{1, 2, 0}});
  for (const number_format format : {number_format::bfloat16, number_format::float8_e5m2}) {
    const codec_under_test& codec = codec_for(format, true);
    bits_cache cache(shape, 400);
    bits_cache prediction(shape, 400);
    cache.for_each([&](std::uint16_t& bits, std::uint32_t, cache_part, std::uint64_t token, std::size_t channel) {
      const bool odd = token % 2 != 0;
      bits = bits_of(format, channel == 0 ? (odd ? 3 : 1) : (odd ? 8 : -8));
      if (token % 10 == 9) bits = nan_of(format);
      if (token % 10 == 8) bits = bits_of(format, INFINITY);
    });
    // The prediction misses by 1/4 and 2.
    prediction.for_each([&](std::uint16_t& bits, std::uint32_t, cache_part, std::uint64_t token, std::size_t channel) {
      const bool odd = token % 2 != 0;
      bits = bits_of(number_format::bfloat16, channel == 0 ? (odd ? 3.25F : 0.75F) : (odd ? 6 : -6));
      if (token % 10 == 9 || token % 10 == 8) bits = nan_of(number_format::bfloat16);
    });
    const std::vector<std::uint32_t> scales(bytes_of(format) == 1 ? 1 : 0, 0x40000000U);  // 2
    if (!scales.empty()) {
      prediction.for_each([](std::uint16_t& bits, auto...) {
        bits = bits_of(number_format::bfloat16, 2 * static_cast<float>(value_of(number_format::bfloat16, bits)));
      });
    }
    const auto file = codec.profile_for(std::vector{example{cache, prediction}}, {}, scales);
    REQUIRE(file);
    const auto parsed = parse_profile(*file);
    REQUIRE(parsed);
    REQUIRE(parsed->data.models.size() == 2);
    const double scale = scales.empty() ? 1 : 2;
    const auto mean = [&](std::size_t channel) { return static_cast<double>(std::bit_cast<float>(parsed->data.models[1].means[channel])); };
    CHECK(mean(0) == 2 * scale);
    CHECK(mean(1) == 0);
    // log2 of the root mean square in 1/256 octave.
    const auto octaves = static_cast<std::int16_t>(256 * std::log2(scale));
    CHECK(parsed->data.models[0].predictor == 2);
    CHECK(parsed->data.models[0].means.empty());
    CHECK(parsed->data.models[0].sigmas ==
          std::vector<std::int16_t>{static_cast<std::int16_t>(-2 * 256 + octaves), static_cast<std::int16_t>(256 + octaves)});
    CHECK(parsed->data.models[1].predictor == 1);
    CHECK(parsed->data.models[1].sigmas == std::vector<std::int16_t>{octaves, static_cast<std::int16_t>(3 * 256 + octaves)});
  }
}

TEST_CASE("calibrator: finds the means of keys as they were before rotation") {
  const cache_shape shape = make_shape({{1, 5, 0}});
  const double means[] = {1, -2, 0.5, 3, -0.75};  // the last is not rotated
  for (const rotary_pairing pairing : {rotary_pairing::interleaved, rotary_pairing::half_split}) {
    const rotary rotation = make_rotary(pairing, 4);
    example from{bits_cache(shape, 301), bits_cache(shape, 301)};
    std::vector<std::uint16_t>& keys = from.cache.part(0, cache_part::key);
    for (std::size_t t = 0; t < 301; ++t) {
      for (std::uint32_t i = 0; i < 2; ++i) {
        const auto [first, second] = rotation.pair(i);
        const double angle = 6.283185307179586 * static_cast<double>(t) * std::ldexp(static_cast<double>(rotation.turns()[i]), -64);
        keys[5 * t + first] =
            bits_of(number_format::float16, static_cast<float>(means[first] * std::cos(angle) - means[second] * std::sin(angle)));
        keys[5 * t + second] =
            bits_of(number_format::float16, static_cast<float>(means[first] * std::sin(angle) + means[second] * std::cos(angle)));
      }
      keys[5 * t + 4] = bits_of(number_format::float16, static_cast<float>(means[4]));
    }
    const auto parsed = parse_profile(*codec_for(number_format::float16, false).profile_for(std::vector{from}, rotation));
    REQUIRE(parsed);
    for (std::size_t c = 0; c < 5; ++c)
      CHECK(static_cast<double>(std::bit_cast<float>(parsed->data.models[0].means[c])) == doctest::Approx(means[c]).epsilon(0.002));
  }
}

TEST_CASE("calibrator: NaNs in the data change nothing but the counts of escapes") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, false);
  const example clean = make_example(mixed_shape(), 400, codec.format(), 2);
  example dirty = clean;
  random_integers random(3);
  dirty.cache.for_each([&](std::uint16_t& bits, auto...) {
    if (random.below(100) == 0) bits = nan_of(codec.format());
  });
  const prepared by_clean(codec, std::vector{clean});
  const prepared by_dirty(codec, std::vector{dirty});
  const example from = make_example(mixed_shape(), 300, codec.format(), 4);
  CHECK(static_cast<double>(by_dirty.encode(from).size()) ==
        doctest::Approx(static_cast<double>(by_clean.encode(from).size())).epsilon(0.01));
}

TEST_CASE("calibrator: takes memory for the shape, not for the data") {
  for (const codec_under_test* const codec : {&codec_for(number_format::bfloat16, true), &codec_for(number_format::float8_e4m3, false)}) {
    const example few = make_example(mixed_shape(), 300, codec->format(), 5);
    const example many = make_example(mixed_shape(), 3000, codec->format(), 5);
    const auto bytes_for = [&](const example& from) {
      const auto calibrator = codec->calibrate(from.cache.shape);
      REQUIRE(calibrator);
      // The first call sizes the buffers; what views of the test need is the same each time.
      REQUIRE((*calibrator)->observe(from.cache, codec->prediction_of(from)));
      const auto observe_once = [&](std::uint64_t tokens) {
        const source cache(from.cache, index_range{0, tokens});
        const auto prediction = codec->needs_prediction() ? optional_source(source(from.prediction, index_range{0, tokens})) : std::nullopt;
        const allocation_meter meter;
        REQUIRE((*calibrator)->observe(cache, prediction));
        return meter.bytes();
      };
      // Views of the test itself take 2 bytes (1 for fp8) a value of cache and prediction; the calibrator nothing that grows.
      const std::size_t at_256 = observe_once(256);
      const std::size_t at_all = observe_once(from.cache.tokens);
      const std::size_t per_token = from.cache.shape.channels() * (bytes_of(codec->format()) + (codec->needs_prediction() ? 2 : 0));
      return at_all - at_256 - (from.cache.tokens - 256) * per_token;
    };
    CHECK(bytes_for(few) == 0);
    CHECK(bytes_for(many) == 0);
  }
}

TEST_CASE("calibrator: examples in pieces give the same profile") {
  for (const codec_under_test* const codec : {&codec_for(number_format::bfloat16, true), &codec_for(number_format::float8_e4m3, false)}) {
    const example from = make_example(mixed_shape(), 300, codec->format(), 6);
    const rotary rotation = make_rotary(rotary_pairing::half_split, 4);
    const auto calibrator = codec->calibrate(mixed_shape(), rotation);
    REQUIRE(calibrator);
    for (int pass = 0; pass < codec->passes(); ++pass) {
      for (const index_range tokens : {index_range{0, 256}, index_range{256, 300}}) {
        const auto prediction = codec->needs_prediction() ? optional_source(source(from.prediction, tokens)) : std::nullopt;
        REQUIRE((*calibrator)->observe(source(from.cache, tokens, layout::hnd), prediction));
      }
      REQUIRE((*calibrator)->next_pass());
    }
    const auto data = (*calibrator)->finish();
    REQUIRE(data);
    CHECK(*serialize_profile(*data) == *codec->profile_for(std::vector{from}, rotation));
  }
}

TEST_CASE("calibrator: can be asked for its profile again") {
  for (const bool with_prediction : {false, true}) {
    const codec_under_test& codec = codec_for(number_format::bfloat16, with_prediction);
    const example from = make_example(tiny_shape(), 100, codec.format(), 7);
    const auto calibrator = codec.calibrate(tiny_shape());
    REQUIRE(calibrator);
    for (int pass = 0; pass < codec.passes(); ++pass) {
      REQUIRE((*calibrator)->observe(from.cache, codec.prediction_of(from)));
      REQUIRE((*calibrator)->next_pass());
    }
    const auto first = (*calibrator)->finish();
    const auto second = (*calibrator)->finish();
    REQUIRE(first);
    REQUIRE(second);
    CHECK(*serialize_profile(*first) == *serialize_profile(*second));
  }
}

TEST_CASE("calibrator: refuses what does not fit") {
  const codec_under_test& codec = codec_for(number_format::float8_e4m3, true);
  const example from = make_example(mixed_shape(), 40, codec.format(), 8);
  const example other = make_example(make_shape({{2, 6, 10}, {1, 7, 1}, {3, 5, 4}}), 40, codec.format(), 8);
  const auto calibrator = codec.calibrate(mixed_shape());
  REQUIRE(calibrator);
  const error wrong_cache = error_of((*calibrator)->observe(other.cache, source(from.prediction)));
  CHECK(wrong_cache.code == error_code::shape_mismatch);
  CHECK(wrong_cache.layer == 1);
  const error wrong_prediction = error_of((*calibrator)->observe(from.cache, source(other.prediction)));
  CHECK(wrong_prediction.code == error_code::shape_mismatch);
  CHECK(wrong_prediction.layer == 1);
  for (const index_range covered : {index_range{1, 40}, index_range{0, 39}})
    CHECK(code_of((*calibrator)->observe(from.cache, source(from.prediction, covered))) == error_code::out_of_range);
  const std::vector<std::uint32_t> scales(6, 0x3f800000U);
  for (const std::size_t count : {1U, 4U, 6U})
    CHECK(code_of((*calibrator)->observe(from.cache, source(from.prediction), std::span(scales).first(count))) ==
          error_code::shape_mismatch);
  CHECK((*calibrator)->observe(from.cache, source(from.prediction), std::span(scales).first(5)));
  // Layer 2 has keys of 5 dimensions.
  const error rotated = error_of(codec.calibrate(mixed_shape(), make_rotary(rotary_pairing::interleaved, 6)));
  CHECK(rotated.code == error_code::shape_mismatch);
  CHECK(rotated.layer == 2);
}

// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
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

/// Tokens of an example, as `codec` wants it.
calibration_input input_of(const codec_under_test& codec, const example& from, index_range tokens, layout how = layout::nhd) {
  calibration_input made{source(from.cache, tokens, how)};
  if (codec.needs_prediction()) made.side = source(from.prediction, tokens, how);
  return made;
}
calibration_input input_of(const codec_under_test& codec, const example& from) { return input_of(codec, from, {0, from.cache.tokens}); }

}  // namespace

TEST_CASE("calibrate: needs a finite value") {
  for (const codec_under_test* const codec : most_codecs()) {
    CAPTURE(codec->name());
    const example good = make_example(tiny_shape(), 10, codec->format(), 1);
    const example none = make_example(tiny_shape(), 0, codec->format(), 1);
    example all_nan = good;
    all_nan.cache.for_each([&](std::uint16_t& bits, auto...) { bits = nan_of(codec->format()); });
    const std::vector<calibration_input> inputs{input_of(*codec, none), input_of(*codec, all_nan), input_of(*codec, good)};
    const std::span all(inputs);
    CHECK(code_of(codec->calibrate(tiny_shape(), {}, all.first(0))) == error_code::invalid_argument);
    CHECK(code_of(codec->calibrate(tiny_shape(), {}, all.first(1))) == error_code::not_calibrated);
    CHECK(code_of(codec->calibrate(tiny_shape(), {}, all.first(2))) == error_code::not_calibrated);
    CHECK(codec->calibrate(tiny_shape(), {}, all));
  }
}

TEST_CASE("calibrate: finds the means and the spreads") {
  // Two channels with 1, 3 and with -8, 8, beside NaNs and infinities, which count as nothing.
  const cache_shape shape = make_shape({{1, 2, 0}});
  for (const number_format format : {number_format::bfloat16, number_format::float16}) {
    for (const codec_kind kind : {codec_kind::external, codec_kind::cross_layer_external}) {
      if (is_mapped(kind) && !has_maps(format)) continue;
      const codec_under_test& codec = codec_for(format, kind);
      CAPTURE(codec.name());
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
      const auto mean = [&](std::size_t channel) {
        return static_cast<double>(std::bit_cast<float>(parsed->data.models[1].means[channel]));
      };
      CHECK(mean(0) == 2 * scale);
      CHECK(mean(1) == 0);
      // log2 of the root mean square in 1/256 octave.
      const auto octaves = static_cast<std::int16_t>(256 * std::log2(scale));
      CHECK(parsed->data.models[0].predictor == codec.predictor());
      CHECK(parsed->data.models[0].means.empty());
      CHECK(parsed->data.models[0].sigmas ==
            std::vector<std::int16_t>{static_cast<std::int16_t>(-2 * 256 + octaves), static_cast<std::int16_t>(256 + octaves)});
      CHECK(parsed->data.models[1].predictor == 1);
      CHECK(parsed->data.models[1].sigmas == std::vector<std::int16_t>{octaves, static_cast<std::int16_t>(3 * 256 + octaves)});
    }
  }
}

TEST_CASE("calibrate: finds the means of keys as they were before rotation") {
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
    for (const codec_kind kind : kinds_of(number_format::float16)) {
      const auto parsed = parse_profile(*codec_for(number_format::float16, kind).profile_for(std::vector{from}, rotation));
      REQUIRE(parsed);
      for (const model_parameters& model : parsed->data.models) {
        CHECK(model.means.empty() == (model.predictor != 1 && kind != codec_kind::cross_layer));
        for (std::size_t c = 0; c < model.means.size(); ++c)
          CHECK(static_cast<double>(std::bit_cast<float>(model.means[c])) == doctest::Approx(means[c]).epsilon(0.002));
      }
    }
  }
}

TEST_CASE("calibrate: NaNs in the data change nothing but the counts of escapes") {
  for (const codec_kind kind : all_kinds) {
    const codec_under_test& codec = codec_for(number_format::bfloat16, kind);
    CAPTURE(codec.name());
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
          doctest::Approx(static_cast<double>(by_clean.encode(from).size())).epsilon(0.02));
  }
}

TEST_CASE("calibrate: takes memory for the shape, with maps also for the tokens, but not for their number times the layers") {
  for (const codec_under_test* const codec :
       {&codec_for(number_format::bfloat16, codec_kind::external), &codec_for(number_format::float8_e4m3, codec_kind::channel_mean),
        &codec_for(number_format::bfloat16, codec_kind::cross_layer),
        &codec_for(number_format::float8_e4m3, codec_kind::cross_layer_external)}) {
    CAPTURE(codec->name());
    const auto bytes_for = [&](std::uint32_t layers, std::uint64_t tokens) {
      const cache_shape shape = *cache_shape::uniform(layers, {2, 5, 3});
      const example from = make_example(shape, tokens, codec->format(), 5);
      const std::vector<calibration_input> inputs{input_of(*codec, from)};
      const allocation_meter meter;
      REQUIRE(codec->calibrate(shape, {}, inputs));
      // The test's own copies of cache and prediction are no part of it.
      const std::size_t per_value = bytes_of(codec->format()) + (codec->needs_prediction() ? 2U : 0U);
      return static_cast<std::int64_t>(meter.bytes()) - static_cast<std::int64_t>(tokens * shape.channels() * per_value);
    };
    // More tokens make more frequency tables, in bounds.
    constexpr std::int64_t tables = 200000;
    const std::int64_t growth = bytes_for(4, 10240) - bytes_for(4, 2048);
    if (!is_mapped(codec->kind())) {
      CHECK(std::abs(growth) < tables);
      continue;
    }
    // All requests count, freed or not: those for one tile come again for each of the tiles (2 bytes a value).
    constexpr std::int64_t expected = 8192 * 16 * (16 + 2 * 4 + 2 * 4);
    CHECK(growth > expected / 2);
    CHECK(growth < expected);
    CHECK(std::abs(bytes_for(4, 18432) - bytes_for(4, 10240) - growth) < growth / 8);
  }
}

TEST_CASE("calibrate: examples in pieces, in any layout and by any instruction set give the same profile") {
  for (const codec_under_test* const codec :
       {&codec_for(number_format::bfloat16, codec_kind::external), &codec_for(number_format::float8_e4m3, codec_kind::channel_mean),
        &codec_for(number_format::float8_e4m3, codec_kind::cross_layer),
        &codec_for(number_format::bfloat16, codec_kind::cross_layer_external)}) {
    CAPTURE(codec->name());
    const example from = make_example(mixed_shape(), 300, codec->format(), 6);
    const rotary rotation = make_rotary(rotary_pairing::half_split, 4);
    const std::vector<std::byte> whole = *codec->profile_for(std::vector{from}, rotation);
    const std::vector<calibration_input> pieces{input_of(*codec, from, {0, 256}, layout::hnd), input_of(*codec, from, {256, 256}),
                                                input_of(*codec, from, {256, 300}, layout::hnd)};
    for (const instruction_set set : {instruction_set::baseline, instruction_set::avx2, instruction_set::avx512}) {
      if (set > best_instruction_set()) continue;
      const auto data = codec->calibrate(mixed_shape(), rotation, pieces, {.set = set});
      REQUIRE(data);
      CHECK(*serialize_profile(*data) == whole);
    }
  }
}

TEST_CASE("calibrate: maps are of the kind that the options ask for") {
  const cache_shape shape = *cache_shape::uniform(5, {2, 4, 3});
  for (const codec_kind kind : {codec_kind::cross_layer, codec_kind::cross_layer_external}) {
    const codec_under_test& codec = codec_for(number_format::bfloat16, kind);
    const example from = make_example(shape, 200, codec.format(), 7);
    const std::vector<calibration_input> inputs{input_of(codec, from)};
    const auto maps_with = [&](const calibration_options& options) {
      const auto data = codec.calibrate(shape, {}, inputs, options);
      REQUIRE(data);
      REQUIRE(data->models.size() == 2);
      CHECK(data->models[1].maps.empty());
      const auto fits = expect_maps_fit(data->models[0].maps, shape, {});
      CHECK(fits);
      // What was calibrated is what codes.
      const auto ready = codec.parse(*serialize_profile(*data));
      REQUIRE(ready);
      const auto stream = (*ready)->encode(from.cache, codec.prediction_of(from));
      REQUIRE(stream);
      bits_cache decoded(shape, 200);
      REQUIRE((*(*ready)->open(*stream))->decode_all(decoded, codec.prediction_of(from)));
      CHECK(decoded == from.cache);
      return data->models[0].maps;
    };
    const layer_maps usual = maps_with({});
    CHECK(usual.layers_back == (kind == codec_kind::cross_layer ? 3 : 1));
    CHECK(usual.rank == 0);
    CHECK(usual.block_size == 16);
    CHECK(!usual.per_head);
    CHECK(!usual.clamped_feedback);
    CHECK(usual.hidden_width == 0);
    CHECK(usual.tiles.size() == 10);
    for (const std::uint32_t layers : {1U, 4U, 8U}) {
      const layer_maps maps = maps_with({.layers_back = layers, .block_size = 0});
      CHECK(maps.layers_back == layers);
      REQUIRE(maps.tiles[9].blocks.size() == 1);
      CHECK(maps.tiles[9].blocks[0].rows == 6);
      CHECK(maps.tiles[9].blocks[0].depth == std::min(layers, 4U) * 14 + 8);
      CHECK(maps.tiles[0].blocks[0].rows == 0);  // nothing comes before
    }
    for (const std::uint32_t rank : {1U, 3U, 7U, 100U}) {
      const layer_maps maps = maps_with({.block_size = 2, .rank = rank});
      CHECK(maps.rank == rank);
      CHECK(maps.tiles[0].inner.rows == 0);
      CHECK(maps.tiles[8].inner.rows == std::min(rank, 8U));
      CHECK(maps.tiles[9].inner.rows == std::min(rank, 6U));
      REQUIRE(maps.tiles[9].blocks.size() == 4);  // 2 + 1 channels of two heads
      CHECK(maps.tiles[9].blocks[2].rows == 2);
      CHECK(maps.tiles[9].blocks[2].depth == std::min(rank, 6U) + 3);
      CHECK(maps.tiles[9].blocks[3].rows == 1);
      CHECK(maps.tiles[9].blocks[3].depth == std::min(rank, 6U) + 5);
    }
    const layer_maps by_head = maps_with({.layers_back = 1, .block_size = 2, .per_head = true});
    CHECK(by_head.per_head);
    REQUIRE(by_head.tiles[9].blocks.size() == 4);
    CHECK(by_head.tiles[9].blocks[2].depth == 7 + 4);
    CHECK(by_head.tiles[9].blocks[3].depth == 7 + 4 + 2);
    const layer_maps whole_heads = maps_with({.layers_back = 1, .block_size = 0, .per_head = true});
    REQUIRE(whole_heads.tiles[9].blocks.size() == 2);
    CHECK(whole_heads.tiles[9].blocks[1].rows == 3);
    CHECK(whole_heads.tiles[9].blocks[1].depth == 7 + 4);
  }
}

TEST_CASE("calibrate: refuses what does not fit") {
  for (const codec_kind kind : {codec_kind::external, codec_kind::cross_layer_external}) {
    const codec_under_test& codec = codec_for(number_format::float8_e4m3, kind);
    const example from = make_example(mixed_shape(), 40, codec.format(), 8);
    const example other = make_example(make_shape({{2, 6, 10}, {1, 7, 1}, {3, 5, 4}}), 40, codec.format(), 8);
    const auto refused = [&](const source& cache, const source& prediction, std::span<const std::uint32_t> scales = {},
                             const calibration_options& options = {}, const rotary& rotation = {}) {
      // A good one before.
      const std::vector<calibration_input> inputs{input_of(codec, from), {cache, prediction, scales}};
      return error_of(codec.calibrate(mixed_shape(), rotation, inputs, options));
    };
    const error wrong_cache = refused(other.cache, from.prediction);
    CHECK(wrong_cache.code == error_code::shape_mismatch);
    CHECK(wrong_cache.layer == 1);
    const error wrong_prediction = refused(from.cache, other.prediction);
    CHECK(wrong_prediction.code == error_code::shape_mismatch);
    CHECK(wrong_prediction.layer == 1);
    for (const index_range covered : {index_range{1, 40}, index_range{0, 39}})
      CHECK(refused(from.cache, source(from.prediction, covered)).code == error_code::out_of_range);
    const std::vector<std::uint32_t> scales(6, 0x3f800000U);
    for (const std::size_t count : {1U, 4U, 6U})
      CHECK(refused(from.cache, from.prediction, std::span(scales).first(count)).code == error_code::shape_mismatch);
    CHECK(refused(from.cache, from.prediction, {}, {.layers_back = 9}).code == error_code::invalid_argument);
    CHECK(refused(from.cache, from.prediction, {}, {.rank = 1, .per_head = true}).code == error_code::invalid_argument);
    for (const std::uint32_t rank : {65537U, 70000U, 0xffffffffU})
      CHECK(refused(from.cache, from.prediction, {}, {.rank = rank}).code == error_code::invalid_argument);
    const error other_heads = refused(from.cache, from.prediction, {}, {.per_head = true});
    CHECK(other_heads.code == error_code::invalid_argument);
    CHECK(other_heads.layer == 1);
    // Layer 2 has keys of 5 dimensions.
    const error rotated = refused(from.cache, from.prediction, {}, {}, make_rotary(rotary_pairing::interleaved, 6));
    CHECK(rotated.code == error_code::shape_mismatch);
    CHECK(rotated.layer == 2);
    if (is_mapped(kind)) {
      for (const double ridge : {-1.0, double{NAN}, double{INFINITY}})
        CHECK(refused(from.cache, from.prediction, {}, {.ridge = ridge}).code == error_code::invalid_argument);
    }
  }
}

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "codec_under_test.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

void check_round_trip(const prepared& by, const example& from, layout how = layout::nhd) {
  const std::vector<std::byte> stream = by.encode(from);
  const auto decoder = by.ready->open(stream);
  REQUIRE(decoder);
  REQUIRE((*decoder)->tokens() == from.cache.tokens);
  bits_cache decoded(from.cache.shape, from.cache.tokens, 0x3333);
  const auto done = (*decoder)->decode_all(decoded, by.prediction_of(from), how);
  REQUIRE_MESSAGE(done, done.error().message());
  REQUIRE(decoded == from.cache);
}

/// Minus log2 of the probability that a number from N(mean, sigma) is rounded to `bits`.
double ideal_bits(number_format format, std::uint16_t bits, double mean, double sigma) {
  const std::uint16_t sign = bytes_of(format) == 1 ? 0x80 : 0x8000;
  const auto magnitude = static_cast<std::uint16_t>(bits & ~sign);
  const double value = value_of(format, magnitude);
  const double above = value_of(format, static_cast<std::uint16_t>(magnitude + 1));
  const double below = magnitude == 0 ? 0 : value_of(format, static_cast<std::uint16_t>(magnitude - 1));
  double from = (value + below) / 2;
  double to = (value + above) / 2;
  if ((bits & sign) != 0) std::tie(from, to) = std::pair{-to, -from};
  const auto tail = [&](double x) { return 0.5 * std::erfc(x / std::sqrt(2.0)); };
  const double a = (from - mean) / sigma;
  const double b = (to - mean) / sigma;
  return -std::log2(a > 0 ? tail(a) - tail(b) : tail(-b) - tail(-a));
}

/// Independent normal values, whose true mean and spread of each channel are known. With a prediction the mean changes with every value.
struct gaussian_example {
  example data;
  double bits = 0;
};
gaussian_example make_gaussian(const cache_shape& shape, std::uint64_t tokens, number_format format, bool predicted, std::uint64_t seed) {
  gaussian_example made{{bits_cache(shape, tokens), bits_cache(shape, tokens)}};
  random_integers random(seed);
  const auto uniform = [&](random_integers& from) { return (static_cast<double>(from.next() >> 11) + 0.5) * 0x1p-53; };
  const auto normal = [&]() {
    const double radius = std::sqrt(-2 * std::log(uniform(random)));
    return radius * std::cos(6.283185307179586 * uniform(random));
  };
  made.data.cache.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part part, std::uint64_t token, std::size_t channel) {
    random_integers of_channel((std::uint64_t{layer} << 40) + (static_cast<std::uint64_t>(part) << 32) + channel);
    const double sigma = predicted ? std::exp2(-1 + 0.25 * uniform(of_channel)) : std::exp2(-3 + 3 * uniform(of_channel));
    double mean = 4 * uniform(of_channel) - 2;
    if (predicted) {
      // Close together, so that fp8 uses few contexts and so few values calibrate them.
      const std::uint16_t guess = bits_of(number_format::bfloat16, static_cast<float>(2.5 + 0.25 * normal()));
      made.data.prediction.part(layer, part)[static_cast<std::size_t>(token) * shape.layer(layer).channels(part) + channel] = guess;
      mean = value_of(number_format::bfloat16, guess);
    }
    bits = bits_of(format, static_cast<float>(mean + sigma * normal()));
    made.bits += ideal_bits(format, bits, mean, sigma);
  });
  return made;
}

/// Turns the keys of a cache by their position.
void rotate_keys(bits_cache& cache, number_format format, const rotary& rotation) {
  for (std::uint32_t l = 0; l < cache.shape.layers(); ++l) {
    const layer_shape& layer = cache.shape.layer(l);
    for (std::uint64_t token = 0; token < cache.tokens; ++token) {
      for (std::uint32_t head = 0; head < layer.kv_heads; ++head) {
        std::uint16_t* const row = cache.part(l, cache_part::key).data() + (token * layer.kv_heads + head) * layer.key_dim;
        for (std::uint32_t i = 0; i < rotation.turns().size(); ++i) {
          const auto [first, second] = rotation.pair(i);
          const double angle = 6.283185307179586 * static_cast<double>(token) * std::ldexp(static_cast<double>(rotation.turns()[i]), -64);
          const double a = value_of(format, row[first]);
          const double b = value_of(format, row[second]);
          row[first] = bits_of(format, static_cast<float>(a * std::cos(angle) - b * std::sin(angle)));
          row[second] = bits_of(format, static_cast<float>(a * std::sin(angle) + b * std::cos(angle)));
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("codec: gives back every bit for token counts around rows and chunks") {
  for (const codec_under_test* const codec : all_codecs()) {
    CAPTURE(codec->name());
    const prepared by(*codec, mixed_shape());
    for (const std::uint64_t tokens : {0U, 1U, 31U, 32U, 33U, 255U, 256U, 257U, 700U}) {
      CAPTURE(tokens);
      check_round_trip(by, make_example(mixed_shape(), tokens, codec->format(), 2));
    }
  }
}

TEST_CASE("codec: gives back every bit of caches of many shapes") {
  const std::vector<std::vector<layer_shape>> shapes{
      {{1, 1, 0}}, {{1, 1, 1}}, {{1, 33, 0}, {1, 33, 0}}, {{5, 3, 1}}, {{1, 64, 64}, {1, 64, 64}, {4, 2, 31}}, {{1, 2, 300}},
  };
  for (const auto& layers : shapes) {
    const cache_shape shape = make_shape(layers);
    CAPTURE(shape.channels());
    for (const auto& [format, kind] : {std::pair{number_format::bfloat16, codec_kind::channel_mean},
                                       {number_format::bfloat16, codec_kind::cross_layer_external},
                                       {number_format::float8_e4m3, codec_kind::external},
                                       {number_format::float8_e4m3, codec_kind::cross_layer}}) {
      const codec_under_test& codec = codec_for(format, kind);
      CAPTURE(codec.name());
      const prepared by(codec, shape, {}, 64);
      for (const std::uint64_t tokens : {1U, 40U, 257U}) check_round_trip(by, make_example(shape, tokens, format, 3));
    }
  }
}

TEST_CASE("codec: gives back every bit with either pairing of rotated keys") {
  for (const rotary_pairing pairing : {rotary_pairing::interleaved, rotary_pairing::half_split}) {
    for (const codec_kind kind : all_kinds) {
      const prepared by(codec_for(mapped_float16, kind), mixed_shape(), make_rotary(pairing, 4));
      check_round_trip(by, make_example(mixed_shape(), 300, mapped_float16, 4));
    }
  }
}

TEST_CASE("codec: knowing how keys are rotated makes the stream smaller") {
  const cache_shape shape = make_shape({{2, 8, 0}});
  for (const auto& [pairing, kind] : {std::pair{rotary_pairing::interleaved, codec_kind::channel_mean},
                                      {rotary_pairing::half_split, codec_kind::channel_mean},
                                      {rotary_pairing::half_split, codec_kind::cross_layer}}) {
    const rotary rotation = make_rotary(pairing, 6);
    std::vector<example> examples;
    for (const std::uint64_t seed : {5U, 6U}) {
      examples.push_back(make_example(shape, 512, number_format::bfloat16, seed));
      rotate_keys(examples.back().cache, number_format::bfloat16, rotation);
    }
    const auto size_with = [&, kind = kind](const rotary& assumed) {
      const prepared by(codec_for(number_format::bfloat16, kind), std::span(examples).first(1), assumed);
      check_round_trip(by, examples[1]);
      return by.encode(examples[1]).size();
    };
    const std::size_t right = size_with(rotation);
    const rotary_pairing other = pairing == rotary_pairing::interleaved ? rotary_pairing::half_split : rotary_pairing::interleaved;
    CHECK(right * 100 < size_with({}) * 99);
    CHECK(right * 100 < size_with(make_rotary(other, 6)) * 99);
  }
}

TEST_CASE("codec: the layout in memory changes no byte") {
  for (const codec_under_test* const codec :
       {&codec_for(number_format::bfloat16, codec_kind::external), &codec_for(number_format::float8_e5m2, codec_kind::channel_mean),
        &codec_for(number_format::float8_e4m3, codec_kind::cross_layer),
        &codec_for(number_format::bfloat16, codec_kind::cross_layer_external)}) {
    const prepared by(*codec, mixed_shape());
    const example from = make_example(mixed_shape(), 293, codec->format(), 7);
    const std::vector<std::byte> stream = by.encode(from);
    for (const layout how : all_layouts) {
      CAPTURE(static_cast<int>(how));
      optional_source prediction = by.prediction_of(from);
      if (prediction) prediction->how = how;
      const auto other = by.ready->encode(source(from.cache, how), prediction);
      REQUIRE(other);
      CHECK(*other == stream);
      const auto decoder = by.ready->open(stream);
      REQUIRE(decoder);
      bits_cache decoded(from.cache.shape, 293);
      REQUIRE((*decoder)->decode_all(decoded, prediction, how));
      CHECK(decoded == from.cache);
    }
  }
}

TEST_CASE("codec: instruction sets write the same bytes and read each other") {
  std::vector<instruction_set> available;
  for (const instruction_set set : {instruction_set::baseline, instruction_set::avx2, instruction_set::avx512})
    if (set <= best_instruction_set()) available.push_back(set);
  for (const codec_under_test* const codec : all_codecs()) {
    CAPTURE(codec->name());
    const prepared by(*codec, mixed_shape());
    example from = make_example(mixed_shape(), 300, codec->format(), 8);
    // Some values of every kind among the usual ones.
    random_integers random(9);
    from.cache.for_each([&](std::uint16_t& bits, auto...) {
      if (random.below(50) == 0) bits = static_cast<std::uint16_t>(random.next() & (bytes_of(codec->format()) == 1 ? 0xffU : 0xffffU));
    });
    const std::vector<std::byte> stream = by.encode(from, {.options = {.set = instruction_set::baseline}});
    for (const instruction_set set : available) {
      CAPTURE(static_cast<int>(set));
      CHECK(by.encode(from, {.options = {.set = set}}) == stream);
      const auto decoder = by.ready->open(stream, set);
      REQUIRE(decoder);
      bits_cache decoded(from.cache.shape, 300);
      REQUIRE((*decoder)->decode_all(decoded, by.prediction_of(from)));
      CHECK(decoded == from.cache);
    }
  }
}

TEST_CASE("codec: the range coder carries the same values in a stream of its own") {
  const prepared rans(codec_for(number_format::float8_e4m3, codec_kind::external), mixed_shape());
  const auto ranged = codec_with_range_coder().parse(rans.profile);
  REQUIRE(ranged);
  for (const std::uint64_t tokens : {1U, 300U}) {
    const example from = make_example(mixed_shape(), tokens, number_format::float8_e4m3, 10);
    const std::vector<std::byte> by_rans = rans.encode(from);
    const auto by_range = (*ranged)->encode(from.cache, source(from.prediction));
    REQUIRE(by_range);
    CHECK(*by_range != by_rans);
    bits_cache decoded(from.cache.shape, tokens);
    const auto decoder = (*ranged)->open(*by_range);
    REQUIRE(decoder);
    REQUIRE((*decoder)->decode_all(decoded, source(from.prediction)));
    CHECK(decoded == from.cache);
    // Neither takes the other's stream for its own.
    const auto wrong = rans.ready->open(*by_range);
    REQUIRE(!wrong);
    CHECK(wrong.error().code == error_code::unsupported);
    const auto wrong_too = (*ranged)->open(by_rans);
    REQUIRE(!wrong_too);
    CHECK(wrong_too.error().code == error_code::unsupported);
    // The symbols cost the same: per chunk one coder has 128 bytes of lane states, the other 8 bytes, and the states hold some symbols.
    const std::size_t chunks = tokens == 1 ? 1 : 2;
    CHECK(by_range->size() < by_rans.size());
    CHECK(by_rans.size() < by_range->size() + chunks * 121);
  }
}

TEST_CASE("codec: a stream of normal numbers is nearly as short as it can be") {
  const cache_shape shape = make_shape({{2, 8, 8}, {2, 8, 8}});
  for (const codec_under_test* const codec : most_codecs()) {
    CAPTURE(codec->name());
    // Seen twice, it counts as much as twice the values.
    const std::vector<example> examples(2, make_gaussian(shape, 2048, codec->format(), codec->needs_prediction(), 11).data);
    const prepared by(*codec, examples);
    const gaussian_example from = make_gaussian(shape, 2048, codec->format(), codec->needs_prediction(), 12);
    // One chunk, so that fixed costs hardly count.
    const std::vector<std::byte> stream = by.encode(from.data, {.options = {.chunks = {.tokens_per_chunk = 2048}}});
    const double ratio = 8 * static_cast<double>(stream.size()) / from.bits;
    CAPTURE(ratio);
    CHECK(ratio < (bytes_of(codec->format()) == 1 ? 1.025 : 1.015));
    CHECK(ratio > 0.99);  // less would mean that the ideal is computed wrongly
  }
}

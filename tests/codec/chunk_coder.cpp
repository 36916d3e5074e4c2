// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/prediction/channel_mean.hpp>

#include "codec_under_test.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

std::uint64_t most_bytes(const bits_cache& cache, number_format format) {
  const std::uint64_t bytes = cache.values() * bytes_of(format);
  return bytes + bytes / 200 + 512;
}

/// Encodes, checks the size and the round trip, and returns the modes of the chunks.
std::vector<std::uint32_t> check_bounded(const prepared& by, const bits_cache& cache, const optional_source& prediction,
                                         const encoder_call& call = {}) {
  const auto stream = by.ready->encode(cache, prediction, call);
  REQUIRE(stream);
  CHECK(stream->size() <= most_bytes(cache, by.codec->format()));
  const auto decoder = by.ready->open(*stream);
  REQUIRE(decoder);
  bits_cache decoded(cache.shape, cache.tokens, 0x33);
  const auto done = (*decoder)->decode_all(decoded, prediction);
  REQUIRE_MESSAGE(done, done.error().message());
  CHECK(decoded == cache);
  std::vector<std::uint32_t> modes;
  for (const chunk_record& record : (*decoder)->chunks()) modes.push_back(record.mode);
  return modes;
}

struct odd_pattern {
  const char* name;
  std::function<std::uint16_t(random_integers&, std::uint64_t)> value;  // of the random numbers and the value's number
};

/// Patterns that no calibration expects, by format.
std::vector<odd_pattern> odd_patterns(number_format format) {
  const bool is_fp8 = bytes_of(format) == 1;
  const auto sign = static_cast<std::uint16_t>(is_fp8 ? 0x80 : 0x8000);
  const auto all = static_cast<std::uint16_t>(is_fp8 ? 0xff : 0xffff);
  const std::uint16_t one = bits_of(format, 1);
  const auto infinity = static_cast<std::uint16_t>(format == number_format::float8_e4m3   ? 0x7e
                                                   : format == number_format::float8_e5m2 ? 0x7c
                                                   : format == number_format::float16     ? 0x7c00
                                                                                          : 0x7f80);
  const auto smallest_normal = static_cast<std::uint16_t>(format == number_format::float8_e4m3   ? 0x08
                                                          : format == number_format::float8_e5m2 ? 0x04
                                                          : format == number_format::float16     ? 0x0400
                                                                                                 : 0x0080);
  const auto cut = [](std::uint64_t bits) { return static_cast<std::uint16_t>(bits); };
  return {
      {"all equal", [=](auto&, auto) { return bits_of(format, 1.625F); }},
      {"far away", [=](auto&, auto) { return static_cast<std::uint16_t>(infinity - 1); }},
      {"zero", [](auto&, auto) { return std::uint16_t{0}; }},
      {"minus zero", [=](auto&, auto) { return sign; }},
      {"zeros of both signs", [=](auto& random, auto) { return cut(random.next() & sign); }},
      {"one NaN", [=](auto&, auto) { return static_cast<std::uint16_t>(infinity + 1); }},
      {"NaNs of all payloads",
       [=](auto& random, auto) {
         const std::uint64_t payloads = (all ^ sign) - infinity;
         return cut((infinity + 1 + random.below(payloads)) | (random.next() & sign));
       }},
      {"infinities", [=](auto& random, auto) { return cut(infinity | (random.next() & sign)); }},
      {"subnormals", [=](auto& random, auto) { return cut(random.below(smallest_normal) | (random.next() & sign)); }},
      {"smallest subnormal", [](auto&, auto) { return std::uint16_t{1}; }},
      {"alternating signs", [=](auto&, std::uint64_t i) { return static_cast<std::uint16_t>(one | (i % 2 != 0 ? sign : 0)); }},
      {"random bits", [=](auto& random, auto) { return cut(random.next() & all); }},
      {"every pattern in turn", [=](auto&, std::uint64_t i) { return cut(i & all); }},
      {"random order of magnitude", [=](auto& random, auto) { return cut(random.below(infinity)); }},
      {"mostly usual, some infinite", [=](auto& random, auto) { return random.below(10) == 0 ? infinity : one; }},
  };
}

std::vector<const codec_under_test*> codecs_with_prediction() {
  std::vector<const codec_under_test*> those = most_codecs();
  std::erase_if(those, [](const codec_under_test* codec) { return !codec->needs_prediction(); });
  return those;
}

constexpr std::uint32_t stored = stored_mode;
constexpr std::uint32_t mean = channel_mean::id;

}  // namespace

TEST_CASE("chunk_coder: whatever a cache holds comes back and grows by at most half a percent and 512 bytes") {
  for (const codec_under_test* const codec : most_codecs()) {
    CAPTURE(codec->name());
    const prepared by(*codec, mixed_shape());
    const example usual = make_example(mixed_shape(), 290, codec->format(), 2);
    for (const odd_pattern& pattern : odd_patterns(codec->format())) {
      CAPTURE(pattern.name);
      random_integers random(3);
      std::uint64_t i = 0;
      bits_cache cache(mixed_shape(), 290);
      cache.for_each([&](std::uint16_t& bits, auto...) { bits = pattern.value(random, i++); });
      const auto modes = check_bounded(by, cache, by.prediction_of(usual));
      if (std::string(pattern.name) == "random bits" && bytes_of(codec->format()) == 2)
        CHECK(modes == std::vector<std::uint32_t>(modes.size(), stored));
    }
  }
}

TEST_CASE("chunk_coder: one or two random tokens of a wide model grow as little") {
  const codec_under_test& codec = codec_for(number_format::float8_e4m3, codec_kind::channel_mean);
  const auto shape = make_shape(std::vector<layer_shape>(32, layer_shape{8, 640, 512}));
  const prepared by(codec, shape, {}, 33);
  for (const std::uint64_t tokens : {1U, 2U}) {
    random_integers random(tokens);
    bits_cache cache(shape, tokens);
    cache.for_each([&](std::uint16_t& bits, auto...) { bits = static_cast<std::uint16_t>(random.next() & 0xff); });
    (void)check_bounded(by, cache, {});
  }
}

TEST_CASE("chunk_coder: whatever a cache was calibrated on, others come back") {
  // A profile of all zeros or of numbers near the largest, and the usual values.
  for (const codec_under_test* const codec :
       {&codec_for(number_format::bfloat16, codec_kind::channel_mean), &codec_for(number_format::float8_e4m3, codec_kind::external),
        &codec_for(number_format::float16, codec_kind::external), &codec_for(number_format::float8_e5m2, codec_kind::channel_mean),
        &codec_for(number_format::bfloat16, codec_kind::cross_layer),
        &codec_for(number_format::float8_e4m3, codec_kind::cross_layer_external)}) {
    CAPTURE(codec->name());
    for (const std::size_t which : {1U, 2U, 8U, 9U, 13U}) {
      const odd_pattern pattern = odd_patterns(codec->format())[which];
      CAPTURE(pattern.name);
      random_integers random(4);
      std::vector<example> examples{make_example(mixed_shape(), 64, codec->format(), 5)};
      examples[0].cache.for_each([&](std::uint16_t& bits, auto...) { bits = pattern.value(random, 0); });
      const prepared by(*codec, examples);
      const example usual = make_example(mixed_shape(), 70, codec->format(), 6);
      check_bounded(by, examples[0].cache, by.prediction_of(examples[0]));
      check_bounded(by, usual.cache, by.prediction_of(usual));
    }
  }
}

TEST_CASE("chunk_coder: one token of random bits grows no more either") {
  for (const codec_under_test* const codec : most_codecs()) {
    CAPTURE(codec->name());
    for (const cache_shape& shape : {*cache_shape::uniform(30, {3, 8, 8}), *cache_shape::uniform(30, {1, 2, 0}), make_shape({{1, 1, 0}})}) {
      const prepared by(*codec, shape, {}, 33);
      random_integers random(7);
      for (const std::uint64_t tokens : {1U, 2U}) {
        bits_cache cache(shape, tokens);
        cache.for_each([&](std::uint16_t& bits, auto...) {
          bits = static_cast<std::uint16_t>(random.next() & (bytes_of(codec->format()) == 1 ? 0xffU : 0xffffU));
        });
        const example usual = make_example(shape, tokens, codec->format(), 8);
        check_bounded(by, cache, by.prediction_of(usual));
      }
      check_bounded(by, bits_cache(shape, 0), codec->needs_prediction() ? optional_source(bits_cache(shape, 0)) : std::nullopt);
    }
  }
}

TEST_CASE("chunk_coder: each chunk takes the predictor that serves it best") {
  for (const codec_under_test* const codec : codecs_with_prediction()) {
    CAPTURE(codec->name());
    const number_format format = codec->format();
    const std::uint32_t predicted = codec->predictor();
    const prepared by(*codec, mixed_shape());
    // Four bands: well predicted, badly predicted, noise, well predicted.
    example from = make_example(mixed_shape(), 128, format, 9);
    random_integers random(10);
    from.prediction.for_each([&](std::uint16_t& bits, std::uint32_t, cache_part, std::uint64_t token, std::size_t) {
      if (token / 32 == 1) bits = static_cast<std::uint16_t>(bits ^ 0x8000U);
    });
    from.cache.for_each([&](std::uint16_t& bits, std::uint32_t, cache_part, std::uint64_t token, std::size_t) {
      if (token / 32 == 2) bits = static_cast<std::uint16_t>(random.next() & (bytes_of(format) == 1 ? 0xffU : 0xffffU));
    });
    const encoder_call call{.options = {.chunks = {.tokens_per_chunk = 32}}};
    CHECK(check_bounded(by, from.cache, by.prediction_of(from), call) == std::vector<std::uint32_t>{predicted, mean, stored, predicted});
  }
}

TEST_CASE("chunk_coder: predictions that are no numbers count as zero") {
  const std::array<std::uint16_t, 6> odd{0x7fc0, 0xff81, 0x7f80, 0xff80, 0x7fff, 0x0001};
  for (const codec_under_test* const codec : codecs_with_prediction()) {
    CAPTURE(codec->name());
    const number_format format = codec->format();
    const std::uint32_t predicted = codec->predictor();
    const prepared by(*codec, mixed_shape());
    example from = make_example(mixed_shape(), 100, format, 11);
    std::size_t i = 0;
    SUBCASE("all of them") {
      from.prediction.for_each([&](std::uint16_t& bits, auto...) { bits = odd[i++ % odd.size()]; });
      CHECK(check_bounded(by, from.cache, by.prediction_of(from)) == std::vector<std::uint32_t>{mean});
    }
    SUBCASE("a few") {
      from.prediction.for_each([&](std::uint16_t& bits, auto...) {
        if (++i % 97 == 0) bits = odd[i % odd.size()];
      });
      CHECK(check_bounded(by, from.cache, by.prediction_of(from)) == std::vector<std::uint32_t>{predicted});
    }
    SUBCASE("values of every kind predicted by every kind") {
      random_integers random(12);
      from.prediction.for_each([&](std::uint16_t& bits, auto...) {
        if (random.below(20) == 0) bits = static_cast<std::uint16_t>(random.next());
      });
      from.cache.for_each([&](std::uint16_t& bits, auto...) {
        if (random.below(20) == 0) bits = static_cast<std::uint16_t>(random.next() & (bytes_of(format) == 1 ? 0xffU : 0xffffU));
      });
      CHECK(check_bounded(by, from.cache, by.prediction_of(from)) == std::vector<std::uint32_t>{predicted});
    }
  }
}

TEST_CASE("chunk_coder: fewer bits where less is unknown") {
  for (const codec_under_test* const codec : most_codecs()) {
    const prepared by(*codec, mixed_shape());
    const example from = make_example(mixed_shape(), 256, codec->format(), 13);
    const std::uint64_t bytes = from.cache.values() * bytes_of(codec->format());
    const std::size_t size = by.encode(from).size();
    CAPTURE(codec->name());
    CAPTURE(size);
    CAPTURE(bytes);
    // The prediction is off by 1/16 of the spread: some 4 bits less than without.
    const std::uint64_t bits_spared = codec->needs_prediction() ? 6 : 2;
    const std::uint64_t at_least = bytes_of(codec->format()) == 2 ? bits_spared : bits_spared / 2;
    CHECK(8 * size + at_least * from.cache.values() < 8 * bytes);
  }
}

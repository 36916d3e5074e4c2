// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "codec_under_test.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr std::uint16_t untouched = 0x33;

template <class T>
error error_of(const result<T>& outcome) {
  REQUIRE(!outcome);
  return outcome.error();
}
template <class T>
error_code code_of(const result<T>& outcome) {
  return error_of(outcome).code;
}

/// Whether `decoded` holds the values of `from` in the ranges and nothing new elsewhere.
bool holds_just(bits_cache& decoded, const bits_cache& from, index_range layers, index_range tokens) {
  bool right = true;
  decoded.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part part, std::uint64_t token, std::size_t channel) {
    const bool wanted = layer >= layers.begin && layer < layers.end && token >= tokens.begin && token < tokens.end;
    const std::uint16_t expected =
        wanted ? from.part(layer, part)[static_cast<std::size_t>(token) * from.shape.layer(layer).channels(part) + channel] : untouched;
    right = right && bits == expected;
  });
  return right;
}

/// A stream of bands of 32 tokens and two chunks in each; a short band may need one only.
struct sample {
  prepared by;
  example from;
  std::vector<std::byte> stream;

  /// Chunks hold at most `channels` channels: the first two layers.
  explicit sample(const codec_under_test& codec, std::uint64_t tokens = 70,
                  const cache_shape& shape = make_shape({{1, 4, 2}, {2, 2, 0}, {1, 3, 3}}), std::uint32_t channels = 10)
      : by(codec, shape),
        from(make_example(shape, tokens, codec.format(), 2)),
        stream(by.encode(from, {.options = {.chunks = {.tokens_per_chunk = 32, .values_per_chunk = channels * 32}}})) {}
};

}  // namespace

TEST_CASE("stream_decoder: any range of layers and tokens decodes alone and touches nothing else") {
  for (const codec_under_test* const codec :
       {&codec_for(number_format::bfloat16, codec_kind::channel_mean), &codec_for(number_format::float8_e4m3, codec_kind::external),
        &codec_for(number_format::bfloat16, codec_kind::cross_layer),
        &codec_for(number_format::float8_e4m3, codec_kind::cross_layer_external)}) {
    const sample all(*codec, 41);
    const auto decoder = all.by.ready->open(all.stream);
    REQUIRE(decoder);
    REQUIRE((*decoder)->chunks().size() == 3);  // two in the full band, one in the short one
    for (std::uint64_t layer = 0; layer <= 3; ++layer) {
      for (std::uint64_t layer_end = layer; layer_end <= 3; ++layer_end) {
        for (std::uint64_t token = 0; token <= 41; ++token) {
          for (std::uint64_t token_end = token; token_end <= 41; ++token_end) {
            bits_cache decoded(all.from.cache.shape, 41, untouched);
            const index_range layers{layer, layer_end};
            const index_range tokens{token, token_end};
            REQUIRE((*decoder)->decode({layers, tokens, {0, 41}}, decoded, all.by.prediction_of(all.from)));
            if (!holds_just(decoded, all.from.cache, layers, tokens))
              FAIL("layers ", layer, "-", layer_end, " tokens ", token, "-", token_end);
          }
        }
      }
    }
  }
}

TEST_CASE("stream_decoder: needs no more of the cache and the prediction than the tokens it is asked for and their chunks") {
  for (const codec_kind kind : {codec_kind::external, codec_kind::cross_layer_external}) {
    const sample all(codec_for(number_format::bfloat16, kind));
    const auto decoder = all.by.ready->open(all.stream);
    REQUIRE(decoder);
    CHECK((*decoder)->covering_tokens({40, 41}) == index_range{32, 64});
    CHECK((*decoder)->covering_tokens({31, 33}) == index_range{0, 64});
    CHECK((*decoder)->covering_tokens({0, 70}) == index_range{0, 70});
    for (const layout how : {layout::nhd, layout::hnd}) {
      bits_cache decoded(all.from.cache.shape, 70, untouched);
      REQUIRE((*decoder)->decode({{1, 2}, {40, 45}, {40, 45}, how}, decoded, source(all.from.prediction, index_range{32, 64})));
      CHECK(holds_just(decoded, all.from.cache, {1, 2}, {40, 45}));
    }
    bits_cache decoded(all.from.cache.shape, 70, untouched);
    for (const index_range covered : {index_range{33, 64}, index_range{32, 63}, index_range{40, 45}}) {
      const error refused = error_of((*decoder)->decode({{1, 2}, {40, 45}, {40, 45}}, decoded, source(all.from.prediction, covered)));
      CHECK(refused.code == error_code::out_of_range);
      CHECK(refused.token == 32);
    }
    CHECK(holds_just(decoded, all.from.cache, {0, 0}, {0, 0}));
  }
}

TEST_CASE("stream_decoder: any token range of a stream of very many chunks") {
  for (const codec_kind kind : {codec_kind::channel_mean, codec_kind::cross_layer}) {
    constexpr std::uint64_t tokens = 240;
    const codec_under_test& codec = codec_for(number_format::bfloat16, kind);
    const prepared by(codec, tiny_shape());
    const example from = make_example(tiny_shape(), tokens, codec.format(), 2);
    byte_collector sink;
    const auto encoder = by.ready->begin(sink, {.options = {.chunks = {.tokens_per_chunk = 256, .values_per_chunk = 1}}});
    REQUIRE(encoder);
    // Bands of one to three tokens, two chunks in each.
    std::vector<index_range> band_of;
    for (std::uint64_t end = 1; band_of.size() < tokens; end += 1 + end % 3) {
      const index_range band{band_of.size(), std::min(end, tokens)};
      REQUIRE((*encoder)->append(source(from.cache, band)));
      for (std::uint64_t t = band.begin; t < band.end; ++t) band_of.push_back(band);
    }
    REQUIRE((*encoder)->finish());
    const auto decoder = by.ready->open(sink.bytes);
    REQUIRE(decoder);
    CHECK((*decoder)->chunks().size() > 2 * tokens / 3);
    for (std::uint64_t begin = 0; begin <= tokens; ++begin) {
      for (std::uint64_t end = begin; end <= tokens; ++end) {
        const index_range expected =
            begin == end ? index_range{begin, end}
                         : index_range{band_of[static_cast<std::size_t>(begin)].begin, band_of[static_cast<std::size_t>(end - 1)].end};
        if ((*decoder)->covering_tokens({begin, end}) != expected) FAIL("tokens ", begin, "-", end);
        if (end - begin > 4 && (begin % 40 != 7 || end % 40 != 9)) continue;
        bits_cache decoded(tiny_shape(), tokens, untouched);
        const index_range layers{begin % 2, 2};
        REQUIRE((*decoder)->decode({layers, {begin, end}, {0, tokens}}, decoded));
        if (!holds_just(decoded, from.cache, layers, {begin, end})) FAIL("tokens ", begin, "-", end);
      }
    }
    // What lies outside the stream is covered by nothing.
    CHECK((*decoder)->covering_tokens({tokens, tokens + 5}) == index_range{tokens, tokens + 5});
    CHECK((*decoder)->covering_tokens({9, 5}) == index_range{9, 5});
  }
}

TEST_CASE("stream_decoder: an empty range needs no chunk") {
  for (const codec_kind kind : all_kinds) {
    sample all(codec_for(number_format::bfloat16, kind));
    const auto opened = all.by.ready->open(all.stream);
    REQUIRE(opened);
    // Damage in every chunk.
    for (const chunk_record& record : (*opened)->chunks())
      all.stream[static_cast<std::size_t>((*opened)->chunks()[0].offset + record.offset) + 300] ^= std::byte{1};
    bits_cache decoded(all.from.cache.shape, 70, untouched);
    CHECK((*opened)->decode({{0, 3}, {40, 40}, {0, 70}}, decoded));
    CHECK((*opened)->decode({{1, 1}, {10, 50}, {0, 70}}, decoded));
    CHECK((*opened)->decode({{3, 3}, {70, 70}, {70, 70}}, decoded));
    CHECK((*opened)->covering_tokens({40, 40}) == index_range{40, 40});
    CHECK(holds_just(decoded, all.from.cache, {0, 0}, {0, 0}));
  }
}

TEST_CASE("stream_decoder: refuses what the stream does not hold") {
  const sample all(codec_for(number_format::bfloat16, codec_kind::channel_mean));
  const auto decoder = all.by.ready->open(all.stream);
  REQUIRE(decoder);
  bits_cache decoded(all.from.cache.shape, 80, untouched);
  constexpr std::uint64_t most = ~std::uint64_t{0};
  const decode_call calls[] = {
      {{0, 4}, {0, 70}, {0, 80}},   {{2, 1}, {0, 70}, {0, 80}},  {{0, most}, {0, 70}, {0, 80}}, {{0, 3}, {0, 71}, {0, 80}},
      {{0, 3}, {5, 4}, {0, 80}},    {{0, 3}, {71, 71}, {0, 80}}, {{0, 3}, {0, most}, {0, 80}},  {{0, 3}, {most, most}, {0, 80}},
      {{0, 3}, {10, 70}, {11, 80}}, {{0, 3}, {10, 70}, {0, 69}},
  };
  for (const decode_call& call : calls) CHECK(code_of((*decoder)->decode(call, decoded)) == error_code::out_of_range);
  CHECK(holds_just(decoded, all.from.cache, {0, 0}, {0, 0}));
}

TEST_CASE("stream_decoder: refuses caches and predictions of another shape and names the layer") {
  const sample all(codec_for(number_format::bfloat16, codec_kind::external));
  const auto decoder = all.by.ready->open(all.stream);
  REQUIRE(decoder);
  bits_cache other(make_shape({{1, 4, 2}, {1, 4, 0}, {1, 3, 3}}), 70, untouched);
  bits_cache decoded(all.from.cache.shape, 70, untouched);
  bits_cache fewer(make_shape({{1, 4, 2}, {2, 2, 0}}), 70, untouched);
  const error wrong_cache = error_of((*decoder)->decode({{0, 3}, {0, 70}, {0, 70}}, other, source(all.from.prediction)));
  CHECK(wrong_cache.code == error_code::shape_mismatch);
  CHECK(wrong_cache.layer == 1);
  const error wrong_prediction = error_of((*decoder)->decode({{0, 3}, {0, 70}, {0, 70}}, decoded, source(other)));
  CHECK(wrong_prediction.code == error_code::shape_mismatch);
  CHECK(wrong_prediction.layer == 1);
  CHECK(code_of((*decoder)->decode({{0, 2}, {0, 70}, {0, 70}}, fewer, source(all.from.prediction))) == error_code::shape_mismatch);
}

TEST_CASE("stream_decoder: refuses a workspace that is too small") {
  for (const codec_kind kind : {codec_kind::channel_mean, codec_kind::cross_layer}) {
    const sample all(codec_for(number_format::bfloat16, kind));
    const auto decoder = all.by.ready->open(all.stream);
    REQUIRE(decoder);
    const std::size_t needed = (*decoder)->workspace_bytes();
    CHECK(needed < 20000);
    bits_cache decoded(all.from.cache.shape, 70, untouched);
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, needed / 2, needed - 128})
      CHECK(code_of((*decoder)->decode({{0, 3}, {0, 70}, {0, 70}, layout::nhd, bytes}, decoded)) == error_code::workspace_too_small);
    CHECK(holds_just(decoded, all.from.cache, {0, 0}, {0, 0}));
  }
}

TEST_CASE("stream_decoder: a missing prediction is named, chunks that need none decode without") {
  for (const codec_under_test* const codec : all_codecs()) {
    if (!codec->needs_prediction()) continue;
    const sample all(*codec);
    const auto decoder = all.by.ready->open(all.stream);
    REQUIRE(decoder);
    bits_cache decoded(all.from.cache.shape, 70, untouched);
    const error missing = error_of((*decoder)->decode({{1, 3}, {40, 70}, {0, 70}}, decoded));
    CHECK(missing.code == error_code::prediction_missing);
    CHECK(missing.layer == 0);  // first layer and token of the first chunk touched
    CHECK(missing.token == 32);
    CHECK(holds_just(decoded, all.from.cache, {0, 0}, {0, 0}));
  }
}

TEST_CASE("stream_decoder: a prediction that differs in any one bit is noticed before anything is written") {
  for (const codec_under_test* const codec :
       {&codec_for(number_format::bfloat16, codec_kind::external), &codec_for(number_format::float8_e5m2, codec_kind::external),
        &codec_for(number_format::bfloat16, codec_kind::cross_layer_external),
        &codec_for(number_format::float8_e4m3, codec_kind::cross_layer_external)}) {
    const sample all(*codec, 64, mixed_shape(), 39);
    const auto decoder = all.by.ready->open(all.stream);
    REQUIRE(decoder);
    random_integers random(4);
    example changed = all.from;
    bits_cache decoded(mixed_shape(), 64, untouched);
    changed.prediction.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part, std::uint64_t token, std::size_t) {
      if (token % 8 != 3 || random.below(4) != 0) return;
      const std::uint16_t kept = bits;
      bits = static_cast<std::uint16_t>(bits ^ (1U << random.below(16)));
      const error mismatch = error_of((*decoder)->decode_all(decoded, source(changed.prediction)));
      CHECK(mismatch.code == error_code::prediction_mismatch);
      const std::uint64_t first_token = token / 32 * 32;
      const std::uint64_t first_layer = layer == 2 ? 2 : 0;
      CHECK(mismatch.token == static_cast<std::int64_t>(first_token));
      CHECK(mismatch.layer == static_cast<std::int64_t>(first_layer));
      // What came before that chunk is in place, and nothing else.
      bits_cache expected(mixed_shape(), 64, untouched);
      if (first_token == 32) REQUIRE((*decoder)->decode({{0, 3}, {0, 32}, {0, 64}}, expected, source(all.from.prediction)));
      if (first_layer == 2)
        REQUIRE((*decoder)->decode({{0, 2}, {first_token, first_token + 32}, {0, 64}}, expected, source(all.from.prediction)));
      CHECK(decoded == expected);
      decoded = bits_cache(mixed_shape(), 64, untouched);
      bits = kept;
    });
  }
}

TEST_CASE("stream_decoder: opens only streams of its codec and profile") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, codec_kind::channel_mean);
  const prepared by(codec, tiny_shape());
  const std::vector<std::byte> stream = by.encode(make_example(tiny_shape(), 40, codec.format(), 2));

  SUBCASE("another calibration") {
    const prepared other(codec, tiny_shape(), {}, 301);
    CHECK(code_of(other.ready->open(stream)) == error_code::profile_mismatch);
  }
  SUBCASE("another shape") {
    const prepared other(codec, make_shape({{1, 4, 2}, {2, 2, 1}}));
    const error wrong = error_of(other.ready->open(stream));
    CHECK(wrong.code == error_code::shape_mismatch);
    CHECK(wrong.layer == 1);
    const prepared more(codec, make_shape({{1, 4, 2}, {2, 2, 0}, {1, 1, 1}}));
    CHECK(code_of(more.ready->open(stream)) == error_code::shape_mismatch);
  }
  SUBCASE("another number format") {
    for (const number_format format : all_formats) {
      if (format == codec.format()) continue;
      const prepared other(codec_for(format, codec_kind::channel_mean), tiny_shape());
      CHECK(code_of(other.ready->open(stream)) == error_code::dtype_mismatch);
    }
  }
  SUBCASE("another predictor, although the profile serves both") {
    for (const codec_kind kind : {codec_kind::external, codec_kind::cross_layer, codec_kind::cross_layer_external}) {
      const prepared both(codec_for(number_format::bfloat16, kind), tiny_shape());
      const auto without = codec.parse(both.profile);
      REQUIRE(without);
      CHECK((*without)->hash() == both.ready->hash());
      const example from = make_example(tiny_shape(), 40, codec.format(), 2);
      CHECK(code_of((*without)->open(both.encode(from))) == error_code::unsupported);
      const auto alone = (*without)->encode(from.cache);
      REQUIRE(alone);
      CHECK(code_of(both.ready->open(*alone)) == error_code::unsupported);
      bits_cache decoded(tiny_shape(), 40);
      REQUIRE((*(*without)->open(*alone))->decode_all(decoded));
      CHECK(decoded == from.cache);
    }
  }
  SUBCASE("a profile is no stream") { CHECK(code_of(by.ready->open(by.profile)) == error_code::corrupt); }
}

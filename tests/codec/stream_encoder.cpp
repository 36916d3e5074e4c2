// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/codec/codec.hpp>

#include "codec_under_test.hpp"
#include "hand_made_maps.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

template <class T>
error_code code_of(const result<T>& outcome) {
  REQUIRE(!outcome);
  return outcome.error().code;
}

/// Chunks of 32 tokens, so that short caches have several.
const encoder_options small_chunks{.chunks = {.tokens_per_chunk = 32, .values_per_chunk = 1000}};

optional_source part_of(const optional_source& all, index_range tokens) {
  return all ? optional_source(source(*all->cache, tokens)) : std::nullopt;
}

bits_cache decode(const prepared& by, const std::vector<std::byte>& stream, const example& from) {
  const auto decoder = by.ready->open(stream);
  REQUIRE(decoder);
  bits_cache decoded(from.cache.shape, (*decoder)->tokens(), 0x3333);
  const auto done = (*decoder)->decode_all(decoded, by.prediction_of(from));
  REQUIRE_MESSAGE(done, done.error().message());
  return decoded;
}

/// A profile for another shape; maps look back as far as they can, and have the rank 1.
profile_data stretched(profile_data data, const cache_shape& shape) {
  data.shape = shape;
  for (model_parameters& model : data.models) {
    model.sigmas.assign(static_cast<std::size_t>(shape.channels()), 0);
    if (!model.means.empty()) model.means.assign(static_cast<std::size_t>(shape.channels()), 0);
    model.tile_tables.assign(count_tiles(shape) * data.tile_contexts, 0);
    if (model.maps.empty()) continue;
    layer_maps maps;
    maps.layers_back = layer_maps::most_layers_back;
    maps.rank = 1;
    model.maps = make_maps(shape, data.rotation, maps, [](std::size_t) { return std::int8_t{0}; });
  }
  return data;
}

// Two encoders of one stream would each write an index of their own.
using any_encoder = stream_encoder<plain_codec_without_model<bf16>, byte_collector>;
static_assert(!std::is_copy_constructible_v<any_encoder> && !std::is_copy_assignable_v<any_encoder>);
static_assert(std::is_move_constructible_v<any_encoder> && std::is_move_assignable_v<any_encoder>);

std::vector<const codec_under_test*> some_codecs() {
  return {&codec_for(number_format::bfloat16, codec_kind::channel_mean), &codec_for(number_format::float8_e4m3, codec_kind::external),
          &codec_for(number_format::float8_e4m3, codec_kind::cross_layer),
          &codec_for(number_format::bfloat16, codec_kind::cross_layer_external)};
}

}  // namespace

TEST_CASE("stream_encoder: appending in pieces decodes to the same, and to the same bytes if they end where chunks do") {
  for (const codec_under_test* const codec : some_codecs()) {
    const prepared by(*codec, mixed_shape());
    const example from = make_example(mixed_shape(), 150, codec->format(), 2);
    const encoder_call call{.options = small_chunks};
    const std::vector<std::byte> whole = by.encode(from, call);
    struct {
      std::vector<std::uint64_t> ends;
      bool same_bytes;
    } const cases[] = {
        {{150}, true},        {{32, 64, 96, 128, 150}, true},      {{64, 128, 150}, true}, {{0, 0, 96, 150, 150}, true},
        {{1, 2, 150}, false}, {{31, 33, 70, 71, 149, 150}, false}, {{100, 150}, false},
    };
    for (const auto& [ends, same_bytes] : cases) {
      byte_collector sink;
      const auto encoder = by.ready->begin(sink, call);
      REQUIRE(encoder);
      std::uint64_t begin = 0;
      for (const std::uint64_t end : ends) {
        // Now and then a view that starts earlier than needed.
        const index_range tokens{begin / 2, end};
        REQUIRE((*encoder)->append(source(from.cache, tokens), part_of(by.prediction_of(from), tokens)));
        CHECK((*encoder)->tokens() == end);
        begin = end;
      }
      REQUIRE((*encoder)->finish());
      CHECK((sink.bytes == whole) == same_bytes);
      CHECK(decode(by, sink.bytes, from) == from.cache);
    }
  }
}

TEST_CASE("stream_encoder: resuming a finished stream replaces its end") {
  for (const codec_under_test* const codec : some_codecs()) {
    const prepared by(*codec, mixed_shape());
    const example from = make_example(mixed_shape(), 150, codec->format(), 3);
    const encoder_call call{.options = small_chunks};
    const std::vector<std::byte> whole = by.encode(from, call);
    for (const std::uint64_t first : {0U, 1U, 32U, 64U, 100U, 150U}) {
      CAPTURE(first);
      const auto begin = by.ready->encode(source(from.cache, index_range{0, first}), part_of(by.prediction_of(from), {0, first}), call);
      REQUIRE(begin);
      byte_collector sink;
      const auto encoder = by.ready->resume(sink, *begin, call);
      REQUIRE(encoder);
      CHECK((*encoder)->tokens() == first);
      const auto kept = static_cast<std::ptrdiff_t>((*encoder)->resume_offset());
      CHECK(sink.bytes.empty());
      // All that is cut off are the index, the table of three sections and the footer.
      CHECK(begin->size() - static_cast<std::size_t>(kept) == 8 + (*encoder)->chunks().size() * 40 + 3 * 32 + 32);
      REQUIRE((*encoder)->append(source(from.cache, index_range{first, 150}), part_of(by.prediction_of(from), {first, 150})));
      REQUIRE((*encoder)->finish());
      std::vector<std::byte> stream(begin->begin(), begin->begin() + kept);
      stream.insert(stream.end(), sink.bytes.begin(), sink.bytes.end());
      CHECK(decode(by, stream, from) == from.cache);
      CHECK((stream == whole) == (first % 32 == 0 || first == 150));
    }
  }
}

TEST_CASE("stream_encoder: resuming keeps the storage scales") {
  const codec_under_test& codec = codec_for(number_format::float8_e4m3, codec_kind::channel_mean);
  const prepared by(codec, tiny_shape());
  const example from = make_example(tiny_shape(), 40, codec.format(), 3);
  const std::vector<std::uint32_t> scales{0x3f800000U, 0x3e000001U, 0x40490fdbU};
  const auto begin = by.ready->encode(source(from.cache, index_range{0, 20}), {}, {.scales = scales});
  REQUIRE(begin);
  byte_collector sink;
  const auto encoder = by.ready->resume(sink, *begin);
  REQUIRE(encoder);
  std::vector<std::byte> stream(begin->begin(), begin->begin() + static_cast<std::ptrdiff_t>((*encoder)->resume_offset()));
  REQUIRE((*encoder)->append(source(from.cache, index_range{20, 40})));
  REQUIRE((*encoder)->finish());
  stream.insert(stream.end(), sink.bytes.begin(), sink.bytes.end());
  const auto decoder = by.ready->open(stream);
  REQUIRE(decoder);
  CHECK((*decoder)->header().storage_scales == scales);
  CHECK(decode(by, stream, from) == from.cache);
}

TEST_CASE("stream_encoder: token ids are carried along") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, codec_kind::cross_layer);
  const prepared by(codec, tiny_shape());
  const example from = make_example(tiny_shape(), 40, codec.format(), 3);
  const std::vector<std::byte> bare = by.encode(from);
  CHECK((*by.ready->open(bare))->token_ids().empty());
  for (const std::uint32_t largest : {0U, 1U, 255U, 256U, 65535U, 65536U, (1U << 24) - 1, 1U << 24, ~0U}) {
    CAPTURE(largest);
    std::vector<std::uint32_t> ids(40, largest / 2);
    ids[7] = largest;
    ids[39] = 0;
    const std::vector<std::byte> stream = by.encode(from, {.token_ids = ids});
    const auto decoder = by.ready->open(stream);
    REQUIRE(decoder);
    CHECK(std::ranges::equal((*decoder)->token_ids(), ids));
    CHECK(decode(by, stream, from) == from.cache);
    const std::size_t bytes = largest < 256 ? 1 : largest < 65536 ? 2 : largest < 1U << 24 ? 3 : 4;
    CHECK(stream.size() == bare.size() + 32 + 4 + 40 * bytes);  // with an entry of the section table

    // Who resumes hands over all of them or none.
    byte_collector sink;
    const auto encoder = by.ready->resume(sink, stream);
    REQUIRE(encoder);
    CHECK((*encoder)->resume_offset() == (*by.ready->resume(sink, bare))->resume_offset());
    REQUIRE((*encoder)->finish());
    std::vector<std::byte> resumed(stream.begin(),
                                   stream.begin() + static_cast<std::ptrdiff_t>((*by.ready->resume(sink, bare))->resume_offset()));
    resumed.insert(resumed.end(), sink.bytes.begin(), sink.bytes.end());
    CHECK(resumed == bare);
  }
  byte_collector sink;
  const auto encoder = by.ready->begin(sink);
  REQUIRE(encoder);
  REQUIRE((*encoder)->append(from.cache));
  const std::vector<std::uint32_t> ids(41, 5);
  for (const std::size_t count : {1U, 39U, 41U})
    CHECK(code_of((*encoder)->finish(std::span(ids).first(count))) == error_code::shape_mismatch);
  REQUIRE((*encoder)->finish(std::span(ids).first(40)));
  CHECK((*by.ready->open(sink.bytes))->token_ids().size() == 40);
  // No tokens, no ids.
  const auto none = by.ready->encode(source(from.cache, index_range{0, 0}));
  REQUIRE(none);
  CHECK((*by.ready->open(*none))->token_ids().empty());
}

TEST_CASE("stream_encoder: chunks are cut as the options say") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, codec_kind::channel_mean);
  const prepared by(codec, mixed_shape());  // 32, 7 and 27 channels
  const example from = make_example(mixed_shape(), 100, codec.format(), 4);
  const auto chunks_with = [&](chunk_options options) {
    const std::vector<std::byte> stream = by.encode(from, {.options = {.chunks = options}});
    const auto decoder = by.ready->open(stream);
    REQUIRE(decoder);
    CHECK(decode(by, stream, from) == from.cache);
    std::vector<std::string> places;
    for (const chunk_record& record : (*decoder)->chunks()) {
      places.push_back(std::to_string(record.layer_begin) + "+" + std::to_string(record.layer_count) + " " +
                       std::to_string(record.token_begin) + "+" + std::to_string(record.token_count));
    }
    return places;
  };
  using places = std::vector<std::string>;
  CHECK(chunks_with({}) == places{"0+3 0+100"});
  CHECK(chunks_with({.tokens_per_chunk = 64}) == places{"0+3 0+64", "0+3 64+36"});
  CHECK(chunks_with({.tokens_per_chunk = 33}) == places{"0+3 0+64", "0+3 64+36"});
  CHECK(chunks_with({.tokens_per_chunk = 96, .values_per_chunk = 39 * 96}) == places{"0+2 0+96", "2+1 0+96", "0+3 96+4"});
  CHECK(chunks_with({.tokens_per_chunk = 96, .values_per_chunk = 39 * 96 - 1}) == places{"0+1 0+96", "1+2 0+96", "0+3 96+4"});
  CHECK(chunks_with({.tokens_per_chunk = 128, .values_per_chunk = 0}) == places{"0+1 0+100", "1+1 0+100", "2+1 0+100"});
  CHECK(chunks_with({.tokens_per_chunk = 0}).size() == 4);
  CHECK(chunks_with({.tokens_per_chunk = 0xffffffffU, .values_per_chunk = 0xffffffffU}) == places{"0+3 0+100"});
}

TEST_CASE("stream_encoder: no workspace exceeds 64 MiB, with maps 192 MiB") {
  for (const codec_kind kind : all_kinds) {
    const codec_under_test& codec = codec_for(mapped_float16, kind);
    const profile_data tiny = parse_profile(prepared(codec, tiny_shape()).profile)->data;
    for (const cache_shape& shape : {tiny_shape(), *cache_shape::uniform(1, {1, 1, 0}), *cache_shape::uniform(80, {8, 128, 128}),
                                     *cache_shape::uniform(3, {256, 128, 128}), *cache_shape::uniform(500, {1, 576, 0})}) {
      const auto made = codec.make(stretched(tiny, shape), 1);
      REQUIRE(made);
      for (const chunk_options options : {chunk_options{}, chunk_options{1, 1}, chunk_options{0xffffffffU, 0xffffffffU}})
        CHECK((*made)->encoder_workspace_bytes(options) <= std::size_t{is_mapped(kind) ? 192U : 64U} << 20);
    }
  }
}

TEST_CASE("stream_encoder: a workspace one byte short is refused") {
  for (const codec_under_test* const codec : some_codecs()) {
    const prepared by(*codec, mixed_shape());
    const std::size_t needed = by.ready->encoder_workspace_bytes(small_chunks.chunks);
    byte_collector sink;
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, needed - 128})
      CHECK(code_of(by.ready->begin(sink, {.options = small_chunks, .workspace_bytes = bytes})) == error_code::workspace_too_small);
    CHECK(by.ready->begin(sink, {.options = small_chunks, .workspace_bytes = needed}));
  }
}

TEST_CASE("stream_encoder: storage scales come back to the bit, whatever they are") {
  const std::vector<std::uint32_t> odd{
      std::bit_cast<std::uint32_t>(0.0F),
      std::bit_cast<std::uint32_t>(-0.0F),
      std::bit_cast<std::uint32_t>(-3.5F),
      0x7f800000U,
      0xff800000U,
      0x7fc12345U,
      0x7f800001U,
      0x00000001U,
      0x007fffffU,
      0x00800000U,
      0x7f7fffffU,
      std::bit_cast<std::uint32_t>(0.0123F),
  };
  for (const number_format format : {number_format::float8_e4m3, number_format::float8_e5m2}) {
    for (const codec_kind kind : kinds_of(format)) {
      const prepared by(codec_for(format, kind), tiny_shape());
      const example from = make_example(tiny_shape(), 40, format, 5);
      for (std::size_t i = 0; i < odd.size(); ++i) {
        const std::vector<std::uint32_t> scales{odd[i], odd[(i + 5) % odd.size()], odd[(i + 7) % odd.size()]};
        const std::vector<std::byte> stream = by.encode(from, {.scales = scales});
        const auto decoder = by.ready->open(stream);
        REQUIRE(decoder);
        CHECK((*decoder)->header().storage_scales == scales);
        CHECK(decode(by, stream, from) == from.cache);
      }
      CHECK((*by.ready->open(by.encode(from)))->header().storage_scales.empty());
    }
  }
}

TEST_CASE("stream_encoder: predictions are in real units, so a scale changes little") {
  for (const number_format format : {number_format::float8_e4m3, number_format::float8_e5m2}) {
    for (const codec_kind kind : kinds_of(format)) {
      const codec_under_test& codec = codec_for(format, kind);
      CAPTURE(codec.name());
      const auto size_with = [&](float scale) {
        const std::vector<std::uint32_t> scales(5, std::bit_cast<std::uint32_t>(scale));
        const std::vector<example> examples{make_example(mixed_shape(), 300, format, 6, scale)};
        const prepared by(codec, examples, {}, scales);
        const example from = make_example(mixed_shape(), 300, format, 7, scale);
        const std::vector<std::byte> stream = by.encode(from, {.scales = scales});
        CHECK(decode(by, stream, from) == from.cache);
        return static_cast<double>(stream.size());
      };
      const double plain = size_with(1);
      CHECK(size_with(0.25F) == plain);
      // Offsets between neighbouring numbers are others then, for which so short a calibration finds other tables.
      const double tolerance = codec.needs_prediction() ? 0.35 : 0.02;
      CHECK(size_with(0.0371F) == doctest::Approx(plain).epsilon(tolerance));
      CHECK(size_with(771) == doctest::Approx(plain).epsilon(tolerance));
    }
  }
}

TEST_CASE("stream_encoder: refuses scales that do not fit") {
  byte_collector sink;
  const std::vector<std::uint32_t> scales(6, 0x3f800000U);
  for (const codec_under_test* const codec : most_codecs()) {
    const prepared by(*codec, mixed_shape(), {}, 32);  // five tensors
    const bool is_fp8 = bytes_of(codec->format()) == 1;
    for (const std::size_t count : {1U, 4U, 6U}) {
      const auto refused = by.ready->begin(sink, {.scales = std::span(scales).first(count)});
      CHECK(code_of(refused) == (is_fp8 ? error_code::shape_mismatch : error_code::invalid_argument));
    }
    const auto five = by.ready->begin(sink, {.scales = std::span(scales).first(5)});
    CHECK(static_cast<bool>(five) == is_fp8);
    if (!is_fp8) CHECK(code_of(five) == error_code::invalid_argument);
  }
}

TEST_CASE("stream_encoder: refuses caches and predictions that do not fit, and goes on") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, codec_kind::external);
  const prepared by(codec, mixed_shape());
  const example from = make_example(mixed_shape(), 60, codec.format(), 8);
  const example other = make_example(make_shape({{2, 6, 10}, {1, 7, 0}, {3, 4, 5}}), 60, codec.format(), 8);
  const example fewer = make_example(make_shape({{2, 6, 10}, {1, 7, 0}}), 60, codec.format(), 8);
  byte_collector sink;
  const auto encoder = by.ready->begin(sink, {.options = small_chunks});
  REQUIRE(encoder);
  REQUIRE((*encoder)->append(source(from.cache, index_range{0, 40}), source(from.prediction, index_range{0, 40})));
  const std::size_t calls = sink.calls;
  const auto refused = [&](const source& cache, const source& prediction) {
    const auto appended = (*encoder)->append(cache, prediction);
    REQUIRE(!appended);
    return appended.error();
  };
  const error wrong_shape = refused(other.cache, from.prediction);
  CHECK(wrong_shape.code == error_code::shape_mismatch);
  CHECK(wrong_shape.layer == 2);
  const error wrong_prediction = refused(from.cache, other.prediction);
  CHECK(wrong_prediction.code == error_code::shape_mismatch);
  CHECK(wrong_prediction.layer == 2);
  CHECK(refused(fewer.cache, from.prediction).code == error_code::shape_mismatch);
  const error gap = refused(source(from.cache, index_range{41, 60}), from.prediction);
  CHECK(gap.code == error_code::out_of_range);
  CHECK(gap.token == 40);
  CHECK(refused(source(from.cache, index_range{0, 39}), from.prediction).code == error_code::out_of_range);
  const error uncovered = refused(source(from.cache, index_range{40, 60}), source(from.prediction, index_range{41, 60}));
  CHECK(uncovered.code == error_code::out_of_range);
  CHECK(uncovered.token == 40);
  CHECK(refused(source(from.cache, index_range{40, 60}), source(from.prediction, index_range{40, 59})).code == error_code::out_of_range);
  // None of this has left a trace.
  CHECK(sink.calls == calls);
  REQUIRE((*encoder)->append(source(from.cache, index_range{40, 60}), source(from.prediction, index_range{40, 60})));
  REQUIRE((*encoder)->finish());
  CHECK(decode(by, sink.bytes, from) == from.cache);
}

TEST_CASE("stream_encoder: a sink that refuses any one call makes an error of it") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, codec_kind::external);
  const prepared by(codec, tiny_shape());
  const example from = make_example(tiny_shape(), 70, codec.format(), 9);
  const auto write_to = [&](byte_collector& sink) -> result<void> {
    const auto encoder = by.ready->begin(sink, {.options = small_chunks});
    if (!encoder) return encoder.error();
    const auto first = (*encoder)->append(source(from.cache, index_range{0, 40}), source(from.prediction, index_range{0, 40}));
    const auto second = (*encoder)->append(source(from.cache, index_range{0, 70}), source(from.prediction, index_range{0, 70}));
    const auto finished = (*encoder)->finish();
    // Once refused, the encoder never reports a success again.
    if (!first) CHECK((!second && !finished));
    if (!second) CHECK(!finished);
    return finished;
  };
  byte_collector willing;
  REQUIRE(write_to(willing));
  REQUIRE(willing.calls > 8);
  for (std::size_t call = 0; call < willing.calls; ++call) {
    CAPTURE(call);
    byte_collector refusing;
    refusing.refused_call = call;
    CHECK(code_of(write_to(refusing)) == error_code::output_failed);
    CHECK(!by.ready->open(refusing.bytes));
  }
  // The same when continuing.
  byte_collector rest;
  const auto again = by.ready->resume(rest, willing.bytes, {.options = small_chunks});
  REQUIRE(again);
  rest.refused_call = 0;
  CHECK(code_of((*again)->finish()) == error_code::output_failed);
}

TEST_CASE("stream_encoder: a finished stream takes nothing more") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, codec_kind::channel_mean);
  const prepared by(codec, tiny_shape());
  const example from = make_example(tiny_shape(), 40, codec.format(), 2);
  byte_collector sink;
  const auto encoder = by.ready->begin(sink);
  REQUIRE(encoder);
  REQUIRE((*encoder)->append(source(from.cache, index_range{0, 30})));
  REQUIRE((*encoder)->finish());
  const std::vector<std::byte> stream = sink.bytes;
  CHECK(code_of((*encoder)->append(from.cache)) == error_code::invalid_argument);
  CHECK(code_of((*encoder)->finish()) == error_code::invalid_argument);
  CHECK(sink.bytes == stream);
}

TEST_CASE("stream_encoder: resumes only what it could have written") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, codec_kind::channel_mean);
  const prepared by(codec, tiny_shape());
  const prepared other(codec, tiny_shape(), {}, 200);
  const std::vector<std::byte> stream = by.encode(make_example(tiny_shape(), 40, codec.format(), 2));
  byte_collector sink;
  CHECK(code_of(other.ready->resume(sink, stream)) == error_code::profile_mismatch);
  CHECK(code_of(by.ready->resume(sink, std::span(stream).first(stream.size() - 1))) == error_code::truncated);
  CHECK(code_of(by.ready->resume(sink, stream, {.workspace_bytes = 1000})) == error_code::workspace_too_small);
  CHECK(sink.calls == 0);
}

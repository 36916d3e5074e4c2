// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/codec/calibrate.hpp>
#include <kvexact/codec/codec.hpp>
#include <kvexact/prediction/closed_loop.hpp>

#include "codec_under_test.hpp"
#include "fake_engine.hpp"
#include "hand_made_maps.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr std::uint16_t untouched = 0x33;

template <class T>
error error_of(const result<T>& outcome) {
  REQUIRE(!outcome);
  return outcome.error();
}

/// Layers that differ, one without V; keys of four or more dimensions.
cache_shape loop_shape() { return make_shape({{2, 6, 5}, {1, 8, 0}, {2, 4, 7}, {3, 5, 4}}); }

struct loop_options {
  std::int64_t error = 6;        ///< of the copy's weights
  std::int64_t disturbance = 0;  ///< of its hidden states
  bool corrected = true;
  calibration_options calibration{};
  float storage_scale = 1;  ///< for fp8
  cache_shape shape = loop_shape();
  rotary rotation = make_rotary(rotary_pairing::half_split, 4);
};

/// A model, its copy, and a profile for the closed loop of both.
struct loop {
  loop_options options;
  fake_model target;
  fake_model copy;
  const codec_under_test* codec;
  std::vector<std::uint32_t> scales;
  profile_data data;
  std::vector<std::byte> profile;
  std::unique_ptr<ready_codec> ready;

  explicit loop(number_format format, const loop_options& given = {}, std::uint64_t tokens = 300)
      : options(given),
        target(given.shape, given.rotation, 5),
        copy(given.shape, given.rotation, 5, given.error),
        codec(&codec_for(format, codec_kind::closed_loop)),
        scales(bytes_of(format) == 1 ? count_tiles(given.shape) : 0, std::bit_cast<std::uint32_t>(given.storage_scale)) {
    std::vector<model_example> examples;
    std::vector<fake_engine> engines;
    for (const std::uint64_t seed : {11U, 12U}) examples.push_back(example_of(tokens, seed));
    for (const model_example& each : examples) engines.push_back(engine_for(each.ids, true));
    std::vector<calibration_input> inputs;
    for (std::size_t i = 0; i < examples.size(); ++i) inputs.push_back({examples[i].cache, engines[i], scales});
    auto made = codec->calibrate(options.shape, options.rotation, inputs, options.calibration);
    REQUIRE_MESSAGE(made, made.error().message());
    for (const fake_engine& engine : engines) CHECK(engine.misuses == 0);
    data = *std::move(made);
    profile = *serialize_profile(data);
    ready = *codec->parse(profile);
  }

  model_example example_of(std::uint64_t tokens, std::uint64_t seed) const {
    return {target, tokens, codec->format(), seed, bytes_of(codec->format()) == 1 ? options.storage_scale : 1};
  }
  fake_engine engine_for(const std::vector<std::uint32_t>& ids, bool teaches = false) const {
    fake_engine engine(copy, ids, options.corrected, teaches ? &target : nullptr);
    engine.disturbance = options.disturbance;
    return engine;
  }
  std::vector<std::byte> encode(const model_example& from, encoder_options how = {}) const {
    fake_engine engine = engine_for(from.ids);
    const auto stream = ready->encode(from.cache, engine, {.scales = scales, .options = how});
    REQUIRE_MESSAGE(stream, stream.error().message());
    CHECK(engine.misuses == 0);
    return *stream;
  }
};

/// Bands of 32 tokens, two layers a chunk or so.
const encoder_options small_chunks{.chunks = {.tokens_per_chunk = 32, .values_per_chunk = 32 * 40}};

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

}  // namespace

TEST_CASE("closed_loop: gives back every bit, and both sides ask the engine for the same") {
  for (const number_format format : mapped_formats) {
    for (const bool corrected : {true, false}) {
      const loop by(format, {.corrected = corrected});
      CAPTURE(by.codec->name());
      CHECK(by.data.models[0].maps.hidden_width == (corrected ? fake_model::width : 0));
      for (const std::uint64_t tokens : {0U, 1U, 31U, 32U, 33U, 100U, 256U, 300U}) {
        CAPTURE(tokens);
        const model_example from = by.example_of(tokens, 3);
        for (const encoder_options& how : {encoder_options{}, small_chunks}) {
          fake_engine writer = by.engine_for(from.ids);
          fake_engine reader = by.engine_for(from.ids);
          const auto stream = by.ready->encode(from.cache, writer, {.scales = by.scales, .options = how});
          REQUIRE(stream);
          const auto decoder = by.ready->open(*stream);
          REQUIRE(decoder);
          bits_cache decoded(by.options.shape, tokens, untouched);
          const auto done = (*decoder)->decode_all(decoded, reader);
          REQUIRE_MESSAGE(done, done.error().message());
          CHECK(decoded == from.cache);
          CHECK(writer.calls == reader.calls);
          CHECK(writer.misuses + reader.misuses == 0);
          CHECK(writer.tokens() == tokens);
          CHECK(reader.tokens() == tokens);
        }
      }
    }
  }
}

TEST_CASE("closed_loop: what is handed back matters, so a wrong bit of it would be noticed") {
  // Otherwise the tests here would show less than they seem to.
  const loop by(number_format::bfloat16);
  const model_example from = by.example_of(64, 3);
  fake_engine engine = by.engine_for(from.ids);
  REQUIRE(by.ready->encode(from.cache, engine, {.options = small_chunks}));
  model_example other = from;
  other.cache.part(0, cache_part::key)[7] ^= 0x20;
  fake_engine changed = by.engine_for(from.ids);
  REQUIRE(by.ready->encode(other.cache, changed, {.options = small_chunks}));
  REQUIRE(engine.calls.size() == changed.calls.size());
  std::size_t differing = 0;
  for (std::size_t i = 0; i < engine.calls.size(); ++i) differing += engine.calls[i] == changed.calls[i] ? 0U : 1U;
  CHECK(differing > 0);
}

TEST_CASE("closed_loop: in pieces, with one engine or several") {
  for (const number_format format : {mapped_float16, number_format::float8_e4m3}) {
    const loop by(format);
    const model_example from = by.example_of(150, 4);
    const std::vector<std::byte> whole = by.encode(from, small_chunks);
    struct {
      std::vector<std::uint64_t> ends;
      bool same_bytes;
    } const cases[] = {
        {{32, 64, 96, 128, 150}, true}, {{0, 64, 64, 128, 150}, true}, {{1, 2, 150}, false}, {{31, 33, 100, 149, 150}, false}};
    for (const auto& [ends, same_bytes] : cases) {
      fake_engine writer = by.engine_for(from.ids);
      byte_collector sink;
      const auto encoder = by.ready->begin(sink, {.scales = by.scales, .options = small_chunks});
      REQUIRE(encoder);
      for (const std::uint64_t end : ends) REQUIRE((*encoder)->append(source(from.cache, index_range{0, end}), writer));
      REQUIRE((*encoder)->finish());
      CHECK((sink.bytes == whole) == same_bytes);

      const auto decoder = by.ready->open(sink.bytes);
      REQUIRE(decoder);
      bits_cache decoded(by.options.shape, 150, untouched);
      fake_engine reader = by.engine_for(from.ids);
      REQUIRE((*decoder)->decode_all(decoded, reader));
      CHECK(decoded == from.cache);
      CHECK(reader.calls == writer.calls);

      // One engine, from chunk to chunk: it is never asked for anything twice.
      bits_cache again(by.options.shape, 150, untouched);
      fake_engine second = by.engine_for(from.ids);
      std::uint64_t begin = 0;
      while (begin < 150) {
        const std::uint64_t end = (*decoder)->covering_tokens({begin, begin + 1}).end;
        REQUIRE((*decoder)->decode({{0, 4}, {begin, end}, {begin, end}}, again, second));
        CHECK(second.tokens() == end);
        begin = end;
      }
      CHECK(again == from.cache);
      CHECK(second.calls == writer.calls);
      CHECK(writer.misuses + reader.misuses + second.misuses == 0);
    }
    // Resumed with an engine that has seen what is there: by decoding it.
    fake_engine engine = by.engine_for(from.ids);
    const auto start = by.ready->encode(source(from.cache, index_range{0, 64}), engine, {.scales = by.scales, .options = small_chunks});
    REQUIRE(start);
    byte_collector sink;
    const auto encoder = by.ready->resume(sink, *start, {.options = small_chunks});
    REQUIRE(encoder);
    std::vector<std::byte> stream(start->begin(), start->begin() + static_cast<std::ptrdiff_t>((*encoder)->resume_offset()));
    fake_engine caught_up = by.engine_for(from.ids);
    bits_cache first_part(by.options.shape, 64, untouched);
    REQUIRE((*by.ready->open(*start))->decode_all(first_part, caught_up));
    REQUIRE((*encoder)->append(from.cache, caught_up));
    REQUIRE((*encoder)->finish());
    stream.insert(stream.end(), sink.bytes.begin(), sink.bytes.end());
    CHECK(stream == whole);
  }
}

TEST_CASE("closed_loop: any prefix decodes alone, and any layers of it") {
  const loop by(number_format::bfloat16);
  const model_example from = by.example_of(100, 5);
  const std::vector<std::byte> stream = by.encode(from, small_chunks);
  const auto decoder = by.ready->open(stream);
  REQUIRE(decoder);
  for (const index_range layers : {index_range{0, 4}, index_range{0, 1}, index_range{2, 3}, index_range{3, 4}}) {
    for (const index_range tokens :
         {index_range{0, 1}, index_range{0, 32}, index_range{0, 33}, index_range{40, 41}, index_range{70, 100}, index_range{64, 96}}) {
      bits_cache decoded(by.options.shape, 100, untouched);
      fake_engine engine = by.engine_for(from.ids);
      REQUIRE((*decoder)->decode({layers, tokens, {0, 100}}, decoded, engine));
      CHECK(holds_just(decoded, from.cache, layers, tokens));
      CHECK(engine.tokens() == (*decoder)->covering_tokens(tokens).end);
      CHECK(engine.misuses == 0);
    }
  }
  // Nothing wanted, nothing done.
  for (const auto& [layers, tokens] : {std::pair{index_range{0, 4}, index_range{50, 50}}, {index_range{2, 2}, index_range{0, 100}}}) {
    bits_cache decoded(by.options.shape, 100, untouched);
    fake_engine engine = by.engine_for(from.ids);
    CHECK((*decoder)->decode({layers, tokens, {0, 100}}, decoded, engine));
    CHECK(engine.calls.empty());
    CHECK((*decoder)->decode({layers, tokens, {0, 100}}, decoded));
  }
}

TEST_CASE("closed_loop: an engine that stands at a wrong token is refused") {
  const loop by(number_format::bfloat16);
  const model_example from = by.example_of(100, 6);
  const std::vector<std::byte> stream = by.encode(from, small_chunks);
  const auto decoder = by.ready->open(stream);
  REQUIRE(decoder);
  fake_engine engine = by.engine_for(from.ids);
  bits_cache decoded(by.options.shape, 100, untouched);
  REQUIRE((*decoder)->decode({{0, 4}, {0, 64}, {0, 100}}, decoded, engine));
  const std::size_t calls = engine.calls.size();

  const error behind = error_of((*decoder)->decode({{0, 4}, {63, 100}, {0, 100}}, decoded, engine));
  CHECK(behind.code == error_code::out_of_range);
  CHECK(behind.token == 63);
  byte_collector sink;
  const auto encoder = by.ready->begin(sink, {.options = small_chunks});
  REQUIRE(encoder);
  const error ahead = error_of((*encoder)->append(from.cache, engine));
  CHECK(ahead.code == error_code::out_of_range);
  CHECK(ahead.token == 0);
  CHECK(engine.calls.size() == calls);

  // In the middle of a chunk: one that was advanced by another stream.
  fake_engine between = by.engine_for(from.ids);
  REQUIRE(by.ready->encode(source(from.cache, index_range{0, 40}), between, {.options = small_chunks}));
  bits_cache rest(by.options.shape, 100, untouched);
  const error middle = error_of((*decoder)->decode({{0, 4}, {50, 100}, {0, 100}}, rest, between));
  CHECK(middle.code == error_code::out_of_range);
  CHECK(middle.token == 32);
  CHECK(rest == bits_cache(by.options.shape, 100, untouched));

  // The first one goes on where it stands.
  REQUIRE((*decoder)->decode({{0, 4}, {64, 100}, {0, 100}}, decoded, engine));
  CHECK(decoded == from.cache);
}

TEST_CASE("closed_loop: errors of the engine are passed on, and it may try again") {
  const loop by(number_format::float8_e4m3);
  const model_example from = by.example_of(70, 7);
  const std::vector<std::byte> stream = by.encode(from, small_chunks);
  const auto decoder = by.ready->open(stream);
  REQUIRE(decoder);
  fake_engine counting = by.engine_for(from.ids);
  bits_cache all(by.options.shape, 70);
  REQUIRE((*decoder)->decode_all(all, counting));
  REQUIRE(counting.calls.size() == 3 * 9);
  for (std::size_t call = 0; call < counting.calls.size(); ++call) {
    CAPTURE(call);
    const std::uint64_t band = call / 9 * 32;
    {
      fake_engine engine = by.engine_for(from.ids);
      engine.failing_call = call;
      bits_cache decoded(by.options.shape, 70, untouched);
      const error failed = error_of((*decoder)->decode_all(decoded, engine));
      CHECK(failed.code == fake_engine::failure.code);
      CHECK(std::string_view(failed.what) == fake_engine::failure.what);
      CHECK(failed.token == static_cast<std::int64_t>(band));
      // Whole chunks before it are there, and no more: bands, and lower layers of this one.
      bits_cache expected(by.options.shape, 70, untouched);
      for (const chunk_record& record : (*decoder)->chunks()) {
        const bool before = record.token_begin < band || (record.token_begin == band && record.layer_begin < failed.layer);
        if (!before) continue;
        fake_engine helper = by.engine_for(from.ids);
        REQUIRE((*decoder)->decode({record.layers(), record.tokens(), {0, 70}}, expected, helper));
      }
      CHECK(decoded == expected);
      CHECK(engine.tokens() == band);
      REQUIRE((*decoder)->decode({{0, 4}, {band, 70}, {0, 70}}, decoded, engine));
      CHECK(decoded == from.cache);
      CHECK(engine.misuses == 0);
    }
    fake_engine engine = by.engine_for(from.ids);
    engine.failing_call = call;
    byte_collector sink;
    const auto encoder = by.ready->begin(sink, {.scales = by.scales, .options = small_chunks});
    REQUIRE(encoder);
    const error failed = error_of((*encoder)->append(from.cache, engine));
    CHECK(failed.code == fake_engine::failure.code);
    CHECK(std::string_view(failed.what) == fake_engine::failure.what);
    const std::size_t written = sink.bytes.size();
    if ((*encoder)->chunks().empty()) {
      // Nothing has happened: what is there, no tokens at all, is a stream.
      REQUIRE((*encoder)->finish());
      CHECK((*by.ready->open(sink.bytes))->tokens() == 0);
    } else {
      // Part of it is written, and cannot be taken back.
      CHECK(error_of((*encoder)->finish()).code == fake_engine::failure.code);
      fake_engine sound = by.engine_for(from.ids);
      CHECK(error_of((*encoder)->append(from.cache, sound)).code == fake_engine::failure.code);
      CHECK(sound.calls.empty());
      CHECK(sink.bytes.size() == written);
    }
    if (band > 0) continue;
    const auto again = by.ready->encode(from.cache, engine, {.scales = by.scales, .options = small_chunks});
    REQUIRE(again);
    CHECK(*again == stream);
  }
}

TEST_CASE("closed_loop: an engine that fails while a stream is continued") {
  const loop by(number_format::bfloat16);
  const model_example from = by.example_of(100, 7);
  fake_engine first = by.engine_for(from.ids);
  const auto start = by.ready->encode(source(from.cache, index_range{0, 32}), first, {.options = small_chunks});
  REQUIRE(start);
  const std::size_t calls = first.calls.size();
  for (const bool later : {false, true}) {
    fake_engine engine = by.engine_for(from.ids);
    REQUIRE(by.ready->encode(source(from.cache, index_range{0, 32}), engine, {.options = small_chunks}));
    // At once, or in the second band.
    engine.failing_call = calls + (later ? 9 : 0);
    byte_collector sink;
    const auto encoder = by.ready->resume(sink, *start, {.options = small_chunks});
    REQUIRE(encoder);
    CHECK(error_of((*encoder)->append(from.cache, engine)).code == fake_engine::failure.code);
    if (later) {
      CHECK(error_of((*encoder)->finish()).code == fake_engine::failure.code);
      continue;
    }
    REQUIRE((*encoder)->append(from.cache, engine));
    const auto kept = static_cast<std::ptrdiff_t>((*by.ready->resume(sink, *start))->resume_offset());
    REQUIRE((*encoder)->finish());
    std::vector<std::byte> stream(start->begin(), start->begin() + kept);
    stream.insert(stream.end(), sink.bytes.begin(), sink.bytes.end());
    CHECK(stream == by.encode(from, small_chunks));
  }
}

TEST_CASE("closed_loop: another engine is noticed before anything of the chunk is written") {
  for (const number_format format : {number_format::bfloat16, number_format::float8_e4m3}) {
    const loop by(format);
    const model_example from = by.example_of(100, 8);
    const std::vector<std::byte> stream = by.encode(from, small_chunks);
    const auto decoder = by.ready->open(stream);
    REQUIRE(decoder);
    const fake_model other(by.options.shape, by.options.rotation, 5, by.options.error + 1);
    fake_engine stranger(other, from.ids);
    bits_cache decoded(by.options.shape, 100, untouched);
    const error mismatch = error_of((*decoder)->decode_all(decoded, stranger));
    CHECK(mismatch.code == error_code::prediction_mismatch);
    CHECK(mismatch.layer == 0);
    CHECK(mismatch.token == 0);
    CHECK(decoded == bits_cache(by.options.shape, 100, untouched));
    CHECK(stranger.misuses == 0);  // it saw garbage, but finite one

    // Another prompt from token 40 on.
    std::vector<std::uint32_t> ids = from.ids;
    ids[40] += 1;
    fake_engine misled = by.engine_for(ids);
    const error later = error_of((*decoder)->decode_all(decoded, misled));
    CHECK(later.code == error_code::prediction_mismatch);
    CHECK(later.layer == 0);
    CHECK(later.token == 32);
    CHECK(holds_just(decoded, from.cache, {0, 4}, {0, 32}));
  }
}

TEST_CASE("closed_loop: whatever the cache holds, the engine sees finite numbers") {
  for (const number_format format : mapped_formats) {
    const loop by(format);
    CAPTURE(by.codec->name());
    random_integers random(10);
    for (const bool everywhere : {true, false}) {
      model_example from = by.example_of(200, 9);
      from.cache.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part, std::uint64_t token, std::size_t) {
        // Any bits, here and there or one layer of a band.
        if (everywhere ? random.below(20) == 0 : layer == 1 && token / 32 == 1)
          bits = static_cast<std::uint16_t>(random.next() & (bytes_of(format) == 1 ? 0xffU : 0xffffU));
      });
      for (const chunk_options& chunks : {chunk_options{32, 1}, chunk_options{}}) {
        fake_engine writer = by.engine_for(from.ids);
        fake_engine reader = by.engine_for(from.ids);
        const auto stream = by.ready->encode(from.cache, writer, {.scales = by.scales, .options = {.chunks = chunks}});
        REQUIRE(stream);
        const auto decoder = by.ready->open(*stream);
        REQUIRE(decoder);
        bits_cache decoded(by.options.shape, 200, untouched);
        const auto done = (*decoder)->decode_all(decoded, reader);
        REQUIRE_MESSAGE(done, done.error().message());
        CHECK(decoded == from.cache);
        CHECK(writer.calls == reader.calls);
        CHECK(writer.misuses + reader.misuses == 0);
        if (everywhere || chunks.values_per_chunk != 1 || bytes_of(format) == 1) continue;
        // The noise is not coded by the engine's prediction, but what follows when it has faded; the last band is too short to tell.
        REQUIRE((*decoder)->chunks().size() == 28);
        CHECK((*decoder)->chunks()[5].mode != closed_loop::id);
        for (std::size_t i = 0; i < 24; ++i)
          if (i < 4 || i >= 12) CHECK((*decoder)->chunks()[i].mode == closed_loop::id);
      }
    }
  }
}

TEST_CASE("closed_loop: without an engine only chunks that need none decode") {
  const loop by(number_format::bfloat16);
  model_example from = by.example_of(64, 9);
  random_integers random(10);
  from.cache.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part, std::uint64_t token, std::size_t) {
    if (layer < 2 && token < 32) bits = static_cast<std::uint16_t>(random.next());
  });
  const std::vector<std::byte> stream = by.encode(from, {.chunks = {.tokens_per_chunk = 32, .values_per_chunk = 1}});
  const auto decoder = by.ready->open(stream);
  REQUIRE(decoder);
  const std::span<const chunk_record> chunks = (*decoder)->chunks();
  CHECK(chunks[0].mode == stored_mode);
  CHECK(chunks[1].mode == stored_mode);
  bits_cache decoded(by.options.shape, 64, untouched);
  CHECK((*decoder)->decode({{0, 2}, {0, 32}, {0, 64}}, decoded));
  CHECK(holds_just(decoded, from.cache, {0, 2}, {0, 32}));
  const auto first = std::find_if(chunks.begin(), chunks.end(), [](const chunk_record& record) { return record.mode == closed_loop::id; });
  REQUIRE(first != chunks.end());
  const error missing = error_of((*decoder)->decode({{0, 4}, {0, 64}, {0, 64}}, decoded));
  CHECK(missing.code == error_code::prediction_missing);
  CHECK(missing.layer == first->layer_begin);
  CHECK(missing.token == static_cast<std::int64_t>(first->token_begin));
}

TEST_CASE("closed_loop: a damaged chunk makes unreadable what comes after it, and nothing before") {
  for (const number_format format : {number_format::bfloat16, number_format::float8_e4m3}) {
    const loop by(format, {}, 100);
    const model_example from = by.example_of(70, 11);
    std::vector<std::byte> stream = by.encode(from, small_chunks);
    const auto opened = inspect_stream(stream);
    REQUIRE(opened);
    const auto chunks_at = static_cast<std::size_t>(opened->chunks.data() - stream.data());
    const std::vector<chunk_record> chunks = opened->index.chunks;
    for (const chunk_record& bad : chunks) {
      for (std::uint64_t at = 0; at < bad.bytes; at += 31) {
        std::byte& byte = stream[chunks_at + static_cast<std::size_t>(bad.offset + at)];
        byte ^= std::byte{0x40};
        const auto decoder = by.ready->open(stream);
        REQUIRE(decoder);
        fake_engine engine = by.engine_for(from.ids);
        bits_cache decoded(by.options.shape, 70, untouched);
        const error noticed = error_of((*decoder)->decode_all(decoded, engine));
        REQUIRE(noticed.layer == bad.layer_begin);
        REQUIRE(noticed.token == static_cast<std::int64_t>(bad.token_begin));
        bits_cache expected(by.options.shape, 70, untouched);
        expected.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part part, std::uint64_t token, std::size_t channel) {
          if (token >= bad.tokens().end || (token >= bad.token_begin && layer >= bad.layer_begin)) return;
          bits = from.cache.part(layer, part)[static_cast<std::size_t>(token) * from.cache.shape.layer(layer).channels(part) + channel];
        });
        REQUIRE(decoded == expected);
        byte ^= std::byte{0x40};
      }
    }
  }
}

TEST_CASE("closed_loop: instruction sets and layouts write the same bytes") {
  for (const number_format format : {mapped_float16, number_format::float8_e4m3}) {
    const loop by(format);
    const model_example from = by.example_of(90, 12);
    const std::vector<std::byte> stream = by.encode(from, {.set = instruction_set::baseline});
    for (const instruction_set set : {instruction_set::avx2, instruction_set::avx512}) {
      if (set > best_instruction_set()) continue;
      CHECK(by.encode(from, {.set = set}) == stream);
      const auto decoder = by.ready->open(stream, set);
      REQUIRE(decoder);
      bits_cache decoded(by.options.shape, 90);
      fake_engine engine = by.engine_for(from.ids);
      REQUIRE((*decoder)->decode_all(decoded, engine));
      CHECK(decoded == from.cache);
    }
    for (const layout how : all_layouts) {
      fake_engine writer = by.engine_for(from.ids);
      fake_engine reader = by.engine_for(from.ids);
      CHECK(*by.ready->encode(source(from.cache, how), writer, {.scales = by.scales}) == stream);
      bits_cache decoded(by.options.shape, 90);
      REQUIRE((*by.ready->open(stream))->decode_all(decoded, reader, how));
      CHECK(decoded == from.cache);
    }
  }
}

TEST_CASE("closed_loop: the correction finds the error of the hidden states and takes it away") {
  // More channels than hidden states, weights without error: what is missed tells all of the disturbance.
  const cache_shape shape = make_shape({{2, 8, 8}, {2, 8, 8}, {2, 8, 8}});
  for (const number_format format : {number_format::bfloat16, mapped_float16}) {
    // Full maps could do as much for K and V themselves.
    const calibration_options thin{.block_size = 0, .rank = 1};
    const loop corrected(format, {.error = 0, .disturbance = 150, .calibration = thin, .shape = shape}, 1000);
    const loop uncorrected(format, {.error = 0, .disturbance = 150, .corrected = false, .calibration = thin, .shape = shape}, 1000);
    REQUIRE(corrected.data.models[0].maps.gains.size() == 3);
    const model_example from = corrected.example_of(256, 13);
    fake_engine engine = corrected.engine_for(from.ids, true);
    const auto stream = corrected.ready->encode(from.cache, engine);
    REQUIRE(stream);
    CAPTURE(engine.missed_before);
    CAPTURE(engine.missed_after);
    CHECK(engine.missed_before > 1e6);
    CHECK(engine.missed_after * 50 < engine.missed_before);
    fake_engine other = uncorrected.engine_for(from.ids, true);
    const auto larger = uncorrected.ready->encode(from.cache, other);
    REQUIRE(larger);
    CHECK(other.missed_after == other.missed_before);
    CAPTURE(stream->size());
    CAPTURE(larger->size());
    CHECK(static_cast<double>(stream->size()) + 0.1 / 8 * static_cast<double>(from.cache.values()) < static_cast<double>(larger->size()));
  }
}

TEST_CASE("closed_loop: shorter than with the same engine in open loop, and by far than without") {
  for (const number_format format : {number_format::bfloat16, number_format::float8_e4m3}) {
    const loop by(format, {.error = 4}, 600);
    CAPTURE(by.codec->name());
    const auto predicted = [&](const model_example& of) {
      // The copy runs on its own.
      const model_example own(by.copy, of.ids.size(), number_format::bfloat16, 0);
      bits_cache guess(by.options.shape, of.ids.size());
      fake_engine engine = by.engine_for(of.ids);
      REQUIRE(engine.begin({0, of.ids.size()}));
      for (std::uint32_t l = 0; l < by.options.shape.layers(); ++l) {
        std::vector<float> keys(of.ids.size() * by.options.shape.layer(l).channels(cache_part::key));
        std::vector<float> values(of.ids.size() * by.options.shape.layer(l).channels(cache_part::value));
        REQUIRE(engine.predict(l, keys, values));
        REQUIRE(engine.advance(l, keys, values, {}));
        for (std::size_t i = 0; i < keys.size(); ++i) guess.part(l, cache_part::key)[i] = bits_of(number_format::bfloat16, keys[i]);
        for (std::size_t i = 0; i < values.size(); ++i) guess.part(l, cache_part::value)[i] = bits_of(number_format::bfloat16, values[i]);
      }
      return guess;
    };
    const model_example from = by.example_of(256, 14);
    std::vector<example> examples;
    for (const std::uint64_t seed : {11U, 12U}) {
      const model_example each = by.example_of(600, seed);
      examples.push_back({each.cache, predicted(each)});
    }
    const example same{from.cache, predicted(from)};
    const auto size_with = [&](codec_kind kind) {
      const prepared other(codec_for(format, kind), examples, by.options.rotation, by.scales);
      return static_cast<double>(other.encode(same, {.scales = by.scales}).size());
    };
    const auto closed = static_cast<double>(by.encode(from).size());
    CAPTURE(closed);
    CHECK(closed * 1.02 < size_with(codec_kind::cross_layer_external));
    CHECK(closed * 1.1 < size_with(codec_kind::external));
    CHECK(closed * 1.3 < size_with(codec_kind::channel_mean));
  }
}

TEST_CASE("closed_loop: clamped feedback serves caches whose engine saw the values before they were rounded") {
  for (const float scale : {1.0F, 0.0137F}) {
    const loop clamped(number_format::float8_e4m3, {.error = 1, .storage_scale = scale}, 600);
    const loop exact(number_format::float8_e4m3, {.error = 1, .calibration = {.clamped_feedback = false}, .storage_scale = scale}, 600);
    CHECK(clamped.data.models[0].maps.clamped_feedback);
    CHECK(!exact.data.models[0].maps.clamped_feedback);
    const model_example from = clamped.example_of(256, 15);
    const std::vector<std::byte> smaller = clamped.encode(from);
    const std::vector<std::byte> larger = exact.encode(from);
    CHECK(smaller.size() < larger.size());
    for (const auto& [by, stream] : {std::pair{&clamped, &smaller}, {&exact, &larger}}) {
      bits_cache decoded(by->options.shape, 256);
      fake_engine engine = by->engine_for(from.ids);
      const auto decoder = by->ready->open(*stream);
      REQUIRE(decoder);
      CHECK((*decoder)->header().storage_scales == by->scales);
      REQUIRE((*decoder)->decode_all(decoded, engine));
      CHECK(decoded == from.cache);
    }
  }
  // For 16-bit formats there is no such thing.
  CHECK(!loop(mapped_float16, {}, 60).data.models[0].maps.clamped_feedback);
}

TEST_CASE("closed_loop: storage scales of any kind") {
  loop by(number_format::float8_e4m3, {}, 100);
  const model_example from = by.example_of(50, 16);
  for (const std::uint32_t odd : {0U, 0x80000000U, 0xc0600000U, 0x7f800000U, 0x7fc12345U, 1U, 0x00800000U, 0x7f7fffffU, 0x3e000001U}) {
    by.scales[1] = by.scales[4] = odd;
    const std::vector<std::byte> stream = by.encode(from);
    bits_cache decoded(by.options.shape, 50);
    fake_engine engine = by.engine_for(from.ids);
    REQUIRE((*by.ready->open(stream))->decode_all(decoded, engine));
    CHECK(decoded == from.cache);
    CHECK(engine.misuses == 0);
  }
}

TEST_CASE("closed_loop: a profile with a correction for other hidden states is refused") {
  const loop by(number_format::bfloat16, {}, 60);
  const model_example from = by.example_of(40, 17);
  const std::vector<std::byte> stream = by.encode(from);
  fake_engine uncorrected(by.copy, from.ids, false);
  bits_cache decoded(by.options.shape, 40, untouched);
  CHECK(error_of((*by.ready->open(stream))->decode_all(decoded, uncorrected)).code == error_code::shape_mismatch);
  CHECK(error_of(by.ready->encode(from.cache, uncorrected)).code == error_code::shape_mismatch);
  CHECK(decoded == bits_cache(by.options.shape, 40, untouched));
}

TEST_CASE("closed_loop: token ids travel with the stream, so that it and the profile are all that an engine needs") {
  const loop by(mapped_float16, {}, 60);
  const model_example from = by.example_of(70, 18);
  fake_engine writer = by.engine_for(from.ids);
  const auto stream = by.ready->encode(from.cache, writer, {.token_ids = from.ids});
  REQUIRE(stream);
  const auto decoder = by.ready->open(*stream);
  REQUIRE(decoder);
  fake_engine reader = by.engine_for({(*decoder)->token_ids().begin(), (*decoder)->token_ids().end()});
  bits_cache decoded(by.options.shape, 70);
  REQUIRE((*decoder)->decode_all(decoded, reader));
  CHECK(decoded == from.cache);
}

namespace {

/// Would take a correction, but cannot teach one.
struct no_teacher {
  fake_engine engine;

  std::uint64_t tokens() const noexcept { return engine.tokens(); }
  std::size_t hidden_width() const noexcept { return engine.hidden_width(); }
  result<void> begin(index_range tokens) noexcept { return engine.begin(tokens); }
  result<void> predict(std::uint32_t layer, std::span<float> keys, std::span<float> values) noexcept {
    return engine.predict(layer, keys, values);
  }
  result<void> advance(std::uint32_t layer, std::span<const float> keys, std::span<const float> values,
                       std::span<const float> correction) noexcept {
    return engine.advance(layer, keys, values, correction);
  }
};
static_assert(layerwise_predictor<no_teacher> && !layerwise_teacher<no_teacher>);

}  // namespace

TEST_CASE("closed_loop: an engine that cannot teach is calibrated without a correction, as one that takes none") {
  const loop by(number_format::bfloat16, {.corrected = false}, 60);
  std::vector<model_example> examples;
  std::vector<no_teacher> engines;
  std::vector<std::vector<bf16>> memory;
  std::vector<std::vector<layer_tensors<const bf16>>> layers;
  std::vector<calibration_example<kv_cache_view<const bf16>, no_teacher*>> inputs;
  for (const std::uint64_t seed : {11U, 12U}) {
    examples.push_back(by.example_of(60, seed));
    engines.push_back({fake_engine(by.copy, examples.back().ids)});
  }
  for (std::size_t i = 0; i < examples.size(); ++i) {
    layers.emplace_back();
    for (std::uint32_t l = 0; l < by.options.shape.layers(); ++l) {
      const layer_shape& shape = by.options.shape.layer(l);
      std::array<const bf16*, 2> data{};
      for (const cache_part part : cache_parts) {
        memory.emplace_back();
        for (const std::uint16_t bits : examples[i].cache.part(l, part)) memory.back().push_back(bf16::from_bits(bits));
        data[static_cast<std::size_t>(part)] = memory.back().data();
      }
      layers.back().push_back({strided_tensor<const bf16>::nhd(data[0], shape.kv_heads, shape.key_dim),
                               strided_tensor<const bf16>::nhd(data[1], shape.kv_heads, shape.value_dim)});
    }
  }
  for (std::size_t i = 0; i < examples.size(); ++i)
    inputs.push_back({*kv_cache_view<const bf16>::make(by.options.shape, layers[i], {0, 60}), &engines[i]});
  const auto data = calibrate<codec_closed_loop<bf16>>(by.options.shape, by.options.rotation, inputs);
  REQUIRE(data);
  CHECK(*serialize_profile(*data) == by.profile);
  CHECK(engines[0].engine.misuses == 0);
}

namespace {

/// Predicts nothing but zeros, with hidden states of any length, and counts the numbers of the longest correction.
struct wide_engine {
  std::size_t width = 0;
  std::uint64_t position = 0;
  std::uint64_t end = 0;
  std::size_t longest_correction = 0;

  std::uint64_t tokens() const noexcept { return position; }
  std::size_t hidden_width() const noexcept { return width; }
  result<void> begin(index_range tokens) noexcept {
    end = tokens.end;
    return {};
  }
  result<void> predict(std::uint32_t, std::span<float> keys, std::span<float> values) noexcept {
    std::ranges::fill(keys, 0.0F);
    std::ranges::fill(values, 0.0F);
    return {};
  }
  result<void> advance(std::uint32_t, std::span<const float>, std::span<const float>, std::span<const float> correction) noexcept {
    longest_correction = std::max(longest_correction, correction.size());
    position = end;
    return {};
  }
  result<void> hidden_error(std::uint32_t, std::span<float> out) noexcept {
    std::ranges::fill(out, 0.0F);
    return {};
  }
};
static_assert(layerwise_teacher<wide_engine>);

/// One channel; a profile whose correction is of hidden states of `width` numbers.
profile_data wide_profile(std::uint32_t width) {
  const cache_shape shape = make_shape({{1, 1, 0}});
  const codec_under_test& without = codec_for(number_format::bfloat16, codec_kind::cross_layer);
  profile_data data = parse_profile(prepared(without, shape, {}, 60).profile)->data;
  data.models[0].predictor = closed_loop::id;
  layer_maps like;
  like.layers_back = layer_maps::most_layers_back;
  like.hidden_width = width;
  data.models[0].maps = make_maps(shape, {}, like, [](std::size_t) { return std::int8_t{1}; });
  return data;
}

/// A stream for the profile with the hash 1, of one chunk that lacks its content.
std::vector<std::byte> hollow_stream(const cache_shape& shape, std::uint32_t tokens) {
  using codec_type = codec_closed_loop<bf16>;
  stream_header header;
  header.predictor = closed_loop::id;
  header.residual = codec_type::residual_model_type::id;
  header.coder = codec_type::entropy_coder_type::id;
  header.lanes = codec_type::entropy_coder_type::lanes;
  header.precision = codec_type::entropy_coder_type::precision;
  header.profile_hash = 1;
  header.shape = shape;
  const std::vector<chunk_record> chunks{
      {.mode = closed_loop::id, .layer_count = shape.layers(), .token_count = tokens, .bytes = detail::chunk_header_bytes}};
  std::vector<std::byte> stream;
  vector_sink sink(stream);
  container_writer writer(sink, container_kind::stream);
  REQUIRE(writer.add_section(detail::head_section, detail::write_stream_header(header)));
  REQUIRE(writer.open_section(detail::chunk_section));
  REQUIRE(writer.append(std::vector<std::byte>(detail::chunk_header_bytes)));
  REQUIRE(writer.add_section(detail::index_section, detail::write_index(tokens, chunks)));
  REQUIRE(writer.finish());
  return stream;
}

}  // namespace

TEST_CASE("closed_loop: no workspace exceeds 256 MiB, and chunks that would ask for more are refused") {
  constexpr std::size_t limit = std::size_t{256} << 20;
  for (const std::uint32_t width : {0U, 1U, 8U, 9U, 576U, 65535U, 65536U}) {
    CAPTURE(width);
    const profile_data data = wide_profile(width);
    const auto ready = codec_for(number_format::bfloat16, codec_kind::closed_loop).make(data, 1);
    REQUIRE(ready);
    CHECK((*ready)->encoder_workspace_bytes({0xffffffffU, 0xffffffffU}) <= limit);
    const std::uint32_t most = std::min<std::uint32_t>(1U << 21, (1U << 24) / std::max(width, 1U) / 32 * 32);
    const auto decoder = (*ready)->open(hollow_stream(data.shape, most));
    REQUIRE(decoder);
    CHECK((*decoder)->workspace_bytes() <= limit);
    const error refused = error_of((*ready)->open(hollow_stream(data.shape, most + 1)));
    CHECK(refused.code == error_code::corrupt);
    CHECK(refused.token == 0);
  }
}

TEST_CASE("closed_loop: chunks have no more tokens than the correction allows") {
  using codec_type = codec_closed_loop<bf16>;
  const auto parameters = profile<codec_type>::make(wide_profile(1U << 16), 1);
  REQUIRE(parameters);
  constexpr std::uint64_t tokens = 600;
  std::vector<bf16> keys;
  for (std::uint64_t t = 0; t < tokens; ++t) keys.push_back(bf16::from_float(static_cast<float>(t % 7) - 3));
  std::vector<bf16> back(tokens);
  const std::vector<layer_tensors<const bf16>> from{{strided_tensor<const bf16>::nhd(keys.data(), 1, 1), {}}};
  const std::vector<layer_tensors<bf16>> to{{strided_tensor<bf16>::nhd(back.data(), 1, 1), {}}};
  std::vector<std::byte> stream;
  vector_sink sink(stream);
  using encoder_type = stream_encoder<codec_type, vector_sink>;
  const chunk_options options{.tokens_per_chunk = 4096};
  std::vector<std::byte> memory(encoder_type::workspace_bytes(*parameters, options));
  auto encoder = encoder_type::begin(*parameters, memory, sink, {}, {.chunks = options});
  REQUIRE(encoder);
  wide_engine writer{1U << 16};
  REQUIRE(encoder->append(*kv_cache_view<const bf16>::make(parameters->shape(), from, {0, tokens}), writer));
  REQUIRE(encoder->finish());
  REQUIRE(encoder->chunks().size() == 3);
  CHECK(encoder->chunks()[0].token_count == 256);
  CHECK(writer.longest_correction == 256U << 16);
  const auto decoder = stream_decoder<codec_type>::open(*parameters, stream);
  REQUIRE(decoder);
  wide_engine reader{1U << 16};
  memory.resize(decoder->workspace_bytes());
  REQUIRE(decoder->decode(*kv_cache_view<bf16>::make(parameters->shape(), to, {0, tokens}), memory, reader));
  CHECK(std::ranges::equal(back, keys, {}, &bf16::bits, &bf16::bits));
}

TEST_CASE("closed_loop: hidden states that no profile can correct are refused before anything is fitted") {
  const cache_shape shape = make_shape({{1, 1, 0}});
  const std::vector<bf16> keys(10, bf16::from_float(1));
  const std::vector<layer_tensors<const bf16>> layers{{strided_tensor<const bf16>::nhd(keys.data(), 1, 1), {}}};
  const auto view = *kv_cache_view<const bf16>::make(shape, layers, {0, 10});
  for (const std::size_t width : {std::size_t{65536}, std::size_t{65537}, std::size_t{1} << 32, ~std::size_t{0}}) {
    wide_engine engine{width};
    const std::vector<calibration_example<kv_cache_view<const bf16>, wide_engine*>> inputs{{view, &engine}};
    const auto data = calibrate<codec_closed_loop<bf16>>(shape, {}, inputs);
    REQUIRE(static_cast<bool>(data) == (width == 65536));
    if (data) {
      CHECK(parse_profile(*serialize_profile(*data)));
      continue;
    }
    CHECK(data.error().code == error_code::out_of_range);
    CHECK(engine.end == 0);
  }
}

TEST_CASE("closed_loop: errors of the engine end calibration") {
  const loop by(number_format::bfloat16, {}, 60);
  const model_example from = by.example_of(40, 19);
  for (const std::size_t call : {0U, 1U, 2U, 5U, 8U}) {
    fake_engine engine = by.engine_for(from.ids, true);
    engine.failing_call = call;
    const std::vector<calibration_input> inputs{{from.cache, engine}};
    const error failed = error_of(by.codec->calibrate(by.options.shape, by.options.rotation, inputs));
    CHECK(failed.code == fake_engine::failure.code);
    CHECK(std::string_view(failed.what) == fake_engine::failure.what);
  }
}

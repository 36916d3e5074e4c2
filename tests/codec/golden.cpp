// SPDX-License-Identifier: Apache-2.0
// Pinned files: what they hold must never change, or files of users become unreadable. For formats and kinds of predictors, golden/ has a
// profile and the stream that it gives for a cache which is generated here.
//
// Only where the format itself is changed on purpose (before a release), write them anew and commit them:
//
//   KVEXACT_WRITE_GOLDEN=1 build/release/tests/test_codec -tc="golden*"
//
// A change of calibration alone makes other profiles, but these stay as good as they were: nothing needs to be written anew.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/codec/stream_format.hpp>

#include "codec_under_test.hpp"
#include "fake_engine.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

std::string path_of(const codec_under_test& codec, const char* extension) {
  const char* const formats[] = {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2"};
  return std::string(KVEXACT_TESTS_DIR) + "/codec/golden/" + formats[static_cast<std::size_t>(codec.format()) - 1] + "_" +
         to_string(codec.kind()) + extension;
}

std::vector<std::byte> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  REQUIRE_MESSAGE(file.good(), path);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  std::vector<std::byte> copy;
  for (const char byte : bytes) copy.push_back(static_cast<std::byte>(byte));
  return copy;
}

void write_file(const std::string& path, const std::vector<std::byte>& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  REQUIRE_MESSAGE(file.good(), path);
}

cache_shape golden_shape() { return make_shape({{2, 4, 2}, {1, 6, 0}}); }
rotary golden_rotation() { return make_rotary(rotary_pairing::half_split, 4); }
constexpr float golden_scale = 0.375F;
const chunk_options golden_chunks{.tokens_per_chunk = 32};

bool is_fp8(number_format format) { return bytes_of(format) == 1; }
std::vector<std::uint32_t> golden_scales(number_format format) {
  return std::vector<std::uint32_t>(is_fp8(format) ? 3 : 0, std::bit_cast<std::uint32_t>(golden_scale));
}

/// Values of all kinds here and there, and noise at the end.
void make_odd(bits_cache& cache, number_format format) {
  random_integers random(3);
  cache.for_each([&](std::uint16_t& bits, std::uint32_t, cache_part, std::uint64_t token, std::size_t) {
    if (token >= 64 || random.below(40) == 0) bits = static_cast<std::uint16_t>(random.next() & (is_fp8(format) ? 0xffU : 0xffffU));
  });
}

/// For maps to find: the second head of layer 0 is much like the first, and the keys of layer 1 are like keys and values of layer 0.
void relate_layers(example& made, number_format format, std::uint64_t seed) {
  random_integers random(seed);
  made.cache.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part part, std::uint64_t token, std::size_t channel) {
    const bool follows = layer == 1 || (part == cache_part::key && channel >= 4);
    if (!follows) return;
    const std::uint16_t like = channel < 4 || layer == 0 ? made.cache.part(0, cache_part::key)[8 * token + channel % 4]
                                                         : made.cache.part(0, cache_part::value)[4 * token + channel - 4];
    bits = bits_of(format, static_cast<float>(value_of(format, like)) + std::ldexp(static_cast<float>(random.bell()), -20));
  });
}

/// 70 tokens in bands of 32, one of them badly predicted.
example make_golden(const codec_under_test& codec, std::uint64_t tokens, std::uint64_t seed) {
  const number_format format = codec.format();
  example made = make_example(golden_shape(), tokens, format, seed, is_fp8(format) ? golden_scale : 1);
  if (codec.kind() == codec_kind::cross_layer) relate_layers(made, format, seed);
  return made;
}
example golden_example(const codec_under_test& codec) {
  example made = make_golden(codec, 70, 2);
  make_odd(made.cache, codec.format());
  made.prediction.for_each([&](std::uint16_t& bits, std::uint32_t, cache_part, std::uint64_t token, std::size_t) {
    if (token >= 32 && token < 64) bits = static_cast<std::uint16_t>(bits ^ 0x8000U);
  });
  return made;
}

/// Several kinds of maps.
calibration_options golden_options(codec_kind kind) {
  switch (kind) {
    case codec_kind::cross_layer: return {.block_size = 2};
    case codec_kind::cross_layer_external: return {.block_size = 3, .rank = 2};
    default: return {};
  }
}

bool write_anew() { return std::getenv("KVEXACT_WRITE_GOLDEN") != nullptr; }

/// The pinned stream is what is encoded now, and decodes; `side()` gives what the predictor wants.
template <class Side>
void check_pinned(const codec_under_test& codec, const bits_cache& cache, std::span<const std::uint32_t> ids, Side&& side,
                  const std::vector<std::uint32_t>& modes) {
  const std::vector<std::uint32_t> scales = golden_scales(codec.format());
  const std::vector<std::byte> profile_file = read_file(path_of(codec, ".kvp"));
  const auto parsed = parse_profile(profile_file);
  REQUIRE(parsed);
  CHECK(parsed->data.shape == golden_shape());
  CHECK(parsed->data.rotation == golden_rotation());
  CHECK(*serialize_profile(parsed->data) == profile_file);
  const auto ready = codec.parse(profile_file);
  REQUIRE(ready);
  for (const instruction_set set : {instruction_set::baseline, instruction_set::avx2, instruction_set::avx512}) {
    if (set > best_instruction_set()) continue;
    const auto encoded =
        (*ready)->encode(cache, side(), {.scales = scales, .options = {.chunks = golden_chunks, .set = set}, .token_ids = ids});
    REQUIRE(encoded);
    if (write_anew() && set == instruction_set::baseline) write_file(path_of(codec, ".kvx"), *encoded);
    const std::vector<std::byte> stream = read_file(path_of(codec, ".kvx"));
    CHECK(*encoded == stream);
    const auto decoder = (*ready)->open(stream, set);
    REQUIRE(decoder);
    CHECK((*decoder)->header().storage_scales == scales);
    CHECK(std::ranges::equal((*decoder)->token_ids(), ids));
    std::vector<std::uint32_t> found;
    for (const chunk_record& record : (*decoder)->chunks()) found.push_back(record.mode);
    CHECK(found == modes);
    bits_cache decoded(golden_shape(), 70);
    const auto done = (*decoder)->decode_all(decoded, side());
    REQUIRE_MESSAGE(done, done.error().message());
    CHECK(decoded == cache);
  }
}

}  // namespace

TEST_CASE("golden: pinned profiles and streams are read and written as ever") {
  for (const codec_under_test* const codec : most_codecs()) {
    CAPTURE(codec->name());
    const std::vector<std::uint32_t> scales = golden_scales(codec->format());
    if (write_anew()) {
      const std::vector<example> examples{make_golden(*codec, 600, 1)};
      write_file(path_of(*codec, ".kvp"), prepared(*codec, examples, golden_rotation(), scales, golden_options(codec->kind())).profile);
    }
    const example from = golden_example(*codec);
    // The first chunk is worth its profile; a bad prediction is worse than none.
    const std::uint32_t second = codec->needs_prediction() ? 1 : codec->predictor();
    check_pinned(*codec, from.cache, {}, [&] { return codec->prediction_of(from); }, {codec->predictor(), second, 0});
  }
}

TEST_CASE("golden: pinned profiles and streams of the closed loop are read and written as ever") {
  const fake_model target(golden_shape(), golden_rotation(), 1);
  const fake_model copy(golden_shape(), golden_rotation(), 1, 5);
  for (const number_format format : {number_format::bfloat16, number_format::float8_e4m3}) {
    const codec_under_test& codec = codec_for(format, codec_kind::closed_loop);
    CAPTURE(codec.name());
    const std::vector<std::uint32_t> scales = golden_scales(format);
    const float scale = is_fp8(format) ? golden_scale : 1;
    if (write_anew()) {
      const model_example from(target, 600, format, 1, scale);
      fake_engine teacher(copy, from.ids, true, &target);
      auto data = *codec.calibrate(golden_shape(), golden_rotation(), std::vector<calibration_input>{{from.cache, teacher, scales}});
      data.note = "golden";
      write_file(path_of(codec, ".kvp"), *serialize_profile(data));
    }
    model_example from(target, 70, format, 2, scale);
    make_odd(from.cache, format);
    std::vector<std::unique_ptr<fake_engine>> engines;
    const auto side = [&]() -> side_information { return *engines.emplace_back(std::make_unique<fake_engine>(copy, from.ids)); };
    check_pinned(codec, from.cache, from.ids, side, {5, 5, 0});
  }
}

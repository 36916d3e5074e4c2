// SPDX-License-Identifier: Apache-2.0
// Pinned files: what they hold must never change, or files of users become unreadable. For each format, without a model and with a
// prediction, golden/ has a profile and the stream that it gives for a cache which is generated here.
//
// Only where the format itself is changed on purpose (before a release), write them anew and commit them:
//
//   KVEXACT_WRITE_GOLDEN=1 build/release/tests/test_codec -tc="golden*"
//
// A change of calibration alone makes other profiles, but these stay as good as they were: nothing needs to be written anew.
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/codec/stream_format.hpp>

#include "codec_under_test.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

std::string path_of(const codec_under_test& codec, const char* extension) {
  const char* const formats[] = {"bf16", "fp16", "fp8_e4m3", "fp8_e5m2"};
  return std::string(KVEXACT_TESTS_DIR) + "/codec/golden/" + formats[static_cast<std::size_t>(codec.format()) - 1] +
         (codec.needs_prediction() ? "_with_prediction" : "_without_model") + extension;
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

std::vector<std::uint32_t> golden_scales(number_format format) {
  if (bytes_of(format) != 1) return {};
  return std::vector<std::uint32_t>(3, std::bit_cast<std::uint32_t>(golden_scale));
}

example make_golden(number_format format, std::uint64_t tokens, std::uint64_t seed) {
  return make_example(golden_shape(), tokens, format, seed, bytes_of(format) == 1 ? golden_scale : 1);
}

/// 70 tokens in bands of 32, with values of all kinds, one badly predicted band and noise at the end.
example golden_example(number_format format) {
  example made = make_golden(format, 70, 2);
  random_integers random(3);
  made.cache.for_each([&](std::uint16_t& bits, std::uint32_t, cache_part, std::uint64_t token, std::size_t) {
    if (token >= 64 || random.below(40) == 0) bits = static_cast<std::uint16_t>(random.next() & (bytes_of(format) == 1 ? 0xffU : 0xffffU));
  });
  made.prediction.for_each([&](std::uint16_t& bits, std::uint32_t, cache_part, std::uint64_t token, std::size_t) {
    if (token >= 32 && token < 64) bits = static_cast<std::uint16_t>(bits ^ 0x8000U);
  });
  return made;
}

const chunk_options golden_chunks{.tokens_per_chunk = 32};

}  // namespace

TEST_CASE("golden: pinned profiles and streams are read and written as ever") {
  const bool write_anew = std::getenv("KVEXACT_WRITE_GOLDEN") != nullptr;
  for (const codec_under_test* const codec : all_codecs()) {
    CAPTURE(codec->name());
    const std::vector<std::uint32_t> scales = golden_scales(codec->format());
    const example from = golden_example(codec->format());
    const encoder_call call{.scales = scales, .options = {.chunks = golden_chunks}};
    if (write_anew) {
      const prepared fresh(*codec, std::vector{make_golden(codec->format(), 600, 1)}, golden_rotation(), scales);
      write_file(path_of(*codec, ".kvp"), fresh.profile);
      write_file(path_of(*codec, ".kvx"), fresh.encode(from, call));
    }

    const std::vector<std::byte> profile_file = read_file(path_of(*codec, ".kvp"));
    const std::vector<std::byte> stream = read_file(path_of(*codec, ".kvx"));
    const auto parsed = parse_profile(profile_file);
    REQUIRE(parsed);
    CHECK(parsed->data.shape == golden_shape());
    CHECK(parsed->data.rotation == golden_rotation());
    CHECK(*serialize_profile(parsed->data) == profile_file);
    const auto ready = codec->parse(profile_file);
    REQUIRE(ready);

    const auto encoded = (*ready)->encode(from.cache, codec->prediction_of(from), call);
    REQUIRE(encoded);
    CHECK(*encoded == stream);

    const auto decoder = (*ready)->open(stream);
    REQUIRE(decoder);
    CHECK((*decoder)->header().storage_scales == scales);
    // Every mode is there; the first chunk is worth its profile.
    std::vector<std::uint32_t> modes;
    for (const chunk_record& record : (*decoder)->chunks()) modes.push_back(record.mode);
    CHECK(modes == (codec->needs_prediction() ? std::vector<std::uint32_t>{2, 1, 0} : std::vector<std::uint32_t>{1, 1, 0}));
    bits_cache decoded(golden_shape(), 70);
    const auto done = (*decoder)->decode_all(decoded, codec->prediction_of(from));
    REQUIRE_MESSAGE(done, done.error().message());
    CHECK(decoded == from.cache);
  }
}

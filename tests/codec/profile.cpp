// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/bitstream/checksum.hpp>

#include "allocation_meter.hpp"
#include "codec_under_test.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

template <class T>
error_code code_of(const result<T>& outcome) {
  REQUIRE(!outcome);
  return outcome.error().code;
}

}  // namespace

TEST_CASE("profile: what is read is written again to the byte") {
  for (const codec_under_test* const codec : all_codecs()) {
    CAPTURE(codec->name());
    for (const rotary_pairing pairing : {rotary_pairing::none, rotary_pairing::half_split}) {
      const rotary rotation = pairing == rotary_pairing::none ? rotary{} : make_rotary(pairing, 4);
      const prepared by(*codec, mixed_shape(), rotation);
      const auto parsed = parse_profile(by.profile);
      REQUIRE(parsed);
      CHECK(*serialize_profile(parsed->data) == by.profile);
      CHECK(parsed->data.format == codec->format());
      CHECK(parsed->data.shape == mixed_shape());
      CHECK(parsed->data.rotation == rotation);
      CHECK(parsed->data.models.size() == (codec->needs_prediction() ? 2 : 1));
      CHECK(by.ready->hash() == parsed->hash);
      CHECK(by.ready->shape() == mixed_shape());
    }
  }
}

TEST_CASE("profile: the hash is that of the content") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, true);
  const prepared by(codec, tiny_shape(), make_rotary(rotary_pairing::interleaved, 2));
  const auto original = parse_profile(by.profile);
  REQUIRE(original);
  CHECK(original->hash == checksum(std::span(by.profile).subspan(16, by.profile.size() - 16 - 32 - 32)));
  const std::vector<std::function<void(profile_data&)>> changes{
      [](profile_data&) {},
      [](profile_data& data) { data.models[0].sigmas[3] ^= 1; },
      [](profile_data& data) { data.models[1].means[0] ^= 1U; },
      [](profile_data& data) { ++data.models[1].bits_per_value_q8; },
      [](profile_data& data) { data.rotation = make_rotary(rotary_pairing::half_split, 2); },
      [](profile_data& data) { data.rotation = {}; },
      [](profile_data& data) {
        data.shape = make_shape({{2, 2, 1}, {2, 2, 0}});
      },
      [](profile_data& data) { std::swap(data.models[0], data.models[1]); },
      [](profile_data& data) { data.models[0].tables.push_back(data.models[0].tables[0]); },
  };
  std::set<std::uint64_t> hashes;
  for (const auto& change : changes) {
    profile_data data = original->data;
    change(data);
    const auto parsed = parse_profile(*serialize_profile(data));
    REQUIRE(parsed);
    hashes.insert(parsed->hash);
  }
  CHECK(hashes.size() == changes.size());
  CHECK(hashes.contains(original->hash));
}

TEST_CASE("profile: serves only codecs with its policies") {
  const prepared by(codec_for(number_format::float8_e4m3, true), tiny_shape());
  const prepared without(codec_for(number_format::float8_e4m3, false), tiny_shape());
  for (const number_format format : all_formats) {
    if (format == number_format::float8_e4m3) continue;
    CHECK(code_of(codec_for(format, true).parse(by.profile)) == error_code::dtype_mismatch);
  }
  CHECK(code_of(codec_for(number_format::float8_e4m3, true).parse(without.profile)) == error_code::profile_mismatch);
  CHECK(codec_with_range_coder().parse(by.profile));

  const profile_data original = parse_profile(by.profile)->data;
  const std::vector<std::function<void(profile_data&)>> changes{
      [](profile_data& data) { ++data.residual; },
      [](profile_data& data) { --data.shared_contexts; },
      [](profile_data& data) { ++data.tile_contexts; },
      [](profile_data& data) { --data.alphabet; },
      [](profile_data& data) { ++data.precision; },
      [](profile_data& data) { data.models.clear(); },
      [](profile_data& data) { data.models.erase(data.models.begin()); },
  };
  for (const auto& change : changes) {
    profile_data data = original;
    change(data);
    CHECK(code_of(codec_for(number_format::float8_e4m3, true).make(data, 1)) == error_code::profile_mismatch);
  }
  CHECK(codec_for(number_format::float8_e4m3, true).make(original, 1));
}

TEST_CASE("profile: built for one direction it says so instead of crashing in the other") {
  const prepared by(codec_for(number_format::bfloat16, true), tiny_shape());
  const example from = make_example(tiny_shape(), 40, number_format::bfloat16, 2);
  const std::vector<std::byte> stream = by.encode(from);
  const auto to_encode = by.codec->parse(by.profile, build_for::encode);
  const auto to_decode = by.codec->parse(by.profile, build_for::decode);
  REQUIRE(to_encode);
  REQUIRE(to_decode);
  CHECK(*(*to_encode)->encode(from.cache, source(from.prediction)) == stream);
  bits_cache decoded(tiny_shape(), 40);
  REQUIRE((*(*to_decode)->open(stream))->decode_all(decoded, source(from.prediction)));
  CHECK(decoded == from.cache);

  byte_collector sink;
  CHECK(code_of((*to_decode)->begin(sink)) == error_code::invalid_argument);
  CHECK(code_of((*to_decode)->resume(sink, stream)) == error_code::invalid_argument);
  CHECK(sink.calls == 0);
  CHECK(code_of((*to_encode)->open(stream)) == error_code::invalid_argument);
}

TEST_CASE("profile: any allocation that fails makes an error of it") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, true);
  const rotary rotation = make_rotary(rotary_pairing::interleaved, 2);
  const cache_shape shape = tiny_shape();
  const prepared by(codec, shape, rotation);
  const example from = make_example(shape, 70, codec.format(), 3);
  const std::vector<std::byte> stream = by.encode(from);
  // The library's functions are noexcept: what they let through would end the program.
  const auto check = [&](auto&& use) {
    bool failed = true;
    for (std::size_t allowed = 0; failed; ++allowed) {
      REQUIRE(allowed < 1000);
      error_code code = error_code::out_of_memory;
      {
        const allocation_meter meter(allowed);
        try {
          if (const auto outcome = use(); !outcome) code = outcome.error().code;
        } catch (const std::bad_alloc&) {
          // The test's own wrapping.
        }
        failed = meter.failed();
      }
      CHECK(code == error_code::out_of_memory);
    }
  };
  check([&] { return parse_profile(by.profile); });
  check([&] { return codec.parse(by.profile); });
  check([&] { return by.ready->open(stream); });
  check([&] { return inspect_stream(stream); });
  const auto data = parse_profile(by.profile);
  check([&] { return serialize_profile(data->data); });
  check([&] { return codec.calibrate(shape, rotation); });
  check([&]() -> result<void> {
    byte_collector sink;
    sink.refused_call = 0;  // so that it does not allocate
    const auto encoder = by.ready->begin(sink);
    if (!encoder && encoder.error().code != error_code::output_failed) return encoder.error();
    return {};
  });
  byte_collector unused;
  check([&] { return by.ready->resume(unused, stream); });
}

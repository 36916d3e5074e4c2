// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/bitstream/container.hpp>

#include "allocation_meter.hpp"
#include "codec_under_test.hpp"
#include "sealing.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

template <class T>
error_code code_of(const result<T>& outcome) {
  REQUIRE(!outcome);
  return outcome.error().code;
}

/// A profile file with this content and right checksums.
std::vector<std::byte> sealed(std::span<const std::byte> body) {
  std::vector<std::byte> file;
  vector_sink sink(file);
  container_writer writer(sink, container_kind::profile);
  REQUIRE(writer.add_section(16, body));
  REQUIRE(writer.finish());
  return file;
}

}  // namespace

TEST_CASE("profile: what is read is written again to the byte") {
  for (const codec_under_test* const codec : most_codecs()) {
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
      CHECK(parsed->data.models.size() == (codec->kind() == codec_kind::channel_mean ? 1 : 2));
      CHECK(by.ready->hash() == parsed->hash);
      CHECK(by.ready->shape() == mixed_shape());
    }
  }
}

TEST_CASE("profile: the hash is that of the content") {
  const codec_under_test& codec = codec_for(number_format::bfloat16, codec_kind::cross_layer);
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
      [](profile_data& data) { std::swap(data.models[0], data.models[1]); },
      [](profile_data& data) { ++data.models[0].maps.tiles[1].unit; },
      [](profile_data& data) { ++data.models[0].maps.tiles[1].feature_scales[0]; },
      [](profile_data& data) { ++data.models[0].maps.tiles[1].missed_scales[0]; },
      [](profile_data& data) { data.models[0].maps.tiles[2].blocks[0].weights[1] ^= 1; },
      [](profile_data& data) { ++data.models[0].maps.tiles[2].blocks[0].scales[0]; },
      [](profile_data& data) { data.models[0].maps.clamped_feedback = true; },
      [](profile_data& data) { data.note = "of another model"; },
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

TEST_CASE("profile: carries a note") {
  const prepared by(codec_for(number_format::bfloat16, codec_kind::channel_mean), tiny_shape());
  profile_data data = parse_profile(by.profile)->data;
  CHECK(data.note.empty());
  const std::string odd("a\0\xff\n", 4);
  for (const std::string& note : {odd, std::string(profile_data::most_note, 'x')}) {
    data.note = note;
    const auto parsed = parse_profile(*serialize_profile(data));
    REQUIRE(parsed);
    CHECK(parsed->data.note == note);
  }
  data.note.assign(profile_data::most_note + 1, 'y');
  CHECK(code_of(serialize_profile(data)) == error_code::invalid_argument);
}

TEST_CASE("profile: a body cut anywhere is refused, although its checksum is right") {
  for (const codec_kind kind : {codec_kind::external, codec_kind::cross_layer}) {
    const codec_under_test& codec = codec_for(number_format::float8_e4m3, kind);
    const prepared by(codec, std::vector{make_example(tiny_shape(), 60, codec.format(), 1)}, make_rotary(rotary_pairing::interleaved, 2),
                      {}, {.rank = kind == codec_kind::cross_layer ? 2U : 0U});
    const profile_data original = parse_profile(by.profile)->data;
    profile_data data = original;
    data.note = "note";
    const std::vector<std::byte> file = *serialize_profile(data);
    const std::span body = std::span(file).subspan(16, file.size() - 16 - 32 - 32);
    REQUIRE(parse_profile(sealed(body)));
    for (std::size_t length = 0; length < body.size(); ++length) {
      const auto parsed = parse_profile(sealed(body.first(length)));
      if (parsed) FAIL("read a body of ", length, " bytes");
      if (parsed.error().code != error_code::truncated && parsed.error().code != error_code::corrupt) FAIL("error for ", length, " bytes");
    }
    std::vector<std::byte> longer(body.begin(), body.end());
    longer.emplace_back();
    CHECK(code_of(parse_profile(sealed(longer))) == error_code::corrupt);
  }
}

TEST_CASE("profile: maps that do not fit are refused, read or hand-made") {
  for (const codec_under_test* const codec : {&codec_for(number_format::bfloat16, codec_kind::cross_layer),
                                              &codec_for(number_format::float8_e4m3, codec_kind::cross_layer_external)}) {
    const prepared by(*codec, tiny_shape());
    const profile_data original = parse_profile(by.profile)->data;
    REQUIRE(original.models[0].maps.tiles.size() == 3);
    const std::vector<std::function<void(layer_maps&)>> changes{
        [](layer_maps& maps) { maps = {}; },
        [](layer_maps& maps) { maps.tiles.pop_back(); },
        [](layer_maps& maps) { maps.layers_back = 9; },
        [](layer_maps& maps) { maps.layers_back = 0xffffffffU; },
        [](layer_maps& maps) { maps.rank = 0xffffffffU; },
        [](layer_maps& maps) { maps.rank = 0x80000000U; },
        [](layer_maps& maps) { maps.rank = 1; },
        [](layer_maps& maps) { maps.per_head = true; },
        [](layer_maps& maps) { maps.block_size = 1; },
        [](layer_maps& maps) { maps.hidden_width = 3; },
        [](layer_maps& maps) { maps.hidden_width = 0xffffffffU; },
        [](layer_maps& maps) { maps.tiles[1].unit = 201; },
        [](layer_maps& maps) { maps.tiles[1].feature_scales[0] = 0x80000000U; },
        [](layer_maps& maps) { maps.tiles[1].missed_scales[1] = 0xffffffffU; },
        [](layer_maps& maps) { maps.tiles[2].blocks[0].scales[0] = 0x80000000U; },
        [](layer_maps& maps) { maps.tiles[2].blocks[0].weights.pop_back(); },
        [](layer_maps& maps) { maps.tiles[2].feature_scales.pop_back(); },
    };
    for (std::size_t i = 0; i < changes.size(); ++i) {
      CAPTURE(i);
      profile_data data = original;
      changes[i](data.models[0].maps);
      CHECK(code_of(codec->make(data, 1)) == error_code::corrupt);
      // In a file sizes follow from the header, so some of these say something else there; whatever it is, it serves no codec or it fits.
      const auto parsed = parse_profile(*serialize_profile(data));
      if (parsed) CHECK((data.models[0].maps.empty() || expect_maps_fit(parsed->data.models[0].maps, tiny_shape(), {})));
      if (parsed) CHECK(!codec->make(parsed->data, 1));
    }
    CHECK(codec->make(original, 1));
    // Unknown flags: they stand before layers back, rank, block size, hidden width and the first unit.
    std::vector<std::byte> flags;
    byte_writer expected(flags);
    const layer_maps& maps = original.models[0].maps;
    for (const std::uint32_t each : {1U, maps.layers_back, maps.rank, maps.block_size, maps.hidden_width}) expected.put(each);
    const auto found = std::search(by.profile.begin(), by.profile.end(), flags.begin(), flags.end());
    REQUIRE(found != by.profile.end());
    const auto at = static_cast<std::size_t>(found - by.profile.begin());
    for (const std::uint32_t bad : {2U, 4U, 6U, 8U, 9U, 16U, 17U, 0x80000001U, 0xffffffffU}) {
      std::vector<std::byte> file = by.profile;
      store_little_endian(file.data() + at, bad);
      seal(file);
      CHECK(code_of(parse_profile(file)) == error_code::corrupt);
    }
  }
  // A plain codec does not mind maps, nor their lack.
  const prepared plain(codec_for(number_format::bfloat16, codec_kind::external), tiny_shape());
  CHECK(plain.codec->make(parse_profile(plain.profile)->data, 1));
}

TEST_CASE("profile: serves only codecs with its policies") {
  const prepared by(codec_for(number_format::float8_e4m3, codec_kind::external), tiny_shape());
  const prepared without(codec_for(number_format::float8_e4m3, codec_kind::channel_mean), tiny_shape());
  for (const number_format format : all_formats) {
    if (format == number_format::float8_e4m3) continue;
    CHECK(code_of(codec_for(format, codec_kind::external).parse(by.profile)) == error_code::dtype_mismatch);
  }
  CHECK(code_of(codec_for(number_format::float8_e4m3, codec_kind::external).parse(without.profile)) == error_code::profile_mismatch);
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
    CHECK(code_of(codec_for(number_format::float8_e4m3, codec_kind::external).make(data, 1)) == error_code::profile_mismatch);
  }
  CHECK(codec_for(number_format::float8_e4m3, codec_kind::external).make(original, 1));
}

TEST_CASE("profile: built for one direction it says so instead of crashing in the other") {
  const prepared by(codec_for(number_format::bfloat16, codec_kind::external), tiny_shape());
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
  const codec_under_test& codec = codec_for(number_format::bfloat16, codec_kind::external);
  const rotary rotation = make_rotary(rotary_pairing::interleaved, 2);
  const cache_shape shape = tiny_shape();
  const prepared by(codec, shape, rotation);
  const example from = make_example(shape, 70, codec.format(), 3);
  const std::vector<std::byte> stream = by.encode(from);
  // The library's functions are noexcept: what they let through would end the program.
  const auto check = [&](auto&& use, std::size_t step = 1) {
    bool failed = true;
    for (std::size_t allowed = 0; failed; allowed += step) {
      REQUIRE(allowed < 3000);
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
  for (const codec_kind kind : {codec_kind::external, codec_kind::cross_layer_external})
    check([&] { return codec_for(codec.format(), kind).profile_for(std::vector{from}, rotation); }, 29);
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

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/prediction/channel_mean.hpp>
#include <kvexact/prediction/external.hpp>

#include "allocation_meter.hpp"
#include "codec_under_test.hpp"
#include "sealing.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr std::uint16_t untouched = 0x33;

cache_shape victim_shape() { return make_shape({{1, 4, 2}, {2, 6, 0}}); }

/// A stream with a chunk of every mode, some hundred bytes each: two bands of two chunks, the second short.
struct victim {
  prepared by;
  example from;
  std::vector<std::byte> stream;
  std::size_t chunks_at = 0;
  std::vector<chunk_record> chunks;

  explicit victim(number_format format, codec_kind kind = codec_kind::external)
      : by(codec_for(format, kind), victim_shape(), make_rotary(rotary_pairing::interleaved, 2), 200),
        from(make_example(victim_shape(), 50, format, 2)) {
    random_integers random(3);
    from.prediction.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part, std::uint64_t token, std::size_t) {
      if (layer == 1 && token < 32) bits = static_cast<std::uint16_t>(bits ^ 0x8000U);
    });
    from.cache.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part, std::uint64_t token, std::size_t) {
      if (layer == 1 && token >= 32) bits = static_cast<std::uint16_t>(random.next() & (bytes_of(format) == 1 ? 0xffU : 0xffffU));
    });
    const std::vector<std::uint32_t> scales(bytes_of(format) == 1 ? 3 : 0, 0x3f800000U);
    // One kind carries token ids.
    const std::vector<std::uint32_t> ids(kind == codec_kind::cross_layer ? 50 : 0, 1000);
    stream = by.encode(from, {.scales = scales, .options = {.chunks = {.tokens_per_chunk = 32, .values_per_chunk = 1}}, .token_ids = ids});
    const auto decoder = by.ready->open(stream);
    REQUIRE(decoder);
    chunks.assign((*decoder)->chunks().begin(), (*decoder)->chunks().end());
    REQUIRE(chunks.size() == 4);
    const auto opened = inspect_stream(stream);
    chunks_at = static_cast<std::size_t>(opened->chunks.data() - stream.data());
  }
  optional_source prediction() const { return by.prediction_of(from); }
};

/// A 16-bit and an 8-bit format, with all kinds of predictors.
std::vector<std::pair<number_format, codec_kind>> formats_and_kinds() {
  std::vector<std::pair<number_format, codec_kind>> all;
  for (const number_format format : {number_format::bfloat16, number_format::float8_e4m3})
    for (const codec_kind kind : all_kinds) all.emplace_back(format, kind);
  return all;
}

/// Decodes what may be damaged: an error, or the values of the original; values in the destination are right or untouched.
/// Returns whether all of it was decoded.
bool check_harmless(const ready_codec& ready, std::span<const std::byte> stream, const example& from, const optional_source& prediction) {
  const auto decoder = ready.open(stream);
  if (!decoder) return false;
  if ((*decoder)->tokens() != from.cache.tokens) {
    // A stream of another length: only a check of the harm.
    const std::uint64_t tokens = std::min<std::uint64_t>((*decoder)->tokens(), from.cache.tokens);
    bits_cache decoded(from.cache.shape, from.cache.tokens, untouched);
    const auto done = (*decoder)->decode({{0, decoded.shape.layers()}, {0, tokens}, {0, from.cache.tokens}}, decoded, prediction);
    if (!done) return false;
    decoded.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part part, std::uint64_t token, std::size_t channel) {
      const std::uint16_t right =
          from.cache.part(layer, part)[static_cast<std::size_t>(token) * from.cache.shape.layer(layer).channels(part) + channel];
      if (token < tokens && bits != right) FAIL_CHECK("wrong values");
    });
    return false;
  }
  bits_cache decoded(from.cache.shape, from.cache.tokens, untouched);
  const auto done = (*decoder)->decode_all(decoded, prediction);
  if (done) {
    if (decoded != from.cache) FAIL_CHECK("wrong values and no error");
    return true;
  }
  // Chunks before the bad one are there, the others are not.
  for (const chunk_record& record : (*decoder)->chunks()) {
    const bool before = static_cast<std::int64_t>(record.token_begin) < done.error().token ||
                        (static_cast<std::int64_t>(record.token_begin) == done.error().token &&
                         static_cast<std::int64_t>(record.layer_begin) < done.error().layer);
    for (std::uint64_t l = record.layer_begin; l < record.layers().end; ++l) {
      for (const cache_part part : cache_parts) {
        const auto layer = static_cast<std::uint32_t>(l);
        const std::size_t channels = from.cache.shape.layer(layer).channels(part);
        const auto begin = static_cast<std::ptrdiff_t>(record.token_begin * channels);
        const auto end = begin + static_cast<std::ptrdiff_t>(record.token_count * channels);
        const auto& got = decoded.part(layer, part);
        const auto& right = from.cache.part(layer, part);
        const bool good = before
                              ? std::equal(got.begin() + begin, got.begin() + end, right.begin() + begin)
                              : std::all_of(got.begin() + begin, got.begin() + end, [](std::uint16_t bits) { return bits == untouched; });
        if (!good) FAIL_CHECK("a failed decode left wrong values behind");
      }
    }
  }
  return false;
}

bool check_harmless(const victim& of, std::span<const std::byte> stream) {
  return check_harmless(*of.by.ready, stream, of.from, of.prediction());
}

/// The codes that the docstrings of `parse_profile` and `inspect_stream` name, but for memory.
bool is_documented(error_code code) {
  return code == error_code::truncated || code == error_code::corrupt || code == error_code::checksum_mismatch || code == error_code::unsupported;
}

/// Random damage of many kinds.
void mutate(std::vector<std::byte>& file, random_integers& random) {
  const auto place = [&](std::size_t room) { return static_cast<std::size_t>(random.below(room + 1)); };
  const auto edits = 1 + random.below(3);
  for (std::uint64_t edit = 0; edit < edits && !file.empty(); ++edit) {
    const std::size_t size = file.size();
    // Half of the time among the last bytes or the first, where lengths and counts are.
    std::size_t at = static_cast<std::size_t>(random.below(size));
    if (random.below(4) == 0) at = size - 1 - std::min<std::size_t>(size - 1, static_cast<std::size_t>(random.below(400)));
    if (random.below(4) == 0) at = std::min<std::size_t>(size - 1, static_cast<std::size_t>(random.below(160)));
    switch (random.below(9)) {
      case 0: file[at] ^= static_cast<std::byte>(1U << random.below(8)); break;
      case 1: file[at] = static_cast<std::byte>(random.next() & 0xffU); break;
      case 2: {  // a number, often an extreme one
        const std::uint64_t extremes[] = {
            0, 1, 31, 33, 0x7fffffffU, 0xffffffffU, 0x100000000U, ~std::uint64_t{0}, std::uint64_t{1} << 63, random.next()};
        const std::uint64_t number = extremes[random.below(std::size(extremes))];
        const std::size_t bytes = random.below(2) == 0 ? 4 : 8;
        at -= at % 4;
        for (std::size_t i = 0; i < bytes && at + i < size; ++i) file[at + i] = static_cast<std::byte>((number >> (8 * i)) & 0xffU);
        break;
      }
      case 3: {  // a small step of a number
        at -= at % 4;
        if (at + 4 > size) break;
        store_little_endian(file.data() + at,
                            static_cast<std::uint32_t>(load_little_endian<std::uint32_t>(file.data() + at) + random.below(9) - 4));
        break;
      }
      case 4: {  // two blocks change places
        const std::size_t length = 1 + static_cast<std::size_t>(random.below(std::min<std::size_t>(64, size)));
        const std::size_t a = place(size - length);
        const std::size_t b = place(size - length);
        if (a + length <= b || b + length <= a)
          std::swap_ranges(file.begin() + static_cast<std::ptrdiff_t>(a), file.begin() + static_cast<std::ptrdiff_t>(a + length),
                           file.begin() + static_cast<std::ptrdiff_t>(b));
        break;
      }
      case 5: file.resize(place(size)); break;
      case 6:
        for (std::uint64_t i = random.below(100); i > 0; --i) file.push_back(static_cast<std::byte>(random.next() & 0xffU));
        break;
      case 7: {  // a part is repeated
        const std::size_t length = 1 + static_cast<std::size_t>(random.below(std::min<std::size_t>(500, size)));
        const std::size_t from = place(size - length);
        const std::vector<std::byte> part(file.begin() + static_cast<std::ptrdiff_t>(from),
                                          file.begin() + static_cast<std::ptrdiff_t>(from + length));
        file.insert(file.begin() + static_cast<std::ptrdiff_t>(place(size)), part.begin(), part.end());
        break;
      }
      default: {  // a part is lost
        const std::size_t length = 1 + static_cast<std::size_t>(random.below(std::min<std::size_t>(100, size)));
        const auto from = static_cast<std::ptrdiff_t>(place(size - length));
        file.erase(file.begin() + from, file.begin() + from + static_cast<std::ptrdiff_t>(length));
        break;
      }
    }
  }
}

/// Generous: open and decode allocate the index and what the test itself needs.
constexpr std::size_t most_bytes_to_decode = 1U << 20;

/// Puts numbers in all places of the stream where there are some.
void check_numbers(const victim& whole) {
  const std::size_t size = whole.stream.size();
  const auto sections = inspect_stream(whole.stream)->sections;
  const std::size_t table_at = size - 32 - sections.size() * 32;
  const auto index_at = static_cast<std::size_t>(sections[2].offset);
  const std::uint64_t numbers[] = {0,
                                   1,
                                   2,
                                   16,
                                   17,
                                   1000,
                                   0x7fffffff,
                                   0x80000000,
                                   0xffffffe1,
                                   0xffffffff,
                                   0x100000000,
                                   0x10000000000,
                                   0x7fffffffffffffff,
                                   0x8000000000000000,
                                   0xffffffffffffffe0,
                                   0xfffffffffffffff8,
                                   0xffffffffffffffff};
  const auto try_at = [&](std::size_t at, std::size_t bytes) {
    // The checksum of a section that is checked in parts is not looked at.
    const std::size_t unused = table_at + 32 + 24;
    if (at >= unused && at < unused + 8) return;
    for (const std::uint64_t number : numbers) {
      std::vector<std::byte> file = whole.stream;
      for (std::size_t i = 0; i < bytes; ++i) file[at + i] = static_cast<std::byte>((number >> (8 * i)) & 0xffU);
      seal(file);
      const bool same = file == whole.stream;
      const allocation_meter meter;
      const bool decoded = check_harmless(whole, file);
      if (decoded != same) FAIL_CHECK("byte ", at, " number ", number);
      CHECK(meter.bytes() < most_bytes_to_decode);
      const auto opened = inspect_stream(file);
      CHECK((opened || is_documented(opened.error().code)));
    }
  };
  // The stream's header (all 4-byte fields but the hash, which may be anything but right), index, section table and footer.
  // Storage scales may be any: those that are no positive normal numbers count as 1, and the values themselves have checksums.
  const std::size_t scales_at = whole.chunks_at - 4 * inspect_stream(whole.stream)->header.storage_scales.size();
  for (std::size_t at = 16; at + 4 <= scales_at; at += 4) try_at(at, 4);
  // Of token ids only their size: they may be any.
  const std::size_t ids_at = index_at + 8 + 4 * 40;
  for (const std::size_t bytes : {4U, 8U}) {
    for (std::size_t at = index_at; at < ids_at; at += bytes) try_at(at, bytes);
    for (std::size_t at = table_at; at < size; at += bytes) try_at(at, bytes);
  }
  if (sections.size() == 4) try_at(ids_at, 4);
  // Headers of chunks, sealed: only the reserved field, the fingerprint and the checksums are not in the index, too.
  for (const chunk_record& record : whole.chunks) {
    for (std::size_t at = 0; at < 56; at += 4) {
      // The fingerprint of a chunk that needs none is not looked at.
      const bool has_fingerprint = whole.by.codec->needs_prediction() && record.mode == whole.by.codec->predictor();
      if (!has_fingerprint && (at == 40 || at == 44)) continue;
      try_at(whole.chunks_at + static_cast<std::size_t>(record.offset) + at, 4);
    }
    // Size of the coded symbols.
    if (record.mode != stored_mode) try_at(whole.chunks_at + static_cast<std::size_t>(record.offset) + 64, 4);
  }
}

}  // namespace

TEST_CASE("damage: a stream and a profile cut anywhere are refused") {
  for (const auto& [format, kind] : formats_and_kinds()) {
    const victim whole(format, kind);
    CHECK(check_harmless(whole, whole.stream));
    for (std::size_t length = 0; length < whole.stream.size(); ++length)
      if (whole.by.ready->open(std::span(whole.stream).first(length))) FAIL("opened a stream cut to ", length);
    for (std::size_t length = 0; length < whole.by.profile.size(); ++length)
      if (parse_profile(std::span(whole.by.profile).first(length))) FAIL("read a profile cut to ", length);
  }
}

TEST_CASE("damage: every single-bit flip of a stream is noticed") {
  for (const auto& [format, kind] : formats_and_kinds()) {
    victim whole(format, kind);
    for (std::size_t bit = 0; bit < 8 * whole.stream.size(); ++bit) {
      whole.stream[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
      if (check_harmless(whole, whole.stream)) FAIL("bit ", bit, " makes no difference");
      whole.stream[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    }
  }
}

TEST_CASE("damage: every single-bit flip of a profile is noticed") {
  for (const codec_kind kind : {codec_kind::channel_mean, codec_kind::cross_layer}) {
    const prepared whole(codec_for(number_format::float8_e4m3, kind), tiny_shape(), make_rotary(rotary_pairing::interleaved, 2));
    std::vector<std::byte> profile = whole.profile;
    for (std::size_t bit = 0; bit < 8 * profile.size(); ++bit) {
      profile[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
      if (parse_profile(profile)) FAIL("bit ", bit, " makes no difference");
      profile[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    }
  }
}

TEST_CASE("damage: a flip in one chunk leaves all others readable") {
  for (const number_format format : {number_format::float16, number_format::float8_e5m2}) {
    victim whole(format);
    CHECK(whole.chunks[0].mode == external::id);
    CHECK(whole.chunks[1].mode == channel_mean::id);
    CHECK(whole.chunks[3].mode == stored_mode);
    for (std::size_t bad = 0; bad < whole.chunks.size(); ++bad) {
      for (std::uint64_t at = 0; at < whole.chunks[bad].bytes; at += 7) {
        std::byte& byte = whole.stream[whole.chunks_at + static_cast<std::size_t>(whole.chunks[bad].offset + at)];
        byte ^= std::byte{0x10};
        const auto decoder = whole.by.ready->open(whole.stream);
        REQUIRE(decoder);
        for (std::size_t i = 0; i < whole.chunks.size(); ++i) {
          bits_cache decoded(victim_shape(), 50, untouched);
          const auto done = (*decoder)->decode({whole.chunks[i].layers(), whole.chunks[i].tokens(), {0, 50}}, decoded, whole.prediction());
          REQUIRE(static_cast<bool>(done) == (i != bad));
          if (done) continue;
          REQUIRE(done.error().layer == whole.chunks[bad].layer_begin);
          REQUIRE(done.error().token == static_cast<std::int64_t>(whole.chunks[bad].token_begin));
          REQUIRE(decoded == bits_cache(victim_shape(), 50, untouched));
        }
        byte ^= std::byte{0x10};
      }
    }
  }
}

TEST_CASE("damage: a flip in a chunk of mapped predictions leaves those below it and other tokens readable") {
  for (const auto& [format, kind] : formats_and_kinds()) {
    if (!is_mapped(kind)) continue;
    victim whole(format, kind);
    for (std::size_t bad = 0; bad < whole.chunks.size(); ++bad) {
      for (std::uint64_t at = 0; at < whole.chunks[bad].bytes; at += 23) {
        std::byte& byte = whole.stream[whole.chunks_at + static_cast<std::size_t>(whole.chunks[bad].offset + at)];
        byte ^= std::byte{0x10};
        const auto decoder = whole.by.ready->open(whole.stream);
        REQUIRE(decoder);
        for (const chunk_record& wanted : whole.chunks) {
          const bool needs_bad = wanted.tokens() == whole.chunks[bad].tokens() && wanted.layer_begin >= whole.chunks[bad].layer_begin;
          bits_cache decoded(victim_shape(), 50, untouched);
          const auto done = (*decoder)->decode({wanted.layers(), wanted.tokens(), {0, 50}}, decoded, whole.prediction());
          REQUIRE(static_cast<bool>(done) == !needs_bad);
          if (done) continue;
          REQUIRE(done.error().layer == whole.chunks[bad].layer_begin);
          REQUIRE(done.error().token == static_cast<std::int64_t>(whole.chunks[bad].token_begin));
          REQUIRE(decoded == bits_cache(victim_shape(), 50, untouched));
        }
        byte ^= std::byte{0x10};
      }
    }
  }
}

TEST_CASE("damage: sealing alone changes nothing, and reaches the chunks") {
  // The tests below mean little if the sealing is wrong.
  for (const number_format format : {number_format::bfloat16, number_format::float8_e4m3}) {
    victim whole(format);
    std::vector<std::byte> sealed = whole.stream;
    seal(sealed);
    CHECK(sealed == whole.stream);
    std::vector<std::byte> profile = whole.by.profile;
    seal(profile);
    CHECK(profile == whole.by.profile);
    sealed[whole.chunks_at + 200] ^= std::byte{1};
    seal(sealed);
    const auto decoder = whole.by.ready->open(sealed);
    REQUIRE(decoder);
    bits_cache decoded(victim_shape(), 50, untouched);
    const auto done = (*decoder)->decode_all(decoded, whole.prediction());
    REQUIRE(!done);
    CHECK(std::string(done.error().what) != "coded bytes of a chunk");
  }
}

TEST_CASE("damage: sizes that overflow or ask for terabytes are refused") {
  for (const auto& [format, kind] : {std::pair{number_format::bfloat16, codec_kind::external},
                                     {number_format::bfloat16, codec_kind::cross_layer},
                                     {number_format::float8_e4m3, codec_kind::cross_layer_external}})
    check_numbers(victim(format, kind));
}

TEST_CASE("damage: a chunk that claims more tokens than a chunk may hold is refused") {
  const prepared by(codec_for(number_format::bfloat16, codec_kind::channel_mean), victim_shape());
  const example from = make_example(victim_shape(), 50, number_format::bfloat16, 2);
  const std::vector<std::byte> stream = by.encode(from);
  const auto chunks_at = static_cast<std::size_t>(inspect_stream(stream)->chunks.data() - stream.data());
  const std::size_t index_at = stream.size() - 32 - 3 * 32 - 8 - 40;
  for (const std::uint32_t tokens : {49U, 50U, 51U, 64U, 1U << 16, 116480U, 116513U, 1U << 21, 0x7fffffffU, 0xffffffe0U, 0xffffffffU}) {
    CAPTURE(tokens);
    std::vector<std::byte> file = stream;
    store_little_endian(file.data() + index_at, std::uint64_t{tokens});
    store_little_endian(file.data() + index_at + 8 + 12, tokens);
    store_little_endian(file.data() + chunks_at + 16, tokens);
    seal(file);
    const auto decoder = by.ready->open(file);
    const bool fits = (std::uint64_t{tokens} + 31) / 32 * 32 * victim_shape().channels() <= max_chunk_values;
    REQUIRE(static_cast<bool>(decoder) == fits);
    if (!decoder) {
      CHECK(decoder.error().code == error_code::corrupt);
      continue;
    }
    CHECK((*decoder)->workspace_bytes() <= std::size_t{16} << 20);
    CHECK(check_harmless(*by.ready, file, from, {}) == (tokens == 50));
  }
}

TEST_CASE("damage: profiles whose sizes overflow or ask for terabytes are refused") {
  const prepared whole(codec_for(number_format::float8_e4m3, codec_kind::external), tiny_shape(),
                       make_rotary(rotary_pairing::interleaved, 2), 60);
  const std::uint32_t numbers[] = {0, 1, 2, 17, 256, 257, 16383, 16385, 65535, 65536, 65537, 0x7fffffff, 0x80000000, 0xffffffff};
  const auto original = parse_profile(whole.profile);
  REQUIRE(original);
  // The header, the shape, the rotary description and the first model's header.
  for (std::size_t at = 16; at < 16 + 120; at += 4) {
    for (const std::uint32_t number : numbers) {
      std::vector<std::byte> file = whole.profile;
      store_little_endian(file.data() + at, number);
      seal(file);
      const allocation_meter meter;
      const auto parsed = parse_profile(file);
      CHECK(meter.bytes() < 400 * file.size());  // frequency tables take 1 KiB for 6 bytes
      if (parsed) {
        CHECK(*serialize_profile(parsed->data) == file);
      } else {
        CAPTURE(at);
        CAPTURE(number);
        CHECK(is_documented(parsed.error().code));
      }
    }
  }
}

TEST_CASE("damage: maps whose sizes ask for more than the profile holds are refused before memory is taken") {
  const cache_shape shape = make_shape({{1, 256, 0}, {1, 2, 0}});
  const codec_under_test& codec = codec_for(number_format::float8_e4m3, codec_kind::cross_layer);
  const prepared whole(codec, shape, {}, 60);
  const layer_maps maps = parse_profile(whole.profile)->data.models[0].maps;
  std::vector<std::byte> header;
  byte_writer out(header);
  for (const std::uint32_t each : {1U, maps.layers_back, maps.rank, maps.block_size, maps.hidden_width}) out.put(each);
  const auto found = std::search(whole.profile.begin(), whole.profile.end(), header.begin(), header.end());
  REQUIRE(found != whole.profile.end());
  const auto at = static_cast<std::size_t>(found - whole.profile.begin());
  for (std::size_t field = 0; field < 5; ++field) {
    for (const std::uint32_t number :
         {0U, 1U, 2U, 3U, 7U, 8U, 9U, 16U, 255U, 256U, 65535U, 65536U, 65537U, 0x7fffffffU, 0x80000000U, 0xffffffffU}) {
      std::vector<std::byte> file = whole.profile;
      store_little_endian(file.data() + at + 4 * field, number);
      seal(file);
      const bool same = file == whole.profile;
      const allocation_meter meter;
      const auto parsed = parse_profile(file);
      CHECK(meter.bytes() < 200 * file.size());
      CAPTURE(field);
      CAPTURE(number);
      // Other flags may serve as well, and where there are two layers, any number of layers back.
      if (field > 1 || number == 0 || number > 8) CHECK(static_cast<bool>(parsed) == same);
    }
  }
}

TEST_CASE("damage: 80,000 random changes of streams give errors or the right values") {
  std::uint64_t accepted = 0;
  for (const auto& [format, kind] : formats_and_kinds()) {
    const victim whole(format, kind);
    random_integers random(11 + bytes_of(format) + 8 * static_cast<std::uint64_t>(kind));
    for (int i = 0; i < 10000; ++i) {
      std::vector<std::byte> file = whole.stream;
      mutate(file, random);
      if (random.below(2) == 0) seal(file);
      const allocation_meter meter;
      accepted += check_harmless(whole, file) ? 1U : 0U;
      if (meter.bytes() > most_bytes_to_decode) FAIL("change ", i, " takes ", meter.bytes(), " bytes");
      (void)inspect_stream(file);
    }
  }
  // Changes that cancel out or touch what is not used; most are noticed.
  CHECK(accepted < 2000);
}

TEST_CASE("damage: 30,000 random changes of profiles give errors or profiles that lose nothing") {
  std::uint64_t read = 0;
  for (const auto& [format, kind] : formats_and_kinds()) {
    if (kind == codec_kind::channel_mean) continue;
    const victim whole(format, kind);
    random_integers random(21 + bytes_of(format) + 8 * static_cast<std::uint64_t>(kind));
    for (int i = 0; i < 5000; ++i) {
      std::vector<std::byte> file = whole.by.profile;
      mutate(file, random);
      if (random.below(4) != 0) seal(file);
      std::size_t bytes = 0;
      const auto parsed = [&] {
        const allocation_meter meter;
        auto outcome = parse_profile(file);
        bytes = meter.bytes();
        return outcome;
      }();
      if (bytes > 400 * file.size() + 10000) FAIL("change ", i, " takes ", bytes, " bytes");
      if (!parsed && !is_documented(parsed.error().code)) FAIL("change ", i, " gives ", to_string(parsed.error().code));
      if (!parsed) continue;
      ++read;
      // A bad profile may cost size, never values.
      if (i % 20 != 0) continue;
      const auto ready = whole.by.codec->parse(file);
      if (!ready || (*ready)->shape() != victim_shape()) continue;
      const auto stream = (*ready)->encode(whole.from.cache, whole.prediction());
      REQUIRE(stream);
      REQUIRE(check_harmless(**ready, *stream, whole.from, whole.prediction()));
      // And with the original's stream it must find out.
      const auto impostor = whole.by.codec->make(parsed->data, whole.by.ready->hash());
      REQUIRE(impostor);
      check_harmless(**impostor, whole.stream, whole.from, whole.prediction());
    }
  }
  CHECK(read > 1000);  // enough of them get past the checksums
}

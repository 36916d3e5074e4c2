// SPDX-License-Identifier: Apache-2.0
#include <kvexact/remote/band_coder.hpp>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/codec/codec.hpp>

#include "codec/example_cache.hpp"
#include "tensor/owned_cache.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

using codec_type = codec_without_model<bf16>;

std::vector<std::byte> read_golden(const std::string& name) {
  std::ifstream file(KVEXACT_TESTS_DIR "/codec/golden/" + name, std::ios::binary);
  const std::vector<char> text{std::istreambuf_iterator<char>(file), {}};
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

profile<codec_type> golden_profile() { return *profile<codec_type>::parse(read_golden("bf16_cross_layer.kvp")); }

/// Values of the kind that the profile was calibrated on, so that chunks are coded with its predictor: the heads of layer 0 are alike, and
/// the keys of layer 1 are like keys and values of layer 0.
void fill(owned_cache<bf16>& cache) {
  const example from = make_example(make_shape({{2, 4, 2}, {1, 6, 0}}), 64, number_format::bfloat16, 2);
  cache.for_each([&](bf16& scalar, std::uint32_t l, cache_part part, std::uint64_t t, std::uint32_t h, std::uint32_t d) {
    const bool of_key = l == 0 ? part == cache_part::key : d < 4;
    const std::size_t channel = of_key ? d : l == 0 ? 2 * h + d : d - 4;
    scalar = bf16::from_bits(from.cache.part(0, of_key ? cache_part::key : cache_part::value)[t % 64 * (of_key ? 8 : 4) + channel]);
  });
}

}  // namespace

TEST_CASE("band_coder: rows at any positions, to the bit") {
  const profile<codec_type> parameters = golden_profile();
  band_coder<codec_type> near(parameters), far(parameters);
  for (const index_range tokens : {index_range{0, 1}, {0, 70}, {37, 41}, {250, 300}, {256, 512}, {1'000'000, 1'000'040}}) {
    CAPTURE(tokens.begin);
    const index_range held{tokens.begin - std::min<std::uint64_t>(tokens.begin, 3), tokens.end + 2};
    owned_cache<bf16> cache(parameters.shape(), held, layout::hnd_padded);
    fill(cache);
    std::vector<std::byte> bytes;
    REQUIRE(near.encode(cache.reader(), tokens, bytes));
    CHECK(bytes.size() <= near.most_bytes(tokens));
    const auto mode = load_little_endian<std::uint32_t>(bytes.data() + 4);  // of the first chunk
    if (tokens.size() >= 70) CHECK(mode == cross_layer<channel_mean>::id);
    owned_cache<bf16> got(parameters.shape(), tokens, layout::nhd);
    REQUIRE(far.decode(bytes, tokens, got.view()));
    bool same = true;
    got.for_each([&](const bf16& scalar, std::uint32_t l, cache_part part, std::uint64_t t, std::uint32_t h, std::uint32_t d) {
      same &= scalar.bits == cache.reader().row(l, part, t, h)[d].bits;
    });
    CHECK(same);
  }
}

TEST_CASE("band_coder: what it writes are the chunks of a stream") {
  const profile<codec_type> parameters = golden_profile();
  owned_cache<bf16> cache(parameters.shape(), {0, 300}, layout::nhd), longer(parameters.shape(), {0, 340}, layout::nhd);
  fill(cache);
  fill(longer);
  std::vector<std::byte> as_stream, bytes, memory(stream_encoder<codec_type, vector_sink>::workspace_bytes(parameters));
  vector_sink sink(as_stream);
  auto encoder = stream_encoder<codec_type, vector_sink>::begin(parameters, memory, sink);
  REQUIRE(encoder);
  REQUIRE(encoder->append(cache.reader()));
  REQUIRE(encoder->append(longer.reader()));
  REQUIRE(encoder->finish());
  band_coder<codec_type> coder(parameters);
  REQUIRE(coder.encode(longer.reader(), {0, 300}, bytes));
  REQUIRE(coder.encode(longer.reader(), {300, 340}, bytes));
  CHECK(std::ranges::equal(inspect_stream(as_stream)->chunks, bytes));
}

TEST_CASE("band_coder: damage has a name") {
  const profile<codec_type> parameters = golden_profile();
  band_coder<codec_type> coder(parameters);
  const index_range tokens{5, 9};
  owned_cache<bf16> cache(parameters.shape(), tokens, layout::nhd), got(parameters.shape(), tokens, layout::nhd);
  fill(cache);
  std::vector<std::byte> good;
  REQUIRE(coder.encode(cache.reader(), tokens, good));
  const auto code_of = [&](std::span<const std::byte> bytes, index_range range) {
    return coder.decode(bytes, range, got.view()).error().code;
  };
  const auto is_named = [](error_code code) {
    return code == error_code::truncated || code == error_code::corrupt || code == error_code::checksum_mismatch ||
           code == error_code::unsupported;
  };
  for (std::size_t size = 0; size < good.size(); ++size) CHECK(is_named(code_of(std::span(good).first(size), tokens)));
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    auto bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    CHECK(is_named(code_of(bad, tokens)));
  }
  auto longer = good;
  longer.push_back({});
  CHECK(code_of(longer, tokens) == error_code::corrupt);
  CHECK(code_of(good, {5, 8}) == error_code::corrupt);
  CHECK(code_of(good, {6, 10}) == error_code::corrupt);
}

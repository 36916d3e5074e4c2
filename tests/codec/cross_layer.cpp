// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/prediction/channel_mean.hpp>

#include "codec_under_test.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr std::uint16_t untouched = 0x33;

/// How a value follows from others of its token that have been made before: `so_far(layer, part, channel)` gives these, keys before
/// rotation.
using rule = std::function<double(std::uint32_t layer, cache_part part, std::uint32_t channel,
                                  const std::function<double(std::uint32_t, cache_part, std::uint32_t)>& so_far)>;

/// Values as a rule says plus noise of the size `noise(layer, token)`, around means; K turned by position. The prediction is the mean.
struct synthetic {
  cache_shape shape;
  rotary rotation;
  rule follow;
  std::function<double(std::uint32_t layer, std::uint64_t token)> noise;

  example make(std::uint64_t tokens, number_format format, std::uint64_t seed) const {
    example made{bits_cache(shape, tokens), bits_cache(shape, tokens)};
    random_integers random(seed);
    for (std::uint64_t t = 0; t < tokens; ++t) {
      std::vector<std::vector<double>> parts;
      const auto so_far = [&](std::uint32_t l, cache_part p, std::uint32_t c) { return parts[2 * l + static_cast<std::size_t>(p)][c]; };
      for (std::uint32_t l = 0; l < shape.layers(); ++l) {
        for (const cache_part part : cache_parts) {
          const std::uint32_t channels = shape.layer(l).channels(part);
          parts.emplace_back();
          for (std::uint32_t c = 0; c < channels; ++c) {
            const double drawn = std::ldexp(static_cast<double>(random.bell()), -16) * noise(l, t);
            parts.back().push_back(drawn + follow(l, part, c, so_far));
          }
          // As cached, and the prediction: the mean, as it would be cached.
          std::vector<double> row = parts.back();
          std::vector<double> guess(channels);
          for (std::uint32_t c = 0; c < channels; ++c) {
            guess[c] = mean_of(l, part, c);
            row[c] += guess[c];
          }
          for (std::vector<double>* const each : {&row, &guess}) {
            if (part == cache_part::key) turn(*each, shape.layer(l), t);
          }
          for (std::uint32_t c = 0; c < channels; ++c) {
            made.cache.part(l, part)[t * channels + c] = bits_of(format, static_cast<float>(row[c]));
            made.prediction.part(l, part)[t * channels + c] = bits_of(number_format::bfloat16, static_cast<float>(guess[c]));
          }
        }
      }
    }
    return made;
  }

 private:
  static double mean_of(std::uint32_t layer, cache_part part, std::uint32_t channel) {
    random_integers of_channel((std::uint64_t{layer} << 40) + (static_cast<std::uint64_t>(part) << 32) + channel);
    return static_cast<double>(of_channel.below(64)) / 16 - 2;
  }
  void turn(std::vector<double>& row, const layer_shape& layer, std::uint64_t token) const {
    for (std::uint32_t head = 0; head < layer.kv_heads; ++head) {
      for (std::uint32_t i = 0; i < rotation.dim() / 2; ++i) {
        const auto [first, second] = rotation.pair(i);
        const double angle = 6.283185307179586 * std::ldexp(static_cast<double>(token * rotation.turns()[i]), -64);
        double& a = row[head * layer.key_dim + first];
        double& b = row[head * layer.key_dim + second];
        std::tie(a, b) = std::pair{a * std::cos(angle) - b * std::sin(angle), a * std::sin(angle) + b * std::cos(angle)};
      }
    }
  }
};

/// A weight that depends on its place alone, one of +-1, divided by `terms` such that sums keep their size.
double weight_of(std::uint64_t place, double terms) { return ((random_integers(place).next() & 1U) != 0 ? 1 : -1) / std::sqrt(terms); }

/// Every channel of a layer is a sum of four channels of the layer below.
rule from_layer_below(const cache_shape& shape, bool per_head = false) {
  return [shape, per_head](std::uint32_t l, cache_part part, std::uint32_t c, const auto& so_far) {
    if (l == 0) return 0.0;
    double sum = 0;
    for (std::uint32_t k = 0; k < 4; ++k) {
      const std::uint64_t place = ((std::uint64_t{l} * 2 + static_cast<std::uint64_t>(part)) * 1000 + c) * 8 + k;
      const layer_shape& below = shape.layer(l - 1);
      const cache_part from = k % 2 == 0 || below.value_dim == 0 ? cache_part::key : cache_part::value;
      const std::uint32_t dim = below.dim(from);
      const std::uint32_t head =
          per_head ? c / shape.layer(l).dim(part) : static_cast<std::uint32_t>(random_integers(place).below(below.kv_heads));
      sum += weight_of(place, 4) * so_far(l - 1, from, head * dim + static_cast<std::uint32_t>(random_integers(place + 1).below(dim)));
    }
    return sum;
  };
}

double bits_per_value(const codec_under_test& codec, const synthetic& data, const rotary& assumed, const calibration_options& options = {},
                      std::uint64_t tokens = 512) {
  std::vector<example> examples;
  for (const std::uint64_t seed : {1U, 2U, 3U}) examples.push_back(data.make(tokens, codec.format(), seed));
  const prepared by(codec, examples, assumed, {}, options);
  const example from = data.make(tokens, codec.format(), 9);
  const std::vector<std::byte> stream = by.encode(from);
  bits_cache decoded(from.cache.shape, tokens, untouched);
  const auto decoder = by.ready->open(stream);
  REQUIRE(decoder);
  const auto done = (*decoder)->decode_all(decoded, by.prediction_of(from));
  REQUIRE_MESSAGE(done, done.error().message());
  CHECK(decoded == from.cache);
  return 8 * static_cast<double>(stream.size()) / static_cast<double>(from.cache.values());
}

cache_shape some_layers() { return make_shape({{2, 8, 6}, {2, 8, 6}, {2, 8, 0}, {2, 8, 6}}); }

/// Loud in the lowest layer, and 1/32 of that above.
double loud_below(std::uint32_t layer, std::uint64_t) { return layer == 0 ? 1 : 1.0 / 32; }

}  // namespace

TEST_CASE("cross_layer: layers that follow from those below cost far fewer bits than channel means") {
  const rotary interleaved = make_rotary(rotary_pairing::interleaved, 6);
  const rotary half_split = make_rotary(rotary_pairing::half_split, 8);
  for (const rotary& rotation : {rotary(), interleaved, half_split}) {
    const synthetic data{some_layers(), rotation, from_layer_below(some_layers()), loud_below};
    for (const number_format format : {number_format::bfloat16, mapped_float16}) {
      const double without = bits_per_value(codec_for(format, codec_kind::channel_mean), data, rotation);
      const double with = bits_per_value(codec_for(format, codec_kind::cross_layer), data, rotation);
      const double on_prediction = bits_per_value(codec_for(format, codec_kind::cross_layer_external), data, rotation);
      const double plain_prediction = bits_per_value(codec_for(format, codec_kind::external), data, rotation);
      CAPTURE(without);
      CAPTURE(with);
      CAPTURE(on_prediction);
      CAPTURE(plain_prediction);
      // Five bits for some 70 % of the values, less what rounding takes.
      CHECK(with + 2.5 < without);
      CHECK(on_prediction + 2.5 < plain_prediction);
    }
  }
}

TEST_CASE("cross_layer: of keys only if it knows how they are rotated") {
  const rotary rotation = make_rotary(rotary_pairing::half_split, 8);
  const cache_shape keys = *cache_shape::uniform(4, {2, 8, 0});
  const synthetic data{keys, rotation, from_layer_below(keys), loud_below};
  const codec_under_test& codec = codec_for(mapped_float16, codec_kind::cross_layer);
  const double right = bits_per_value(codec, data, rotation);
  CHECK(right + 2 < bits_per_value(codec, data, rotary()));
  CHECK(right + 1 < bits_per_value(codec, data, make_rotary(rotary_pairing::interleaved, 8)));
}

TEST_CASE("cross_layer: values follow from keys of their own layer") {
  const synthetic data{some_layers(),
                       {},
                       [](std::uint32_t l, cache_part part, std::uint32_t c, const auto& so_far) {
                         return part == cache_part::key ? 0.0
                                                        : weight_of(c, 2) * so_far(l, cache_part::key, c) +
                                                              weight_of(c + 99, 2) * so_far(l, cache_part::key, c + 1);
                       },
                       [](std::uint32_t, std::uint64_t) { return 0.5; }};
  // The noise of V is as loud as that of K here, so half a bit of V is all there is to win: twice the variance becomes once.
  const double without = bits_per_value(codec_for(number_format::bfloat16, codec_kind::channel_mean), data, {}, {}, 1500);
  const double with = bits_per_value(codec_for(number_format::bfloat16, codec_kind::cross_layer), data, {}, {.layers_back = 1}, 1500);
  CAPTURE(without);
  CAPTURE(with);
  CHECK(with + 0.1 < without);
}

TEST_CASE("cross_layer: looks back as far as it is told") {
  // Layer 3 follows from layer 0, the others from nothing.
  const cache_shape shape = *cache_shape::uniform(4, {2, 6, 6});
  const synthetic data{
      shape,
      {},
      [](std::uint32_t l, cache_part part, std::uint32_t c, const auto& so_far) { return l < 3 ? 0.0 : so_far(0, part, c); },
      [](std::uint32_t l, std::uint64_t) { return l < 3 ? 1.0 : 1.0 / 64; }};
  const codec_under_test& codec = codec_for(mapped_float16, codec_kind::cross_layer);
  const double three = bits_per_value(codec, data, {}, {.layers_back = 3});
  const double two = bits_per_value(codec, data, {}, {.layers_back = 2});
  CAPTURE(three);
  CAPTURE(two);
  CHECK(three + 1 < two);  // 6 bits of a quarter
}

TEST_CASE("cross_layer: maps of low rank and by head find what such maps can say") {
  const cache_shape shape = *cache_shape::uniform(4, {2, 8, 8});
  // Two numbers of each token are in all channels of all layers.
  const synthetic thin{shape,
                       {},
                       [](std::uint32_t l, cache_part part, std::uint32_t c, const auto& so_far) {
                         if (l == 0) return part == cache_part::key && c < 2 ? 0.0 : weight_of(c, 1) * so_far(0, cache_part::key, c % 2);
                         return weight_of(100 * l + c, 2) * so_far(0, cache_part::key, 0) +
                                weight_of(200 * l + c, 2) * so_far(0, cache_part::key, 1);
                       },
                       [](std::uint32_t, std::uint64_t) { return 1.0 / 16; }};
  const synthetic loud{shape, {}, thin.follow, [](std::uint32_t l, std::uint64_t) { return l == 0 ? 1.0 : 1.0 / 16; }};
  const codec_under_test& codec = codec_for(mapped_float16, codec_kind::cross_layer);
  const double full = bits_per_value(codec, loud, {}, {.block_size = 0});
  const double two = bits_per_value(codec, loud, {}, {.block_size = 0, .rank = 2});
  const double one = bits_per_value(codec, loud, {}, {.block_size = 0, .rank = 1});
  CAPTURE(full);
  CAPTURE(two);
  CAPTURE(one);
  CHECK(two < full + 0.15);
  CHECK(two + 1 < one);

  const synthetic by_head{shape, {}, from_layer_below(shape, true), loud_below};
  const double heads = bits_per_value(codec, by_head, {}, {.per_head = true});
  const double all = bits_per_value(codec, by_head, {});
  CAPTURE(heads);
  CAPTURE(all);
  CHECK(heads < all + 0.05);
  const synthetic across{shape, {}, from_layer_below(shape), loud_below};
  CHECK(bits_per_value(codec, across, {}) + 0.5 < bits_per_value(codec, across, {}, {.per_head = true}));
}

TEST_CASE("cross_layer: channels help those of their tile that are coded after them") {
  // The second half of each head repeats the first.
  const cache_shape shape = *cache_shape::uniform(2, {2, 8, 8});
  const synthetic data{
      shape,
      {},
      [](std::uint32_t l, cache_part part, std::uint32_t c, const auto& so_far) { return c % 8 < 4 ? 0.0 : so_far(l, part, c - 4); },
      [](std::uint32_t, std::uint64_t) { return 1.0; }};
  for (const codec_kind kind : {codec_kind::cross_layer, codec_kind::cross_layer_external}) {
    const codec_under_test& codec = codec_for(number_format::bfloat16, kind);
    const double alone = bits_per_value(codec, data, {}, {.block_size = 0}, 1500);
    const double blocks = bits_per_value(codec, data, {}, {.block_size = 4}, 1500);
    CAPTURE(alone);
    CAPTURE(blocks);
    CHECK(blocks + 0.15 < alone);  // of half the values the variance is 1 instead of 2
  }
}

TEST_CASE("cross_layer: tokens that are loud or quiet as a whole are noticed") {
  const cache_shape shape = *cache_shape::uniform(4, {2, 12, 12});
  const synthetic data{
      shape,
      {},
      [](auto&&...) { return 0.0; },
      [](std::uint32_t, std::uint64_t token) { return std::exp2(static_cast<double>(random_integers(token).below(5)) - 2); }};
  const synthetic even{shape, {}, [](auto&&...) { return 0.0; }, [](std::uint32_t, std::uint64_t) { return 1.0; }};
  const auto gain = [&](const synthetic& of) {
    return bits_per_value(codec_for(number_format::bfloat16, codec_kind::channel_mean), of, {}, {}, 1000) -
           bits_per_value(codec_for(number_format::bfloat16, codec_kind::cross_layer), of, {}, {}, 1000);
  };
  CHECK(gain(data) > 0.2);
  CHECK(gain(even) > -0.1);
}

TEST_CASE("cross_layer: a range of tokens needs the chunks of that range only") {
  const cache_shape shape = some_layers();
  const synthetic data{shape, make_rotary(rotary_pairing::half_split, 4), from_layer_below(shape), loud_below};
  for (const codec_under_test* const codec : {&codec_for(number_format::bfloat16, codec_kind::cross_layer),
                                              &codec_for(number_format::float8_e4m3, codec_kind::cross_layer_external)}) {
    const prepared by(*codec, std::vector{data.make(200, codec->format(), 1)}, data.rotation);
    const example from = data.make(100, codec->format(), 2);
    std::vector<std::byte> stream = by.encode(from, {.options = {.chunks = {.tokens_per_chunk = 32, .values_per_chunk = 1}}});
    const auto opened = inspect_stream(stream);
    REQUIRE(opened);
    REQUIRE(opened->index.chunks.size() == 16);
    const auto chunks_at = static_cast<std::size_t>(opened->chunks.data() - stream.data());
    for (std::size_t kept = 0; kept < 4; ++kept) {
      std::vector<std::byte> damaged = stream;
      for (std::size_t i = 0; i < 16; ++i)
        if (i / 4 != kept) damaged[chunks_at + static_cast<std::size_t>(opened->index.chunks[i].offset) + 100] ^= std::byte{1};
      const auto decoder = by.ready->open(damaged);
      REQUIRE(decoder);
      for (const index_range layers : {index_range{0, 4}, index_range{1, 3}, index_range{3, 4}}) {
        const index_range tokens{32 * kept + 1, std::min<std::uint64_t>(32 * kept + 30, 100)};
        bits_cache decoded(shape, 100, untouched);
        const auto prediction =
            codec->needs_prediction() ? optional_source(source(from.prediction, (*decoder)->covering_tokens(tokens))) : std::nullopt;
        const auto done = (*decoder)->decode({layers, tokens, tokens}, decoded, prediction);
        REQUIRE_MESSAGE(done, done.error().message());
        bool right = true;
        decoded.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part part, std::uint64_t token, std::size_t channel) {
          const bool wanted = layer >= layers.begin && layer < layers.end && token >= tokens.begin && token < tokens.end;
          right = right && bits == (wanted ? from.cache.part(layer, part)[token * shape.layer(layer).channels(part) + channel] : untouched);
        });
        CHECK(right);
      }
      // Upper layers need the lower ones.
      damaged[chunks_at + static_cast<std::size_t>(opened->index.chunks[4 * kept + 1].offset) + 100] ^= std::byte{1};
      const auto worse = by.ready->open(damaged);
      REQUIRE(worse);
      bits_cache decoded(shape, 100, untouched);
      const index_range tokens = opened->index.chunks[4 * kept].tokens();
      CHECK((*worse)->decode({{0, 1}, tokens, tokens}, decoded, codec->prediction_of(from)));
      const auto done = (*worse)->decode({{2, 4}, tokens, tokens}, decoded, codec->prediction_of(from));
      REQUIRE(!done);
      CHECK(done.error().code == error_code::checksum_mismatch);
      CHECK(done.error().layer == 1);
      CHECK(done.error().token == static_cast<std::int64_t>(tokens.begin));
    }
  }
}

TEST_CASE("cross_layer: chunks that fall back leave those above them decodable") {
  const cache_shape shape = *cache_shape::uniform(6, {2, 8, 6});
  const synthetic data{shape, make_rotary(rotary_pairing::half_split, 4), from_layer_below(shape),
                       [](std::uint32_t layer, std::uint64_t) { return layer == 0 ? 1 : 1.0 / 8; }};
  for (const number_format format : {number_format::bfloat16, number_format::float8_e4m3}) {
    for (const codec_kind kind : {codec_kind::cross_layer, codec_kind::cross_layer_external}) {
      const codec_under_test& codec = codec_for(format, kind);
      CAPTURE(codec.name());
      const prepared by(codec, std::vector{data.make(600, format, 1), data.make(600, format, 2)}, data.rotation, {}, {.layers_back = 1});
      example from = data.make(64, format, 3);
      random_integers random(4);
      // Noise in layer 1 of the first band; layer 2 of the second predicted by nonsense.
      from.cache.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part, std::uint64_t token, std::size_t) {
        if (layer == 1 && token < 32) bits = static_cast<std::uint16_t>(random.next() & (bytes_of(format) == 1 ? 0xffU : 0xffffU));
      });
      from.prediction.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part, std::uint64_t token, std::size_t) {
        if (layer == 2 && token >= 32) bits = bits_of(number_format::bfloat16, std::ldexp(static_cast<float>(random.bell()), -13));
      });
      const std::vector<std::byte> stream = by.encode(from, {.options = {.chunks = {.tokens_per_chunk = 32, .values_per_chunk = 1}}});
      const auto decoder = by.ready->open(stream);
      REQUIRE(decoder);
      std::vector<std::uint32_t> modes;
      for (const chunk_record& record : (*decoder)->chunks()) modes.push_back(record.mode);
      const std::uint32_t mapped = codec.predictor();
      REQUIRE(modes.size() == 12);
      // Layer 2 suffers from what it is mapped from, and layer 3 from the scale of layer 2; then all is well again.
      CHECK(modes[1] != mapped);
      CHECK(modes[4] == mapped);
      CHECK(modes[5] == mapped);
      CHECK(modes[7] == mapped);
      CHECK(modes[8] == (codec.needs_prediction() ? channel_mean::id : mapped));
      CHECK(modes[10] == mapped);
      CHECK(modes[11] == mapped);
      bits_cache decoded(shape, 64, untouched);
      const auto done = (*decoder)->decode_all(decoded, by.prediction_of(from));
      REQUIRE_MESSAGE(done, done.error().message());
      CHECK(decoded == from.cache);
      // One layer alone as well.
      for (std::uint64_t layer = 0; layer < 6; ++layer) {
        bits_cache one(shape, 64, untouched);
        REQUIRE((*decoder)->decode({{layer, layer + 1}, {0, 64}, {0, 64}}, one, by.prediction_of(from)));
        for (const cache_part part : cache_parts)
          CHECK(one.part(static_cast<std::uint32_t>(layer), part) == from.cache.part(static_cast<std::uint32_t>(layer), part));
      }
    }
  }
}

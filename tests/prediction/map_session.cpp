// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/numeric/fp8_e4m3.hpp>
#include <kvexact/numeric/fp8_e5m2.hpp>
#include <kvexact/prediction/map_session.hpp>

#include "codec/example_cache.hpp"
#include "codec/hand_made_maps.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

using bits = std::uint32_t;

std::int64_t limited(std::int64_t value, std::int64_t largest) { return std::clamp(value, -largest, largest); }
std::int64_t rounded(std::int64_t value, int shift) { return (value + (std::int64_t{1} << (shift - 1))) >> shift; }

std::int64_t fixed_of(long double value, int unit) {
  return std::isfinite(value) ? static_cast<std::int64_t>(std::trunc(std::clamp(std::ldexp(value, -unit), -0x3fffffffp0L, 0x3fffffffp0L)))
                              : 0;
}
std::int64_t fixed_of(bits of, int unit) { return fixed_of(static_cast<long double>(std::bit_cast<float>(of)), unit); }

/// All that a prediction is made of, one token at a time and without regard to speed: what docs/format.md says, once more.
template <class Scalar>
class reference {
 public:
  reference(const cache_shape& shape, const rotary& rotation, const layer_maps& maps, std::span<const bits> scales)
      : shape_(shape), rotation_(rotation), maps_(maps), scales_(scales) {}

  struct outcome {
    std::vector<bits> means;             // [channel]
    std::int32_t token_scale = 0;        // that was in force
    std::vector<float> fed_back;         // [channel]
    std::vector<std::int64_t> features;  // in coding order
  };

  /// Predicts a tile of a token and learns its values. `features`: those of all tiles before, by (layer, part).
  using history = std::map<std::pair<std::uint32_t, cache_part>, std::vector<std::int64_t>>;
  outcome run(std::uint32_t layer, cache_part part, std::size_t number, std::uint64_t position, std::span<const bits> base,
              std::span<const typename Scalar::bits_type> values, const history& before, std::int32_t& token_scale) const {
    const tile_map& map = maps_.tiles[number];
    const layer_shape& of = shape_.layer(layer);
    const std::uint32_t dim = of.dim(part);
    const std::uint32_t rotated = part == cache_part::key ? rotation_.dim() : 0;
    outcome out;
    out.means.resize(of.channels(part));
    out.fed_back.resize(of.channels(part));
    out.token_scale = token_scale;
    std::vector<std::int64_t> residuals(of.channels(part));
    std::int64_t energy = 0;

    const auto blocks = blocks_of(shape_, rotation_, maps_, layer, part);
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      // Features.
      std::vector<std::int64_t> seen;
      const auto take = [&](std::uint32_t l, cache_part p) {
        const auto found = before.find({l, p});
        if (found == before.end()) return;
        const std::vector<std::int64_t>& all = found->second;
        const std::size_t width = shape_.layer(l).dim(p);
        const std::size_t first = maps_.per_head ? blocks[b].head * width : 0;
        seen.insert(seen.end(), all.begin() + static_cast<std::ptrdiff_t>(first),
                    all.begin() + static_cast<std::ptrdiff_t>(maps_.per_head ? first + width : all.size()));
      };
      for (std::uint32_t back = 1; back <= maps_.layers_back && back <= layer; ++back) {
        take(layer - back, cache_part::key);
        take(layer - back, cache_part::value);
      }
      if (part == cache_part::value) take(layer, cache_part::key);
      if (map.inner.rows > 0) {
        std::vector<std::int64_t> few;
        for (std::size_t r = 0; r < map.inner.rows; ++r) few.push_back(limited(product(map.inner, r, seen, 20), 127));
        seen = few;
      }
      for (std::size_t i = maps_.per_head ? blocks[b].head * dim : 0; i < out.features.size(); ++i) seen.push_back(out.features[i]);

      // Maps, and keys turned to where they are cached.
      std::vector<std::int64_t> added(of.channels(part));
      for (std::uint32_t k = 0; k < blocks[b].count && map.blocks[b].depth > 0; ++k)
        added[blocks[b].channel(k)] = limited(product(map.blocks[b], k, seen, 20), 0x1fffffff);
      const auto turn = [&](std::vector<std::int64_t>& row, bool back) {
        for (std::uint32_t i = 0; i < rotated / 2; ++i) {
          const auto [first, second] = rotation_.pair(i);
          for (std::uint32_t head = 0; head < of.kv_heads; ++head) {
            if (std::ranges::none_of(channels_of(blocks[b]), [&, f = first](std::uint32_t c) { return c == head * dim + f; })) continue;
            integer_rotation by = rotation_by_turns(position * rotation_.turns()[i]);
            if (back) by.sine = -by.sine;
            std::int64_t& x = row[head * dim + first];
            std::int64_t& y = row[head * dim + second];
            const std::int64_t turned = (x * by.cosine - y * by.sine) >> 30;
            y = (x * by.sine + y * by.cosine) >> 30;
            x = turned;
          }
        }
      };
      turn(added, false);

      for (const std::uint32_t c : channels_of(blocks[b])) {
        const std::int64_t from = fixed_of(base[c], map.unit);
        const std::int64_t mean = limited(from + added[c], 0x3fffffff);
        out.means[c] = from_fixed(static_cast<std::int32_t>(mean), map.unit);
        const std::int64_t exact = fixed_value(values[c], number, map.unit);
        const bool finite = Scalar::from_bits(values[c]).is_finite();
        const std::int64_t value = finite ? exact : mean;
        const std::int64_t kept = finite && maps_.clamped_feedback ? nearest(values[c], mean, number, map.unit) : value;
        residuals[c] = limited(kept - from, 0x3fffffff);
        const std::int64_t missed = limited(rounded(limited(value - mean, 0x3fffffff) * map.missed_scales[c], 32), 1023);
        energy += missed * missed;
        // What the engine is handed: the value itself, if it has a 16-bit format and lies within what fixed point holds.
        const std::int64_t handed = limited(from + residuals[c], 0x3fffffff);
        const bool whole = finite && sizeof(values[c]) > 1 && std::abs(handed) < 0x3fffffff;
        out.fed_back[c] =
            whole ? Scalar::from_bits(values[c]).to_float() : std::bit_cast<float>(from_fixed(static_cast<std::int32_t>(handed), map.unit));
      }
      turn(residuals, true);
      for (const std::uint32_t c : channels_of(blocks[b]))
        out.features.push_back(limited(rounded(residuals[c] * map.feature_scales[c], 32), 127));
    }
    const auto mean_square = static_cast<float>((energy << 8) / of.channels(part) + 1311);  // exact but for the last bits of large ones
    const bits rounded_down = from_fixed(static_cast<std::int32_t>((energy << 8) / of.channels(part) + 1311), 0);
    REQUIRE(std::abs(std::bit_cast<float>(rounded_down) - mean_square) <= mean_square * 1e-5F);
    const auto half_octaves =
        static_cast<std::int32_t>(std::floor(256 * std::log2(static_cast<long double>(std::bit_cast<float>(rounded_down)))));
    token_scale = static_cast<std::int32_t>(std::floor((half_octaves - 4096) / 2.0));
    return out;
  }

  [[nodiscard]] std::vector<float> correction(std::uint32_t layer, const history& all) const {
    std::vector<std::int64_t> seen = all.at({layer, cache_part::key});
    if (const auto found = all.find({layer, cache_part::value}); found != all.end())
      seen.insert(seen.end(), found->second.begin(), found->second.end());
    std::vector<float> out;
    const quantised_matrix& gain = maps_.gains[layer];
    for (std::size_t h = 0; h < maps_.hidden_width; ++h) {
      std::int64_t sum = 0;
      for (std::size_t i = 0; i < seen.size(); ++i) sum += gain.weights[h * gain.depth + i] * seen[i];
      // Truncated to 24 bits.
      const long double exact = std::ldexp(static_cast<long double>(sum * static_cast<std::int64_t>(gain.scales[h])), -40);
      int exponent = 0;
      const long double fraction = std::frexp(exact, &exponent);
      out.push_back(static_cast<float>(std::ldexp(std::trunc(std::ldexp(fraction, 24)), exponent - 24)));
    }
    return out;
  }

 private:
  static std::vector<std::uint32_t> channels_of(const channel_block& block) {
    std::vector<std::uint32_t> all;
    for (std::uint32_t i = 0; i < block.count; ++i) all.push_back(block.channel(i));
    return all;
  }
  static std::int64_t product(const quantised_matrix& by, std::size_t row, const std::vector<std::int64_t>& seen, int shift) {
    REQUIRE(by.depth == seen.size());
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < seen.size(); ++i) sum += by.weights[row * by.depth + i] * seen[i];
    return rounded(sum * static_cast<std::int64_t>(by.scales[row]), shift);
  }
  [[nodiscard]] long double factor(std::size_t number) const {
    return scales_.empty() || !is_positive_normal(scales_[number]) ? 1.0L : static_cast<long double>(std::bit_cast<float>(scales_[number]));
  }
  [[nodiscard]] std::int64_t fixed_value(typename Scalar::bits_type value, std::size_t number, int unit) const {
    return fixed_of(static_cast<long double>(Scalar::from_bits(value).to_float()) * factor(number), unit);
  }
  /// `mean`, or the nearer end of the interval that is rounded to `value`.
  [[nodiscard]] std::int64_t nearest(typename Scalar::bits_type value, std::int64_t mean, std::size_t number, int unit) const {
    if constexpr (sizeof(value) > 1) return fixed_value(value, number, unit);
    const auto magnitude = static_cast<std::uint8_t>(value & Scalar::magnitude_mask);
    const auto at = [&](int code) { return fixed_value(static_cast<std::uint8_t>(code), number, unit); };
    std::int64_t low = magnitude == 0 ? -(at(1) / 2) : (at(magnitude - 1) + at(magnitude)) / 2;
    std::int64_t high = magnitude == Scalar::max_finite ? 0x3fffffff : (at(magnitude) + at(magnitude + 1)) / 2;
    if ((value & Scalar::sign_mask) != 0) std::tie(low, high) = std::pair{-high, -low};
    return std::clamp(mean, low, high);
  }

  const cache_shape& shape_;
  const rotary& rotation_;
  const layer_maps& maps_;
  std::span<const bits> scales_;
};

/// Predicts what it is given, and keeps what it gets.
struct echo_engine {
  const cache_shape* shape;
  std::vector<std::vector<float>> rows;  // [layer, part][token][channel]
  std::size_t width = 0;
  std::uint64_t position = 0;
  std::vector<std::vector<float>> handed{};  // [layer, part]
  std::vector<std::vector<float>> corrections{};
  index_range range{};

  std::uint64_t tokens() const noexcept { return position; }
  std::size_t hidden_width() const noexcept { return width; }
  result<void> begin(index_range tokens) noexcept {
    range = tokens;
    return {};
  }
  result<void> predict(std::uint32_t layer, std::span<float> keys, std::span<float> values) noexcept {
    std::copy_n(rows[2 * layer].begin(), keys.size(), keys.begin());
    std::copy_n(rows[2 * layer + 1].begin(), values.size(), values.begin());
    return {};
  }
  result<void> advance(std::uint32_t layer, std::span<const float> keys, std::span<const float> values,
                       std::span<const float> correction) noexcept {
    handed.resize(2 * std::size_t{layer} + 2);
    handed[2 * layer].assign(keys.begin(), keys.end());
    handed[2 * layer + 1].assign(values.begin(), values.end());
    corrections.emplace_back(correction.begin(), correction.end());
    return {};
  }
};
static_assert(layerwise_predictor<echo_engine>);

cache_shape some_shape() { return make_shape({{2, 6, 4}, {2, 5, 0}, {2, 4, 3}, {2, 7, 5}}); }
constexpr std::uint64_t first_token = 1000;

struct scenario {
  std::string name;
  layer_maps kind;
  rotary rotation;
  std::uint64_t tokens = 37;
  bool wild = false;  // scales and weights as large as can be
};

/// Sizes and scales such that maps add something like the residuals themselves.
layer_maps maps_for(const scenario& given, random_integers& random) {
  layer_maps maps = make_maps(some_shape(), given.rotation, given.kind, [&](std::size_t) {
    return given.wild && random.below(4) != 0 ? std::int8_t{-128} : static_cast<std::int8_t>(random.below(256) - 128);
  });
  for (tile_map& tile : maps.tiles) {
    tile.unit = given.wild ? static_cast<std::int32_t>(random.below(60)) - 50 : static_cast<std::int32_t>(random.below(5)) - 22;
    const auto scale = [&](std::uint32_t usual) {
      if (!given.wild) return usual / 2 + static_cast<std::uint32_t>(random.below(usual));
      return random.below(3) == 0 ? 0x7fffffffU : static_cast<std::uint32_t>(random.next() >> (33 + random.below(31)));
    };
    // A residual of 1 is 2^-unit; as a feature it is 16.
    for (auto* const scales : {&tile.feature_scales, &tile.missed_scales})
      for (std::uint32_t& each : *scales) each = scale(16U << (32 + tile.unit > 25 ? 25 : std::max(32 + tile.unit, 0)));
    for (std::uint32_t& each : tile.inner.scales) each = scale(1U << 13);
    for (quantised_matrix& block : tile.blocks)
      for (std::uint32_t& each : block.scales) each = scale(std::uint32_t{1} << std::clamp(20 - tile.unit - 14, 4, 30));
  }
  for (quantised_matrix& gain : maps.gains)
    for (std::uint32_t& each : gain.scales) each = static_cast<std::uint32_t>(random.next() >> 35);
  return maps;
}

template <class Predictor, class Scalar>
void check_against_reference(const scenario& given) {
  CAPTURE(given.name);
  const cache_shape shape = some_shape();
  random_integers random(given.name.size() + 100 * given.kind.rank + (given.wild ? 7 : 0));
  const layer_maps maps = maps_for(given, random);
  REQUIRE(expect_maps_fit(maps, shape, given.rotation));
  std::vector<bits> scales;
  if (sizeof(Scalar) == 1) {
    for (const float each : {0.5F, 0.31F, 1.0F, -1.0F, 0.017F, 3.25F, 0.25F}) scales.push_back(std::bit_cast<bits>(each));
  }

  // The cache and its prediction, and means for those who need these.
  std::vector<std::vector<typename Scalar::bits_type>> values;  // [layer, part][token][channel]
  std::vector<std::vector<bits>> base(2 * shape.layers());
  std::vector<std::vector<bf16>> predictions;
  echo_engine engine{&shape, {}, maps.hidden_width, first_token};
  const auto bell = [&] { return std::ldexp(static_cast<float>(random.bell()), -16); };
  std::size_t number = 0;
  for (std::uint32_t l = 0; l < shape.layers(); ++l) {
    for (const cache_part part : cache_parts) {
      const std::size_t count = static_cast<std::size_t>(given.tokens) * shape.layer(l).channels(part);
      const float scale = scales.empty() || count == 0 || !is_positive_normal(scales[number]) ? 1.0F : std::bit_cast<float>(scales[number]);
      number += count > 0 ? 1U : 0U;
      values.emplace_back();
      predictions.emplace_back();
      engine.rows.emplace_back();
      for (std::size_t i = 0; i < count; ++i) {
        const float mean = bell() * 2;
        float value = mean + (given.wild ? 4 * std::abs(bell()) : bell());  // all of one sign, so that sums grow
        float guess = mean;
        if (random.below(40) == 0) value = std::ldexp(value, static_cast<int>(random.below(60)) - 20);
        if (random.below(40) == 0) guess = std::ldexp(guess, static_cast<int>(random.below(60)) - 20);
        typename Scalar::bits_type stored = Scalar::from_float(value / scale).bits;
        if (random.below(40) == 0) stored = static_cast<typename Scalar::bits_type>(random.next());  // NaNs and infinities as well
        if (random.below(20) == 0) {  // the largest number stands for all that is larger
          stored = static_cast<typename Scalar::bits_type>(Scalar::max_finite | (mean < 0 ? Scalar::sign_mask : 0));
          guess = Scalar::from_bits(stored).to_float() * scale * (1 + std::abs(bell()));
        }
        values.back().push_back(stored);
        bf16 as_bf16 = bf16::from_float(guess);
        if (random.below(60) == 0) as_bf16.bits = static_cast<std::uint16_t>(random.next() | 0x7f80U);
        predictions.back().push_back(as_bf16);
        engine.rows.back().push_back(random.below(60) == 0 ? (i % 2 == 0 ? NAN : -INFINITY) : guess);
      }
    }
  }

  const prepared_maps prepared(maps, shape, given.rotation);
  const std::size_t stride = static_cast<std::size_t>((given.tokens + 31) / 32 * 32);
  for (const instruction_set set : {instruction_set::baseline, instruction_set::avx2, instruction_set::avx512}) {
    if (set > best_instruction_set()) continue;
    CAPTURE(static_cast<int>(set));
    using session_type = map_session<Predictor, Scalar>;
    workspace counter;
    (void)session_type::buffers::take(counter, shape, given.rotation, prepared, stride);
    std::vector<std::byte> memory(counter.needed());
    workspace space(memory);
    session_type session(shape, given.rotation, prepared, scales, set,
                         session_type::buffers::take(space, shape, given.rotation, prepared, stride));
    engine.handed.clear();
    engine.corrections.clear();
    const std::vector<layer_tensors<const bf16>> layers = [&] {
      std::vector<layer_tensors<const bf16>> made;
      for (std::uint32_t l = 0; l < shape.layers(); ++l) {
        const layer_shape& of = shape.layer(l);
        made.push_back({strided_tensor<const bf16>::nhd(predictions[2 * l].data(), of.kv_heads, of.key_dim),
                        strided_tensor<const bf16>::nhd(predictions[2 * l + 1].data(), of.kv_heads, of.value_dim)});
      }
      return made;
    }();
    const auto view = *kv_cache_view<const bf16>::make(shape, layers, {first_token, first_token + given.tokens});
    const auto with = [&](auto&& use) {
      if constexpr (std::same_as<Predictor, closed_loop>) {
        return use(engine);
      } else if constexpr (Predictor::needs_prediction) {
        return use(view);
      } else {
        return use(no_prediction{});
      }
    };

    const reference<Scalar> slow(shape, given.rotation, maps, scales);
    std::vector<typename reference<Scalar>::history> history(given.tokens);
    std::vector<std::int32_t> token_scales(given.tokens, 0);
    REQUIRE(with([&](auto&& side) { return session.begin({first_token, first_token + given.tokens}, stride, side); }));
    std::size_t wrong_means = 0;
    std::size_t wrong_scales = 0;
    std::size_t wrong_feedback = 0;
    std::size_t wrong_features = 0;
    std::size_t moved = 0;
    number = 0;
    for (std::uint32_t l = 0; l < shape.layers(); ++l) {
      for (const cache_part part : cache_parts) {
        const std::uint32_t channels = shape.layer(l).channels(part);
        if (channels == 0) continue;
        const tile_shape where{l,     part, {first_token, first_token + given.tokens}, shape.layer(l).kv_heads, shape.layer(l).dim(part),
                               stride};
        const auto& rows = values[2 * l + static_cast<std::size_t>(part)];
        std::vector<typename Scalar::bits_type> tile(channels * stride);
        for (std::size_t t = 0; t < given.tokens; ++t)
          for (std::size_t c = 0; c < channels; ++c) tile[c * stride + t] = rows[t * channels + c];
        std::vector<bits> channel_means;
        for (std::size_t c = 0; c < channels; ++c) channel_means.push_back(std::bit_cast<bits>(static_cast<float>(c) * 0.25F - 0.5F));
        std::vector<bits> means(channels * stride, 0xdeadbeef);
        const std::vector<std::int32_t> in_force(session.token_scales(), session.token_scales() + given.tokens);
        REQUIRE(with([&](auto&& side) { return session.begin_tile(where, number, channel_means, side); }));
        const std::vector<bits> predicted(session.base().begin(), session.base().begin() + static_cast<std::ptrdiff_t>(means.size()));
        if constexpr (std::same_as<Predictor, closed_loop>)
          CHECK(std::ranges::all_of(predicted, [](bits each) { return (each & 0x7f800000U) != 0x7f800000U; }));
        for (const channel_block& block : session.blocks(number)) {
          session.predict(where, number, block, means.data());
          session.accept(where, number, block, tile.data());
        }
        const std::int16_t* const features =
            session.features(l) + (part == cache_part::value ? shape.layer(l).channels(cache_part::key) : 0);
        std::vector<typename reference<Scalar>::outcome> expected;
        for (std::size_t t = 0; t < given.tokens; ++t) {
          std::vector<bits> token_base;
          for (std::size_t c = 0; c < channels; ++c) token_base.push_back(predicted[c * stride + t]);
          expected.push_back(slow.run(l, part, number, first_token + t, token_base, std::span(rows).subspan(t * channels, channels),
                                      history[t], token_scales[t]));
          const auto& right = expected.back();
          wrong_scales += in_force[t] != right.token_scale;
          for (std::size_t c = 0; c < channels; ++c) {
            wrong_means += means[c * stride + t] != right.means[c];
            moved += right.means[c] != predicted[c * stride + t];
            wrong_features += features[t * session.feature_stride() + c] != right.features[c];
          }
          history[t][{l, part}] = right.features;
        }
        for (std::size_t c = 0; c < channels; ++c)
          for (std::size_t t = given.tokens; t < stride; ++t) wrong_means += means[c * stride + t] != 0;
        REQUIRE(with([&](auto&& side) { return session.end_tile(where, side); }));
        for (std::size_t t = 0; t < given.tokens; ++t) wrong_scales += session.token_scales()[t] != token_scales[t];
        if constexpr (std::same_as<Predictor, closed_loop>) {
          // The layer is over: what was handed back, here for its last tile.
          if (part == cache_part::value || shape.layer(l).value_dim == 0) {
            REQUIRE(engine.handed.size() == 2 * l + 2);
            const auto& handed = engine.handed[2 * l + static_cast<std::size_t>(part)];
            REQUIRE(handed.size() == given.tokens * channels);
            for (std::size_t t = 0; t < given.tokens; ++t)
              for (std::size_t c = 0; c < channels; ++c)
                wrong_feedback += std::bit_cast<bits>(handed[t * channels + c]) != std::bit_cast<bits>(expected[t].fed_back[c]);
            const auto& correction = engine.corrections[l];
            REQUIRE(correction.size() == given.tokens * maps.hidden_width);
            for (std::size_t t = 0; t < given.tokens && maps.hidden_width > 0; ++t) {
              const auto right = slow.correction(l, history[t]);
              for (std::size_t h = 0; h < maps.hidden_width; ++h) wrong_feedback += correction[t * maps.hidden_width + h] != right[h];
            }
          }
        }
        ++number;
      }
    }
    // The next range starts anew.
    REQUIRE(with([&](auto&& side) { return session.begin({first_token, first_token + given.tokens}, stride, side); }));
    CHECK(std::all_of(session.token_scales(), session.token_scales() + given.tokens, [](std::int32_t scale) { return scale == 0; }));
    CHECK(wrong_means == 0);
    CHECK(wrong_scales == 0);
    CHECK(wrong_features == 0);
    CHECK(wrong_feedback == 0);
    CHECK(moved > 100);
  }
}

layer_maps kind_of(std::uint32_t layers_back, std::uint32_t rank, std::uint32_t block_size, bool per_head, std::uint32_t hidden_width = 0,
                   bool clamped = false) {
  layer_maps maps;
  maps.layers_back = layers_back;
  maps.rank = rank;
  maps.block_size = block_size;
  maps.per_head = per_head;
  maps.hidden_width = hidden_width;
  maps.clamped_feedback = clamped;
  return maps;
}

std::vector<scenario> scenarios(std::uint32_t hidden_width = 0, bool clamped = false) {
  const auto half_split = *rotary::from_base(rotary_pairing::half_split, 4, 1000.0);
  const auto interleaved = *rotary::from_base(rotary_pairing::interleaved, 4, 1000.0);
  const auto two = *rotary::from_base(rotary_pairing::half_split, 2, 1000.0);
  const auto kind = [&](std::uint32_t layers_back, std::uint32_t rank, std::uint32_t block_size, bool per_head) {
    return kind_of(layers_back, rank, block_size, per_head, hidden_width, clamped);
  };
  return {
      {"whole tiles, not rotated", kind(2, 0, 0, false), rotary()},
      {"whole tiles, interleaved", kind(3, 0, 0, false), interleaved},
      {"whole tiles, half split", kind(1, 0, 0, false), half_split},
      {"blocks, not rotated", kind(3, 0, 2, false), rotary()},
      {"blocks, interleaved", kind(2, 0, 3, false), interleaved},
      {"blocks, half split", kind(8, 0, 2, false), half_split},
      {"blocks, two dimensions rotated", kind(2, 0, 4, false), two},
      {"blocks of one channel", kind(1, 0, 1, false), half_split},
      {"whole heads", kind(2, 0, 100, false), half_split},
      {"nothing but blocks", kind(0, 0, 2, false), half_split},
      {"low rank", kind(2, 3, 0, false), interleaved},
      {"low rank and blocks", kind(3, 2, 2, false), half_split},
      {"a rank that is none", kind(2, 1000, 4, false), half_split},
      {"by head", kind(2, 0, 100, true), half_split},
      {"by head in blocks", kind(3, 0, 2, true), half_split},
      {"by head in blocks, interleaved", kind(1, 0, 3, true), interleaved},
      {"a full row of tokens", kind(2, 0, 2, false), half_split, 64},
      {"less than a row of tokens", kind(2, 0, 2, false), half_split, 20},
      {"out of all bounds", kind(3, 0, 2, false), half_split, 37, true},
      {"out of all bounds, low rank", kind(2, 3, 0, false), interleaved, 37, true},
      {"out of all bounds, by head", kind(3, 0, 3, true), half_split, 37, true},
  };
}

}  // namespace

TEST_CASE("map_session: on channel means it predicts as a slow reference does") {
  for (const scenario& each : scenarios()) {
    check_against_reference<cross_layer<channel_mean>, bf16>(each);
    check_against_reference<cross_layer<channel_mean>, fp8_e4m3>(each);
  }
}

TEST_CASE("map_session: on predicted caches it predicts as a slow reference does") {
  for (const scenario& each : scenarios()) {
    check_against_reference<cross_layer<external>, fp16>(each);
    check_against_reference<cross_layer<external>, fp8_e5m2>(each);
  }
}

TEST_CASE("map_session: in the closed loop it predicts, hands back and corrects as a slow reference does") {
  for (const bool clamped : {false, true}) {
    for (const std::uint32_t width : {0U, 70U}) {
      for (const scenario& each : scenarios(width, clamped)) {
        if (!clamped) check_against_reference<closed_loop, bf16>(each);
        check_against_reference<closed_loop, fp8_e4m3>(each);
      }
    }
  }
  for (const scenario& each : scenarios(5, true)) check_against_reference<closed_loop, fp8_e5m2>(each);
}

TEST_CASE("map_session: an engine that stands elsewhere or has other hidden states is refused") {
  const cache_shape shape = some_shape();
  const rotary rotation;
  for (const std::uint32_t width : {0U, 6U}) {
    const layer_maps maps = make_maps(shape, rotation, kind_of(2, 0, 2, false, width), [](std::size_t) { return std::int8_t{1}; });
    const prepared_maps prepared(maps, shape, rotation);
    using session_type = map_session<closed_loop, bf16>;
    workspace counter;
    (void)session_type::buffers::take(counter, shape, rotation, prepared, 32);
    std::vector<std::byte> memory(counter.needed());
    workspace space(memory);
    session_type session(shape, rotation, prepared, {}, instruction_set::baseline,
                         session_type::buffers::take(space, shape, rotation, prepared, 32));
    echo_engine engine{&shape, {}, 6, 40};
    CHECK(session.begin({40, 50}, 32, engine));
    for (const std::uint64_t begin : {0U, 39U, 41U}) {
      const auto begun = session.begin({begin, 50}, 32, engine);
      REQUIRE(!begun);
      CHECK(begun.error().code == error_code::out_of_range);
      CHECK(begun.error().token == static_cast<std::int64_t>(begin));
    }
    // Without a correction in the profile the engine's hidden states do not matter.
    engine.width = 7;
    const auto begun = session.begin({40, 50}, 32, engine);
    REQUIRE(static_cast<bool>(begun) == (width == 0));
    if (!begun) CHECK(begun.error().code == error_code::shape_mismatch);
  }
}

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/prediction/channel_mean.hpp>

using namespace kvexact;

namespace {

constexpr long double full_turn = 6.283185307179586476925286766559L;
constexpr std::uint32_t guard = 0xdeadbeef;

std::vector<std::uint32_t> random_means(std::size_t channels) {
  std::mt19937_64 random(channels);
  std::vector<std::uint32_t> means;
  for (std::size_t c = 0; c < channels; ++c) {
    const float size = std::exp2(static_cast<float>(random() % 1000) / 100 - 5);
    means.push_back(std::bit_cast<std::uint32_t>(random() % 2 == 0 ? size : -size));
  }
  return means;
}

/// The predictions of a tile, after guards around it and padding in it have been checked.
std::vector<std::uint32_t> predicted(const tile_shape& shape, std::span<const std::uint32_t> means, const rotary& rotation) {
  constexpr std::size_t margin = 8;
  std::vector<std::uint32_t> memory(margin + shape.channels() * shape.stride + margin, guard);
  channel_mean::predict(shape, {means, &rotation}, no_prediction{}, memory.data() + margin);
  CHECK(std::all_of(memory.begin(), memory.begin() + margin, [](std::uint32_t bits) { return bits == guard; }));
  CHECK(std::all_of(memory.end() - margin, memory.end(), [](std::uint32_t bits) { return bits == guard; }));
  std::vector<std::uint32_t> out(memory.begin() + margin, memory.end() - margin);
  std::size_t padding = 0;
  for (std::size_t c = 0; c < shape.channels(); ++c)
    for (std::size_t t = shape.tokens.size(); t < shape.stride; ++t) padding += out[c * shape.stride + t] != 0;
  CHECK(padding == 0);
  return out;
}

/// Keys by rotating their means with sines and cosines of real angles.
void check_keys(const tile_shape& shape, const rotary& rotation) {
  const auto means = random_means(shape.channels());
  const auto out = predicted(shape, means, rotation);
  const std::uint32_t half = rotation.dim() / 2;
  std::size_t wrong = 0;
  for (std::uint32_t h = 0; h < shape.heads; ++h) {
    for (std::uint32_t d = 0; d < shape.dim; ++d) {
      const std::size_t c = std::size_t{h} * shape.dim + d;
      for (std::uint64_t t = 0; t < shape.tokens.size(); ++t) {
        const std::uint32_t actual = out[c * shape.stride + t];
        if (d >= rotation.dim()) {
          wrong += actual != means[c];  // to the bit
          continue;
        }
        const bool interleaved = rotation.pairing() == rotary_pairing::interleaved;
        const std::uint32_t i = interleaved ? d / 2 : d % half;
        const bool is_first = interleaved ? d % 2 == 0 : d < half;
        const std::size_t partner = std::size_t{h} * shape.dim + (interleaved ? d ^ 1U : is_first ? d + half : d - half);
        const std::uint64_t turns = (shape.tokens.begin + t) * rotation.turns()[i];  // whole turns fall off
        const long double angle = std::ldexp(static_cast<long double>(turns), -64) * full_turn;
        const long double own = std::bit_cast<float>(means[c]);
        const long double other = std::bit_cast<float>(means[partner]);
        const long double expected =
            is_first ? own * std::cos(angle) - other * std::sin(angle) : other * std::sin(angle) + own * std::cos(angle);
        const long double bound = (std::abs(own) + std::abs(other)) * 0x1p-25L + std::abs(expected) * 0x1p-23L;
        wrong += std::abs(static_cast<long double>(std::bit_cast<float>(actual)) - expected) > bound;
      }
    }
  }
  CHECK(wrong == 0);
}

void check_unrotated(const tile_shape& shape, const rotary& rotation) {
  const auto means = random_means(shape.channels());
  const auto out = predicted(shape, means, rotation);
  std::size_t wrong = 0;
  for (std::size_t c = 0; c < shape.channels(); ++c)
    for (std::uint64_t t = 0; t < shape.tokens.size(); ++t) wrong += out[c * shape.stride + t] != means[c];
  CHECK(wrong == 0);
}

}  // namespace

static_assert(tile_predictor<channel_mean> && !mapped_predictor<channel_mean> && channel_mean::needs == dependency::none &&
              !channel_mean::needs_prediction);

TEST_CASE("channel_mean: keys turn with their position, both pairings") {
  for (const rotary_pairing pairing : {rotary_pairing::interleaved, rotary_pairing::half_split}) {
    const auto rotation = *rotary::from_base(pairing, 16, 10000.0);
    check_keys({0, cache_part::key, {0, 50}, 3, 16, 64}, rotation);
    check_keys({2, cache_part::key, {1000, 1001}, 1, 16, 32}, rotation);
    check_keys({0, cache_part::key, {(std::uint64_t{1} << 40) - 5, (std::uint64_t{1} << 40) + 20}, 2, 16, 32}, rotation);
  }
}

TEST_CASE("channel_mean: dimensions beyond the rotary ones stay") {
  for (const rotary_pairing pairing : {rotary_pairing::interleaved, rotary_pairing::half_split})
    for (const std::uint32_t dim : {2U, 6U, 10U})
      check_keys({0, cache_part::key, {7, 40}, 2, 11, 64}, *rotary::from_base(pairing, dim, 500.0));
}

TEST_CASE("channel_mean: at position 0 keys are their means") {
  const tile_shape shape{0, cache_part::key, {0, 1}, 2, 8, 32};
  const auto means = random_means(16);
  const auto out = predicted(shape, means, *rotary::from_base(rotary_pairing::half_split, 8, 10000.0));
  // A partner that is much larger may cost the last bits.
  for (std::size_t c = 0; c < 16; ++c)
    CHECK(std::bit_cast<float>(out[c * 32]) == doctest::Approx(std::bit_cast<float>(means[c])).epsilon(1e-5));
}

TEST_CASE("channel_mean: V and unrotated keys are their means to the bit") {
  const auto rotation = *rotary::from_base(rotary_pairing::interleaved, 16, 10000.0);
  check_unrotated({0, cache_part::value, {5, 45}, 3, 16, 64}, rotation);
  check_unrotated({0, cache_part::value, {5, 6}, 2, 4, 32}, rotation);  // V may have fewer dimensions than are rotated
  check_unrotated({0, cache_part::key, {5, 45}, 3, 16, 40}, rotary());
}

TEST_CASE("channel_mean: no tokens and a full tile") {
  const auto rotation = *rotary::from_base(rotary_pairing::half_split, 4, 100.0);
  check_keys({0, cache_part::key, {9, 9}, 2, 4, 32}, rotation);
  check_keys({0, cache_part::key, {9, 41}, 2, 4, 32}, rotation);
  check_unrotated({0, cache_part::value, {9, 9}, 2, 4, 0}, rotation);
}

TEST_CASE("channel_mean: means that are not finite") {
  const tile_shape shape{0, cache_part::key, {3, 20}, 1, 4, 32};
  const std::array<std::uint32_t, 4> means{0x7fc00000U, std::bit_cast<std::uint32_t>(1.0F), 0xff800000U, 0x7f800000U};
  const auto out = predicted(shape, means, *rotary::from_base(rotary_pairing::interleaved, 4, 100.0));
  for (std::size_t t = 0; t < 17; ++t) {
    CHECK(std::isfinite(std::bit_cast<float>(out[t])));
    CHECK(std::isfinite(std::bit_cast<float>(out[32 + t])));
    CHECK(out[64 + t] == 0);
    CHECK(out[96 + t] == 0);
  }
}

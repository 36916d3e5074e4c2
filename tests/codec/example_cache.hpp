// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/numeric/number_format.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact::test {

inline constexpr std::array all_formats{number_format::bfloat16, number_format::float16, number_format::float8_e4m3,
                                        number_format::float8_e5m2};

/// Calls use.template operator()<Scalar>() with the type of a format.
template <class Use>
decltype(auto) with_scalar(number_format format, Use&& use) {
  switch (format) {
    case number_format::bfloat16: return use.template operator()<bf16>();
    case number_format::float16: return use.template operator()<fp16>();
    case number_format::float8_e4m3: return use.template operator()<fp8_e4m3>();
    case number_format::float8_e5m2: break;
  }
  return use.template operator()<fp8_e5m2>();
}

inline std::size_t bytes_of(number_format format) {
  return with_scalar(format, []<class Scalar>() { return sizeof(Scalar); });
}
inline std::uint16_t bits_of(number_format format, float value) {
  return with_scalar(format, [&]<class Scalar>() { return static_cast<std::uint16_t>(Scalar::from_float(value).bits); });
}
inline double value_of(number_format format, std::uint16_t bits) {
  return with_scalar(format, [&]<class Scalar>() {
    return static_cast<double>(Scalar::from_bits(static_cast<typename Scalar::bits_type>(bits)).to_float());
  });
}

/// splitmix64: integers that are the same everywhere.
class random_integers {
 public:
  explicit random_integers(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  /// 0 to `end` - 1.
  std::uint64_t below(std::uint64_t end) { return next() % end; }
  /// A sum of uniform integers, close to normal: mean 0, standard deviation 2^16.
  std::int64_t bell() {
    std::int64_t sum = 0;
    for (int i = 0; i < 3; ++i) {
      const std::uint64_t four = next();
      for (int part = 0; part < 64; part += 16) sum += static_cast<std::int64_t>((four >> part) & 0xffffU);
    }
    return sum - 6 * 0xffff;  // 12 of them, each with a variance of 2^32 / 12
  }

 private:
  std::uint64_t state_;
};

/// A cache as bits, whatever its format: one array [token][head][dim] for each (layer, part).
struct bits_cache {
  cache_shape shape;
  std::uint64_t tokens = 0;
  std::vector<std::vector<std::uint16_t>> parts;

  bits_cache(const cache_shape& of, std::uint64_t token_count, std::uint16_t fill = 0) : shape(of), tokens(token_count) {
    for (const layer_shape& layer : shape.all())
      for (const cache_part which : cache_parts) parts.emplace_back(static_cast<std::size_t>(tokens * layer.channels(which)), fill);
  }

  [[nodiscard]] std::vector<std::uint16_t>& part(std::uint32_t layer, cache_part which) {
    return parts[2 * std::size_t{layer} + static_cast<std::size_t>(which)];
  }
  [[nodiscard]] const std::vector<std::uint16_t>& part(std::uint32_t layer, cache_part which) const {
    return parts[2 * std::size_t{layer} + static_cast<std::size_t>(which)];
  }
  [[nodiscard]] std::uint64_t values() const { return tokens * shape.channels(); }

  /// Calls visit(bits, layer, part, token, channel) for every value.
  template <class Visit>
  void for_each(Visit&& visit) {
    for (std::uint32_t l = 0; l < shape.layers(); ++l) {
      for (const cache_part which : cache_parts) {
        const std::size_t channels = shape.layer(l).channels(which);
        for (std::uint64_t t = 0; t < tokens; ++t)
          for (std::size_t c = 0; c < channels; ++c) visit(part(l, which)[static_cast<std::size_t>(t) * channels + c], l, which, t, c);
      }
    }
  }

  friend bool operator==(const bits_cache&, const bits_cache&) = default;
};

inline cache_shape make_shape(const std::vector<layer_shape>& layers) { return *cache_shape::make(layers); }

/// Layers that differ, one without V, and dimensions that are multiples of nothing.
inline cache_shape mixed_shape() { return make_shape({{2, 6, 10}, {1, 7, 0}, {3, 5, 4}}); }
/// So few values that many streams of it can be tried.
inline cache_shape tiny_shape() { return make_shape({{1, 4, 2}, {2, 2, 0}}); }

/// `dim` dimensions rotated, with frequencies that are powers of two.
inline rotary make_rotary(rotary_pairing pairing, std::uint32_t dim) {
  std::vector<std::uint64_t> turns;
  for (std::uint32_t i = 0; i < dim / 2; ++i) turns.push_back((std::uint64_t{1} << 62) >> (2 * i + 1));
  return *rotary::make(pairing, turns);
}

/// A cache and a prediction of it.
struct example {
  bits_cache cache;
  bits_cache prediction;  // bf16
};

/// Every channel has a mean in [-2, 2) and a spread between 1/16 and 2, which depend on its place alone; `seed` chooses the values, and
/// the prediction misses them by 1/16 of their spread. Integers scaled by powers of two throughout: the same bits everywhere.
/// `storage_scale` is what the cache's numbers are to be multiplied with.
inline example make_example(const cache_shape& shape, std::uint64_t tokens, number_format format, std::uint64_t seed,
                            float storage_scale = 1) {
  example made{bits_cache(shape, tokens), bits_cache(shape, tokens)};
  random_integers random(seed);
  made.cache.for_each([&](std::uint16_t& bits, std::uint32_t layer, cache_part part, std::uint64_t token, std::size_t channel) {
    random_integers of_channel((std::uint64_t{layer} << 40) + (static_cast<std::uint64_t>(part) << 32) + channel);
    const std::int64_t mean = static_cast<std::int64_t>(of_channel.below(4U << 22)) - (2 << 22);
    const auto spread = static_cast<std::int64_t>((4 + of_channel.below(4)) << of_channel.below(4));  // 4 to 56; 64 stands for 2
    const std::int64_t value = mean + ((spread * random.bell()) >> 1);
    const std::int64_t predicted = value + ((spread * random.bell()) >> 5);
    bits = bits_of(format, std::ldexp(static_cast<float>(value), -22));
    made.prediction.part(layer, part)[static_cast<std::size_t>(token) * shape.layer(layer).channels(part) + channel] =
        bits_of(number_format::bfloat16, std::ldexp(static_cast<float>(predicted), -22) * storage_scale);
  });
  return made;
}

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <kvexact/compression/echo_kv.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact::test {

/// Two layers of which the second is a linear map of the first plus noise, before the rotary embedding of its keys.
struct echo_layers {
  layer_shape first{2, 8, 6}, second{3, 8, 5};
  rotary rotation = *rotary::from_base(rotary_pairing::half_split, 8, 100.0);
  double noise = 0.1;
  std::uint32_t free_channel = 9;  ///< of the second layer's keys and values: noise of size 1 and nothing else
  std::uint64_t tokens;
  std::vector<bf16> rows[2][2];  ///< [layer][part], [token, head, dim]

  explicit echo_layers(std::uint64_t count, std::uint32_t seed = 1, double noise_size = 0.1) : noise(noise_size), tokens(count) {
    std::mt19937 maps(7), random(seed);
    const auto normal = [](std::mt19937& from) {  // the same with every standard library
      double sum = -6;
      for (int i = 0; i < 12; ++i) sum += static_cast<double>(from() >> 8) * 0x1p-24;
      return sum;
    };
    for (const cache_part part : cache_parts) {
      const std::size_t in = first.channels(part), out = second.channels(part);
      std::vector<double> map(in * out);
      for (double& each : map) each = normal(maps) / std::sqrt(static_cast<double>(in));
      for (std::uint64_t t = 0; t < tokens; ++t) {
        std::vector<double> x(in), y(out);
        for (double& each : x) each = normal(random);
        for (std::size_t o = 0; o < out; ++o) {
          y[o] = 3 + noise * normal(random);
          for (std::size_t i = 0; i < in; ++i) y[o] += map[o * in + i] * x[i];
        }
        y[free_channel] = normal(random);
        store(rows[0][static_cast<std::size_t>(part)], x, first.dim(part), part, t);
        store(rows[1][static_cast<std::size_t>(part)], y, second.dim(part), part, t);
      }
    }
  }

  [[nodiscard]] layer_tensors<const bf16> at(std::size_t layer, std::uint64_t token) const {
    const layer_shape& shape = layer == 0 ? first : second;
    const auto tensor = [&](cache_part part) {
      return strided_tensor<const bf16>::nhd(rows[layer][static_cast<std::size_t>(part)].data() + token * shape.channels(part), shape.kv_heads, shape.dim(part));
    };
    return {tensor(cache_part::key), tensor(cache_part::value)};
  }

 private:
  void store(std::vector<bf16>& to, std::vector<double>& row, std::uint32_t dim, cache_part part, std::uint64_t token) const {
    for (std::size_t head = 0; part == cache_part::key && head < row.size(); head += dim) {
      for (std::uint32_t i = 0; i < rotation.dim() / 2; ++i) {
        const auto [a, b] = rotation.pair(i);
        const double angle = 6.283185307179586 * std::ldexp(static_cast<double>(token * rotation.turns()[i]), -64);
        const double x = row[head + a], y = row[head + b];
        row[head + a] = x * std::cos(angle) - y * std::sin(angle);
        row[head + b] = x * std::sin(angle) + y * std::cos(angle);
      }
    }
    for (const double each : row) to.push_back(bf16::from_float(static_cast<float>(each)));
  }
};

/// Keeps some channels and gives every other one the mean of two channels of the first layer, and a bias.
inline echo_group some_maps(const layer_shape& first, const layer_shape& own, const rotary& rotation) {
  echo_group maps{rotation, {{}}};
  for (const cache_part part : cache_parts) {
    echo_map& map = maps.followers[0][static_cast<std::size_t>(part)];
    map.kept = {1, 2, own.channels(part) - 1};
    const std::size_t features = first.channels(part) + 3, others = own.channels(part) - 3;
    map.weights.assign(others * features, 0.0F);
    for (std::size_t o = 0; o < others; ++o) {
      map.weights[o * features + o % first.channels(part)] = 0.5F;
      map.weights[o * features + (o + 5) % first.channels(part)] += 0.5F;
      map.bias.push_back(static_cast<float>(o) * 0.25F);
    }
  }
  return maps;
}

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <doctest/doctest.h>

#include <kvexact/compression/turbo_quant.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

template <int Bits>
turbo_quant<Bits> made(std::uint32_t dim, const rotation_options& rotation = {}, bool unbiased = false) {
  return *turbo_quant<Bits>::make(1, dim, {rotation, unbiased});
}
/// Relative error on all unit vectors along an axis, over several rotations.
double one_hot_error(std::uint32_t dim, rotation_options rotation) {
  double sum = 0;
  constexpr int seeds = 8;
  for (rotation.seed = 1; rotation.seed <= seeds; ++rotation.seed) {
    std::vector<float> values(std::size_t{dim} * dim);
    for (std::size_t i = 0; i < dim; ++i) values[i * dim + i] = 1;
    sum += relative_error(values, through(made<2>(dim, rotation), values));
  }
  return sum / seeds;
}
/// `dim` * mean squared error of products with random unit vectors, of random unit vectors.
template <class Q>
double product_error(const Q& format, double* slope = nullptr) {
  constexpr std::size_t tokens = 2048;
  const std::size_t dim = format.dim();
  const std::vector<float> values = unit_vectors(tokens, dim, 21), others = unit_vectors(tokens, dim, 22);
  const std::vector<float> back = through(format, values);
  double error = 0, own = 0;
  for (std::size_t t = 0; t < tokens; ++t) {
    double truth = 0, estimate = 0;
    for (std::size_t c = 0; c < dim; ++c) {
      const double other = others[t * dim + c];
      truth += other * static_cast<double>(values[t * dim + c]);
      estimate += other * static_cast<double>(back[t * dim + c]);
      own += static_cast<double>(values[t * dim + c]) * static_cast<double>(back[t * dim + c]);
    }
    error += (truth - estimate) * (truth - estimate);
  }
  // Regressing products with all directions on the truth is the mean of <u, v> for unit u.
  if (slope != nullptr) *slope = own / tokens;
  return static_cast<double>(dim) * error / tokens;
}

}  // namespace

TEST_CASE("turbo_quant: keeps a quantiser's promises, whatever the number of channels") {
  for (const std::uint32_t dim : {4U, 9U, 64U, 80U}) {
    CAPTURE(dim);
    check_quantiser(made<4>(dim));
    check_quantiser(made<3>(dim));
    check_quantiser(made<2>(dim, {.rounds = 3, .seed = 4}, true));
    check_quantiser(made<1>(dim, {.kind = rotation_kind::haar}));
  }
}

TEST_CASE("turbo_quant: distortions as published, for any number of channels") {
  for (const known_distortions& each : published_distortions) {
    const std::uint32_t dim = each.dim;
    const auto& distortion = each.distortion;
    CAPTURE(dim);
    CHECK(normal_error(made<1>(dim)) == doctest::Approx(distortion[0]).epsilon(0.01));
    CHECK(normal_error(made<2>(dim)) == doctest::Approx(distortion[1]).epsilon(0.01));
    CHECK(normal_error(made<3>(dim)) == doctest::Approx(distortion[2]).epsilon(0.01));
    CHECK(normal_error(made<4>(dim)) == doctest::Approx(distortion[3]).epsilon(0.01));
    CHECK(made<4>(dim).distortion() == doctest::Approx(distortion[3]).epsilon(0.01));
    CHECK(bits_per_value(made<4>(dim)) == 4 + 16.0 / dim);
  }
  for (const std::uint32_t dim : {48U, 80U, 96U, 112U, 192U}) CHECK(normal_error(made<2>(dim)) == doctest::Approx(.1155).epsilon(0.02));
}

TEST_CASE("turbo_quant: sparse vectors need two rounds, or four where channels are no power of two") {
  const double bound = std::sqrt(3.0) * 3.14159265358979 / 2 / 16;
  CHECK(one_hot_error(128, {.rounds = 1}) == doctest::Approx(.255).epsilon(0.03));  // breaks the bound of .170
  CHECK(one_hot_error(128, {.rounds = 2}) == doctest::Approx(.118).epsilon(0.05));
  CHECK(one_hot_error(128, {.rounds = 3}) == doctest::Approx(.116).epsilon(0.03));
  CHECK(one_hot_error(128, {.kind = rotation_kind::haar}) == doctest::Approx(.114).epsilon(0.03));
  for (const std::uint32_t dim : {64U, 80U, 96U, 112U, 128U, 192U}) {
    CAPTURE(dim);
    CHECK(one_hot_error(dim, {}) < 0.8 * bound);
  }
}

TEST_CASE("turbo_quant: products shrink, unless they are asked to be unbiased") {
  double slope = 0;
  CHECK(product_error(made<1>(128), &slope) == doctest::Approx(.361).epsilon(0.05));
  CHECK(slope == doctest::Approx(.639).epsilon(0.01));
  CHECK(product_error(made<2>(128), &slope) == doctest::Approx(.117).epsilon(0.05));
  CHECK(slope == doctest::Approx(.884).epsilon(0.01));
  CHECK(product_error(made<3>(128), &slope) == doctest::Approx(.0338).epsilon(0.05));
  CHECK(slope == doctest::Approx(.966).epsilon(0.01));
  product_error(made<4>(128), &slope);
  CHECK(slope == doctest::Approx(.991).epsilon(0.01));

  CHECK(product_error(made<1>(128, {}, true), &slope) == doctest::Approx(.558).epsilon(0.05));
  CHECK(slope == doctest::Approx(1).epsilon(0.003));
  CHECK(product_error(made<2>(128, {}, true), &slope) == doctest::Approx(.130).epsilon(0.05));
  CHECK(slope == doctest::Approx(1).epsilon(0.003));
  CHECK(product_error(made<3>(128, {}, true), &slope) == doctest::Approx(.0349).epsilon(0.05));
  CHECK(slope == doctest::Approx(1).epsilon(0.003));
}

TEST_CASE("turbo_quant: scale changes nothing but the norm") {
  const auto format = made<4>(64);
  std::vector<float> values = normal_values(64 * 20, 8);
  const auto back = through(format, values);
  for (float& each : values) each *= 1024;
  const auto larger = through(format, values);
  for (std::size_t i = 0; i < back.size(); ++i) CHECK(larger[i] == 1024 * back[i]);
  std::uint64_t saturated = 0;
  for (float& each : values) each *= 1024;
  static_cast<void>(packed_by(format, values, 0, &saturated));
  CHECK(saturated == 20);
}

TEST_CASE("turbo_quant: the same bytes everywhere") {
  const auto check = [](const auto& format, std::uint64_t packed, std::uint64_t unpacked) {
    CAPTURE(format.dim());
    CHECK(pinned_hash(format) == packed);
    const std::vector<float> back = through(format, portable_values(std::size_t{64} * format.dim(), 99));
    CHECK(checksum(std::as_bytes(std::span(back))) == unpacked);
  };
  check(made<1>(32), 0xe303af287931f736U, 0x3968a37f96cb61baU);
  check(made<4>(64), 0xb53e2cc91a990446U, 0x2e907ea6ad3d5d97U);
  check(made<2>(80), 0xdd3875cacb10fa54U, 0x2da6f8b7a2fb076fU);
  check(made<2>(96, {}, true), 0x749b70ac10d860b3U, 0x773df387a6b81223U);
  check(made<3>(128), 0x0177e2ce3ac13f6fU, 0x9e4d37edf1eee863U);
  check(made<3>(192), 0xd9344d3691ec0b4cU, 0xaf72ed7f840b7b01U);
  check(made<4>(256), 0x9289cccfd056819fU, 0xee6bf839a581cd90U);
}

TEST_CASE("turbo_quant: unusable options") {
  CHECK(turbo_quant<4>::make(0, 64).error().code == error_code::invalid_argument);
  CHECK(turbo_quant<4>::make(1, 3).error().code == error_code::invalid_argument);
  CHECK(turbo_quant<4>::make(1, 64, {{.rounds = 20}}).error().code == error_code::invalid_argument);
}

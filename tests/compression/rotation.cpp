// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/rotation.hpp>

#include "quantiser_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

TEST_CASE("rotation: orthonormal for any number of channels, and undone by its inverse") {
  for (const std::uint32_t dim : {1U, 2U, 3U, 17U, 64U, 80U, 96U, 128U}) {
    for (const rotation_options& options : {rotation_options{}, rotation_options{.rounds = 1}, rotation_options{.rounds = 3, .seed = 9},
                                            rotation_options{.kind = rotation_kind::haar}}) {
      CAPTURE(dim);
      const auto rotation = *orthonormal_rotation::make(dim, options);
      std::vector<float> scratch(rotation.scratch_floats());
      // Columns of the matrix are the images of unit vectors.
      std::vector<std::vector<float>> images;
      for (std::uint32_t c = 0; c < dim; ++c) {
        images.emplace_back(dim, 0.0F);
        images.back()[c] = 1;
        rotation.forward(images.back().data(), scratch.data());
      }
      for (std::uint32_t a = 0; a < dim; ++a) {
        for (std::uint32_t b = 0; b <= a; ++b) {
          double product = 0;
          for (std::uint32_t c = 0; c < dim; ++c) product += static_cast<double>(images[a][c]) * static_cast<double>(images[b][c]);
          REQUIRE(std::fabs(product - (a == b ? 1 : 0)) < 1e-5);
        }
      }
      const std::vector<float> values = normal_values(dim, 5);
      std::vector<float> vector = values;
      rotation.forward(vector.data(), scratch.data());
      for (std::uint32_t r = 0; r < dim; ++r) {
        double expected = 0;
        for (std::uint32_t c = 0; c < dim; ++c) expected += static_cast<double>(images[c][r]) * static_cast<double>(values[c]);
        CHECK(vector[r] == doctest::Approx(expected).epsilon(1e-4).scale(1));
      }
      rotation.backward(vector.data(), scratch.data());
      for (std::size_t i = 0; i < values.size(); ++i) REQUIRE(std::fabs(vector[i] - values[i]) < 1e-5);
    }
  }
}

TEST_CASE("rotation: another seed is another matrix") {
  for (const rotation_kind kind : {rotation_kind::hadamard, rotation_kind::haar}) {
    std::vector<float> scratch(64);
    const auto image = [&](std::uint64_t seed) {
      const auto rotation = *orthonormal_rotation::make(64, {.kind = kind, .seed = seed});
      std::vector<float> vector(64, 0.0F);
      vector[5] = 1;
      rotation.forward(vector.data(), scratch.data());
      return vector;
    };
    CHECK(image(1) == image(1));
    CHECK(image(1) != image(2));
  }
}

TEST_CASE("rotation: unusable options") {
  CHECK(orthonormal_rotation::make(0).error().code == error_code::invalid_argument);
  CHECK(orthonormal_rotation::make(64, {.rounds = 9}).error().code == error_code::invalid_argument);
  CHECK(orthonormal_rotation::make(1025, {.kind = rotation_kind::haar}).error().code == error_code::out_of_range);
}

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/rotation.hpp>

namespace kvexact::test {

inline std::vector<float> normal_values(std::size_t count, std::uint64_t seed) {
  detail::normal_numbers random(seed);
  std::vector<float> made(count);
  for (float& each : made) each = static_cast<float>(random.next());
  return made;
}

/// Expected squared errors of unit vectors with 1 to 4 bits (arXiv 2504.19874 has them rounded).
struct known_distortions {
  std::uint32_t dim;
  std::array<double, 4> distortion;
};
inline constexpr std::array<known_distortions, 3> published_distortions{
    {{64, {.35839, .11453, .03339, .00913}}, {128, {.36089, .11600, .03397, .00932}}, {256, {.36214, .11674, .03426, .00941}}}};

/// Random vectors of length 1, [count, dim].
inline std::vector<float> unit_vectors(std::size_t count, std::size_t dim, std::uint64_t seed) {
  std::vector<float> made = normal_values(count * dim, seed);
  for (std::size_t t = 0; t < count; ++t) {
    double squares = 0;
    for (std::size_t c = 0; c < dim; ++c) squares += std::pow(static_cast<double>(made[t * dim + c]), 2);
    for (std::size_t c = 0; c < dim; ++c) made[t * dim + c] /= static_cast<float>(std::sqrt(squares));
  }
  return made;
}

/// Sums of random integers, exact and the same everywhere, roughly normal.
inline std::vector<float> portable_values(std::size_t count, std::uint64_t seed) {
  std::vector<float> made(count);
  for (float& each : made) {
    std::int64_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int64_t>(detail::split_mix(seed) >> 50);
    each = static_cast<float>(sum - 2 * 16383) / 8192.0F;
  }
  return made;
}

template <quantiser Q>
std::vector<std::byte> packed_by(const Q& format, std::span<const float> values, std::uint32_t head = 0, std::uint64_t* saturated = nullptr) {
  const std::size_t groups = values.size() / format.dim() / format.group_tokens();
  REQUIRE(groups * format.dim() * format.group_tokens() == values.size());
  std::vector<std::byte> packed(groups * format.packed_bytes(), std::byte{0xa5});
  std::vector<float> scratch(format.scratch_floats(), std::nanf(""));
  const std::uint64_t count = format.pack(head, values, packed, scratch);
  if (saturated != nullptr) *saturated = count;
  return packed;
}
template <quantiser Q>
std::vector<float> unpacked_by(const Q& format, std::span<const std::byte> packed, std::uint32_t head = 0) {
  std::vector<float> values(packed.size() / format.packed_bytes() * format.dim() * format.group_tokens());
  std::vector<float> scratch(format.scratch_floats(), std::nanf(""));
  format.unpack(head, packed, values, scratch);
  return values;
}
template <quantiser Q>
std::vector<float> through(const Q& format, std::span<const float> values, std::uint32_t head = 0) {
  return unpacked_by(format, packed_by(format, values, head), head);
}

/// Squared error over squares.
inline double relative_error(std::span<const float> from, std::span<const float> to) {
  double error = 0, squares = 0;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const double value = from[i], difference = value - to[i];
    error += difference * difference;
    squares += value * value;
  }
  return error / squares;
}

/// Relative squared error on normal numbers of variance 1.
template <quantiser Q>
double normal_error(const Q& format, std::size_t tokens = 4096) {
  const std::vector<float> values = normal_values(tokens / format.group_tokens() * format.group_tokens() * format.dim(), 42);
  return relative_error(values, through(format, values));
}

/// What every quantiser promises, on values of any size; `head_count` heads were made.
template <quantiser Q>
void check_quantiser(const Q& format, std::uint32_t head_count = 1) {
  const std::size_t group = std::size_t{format.group_tokens()} * format.dim();
  constexpr std::size_t groups = 37;
  for (std::uint32_t head = 0; head < head_count; ++head) {
    const std::vector<float> values = portable_values(groups * group, 7 + head);
    const std::vector<std::byte> packed = packed_by(format, values, head);
    CHECK(packed == packed_by(format, values, head));
    const std::vector<float> back = unpacked_by(format, packed, head);
    for (const float each : back) REQUIRE(std::isfinite(each));
    // In one call or in several.
    for (std::size_t first = 0, step = 1; first < groups; first += step, step = step % 5 + 1) {
      const std::size_t here = std::min(step, groups - first);
      const auto some = packed_by(format, std::span(values).subspan(first * group, here * group), head);
      CHECK(std::equal(some.begin(), some.end(), packed.begin() + static_cast<std::ptrdiff_t>(first * format.packed_bytes())));
      const auto one = unpacked_by(format, some, head);
      CHECK(std::equal(one.begin(), one.end(), back.begin() + static_cast<std::ptrdiff_t>(first * group)));
    }
    if constexpr (computes_on_codes<Q>) {
      const std::vector<float> query = normal_values(format.dim(), 11);
      std::vector<float> prepared(format.working_floats()), scratch(format.scratch_floats()), scores(format.group_tokens());
      std::vector<float> sums(format.working_floats()), out(format.dim());
      format.prepare(head, query, prepared, scratch);
      std::vector<double> expected_sum(format.dim());
      double total = 0, magnitude = 0;
      const std::vector<float> weights = normal_values(groups * format.group_tokens(), 12);
      for (std::size_t g = 0; g < groups; ++g) {
        const auto bytes = std::span<const std::byte>(packed).subspan(g * format.packed_bytes(), format.packed_bytes());
        format.dot(prepared, bytes, scores);
        const auto own = std::span(weights).subspan(g * format.group_tokens(), format.group_tokens());
        format.add_weighted(own, bytes, sums);
        for (std::size_t t = 0; t < format.group_tokens(); ++t) {
          double product = 0, norm = 0;
          for (std::size_t c = 0; c < format.dim(); ++c) {
            const double value = back[g * group + t * format.dim() + c];
            product += value * static_cast<double>(query[c]);
            norm += value * value;
            expected_sum[c] += value * static_cast<double>(own[t]);
          }
          CHECK(std::fabs(scores[t] - product) <= 1e-4 * (1 + std::sqrt(norm * format.dim())));
          total += static_cast<double>(own[t]);
          magnitude += std::sqrt(norm) * std::fabs(own[t]);
        }
      }
      format.finish(head, static_cast<float>(total), sums, out, scratch);
      for (std::size_t c = 0; c < format.dim(); ++c) CHECK(std::fabs(out[c] - expected_sum[c]) <= 2e-5 * (1 + magnitude));
    }
  }
  // Nothing, and the same value everywhere.
  for (const float same : {0.0F, 1e-30F, -3.0F, 60000.0F}) {
    const std::vector<float> values(group, same);
    const std::vector<float> back = through(format, values);
    for (const float each : back) REQUIRE(std::isfinite(each));
    if (same == 0.0F && head_count == 1) CHECK(relative_error(normal_values(group, 1), back) == doctest::Approx(1));
  }
  CHECK(packed_by(format, {}).empty());
}

/// The bytes for fixed values have the same hash with every compiler, optimisation and instruction set.
template <quantiser Q>
std::uint64_t pinned_hash(const Q& format) {
  return checksum(packed_by(format, portable_values(std::size_t{64} * format.group_tokens() * format.dim(), 99)));
}

}  // namespace kvexact::test

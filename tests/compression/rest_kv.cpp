// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/rest_kv.hpp>

#include "dropper_driver.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

using matrix = std::vector<std::vector<double>>;

double norm_of(const matrix& projection, const std::vector<double>& x) {
  double sum = 0;
  for (const auto& row : projection) {
    double product = 0;
    for (std::size_t d = 0; d < x.size(); ++d) product += row[d] * x[d];
    sum += product * product;
  }
  return std::sqrt(sum);
}

matrix random_matrix(std::size_t rows, std::size_t columns, std::mt19937& random) {
  matrix made(rows, std::vector<double>(columns));
  for (auto& row : made) {
    for (double& each : row) each = static_cast<double>(random()) * 0x1p-31 - 1;
  }
  return made;
}

template <class T>
std::vector<T> gram_of(const matrix& projection) {
  const std::size_t dim = projection[0].size();
  std::vector<T> gram;
  for (std::size_t i = 0; i < dim; ++i) {
    for (std::size_t j = 0; j < dim; ++j) {
      double sum = 0;
      for (const auto& row : projection) sum += row[i] * row[j];
      gram.push_back(static_cast<T>(sum));
    }
  }
  return gram;
}

/// |W (output - output without entry l)| by taking it out and scaling the other weights up.
double change_without(std::size_t l, const std::vector<double>& weights, const matrix& values, const matrix& projection) {
  const std::size_t dim = values[0].size();
  std::vector<double> with(dim);
  std::vector<double> without(dim);
  double total = 0;
  double rest = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    total += weights[i];
    rest += i == l ? 0 : weights[i];
  }
  for (std::size_t i = 0; i < weights.size(); ++i) {
    for (std::size_t d = 0; d < dim; ++d) {
      with[d] += weights[i] / total * values[i][d];
      if (i != l) without[d] += weights[i] / rest * values[i][d];
    }
  }
  for (std::size_t d = 0; d < dim; ++d) with[d] -= without[d];
  return norm_of(projection, with);
}

/// The definition with matrices, removals and padding spelled out.
struct rest_reference {
  const example_layer& layer;
  dropper_options options;
  std::uint32_t kernel = 5;
  std::int64_t unit = 2000;
  double smoothing = static_cast<double>(0.3F);
  bool newest_first = false;
  std::vector<matrix> projections = {};  // of each query head

  std::vector<double> operator()(std::uint32_t head, std::uint64_t boundary, const std::vector<std::uint64_t>& held,
                                 const attention_history& history) const {
    const std::uint64_t begin = boundary > options.window ? boundary - options.window : 0;
    const auto older = static_cast<std::size_t>(std::ranges::lower_bound(held, begin) - held.begin());
    matrix values;
    for (const std::uint64_t token : held) {
      values.emplace_back();
      for (std::uint32_t d = 0; d < layer.shape.value_dim; ++d) values.back().push_back(layer.value(token, head)[d].to_float());
    }
    std::vector<double> sums(older);
    for (std::uint32_t q = 0; q < layer.query_heads; ++q) {
      std::vector<double> average;
      for (std::uint64_t i = begin; i < boundary; ++i) {
        const auto& row = history[newest_first ? boundary - 1 - (i - begin) : i][q];
        std::vector<double> next;
        for (const std::uint64_t token : held)
          next.push_back(static_cast<double>(bf16::from_float(static_cast<float>(row[token])).to_float()));
        if (average.empty()) average = next;
        for (std::size_t k = 0; k < next.size(); ++k) average[k] = smoothing * next[k] + (1 - smoothing) * average[k];
      }
      for (std::size_t l = 0; l < older; ++l)
        sums[l] += change_without(l, average, values, projections[head * layer.query_heads + q]) / layer.query_heads;
    }
    // Left and right padding with the outermost scores, then plain averages of `size` in a row.
    const auto [size, left, right] = padding(boundary, held, history);
    std::vector<double> padded;
    for (std::int64_t i = -left; i < static_cast<std::int64_t>(older) + right; ++i)
      padded.push_back(sums[static_cast<std::size_t>(std::clamp<std::int64_t>(i, 0, static_cast<std::int64_t>(older) - 1))]);
    std::vector<double> scores(held.size());
    for (std::size_t l = 0; l < older; ++l) {
      for (std::int64_t k = 0; k < size; ++k) scores[l] += padded[l + static_cast<std::size_t>(k)] / static_cast<double>(size);
    }
    return scores;
  }

  struct pads {
    std::int64_t size, left, right;
  };

  [[nodiscard]] pads padding(std::uint64_t boundary, const std::vector<std::uint64_t>& held, const attention_history& history) const {
    // In integers: sums of indices, and how many they are.
    std::array<std::int64_t, 2> sums{};
    std::array<std::int64_t, 2> counts{};
    for (std::uint64_t position = boundary > options.window ? boundary - options.window : 0; position < boundary; ++position) {
      const std::size_t half = position + options.window - boundary < options.window / 2 ? 0 : 1;
      for (const auto& weights : history[position]) {
        std::vector<std::pair<double, std::int64_t>> ranked;
        for (std::size_t i = 0; i < held.size() && held[i] <= position; ++i) ranked.emplace_back(-weights[held[i]], i);
        std::ranges::sort(ranked);
        ranked.resize(std::min<std::size_t>(ranked.size(), options.budget));
        for (const auto& each : ranked) sums[half] += each.second;
        counts[half] += static_cast<std::int64_t>(ranked.size());
      }
    }
    if (counts[0] == 0 || counts[1] == 0) return {kernel, kernel / 2, kernel / 2};
    const std::int64_t drift = sums[0] * counts[1] - sums[1] * counts[0];
    const std::int64_t step = counts[0] * counts[1] * unit;
    const std::int64_t size = std::max<std::int64_t>(kernel, 2 * (std::abs(drift) / step) + 1);
    const std::int64_t down = drift >= 0 ? drift / step : -((-drift + step - 1) / step);
    const std::int64_t shift = drift > 0 ? down : down + 1;
    return {size, size / 2 - shift, size / 2 + shift};
  }
};

matrix identity(std::size_t dim) {
  matrix made(dim, std::vector<double>(dim));
  for (std::size_t i = 0; i < dim; ++i) made[i][i] = 1;
  return made;
}

}  // namespace

TEST_CASE("rest_kv: the score is the change of the output when an entry is left out") {
  std::mt19937 random(1);
  for (int run = 0; run < 50; ++run) {
    const std::size_t entries = 2 + random() % 20;
    const std::size_t dim = 1 + random() % 8;
    const matrix projection = random_matrix(1 + random() % 12, dim, random);
    const matrix values = random_matrix(entries, dim, random);
    std::vector<double> weights;
    double total = 0;
    for (std::size_t i = 0; i < entries; ++i) {
      weights.push_back(std::pow(static_cast<double>(random()) * 0x1p-32, run % 4) + 1e-3);
      total += weights.back();
    }
    for (double& each : weights) each /= total;
    const auto gram = gram_of<double>(projection);
    std::vector<double> output(dim);
    for (std::size_t i = 0; i < entries; ++i) {
      for (std::size_t d = 0; d < dim; ++d) output[d] += weights[i] * values[i][d];
    }
    for (std::size_t l = 0; l < entries; ++l) {
      std::vector<double> difference(dim);
      for (std::size_t d = 0; d < dim; ++d) difference[d] = output[d] - values[l][d];
      const double norm = detail::projected_norm<double, double>(difference, gram);
      const double change = detail::leave_one_out(weights[l], norm, detail::projected_norm<double, double>(output, gram));
      const double expected = change_without(l, weights, values, projection);
      CHECK(std::abs(change - expected) < 1e-12 * std::max(1.0, expected));
    }
  }
}

TEST_CASE("rest_kv: projected norms") {
  const std::vector<double> x{3, -4};
  CHECK(detail::projected_norm<double, double>(x, {}) == 5);
  CHECK(detail::projected_norm<double, float>(x, std::vector<float>{4, 0, 0, 4}) == 10);
  // A matrix that is none of any projection, but for rounding.
  CHECK(detail::projected_norm<double, float>(x, std::vector<float>{-1e-9F, 0, 0, 0}) == 0);
}

TEST_CASE("rest_kv: an entry with all the weight") {
  // Naively 1 / 0 * 0, and with a bounded denominator 0: the one entry that must stay would go first.
  CHECK(detail::leave_one_out(1.0, 0.0, 7.0) == 7);
  CHECK(detail::leave_one_out(1.0 - 1e-12, 1e-12, 7.0) == 7);
  CHECK(detail::leave_one_out(1.0 + 1e-16, 0.0, 7.0) == 7);
  CHECK(detail::leave_one_out(0.0, 3.0, 7.0) == 0);
  CHECK(std::abs(detail::leave_one_out(0.75, 2.0, 7.0) - 6) < 1e-15);

  std::vector<bf16> keys(40, bf16::from_float(1));
  std::vector<bf16> values;
  for (int i = 0; i < 40; ++i) values.push_back(bf16::from_float(static_cast<float>(1 + i % 3)));
  const layer_tensors<const bf16> rows{strided_tensor<const bf16>::nhd(keys.data(), 1, 1),
                                       strided_tensor<const bf16>::nhd(values.data(), 1, 1)};
  auto made =
      rest_kv<bf16>::make({1, 1, 1}, {.eviction = {.sinks = 1, .budget = 1, .window = 1, .interval = 6, .max_rollback = 1}, .kernel = 1});
  REQUIRE(made);
  REQUIRE(made->append(rows, 9));
  std::vector<float> weights(9);
  weights[5] = 1;
  REQUIRE(made->observe({0, 8, weights}));
  REQUIRE(made->append(rows, 1));
  CHECK(state_of(*made, 0).positions == std::vector<std::uint64_t>{0, 5, 8, 9});
}

TEST_CASE("rest_kv: kernel and shift") {
  struct line {
    double drift;
    std::int64_t size, shift;
  };
  // As published; without any drift the formula gives a shift of 1.
  for (const line& each : {line{0, 5, 1},
                           {1, 5, 0},
                           {1999, 5, 0},
                           {2000, 5, 1},
                           {3999, 5, 1},
                           {4000, 5, 2},
                           {5999, 5, 2},
                           {6000, 7, 3},
                           {21000, 21, 10},
                           {-1, 5, 0},
                           {-1999, 5, 0},
                           {-2000, 5, 0},
                           {-2001, 5, -1},
                           {-4000, 5, -1},
                           {-6000, 7, -2},
                           {-6001, 7, -3}}) {
    CAPTURE(each.drift);
    const auto kernel = detail::drift_kernel::of(each.drift, 5, 2000);
    CHECK(kernel.size == each.size);
    CHECK(kernel.shift == each.shift);
  }
}

TEST_CASE("rest_kv: averages over neighbours") {
  const std::vector<double> in{1, 2, 4, 8, 16, 32};
  std::vector<double> out(6);
  detail::pool(in, {3, 0}, out);
  CHECK(out == std::vector<double>{4.0 / 3, 7.0 / 3, 14.0 / 3, 28.0 / 3, 56.0 / 3, 80.0 / 3});
  detail::pool(in, {1, 1}, out);
  CHECK(out == std::vector<double>{2, 4, 8, 16, 32, 32});
  detail::pool(in, {3, -1}, out);
  CHECK(out == std::vector<double>{1, 4.0 / 3, 7.0 / 3, 14.0 / 3, 28.0 / 3, 56.0 / 3});
  detail::pool(in, {15, 0}, out);
  CHECK(out[0] == (1 * 8 + 2 + 4 + 8 + 16 + 32 + 32 + 32) / 15.0);
  detail::pool({}, {5, 0}, {});
}

TEST_CASE("rest_kv: against a reference that keeps everything") {
  std::mt19937 random(2);
  for (const std::uint32_t heads : {1U, 3U}) {
    const example_layer layer({2, 6, 4}, heads, 120, 3, 2.0F);
    std::vector<matrix> projections;
    std::vector<float> grams;
    for (std::uint32_t i = 0; i < 2 * heads; ++i) {
      projections.push_back(random_matrix(9, 4, random));
      const auto gram = gram_of<float>(projections.back());
      grams.insert(grams.end(), gram.begin(), gram.end());
    }
    for (const bool projected : {false, true}) {
      for (const std::uint32_t kernel : {1U, 5U}) {
        for (const std::uint32_t unit : {1U, 2U, 2000U}) {
          for (const std::uint32_t window : {1U, 5U, 8U}) {
            for (const std::uint32_t rollback : {0U, 11U}) {
              for (const std::uint64_t first : {0U, 50U}) {
                const dropper_options options{.sinks = 2,
                                              .budget = 7,
                                              .window = window,
                                              .first_eviction = first,
                                              .interval = 8,
                                              .max_rollback = rollback,
                                              .query_heads = heads};
                rest_kv_options chosen{.eviction = options, .kernel = kernel, .drift_unit = unit};
                if (projected) chosen.output_gram = grams;
                auto made = rest_kv<bf16>::make(layer.shape, chosen);
                REQUIRE(made);
                rest_reference reference{layer, options, kernel, unit};
                reference.projections = projected ? projections : std::vector<matrix>(2 * heads, identity(4));
                check_against_reference(*made, layer, options, 90, reference);
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("rest_kv: what decides") {
  // Each variant that a wrong version would be keeps other tokens.
  std::mt19937 random(4);
  const example_layer layer({1, 6, 4}, 2, 80, 9, 2.0F);
  const dropper_options options{
      .sinks = 0, .budget = 12, .window = 8, .first_eviction = 60, .interval = 8, .max_rollback = 0, .query_heads = 2};
  const std::vector<matrix> projections{random_matrix(9, 4, random), random_matrix(9, 4, random)};
  const auto kept = [&](rest_reference reference) {
    if (reference.projections.empty()) reference.projections = projections;
    return reference_positions(layer, options, 0, 61, reference)[61];
  };
  const auto expected = kept({layer, options, 5, 2});
  REQUIRE(expected != kept({layer, options, 5, 2, static_cast<double>(0.3F), true}));  // newest to oldest
  REQUIRE(expected != kept({layer, options, 5, 2, 0.7}));
  REQUIRE(expected != kept({layer, options, 5, 2000}));
  REQUIRE(expected != kept({layer, options, 1, 2000}));
  REQUIRE(expected != kept({layer, options, 5, 2, static_cast<double>(0.3F), false, {projections[1], projections[0]}}));
  REQUIRE(expected != kept({layer, options, 5, 2, static_cast<double>(0.3F), false, {identity(4), identity(4)}}));
  std::vector<float> grams = gram_of<float>(projections[0]);
  const auto second = gram_of<float>(projections[1]);
  grams.insert(grams.end(), second.begin(), second.end());
  auto made = rest_kv<bf16>::make(layer.shape, {.eviction = options, .drift_unit = 2, .output_gram = grams});
  REQUIRE(made);
  decode(*made, layer, 61);
  CHECK(state_of(*made, 0).positions == expected);
}

TEST_CASE("rest_kv: options that cannot be") {
  const std::vector<float> gram(3 * 2 * 2 * 2, 1.0F);
  const rest_kv_options good{.eviction = {.window = 8, .interval = 8, .query_heads = 2}, .output_gram = gram};
  const auto code = [&](auto&& change, const layer_shape& shape = {3, 2, 2}) {
    rest_kv_options options = good;
    change(options);
    const auto made = rest_kv<bf16>::make(shape, options);
    return made ? error_code{} : made.error().code;
  };
  CHECK(code([](auto&) {}) == error_code{});
  CHECK(code([](auto&) {}, {3, 2, 3}) == error_code::shape_mismatch);
  CHECK(code([](auto&) {}, {2, 2, 2}) == error_code::shape_mismatch);
  CHECK(code([](auto& options) { options.output_gram = {}; }, {3, 2, 0}) == error_code::shape_mismatch);
  CHECK(code([](auto& options) { options.eviction.query_heads = 1; }) == error_code::shape_mismatch);
  CHECK(code([](auto& options) { options.smoothing = 0; }) == error_code::invalid_argument);
  CHECK(code([](auto& options) { options.smoothing = 1; }) == error_code{});
  CHECK(code([](auto& options) { options.smoothing = 1.01F; }) == error_code::invalid_argument);
  CHECK(code([](auto& options) { options.smoothing = NAN; }) == error_code::invalid_argument);
  CHECK(code([](auto& options) { options.kernel = 4; }) == error_code::invalid_argument);
  CHECK(code([](auto& options) { options.drift_unit = 0; }) == error_code::invalid_argument);
  CHECK(code([](auto& options) { options.eviction.window = 0; }) == error_code::invalid_argument);
  CHECK(code([](auto& options) { options.eviction.window = 9; }) == error_code::invalid_argument);
  auto bad = gram;
  bad[23] = INFINITY;
  CHECK(code([&](auto& options) { options.output_gram = bad; }) == error_code::invalid_argument);
}

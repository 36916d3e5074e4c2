// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/attention.hpp>
#include <kvexact/compression/src.hpp>

#include "dropper_driver.hpp"
#include "heap_meter.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

constexpr layer_shape shape{2, 16, 9};
constexpr std::uint32_t query_heads = 2;

/// Queries are rounded as SRC holds them.
example_layer make_layer(std::uint64_t tokens, std::uint32_t seed) {
  example_layer layer(shape, query_heads, tokens, seed);
  for (float& each : layer.queries) each = bf16::from_float(each).to_float();
  return layer;
}

/// Attention at one query.
struct attended {
  std::vector<double> out;
  double log_mass = 0;
};

/// The query of a position, scaled as models do.
std::vector<float> query_of(const example_layer& layer, std::uint64_t position, std::uint32_t head, std::uint32_t q) {
  const std::size_t key_dim = layer.shape.key_dim;
  const std::size_t at = ((position * layer.shape.kv_heads + head) * layer.query_heads + q) * key_dim;
  const auto begin = layer.queries.begin() + static_cast<std::ptrdiff_t>(at);
  std::vector<float> query(begin, begin + static_cast<std::ptrdiff_t>(key_dim));
  for (float& each : query) each /= std::sqrt(static_cast<float>(key_dim));
  return query;
}
attended exact(const example_layer& layer, std::uint32_t head, const std::vector<float>& query, const std::vector<std::uint64_t>& tokens) {
  attended made{std::vector<double>(layer.shape.value_dim), 0};
  double mass = 0;
  for (const std::uint64_t token : tokens) {
    double score = 0;
    for (std::size_t c = 0; c < query.size(); ++c) score += static_cast<double>(query[c] * layer.key(token, head)[c].to_float());
    mass += std::exp(score);
    for (std::size_t c = 0; c < made.out.size(); ++c)
      made.out[c] += std::exp(score) * static_cast<double>(layer.value(token, head)[c].to_float());
  }
  for (double& each : made.out) each /= mass;
  made.log_mass = std::log(mass);
  return made;
}
template <class Attend>
attended at_query(const Attend& attend, const std::vector<float>& query) {
  std::vector<float> out(shape.value_dim), mass(1);
  REQUIRE(attend(attention_call{query, out, mass}));
  return {std::vector<double>(out.begin(), out.end()), static_cast<double>(mass[0])};
}
double squared_difference(const attended& a, const attended& b) {
  double sum = 0;
  for (std::size_t c = 0; c < a.out.size(); ++c) sum += std::pow(a.out[c] - b.out[c], 2);
  return sum;
}
double squared(const attended& a) { return squared_difference(a, {std::vector<double>(a.out.size()), 0}); }

std::vector<std::uint64_t> first_tokens(std::uint64_t count) {
  std::vector<std::uint64_t> tokens;
  for (std::uint64_t t = 0; t < count; ++t) tokens.push_back(t);
  return tokens;
}
/// What a head of the cache does not hold of its tokens.
std::vector<std::uint64_t> missing(const src<bf16>& cache, std::uint32_t head) {
  const auto held = state_of(cache, head).positions;
  std::vector<std::uint64_t> tokens;
  for (std::uint64_t t = 0; t < cache.length(); ++t)
    if (!std::ranges::binary_search(held, t)) tokens.push_back(t);
  return tokens;
}

/// 16 reference queries, as many as a key has channels; 47 of 61 tokens are dropped at token 60.
entropy_summary_options exact_options() {
  return {.eviction = {.sinks = 1,
                       .budget = 4,
                       .window = 8,
                       .first_eviction = 60,
                       .interval = 8,
                       .max_rollback = 7,
                       .query_heads = query_heads},
          .rank = 100,
          .ridge = 0};
}
src<bf16> make(const entropy_summary_options& options, const layer_shape& layer = shape) {
  auto made = src<bf16>::make(layer, options);
  REQUIRE(made);
  return *std::move(made);
}

}  // namespace

TEST_CASE("src: attention at the reference queries is that of the full cache") {
  const example_layer layer = make_layer(61, 1);
  auto cache = make(exact_options());
  decode(cache, layer, 61);
  for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
    const auto gone = missing(cache, head);
    REQUIRE(gone.size() == 47);
    for (std::uint64_t position = 52; position < 60; ++position) {
      for (std::uint32_t q = 0; q < query_heads; ++q) {
        const auto query = query_of(layer, position, head, q);
        const attended bin = exact(layer, head, query, gone), full = exact(layer, head, query, first_tokens(61));
        REQUIRE(std::exp(bin.log_mass - full.log_mass) > 0.3);
        const attended summary = at_query([&](const attention_call& call) { return cache.summarise(head, call); }, query);
        CHECK(squared_difference(summary, bin) < 1e-12 * squared(bin));
        CHECK(std::abs(summary.log_mass - bin.log_mass) < 1e-6 * std::abs(bin.log_mass));
        const attended merged = at_query([&](const attention_call& call) { return attend(cache, head, call); }, query);
        CHECK(squared_difference(merged, full) < 1e-12 * squared(full));
        CHECK(std::abs(merged.log_mass - full.log_mass) < 1e-6 * std::abs(full.log_mass));
      }
    }
  }
}

TEST_CASE("src: between the reference queries it is near, and only with the right mass") {
  const example_layer layer = make_layer(400, 2);
  entropy_summary_options options = exact_options();
  options.eviction.window = options.eviction.interval = 64;
  options.eviction.first_eviction = 300;
  options.rank = 4;
  options.ridge = 0.1F;
  auto cache = make(options);
  decode(cache, layer, 301);
  double with = 0, without = 0, one_token = 0, no_mass = 0, squares = 0, mass_error = 0, mass_spread = 0;
  for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
    const auto gone = missing(cache, head), held = state_of(cache, head).positions;
    for (std::uint64_t position = 301; position < 400; ++position) {
      const auto query = query_of(layer, position, head, 0);
      const attended full = exact(layer, head, query, first_tokens(301));
      const attended bin = exact(layer, head, query, gone), kept = exact(layer, head, query, held);
      const attended summary = at_query([&](const attention_call& call) { return cache.summarise(head, call); }, query);
      const auto merged = [&](double log_mass) {
        attended both = kept;
        const double share = 1 / (1 + std::exp(kept.log_mass - log_mass));
        for (std::size_t c = 0; c < both.out.size(); ++c) both.out[c] += share * (summary.out[c] - both.out[c]);
        return squared_difference(both, full);
      };
      with += squared_difference(at_query([&](const attention_call& call) { return attend(cache, head, call); }, query), full);
      without += squared_difference(kept, full);
      one_token += merged(summary.log_mass - std::log(static_cast<double>(gone.size())));
      no_mass += merged(0);
      squares += squared(full);
      mass_error += std::pow(summary.log_mass - bin.log_mass, 2);
      mass_spread += std::pow(std::log(static_cast<double>(gone.size())) - bin.log_mass, 2);
    }
  }
  // Measured: 0.25 against 3.4 with no summary, 3.3 with the mass of one token and 3.3 with none; 3.4 against 46.
  CHECK(with < 0.3 * squares);
  CHECK(std::min({without, one_token, no_mass}) > 3 * squares);
  CHECK(mass_error < 0.1 * mass_spread);
}

TEST_CASE("src: the more rank, the better at the reference queries") {
  const example_layer layer = make_layer(61, 3);
  double before = 1e9;
  for (std::uint32_t rank = 0; rank <= shape.value_dim; ++rank) {
    entropy_summary_options options = exact_options();
    options.rank = rank;
    auto cache = make(options);
    decode(cache, layer, 61);
    double error = 0;
    for (std::uint64_t position = 52; position < 60; ++position) {
      for (std::uint32_t q = 0; q < query_heads; ++q) {
        const auto query = query_of(layer, position, 1, q);
        const attended bin = exact(layer, 1, query, missing(cache, 1));
        const attended summary = at_query([&](const attention_call& call) { return cache.summarise(1, call); }, query);
        error += squared_difference(summary, bin);
        CHECK(std::abs(summary.log_mass - bin.log_mass) < 1e-5);  // whatever the rank
      }
    }
    CHECK(error < before);
    if (rank == 0) CHECK(error > 0.1);
    if (rank == shape.value_dim) CHECK(error < 1e-11);
    before = error;
  }
}

TEST_CASE("src: the second summary stands for both bins") {
  example_layer layer = make_layer(69, 4);
  // The same queries before both boundaries, so that the first summary is exact where the second is fitted.
  const std::size_t each = std::size_t{shape.kv_heads} * query_heads * shape.key_dim;
  const auto first_window = layer.queries.begin() + static_cast<std::ptrdiff_t>(52 * each);
  std::copy_n(first_window, 8 * each, first_window + static_cast<std::ptrdiff_t>(8 * each));
  auto cache = make(exact_options());
  decode(cache, layer, 68);
  const std::size_t first = missing(cache, 0).size();
  decode(cache, layer, 69);
  for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
    const auto gone = missing(cache, head);
    REQUIRE(gone.size() == first + 8);
    for (std::uint64_t position = 60; position < 68; ++position) {
      const auto query = query_of(layer, position, head, 1);
      const attended bins = exact(layer, head, query, gone);
      const attended summary = at_query([&](const attention_call& call) { return cache.summarise(head, call); }, query);
      CHECK(squared_difference(summary, bins) < 1e-11 * squared(bins));
      CHECK(std::abs(summary.log_mass - bins.log_mass) < 1e-5);
    }
  }
}

TEST_CASE("src: a truncation brings the earlier summary back") {
  const example_layer layer = make_layer(120, 5), other = make_layer(120, 6);
  for (const std::uint32_t rollback : {5U, 20U}) {
    entropy_summary_options options = exact_options();
    options.eviction.first_eviction = 24;
    options.eviction.max_rollback = rollback;
    options.rank = 2;
    auto straight = make(options), cache = make(options);
    for (std::uint64_t length = 1; length <= 60; ++length) {
      decode(straight, layer, length);
      decode(cache, layer, length);
      decode(cache, other, length + length % (rollback + 1));
      REQUIRE(cache.truncate(length));
      REQUIRE(state_of(cache) == state_of(straight));
      // Across several boundaries in one call, without attention.
      REQUIRE(cache.append(other.rows(length), rollback));
      REQUIRE(cache.truncate(length));
      REQUIRE(state_of(cache) == state_of(straight));
    }
  }
}

TEST_CASE("src: far from the reference queries the log-mass stays in reach") {
  const example_layer layer = make_layer(61, 7);
  auto cache = make(exact_options());
  decode(cache, layer, 61);
  double least = 1e9, most = -1e9;
  for (std::uint64_t position = 52; position < 60; ++position) {
    for (std::uint32_t q = 0; q < query_heads; ++q) {
      const double seen = exact(layer, 0, query_of(layer, position, 0, q), missing(cache, 0)).log_mass;
      least = std::min(least, seen);
      most = std::max(most, seen);
    }
  }
  constexpr double margin = static_cast<double>(detail::fitted_attention::margin);
  for (const float scale : {-1e4F, 1e4F}) {
    auto query = query_of(layer, 52, 0, 0);
    for (float& each : query) each *= scale;
    const double found = at_query([&](const attention_call& call) { return cache.summarise(0, call); }, query).log_mass;
    CHECK(std::min(std::abs(found - (least - margin)), std::abs(found - (most + margin))) < 1e-5);
  }
}

TEST_CASE("src: regression is ridge regression, in either form") {
  std::mt19937 random(8);
  const auto next = [&] { return static_cast<double>(random()) * 0x1p-31 - 1; };
  for (const int queries : {3, 5, 6, 20}) {
    for (const double ridge : {0.0, 0.3}) {
      detail::attention_samples seen{Eigen::MatrixXd(queries, 5), Eigen::VectorXd(queries), Eigen::MatrixXd(queries, 2)};
      for (double& each : seen.queries.reshaped()) each = next();
      for (double& each : seen.log_mass) each = next() / 10;
      for (double& each : seen.outputs.reshaped()) each = next();
      const auto fitted = detail::fitted_attention::fit(9, seen, 2, ridge);
      CHECK(fitted.boundary() == 9);
      // The residuals of the fit have no part along the queries but for what the ridge holds back.
      const Eigen::MatrixXd x = seen.queries.rowwise() - seen.queries.colwise().mean();
      Eigen::MatrixXd residual(queries, 3);
      Eigen::MatrixXd slopes(5, 3);
      std::vector<float> query(5), out(2), origin(2);
      const float origin_mass = fitted.evaluate(query, origin);
      for (int c = 0; c < 5; ++c) {
        query.assign(5, 0);
        query[static_cast<std::size_t>(c)] = 0.25F;
        slopes(c, 2) = 4 * static_cast<double>(fitted.evaluate(query, out) - origin_mass);
        for (std::size_t o = 0; o < 2; ++o) slopes(c, static_cast<int>(o)) = 4 * static_cast<double>(out[o] - origin[o]);
      }
      for (int n = 0; n < queries; ++n) {
        for (std::size_t c = 0; c < 5; ++c) query[c] = static_cast<float>(seen.queries(n, static_cast<int>(c)));
        residual(n, 2) = seen.log_mass(n) - static_cast<double>(fitted.evaluate(query, out));
        for (int o = 0; o < 2; ++o) residual(n, o) = seen.outputs(n, o) - static_cast<double>(out[static_cast<std::size_t>(o)]);
      }
      const double held_back = ridge * x.squaredNorm() / 5;
      CHECK((x.transpose() * residual - held_back * slopes).cwiseAbs().maxCoeff() < 1e-5);
      CHECK(residual.colwise().sum().cwiseAbs().maxCoeff() < 1e-5);
      if (ridge == 0 && queries <= 6) CHECK(residual.cwiseAbs().maxCoeff() < 1e-5);
    }
  }
}

TEST_CASE("src: entropy of attention") {
  CHECK(detail::entropy_of(0, 0) == 0);
  CHECK(detail::entropy_of(0.7, 0.7 * std::log(0.7)) == doctest::Approx(0).scale(1));
  CHECK(detail::entropy_of(8 * 0.1, 8 * 0.1 * std::log(0.1)) == doctest::Approx(std::log(8.0)));
  const double three_to_one = -0.75 * std::log(0.75) - 0.25 * std::log(0.25);
  CHECK(detail::entropy_of(0.3 + 0.1, 0.3 * std::log(0.3) + 0.1 * std::log(0.1)) == doctest::Approx(three_to_one));
}

TEST_CASE("src: what is kept against a reference that keeps everything") {
  const example_layer layer({2, 6, 4}, 3, 130, 9, 2.0F);
  for (const float entropy_weight : {0.0F, 0.5F, 1.0F}) {
    for (const std::uint32_t rollback : {0U, 11U}) {
      const dropper_options options{.sinks = 2, .budget = 7, .window = 5, .interval = 8, .max_rollback = rollback, .query_heads = 3};
      const reference_scores scores = [&](std::uint32_t, std::uint64_t boundary, const std::vector<std::uint64_t>& held,
                                          const attention_history& history) {
        const auto held_as = [](double value) { return static_cast<double>(bf16::from_float(static_cast<float>(value)).to_float()); };
        std::vector<double> worth;
        for (const std::uint64_t token : held) {
          double sum = 0, sum_of_logs = 0;
          for (std::uint64_t position = boundary - options.window; position < boundary; ++position) {
            double of_query = 0, logs = 0;
            for (const auto& weights : history[position]) {
              of_query += weights[token];
              if (weights[token] > 0) logs += weights[token] * std::log(weights[token]);
            }
            sum += held_as(of_query);
            sum_of_logs += held_as(logs);
          }
          const double entropy = sum > 0 ? std::max(0.0, std::log(sum) - sum_of_logs / sum) : 0;
          worth.push_back(sum * (1 - static_cast<double>(entropy_weight) * std::min(1.0, entropy / std::log(3.0 * options.window))));
        }
        return worth;
      };
      auto cache = make({.eviction = options, .entropy_weight = entropy_weight}, layer.shape);
      check_against_reference(cache, layer, options, 130, scores);
    }
  }
}

TEST_CASE("src: a token that all queries pay a little goes before one that one query pays as much") {
  const example_layer layer({1, 2, 2}, 1, 9, 10);
  for (const bool entropy_counts : {false, true}) {
    const dropper_options eviction{.sinks = 0, .budget = 1, .window = 2, .first_eviction = 8, .interval = 8};
    auto cache = make({.eviction = eviction, .entropy_weight = entropy_counts ? 0.5F : 0.0F}, layer.shape);
    REQUIRE(cache.append(layer.rows(0), 7));
    const std::vector<float> query(2, 0.5F);
    REQUIRE(cache.observe({0, 6, std::vector<float>{0, 0.25F, 0, 0.5F, 0, 0, 0}, query}));
    REQUIRE(cache.append(layer.rows(7), 1));
    REQUIRE(cache.observe({0, 7, std::vector<float>{0, 0.25F, 0, 0, 0, 0, 0, 0}, query}));
    REQUIRE(cache.append(layer.rows(8), 1));
    CHECK(state_of(cache, 0).positions == std::vector<std::uint64_t>{entropy_counts ? 3U : 1U, 6, 7, 8});
  }
}

TEST_CASE("src: without queries nothing can be fitted") {
  const example_layer layer = make_layer(100, 11);
  auto cache = make(exact_options());
  REQUIRE(cache.append(layer.rows(0), 61));
  std::vector<float> query(shape.key_dim, 1.0F), out(shape.value_dim, 1.0F), mass(1);
  REQUIRE(cache.summarise(0, {query, out, mass}));
  CHECK(mass[0] == -INFINITY);
  CHECK(out == std::vector<float>(shape.value_dim));
  // An earlier summary stays.
  decode(cache, layer, 68);
  REQUIRE(cache.append(layer.rows(68), 1));
  const auto before = state_of(cache, 0).summary;
  CHECK(before.back() > 0);
  REQUIRE(cache.append(layer.rows(69), 20));
  CHECK(state_of(cache, 0).summary == before);
}

TEST_CASE("src: tokens in one call across boundaries are those that come one by one") {
  const example_layer layer = make_layer(110, 15);
  auto single = make(exact_options());
  decode(single, layer, 68);
  auto together = single;
  REQUIRE(together.append(layer.rows(68), 40));
  while (single.length() < 108) REQUIRE(single.append(layer.rows(single.length()), 1));
  CHECK(state_of(together) == state_of(single));
}

TEST_CASE("src: memory counts the summary") {
  const example_layer layer = make_layer(62, 12);
  std::size_t bytes[2] = {};
  for (const std::uint32_t rank : {0U, 3U}) {
    entropy_summary_options options = exact_options();
    options.rank = rank;
    auto cache = make(options);
    decode(cache, layer, 62);
    bytes[rank / 3] = cache.bytes();
  }
  CHECK(bytes[1] - bytes[0] == shape.kv_heads * 3 * (shape.key_dim + shape.value_dim) * sizeof(float));
}

TEST_CASE("src: where no memory is left nothing changes") {
  const example_layer layer = make_layer(100, 13);
  auto options = exact_options();
  options.eviction.first_eviction = 24;
  auto at_40 = make(options), straight = make(options);
  decode(at_40, layer, 40);
  decode(straight, layer, 60);
  const auto before = state_of(at_40), after = state_of(straight);
  std::size_t failures = 0;
  for (std::size_t allowed = 0;; ++allowed) {
    auto cache = at_40;
    std::optional<result<void>> outcome;
    {
      const heap_meter meter(allowed);
      outcome = cache.append(layer.rows(40), 1);
    }
    if (*outcome) break;
    ++failures;
    REQUIRE(outcome->error().code == error_code::out_of_memory);
    REQUIRE(state_of(cache) == before);
    if (allowed % 8 != 0) continue;
    decode(cache, layer, 60);
    REQUIRE(state_of(cache) == after);
  }
  CHECK(failures > 20);
  auto cache = make(options);
  decode(cache, layer, 39);
  REQUIRE(cache.append(layer.rows(39), 1));
  failures = 0;
  for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
    const auto weights = layer.attention(39, head, state_of(cache, head).positions);
    std::vector<float> queries;
    for (std::uint32_t q = 0; q < query_heads; ++q)
      for (const float each : query_of(layer, 39, head, q)) queries.push_back(each);
    for (std::size_t allowed = 0;; ++allowed) {
      std::optional<result<void>> outcome;
      {
        const heap_meter meter(allowed);
        outcome = cache.observe({head, 39, weights, queries});
      }
      if (*outcome) break;
      ++failures;
      REQUIRE(outcome->error().code == error_code::out_of_memory);
    }
  }
  CHECK(failures > 4);
  decode(cache, layer, 60);
  CHECK(state_of(cache) == after);
}

TEST_CASE("src: calls that do not fit are refused") {
  const example_layer layer = make_layer(61, 14);
  auto cache = make(exact_options());
  REQUIRE(cache.append(layer.rows(0), 53));
  REQUIRE(cache.observes(52));
  const auto weights = layer.attention(52, 0, first_tokens(53));
  std::vector<float> queries(query_heads * shape.key_dim, 0.5F);
  const auto code = [&](std::uint32_t head, std::uint64_t position, std::span<const float> of) {
    return cache.observe({head, position, weights, of}).error().code;
  };
  CHECK(code(0, 52, {}) == error_code::shape_mismatch);
  CHECK(code(0, 52, std::span(queries).first(16)) == error_code::shape_mismatch);
  CHECK(code(2, 52, queries) == error_code::out_of_range);
  CHECK(code(0, 51, queries) == error_code::out_of_range);
  queries[3] = NAN;
  CHECK(code(0, 52, queries) == error_code::invalid_argument);
  queries[3] = 0;
  REQUIRE(cache.observe({0, 52, weights, queries}));
  CHECK(code(0, 52, queries) == error_code::invalid_argument);

  std::vector<float> out(shape.value_dim), mass(1);
  const auto summarised = [&](std::uint32_t head, const attention_call& call) { return cache.summarise(head, call).error().code; };
  const auto query = std::span<const float>(queries).first(16);
  CHECK(summarised(2, {query, out, mass}) == error_code::shape_mismatch);
  CHECK(summarised(0, {queries, out, mass}) == error_code::shape_mismatch);
  CHECK(summarised(0, {query, std::span(out).first(3), mass}) == error_code::shape_mismatch);
  CHECK(summarised(0, {query, out, {}}) == error_code::shape_mismatch);
  CHECK(cache.append(layer.rows(53), ~std::uint64_t{0}).error().code == error_code::out_of_range);

  const auto made = [](auto&& change, const layer_shape& of = shape) {
    entropy_summary_options options = exact_options();
    change(options);
    const auto cache_of = src<bf16>::make(of, options);
    return cache_of ? error_code{} : cache_of.error().code;
  };
  CHECK(made([](auto&) {}) == error_code{});
  CHECK(made([](auto&) {}, {2, 16, 0}) == error_code::shape_mismatch);
  CHECK(made([](auto& options) { options.eviction.window = 9; }) == error_code::invalid_argument);
  CHECK(made([](auto& options) { options.eviction.query_heads = 0; }) == error_code::invalid_argument);
  for (const float bad : {-0.1F, 1.1F, NAN})
    CHECK(made([&](auto& options) { options.entropy_weight = bad; }) == error_code::invalid_argument);
  for (const float bad : {-0.1F, INFINITY, NAN}) CHECK(made([&](auto& options) { options.ridge = bad; }) == error_code::invalid_argument);
}

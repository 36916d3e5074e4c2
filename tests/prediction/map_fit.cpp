// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <Eigen/SVD>
#include <doctest/doctest.h>

#include <kvexact/core/instruction_set.hpp>
#include <kvexact/prediction/map_fit.hpp>

using namespace kvexact;

namespace {

using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using view = Eigen::Map<const matrix>;

Eigen::Index index(std::size_t i) { return static_cast<Eigen::Index>(i); }

matrix to_matrix(const std::vector<double>& values, std::size_t rows) {
  return view(values.data(), index(rows), rows == 0 ? 0 : index(values.size() / rows));
}

/// Tokens of integer features and outputs; what lies beyond the tokens of a row is garbage.
struct data_set {
  std::size_t features, outputs, tokens, stride;
  std::vector<std::int16_t> x, y;

  data_set(std::size_t f, std::size_t o, std::size_t n)
      : features(f), outputs(o), tokens(n), stride(n + 5), x(f * stride, 30000), y(o * stride, -30000) {}

  std::int16_t& x_at(std::size_t feature, std::size_t token) { return x[feature * stride + token]; }
  std::int16_t& y_at(std::size_t output, std::size_t token) { return y[output * stride + token]; }
  [[nodiscard]] matrix all_x() const { return values(x, features); }
  [[nodiscard]] matrix all_y() const { return values(y, outputs); }

  /// Features of several sizes that depend on one another a little.
  void draw_features(std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (std::size_t t = 0; t < tokens; ++t) {
      const double common = normal(random);
      for (std::size_t f = 0; f < features; ++f) {
        const double value = (10 + 5 * static_cast<double>(f % 5)) * (normal(random) + 0.5 * common);
        x_at(f, t) = static_cast<std::int16_t>(std::lrint(std::clamp(value, -127.0, 127.0)));
      }
    }
  }
  /// y = map x + noise, rounded.
  void make_outputs(const matrix& map, double noise, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0, 1);
    const matrix product = map * all_x();
    for (std::size_t o = 0; o < outputs; ++o) {
      for (std::size_t t = 0; t < tokens; ++t)
        y_at(o, t) = static_cast<std::int16_t>(std::lrint(product(index(o), index(t)) + (noise > 0 ? noise * normal(random) : 0.0)));
    }
  }

  /// Sums over the tokens, in pieces of `step`.
  template <class Equations = normal_equations>
  [[nodiscard]] Equations equations(instruction_set set = best_instruction_set(), std::size_t step = 256) const {
    auto made = Equations::make(features, outputs);
    REQUIRE(made);
    for (std::size_t t = 0; t < tokens; t += step) made->add(x.data() + t, y.data() + t, stride, std::min(step, tokens - t), set);
    CHECK(made->tokens() == tokens);
    return *std::move(made);
  }

 private:
  [[nodiscard]] matrix values(const std::vector<std::int16_t>& from, std::size_t rows) const {
    matrix all(index(rows), index(tokens));
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t t = 0; t < tokens; ++t) all(index(i), index(t)) = from[i * stride + t];
    }
    return all;
  }
};

/// Small integers.
matrix integer_map(std::size_t outputs, std::size_t features, std::uint32_t seed) {
  std::mt19937 random(seed);
  matrix map(index(outputs), index(features));
  for (Eigen::Index o = 0; o < map.rows(); ++o) {
    for (Eigen::Index f = 0; f < map.cols(); ++f) map(o, f) = static_cast<double>(random() % 7) - 3;
  }
  return map;
}

data_set example(std::size_t features, std::size_t outputs, std::size_t tokens, double noise) {
  data_set data(features, outputs, tokens);
  data.draw_features(11);
  data.make_outputs(integer_map(outputs, features, 12), noise, 13);
  return data;
}

std::vector<instruction_set> available() {
  std::vector<instruction_set> all;
  for (const instruction_set set : {instruction_set::baseline, instruction_set::avx2, instruction_set::avx512})
    if (set <= best_instruction_set()) all.push_back(set);
  return all;
}

double energy(const matrix& m) { return m.squaredNorm(); }

}  // namespace

TEST_CASE("map_fit: a map without noise is recovered") {
  struct sizes {
    std::size_t features, outputs;
  };
  for (const sizes n : {sizes{1, 1}, {5, 3}, {64, 64}, {70, 67}, {130, 2}}) {
    CAPTURE(n.features);
    const data_set data = example(n.features, n.outputs, 700, 0);
    const auto weights = data.equations().solve(0);
    REQUIRE(weights);
    REQUIRE(weights->size() == n.features * n.outputs);
    CHECK((to_matrix(*weights, n.outputs) - integer_map(n.outputs, n.features, 12)).cwiseAbs().maxCoeff() < 1e-5);
  }
}

TEST_CASE("map_fit: what noise leaves is the noise") {
  constexpr double noise = 50;
  const data_set data = example(20, 6, 10000, noise);
  const auto weights = data.equations().solve(1e-6);
  REQUIRE(weights);
  const matrix left = data.all_y() - to_matrix(*weights, 6) * data.all_x();
  for (Eigen::Index o = 0; o < 6; ++o) {
    CHECK(left.row(o).squaredNorm() / 10000 > 0.95 * noise * noise);
    CHECK(left.row(o).squaredNorm() / 10000 < 1.05 * noise * noise);
  }
  CHECK((to_matrix(*weights, 6) - integer_map(6, 20, 12)).cwiseAbs().maxCoeff() < 0.3);
}

TEST_CASE("map_fit: sums do not depend on instruction set, cutting into pieces or blocks") {
  const data_set data = example(75, 9, 333, 20);
  const auto reference = data.equations().solve(1e-3);
  REQUIRE(reference);
  for (const instruction_set set : available()) {
    for (const std::size_t step : {1U, 7U, 100U, 256U, 333U}) CHECK(*data.equations(set, step).solve(1e-3) == *reference);
  }
  CHECK(*data.equations<basic_normal_equations<1>>().solve(1e-3) == *reference);
  CHECK(*data.equations<basic_normal_equations<10>>().solve(1e-3) == *reference);
  CHECK(*data.equations<basic_normal_equations<100>>().solve(1e-3) == *reference);
}

TEST_CASE("map_fit: the largest numbers do not overflow, however many tokens come at once") {
  data_set data(1, 2, 5000);
  for (std::size_t t = 0; t < data.tokens; ++t) {
    data.x_at(0, t) = 127;
    data.y_at(0, t) = -32768;
    data.y_at(1, t) = 32767;
  }
  const auto weights = data.equations(best_instruction_set(), 5000).solve(0);
  REQUIRE(weights);
  CHECK((*weights)[0] == doctest::Approx(-32768.0 / 127));
  CHECK((*weights)[1] == doctest::Approx(32767.0 / 127));
}

TEST_CASE("map_fit: the ridge is relative to the mean diagonal") {
  data_set data(2, 1, 4);  // orthogonal features of energies 4 * 100 and 4 * 900
  for (std::size_t t = 0; t < 4; ++t) {
    data.x_at(0, t) = t % 2 == 0 ? 10 : -10;
    data.x_at(1, t) = t < 2 ? 30 : -30;
    data.y_at(0, t) = static_cast<std::int16_t>(7 * data.x_at(0, t) + 3 * data.x_at(1, t));
  }
  const auto equations = data.equations();
  for (const double ridge : {1e-3, 0.5, 2.0}) {
    const auto weights = equations.solve(ridge);
    REQUIRE(weights);
    CHECK((*weights)[0] == doctest::Approx(7 * 400 / (400 + ridge * 2000)));
    CHECK((*weights)[1] == doctest::Approx(3 * 3600 / (3600 + ridge * 2000)));
  }
  const auto one = equations.solve(0.5, std::vector<std::uint32_t>{1}, {0, 1});
  REQUIRE(one);
  CHECK((*one)[0] == doctest::Approx(3 * 3600 / (3600 + 0.5 * 3600)));
}

TEST_CASE("map_fit: a fit over some features is that of those features alone") {
  const data_set data = example(150, 8, 900, 30);
  const std::vector<std::uint32_t> subset{3, 149, 64, 63, 0, 100, 5};
  data_set alone(subset.size(), 3, data.tokens);
  for (std::size_t t = 0; t < data.tokens; ++t) {
    for (std::size_t i = 0; i < subset.size(); ++i) alone.x_at(i, t) = data.x[subset[i] * data.stride + t];
    for (std::size_t o = 0; o < 3; ++o) alone.y_at(o, t) = data.y[(4 + o) * data.stride + t];
  }
  const auto equations = data.equations();
  const auto weights = equations.solve(1e-3, subset, {4, 7});
  REQUIRE(weights);
  CHECK(*weights == *alone.equations().solve(1e-3));
  const auto thin = equations.low_rank(*weights, 2, subset);
  const auto thin_alone = alone.equations().low_rank(*weights, 2);
  REQUIRE(thin);
  REQUIRE(thin_alone);
  CHECK(thin->inner == thin_alone->inner);
  CHECK(thin->outer == thin_alone->outer);
  CHECK(equations.solve(1e-3, subset, {4, 4})->empty());
  CHECK(equations.solve(1e-3, {}, {0, 8})->empty());
}

TEST_CASE("map_fit: outputs that see only leading features get the map of those, with the ridge of all") {
  const data_set data = example(70, 6, 900, 30);
  const auto equations = data.equations();
  const std::vector<std::size_t> leading{70, 0, 13, 13, 64, 1};
  const double ridge = 0.05;
  const auto weights = equations.solve_leading(ridge, leading);
  REQUIRE(weights);
  REQUIRE(weights->size() == 6 * 70);
  const matrix x = data.all_x();
  const matrix gram = x * x.transpose();
  const matrix cross = data.all_y() * x.transpose();
  for (std::size_t o = 0; o < 6; ++o) {
    const Eigen::Index n = index(leading[o]);
    matrix some = gram.topLeftCorner(n, n);
    some.diagonal().array() += ridge * gram.trace() / 70;
    const Eigen::VectorXd expected = some.ldlt().solve(Eigen::VectorXd(cross.row(index(o)).head(n)));
    for (std::size_t f = 0; f < 70; ++f) {
      const double weight = (*weights)[o * 70 + f];
      if (f < leading[o]) {
        CHECK(weight == doctest::Approx(expected(index(f))).epsilon(1e-6).scale(0.01));
      } else {
        CHECK(weight == 0.0);
      }
    }
  }
  // All features: as `solve` does.
  const std::vector<std::size_t> all(6, 70);
  const auto same = equations.solve_leading(ridge, all);
  const auto direct = equations.solve(ridge);
  REQUIRE((same && direct));
  for (std::size_t i = 0; i < same->size(); ++i) CHECK((*same)[i] == doctest::Approx((*direct)[i]).epsilon(1e-9));

  CHECK(*normal_equations::make(5, 3)->solve_leading(0, std::vector<std::size_t>{5, 2, 0}) == std::vector<double>(15));
  CHECK(example(5, 0, 20, 0).equations().solve_leading(1e-3, {})->empty());
  const auto code_for = [&](double with, const std::vector<std::size_t>& of) { return equations.solve_leading(with, of).error().code; };
  for (const double bad : {-1e-3, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    CHECK(code_for(bad, leading) == error_code::invalid_argument);
  CHECK(code_for(0, {70, 70, 70, 70, 70}) == error_code::out_of_range);
  CHECK(code_for(0, {70, 70, 70, 70, 70, 71}) == error_code::out_of_range);
}

TEST_CASE("map_fit: the best ridge grows with noise and with features for a token, and pays on other tokens") {
  // 40 independent features of root mean square 20; outputs are their map plus noise of a given size.
  const auto draw = [](std::size_t tokens, double noise, std::uint32_t seed) {
    data_set data(40, 3, tokens);
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (std::size_t t = 0; t < tokens; ++t) {
      std::vector<double> sums(3);
      for (std::size_t f = 0; f < 40; ++f) {
        data.x_at(f, t) = static_cast<std::int16_t>(std::lrint(std::clamp(20 * normal(random), -127.0, 127.0)));
        for (std::size_t o = 0; o < 3; ++o) sums[o] += (static_cast<double>((7 * f + 5 * o) % 11) - 5) * data.x_at(f, t);
      }
      for (std::size_t o = 0; o < 3; ++o)
        data.y_at(o, t) = static_cast<std::int16_t>(std::lrint(std::clamp(sums[o] + noise * normal(random), -32000.0, 32000.0)));
    }
    return data;
  };
  const auto energy_of = [](data_set& data) {
    double sum = 0;
    for (std::size_t o = 0; o < 3; ++o)
      for (std::size_t t = 0; t < data.tokens; ++t) sum += static_cast<double>(data.y_at(o, t)) * data.y_at(o, t);
    return sum;
  };
  const auto ridge_for = [&](std::size_t tokens, double noise) {
    data_set data = draw(tokens, noise, 5);
    auto equations = *normal_equations::make(40, 3);
    equations.add(data.x.data(), data.y.data(), data.stride, tokens, best_instruction_set());
    return equations.best_ridge(*equations.solve(1e-6), energy_of(data));
  };
  const double signal = 20 * 20 * 40 * 10;  // variance of the outputs without noise: mean square of the weights is 10
  for (const std::size_t tokens : {std::size_t{100}, std::size_t{400}, std::size_t{4000}}) {
    const double expected = 40.0 / static_cast<double>(tokens) * 500 * 500 / signal;
    CHECK(ridge_for(tokens, 500) == doctest::Approx(expected).epsilon(0.25));
    CHECK(ridge_for(tokens, 1500) > 4 * ridge_for(tokens, 500));
  }
  // Noise alone: everything is to be shrunk away; no noise: nothing.
  CHECK(ridge_for(400, 20000) > 1);
  CHECK(ridge_for(400, 0) < 0.003);

  data_set data = draw(100, 1500, 6);
  data_set others = draw(3000, 1500, 7);
  auto equations = *normal_equations::make(40, 3);
  equations.add(data.x.data(), data.y.data(), data.stride, 100, best_instruction_set());
  const auto plain = equations.solve(1e-6);
  const auto shrunk = equations.solve(equations.best_ridge(*plain, energy_of(data)));
  const auto missed = [&](const std::vector<double>& weights) {
    return (others.all_y() - to_matrix(weights, 3) * others.all_x()).squaredNorm();
  };
  CHECK(missed(*shrunk) < 0.95 * missed(*plain));
}

TEST_CASE("map_fit: the best ridge is larger where data is scarce and noise is loud, and helps where it was not seen") {
  const auto ridge_of = [](const data_set& data) {
    const auto equations = data.equations();
    const auto weights = equations.solve(1e-3);
    REQUIRE(weights);
    return equations.best_ridge(*weights, energy(data.all_y()));
  };
  const double quiet = ridge_of(example(40, 5, 4000, 1));
  const double loud = ridge_of(example(40, 5, 4000, 1000));
  const double scarce = ridge_of(example(40, 5, 100, 1000));
  CHECK(quiet < 40.0 / 4000 * 0.05);
  CHECK(loud > 10 * quiet);
  CHECK(scarce > 10 * loud);
  CHECK(scarce < 40.0 / 100 * 50);
  CHECK(normal_equations::make(5, 3)->best_ridge(std::vector<double>(15), 0) >= 0);

  // Few tokens of loud noise; what the maps miss of the same rule elsewhere.
  const data_set seen = example(40, 5, 100, 600);
  data_set unseen(40, 5, 3000);
  unseen.draw_features(99);
  unseen.make_outputs(integer_map(5, 40, 12), 0, 13);
  const auto equations = seen.equations();
  const auto first = equations.solve(1e-3);
  const auto better = equations.solve(ridge_of(seen));
  REQUIRE((first && better));
  const auto missed = [&](const std::vector<double>& weights) { return energy(unseen.all_y() - to_matrix(weights, 5) * unseen.all_x()); };
  CHECK(missed(*better) < 0.8 * missed(*first));
}

TEST_CASE("map_fit: features that are 0, repeated or dependent do no harm") {
  for (const double ridge : {0.0, 1e-3}) {
    data_set data(6, 2, 500);
    data.draw_features(21);
    for (std::size_t t = 0; t < data.tokens; ++t) {
      data.x_at(1, t) = 0;
      data.x_at(3, t) = data.x_at(2, t);
      data.x_at(4, t) = static_cast<std::int16_t>(std::clamp<int>(data.x_at(4, t), -60, 60));
      data.x_at(0, t) = static_cast<std::int16_t>(std::clamp<int>(data.x_at(0, t), -60, 60));
      data.x_at(5, t) = static_cast<std::int16_t>(data.x_at(0, t) - data.x_at(4, t));
    }
    data.make_outputs(integer_map(2, 6, 22), 0, 23);
    const auto weights = data.equations().solve(ridge);
    REQUIRE(weights);
    const matrix w = to_matrix(*weights, 2);
    const matrix left = data.all_y() - w * data.all_x();
    CHECK(energy(left) <= (ridge == 0.0 ? 1e-10 : 1e-4) * energy(data.all_y()));
    for (Eigen::Index o = 0; o < 2; ++o) {
      CHECK(w(o, 1) == 0.0);
      CHECK(w(o, 2) == doctest::Approx(w(o, 3)).epsilon(1e-4));
    }
    CHECK(w.cwiseAbs().maxCoeff() < 20);
  }
}

TEST_CASE("map_fit: nothing seen, or nothing but zeros, gives zeros") {
  const auto empty = normal_equations::make(5, 3);
  REQUIRE(empty);
  CHECK(*empty->solve(0) == std::vector<double>(15));
  const auto thin = empty->low_rank(std::vector<double>(15, 1.0), 2);
  REQUIRE(thin);
  CHECK(thin->inner == std::vector<double>(10));
  CHECK(thin->outer == std::vector<double>(6));

  data_set zeros(5, 3, 20);
  std::fill(zeros.x.begin(), zeros.x.end(), std::int16_t{0});
  CHECK(*zeros.equations().solve(1e-3) == std::vector<double>(15));

  CHECK(data_set(0, 3, 20).equations().solve(1e-3)->empty());
  CHECK(example(5, 0, 20, 0).equations().solve(1e-3)->empty());
  CHECK(example(5, 0, 20, 0).equations().low_rank({}, 4)->rank == 0);
  CHECK(data_set(0, 3, 20).equations().low_rank({}, 4)->rank == 0);
}

TEST_CASE("map_fit: wrong arguments") {
  CHECK(normal_equations::make(normal_equations::max_size + 1, 1).error().code == error_code::out_of_range);
  CHECK(normal_equations::make(1, normal_equations::max_size + 1).error().code == error_code::out_of_range);

  const auto equations = example(5, 3, 50, 10).equations();
  const std::vector<std::uint32_t> all{0, 1, 2, 3, 4};
  for (const double ridge : {-1e-3, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    CHECK(equations.solve(ridge).error().code == error_code::invalid_argument);
  CHECK(equations.solve(0, std::vector<std::uint32_t>{0, 5}, {0, 3}).error().code == error_code::out_of_range);
  CHECK(equations.solve(0, all, {0, 4}).error().code == error_code::out_of_range);
  CHECK(equations.solve(0, all, {2, 1}).error().code == error_code::out_of_range);

  CHECK(equations.low_rank(std::vector<double>(14), 2).error().code == error_code::shape_mismatch);
  CHECK(equations.low_rank(std::vector<double>(3), 2, {}).error().code == error_code::shape_mismatch);
  CHECK(equations.low_rank(std::vector<double>(4), 2, std::vector<std::uint32_t>{0, 5}).error().code == error_code::out_of_range);
  std::vector<double> weights(15, 1.0);
  weights[7] = std::numeric_limits<double>::quiet_NaN();
  CHECK(equations.low_rank(weights, 2).error().code == error_code::shape_mismatch);

  data_set wild(1, 1, 4);  // squares of 2^30 do not fit
  for (std::size_t t = 0; t < 4; ++t) wild.x_at(0, t) = 32767;
  CHECK(wild.equations().solve(0).error().code == error_code::not_calibrated);
}

TEST_CASE("map_fit: a map of full rank is the map") {
  const data_set data = example(30, 7, 2000, 20);
  const auto equations = data.equations();
  const auto weights = equations.solve(1e-3);
  REQUIRE(weights);
  for (const std::size_t rank : {std::size_t{7}, std::size_t{100}}) {
    const auto thin = equations.low_rank(*weights, rank);
    REQUIRE(thin);
    REQUIRE(thin->rank == 7);
    const matrix product = to_matrix(thin->outer, 7) * to_matrix(thin->inner, 7);
    CHECK((product - to_matrix(*weights, 7)).cwiseAbs().maxCoeff() < 1e-9);
  }
}

TEST_CASE("map_fit: a map of lower rank is the truncated singular value decomposition on whitened features") {
  const data_set data = example(24, 10, 3000, 200);
  const auto equations = data.equations();
  const auto weights = equations.solve(1e-3);
  REQUIRE(weights);
  const matrix w = to_matrix(*weights, 10);
  const matrix x = data.all_x();
  const matrix root = Eigen::LLT<matrix>(x * x.transpose()).matrixL();
  const Eigen::JacobiSVD<matrix> svd(w * root, Eigen::ComputeThinU | Eigen::ComputeThinV);
  double last = std::numeric_limits<double>::infinity();
  for (const Eigen::Index rank : {1, 2, 5, 9}) {
    CAPTURE(rank);
    const auto thin = equations.low_rank(*weights, static_cast<std::size_t>(rank));
    REQUIRE(thin);
    REQUIRE(thin->inner.size() == static_cast<std::size_t>(rank) * 24);
    REQUIRE(thin->outer.size() == 10 * static_cast<std::size_t>(rank));
    const matrix product = to_matrix(thin->outer, 10) * to_matrix(thin->inner, static_cast<std::size_t>(rank));
    const matrix u = svd.matrixU().leftCols(rank);
    CHECK((product - u * u.transpose() * w).cwiseAbs().maxCoeff() < 1e-8);
    const double lost = energy((w - product) * x);
    CHECK(lost == doctest::Approx(svd.singularValues().tail(10 - rank).squaredNorm()).epsilon(1e-6));
    CHECK(lost < last);
    last = lost;
  }
}

TEST_CASE("map_fit: the inner products of a map of lower rank have a root mean square of 32") {
  const data_set data = example(24, 10, 3000, 200);
  const auto equations = data.equations();
  const auto weights = equations.solve(1e-3);
  REQUIRE(weights);
  const auto thin = equations.low_rank(*weights, 4);
  REQUIRE(thin);
  const matrix inner = to_matrix(thin->inner, 4) * data.all_x();
  for (Eigen::Index r = 0; r < 4; ++r) CHECK(std::sqrt(inner.row(r).squaredNorm() / 3000) == doctest::Approx(32));
  // They are those of independent directions, the strongest first.
  const matrix products = inner * inner.transpose() / 3000;
  CHECK((products - matrix(products.diagonal().asDiagonal())).cwiseAbs().maxCoeff() < 1e-6);
  const matrix outer = to_matrix(thin->outer, 10);
  for (Eigen::Index r = 1; r < 4; ++r) CHECK(outer.col(r).norm() < outer.col(r - 1).norm());
}

TEST_CASE("map_fit: beyond the rank of the map itself there are zeros") {
  const data_set data = example(12, 6, 500, 0);
  const matrix map = integer_map(6, 2, 31) * integer_map(2, 12, 32);
  const std::vector<double> weights(map.data(), map.data() + map.size());
  const auto thin = data.equations().low_rank(weights, 4);
  REQUIRE(thin);
  REQUIRE(thin->rank == 4);
  const matrix inner = to_matrix(thin->inner, 4);
  const matrix outer = to_matrix(thin->outer, 6);
  CHECK((outer * inner - map).cwiseAbs().maxCoeff() < 1e-9);
  CHECK(inner.topRows(2).rowwise().norm().minCoeff() > 0);
  CHECK(inner.bottomRows(2).isZero(0));
  CHECK(outer.rightCols(2).isZero(0));
}

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <Eigen/Eigenvalues>

#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/numeric/integer_gemm.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// A linear map as the product of two thin ones: outer * inner.
struct low_rank_map {
  std::size_t rank = 0;
  std::vector<double> inner;  ///< [rank][feature]
  std::vector<double> outer;  ///< [output][rank]
};

/// Fits linear maps from integer features to integer outputs by ridge regression. It keeps the sums X^T X and X^T Y over all tokens and no
/// data; in memory some 4 features^2 + 8 features outputs bytes. The sums are exact up to 2^31 tokens, so neither the order of the tokens
/// nor the instruction set changes them. For calibration only: the solutions are floating point.
///
/// Least squares with a weight a token: multiply the token's features and outputs by the root of its weight before they are rounded.
///
/// `Side`: side of the blocks that the sums are made in; it changes no result. (A template also keeps the solvers out of programs that do
/// not fit anything; they take seconds to compile.)
template <std::size_t Side>
class basic_normal_equations {
 public:
  static_assert(Side > 0);

  /// Most features and most outputs.
  static constexpr std::size_t max_size = std::size_t{1} << 20;

  /// Errors: out_of_range (more than `max_size`), out_of_memory.
  [[nodiscard]] static result<basic_normal_equations> make(std::size_t features, std::size_t outputs) noexcept {
    if (features > max_size || outputs > max_size) return error{error_code::out_of_range, "too many features or outputs of a map"};
    try {
      return basic_normal_equations(features, outputs);
    } catch (...) {
      return error{error_code::out_of_memory, "normal equations"};
    }
  }

  [[nodiscard]] std::size_t features() const noexcept { return features_; }
  [[nodiscard]] std::size_t outputs() const noexcept { return outputs_; }
  [[nodiscard]] std::uint64_t tokens() const noexcept { return tokens_; }

  /// Takes up `tokens` tokens. `x`: [feature][stride], in [-127, 127]; `y`: [output][stride], any. What lies beyond `tokens` in a row is
  /// not read. Features out of their range are no error here, but make the sums and so the maps wrong.
  void add(const std::int16_t* x, const std::int16_t* y, std::size_t stride, std::size_t tokens, instruction_set set) noexcept {
    for (std::size_t first = 0; first < tokens; first += tokens_at_once) {
      const std::size_t count = std::min(tokens_at_once, tokens - first);
      double* gram = gram_.data();
      for (std::size_t i = 0; i < features_; i += Side) {
        const matrix rows{x + i * stride + first, stride, std::min(Side, features_ - i)};
        for (std::size_t j = i; j < features_; j += Side, gram += Side * Side) {
          add_products(rows, {x + j * stride + first, stride, std::min(Side, features_ - j)}, count, gram, Side, set);
        }
      }
      for (std::size_t i = 0; i < outputs_; i += Side) {
        const matrix rows{y + i * stride + first, stride, std::min(Side, outputs_ - i)};
        for (std::size_t j = 0; j < features_; j += Side) {
          add_products(rows, {x + j * stride + first, stride, std::min(Side, features_ - j)}, count, &cross_[i * features_ + j], features_,
                       set);
        }
      }
    }
    tokens_ += tokens;
  }

  /// The map W, [output][feature], that minimises the squares of Y - X W^T plus ridge * (mean diagonal of X^T X) * the squares of W.
  /// `ridge` is relative and at least 1e-9, whatever is given, so that repeated and dependent features do no harm. Features that were
  /// always 0 get the weight 0, and so do all if no token was seen. Errors: invalid_argument (a ridge that is negative or not finite),
  /// not_calibrated (the sums are none of features in their range), out_of_memory.
  [[nodiscard]] result<std::vector<double>> solve(double ridge) const noexcept {
    try {
      return solve(ridge, all_features(), {0, outputs_});
    } catch (...) {
      return error{error_code::out_of_memory, "fit of a map"};
    }
  }

  /// The same for some features, given by their numbers, and a range of outputs: [output - outputs.begin][index in subset]. The mean
  /// diagonal is that of the subset. Errors also: out_of_range (no such feature or output).
  [[nodiscard]] result<std::vector<double>> solve(double ridge, std::span<const std::uint32_t> subset, index_range outputs) const noexcept {
    if (!(ridge >= 0) || !std::isfinite(ridge)) return error{error_code::invalid_argument, "the ridge of a fit"};
    if (!covers(subset) || outputs.begin > outputs.end || outputs.end > outputs_)
      return error{error_code::out_of_range, "features or outputs of a fit"};
    try {
      const std::size_t n = subset.size();
      const auto begin = static_cast<std::size_t>(outputs.begin);
      const auto count = static_cast<std::size_t>(outputs.size());
      std::vector<double> weights(count * n);
      Eigen::MatrixXd gram = gram_of(subset);
      const double diagonal = gram.trace() / static_cast<double>(std::max<std::size_t>(n, 1));
      if (weights.empty() || diagonal == 0) return weights;
      gram.diagonal().array() += std::max(ridge, least_ridge) * diagonal;
      for (std::size_t o = 0; o < count; ++o) {
        for (std::size_t i = 0; i < n; ++i) weights[o * n + i] = cross_[(begin + o) * features_ + subset[i]];
      }
      const Eigen::LLT<Eigen::Ref<Eigen::MatrixXd>> cholesky(gram);
      if (cholesky.info() != Eigen::Success) return error{error_code::not_calibrated, "the normal equations of a map have no solution"};
      Eigen::Map<Eigen::MatrixXd> solution(weights.data(), index(n), index(count));
      cholesky.solveInPlace(solution);
      return weights;
    } catch (...) {
      return error{error_code::out_of_memory, "fit of a map"};
    }
  }

  /// Maps [output][feature] of which output o sees only the features before `leading[o]`; the other weights are 0. One factorisation serves
  /// all: that of the leading features is a part of it. Ridge and errors as for `solve`; out_of_range (sizes).
  [[nodiscard]] result<std::vector<double>> solve_leading(double ridge, std::span<const std::size_t> leading) const noexcept {
    if (!(ridge >= 0) || !std::isfinite(ridge)) return error{error_code::invalid_argument, "the ridge of a fit"};
    if (leading.size() != outputs_ || std::any_of(leading.begin(), leading.end(), [&](std::size_t n) { return n > features_; }))
      return error{error_code::out_of_range, "features or outputs of a fit"};
    try {
      std::vector<double> weights(outputs_ * features_);
      Eigen::MatrixXd gram = gram_of(all_features());
      const double diagonal = gram.trace() / static_cast<double>(std::max<std::size_t>(features_, 1));
      if (weights.empty() || diagonal == 0) return weights;
      gram.diagonal().array() += std::max(ridge, least_ridge) * diagonal;
      const Eigen::LLT<Eigen::Ref<Eigen::MatrixXd>> cholesky(gram);
      if (cholesky.info() != Eigen::Success) return error{error_code::not_calibrated, "the normal equations of a map have no solution"};
      for (std::size_t o = 0; o < outputs_;) {
        std::size_t end = o;  // outputs that see the same features
        while (end < outputs_ && leading[end] == leading[o]) ++end;
        const std::size_t n = leading[o];
        Eigen::MatrixXd solution(index(n), index(end - o));
        for (std::size_t k = o; k < end; ++k) {
          for (std::size_t i = 0; i < n; ++i) solution(index(i), index(k - o)) = cross_[k * features_ + i];
        }
        const auto lower = gram.topLeftCorner(index(n), index(n)).template triangularView<Eigen::Lower>();
        lower.solveInPlace(solution);
        lower.transpose().solveInPlace(solution);
        for (std::size_t k = o; k < end; ++k) {
          for (std::size_t i = 0; i < n; ++i) weights[k * features_ + i] = solution(index(i), index(k - o));
        }
        o = end;
      }
      return weights;
    } catch (...) {
      return error{error_code::out_of_memory, "fit of a map"};
    }
  }

  /// What a fit with few features for the tokens seen needs: the ridge whose shrinkage costs least in the mean, features / tokens * noise /
  /// signal, both estimated from a solution `weights`, [output][feature], and `energy`, the sum of the squares of all outputs. Relative
  /// like that of `solve`.
  [[nodiscard]] double best_ridge(std::span<const double> weights, double energy) const noexcept {
    double explained = 0;
    for (std::size_t i = 0; i < std::min(weights.size(), cross_.size()); ++i) explained += weights[i] * cross_[i];
    const double per_token = static_cast<double>(features_) / static_cast<double>(std::max<std::uint64_t>(tokens_, 1));
    const double unexplained = energy > 0 ? std::clamp(1 - explained / energy, 0.0, 1.0) / std::max(1 - per_token, 0.1) : 1.0;
    const double signal = std::clamp(1 - unexplained, 0.02, 0.98);
    return per_token * (1 - signal) / signal;
  }

  /// The best map of a lower rank: reduced-rank regression. `weights` is a solution W, [output][feature]. With Q the eigenvectors of
  /// W X^T X W^T that belong to the `rank` largest eigenvalues (to all, if it has fewer), inner = Q^T W and outer = Q minimise the squares
  /// of X (W - outer inner)^T. Each row of `inner` is scaled to products of root mean square 32 over the tokens seen, and the column of
  /// `outer` inversely; both are 0 where the rank of W itself ends. Every output counts by its square, so hand over outputs of like size.
  /// Errors: shape_mismatch (`weights` are not of whole outputs or not finite), out_of_memory.
  [[nodiscard]] result<low_rank_map> low_rank(std::span<const double> weights, std::size_t rank) const noexcept {
    try {
      return low_rank(weights, rank, all_features());
    } catch (...) {
      return error{error_code::out_of_memory, "map of low rank"};
    }
  }

  /// The same for a solution over some features. Errors also: out_of_range (no such feature).
  [[nodiscard]] result<low_rank_map> low_rank(std::span<const double> weights, std::size_t rank,
                                              std::span<const std::uint32_t> subset) const noexcept {
    const std::size_t n = subset.size();
    if (!covers(subset)) return error{error_code::out_of_range, "features of a map of low rank"};
    if (n == 0 ? !weights.empty() : weights.size() % n != 0) return error{error_code::shape_mismatch, "weights of a map of low rank"};
    if (!std::all_of(weights.begin(), weights.end(), [](double w) { return std::isfinite(w); }))
      return error{error_code::shape_mismatch, "weights of a map of low rank are not finite"};
    try {
      const std::size_t outputs = n == 0 ? 0 : weights.size() / n;
      low_rank_map map;
      map.rank = std::min(rank, outputs);
      map.inner.resize(map.rank * n);
      map.outer.resize(outputs * map.rank);
      if (map.rank == 0) return map;
      const Eigen::Map<const Eigen::MatrixXd> w(weights.data(), index(n), index(outputs));  // W^T
      const Eigen::MatrixXd gram = gram_of(subset);
      const Eigen::MatrixXd energy = w.transpose() * (gram.selfadjointView<Eigen::Lower>() * w);
      const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(energy);
      const double largest = solver.eigenvalues()(index(outputs) - 1);
      for (std::size_t r = 0; r < map.rank; ++r) {
        const double eigenvalue = solver.eigenvalues()(index(outputs - 1 - r));
        if (!(eigenvalue > largest * rank_tolerance)) break;
        const auto q = solver.eigenvectors().col(index(outputs - 1 - r));
        const double scale = inner_size * std::sqrt(static_cast<double>(tokens_) / eigenvalue);
        Eigen::Map<Eigen::VectorXd>(&map.inner[r * n], index(n)) = w * q * scale;
        for (std::size_t o = 0; o < outputs; ++o) map.outer[o * map.rank + r] = q(index(o)) / scale;
      }
      return map;
    } catch (...) {
      return error{error_code::out_of_memory, "map of low rank"};
    }
  }

 private:
  static constexpr std::size_t tokens_at_once = 256;  // 256 * 127 * 2^15 < 2^31
  static constexpr double least_ridge = 1e-9;         // far above the rounding of the factorisation
  static constexpr double rank_tolerance = 1e-12;
  static constexpr double inner_size = 32;

  struct matrix {
    const std::int16_t* data;
    std::size_t stride;
    std::size_t rows;
  };

  basic_normal_equations(std::size_t features, std::size_t outputs) : features_(features), outputs_(outputs), cross_(features * outputs) {
    const std::size_t blocks = (features + Side - 1) / Side;
    gram_.resize(blocks * (blocks + 1) / 2 * Side * Side);
  }

  /// out[i * out_stride + j] += sum over tokens of a[i] * b[j]
  static void add_products(const matrix& a, const matrix& b, std::size_t tokens, double* out, std::size_t out_stride,
                           instruction_set set) noexcept {
    std::array<std::int32_t, Side * Side> sums{};
    run_on<integer_gemm>(set, a.data, a.stride, a.rows, b.data, b.stride, b.rows, tokens, sums.data(), Side);
    for (std::size_t i = 0; i < a.rows; ++i) {
      for (std::size_t j = 0; j < b.rows; ++j) out[i * out_stride + j] += sums[i * Side + j];
    }
  }

  [[nodiscard]] static Eigen::Index index(std::size_t i) noexcept { return static_cast<Eigen::Index>(i); }
  [[nodiscard]] std::vector<std::uint32_t> all_features() const {
    std::vector<std::uint32_t> all(features_);
    std::iota(all.begin(), all.end(), 0U);
    return all;
  }
  [[nodiscard]] bool covers(std::span<const std::uint32_t> subset) const noexcept {
    return std::all_of(subset.begin(), subset.end(), [&](std::uint32_t feature) { return feature < features_; });
  }

  /// X^T X of some features; only the lower triangle is filled.
  [[nodiscard]] Eigen::MatrixXd gram_of(std::span<const std::uint32_t> subset) const {
    const std::size_t blocks = (features_ + Side - 1) / Side;
    Eigen::MatrixXd gram(index(subset.size()), index(subset.size()));
    for (std::size_t j = 0; j < subset.size(); ++j) {
      for (std::size_t i = j; i < subset.size(); ++i) {
        const std::size_t first = std::min(subset[i], subset[j]);
        const std::size_t second = std::max(subset[i], subset[j]);
        const std::size_t row = first / Side;
        const std::size_t block = row * blocks - row * (row + 1) / 2 + second / Side;
        gram(index(i), index(j)) = gram_[(block * Side + first % Side) * Side + second % Side];
      }
    }
    return gram;
  }

  std::size_t features_;
  std::size_t outputs_;
  std::uint64_t tokens_ = 0;
  std::vector<double> gram_;   // blocks of the upper triangle, row by row, each [Side][Side]
  std::vector<double> cross_;  // [output][feature]
};

using normal_equations = basic_normal_equations<64>;

}  // namespace kvexact

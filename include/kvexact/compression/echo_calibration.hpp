// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <Eigen/Cholesky>
#include <Eigen/Core>

#include <kvexact/compression/echo_kv.hpp>
#include <kvexact/compression/rows.hpp>
#include <kvexact/compression/unrotated_keys.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact {

/// What a fit of EchoKV's maps keeps of each layer but the first.
struct echo_fit {
  std::uint32_t kept_keys = 0;    ///< channels of K, over all heads; at most all
  std::uint32_t kept_values = 0;  ///< of V
  double ridge = 1e-4;            ///< relative to the mean variance of the features, at least 1e-9
};

/// Fits the maps of one group of layers by ridge regression, from the first and second moments over all tokens seen; it keeps no data.
/// Floating point: two machines may fit maps that differ in their last bits, which then belong to the maps.
template <class Scalar>
class echo_calibration {
 public:
  /// `layers`: the group's shapes, at least two; `keys`: how the cached keys are rotated. Errors: invalid_argument (fewer layers, no
  /// values), shape_mismatch (a rotation wider than the keys), out_of_range (too many channels), out_of_memory.
  [[nodiscard]] static result<echo_calibration> make(std::span<const layer_shape> layers, const rotary& keys) noexcept {
    if (layers.size() < 2) return error{error_code::invalid_argument, "a group has at least two layers"};
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto where = static_cast<std::int64_t>(l);
      if (const auto fits = cache_shape::uniform(1, layers[l]); !fits) return fits.error().at_layer(where);
      if (layers[l].value_dim == 0) return error{error_code::invalid_argument, "EchoKV needs keys and values", where};
      if (keys.dim() > layers[l].key_dim) return error{error_code::shape_mismatch, "the rotary embedding is wider than the keys", where};
    }
    try {
      return echo_calibration(layers, keys);
    } catch (...) {
      return error{error_code::out_of_memory, "moments of a group of layers"};
    }
  }

  /// K and V of the same tokens in all layers of the group, the first of them at `position`. `weights` [tokens], not negative, says how
  /// much each token's errors count; all alike if empty. Errors: shape_mismatch (number of layers or weights), invalid_argument (null data,
  /// a value or a weight that is not finite), out_of_memory; then nothing has changed.
  result<void> add(std::span<const layer_tensors<const Scalar>> layers, std::uint64_t position, std::uint64_t tokens,
                   std::span<const float> weights = {}) noexcept {
    if (layers.size() != shapes_.size()) return error{error_code::shape_mismatch, "one entry per layer is needed"};
    if (!weights.empty() && weights.size() != tokens) return error{error_code::shape_mismatch, "one weight per token is needed"};
    if (!std::all_of(weights.begin(), weights.end(), [](float each) { return each >= 0 && std::isfinite(each); }))
      return error{error_code::invalid_argument, "a weight is negative or not finite"};
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const auto usable = detail::expect_rows(shapes_[l], layers[l], position, tokens);
      if (!usable) return usable.error().at_layer(static_cast<std::int64_t>(l));
    }
    try {
      std::vector<moments> sums = moments_;
      for (std::uint64_t begin = 0; begin < tokens; begin += tokens_at_once)
        add_block(layers, position, begin, std::min<std::uint64_t>(tokens_at_once, tokens - begin), weights, sums);
      moments_.swap(sums);
    } catch (...) {
      return error{error_code::out_of_memory, "moments of a group of layers"};
    }
    return {};
  }

  /// Which channels are kept: one after another, the one that takes most of the variance that the first layer and those before leave.
  /// Errors: invalid_argument (more channels than there are, a ridge that is negative or not finite), not_calibrated (no tokens),
  /// out_of_memory.
  [[nodiscard]] result<std::shared_ptr<const echo_group>> fit(const echo_fit& chosen) const noexcept {
    if (!(chosen.ridge >= 0) || !std::isfinite(chosen.ridge)) return error{error_code::invalid_argument, "the ridge of a fit"};
    try {
      auto made = std::make_shared<echo_group>();
      made->rotation = rotation_;
      for (std::size_t l = 1; l < shapes_.size(); ++l) {
        std::array<echo_map, 2> maps;
        for (const cache_part part : cache_parts) {
          const std::uint32_t kept = part == cache_part::key ? chosen.kept_keys : chosen.kept_values;
          if (kept > shapes_[l].channels(part))
            return error{error_code::invalid_argument, "more channels to keep than there are", static_cast<std::int64_t>(l)};
          const moments& of = moments_[2 * (l - 1) + static_cast<std::size_t>(part)];
          if (!(of.weight > 0)) return error{error_code::not_calibrated, "no tokens to fit maps to"};
          maps[static_cast<std::size_t>(part)] = fit(of, shapes_[0].channels(part), kept, std::max(chosen.ridge, least_ridge));
        }
        made->followers.push_back(std::move(maps));
      }
      return std::shared_ptr<const echo_group>(std::move(made));
    } catch (...) {
      return error{error_code::out_of_memory, "fit of a group of layers"};
    }
  }

 private:
  static constexpr std::uint64_t tokens_at_once = 256;
  static constexpr double least_ridge = 1e-9;

  /// Of [first layer's channels, own channels].
  struct moments {
    double weight = 0;
    Eigen::VectorXd sum;
    Eigen::MatrixXd products;  // lower triangle
  };

  echo_calibration(std::span<const layer_shape> layers, const rotary& keys) : shapes_(layers.begin(), layers.end()), rotation_(keys) {
    for (std::size_t l = 1; l < layers.size(); ++l) {
      for (const cache_part part : cache_parts) {
        const auto size = static_cast<Eigen::Index>(layers[0].channels(part) + layers[l].channels(part));
        moments_.push_back({0, Eigen::VectorXd::Zero(size), Eigen::MatrixXd::Zero(size, size)});
      }
    }
  }

  void add_block(std::span<const layer_tensors<const Scalar>> layers, std::uint64_t position, std::uint64_t begin, std::uint64_t tokens,
                 std::span<const float> weights, std::vector<moments>& sums) const {
    const auto count = static_cast<Eigen::Index>(tokens);
    Eigen::VectorXd root = Eigen::VectorXd::Ones(count);
    for (Eigen::Index t = 0; t < count && !weights.empty(); ++t)
      root(t) = std::sqrt(static_cast<double>(weights[static_cast<std::size_t>(begin) + static_cast<std::size_t>(t)]));
    for (const cache_part part : cache_parts) {
      const Eigen::MatrixXd first = block_of(0, part, layers[0], position, begin, root);
      for (std::size_t l = 1; l < shapes_.size(); ++l) {
        const Eigen::MatrixXd own = block_of(l, part, layers[l], position, begin, root);
        Eigen::MatrixXd both(first.rows() + own.rows(), count);
        both << first, own;
        moments& to = sums[2 * (l - 1) + static_cast<std::size_t>(part)];
        to.weight += root.squaredNorm();
        to.sum += both * root;
        to.products.template selfadjointView<Eigen::Lower>().rankUpdate(both);
      }
    }
  }

  /// [channels, tokens], each token times the root of its weight; keys before the rotary embedding.
  [[nodiscard]] Eigen::MatrixXd block_of(std::size_t layer, cache_part part, const layer_tensors<const Scalar>& from, std::uint64_t position,
                                         std::uint64_t begin, const Eigen::VectorXd& root) const {
    const layer_shape& shape = shapes_[layer];
    detail::unrotated_keys turn(rotation_);
    std::vector<float> row(shape.dim(part));
    Eigen::MatrixXd block(shape.channels(part), root.size());
    for (Eigen::Index t = 0; t < root.size(); ++t) {
      const std::uint64_t token = begin + static_cast<std::uint64_t>(t);
      if (part == cache_part::key) turn.at(position + token);
      for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
        const Scalar* const source = detail::row_of(from.part(part), token, h);
        for (std::size_t c = 0; c < row.size(); ++c) row[c] = source[c].to_float();
        if (part == cache_part::key) turn.backward(row);
        for (std::size_t c = 0; c < row.size(); ++c) block(static_cast<Eigen::Index>(h * row.size() + c), t) = static_cast<double>(row[c]) * root(t);
      }
    }
    return block;
  }

  [[nodiscard]] static echo_map fit(const moments& of, std::uint32_t first, std::uint32_t kept, double ridge) {
    const Eigen::Index all = of.sum.size(), features = static_cast<Eigen::Index>(first), own = all - features;
    const Eigen::VectorXd mean = of.sum / of.weight;
    Eigen::MatrixXd covariance = of.products.template selfadjointView<Eigen::Lower>();
    covariance = covariance / of.weight - mean * mean.transpose();

    echo_map map;
    map.kept = best_channels(covariance, features, kept, ridge);
    std::vector<Eigen::Index> in(first), out;
    std::iota(in.begin(), in.end(), Eigen::Index{0});
    for (Eigen::Index c = 0; c < own; ++c) {
      const bool is_kept = std::binary_search(map.kept.begin(), map.kept.end(), static_cast<std::uint32_t>(c));
      (is_kept ? in : out).push_back(features + c);
    }
    if (out.empty()) return map;  // solvers do not take empty matrices
    Eigen::MatrixXd gram = covariance(in, in);
    regularise(gram, ridge);
    const Eigen::MatrixXd weights = gram.llt().solve(Eigen::MatrixXd(covariance(in, out))).transpose();
    const Eigen::VectorXd bias = mean(out) - weights * mean(in);
    for (Eigen::Index o = 0; o < weights.rows(); ++o) {
      for (Eigen::Index i = 0; i < weights.cols(); ++i) map.weights.push_back(static_cast<float>(weights(o, i)));
      map.bias.push_back(static_cast<float>(bias(o)));
    }
    return map;
  }

  static void regularise(Eigen::MatrixXd& gram, double ridge) {
    const double mean = gram.trace() / static_cast<double>(std::max<Eigen::Index>(gram.rows(), 1));
    gram.diagonal().array() += mean > 0 ? ridge * mean : 1.0;
  }

  /// Greedy choice of columns: a pivoted Cholesky factorisation of what the first layer leaves of the covariance, whose pivot is the channel
  /// that explains most of the sum of all remaining variances.
  [[nodiscard]] static std::vector<std::uint32_t> best_channels(const Eigen::MatrixXd& covariance, Eigen::Index features, std::uint32_t kept, double ridge) {
    const Eigen::Index own = covariance.rows() - features;
    Eigen::MatrixXd gram = covariance.topLeftCorner(features, features);
    regularise(gram, ridge);
    const Eigen::MatrixXd cross = covariance.topRightCorner(features, own);
    Eigen::MatrixXd left = covariance.bottomRightCorner(own, own) - cross.transpose() * gram.llt().solve(cross);
    std::vector<std::uint32_t> chosen;
    std::vector<char> is_chosen(static_cast<std::size_t>(own));
    while (chosen.size() < kept) {
      Eigen::Index best = -1;
      double most = -1;
      for (Eigen::Index c = 0; c < own; ++c) {
        if (is_chosen[static_cast<std::size_t>(c)] != 0) continue;
        const double explained = left(c, c) > 0 ? left.col(c).squaredNorm() / left(c, c) : 0;
        if (explained > most) {
          most = explained;
          best = c;
        }
      }
      chosen.push_back(static_cast<std::uint32_t>(best));
      is_chosen[static_cast<std::size_t>(best)] = 1;
      const Eigen::VectorXd column = left.col(best);
      if (column(best) > 0) left -= column * (column.transpose() / column(best));
      left.row(best).setZero();
      left.col(best).setZero();
    }
    std::sort(chosen.begin(), chosen.end());
    return chosen;
  }

  std::vector<layer_shape> shapes_;
  rotary rotation_;
  std::vector<moments> moments_;  // K and V of each layer but the first
};

}  // namespace kvexact

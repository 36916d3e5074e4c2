// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <Eigen/Core>
#include <Eigen/Eigenvalues>

#include <kvexact/compression/buffer.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/dropper.hpp>
#include <kvexact/compression/eviction_rule.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

struct entropy_summary_options {
  dropper_options eviction = {};  ///< the queries of `window` are the reference queries; at least 1 and at most `interval`
  float entropy_weight = 0.5F;    ///< what a token loses of its worth where its attention is spread evenly, in [0, 1]
  std::uint32_t rank = 4;         ///< of the map from a query to what the summary puts out; no more than key_dim or value_dim is used
  float ridge = 0.1F;             ///< of the regression, times the mean diagonal of the queries' Gram matrix, at least 0
};

namespace detail {

/// Entropy of a_1, a_2, ... (not negative) over their sum, in nats: from the sum of a and the sum of a log a. 0 where there is nothing.
[[nodiscard]] inline double entropy_of(double sum, double sum_of_logs) noexcept {
  return sum > 0 ? std::max(0.0, std::log(sum) - sum_of_logs / sum) : 0;
}

/// What attention over some tokens gave at some queries: `queries` [n, key_dim], `log_mass` [n], `outputs` [n, value_dim].
struct attention_samples {
  Eigen::MatrixXd queries;
  Eigen::VectorXd log_mass;
  Eigen::MatrixXd outputs;
};

/// Attention over tokens that are gone, as a map of the query q: log-mass c.q + c0, no further than `margin` outside of what was fitted,
/// and output B q + b, B of low rank.
class fitted_attention {
 public:
  /// Bounds the share of the bin at queries unlike all of the fit, and costs nothing: SmolLM2 after 512 tokens has a KL of 0.126, 0.123 and
  /// 0.124 nats with a margin of 0, of 1 and without bounds.
  static constexpr float margin = 1;

  /// Ridge regression of both, then the best B of the rank at the same queries. Throws std::bad_alloc.
  [[nodiscard]] static fitted_attention fit(std::uint64_t boundary, const attention_samples& at, std::uint32_t rank, double ridge) {
    const Eigen::RowVectorXd centre = at.queries.colwise().mean(), mean_output = at.outputs.colwise().mean();
    const double mean_mass = at.log_mass.mean();
    const Eigen::MatrixXd x = at.queries.rowwise() - centre;
    const Eigen::MatrixXd inverse = ridge_inverse(x, ridge);  // [key_dim, n]
    const Eigen::VectorXd mass = inverse * (at.log_mass.array() - mean_mass).matrix();
    const Eigen::MatrixXd output = inverse * (at.outputs.rowwise() - mean_output);  // B^T
    const Eigen::MatrixXd fitted = x * output;
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> spread(fitted.transpose() * fitted);
    const auto kept = std::min<Eigen::Index>({static_cast<Eigen::Index>(rank), output.rows(), output.cols()});
    const Eigen::MatrixXd left = spread.eigenvectors().rightCols(kept);
    const Eigen::MatrixXd right = output * left;

    fitted_attention made;
    made.boundary_ = boundary;
    made.mass_ = floats(mass);
    made.mass_offset_ = narrow(mean_mass - centre * mass);
    made.least_ = narrow(at.log_mass.minCoeff() - margin);
    made.most_ = narrow(at.log_mass.maxCoeff() + margin);
    made.left_ = floats(left);
    made.right_ = floats(right);
    made.offset_ = floats(mean_output.transpose() - left * (centre * right).transpose());
    return made;
  }

  /// The length of the cache after which it counts.
  [[nodiscard]] std::uint64_t boundary() const noexcept { return boundary_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_of(mass_) + bytes_of(offset_) + bytes_of(left_) + bytes_of(right_); }

  /// `query` [key_dim], `out` [value_dim]; returns the log-mass.
  float evaluate(std::span<const float> query, std::span<float> out) const noexcept {
    std::ranges::copy(offset_, out.begin());
    for (std::size_t r = 0; r * query.size() < right_.size(); ++r) {
      const float part = dot(query, std::span(right_).subspan(r * query.size()));
      for (std::size_t c = 0; c < out.size(); ++c) out[c] += part * left_[r * out.size() + c];
    }
    return std::clamp(dot(query, mass_) + mass_offset_, least_, most_);
  }

 private:
  /// (X^T X + l I)^-1 X^T = X^T (X X^T + l I)^-1, by whichever Gram matrix is smaller; directions that the queries do not have count as 0.
  [[nodiscard]] static Eigen::MatrixXd ridge_inverse(const Eigen::MatrixXd& x, double ridge) {
    const bool dual = x.rows() < x.cols();
    const Eigen::MatrixXd gram = dual ? Eigen::MatrixXd(x * x.transpose()) : Eigen::MatrixXd(x.transpose() * x);
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(gram);
    const double added = ridge * x.squaredNorm() / static_cast<double>(x.cols());
    const double least = 1e-12 * solver.eigenvalues().maxCoeff();
    const Eigen::VectorXd inverse = solver.eigenvalues().unaryExpr([&](double each) { return each > least ? 1 / (each + added) : 0.0; });
    const Eigen::MatrixXd solution = solver.eigenvectors() * inverse.asDiagonal() * solver.eigenvectors().transpose();
    return dual ? Eigen::MatrixXd(x.transpose() * solution) : Eigen::MatrixXd(solution * x.transpose());
  }
  [[nodiscard]] static std::vector<float> floats(const Eigen::MatrixXd& from) {
    std::vector<float> to(static_cast<std::size_t>(from.size()));
    std::transform(from.data(), from.data() + from.size(), to.begin(), narrow);
    return to;
  }
  [[nodiscard]] static float narrow(double number) noexcept {
    constexpr double most = std::numeric_limits<float>::max();
    return static_cast<float>(std::clamp(number, -most, most));
  }
  [[nodiscard]] static float dot(std::span<const float> query, std::span<const float> with) noexcept {
    double sum = 0;
    for (std::size_t c = 0; c < query.size(); ++c) sum += double{query[c]} * double{with[c]};
    return static_cast<float>(sum);
  }

  std::uint64_t boundary_ = 0;
  float mass_offset_ = 0, least_ = 0, most_ = 0;
  std::vector<float> mass_;    // c [key_dim]
  std::vector<float> offset_;  // b [value_dim]
  std::vector<float> left_;    // [rank, value_dim]; B = left^T right
  std::vector<float> right_;   // [rank, key_dim]
};

}  // namespace detail

/// The entropy rule of SRC: a token is worth the attention that the reference queries pay to it, the less the more evenly they do:
/// A (1 - entropy_weight H / log n), for the sum A and the entropy H of its n weights (all queries of the window, all query heads of the
/// KV head).
class attention_focus {
 public:
  using options = entropy_summary_options;
  struct summary {
    double weights = 0;  ///< n
  };
  struct memory {};
  static constexpr bool reads_values = false;

  /// Errors: invalid_argument.
  [[nodiscard]] static result<attention_focus> make(const layer_shape&, const options& chosen) noexcept {
    if (!(chosen.entropy_weight >= 0 && chosen.entropy_weight <= 1))
      return error{error_code::invalid_argument, "the entropy weight of SRC is in [0, 1]"};
    if (const auto good = detail::check_window(chosen.eviction); !good) return good.error();
    return attention_focus(chosen);
  }

  [[nodiscard]] const dropper_options& eviction() const noexcept { return options_.eviction; }
  [[nodiscard]] std::uint64_t queries() const noexcept { return options_.eviction.window; }
  [[nodiscard]] std::uint32_t lanes() const noexcept { return 2; }
  [[nodiscard]] memory take(workspace&, std::size_t) const noexcept { return {}; }

  /// The sums of a and of a log a.
  summary reduce(const scored_query&, std::span<const float> weights, std::span<bf16> row, std::span<std::uint32_t>) const noexcept {
    const std::size_t entries = row.size() / 2, heads = options_.eviction.query_heads;
    for (std::size_t i = 0; i < entries; ++i) {
      float sum = 0, sum_of_logs = 0;
      for (std::size_t h = 0; h < heads; ++h) {
        const float weight = weights[h * entries + i];
        sum += weight;
        if (weight > 0) sum_of_logs += weight * std::log(weight);
      }
      row[2 * i] = bf16::from_float(sum);
      row[2 * i + 1] = bf16::from_float(sum_of_logs);
    }
    return {static_cast<double>(heads)};
  }

  void fold(const scored_query& query, std::span<const bf16> row, const summary& of_row, std::span<float> states,
            summary& sum) const noexcept {
    sum = {(query.first ? 0 : sum.weights) + of_row.weights};
    for (std::size_t i = 0; i < row.size(); ++i) states[i] = (query.first ? 0 : states[i]) + row[i].to_float();
  }

  void score(const judged_entries<summary>& entries, memory&, std::span<double> scores) const noexcept {
    const double most = std::log(std::max(2.0, entries.summary.weights));  // of a single weight the entropy is 0
    for (std::size_t i = 0; i < entries.older; ++i) {
      const double sum = entries.states[2 * i], entropy = detail::entropy_of(sum, entries.states[2 * i + 1]);
      scores[i] = sum * (1 - options_.entropy_weight * std::min(1.0, entropy / most));
    }
  }

 private:
  explicit attention_focus(const options& chosen) noexcept : options_(chosen) {}

  options options_;
};

/// SRC ("High-Fidelity KV Cache Summarization Using Entropy and Low-Rank Reconstruction", J. Chandra, 2026): what is dropped goes to a bin,
/// and a low-rank summary stands for attention over the bin. The source does not say how the two are merged. Here the summary gives the
/// log-mass of the bin as well as its output, both fitted to the reference queries, so that entries and summary have their softmax masses.
///
/// At a boundary the bin of a head is what is dropped there and, by its mass, what the summary before stood for. The reference queries are
/// those of the `window` before the boundary, of all query heads, rounded to bf16; where none were handed over, the summary stays as it was
/// and what is dropped is lost. With full rank, ridge 0 and no more reference queries than key_dim, attention at them is exact. Neither
/// part is linear in the query: elsewhere it is an approximation.
///
/// Memory: (rank + 1) (key_dim + value_dim) floats a head, further such sets while a rollback may need them, and the reference queries of the
/// next boundary. While an append crosses a boundary, the cache is copied.
template <cache_scalar Scalar>
class entropy_summary {
 public:
  using scalar = Scalar;
  using options = entropy_summary_options;

  /// Errors: invalid_argument (a rule's or a dropper's option, a ridge that is negative or no number), shape_mismatch (a layer without V),
  /// and what `dropper::make` gives.
  [[nodiscard]] static result<entropy_summary> make(const layer_shape& shape, const options& chosen) noexcept {
    if (shape.value_dim == 0) return error{error_code::shape_mismatch, "SRC needs values"};
    if (!(chosen.ridge >= 0 && chosen.ridge <= std::numeric_limits<float>::max()))
      return error{error_code::invalid_argument, "the ridge of SRC is at least 0"};
    auto kept = entries_type::make(shape, chosen);
    if (!kept) return kept.error();
    try {
      return entropy_summary(*std::move(kept), chosen);
    } catch (...) {
      return error{error_code::out_of_memory, "heads of SRC"};
    }
  }

  [[nodiscard]] const layer_shape& shape() const noexcept { return kept_.shape(); }
  [[nodiscard]] std::uint64_t length() const noexcept { return kept_.length(); }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return kept_.max_rollback(); }
  [[nodiscard]] std::size_t entries(std::uint32_t head) const noexcept { return kept_.entries(head); }
  [[nodiscard]] bool observes(std::uint64_t position) const noexcept { return kept_.observes(position); }
  [[nodiscard]] result<void> materialise(std::uint32_t head, const materialised_head& out) const noexcept {
    return kept_.materialise(head, out);
  }

  [[nodiscard]] std::size_t bytes() const noexcept {
    std::size_t sum = sizeof(*this) - sizeof(kept_) + kept_.bytes() + detail::bytes_of(heads_);
    for (const head_state& head : heads_) {
      sum += detail::bytes_of(head.queries) + detail::bytes_of(head.summaries);
      for (const reference_query& query : head.queries) sum += detail::bytes_of(query.values);
      for (const detail::fitted_attention& summary : head.summaries) sum += summary.bytes();
    }
    return sum;
  }

  [[nodiscard]] result<void> append(const layer_tensors<const Scalar>& rows, std::uint64_t tokens) noexcept {
    if (tokens <= schedule_.next(length()) - length()) {
      const auto done = kept_.append(rows, tokens);
      if (done) forget(kept_, heads_);
      return done;
    }
    if (tokens > entries_type::max_tokens - length()) return error{error_code::out_of_range, "the sequence is too long"};
    try {
      entries_type kept = kept_;
      std::vector<head_state> heads = heads_;
      for (std::uint64_t done = 0; done < tokens;) {
        const std::uint64_t boundary = schedule_.next(kept.length());
        const bool evicts = boundary == kept.length();
        const std::uint64_t next = evicts ? schedule_.next(boundary + 1) : boundary;
        const std::uint64_t count = std::min(tokens - done, next - kept.length());
        entries_type after = kept;
        const auto appended = after.append({from(rows.key, done), from(rows.value, done)}, count);
        if (!appended) return appended;
        for (std::uint32_t h = 0; evicts && h < heads.size(); ++h) {
          const auto summarised = summarise_dropped(kept, after, h, heads[h]);
          if (!summarised) return summarised;
        }
        kept = std::move(after);
        done += count;
      }
      forget(kept, heads);
      kept_ = std::move(kept);
      heads_ = std::move(heads);
    } catch (...) {
      return error{error_code::out_of_memory, "the summary of a layer"};
    }
    return {};
  }

  [[nodiscard]] result<void> truncate(std::uint64_t length) noexcept {
    const auto done = kept_.truncate(length);
    if (!done) return done;
    for (head_state& head : heads_) {
      std::erase_if(head.queries, [&](const reference_query& each) { return each.position >= length; });
      std::erase_if(head.summaries, [&](const detail::fitted_attention& each) { return each.boundary() >= length; });
    }
    return {};
  }

  /// Errors besides those of `dropper`: shape_mismatch (queries are missing), invalid_argument (a query that is not finite).
  [[nodiscard]] result<void> observe(const attention_rows& rows) noexcept {
    const auto where = static_cast<std::int64_t>(rows.position);
    if (rows.queries.size() != std::size_t{query_heads()} * shape().key_dim)
      return error{error_code::shape_mismatch, "SRC needs the queries, [query heads, key_dim]"}.at_token(where);
    if (!std::ranges::all_of(rows.queries, [](float each) { return bf16::from_float(each).is_finite(); }))
      return error{error_code::invalid_argument, "a query is not finite"}.at_token(where);
    if (rows.head >= heads_.size() || !observes(rows.position)) return kept_.observe(rows);
    try {
      std::vector<reference_query>& queries = heads_[rows.head].queries;
      reference_query next{rows.position, std::vector<bf16>(rows.queries.size())};
      std::ranges::transform(rows.queries, next.values.begin(), bf16::from_float);
      queries.reserve(queries.size() + 1);
      const auto observed = kept_.observe(rows);
      if (observed) queries.push_back(std::move(next));
      return observed;
    } catch (...) {
      return error{error_code::out_of_memory, "queries of a token"}.at_token(where);
    }
  }

  [[nodiscard]] result<void> summarise(std::uint32_t head, const attention_call& call) const noexcept {
    const std::size_t queries = call.log_mass.size(), key_dim = shape().key_dim, value_dim = shape().value_dim;
    if (head >= heads_.size() || call.queries.size() != queries * key_dim || call.out.size() != queries * value_dim)
      return error{error_code::shape_mismatch, "queries or room for the outcome of attention have another size"};
    const auto& summaries = heads_[head].summaries;
    for (std::size_t q = 0; q < queries; ++q) {
      const auto out = call.out.subspan(q * value_dim, value_dim);
      std::ranges::fill(out, 0.0F);
      call.log_mass[q] = summaries.empty() ? -std::numeric_limits<float>::infinity()
                                           : summaries.back().evaluate(call.queries.subspan(q * key_dim, key_dim), out);
    }
    return {};
  }

 private:
  using entries_type = dropper<Scalar, attention_focus>;

  struct reference_query {
    std::uint64_t position = 0;
    std::vector<bf16> values;  // [query heads, key_dim]
  };
  struct head_state {
    std::vector<reference_query> queries;             // oldest first: those of a boundary that is still to come, or may come again
    std::vector<detail::fitted_attention> summaries;  // oldest first: the last one counts, the others may again
  };

  entropy_summary(entries_type kept, const options& chosen)
      : kept_(std::move(kept)), schedule_(detail::eviction_schedule::of(chosen.eviction)), rank_(chosen.rank), ridge_(chosen.ridge),
        heads_(kept_.shape().kv_heads) {}

  [[nodiscard]] std::uint32_t query_heads() const noexcept { return kept_.rule().eviction().query_heads; }
  /// Position of the first reference query of a boundary.
  [[nodiscard]] std::uint64_t window_begin(std::uint64_t boundary) const noexcept {
    return boundary - std::min<std::uint64_t>(boundary, kept_.rule().eviction().window);
  }
  [[nodiscard]] static strided_tensor<const Scalar> from(strided_tensor<const Scalar> rows, std::uint64_t token) noexcept {
    if (rows.data != nullptr) rows.data += static_cast<std::ptrdiff_t>(token) * rows.token_stride;
    return rows;
  }

  /// Gives up what no truncation can bring back.
  void forget(const entries_type& kept, std::vector<head_state>& heads) const noexcept {
    const std::uint64_t settled = kept.settled(), oldest = window_begin(schedule_.next(settled));
    for (head_state& head : heads) {
      std::erase_if(head.queries, [&](const reference_query& each) { return each.position < oldest; });
      const auto later = std::ranges::find_if(head.summaries, [&](const auto& each) { return each.boundary() >= settled; });
      if (later - head.summaries.begin() > 1) head.summaries.erase(head.summaries.begin(), later - 1);
    }
  }

  /// All entries of a head.
  struct head_rows {
    std::vector<std::uint64_t> positions;
    std::vector<float> keys, values;
    result<void> read;

    head_rows(const entries_type& from, std::uint32_t head)
        : positions(from.entries(head)), keys(positions.size() * from.shape().key_dim), values(positions.size() * from.shape().value_dim) {
      read = from.materialise(head, {positions, keys, values});
    }
  };

  /// Replaces the summary of a head by one that also stands for what `after` does not hold any more. Throws std::bad_alloc.
  [[nodiscard]] result<void> summarise_dropped(const entries_type& before, const entries_type& after, std::uint32_t h,
                                               head_state& head) const {
    const std::uint64_t boundary = before.length(), oldest = window_begin(boundary);
    const auto first = std::ranges::find_if(head.queries, [&](const reference_query& each) { return each.position >= oldest; });
    const head_rows all(before, h), kept(after, h);
    if (!all.read) return all.read;
    if (!kept.read) return kept.read;
    std::vector<Eigen::Index> dropped;
    for (std::size_t i = 0; i < all.positions.size(); ++i) {
      if (!std::ranges::binary_search(kept.positions, all.positions[i])) dropped.push_back(static_cast<Eigen::Index>(i));
    }
    if (dropped.empty() || first == head.queries.end()) return {};

    using rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    const auto matrix = [](std::span<const float> numbers, std::uint32_t dim) {
      return Eigen::Map<const rows>(numbers.data(), static_cast<Eigen::Index>(numbers.size() / dim), dim).template cast<double>();
    };
    std::vector<float> queries;
    for (auto query = first; query != head.queries.end(); ++query)
      std::ranges::transform(query->values, std::back_inserter(queries), [](bf16 value) { return value.to_float(); });
    const std::uint32_t key_dim = shape().key_dim, value_dim = shape().value_dim;
    detail::attention_samples seen{matrix(queries, key_dim), {}, {}};
    Eigen::MatrixXd weights = seen.queries * Eigen::MatrixXd(matrix(all.keys, key_dim)(dropped, Eigen::all)).transpose();
    seen.log_mass = weights.rowwise().maxCoeff();
    weights = (weights.colwise() - seen.log_mass).array().exp();
    const Eigen::VectorXd mass = weights.rowwise().sum();
    seen.log_mass.array() += mass.array().log();
    seen.outputs = mass.cwiseInverse().asDiagonal() * (weights * Eigen::MatrixXd(matrix(all.values, value_dim)(dropped, Eigen::all)));
    if (!head.summaries.empty()) merge(head.summaries.back(), queries, seen);
    head.summaries.reserve(head.summaries.size() + 1);
    head.summaries.push_back(detail::fitted_attention::fit(boundary, seen, rank_, static_cast<double>(ridge_)));
    return {};
  }

  /// Adds what an earlier summary stands for, by its mass; in double, as `detail::merge_attention` does in float.
  void merge(const detail::fitted_attention& earlier, std::span<const float> queries, detail::attention_samples& seen) const {
    std::vector<float> out(shape().value_dim);
    const Eigen::Map<const Eigen::RowVectorXf> output(out.data(), static_cast<Eigen::Index>(out.size()));
    for (Eigen::Index q = 0; q < seen.queries.rows(); ++q) {
      const double other = earlier.evaluate(queries.subspan(static_cast<std::size_t>(q) * shape().key_dim, shape().key_dim), out);
      double& mass = seen.log_mass(q);
      const double most = std::max(mass, other), both = most + std::log(std::exp(mass - most) + std::exp(other - most));
      seen.outputs.row(q) = std::exp(mass - both) * seen.outputs.row(q) + std::exp(other - both) * output.cast<double>();
      mass = both;
    }
  }

  entries_type kept_;
  detail::eviction_schedule schedule_;
  std::uint32_t rank_;
  float ridge_;
  std::vector<head_state> heads_;
};

/// `src<bf16>::make(shape, {.eviction = {.budget = 256, .query_heads = 4}, .rank = 4})`
template <cache_scalar Scalar>
using src = entropy_summary<Scalar>;

static_assert(observes_attention<src<bf16>> && summarises_attention<src<bf16>>);

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <kvexact/compression/rows.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// Means and sizes of the channels of one layer's K and V over some tokens: calibration of `centred` and `outlier_split`. Keeps no data.
class channel_statistics {
 public:
  /// Errors: those of `cache_shape`, out_of_memory.
  [[nodiscard]] static result<channel_statistics> make(const layer_shape& shape) noexcept {
    if (const auto fits = cache_shape::uniform(1, shape); !fits) return fits.error();
    try {
      return channel_statistics(shape);
    } catch (...) {
      return error{error_code::out_of_memory, "statistics of channels"};
    }
  }

  [[nodiscard]] std::uint64_t tokens() const noexcept { return tokens_; }

  /// Errors: invalid_argument (null data, a value that is not finite); then nothing has changed.
  template <class Scalar>
  result<void> add(const layer_tensors<const Scalar>& rows, std::uint64_t tokens) noexcept {
    const auto usable = detail::expect_rows(shape_, rows, tokens_, tokens);
    if (!usable) return usable;
    for (const cache_part part : cache_parts) {
      if (shape_.channels(part) == 0) continue;
      for (std::uint64_t t = 0; t < tokens; ++t) {
        for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
          const Scalar* const row = detail::row_of(rows.part(part), t, h);
          channel_sums* const to = &sums(part)[std::size_t{h} * shape_.dim(part)];
          for (std::uint32_t c = 0; c < shape_.dim(part); ++c) {
            const auto value = static_cast<double>(row[c].to_float());
            to[c].values += value;
            to[c].squares += value * value;
          }
        }
      }
    }
    tokens_ += tokens;
    return {};
  }

  /// [heads, dim], as `centred` takes them. Errors: not_calibrated (no tokens), out_of_memory.
  [[nodiscard]] result<std::vector<float>> means(cache_part part) const noexcept {
    if (tokens_ == 0) return error{error_code::not_calibrated, "no tokens to take means of"};
    try {
      std::vector<float> means;
      for (const channel_sums& each : sums(part)) means.push_back(static_cast<float>(each.values / static_cast<double>(tokens_)));
      return means;
    } catch (...) {
      return error{error_code::out_of_memory, "means of channels"};
    }
  }

  /// The `count` channels of each head with the largest mean squares, [heads, count], increasing for each head, as `outlier_split` takes
  /// them. Errors: invalid_argument (more than there are), not_calibrated (no tokens), out_of_memory.
  [[nodiscard]] result<std::vector<std::uint32_t>> loudest(cache_part part, std::uint32_t count) const noexcept {
    const std::uint32_t dim = shape_.dim(part);
    if (count > dim) return error{error_code::invalid_argument, "more outliers than channels"};
    if (tokens_ == 0) return error{error_code::not_calibrated, "no tokens to find outliers in"};
    try {
      if (dim == 0) return std::vector<std::uint32_t>();
      std::vector<std::uint32_t> all, order(dim);
      for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
        const channel_sums* const of = &sums(part)[std::size_t{h} * dim];
        std::iota(order.begin(), order.end(), 0U);
        std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return of[a].squares > of[b].squares; });
        std::sort(order.begin(), order.begin() + count);
        all.insert(all.end(), order.begin(), order.begin() + count);
      }
      return all;
    } catch (...) {
      return error{error_code::out_of_memory, "outliers of channels"};
    }
  }

 private:
  struct channel_sums {
    double values = 0, squares = 0;
  };

  explicit channel_statistics(const layer_shape& shape) : shape_(shape), keys_(shape.channels(cache_part::key)), values_(shape.channels(cache_part::value)) {}

  [[nodiscard]] std::vector<channel_sums>& sums(cache_part part) noexcept { return part == cache_part::key ? keys_ : values_; }
  [[nodiscard]] const std::vector<channel_sums>& sums(cache_part part) const noexcept { return part == cache_part::key ? keys_ : values_; }

  layer_shape shape_;
  std::uint64_t tokens_ = 0;
  std::vector<channel_sums> keys_, values_;
};

}  // namespace kvexact

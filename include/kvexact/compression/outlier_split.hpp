// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/compression/quantiser.hpp>
#include <kvexact/core/result.hpp>

namespace kvexact {

/// Some channels in one format, the rest in another: outliers with more bits. TurboQuant's "2.5 bits" are
/// outlier_split<turbo_quant<3>, turbo_quant<2>> with 32 of 128 channels: 2.25 bits and two norms. Which channels is calibrated
/// (`channel_statistics`) and shared by all sequences.
template <class Outliers, class Rest>
class outlier_split {
 public:
  struct options {
    std::vector<std::uint32_t> channels;  ///< [heads, n], increasing for each head; n at least 1 and less than dim
    typename Outliers::options outliers;
    typename Rest::options rest;
  };

  [[nodiscard]] static result<outlier_split> make(std::uint32_t heads, std::uint32_t dim, const options& chosen) noexcept {
    const std::size_t count = heads == 0 ? 0 : chosen.channels.size() / heads;
    if (count == 0 || count * heads != chosen.channels.size() || count >= dim)
      return error{error_code::shape_mismatch, "outlier_split needs as many channels of each head, and fewer than it has"};
    for (std::size_t i = 0; i < chosen.channels.size(); ++i) {
      if (chosen.channels[i] >= dim || (i % count > 0 && chosen.channels[i] <= chosen.channels[i - 1]))
        return error{error_code::invalid_argument, "the channels of outlier_split must be increasing and less than dim"};
    }
    auto outliers = Outliers::make(heads, static_cast<std::uint32_t>(count), chosen.outliers);
    if (!outliers) return outliers.error();
    auto rest = Rest::make(heads, dim - static_cast<std::uint32_t>(count), chosen.rest);
    if (!rest) return rest.error();
    if (outliers->group_tokens() != rest->group_tokens())
      return error{error_code::invalid_argument, "both formats of outlier_split must group as many tokens"};
    try {
      // The outliers of each head, then its other channels.
      std::vector<std::uint32_t> order(std::size_t{heads} * dim);
      for (std::uint32_t h = 0; h < heads; ++h) {
        const auto first = chosen.channels.begin() + static_cast<std::ptrdiff_t>(h * count);
        auto to = std::copy_n(first, count, order.begin() + static_cast<std::ptrdiff_t>(std::size_t{h} * dim));
        for (std::uint32_t c = 0; c < dim; ++c)
          if (!std::binary_search(first, first + static_cast<std::ptrdiff_t>(count), c)) *to++ = c;
      }
      return outlier_split(dim, *std::move(outliers), *std::move(rest), std::make_shared<const std::vector<std::uint32_t>>(std::move(order)));
    } catch (...) {
      return error{error_code::out_of_memory, "the channels of outlier_split"};
    }
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return dim_; }
  [[nodiscard]] std::uint32_t group_tokens() const noexcept { return rest_.group_tokens(); }
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return outliers_.packed_bytes() + rest_.packed_bytes(); }
  [[nodiscard]] std::size_t scratch_floats() const noexcept {
    return std::size_t{dim_} * group_tokens() + std::max(outliers_.scratch_floats(), rest_.scratch_floats());
  }

  std::uint64_t pack(std::uint32_t head, std::span<const float> values, std::span<std::byte> packed, std::span<float> scratch) const noexcept {
    std::uint64_t saturated = 0;
    const auto [loud, quiet, more] = divide(scratch);
    for (std::size_t group = 0; group * dim_ * group_tokens() < values.size(); ++group) {
      const auto to = packed.subspan(group * packed_bytes(), packed_bytes());
      for (std::size_t t = 0; t < group_tokens(); ++t)
        split(head, values.subspan((group * group_tokens() + t) * dim_, dim_), loud.subspan(t * outliers_.dim()), quiet.subspan(t * rest_.dim()));
      saturated += outliers_.pack(head, loud, to.first(outliers_.packed_bytes()), more);
      saturated += rest_.pack(head, quiet, to.subspan(outliers_.packed_bytes()), more);
    }
    return saturated;
  }
  void unpack(std::uint32_t head, std::span<const std::byte> packed, std::span<float> values, std::span<float> scratch) const noexcept {
    const auto [loud, quiet, more] = divide(scratch);
    for (std::size_t group = 0; group * dim_ * group_tokens() < values.size(); ++group) {
      const auto from = packed.subspan(group * packed_bytes(), packed_bytes());
      outliers_.unpack(head, from.first(outliers_.packed_bytes()), loud, more);
      rest_.unpack(head, from.subspan(outliers_.packed_bytes()), quiet, more);
      for (std::size_t t = 0; t < group_tokens(); ++t)
        join(head, loud.subspan(t * outliers_.dim()), quiet.subspan(t * rest_.dim()), values.subspan((group * group_tokens() + t) * dim_, dim_));
    }
  }

 private:
  outlier_split(std::uint32_t dim, Outliers outliers, Rest rest, std::shared_ptr<const std::vector<std::uint32_t>> order) noexcept
      : dim_(dim), outliers_(std::move(outliers)), rest_(std::move(rest)), order_(std::move(order)) {}

  struct parts {
    std::span<float> loud, quiet, more;
  };
  [[nodiscard]] parts divide(std::span<float> scratch) const noexcept {
    const std::size_t loud = std::size_t{outliers_.dim()} * group_tokens(), all = std::size_t{dim_} * group_tokens();
    return {scratch.first(loud), scratch.subspan(loud, all - loud), scratch.subspan(all)};
  }
  [[nodiscard]] const std::uint32_t* order(std::uint32_t head) const noexcept { return order_->data() + std::size_t{head} * dim_; }
  void split(std::uint32_t head, std::span<const float> row, std::span<float> loud, std::span<float> quiet) const noexcept {
    for (std::size_t i = 0; i < outliers_.dim(); ++i) loud[i] = row[order(head)[i]];
    for (std::size_t i = 0; i < rest_.dim(); ++i) quiet[i] = row[order(head)[outliers_.dim() + i]];
  }
  void join(std::uint32_t head, std::span<const float> loud, std::span<const float> quiet, std::span<float> row) const noexcept {
    for (std::size_t i = 0; i < outliers_.dim(); ++i) row[order(head)[i]] = loud[i];
    for (std::size_t i = 0; i < rest_.dim(); ++i) row[order(head)[outliers_.dim() + i]] = quiet[i];
  }

  std::uint32_t dim_;
  Outliers outliers_;
  Rest rest_;
  std::shared_ptr<const std::vector<std::uint32_t>> order_;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/compression/quantiser.hpp>
#include <kvexact/core/result.hpp>

namespace kvexact {

/// Any quantiser on what is left when the given mean of every channel has been taken off. Keys of most models have channels whose mean is far
/// larger than what varies: a norm or a scale over channels then serves the means. The means are calibrated (`channel_statistics`) and shared by all
/// sequences.
template <class Inner>
class centred {
 public:
  struct options {
    std::vector<float> means;  ///< [heads, dim]
    typename Inner::options inner;
  };

  [[nodiscard]] static result<centred> make(std::uint32_t heads, std::uint32_t dim, const options& chosen) noexcept {
    auto inner = Inner::make(heads, dim, chosen.inner);
    if (!inner) return inner.error();
    if (chosen.means.size() != std::size_t{heads} * dim) return error{error_code::shape_mismatch, "centred needs a mean for every head and channel"};
    if (!std::all_of(chosen.means.begin(), chosen.means.end(), [](float mean) { return std::isfinite(mean); }))
      return error{error_code::invalid_argument, "a mean of centred is not finite"};
    try {
      return centred(*std::move(inner), std::make_shared<const std::vector<float>>(chosen.means));
    } catch (...) {
      return error{error_code::out_of_memory, "the means of centred"};
    }
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return inner_.dim(); }
  [[nodiscard]] std::uint32_t group_tokens() const noexcept { return inner_.group_tokens(); }
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return inner_.packed_bytes(); }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return groups_at_once * group_values() + inner_.scratch_floats(); }

  std::uint64_t pack(std::uint32_t head, std::span<const float> values, std::span<std::byte> packed, std::span<float> scratch) const noexcept {
    std::uint64_t saturated = 0;
    for (std::size_t first = 0; first * group_values() < values.size(); first += groups_at_once) {
      const auto from = values.subspan(first * group_values());
      const auto rest = scratch.first(std::min(from.size(), groups_at_once * group_values()));
      for (std::size_t row = 0; row < rest.size(); row += dim())
        for (std::size_t c = 0; c < dim(); ++c) rest[row + c] = from[row + c] - means(head)[c];
      saturated += inner_.pack(head, rest, packed.subspan(first * packed_bytes(), rest.size() / group_values() * packed_bytes()),
                               scratch.subspan(groups_at_once * group_values()));
    }
    return saturated;
  }
  void unpack(std::uint32_t head, std::span<const std::byte> packed, std::span<float> values, std::span<float> scratch) const noexcept {
    inner_.unpack(head, packed, values, scratch);
    for (std::size_t row = 0; row < values.size(); row += dim())
      for (std::size_t c = 0; c < dim(); ++c) values[row + c] += means(head)[c];
  }

  /// Behind the inner one's numbers stands the product of the query and the means.
  [[nodiscard]] std::size_t working_floats() const noexcept
    requires computes_on_codes<Inner>
  {
    return inner_.working_floats() + 1;
  }
  void prepare(std::uint32_t head, std::span<const float> query, std::span<float> prepared, std::span<float> scratch) const noexcept
    requires computes_on_codes<Inner>
  {
    inner_.prepare(head, query, prepared, scratch);
    float sum = 0;
    for (std::size_t c = 0; c < dim(); ++c) sum += query[c] * means(head)[c];
    prepared[inner_.working_floats()] = sum;
  }
  void dot(std::span<const float> prepared, std::span<const std::byte> packed, std::span<float> scores) const noexcept
    requires computes_on_codes<Inner>
  {
    inner_.dot(prepared, packed, scores);
    for (std::size_t t = 0; t < group_tokens(); ++t) scores[t] += prepared[inner_.working_floats()];
  }
  void add_weighted(std::span<const float> weights, std::span<const std::byte> packed, std::span<float> sums) const noexcept
    requires computes_on_codes<Inner>
  {
    inner_.add_weighted(weights, packed, sums);
  }
  void finish(std::uint32_t head, float weight, std::span<const float> sums, std::span<float> out, std::span<float> scratch) const noexcept
    requires computes_on_codes<Inner>
  {
    inner_.finish(head, weight, sums, out, scratch);
    for (std::size_t c = 0; c < dim(); ++c) out[c] += weight * means(head)[c];
  }

 private:
  static constexpr std::size_t groups_at_once = 16;

  centred(Inner inner, std::shared_ptr<const std::vector<float>> means) noexcept : inner_(std::move(inner)), means_(std::move(means)) {}

  [[nodiscard]] std::size_t group_values() const noexcept { return std::size_t{group_tokens()} * dim(); }
  [[nodiscard]] const float* means(std::uint32_t head) const noexcept { return means_->data() + std::size_t{head} * dim(); }

  Inner inner_;
  std::shared_ptr<const std::vector<float>> means_;
};

}  // namespace kvexact

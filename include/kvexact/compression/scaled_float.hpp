// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/scale.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/numeric/fp8_e4m3.hpp>
#include <kvexact/numeric/fp8_e5m2.hpp>

namespace kvexact {

/// 8-bit floats `Format`, token by token: with one given scale for all (8 bits a value), or with one fp16 scale for every `group_channels`
/// consecutive channels, which takes their largest magnitude to the largest number of the format (8 + 16 / group_channels).
template <class Format>
class scaled_float {
 public:
  struct options {
    std::uint32_t group_channels = 32;  ///< 0: no scales are stored
    float scale = 1;                    ///< of all values where no scales are stored, greater than 0
  };

  [[nodiscard]] static result<scaled_float> make(std::uint32_t heads, std::uint32_t dim, const options& chosen = {}) noexcept {
    if (heads == 0 || dim == 0) return error{error_code::invalid_argument, "scaled_float needs heads and channels"};
    if (chosen.group_channels == 0 && !(chosen.scale > 0 && chosen.scale <= std::numeric_limits<float>::max() / largest_value()))
      return error{error_code::invalid_argument, "the scale of scaled_float must be positive, and the largest number finite with it"};
    return scaled_float(dim, chosen);
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return dim_; }
  [[nodiscard]] const options& chosen() const noexcept { return options_; }
  [[nodiscard]] std::uint32_t group_tokens() const noexcept { return 1; }
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return dim_ + 2 * groups_; }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return 0; }

  std::uint64_t pack(std::uint32_t, std::span<const float> values, std::span<std::byte> packed, std::span<float>) const noexcept {
    std::uint64_t saturated = 0;
    for (std::size_t row = 0; row * dim_ < values.size(); ++row) {
      const float* const from = values.data() + row * dim_;
      std::byte* const to = packed.data() + row * packed_bytes();
      for_groups([&](std::size_t g, std::size_t begin, std::size_t end) {
        float scale = options_.scale;
        if (groups_ > 0) {
          float largest = 0;
          for (std::size_t c = begin; c < end; ++c) largest = std::max(largest, std::fabs(from[c]));
          const fp16 stored = detail::fp16_at_least(largest / largest_value());
          detail::store_fp16(to + dim_ + 2 * g, stored);
          scale = stored.to_float();
        }
        for (std::size_t c = begin; c < end; ++c) {
          const float scaled = scale > 0 ? from[c] / scale : 0.0F;
          to[c] = static_cast<std::byte>(Format::from_float_saturating(scaled, saturated).bits);
        }
      });
    }
    return saturated;
  }

  void unpack(std::uint32_t, std::span<const std::byte> packed, std::span<float> values, std::span<float>) const noexcept {
    for (std::size_t row = 0; row * dim_ < values.size(); ++row) {
      const std::byte* const from = packed.data() + row * packed_bytes();
      float* const to = values.data() + row * dim_;
      for_groups([&](std::size_t g, std::size_t begin, std::size_t end) {
        const float scale = scale_of(from, g);
        for (std::size_t c = begin; c < end; ++c) to[c] = scale * value_of(from[c]);
      });
    }
  }

  [[nodiscard]] std::size_t working_floats() const noexcept { return dim_; }
  void prepare(std::uint32_t, std::span<const float> query, std::span<float> prepared, std::span<float>) const noexcept {
    std::copy(query.begin(), query.end(), prepared.begin());
  }
  void dot(std::span<const float> prepared, std::span<const std::byte> packed, std::span<float> scores) const noexcept {
    float sum = 0;
    for_groups([&](std::size_t g, std::size_t begin, std::size_t end) {
      float part = 0;
      for (std::size_t c = begin; c < end; ++c) part += prepared[c] * value_of(packed[c]);
      sum += scale_of(packed.data(), g) * part;
    });
    scores[0] = sum;
  }
  void add_weighted(std::span<const float> weights, std::span<const std::byte> packed, std::span<float> sums) const noexcept {
    for_groups([&](std::size_t g, std::size_t begin, std::size_t end) {
      const float weight = weights[0] * scale_of(packed.data(), g);
      for (std::size_t c = begin; c < end; ++c) sums[c] += weight * value_of(packed[c]);
    });
  }
  void finish(std::uint32_t, float, std::span<const float> sums, std::span<float> out, std::span<float>) const noexcept {
    std::copy_n(sums.begin(), dim_, out.begin());
  }

 private:
  scaled_float(std::uint32_t dim, const options& chosen) noexcept
      : dim_(dim), options_(chosen), groups_(chosen.group_channels == 0 ? 0 : (dim - 1) / chosen.group_channels + 1) {}

  [[nodiscard]] static constexpr float largest_value() noexcept { return Format::from_bits(Format::max_finite).to_float(); }
  [[nodiscard]] static float value_of(std::byte code) noexcept { return Format::from_bits(static_cast<std::uint8_t>(code)).to_float(); }
  [[nodiscard]] float scale_of(const std::byte* packed, std::size_t group) const noexcept {
    return groups_ == 0 ? options_.scale : detail::load_fp16(packed + dim_ + 2 * group);
  }
  template <class Visit>
  void for_groups(Visit&& visit) const noexcept {
    if (groups_ == 0) return visit(std::size_t{0}, std::size_t{0}, std::size_t{dim_});
    for (std::size_t g = 0; g < groups_; ++g)
      visit(g, g * options_.group_channels, std::min<std::size_t>(dim_, (g + 1) * options_.group_channels));
  }

  std::uint32_t dim_;
  options options_;
  std::size_t groups_;
};

static_assert(computes_on_codes<scaled_float<fp8_e4m3>>);

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numbers>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/scale.hpp>
#include <kvexact/compression/turbo_quant.hpp>
#include <kvexact/core/result.hpp>

namespace kvexact {

/// TurboQuant (arXiv 2504.19874, "prod"): `turbo_quant` with a bit less, and for what it missed the signs of its products with `dim` random
/// directions, with its norm as fp16. Products with any vector have the right expectation; each one is less exact than with `turbo_quant` of
/// all Bits, and attention finds its largest weights less often. Bits + 32 / dim bits a value, 1 + 16 / dim for one bit.
template <int Bits>
class turbo_quant_product {
  static_assert(Bits >= 1 && Bits <= 8, "kvexact: turbo_quant_product has 1 to 8 bits");
  static constexpr bool has_inner = Bits > 1;
  using inner_type = turbo_quant<has_inner ? Bits - 1 : 1>;

 public:
  using options = rotation_options;  ///< of the vectors; the directions follow from the same seed

  [[nodiscard]] static result<turbo_quant_product> make(std::uint32_t heads, std::uint32_t dim, const options& chosen = {}) noexcept {
    std::optional<inner_type> inner;
    if (has_inner) {
      auto made = inner_type::make(heads, dim, {.rotation = chosen});
      if (!made) return made.error();
      inner = *std::move(made);
    } else if (heads == 0 || dim == 0) {
      return error{error_code::invalid_argument, "turbo_quant_product needs heads and channels"};
    }
    if (dim > orthonormal_rotation::most_haar_channels)
      return error{error_code::out_of_range, "turbo_quant_product has too many channels"};
    try {
      return turbo_quant_product(dim, std::move(inner), directions(dim, chosen.seed));
    } catch (...) {
      return error{error_code::out_of_memory, "the directions of turbo_quant_product"};
    }
  }

  [[nodiscard]] std::uint32_t dim() const noexcept { return dim_; }
  [[nodiscard]] std::uint32_t group_tokens() const noexcept { return 1; }
  [[nodiscard]] std::size_t packed_bytes() const noexcept { return inner_bytes() + sign_bytes() + 2; }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return dim_ + (inner_ ? inner_->scratch_floats() : 0); }

  std::uint64_t pack(std::uint32_t head, std::span<const float> values, std::span<std::byte> packed, std::span<float> scratch) const noexcept {
    std::uint64_t saturated = 0;
    const auto missed = scratch.first(dim_), rest = scratch.subspan(dim_);
    for (std::size_t row = 0; row * dim_ < values.size(); ++row) {
      const auto from = values.subspan(row * dim_, dim_);
      const auto to = packed.subspan(row * packed_bytes(), packed_bytes());
      std::fill(missed.begin(), missed.end(), 0.0F);
      if (inner_) {
        saturated += inner_->pack(head, from, to.first(inner_bytes()), rest);
        inner_->unpack(head, to.first(inner_bytes()), missed, rest);
      }
      double squares = 0;
      for (std::size_t c = 0; c < dim_; ++c) {
        missed[c] = from[c] - missed[c];
        squares += static_cast<double>(missed[c]) * static_cast<double>(missed[c]);
      }
      const auto signs = to.subspan(inner_bytes(), sign_bytes());
      std::fill(signs.begin(), signs.end(), std::byte{0});
      for (std::size_t i = 0; i < dim_; ++i) {
        double product = 0;
        for (std::size_t c = 0; c < dim_; ++c) product += static_cast<double>(direction(i)[c]) * static_cast<double>(missed[c]);
        if (product >= 0) signs[i / 8] |= std::byte{1} << (i % 8);
      }
      detail::store_fp16(to.data() + inner_bytes() + sign_bytes(),
                         fp16::from_float_saturating(static_cast<float>(std::sqrt(squares)), saturated));
    }
    return saturated;
  }

  void unpack(std::uint32_t head, std::span<const std::byte> packed, std::span<float> values, std::span<float> scratch) const noexcept {
    for (std::size_t row = 0; row * dim_ < values.size(); ++row) {
      const auto from = packed.subspan(row * packed_bytes(), packed_bytes());
      const auto to = values.subspan(row * dim_, dim_);
      std::fill(to.begin(), to.end(), 0.0F);
      if (inner_) inner_->unpack(head, from.first(inner_bytes()), to, scratch.subspan(dim_));
      // E[sign(<s, r>) s] = sqrt(2 / pi) r / |r| for normal s.
      const float scale = static_cast<float>(std::sqrt(std::numbers::pi / 2) / dim_) * detail::load_fp16(from.data() + inner_bytes() + sign_bytes());
      for (std::size_t i = 0; i < dim_; ++i) {
        const bool positive = (from[inner_bytes() + i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
        const float weight = positive ? scale : -scale;
        for (std::size_t c = 0; c < dim_; ++c) to[c] += weight * direction(i)[c];
      }
    }
  }

 private:
  turbo_quant_product(std::uint32_t dim, std::optional<inner_type> inner, std::shared_ptr<const std::vector<float>> made) noexcept
      : dim_(dim), inner_(std::move(inner)), directions_(std::move(made)) {}

  [[nodiscard]] static std::shared_ptr<const std::vector<float>> directions(std::uint32_t dim, std::uint64_t seed) {
    std::vector<float> made(std::size_t{dim} * dim);
    detail::normal_numbers random(seed ^ 0x5ca1ab1e);
    for (float& each : made) each = static_cast<float>(random.next());
    return std::make_shared<const std::vector<float>>(std::move(made));
  }
  [[nodiscard]] std::size_t inner_bytes() const noexcept { return inner_ ? inner_->packed_bytes() : 0; }
  [[nodiscard]] std::size_t sign_bytes() const noexcept { return (std::size_t{dim_} + 7) / 8; }
  [[nodiscard]] const float* direction(std::size_t i) const noexcept { return directions_->data() + i * dim_; }

  std::uint32_t dim_;
  std::optional<inner_type> inner_;
  std::shared_ptr<const std::vector<float>> directions_;
};

}  // namespace kvexact

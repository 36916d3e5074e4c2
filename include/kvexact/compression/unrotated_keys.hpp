// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvexact/numeric/integer_rotation.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact::detail {

/// Takes the rotary embedding off keys, and puts it back. Does not own the rotation. Throws std::bad_alloc when made.
class unrotated_keys {
 public:
  explicit unrotated_keys(const rotary& rotation) : rotation_(&rotation), cosines_(rotation.dim() / 2), sines_(rotation.dim() / 2) {}

  /// For keys of this position.
  void at(std::uint64_t position) noexcept {
    for (std::size_t i = 0; i < cosines_.size(); ++i) {
      const integer_rotation by = rotation_by_turns(position * rotation_->turns()[i]);
      cosines_[i] = static_cast<float>(by.cosine) * 0x1p-30F;
      sines_[i] = static_cast<float>(by.sine) * 0x1p-30F;
    }
  }
  /// One key, at least rotary_dim long.
  void forward(std::span<float> key) const noexcept { turn(key, 1.0F); }
  void backward(std::span<float> key) const noexcept { turn(key, -1.0F); }

 private:
  void turn(std::span<float> key, float sign) const noexcept {
    for (std::size_t i = 0; i < cosines_.size(); ++i) {
      const auto [a, b] = rotation_->pair(static_cast<std::uint32_t>(i));
      const float x = key[a], y = key[b], sine = sign * sines_[i];
      key[a] = x * cosines_[i] - y * sine;
      key[b] = x * sine + y * cosines_[i];
    }
  }

  const rotary* rotation_;
  std::vector<float> cosines_, sines_;
};

}  // namespace kvexact::detail

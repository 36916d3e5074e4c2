// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/numeric/integer_rotation.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact {

/// Cosines and sines of a token range, [pair][stride], in memory of the caller. The same for all layers and heads.
class rotation_table {
 public:
  rotation_table() noexcept = default;
  /// `memory`: at least rotation.dim() / 2 * stride elements.
  rotation_table(const rotary& rotation, index_range tokens, std::size_t stride, std::span<integer_rotation> memory) noexcept
      : rows_(memory.data()), stride_(stride) {
    for (std::size_t i = 0; i < rotation.turns().size(); ++i) {
      for (std::uint64_t t = 0; t < tokens.size(); ++t) memory[i * stride + t] = rotation_by_turns((tokens.begin + t) * rotation.turns()[i]);
    }
  }

  /// Pair `i` at every token of the range.
  [[nodiscard]] const integer_rotation* operator[](std::size_t i) const noexcept { return rows_ + i * stride_; }

 private:
  const integer_rotation* rows_ = nullptr;
  std::size_t stride_ = 0;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/group_compressor.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact::test {

/// A group whose layers are all given the same tokens, seen through its last layer.
template <group_compressor Group, std::uint32_t Layers>
class whole_group {
 public:
  using scalar = typename Group::scalar;
  using options = typename Group::options;

  [[nodiscard]] static result<whole_group> make(const layer_shape& shape, const options& chosen) noexcept {
    auto made = Group::make(std::vector<layer_shape>(Layers, shape), chosen);
    if (!made) return made.error();
    return whole_group(*std::move(made));
  }

  [[nodiscard]] const layer_shape& shape() const noexcept { return group_.shape(last); }
  [[nodiscard]] std::uint64_t length() const noexcept { return group_.length(last); }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return group_.max_rollback(); }
  [[nodiscard]] std::size_t entries(std::uint32_t head) const noexcept { return group_.entries(last, head); }
  [[nodiscard]] std::size_t bytes() const noexcept { return sizeof(*this) - sizeof(group_) + group_.bytes(); }
  result<void> materialise(std::uint32_t head, const materialised_head& out) const noexcept { return group_.materialise(last, head, out); }
  result<void> attend(std::uint32_t head, const attention_call& call) const noexcept { return group_.attend(last, head, call); }

  result<void> append(const layer_tensors<const scalar>& rows, std::uint64_t tokens) noexcept {
    const std::uint64_t before = length();
    for (std::uint32_t l = 0; l < Layers; ++l) {
      const auto done = group_.append(l, rows, tokens);
      if (done) continue;
      while (l-- > 0) (void)group_.truncate(l, before);
      return done;
    }
    return {};
  }
  result<void> truncate(std::uint64_t length) noexcept {
    for (std::uint32_t l = 0; l < Layers; ++l) {
      const auto done = group_.truncate(l, length);
      if (!done) return done;
    }
    return {};
  }

 private:
  static constexpr std::uint32_t last = Layers - 1;

  explicit whole_group(Group group) noexcept : group_(std::move(group)) {}

  Group group_;
};

}  // namespace kvexact::test

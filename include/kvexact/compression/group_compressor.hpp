// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include <kvexact/compression/compressor.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// The draft cache of one sequence in several adjacent layers that lean on one another. Each layer is used like a `layer_compressor`, its
/// number in the group in front; `attend` is attention over `materialise`, but for rounding.
///
/// `make(layers, options)` is given the shapes of all layers from the group's first on, and takes the first `layers()` of them.
///
/// Layers are filled in order, as an engine computes them: a later one can neither be appended to nor read while an earlier one is shorter
/// (out_of_range). What a layer gives depends on the tokens alone once all layers have the same length. `bytes()` counts all layers.
template <class G>
concept group_compressor = std::movable<G> && requires(G& group, const G& constant, const layer_tensors<const typename G::scalar>& rows,
                                                       std::uint64_t tokens, std::uint32_t number, const materialised_head& out,
                                                       const attention_call& call) {
  typename G::scalar;
  { constant.layers() } noexcept -> std::same_as<std::uint32_t>;
  { constant.shape(number) } noexcept -> std::same_as<const layer_shape&>;
  { constant.length(number) } noexcept -> std::same_as<std::uint64_t>;
  { constant.max_rollback() } noexcept -> std::same_as<std::uint64_t>;
  { group.append(number, rows, tokens) } noexcept -> std::same_as<result<void>>;
  { group.truncate(number, tokens) } noexcept -> std::same_as<result<void>>;
  { constant.entries(number, number) } noexcept -> std::same_as<std::size_t>;
  { constant.materialise(number, number, out) } noexcept -> std::same_as<result<void>>;
  { constant.attend(number, number, call) } noexcept -> std::same_as<result<void>>;
  { constant.bytes() } noexcept -> std::same_as<std::size_t>;
};

/// One layer of a group, as a `layer_compressor`. Does not own the group, which must outlive it and stay where it is.
template <class Group>
class group_layer {
 public:
  using scalar = typename Group::scalar;

  group_layer(Group& group, std::uint32_t layer) noexcept : group_(&group), layer_(layer) {}

  [[nodiscard]] const layer_shape& shape() const noexcept { return group_->shape(layer_); }
  [[nodiscard]] std::uint64_t length() const noexcept { return group_->length(layer_); }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return group_->max_rollback(); }
  [[nodiscard]] std::size_t entries(std::uint32_t head) const noexcept { return group_->entries(layer_, head); }
  /// Those of the whole group, for its first layer.
  [[nodiscard]] std::size_t bytes() const noexcept { return layer_ == 0 ? group_->bytes() : 0; }
  result<void> append(const layer_tensors<const scalar>& rows, std::uint64_t tokens) noexcept { return group_->append(layer_, rows, tokens); }
  result<void> truncate(std::uint64_t length) noexcept { return group_->truncate(layer_, length); }
  result<void> materialise(std::uint32_t head, const materialised_head& out) const noexcept { return group_->materialise(layer_, head, out); }
  result<void> attend(std::uint32_t head, const attention_call& call) const noexcept { return group_->attend(layer_, head, call); }
  void keep_whole(bool whole) noexcept
    requires requires(Group& group) { group.keep_whole(whole); }
  {
    group_->keep_whole(whole);
  }
  [[nodiscard]] bool keeps_whole() const noexcept
    requires requires(const Group& group) { group.keeps_whole(); }
  {
    return group_->keeps_whole();
  }

 private:
  Group* group_;
  std::uint32_t layer_;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include <kvexact/compression/compressor.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact::examples {

/// Any `draft_cache` of bf16, so that a tool can choose one at run time.
class any_draft_cache {
 public:
  using scalar = bf16;

  template <class Cache>
    requires(!std::same_as<Cache, any_draft_cache>)
  explicit any_draft_cache(Cache cache) : held_(std::make_unique<holder<Cache>>(std::move(cache))) {}

  [[nodiscard]] const cache_shape& shape() const noexcept { return held_->shape(); }
  [[nodiscard]] std::uint64_t length(std::uint32_t layer) const noexcept { return held_->length(layer); }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return held_->max_rollback(); }
  [[nodiscard]] std::size_t entries(std::uint32_t layer, std::uint32_t head) const noexcept { return held_->entries(layer, head); }
  [[nodiscard]] std::size_t bytes() const noexcept { return held_->bytes(); }
  [[nodiscard]] bool observes(std::uint32_t layer, std::uint64_t position) const noexcept { return held_->observes(layer, position); }

  result<void> append(std::uint32_t layer, const layer_tensors<const bf16>& rows, std::uint64_t tokens) noexcept { return held_->append(layer, rows, tokens); }
  result<void> truncate(std::uint64_t length) noexcept { return held_->truncate(length); }
  result<void> materialise(std::uint32_t layer, std::uint32_t head, const materialised_head& out) const noexcept { return held_->materialise(layer, head, out); }
  result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) const noexcept { return held_->attend(layer, head, call); }
  result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call, std::span<float> weights) const noexcept {
    return held_->attend(layer, head, call, weights);
  }
  result<void> observe(std::uint32_t layer, const attention_rows& rows) noexcept { return held_->observe(layer, rows); }

 private:
  struct base {
    virtual ~base() = default;
    [[nodiscard]] virtual const cache_shape& shape() const = 0;
    [[nodiscard]] virtual std::uint64_t length(std::uint32_t layer) const = 0;
    [[nodiscard]] virtual std::uint64_t max_rollback() const = 0;
    [[nodiscard]] virtual std::size_t entries(std::uint32_t layer, std::uint32_t head) const = 0;
    [[nodiscard]] virtual std::size_t bytes() const = 0;
    [[nodiscard]] virtual bool observes(std::uint32_t layer, std::uint64_t position) const = 0;
    virtual result<void> append(std::uint32_t layer, const layer_tensors<const bf16>& rows, std::uint64_t tokens) = 0;
    virtual result<void> truncate(std::uint64_t length) = 0;
    virtual result<void> materialise(std::uint32_t layer, std::uint32_t head, const materialised_head& out) const = 0;
    virtual result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) const = 0;
    virtual result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call, std::span<float> weights) const = 0;
    virtual result<void> observe(std::uint32_t layer, const attention_rows& rows) = 0;
  };
  template <class Cache>
  struct holder final : base {
    explicit holder(Cache own) : cache(std::move(own)) {}
    const cache_shape& shape() const override { return cache.shape(); }
    std::uint64_t length(std::uint32_t layer) const override { return cache.length(layer); }
    std::uint64_t max_rollback() const override { return cache.max_rollback(); }
    std::size_t entries(std::uint32_t layer, std::uint32_t head) const override { return cache.entries(layer, head); }
    std::size_t bytes() const override { return cache.bytes(); }
    bool observes(std::uint32_t layer, std::uint64_t position) const override { return cache.observes(layer, position); }
    result<void> append(std::uint32_t layer, const layer_tensors<const bf16>& rows, std::uint64_t tokens) override { return cache.append(layer, rows, tokens); }
    result<void> truncate(std::uint64_t length) override { return cache.truncate(length); }
    result<void> materialise(std::uint32_t layer, std::uint32_t head, const materialised_head& out) const override { return cache.materialise(layer, head, out); }
    result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) const override { return cache.attend(layer, head, call); }
    result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call, std::span<float> weights) const override {
      return cache.attend(layer, head, call, weights);
    }
    result<void> observe(std::uint32_t layer, const attention_rows& rows) override { return cache.observe(layer, rows); }
    Cache cache;
  };

  std::unique_ptr<base> held_;
};

}  // namespace kvexact::examples

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <common/outcome.hpp>
#include <common/throttled_link.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

#include "engine.hpp"
#include "sequence_engine.hpp"

namespace kvexact::examples {

/// Memory for some full caches of `capacity` tokens, where they are verified.
class device_memory {
 public:
  [[nodiscard]] static outcome<device_memory> make(const engine& model, std::size_t caches, std::size_t capacity) noexcept {
    device_memory made;
    for (std::size_t i = 0; i < caches; ++i) {
      auto cache = model.make_cache(capacity);
      if (!cache) return cache.error();
      made.free_.push_back(std::make_unique<kv_cache>(*std::move(cache)));
    }
    return made;
  }
  /// Null if there is none left.
  [[nodiscard]] std::unique_ptr<kv_cache> take() noexcept {
    if (free_.empty()) return nullptr;
    auto taken = std::move(free_.back());
    free_.pop_back();
    return taken;
  }
  void give(std::unique_ptr<kv_cache> cache) noexcept { free_.push_back(std::move(cache)); }

 private:
  std::vector<std::unique_ptr<kv_cache>> free_;
};

/// The reference engine with the full cache of one sequence, which lives in a memory of its own and comes over a link, layer by layer, into
/// memory of the device to be verified. Rows that a pass appends are put back at once. Model, memory and link are the caller's, outlive
/// this object and are shared; nothing but the link has threads.
class offloaded_engine final : public linked_cache {
 public:
  using scalar = bf16;

  /// The cache is computed on the device first, which takes memory there. `patience`: for a layer.
  offloaded_engine(engine& model, std::size_t capacity, device_memory& device, throttled_link& link, std::uint64_t request,
                   std::chrono::nanoseconds patience)
      : model_(&model),
        memory_(&device),
        link_(&link),
        request_(request),
        patience_(patience),
        shape_(*detail::cache_shape_of(model.shape())),
        rotary_(model.shape().rope_base, model.shape().head_dim, capacity),
        home_(model.shape().layers) {
    for (layer_rows& each : home_) {
      each.keys.resize(capacity * model.shape().kv_width());
      each.values.resize(capacity * model.shape().kv_width());
    }
    link.add(request, *this);
  }
  ~offloaded_engine() override { link_->remove(request_); }

  [[nodiscard]] std::uint32_t vocabulary() const noexcept { return static_cast<std::uint32_t>(model_->shape().vocabulary); }
  [[nodiscard]] const cache_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return rotary_.positions(); }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return ~std::uint64_t{0}; }
  /// That `forward` has waited for the link.
  [[nodiscard]] double seconds_waited() const noexcept { return seconds_waited_; }

  result<void> forward(std::span<const std::uint32_t> tokens, std::span<float> logits) noexcept {
    if (const auto fits = detail::expect_room(tokens, logits, vocabulary(), capacity() - length_); !fits) return fits;
    if (length_ == 0 && !cache_) {
      if (const auto placed = place(); !placed) return placed;
      is_computed_ = true;
    }
    if (!cache_) return error{error_code::invalid_argument, "the full cache is not on the device"};
    auto hidden = model_->embed(tokens);
    if (!hidden) return error{hidden.error().code, "a forward pass"};
    const auto first = static_cast<std::size_t>(length_), width = model_->shape().kv_width();
    key_value_sums sums;
    for (std::size_t layer = 0; layer < model_->shape().layers; ++layer) {
      model_->keys_values(layer, *hidden, sums);
      if (const auto ready = wait(layer); !ready) return ready;
      cache_->write(layer, first, sums);
      model_->rest(layer, *hidden, first, *cache_);
    }
    model_->logits(std::span(*hidden).last(logits.size() / vocabulary() * model_->shape().width), logits);
    length_ += tokens.size();
    for (std::size_t layer = 0; layer < home_.size(); ++layer) {
      const auto at = static_cast<std::ptrdiff_t>(first * width);
      std::ranges::copy(cache_->keys(layer, first + tokens.size()).subspan(first * width), home_[layer].keys.begin() + at);
      std::ranges::copy(cache_->values(layer, first + tokens.size()).subspan(first * width), home_[layer].values.begin() + at);
    }
    return {};
  }
  /// To 0 while the cache is not on the device: it is computed there.
  result<void> truncate(std::uint64_t length) noexcept {
    if (length > length_) return error{error_code::out_of_range, "a cache cannot be truncated to more than it holds"};
    length_ = length;
    return {};
  }
  /// While the cache is on the device.
  [[nodiscard]] layer_tensors<const bf16> rows(std::uint32_t layer, std::uint64_t position) const noexcept {
    return detail::rows_from(shape_.layer(layer), cache_->keys(layer, length_), cache_->values(layer, length_), position);
  }
  /// The same, where the cache lives.
  [[nodiscard]] layer_tensors<const bf16> home_rows(std::uint32_t layer, std::uint64_t position) const noexcept {
    return detail::rows_from(shape_.layer(layer), home_[layer].keys, home_[layer].values, position);
  }

  template <class Cache>
  result<void> step(std::uint32_t token, std::uint64_t position, Cache& cache, std::span<float> logits) noexcept {
    return detail::step_outside(*model_, rotary_, token, position, cache, logits);
  }

  [[nodiscard]] std::uint32_t layers() const noexcept override { return static_cast<std::uint32_t>(home_.size()); }
  [[nodiscard]] std::uint64_t layer_bytes() const noexcept override { return loaded_ * model_->shape().kv_width() * 2 * sizeof(bf16); }
  result<void> place() noexcept override {
    cache_ = memory_->take();
    if (!cache_) return error{error_code::out_of_memory, "no memory on the device for another full cache"};
    is_computed_ = false;
    loaded_ = static_cast<std::size_t>(length_);
    return {};
  }
  void copy(std::uint32_t layer) noexcept override {
    const std::size_t size = loaded_ * model_->shape().kv_width();
    cache_->write(layer, 0, std::span(home_[layer].keys).first(size), std::span(home_[layer].values).first(size));
  }
  void free() noexcept override {
    if (cache_) memory_->give(std::move(cache_));
  }

 private:
  struct layer_rows {
    std::vector<bf16> keys, values;  // [capacity, kv_width]
  };

  [[nodiscard]] result<void> wait(std::size_t layer) noexcept {
    if (is_computed_) return {};
    const auto start = std::chrono::steady_clock::now();
    const auto ready = link_->wait(request_, static_cast<std::uint32_t>(layer), patience_);
    seconds_waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return ready;
  }

  engine* model_;
  device_memory* memory_;
  throttled_link* link_;
  std::uint64_t request_;
  std::chrono::nanoseconds patience_;
  cache_shape shape_;
  rotary_table rotary_;
  std::vector<layer_rows> home_;
  std::unique_ptr<kv_cache> cache_;  // on the device
  bool is_computed_ = false;         // there, not loaded
  std::size_t loaded_ = 0;           // tokens of the load
  std::uint64_t length_ = 0;
  double seconds_waited_ = 0;
};

static_assert(positional_decoder<offloaded_engine> && readable_cache<offloaded_engine>);

}  // namespace kvexact::examples

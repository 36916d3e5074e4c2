// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/numeric/bf16.hpp>

#include "toy_engine.hpp"

namespace kvexact::test {

/// Memory for so many full caches, where they are verified.
struct device_memory {
  std::uint32_t free = 0;
  std::uint32_t refused = 0;
};

/// A `toy_engine` whose full cache lives at home. On the device it holds garbage until `copy` brings a layer, and again after `free`.
/// `wait` is asked before the rows of a layer are read, unless they are computed there.
class offloaded_toy {
 public:
  using scalar = bf16;
  using waiting = std::function<result<void>(std::uint32_t layer)>;

  /// The cache is computed on the device first.
  offloaded_toy(toy_engine::options options, device_memory& memory, waiting wait)
      : memory_(&memory),
        device_((
            options.before_layer = [this, wait](std::uint32_t layer) { return is_computed_ ? result<void>() : wait(layer); }, options)) {
    (void)truncate(0);
  }
  offloaded_toy(const offloaded_toy&) = delete;
  offloaded_toy& operator=(const offloaded_toy&) = delete;

  [[nodiscard]] std::uint32_t vocabulary() const noexcept { return device_.vocabulary(); }
  [[nodiscard]] std::uint64_t length() const noexcept { return device_.length(); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return device_.capacity(); }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return device_.max_rollback(); }
  [[nodiscard]] const cache_shape& shape() const noexcept { return device_.shape(); }
  [[nodiscard]] layer_tensors<const bf16> rows(std::uint32_t layer, std::uint64_t position) const noexcept {
    return device_.rows(layer, position);
  }
  template <class Cache>
  result<void> step(std::uint32_t token, std::uint64_t position, Cache& cache, std::span<float> logits) noexcept {
    return device_.step(token, position, cache, logits);
  }

  result<void> forward(std::span<const std::uint32_t> tokens, std::span<float> logits) noexcept {
    const std::uint64_t before = length();
    const auto done = device_.forward(tokens, logits);
    if (!done) return done;
    for (std::uint32_t l = 0; l < toy_engine::layer_count; ++l) {
      const std::size_t first = before * toy_engine::heads * toy_engine::dim;
      const auto keys = device_.keys(l, length()).subspan(first), values = device_.values(l, length()).subspan(first);
      home_[l].keys.resize(first);
      home_[l].values.resize(first);
      home_[l].keys.insert(home_[l].keys.end(), keys.begin(), keys.end());
      home_[l].values.insert(home_[l].values.end(), values.begin(), values.end());
    }
    return done;
  }
  result<void> truncate(std::uint64_t to) noexcept {
    const auto done = device_.truncate(to);
    if (!done || to > 0) return done;
    if (!is_placed_) {
      if (const auto placed = place(); !placed) return placed;
    }
    is_computed_ = true;
    return done;
  }

  /// Takes memory on the device.
  result<void> place() noexcept {
    if (memory_->free == 0) {
      ++memory_->refused;
      return error{error_code::out_of_memory, "no memory for another full cache"};
    }
    --memory_->free;
    is_placed_ = true;
    is_computed_ = false;
    return {};
  }
  void free() noexcept {
    if (!is_placed_) return;
    ++memory_->free;
    is_placed_ = is_computed_ = false;
    for (std::uint32_t l = 0; l < toy_engine::layer_count; ++l) {
      std::ranges::fill(device_.keys(l, length()), bf16::from_float(0.5F));
      std::ranges::fill(device_.values(l, length()), bf16::from_float(0.5F));
    }
  }
  [[nodiscard]] std::uint64_t layer_bytes() const noexcept { return length() * toy_engine::heads * toy_engine::dim * 2 * sizeof(bf16); }
  /// What came home with a draft that was rejected is left behind.
  void copy(std::uint32_t layer) noexcept {
    std::ranges::copy(std::span(home_[layer].keys).first(device_.keys(layer, length()).size()), device_.keys(layer, length()).begin());
    std::ranges::copy(std::span(home_[layer].values).first(device_.values(layer, length()).size()),
                      device_.values(layer, length()).begin());
  }
  /// Whether its first rows at home are those of the other engine.
  [[nodiscard]] bool has_home_rows_of(toy_engine& other) const {
    for (std::uint32_t l = 0; l < toy_engine::layer_count; ++l) {
      const auto same = [&](const std::vector<bf16>& held, std::span<const bf16> rows) {
        return held.size() >= rows.size() && std::ranges::equal(std::span(held).first(rows.size()), rows, {}, &bf16::bits, &bf16::bits);
      };
      if (!same(home_[l].keys, other.keys(l, other.length())) || !same(home_[l].values, other.values(l, other.length()))) return false;
    }
    return true;
  }

 private:
  struct layer_rows {
    std::vector<bf16> keys, values;  // [tokens, heads, dim]
  };

  device_memory* memory_;
  bool is_placed_ = false, is_computed_ = false;
  toy_engine device_;
  std::array<layer_rows, toy_engine::layer_count> home_;
};

static_assert(positional_decoder<offloaded_toy> && readable_cache<offloaded_toy>);

}  // namespace kvexact::test

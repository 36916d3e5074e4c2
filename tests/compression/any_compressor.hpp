// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/attention.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/numeric/bf16.hpp>

#include "dropper_driver.hpp"

namespace kvexact::test {

/// Any compressor of bf16 caches, so that the conformance suite is compiled once.
class any_compressor {
 public:
  virtual ~any_compressor() = default;

  [[nodiscard]] virtual bool observes() const = 0;
  [[nodiscard]] virtual bool on_codes() const = 0;
  [[nodiscard]] virtual std::uint64_t length() const = 0;
  [[nodiscard]] virtual std::uint64_t max_rollback() const = 0;
  [[nodiscard]] virtual std::size_t entries(std::uint32_t head) const = 0;
  [[nodiscard]] virtual std::size_t bytes() const = 0;
  virtual result<void> append(const layer_tensors<const bf16>& rows, std::uint64_t tokens) = 0;
  virtual result<void> truncate(std::uint64_t length) = 0;
  virtual result<void> materialise(std::uint32_t head, const materialised_head& out) const = 0;
  virtual result<void> attend(std::uint32_t head, const attention_call& call) const = 0;
  virtual result<void> attend_materialised(std::uint32_t head, const attention_call& call) const = 0;
  virtual result<void> observe(const attention_rows& rows) = 0;
  [[nodiscard]] virtual std::vector<head_state> state() const = 0;
  /// Appends tokens of `layer` up to `length`; one by one with their attention where it is observed.
  virtual void decode(const example_layer& layer, std::uint64_t length) = 0;
};

template <layer_compressor C>
class wrapped final : public any_compressor {
 public:
  explicit wrapped(C cache) : cache_(std::move(cache)) {}

  bool observes() const override { return observes_attention<C>; }
  bool on_codes() const override { return attends_on_codes<C>; }
  std::uint64_t length() const override { return cache_.length(); }
  std::uint64_t max_rollback() const override { return cache_.max_rollback(); }
  std::size_t entries(std::uint32_t head) const override { return cache_.entries(head); }
  std::size_t bytes() const override { return cache_.bytes() - sizeof(C); }
  result<void> append(const layer_tensors<const bf16>& rows, std::uint64_t tokens) override { return cache_.append(rows, tokens); }
  result<void> truncate(std::uint64_t length) override { return cache_.truncate(length); }
  result<void> materialise(std::uint32_t head, const materialised_head& out) const override { return cache_.materialise(head, out); }
  result<void> attend(std::uint32_t head, const attention_call& call) const override { return kvexact::attend(cache_, head, call); }
  result<void> attend_materialised(std::uint32_t head, const attention_call& call) const override {
    return kvexact::attend_materialised(cache_, head, call);
  }
  result<void> observe(const attention_rows& rows) override {
    if constexpr (observes_attention<C>) {
      return cache_.observe(rows);
    } else {
      return {};
    }
  }
  std::vector<head_state> state() const override { return state_of(cache_); }
  void decode(const example_layer& layer, std::uint64_t length) override {
    if constexpr (observes_attention<C>) {
      kvexact::test::decode(cache_, layer, length);
    } else {
      if (length > cache_.length()) REQUIRE(cache_.append(layer.rows(cache_.length()), length - cache_.length()));
    }
  }

 private:
  C cache_;
};

/// A compressor of the conformance suite: how it is made for the suite's layers.
struct listed_compressor {
  std::string name;
  std::unique_ptr<any_compressor> (*make)(const layer_shape& shape, std::uint32_t query_heads);
};

/// All of them, see compressors.cpp.
const std::vector<listed_compressor>& all_compressors();

}  // namespace kvexact::test

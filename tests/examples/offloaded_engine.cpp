// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <smollm2/engine.hpp>
#include <smollm2/offloaded_engine.hpp>
#include <smollm2/sequence_engine.hpp>

#include "small_model.hpp"
#include "temporary_folder.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

/// `on_device`: else where the full cache lives.
bool has_rows_of(const offloaded_engine& engine, const sequence_engine& reference, bool on_device) {
  if (engine.length() != reference.length()) return false;
  for (std::uint32_t l = 0; l < reference.shape().layers(); ++l) {
    const auto here = on_device ? engine.rows(l, 0) : engine.home_rows(l, 0), there = reference.rows(l, 0);
    const std::size_t size = reference.length() * small_model::kv_width;
    const auto same = [size](const bf16* a, const bf16* b) {
      return std::equal(a, a + size, b, [](bf16 x, bf16 y) { return x.bits == y.bits; });
    };
    if (!same(here.key.data, there.key.data) || !same(here.value.data, there.value.data)) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("offloaded_engine: two sequences that take turns in memory for one have the bits of engines of their own") {
  const temporary_folder folder;
  REQUIRE(small_model::write_model(folder / "model"));
  auto model = engine::load(folder / "model", {.threads = 1});
  REQUIRE(model);
  constexpr std::size_t capacity = 40;
  auto device = device_memory::make(*model, 1, capacity);
  REQUIRE(device);
  throttled_link link(1e8);
  std::array<std::unique_ptr<offloaded_engine>, 2> engines;
  std::vector<sequence_engine> references;
  std::vector<float> logits(3 * small_model::vocabulary), expected(logits);
  const auto ids = small_model::some_tokens(40);
  for (std::uint64_t i = 0; i < 2; ++i) {
    engines[i] = std::make_unique<offloaded_engine>(*model, capacity, *device, link, i, std::chrono::seconds(60));
    references.push_back(*sequence_engine::make(*model, capacity));
    const auto prompt = std::span(ids).subspan(i, 17 + i);
    REQUIRE(engines[i]->forward(prompt, {}));
    REQUIRE(references[i].forward(prompt, {}));
    CHECK(has_rows_of(*engines[i], references[i], true));
    link.release(i);
  }
  CHECK(engines[0]->forward(std::span(ids).first(1), {}).error().code == error_code::invalid_argument);
  std::uint64_t bytes = 0;
  for (std::uint32_t round = 0; round < 3; ++round) {
    for (std::uint64_t i = 0; i < 2; ++i) {
      CAPTURE(round);
      REQUIRE(link.start(i, round));
      CHECK(link.start(1 - i, round).error().code == error_code::out_of_memory);
      bytes += engines[i]->length() * small_model::layers * small_model::kv_width * 2 * sizeof(bf16);
      const auto block = std::span(ids).subspan(5 * round + i, 3);
      REQUIRE(engines[i]->forward(block, logits));
      REQUIRE(references[i].forward(block, expected));
      CHECK(logits == expected);
      // The last row is taken back.
      REQUIRE(engines[i]->truncate(engines[i]->length() - 1));
      REQUIRE(references[i].truncate(references[i].length() - 1));
      CHECK(has_rows_of(*engines[i], references[i], true));
      CHECK(has_rows_of(*engines[i], references[i], false));
      link.release(i);
    }
  }
  CHECK(link.moved().bytes == bytes);
  // Without the link: computed again.
  const auto all = std::span(ids).first(20);
  for (std::uint64_t i = 0; i < 2; ++i) {
    REQUIRE(engines[i]->truncate(0));
    REQUIRE(references[i].truncate(0));
    REQUIRE(engines[i]->forward(all, logits));
    REQUIRE(references[i].forward(all, expected));
    CHECK(logits == expected);
    CHECK(has_rows_of(*engines[i], references[i], false));
    link.release(i);
  }
  CHECK(link.moved().bytes == bytes);
}

// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <smollm2/engine.hpp>
#include <smollm2/generation.hpp>
#include <smollm2/sequence_batch.hpp>
#include <smollm2/sequence_engine.hpp>

#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/compression/quantised.hpp>
#include <kvexact/compression/symmetric.hpp>

#include "small_model.hpp"
#include "temporary_folder.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

using int4 = draft_cache<quantised<bf16, symmetric<4>, symmetric<4>>>;

request prompt_of(std::uint32_t i) {
  request wanted;
  const auto ids = small_model::some_tokens(40);
  wanted.prompt.assign(ids.begin() + i, ids.begin() + 3 + 5 * i);
  wanted.max_tokens = 10 + 7 * i;
  wanted.sampling.temperature = 0;
  return wanted;
}

outcome<generated> speculate(sequence_engine& target, std::uint32_t length, const request& wanted) {
  auto cache = int4::make(target.shape(), {{.keys = {32}, .values = {32}, .tail = 24}});
  REQUIRE(cache);
  return decode(target, model_drafter(compressed_model(target, *std::move(cache))), greedy(), fixed_draft_length(length), wanted, false);
}

}  // namespace

TEST_CASE("sequences decoded together, each with drafts, have the tokens and rows of plain decoding alone") {
  const temporary_folder folder;
  REQUIRE(small_model::write_model(folder / "model"));
  auto model = engine::load(folder / "model", {.threads = 1});
  REQUIRE(model);
  sequence_batch batch(*model);
  constexpr std::uint32_t sequences = 4;
  std::vector<sequence_engine> together;
  for (std::uint32_t i = 0; i < sequences; ++i) together.push_back(*sequence_engine::make(*model, 96, &batch));
  std::vector<std::optional<generated>> found(sequences);
  std::vector<std::thread> threads;
  batch.expect(sequences);
  for (std::uint32_t i = 0; i < sequences; ++i) {
    threads.emplace_back([&, i] {
      if (auto made = speculate(together[i], i + 1, prompt_of(i))) found[i] = *std::move(made);
      batch.leave();
    });
  }
  for (std::thread& each : threads) each.join();

  for (std::uint32_t i = 0; i < sequences; ++i) {
    auto alone = sequence_engine::make(*model, 96);
    REQUIRE(alone);
    const auto expected = decode(*alone, no_drafter(), greedy(), fixed_draft_length(0), prompt_of(i), false);
    REQUIRE(expected);
    REQUIRE(found[i]);
    CHECK(found[i]->tokens == expected->tokens);
    CHECK(found[i]->rounds < expected->rounds);
    CHECK(equal_rows(together[i], *alone));
  }
}

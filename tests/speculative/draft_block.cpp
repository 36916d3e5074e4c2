// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/draft_block.hpp>

using namespace kvexact;

TEST_CASE("draft_block: keeps tokens and what they were drawn from") {
  auto made = draft_block::make(3, 2);
  REQUIRE(made);
  draft_block block = std::move(*made);
  CHECK(block.capacity() == 3);

  // In its own memory, elsewhere, and a point.
  std::ranges::copy(std::vector<float>{1, 3}, block.next_row().begin());
  REQUIRE(block.push(1, *distribution::dense(block.next_row())));
  std::vector<float> elsewhere{1, 1};
  REQUIRE(block.push(0, *distribution::dense(elsewhere)));
  elsewhere = {0, 1};
  REQUIRE(block.push(9, distribution::point(9)));

  const draft_block moved = std::move(block);
  const draft_view drafts = moved.view();
  CHECK(std::ranges::equal(drafts.tokens, std::vector<token_id>{1, 0, 9}));
  REQUIRE(drafts.distributions.size() == 3);
  CHECK(drafts.distributions[0].mass(1) == 0.75);
  CHECK(drafts.distributions[1].mass(0) == 0.5);
  CHECK(drafts.distributions[2].is_point());
}

TEST_CASE("draft_block: no room, another vocabulary, points only") {
  auto block = draft_block::make(1, 2);
  REQUIRE(block);
  CHECK(block->push(0, *distribution::dense(std::vector<float>{1, 1, 1})).error().code == error_code::invalid_argument);
  CHECK(block->size() == 0);
  REQUIRE(block->push(0, distribution::point(0)));
  CHECK(block->push(0, distribution::point(0)).error().code == error_code::invalid_argument);
  CHECK(block->next_row().empty());
  block->clear();
  CHECK(block->size() == 0);
  CHECK(block->next_row().size() == 2);

  auto points = draft_block::make(2, 0);
  REQUIRE(points);
  REQUIRE(points->push(5, distribution::point(5)));
  CHECK(points->view().tokens[0] == 5);
}

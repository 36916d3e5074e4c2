// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/counter_random.hpp>
#include <kvexact/speculative/token_counts.hpp>

using namespace kvexact;

TEST_CASE("token_counts: the newest tokens, against a count of them all") {
  for (const std::size_t window : {0U, 1U, 2U, 5U, 64U}) {
    token_counts counts(window);
    std::vector<token_id> all;
    for (std::uint64_t i = 0; i < 200; ++i) {
      all.push_back(static_cast<token_id>(6 * counter_random(window).uniform(i, {})));
      REQUIRE(counts.add(all.back()));
      std::map<token_id, std::uint32_t> expected;
      const std::size_t seen = window == 0 ? all.size() : std::min(window, all.size());
      for (std::size_t k = all.size() - seen; k < all.size(); ++k) ++expected[all[k]];
      REQUIRE(std::ranges::equal(counts.entries(), expected, [](const auto& entry, const auto& pair) {
        return entry.token == pair.first && entry.count == pair.second;
      }));
    }
  }
}

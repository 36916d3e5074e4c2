// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/tensor/rotation_table.hpp>

using namespace kvexact;

namespace {

bool same(integer_rotation a, integer_rotation b) { return a.cosine == b.cosine && a.sine == b.sine; }

}  // namespace

TEST_CASE("rotation_table: the turn of every pair at every token, and nothing else") {
  constexpr integer_rotation guard{7, 8};
  const auto rotation = *rotary::from_base(rotary_pairing::half_split, 6, 10000.0);
  for (const index_range tokens : {index_range{0, 32}, index_range{5, 38},
                                   index_range{(std::uint64_t{1} << 40) - 3, (std::uint64_t{1} << 40) + 9}, index_range{9, 9}}) {
    constexpr std::size_t stride = 40;
    std::vector<integer_rotation> memory(3 * stride + 5, guard);
    const rotation_table table(rotation, tokens, stride, memory);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      for (std::size_t t = 0; t < stride; ++t) {
        const bool inside = t < tokens.size();
        wrong += !same(table[i][t], inside ? rotation_by_turns((tokens.begin + t) * rotation.turns()[i]) : guard);
      }
    }
    for (std::size_t i = 3 * stride; i < memory.size(); ++i) wrong += !same(memory[i], guard);
    CHECK(wrong == 0);
  }
}

TEST_CASE("rotation_table: keys that are not rotated need no memory") {
  const rotation_table table(rotary(), {0, 100}, 128, {});
  (void)table;
}

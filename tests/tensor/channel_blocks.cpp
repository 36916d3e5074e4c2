// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/tensor/channel_blocks.hpp>

using namespace kvexact;

namespace {

rotary rotation_of(rotary_pairing pairing, std::uint32_t dim) {
  return pairing == rotary_pairing::none ? rotary() : *rotary::from_base(pairing, dim, 10000.0);
}

std::vector<std::vector<std::uint32_t>> channels_of(std::span<const channel_block> blocks) {
  std::vector<std::vector<std::uint32_t>> all;
  for (const channel_block& block : blocks) {
    all.emplace_back();
    for (std::uint32_t i = 0; i < block.count; ++i) all.back().push_back(block.channel(i));
  }
  return all;
}

using numbers = std::vector<std::vector<std::uint32_t>>;

}  // namespace

TEST_CASE("channel_blocks: some tiles, written out") {
  const auto cut = [](std::uint32_t heads, std::uint32_t dim, cache_part part, const rotary& rotation, std::uint32_t size) {
    return channels_of(cut_into_blocks(heads, dim, part, rotation, size));
  };
  const rotary none;
  const rotary interleaved = rotation_of(rotary_pairing::interleaved, 4);
  const rotary half_split = rotation_of(rotary_pairing::half_split, 4);
  CHECK(cut(2, 3, cache_part::value, none, 0) == numbers{{0, 1, 2, 3, 4, 5}});
  CHECK(cut(2, 3, cache_part::value, none, 3) == numbers{{0, 1, 2}, {3, 4, 5}});
  CHECK(cut(2, 3, cache_part::value, none, 100) == numbers{{0, 1, 2}, {3, 4, 5}});
  CHECK(cut(2, 3, cache_part::value, none, 2) == numbers{{0, 1}, {2}, {3, 4}, {5}});
  CHECK(cut(1, 3, cache_part::value, none, 1) == numbers{{0}, {1}, {2}});
  // Values are not rotated.
  CHECK(cut(1, 5, cache_part::value, half_split, 2) == numbers{{0, 1}, {2, 3}, {4}});
  CHECK(cut(1, 5, cache_part::key, interleaved, 2) == numbers{{0, 1}, {2, 3}, {4}});
  CHECK(cut(1, 5, cache_part::key, half_split, 2) == numbers{{0, 2}, {1, 3}, {4}});
  CHECK(cut(2, 5, cache_part::key, half_split, 1) == numbers{{0, 2}, {1, 3}, {4}, {5, 7}, {6, 8}, {9}});
  CHECK(cut(1, 7, cache_part::key, half_split, 4) == numbers{{0, 1, 2, 3}, {4, 5, 6}});
  CHECK(cut(1, 5, cache_part::key, half_split, 5) == numbers{{0, 1, 2, 3, 4}});
  CHECK(cut(1, 9, cache_part::key, rotation_of(rotary_pairing::half_split, 6), 5) == numbers{{0, 1, 3, 4}, {2, 5}, {6, 7, 8}});
}

TEST_CASE("channel_blocks: every channel once, heads and pairs together, in blocks no larger than asked for") {
  for (const rotary_pairing pairing : {rotary_pairing::none, rotary_pairing::interleaved, rotary_pairing::half_split}) {
    for (std::uint32_t dim = 1; dim <= 13; ++dim) {
      for (std::uint32_t rotated = pairing == rotary_pairing::none ? 0 : 2; rotated <= (pairing == rotary_pairing::none ? 0 : dim);
           rotated += 2) {
        const rotary rotation = rotated == 0 ? rotary() : rotation_of(pairing, rotated);
        for (const std::uint32_t size : {0U, 1U, 2U, 3U, 4U, 5U, 8U, 12U, 13U, 14U, 0xffffffffU}) {
          for (const cache_part part : cache_parts) {
            for (const std::uint32_t heads : {1U, 3U}) {
              const auto blocks = cut_into_blocks(heads, dim, part, rotation, size);
              std::vector<std::uint32_t> block_of(heads * dim, ~0U);
              std::uint32_t coded = 0;
              std::size_t wrong = 0;
              for (std::uint32_t b = 0; b < blocks.size(); ++b) {
                const channel_block& block = blocks[b];
                wrong += block.first != coded || block.count == 0;
                wrong += size > 0 && block.count > std::max(size, part == cache_part::key && rotated > 0 ? 2U : 1U);
                std::uint32_t in_runs = 0;
                for (const channel_run& run : block.runs()) {
                  wrong += run.count == 0;
                  for (std::uint32_t i = 0; i < run.count; ++i, ++in_runs) wrong += block.channel(in_runs) != run.first + i;
                }
                wrong += in_runs != block.count;
                for (std::uint32_t i = 0; i < block.count; ++i) {
                  const std::uint32_t c = block.channel(i);
                  REQUIRE(c < block_of.size());
                  wrong += block_of[c] != ~0U;
                  block_of[c] = b;
                  wrong += size > 0 && c / dim != block.head;
                }
                coded += block.count;
              }
              wrong += coded != heads * dim;
              wrong += size == 0 && blocks.size() != 1;
              for (std::uint32_t i = 0; part == cache_part::key && i < rotated / 2; ++i) {
                const auto [a, b] = rotation.pair(i);
                for (std::uint32_t h = 0; h < heads; ++h) wrong += block_of[h * dim + a] != block_of[h * dim + b];
              }
              if (wrong != 0) FAIL(wrong, " wrong for dim ", dim, " rotated ", rotated, " size ", size, " heads ", heads);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("channel_blocks: a whole tile") {
  const channel_block block = whole_tile(17);
  CHECK(block.first == 0);
  CHECK(block.count == 17);
  CHECK(block.runs().size() == 1);
  CHECK(block.channel(16) == 16);
}

// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/core/workspace.hpp>

using namespace kvexact;

namespace {

struct arrays {
  std::span<std::uint8_t> bytes;
  std::span<std::uint64_t> words;
  std::span<double> numbers;
  std::span<std::uint16_t> nothing;
};

arrays carve(workspace& from) {
  arrays all;
  all.bytes = from.take<std::uint8_t>(3);
  all.words = from.take<std::uint64_t>(70);
  all.nothing = from.take<std::uint16_t>(0);
  all.numbers = from.take<double>(8);
  return all;
}

bool is_aligned(const void* at) { return reinterpret_cast<std::uintptr_t>(at) % workspace::alignment == 0; }

}  // namespace

TEST_CASE("workspace: counting needs no memory") {
  workspace counter;
  const arrays none = carve(counter);
  CHECK(none.bytes.empty());
  CHECK(none.words.empty());
  CHECK(none.numbers.empty());
  CHECK(counter.needed() == 64 + 576 + 0 + 64 + workspace::alignment);

  workspace empty_span{std::span<std::byte>{}};
  static_cast<void>(carve(empty_span));
  CHECK(empty_span.needed() == counter.needed());
}

TEST_CASE("workspace: what it says it needs is enough wherever the memory starts") {
  workspace counter;
  static_cast<void>(carve(counter));
  const std::size_t needed = counter.needed();
  for (std::size_t start = 0; start < 2 * workspace::alignment; ++start) {
    CAPTURE(start);
    std::vector<std::byte> memory(start + needed + 64, std::byte{0x5a});
    workspace space{std::span(memory).subspan(start, needed)};
    const arrays all = carve(space);
    REQUIRE(all.bytes.size() == 3);
    REQUIRE(all.words.size() == 70);
    REQUIRE(all.numbers.size() == 8);
    CHECK(space.needed() == needed);
    CHECK(is_aligned(all.bytes.data()));
    CHECK(is_aligned(all.words.data()));
    CHECK(is_aligned(all.numbers.data()));
    // Inside the memory and apart from each other.
    const auto* const begin = memory.data() + start;
    CHECK(reinterpret_cast<std::byte*>(all.bytes.data()) >= begin);
    CHECK(reinterpret_cast<std::byte*>(all.bytes.data() + 3) <= reinterpret_cast<std::byte*>(all.words.data()));
    CHECK(reinterpret_cast<std::byte*>(all.words.data() + 70) <= reinterpret_cast<std::byte*>(all.numbers.data()));
    CHECK(reinterpret_cast<std::byte*>(all.numbers.data() + 8) <= begin + needed);
    for (auto& each : all.words) each = ~std::uint64_t{0};
    bool intact = true;
    for (std::size_t i = 0; i < start; ++i) intact = intact && memory[i] == std::byte{0x5a};
    for (std::size_t i = start + needed; i < memory.size(); ++i) intact = intact && memory[i] == std::byte{0x5a};
    CHECK(intact);
  }
}

TEST_CASE("workspace: too little memory gives empty arrays and still counts") {
  workspace counter;
  static_cast<void>(carve(counter));
  alignas(workspace::alignment) std::byte memory[1024];
  for (std::size_t size = 0; size < 64 + 576 + 64; ++size) {
    workspace space{std::span(memory).first(size)};
    const arrays all = carve(space);
    CHECK(all.bytes.size() == (size >= 64 ? 3 : 0));
    CHECK(all.words.size() == (size >= 64 + 576 ? 70 : 0));
    CHECK(space.needed() == counter.needed());
  }
}

TEST_CASE("workspace: counts that overflow give empty arrays") {
  alignas(workspace::alignment) std::byte memory[1024];
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const std::size_t count : {most, most - 62, most / 2, most / 8, most / 8 + 1, most / 8 + 2, most / 4 + 1, most / 2 + 1}) {
    CAPTURE(count);
    workspace space(memory);
    CHECK(space.take<std::uint64_t>(count).empty());
    CHECK(space.take<std::uint64_t>(count).empty());
    CHECK(space.needed() > sizeof memory);
    workspace bytes(memory);
    CHECK(bytes.take<std::uint8_t>(count).empty());
    CHECK(bytes.needed() > sizeof memory);
  }
}

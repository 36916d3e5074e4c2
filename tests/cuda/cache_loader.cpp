// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/cuda/cache_loader.cuh>
#include <kvexact/speculative/cache_loader.hpp>

#include "fake_device.hpp"

using namespace kvexact;
using namespace kvexact::test;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t layers = 4;
constexpr std::size_t key_bytes = 24, value_bytes = 8, layer_bytes = key_bytes + value_bytes, cache_bytes = layers * layer_bytes;
constexpr std::byte unused{0xee};

/// Device memory for two caches, and full caches of requests 1, 2 and 3 in host memory. Memory that is free holds `unused`.
class two_slots {
 public:
  two_slots() {
    for (std::uint64_t request = 1; request <= 3; ++request)
      for (std::size_t i = 0; i < cache_bytes; ++i) host[request].push_back(static_cast<std::byte>(request * 71 + i));
    for (auto& slot : device) slot.fill(unused);
  }
  result<std::span<const cuda::cache_piece>> place(std::uint64_t request) noexcept {
    const auto slot = std::ranges::find(holders, 0U);
    if (slot == holders.end()) return error{error_code::out_of_memory, "no free slot"};
    *slot = request;
    CHECK(is_unused(slot_of(request)));
    std::vector<cuda::cache_piece>& made = pieces[request];
    made.clear();
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      const std::size_t at = layer * layer_bytes;
      made.push_back({layer, host[request].data() + at, slot_of(request).data() + at, key_bytes});
      made.push_back({layer, host[request].data() + at + key_bytes, slot_of(request).data() + at + key_bytes, value_bytes});
    }
    if (reversed) std::ranges::reverse(made);
    return std::span<const cuda::cache_piece>(made);
  }
  void free(std::uint64_t request) noexcept {
    if (!holds(request)) return;
    slot_of(request).fill(unused);
    *std::ranges::find(holders, request) = 0;
  }
  [[nodiscard]] bool holds(std::uint64_t request) const { return std::ranges::count(holders, request) == 1; }
  [[nodiscard]] std::array<std::byte, cache_bytes>& slot_of(std::uint64_t request) {
    REQUIRE(holds(request));
    return device[static_cast<std::size_t>(std::ranges::find(holders, request) - holders.begin())];
  }
  [[nodiscard]] bool has_layers(std::uint64_t request, std::uint32_t first, std::uint32_t last) {
    const auto range = [&](auto& cache) { return std::span(cache).subspan(first * layer_bytes, (last - first) * layer_bytes); };
    return std::ranges::equal(range(slot_of(request)), range(host[request]));
  }
  [[nodiscard]] static bool is_unused(std::span<const std::byte> memory) {
    return std::ranges::all_of(memory, [](std::byte each) { return each == unused; });
  }
  [[nodiscard]] bool all_free() const { return std::ranges::count(holders, 0U) == 2 && is_unused(device[0]) && is_unused(device[1]); }

  std::map<std::uint64_t, std::vector<std::byte>> host;
  std::map<std::uint64_t, std::vector<cuda::cache_piece>> pieces;
  std::array<std::array<std::byte, cache_bytes>, 2> device;
  std::array<std::uint64_t, 2> holders{};
  bool reversed = false;
};

using loader_type = cuda::basic_cache_loader<two_slots, fake_runtime>;
static_assert(cache_loader<loader_type>);

struct loading {
  explicit loading(std::uint64_t ahead) {
    auto made = loader_type::make(slots, ahead, runtime);
    REQUIRE(made);
    loader.emplace(*std::move(made));
  }
  /// Layers that are known to be there.
  [[nodiscard]] std::uint32_t there(std::uint64_t request) {
    std::uint32_t count = 0;
    while (count < layers && loader->wait(request, count, 0ns)) ++count;
    return count;
  }

  fake_device device;
  fake_runtime runtime{&device};
  fake_device::stream* compute = *runtime.make_stream();
  two_slots slots;
  std::optional<loader_type> loader;
};

void check_error(const result<void>& got, error_code code) {
  REQUIRE(!got);
  CHECK(got.error().code == code);
}

constexpr std::uint64_t all_at_once = std::numeric_limits<std::uint64_t>::max();

}  // namespace

TEST_CASE("cache_loader: layer by layer, and no more than ahead is queued") {
  for (const std::uint64_t ahead : {std::uint64_t{1}, std::uint64_t{layer_bytes}, std::uint64_t{2 * layer_bytes}, all_at_once}) {
    CAPTURE(ahead);
    const std::size_t most = ahead == 2 * layer_bytes ? 2 : ahead == all_at_once ? layers : 1;
    loading with(ahead);
    REQUIRE(with.loader->start(1, 1));
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      CHECK(with.there(1) == layer);
      CHECK(*with.loader->left(1) == (layers - layer) * layer_bytes);
      CHECK(with.device.live_events() == static_cast<std::ptrdiff_t>(std::min<std::size_t>(most, layers - layer)));
      with.device.advance(1);
      CHECK(with.there(1) == layer);
      with.device.advance(1);
      CHECK(with.there(1) == layer + 1);
      CHECK(with.slots.has_layers(1, 0, layer + 1));
    }
    CHECK(*with.loader->left(1) == 0);
    CHECK(with.device.live_events() == 0);
    with.loader->release(1);
    CHECK(with.slots.all_free());
  }
}

TEST_CASE("cache_loader: a wait ends when its layer is there, or with its time") {
  loading with(1);
  REQUIRE(with.loader->start(1, 1));
  check_error(with.loader->wait(1, 2, 0ns), error_code::timed_out);
  check_error(with.loader->wait(1, 2, -1s), error_code::timed_out);
  check_error(with.loader->wait(1, 2, 1us), error_code::timed_out);
  with.device.copies_per_query = 1;
  CHECK(with.loader->wait(1, 2, 1h));
  CHECK(with.slots.has_layers(1, 0, 3));
  CHECK(*with.loader->left(1) == layer_bytes);
  CHECK(with.loader->wait(1, 0, 0ns));
}

TEST_CASE("cache_loader: requests in the order in which they are started") {
  loading with(1);
  REQUIRE(with.loader->start(2, 1));
  REQUIRE(with.loader->start(1, 1));
  with.device.copies_per_query = 1;
  CHECK(with.loader->wait(1, layers - 1, 1h));
  CHECK(with.there(2) == layers);
  CHECK(with.slots.has_layers(1, 0, layers));
  CHECK(with.slots.has_layers(2, 0, layers));
  std::vector<const std::byte*> expected;
  for (const std::uint64_t request : {2U, 1U})
    for (const cuda::cache_piece& each : with.slots.pieces[request]) expected.push_back(each.device);
  CHECK(with.device.copied_to == expected);
}

TEST_CASE("cache_loader: a stream waits in the host's place") {
  loading with(1);
  auto* const compute = with.compute;
  REQUIRE(with.loader->start(2, 1));
  REQUIRE(with.loader->start(1, 1));
  // What kernels would read, on a stream that is served before the copies.
  std::array<std::byte, cache_bytes> read{};
  REQUIRE(with.loader->queue_wait(compute, 1, 1));
  REQUIRE(with.runtime.copy(read.data(), with.slots.slot_of(1).data(), 2 * layer_bytes, compute));
  const auto queued = with.device.live_events();
  CHECK(queued == layers + 2);  // all of request 2, two layers of request 1
  REQUIRE(with.loader->queue_wait(compute, 1, 0));
  CHECK(with.device.live_events() == queued);
  REQUIRE(with.loader->queue_wait(compute, 1, layers - 1));
  REQUIRE(with.runtime.copy(read.data() + 2 * layer_bytes, with.slots.slot_of(1).data() + 2 * layer_bytes, 2 * layer_bytes, compute));
  with.device.advance(2 * layers + 3);
  CHECK(compute->queued.size() == 5);  // wait, copy, wait, wait, copy
  with.device.finish();
  CHECK(compute->queued.empty());
  CHECK(std::ranges::equal(read, with.slots.host[1]));
  CHECK(with.there(1) == layers);
  const auto calls = with.device.calls;
  CHECK(with.loader->queue_wait(compute, 1, layers - 1));
  CHECK(with.device.calls == calls);
}

TEST_CASE("cache_loader: nothing writes to memory that was released") {
  for (std::size_t copies = 0; copies < 2 * layers * 2; ++copies) {
    loading with((1 + copies % 2) * layer_bytes);
    CAPTURE(copies);
    REQUIRE(with.loader->start(1, 1));
    REQUIRE(with.loader->start(2, 1));
    for (std::size_t i = 0; i < copies / 2; ++i) {
      with.device.advance(1);
      CHECK(with.loader->left(1));
    }
    with.loader->release(1);
    CHECK(!with.slots.holds(1));
    CHECK(with.device.live_events() > 0);  // of request 2
    with.loader->release(1);
    check_error(with.loader->wait(1, 0, 0ns), error_code::out_of_range);
    with.device.finish();
    REQUIRE(with.loader->start(3, 1));  // where request 1 was, which must be unused
    with.device.copies_per_query = 1;
    CHECK(with.loader->wait(3, layers - 1, 1h));
    CHECK(with.slots.has_layers(2, 0, layers));
    CHECK(with.slots.has_layers(3, 0, layers));
  }
}

TEST_CASE("cache_loader: a load that is there is released without a wait") {
  loading with(all_at_once);
  REQUIRE(with.loader->start(1, 1));
  with.device.finish();
  REQUIRE(with.loader->start(2, 1));
  with.loader->release(1);
  CHECK(!with.slots.holds(1));
  CHECK(*with.loader->left(2) == cache_bytes);
}

TEST_CASE("cache_loader: memory of a cache that was computed there is freed, too") {
  loading with(all_at_once);
  REQUIRE(with.slots.place(1));
  with.loader->release(1);
  CHECK(with.slots.all_free());
  with.loader->release(1);
}

TEST_CASE("cache_loader: a new attempt takes the place of the one before") {
  loading with(all_at_once);
  REQUIRE(with.loader->start(1, 1));
  with.device.advance(3);
  REQUIRE(with.loader->start(1, 2));
  CHECK(*with.loader->left(1) == cache_bytes);
  with.device.finish();
  CHECK(*with.loader->left(1) == 0);
  CHECK(with.slots.has_layers(1, 0, layers));
  with.loader->release(1);
  CHECK(with.slots.all_free());
}

TEST_CASE("cache_loader: what cannot be loaded") {
  loading with(1);
  auto* const compute = with.compute;
  check_error(with.loader->wait(1, 0, 0ns), error_code::out_of_range);
  check_error(with.loader->queue_wait(compute, 1, 0), error_code::out_of_range);
  CHECK(with.loader->left(1).error().code == error_code::out_of_range);
  CHECK(with.loader->stored(1, 0ns));
  with.loader->release(1);

  with.slots.reversed = true;
  check_error(with.loader->start(1, 1), error_code::invalid_argument);
  CHECK(with.slots.all_free());
  with.slots.reversed = false;

  REQUIRE(with.loader->start(1, 1));
  REQUIRE(with.loader->start(2, 1));
  check_error(with.loader->start(3, 1), error_code::out_of_memory);
  check_error(with.loader->wait(3, 0, 0ns), error_code::out_of_range);
}

TEST_CASE("cache_loader: rows go back when they are computed") {
  loading with(1);
  auto* const compute = *with.runtime.make_stream();  // served after the copies
  std::vector<std::byte> rows(6, std::byte{1});
  std::array<std::byte, 6> host{};
  const std::array<cuda::cache_piece, 2> pieces{{{0, host.data(), rows.data(), 2}, {1, host.data() + 2, rows.data() + 2, 4}}};
  const std::array<std::byte, 6> computed{std::byte{5}, std::byte{6}, std::byte{7}, std::byte{8}, std::byte{9}, std::byte{10}};

  REQUIRE(with.runtime.copy(rows.data(), computed.data(), 6, compute));
  REQUIRE(with.loader->store(7, pieces, compute));
  with.device.advance(0);
  check_error(with.loader->stored(7, 0ns), error_code::timed_out);
  with.device.advance(2);
  CHECK(rows.front() == computed.front());
  check_error(with.loader->stored(7, 1us), error_code::timed_out);
  CHECK(with.loader->stored(8, 0ns));
  with.device.copies_per_query = 1;
  CHECK(with.loader->stored(7, 1h));
  CHECK(host == computed);
  CHECK(with.device.live_events() == 0);

  // A release waits for them.
  with.device.copies_per_query = 0;
  host = {};
  REQUIRE(with.loader->store(7, pieces, compute));
  REQUIRE(with.loader->store(8, pieces, compute));
  with.loader->release(7);
  CHECK(host == computed);
  CHECK(with.loader->stored(8, 0ns));

  // Also where they have failed: before the second copy, and when they are asked for.
  host = {};
  with.device.fails = with.device.calls + 4;
  check_error(with.loader->store(7, pieces, compute), error_code::device_error);
  CHECK(with.loader->stored(7, 0ns));
  with.loader->release(7);
  CHECK(host.front() == computed.front());
  host = {};
  REQUIRE(with.loader->store(7, pieces, compute));
  with.device.fails = with.device.calls;
  check_error(with.loader->stored(7, 1h), error_code::device_error);
  CHECK(with.loader->stored(7, 0ns));
  with.loader->release(7);
  CHECK(host == computed);
}

TEST_CASE("cache_loader: memory is kept until the device says that it is done") {
  loading with(1);
  REQUIRE(with.loader->start(1, 1));
  with.device.advance(1);
  with.device.fails = with.device.calls + 1;  // a query, then the synchronisation
  with.loader->release(1);
  CHECK(with.slots.holds(1));
  with.device.finish();
  check_error(with.loader->wait(1, 0, 0ns), error_code::device_error);
  CHECK(with.loader->left(1).error().code == error_code::device_error);
  CHECK(with.device.live_events() == 0);  // the next layer is not queued
  with.device.fails = with.device.calls;
  check_error(with.loader->start(1, 2), error_code::device_error);
  CHECK(with.slots.holds(1));
  REQUIRE(with.loader->start(1, 3));
  with.device.copies_per_query = 1;
  CHECK(with.loader->wait(1, layers - 1, 1h));
  CHECK(with.slots.has_layers(1, 0, layers));
}

TEST_CASE("cache_loader: its end waits for what is queued and frees the memory") {
  for (const bool lost : {false, true}) {
    loading with(1);
    auto moved = std::make_unique<loader_type>(*std::move(with.loader));
    with.loader.reset();
    REQUIRE(moved->start(1, 1));
    REQUIRE(moved->start(2, 1));
    with.device.fails = lost ? with.device.calls : with.device.fails;
    with.device.lost = lost;
    moved.reset();
    CHECK(with.device.live_events() == 0);
    CHECK(with.device.live_streams() == 1);
    with.device.finish();
    CHECK(with.slots.holds(1) == lost);
    CHECK(with.slots.all_free() == !lost);
  }
}

TEST_CASE("cache_loader: an error at any call of the runtime") {
  for (const bool lost : {false, true}) {
    bool failed = true;
    for (std::size_t fails = 0; failed; ++fails) {
      CAPTURE(fails);
      CAPTURE(lost);
      fake_device device;
      const fake_runtime runtime{&device};
      auto* const compute = *runtime.make_stream();
      two_slots slots;
      device.copies_per_query = 1;
      device.fails = fails + device.calls;
      device.lost = lost;
      std::vector<std::byte> back(cache_bytes);
      int errors = 0;
      const auto succeeds = [&](const result<void>& got) {
        if (got) return true;
        CHECK(got.error().code == error_code::device_error);
        ++errors;
        return false;
      };
      {
        auto loader = loader_type::make(slots, layer_bytes, runtime);
        if (!loader) {
          CHECK(loader.error().code == error_code::device_error);
          CHECK(device.live_streams() == 1);
          continue;
        }
        // As a schedule has them: started one after another, tried again after an error.
        for (const std::uint64_t request : {1U, 2U})
          if (!succeeds(loader->start(request, 1))) loader->release(request);
        for (const std::uint64_t request : {1U, 2U}) {
          const auto is_there = [&] {
            return succeeds(loader->queue_wait(compute, request, 1)) && succeeds(loader->wait(request, layers - 1, 1h));
          };
          bool there = slots.holds(request) && is_there();
          for (std::uint32_t attempt = 2; !there && attempt < 4; ++attempt) {
            loader->release(request);
            there = succeeds(loader->start(request, attempt)) && is_there();
          }
          CHECK((there || lost));
          if (there) CHECK(slots.has_layers(request, 0, layers));
        }
        std::vector<cuda::cache_piece> rows = slots.pieces[1];
        for (cuda::cache_piece& each : rows) each.host = back.data() + (each.host - slots.host[1].data());
        bool stored = false;
        for (int attempt = 0; !stored && attempt < 2; ++attempt)
          stored = succeeds(loader->store(1, rows, compute)) && succeeds(loader->stored(1, 1h));
        CHECK((stored || lost));
        if (stored) CHECK(back == slots.host[1]);
        for (const std::uint64_t request : {1U, 2U, 1U, 2U}) loader->release(request);
        CHECK((slots.all_free() || lost));
      }
      CHECK(device.live_events() == 0);
      CHECK(device.live_streams() == 1);
      CHECK((errors <= 1 || lost));
      device.finish();
      CHECK((slots.all_free() || lost));
      failed = device.calls > device.fails;
    }
  }
}

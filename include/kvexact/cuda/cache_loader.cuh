// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/cuda/copy_runtime.cuh>
#include <kvexact/speculative/cache_loader.hpp>

namespace kvexact::cuda {

/// Bytes of a layer that are contiguous on both sides. Host memory is pinned (cudaHostAlloc, cudaHostRegister): copies of other memory are
/// right, too, but block the caller. A piece costs a call of the runtime, so small ones do not fill a link.
struct cache_piece {
  std::uint32_t layer = 0;
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  std::size_t bytes = 0;
};

/// What an engine knows of its full caches: where they are, and what device memory is free.
///
/// - `place(request)`: finds device memory for the request's full cache. The pieces to load, layer by layer from the first; they and their
///   bytes in host memory stay as they are until `free`. Whatever else used the device memory is done with it.
/// - `free(request)`: the loader does not use the request's memory any more; nothing where the request has none.
template <class P>
concept cache_placement = requires(P& placement, std::uint64_t request) {
  { placement.place(request) } noexcept -> std::same_as<result<std::span<const cache_piece>>>;
  { placement.free(request) } noexcept;
};

/// Brings full caches from host memory to a device, in the order in which they are started, while kernels run, and new rows back.
///
///   start(request, attempt)               when the schedule says so
///   left(request)                         now and then: it also gives the link more to do
///   queue_wait(compute, request, layer)   before each layer's kernels of a verification
///   store(request, rows, compute)         behind them: the rows that it has committed
///   stored(request, limit)                before release(request)
///
/// A copy that is queued cannot be recalled, so layers are queued only until `ahead` bytes are under way; the longest wait in `release` is
/// for these. One thread calls at a time; the device that is current in it is the one that was current in `make`.
template <cache_placement Placement, copy_runtime Runtime>
class basic_cache_loader {
 public:
  using stream = typename Runtime::stream;

  /// `ahead`: bytes, about what crosses the link from one call to the next; a layer that is larger is queued alone. `placement` must outlive
  /// the loader. Errors: device_error.
  [[nodiscard]] static result<basic_cache_loader> make(Placement& placement, std::uint64_t ahead, const Runtime& runtime = {}) noexcept {
    auto to_device = own(runtime, runtime.make_stream());
    if (!to_device) return to_device.error();
    auto to_host = own(runtime, runtime.make_stream());
    if (!to_host) return to_host.error();
    return basic_cache_loader(placement, ahead, runtime, *std::move(to_device), *std::move(to_host));
  }

  basic_cache_loader(basic_cache_loader&&) noexcept = default;
  basic_cache_loader& operator=(basic_cache_loader&&) = delete;
  /// Waits for what is queued.
  ~basic_cache_loader() {
    if (to_device_ == nullptr) return;
    const bool loaded{runtime_.synchronise(to_device_.get())}, stored{runtime_.synchronise(to_host_.get())};
    if (!loaded || !stored) return;
    for (const load& each : loads_) placement_->free(each.request);
  }

  /// What was not released of the request is given up before. Errors: those of `place`, invalid_argument (its pieces), out_of_memory,
  /// device_error (also where memory is kept as `release` says).
  result<void> start(std::uint64_t request, std::uint32_t) noexcept {
    if (const auto given_up = give_up(request); !given_up) return given_up;
    const auto placed = placement_->place(request);
    if (!placed) return placed.error();
    const auto added = add(request, *placed);
    if (!added) placement_->free(request);
    advance();
    return added;
  }

  /// Until the layer and those before it are on the device. Errors: timed_out, out_of_range (no such load), device_error, out_of_memory.
  result<void> wait(std::uint64_t request, std::uint32_t layer, std::chrono::nanoseconds limit) noexcept {
    return poll(limit, [&]() noexcept -> result<bool> {
      advance();
      const load* const of = find(request);
      if (of == nullptr) return no_load();
      if (of->is_past(of->arrived, layer)) return true;
      if (of->failure) return *of->failure;
      return false;
    });
  }

  /// What is queued on `compute` from now on waits for the layer and those before it; the host does not. Queues them, and whatever was
  /// started before them, even beyond `ahead`. Errors: those of `wait` but timed_out.
  result<void> queue_wait(stream compute, std::uint64_t request, std::uint32_t layer) noexcept {
    advance();
    load* const of = find(request);
    if (of == nullptr) return no_load();
    queue(of, layer);
    if (of->is_past(of->arrived, layer)) return {};
    if (of->failure) return *of->failure;
    const auto last = std::ranges::find_if(in_flight_.rbegin(), in_flight_.rend(),
                                           [&](const copied_layer& each) { return each.request == request && each.layer <= layer; });
    return runtime_.wait(compute, last->done.get());
  }

  /// In bytes, whole layers. Errors: out_of_range (no such load), device_error, out_of_memory.
  result<std::uint64_t> left(std::uint64_t request) noexcept {
    advance();
    const load* const of = find(request);
    if (of == nullptr) return no_load();
    if (of->failure) return *of->failure;
    return of->left;
  }

  /// Kernels that read the memory must be done, as they are when the host has the tokens that they gave. If the runtime fails to tell that
  /// copies are done, the memory is not given back; `release` and `start` ask again.
  void release(std::uint64_t request) noexcept {
    const bool is_loaded = find(request) != nullptr;
    if (give_up(request) && !is_loaded) placement_->free(request);  // a cache that was computed there
    advance();
  }

  /// Copies rows from the device to the host once all that is on `compute` by now is done. Both memories must stay until `stored` says that
  /// they are there, or until `release`, which waits for them, too. Errors: out_of_memory, device_error; then some may be under way.
  result<void> store(std::uint64_t request, std::span<const cache_piece> rows, stream compute) noexcept {
    try {
      stores_.push_back({request, nullptr});
    } catch (...) {
      return error{error_code::out_of_memory, "a store of rows"};
    }
    auto done = own(runtime_, runtime_.make_event());
    if (!done) return done.error();
    if (const auto recorded = runtime_.record(done->get(), compute); !recorded) return recorded;
    if (const auto queued = runtime_.wait(to_host_.get(), done->get()); !queued) return queued;
    for (const cache_piece& each : rows)
      if (const auto queued = runtime_.copy(each.host, each.device, each.bytes, to_host_.get()); !queued) return queued;
    if (const auto recorded = runtime_.record(done->get(), to_host_.get()); !recorded) return recorded;
    stores_.back().done = *std::move(done);
    return {};
  }
  /// Until what `store` took of the request is in host memory. Errors: timed_out, device_error (told once: store those rows again).
  result<void> stored(std::uint64_t request, std::chrono::nanoseconds limit) noexcept {
    return poll(limit, [&]() noexcept -> result<bool> {
      for (auto each = stores_.begin(); each != stores_.end();) {
        if (each->request != request || each->done == nullptr) {
          ++each;
          continue;
        }
        const auto done = runtime_.query(each->done.get());
        if (!done) {
          each->done.reset();
          return done.error();
        }
        if (!*done) return false;
        each = stores_.erase(each);
      }
      return true;
    });
  }

 private:
  using event_handle = owned_handle<Runtime, typename Runtime::event>;
  using stream_handle = owned_handle<Runtime, stream>;
  struct load {
    std::uint64_t request;
    std::span<const cache_piece> pieces;
    std::uint64_t left;
    std::size_t queued = 0;   // pieces
    std::size_t arrived = 0;  // pieces, as far as asked
    std::optional<error> failure{};

    [[nodiscard]] bool is_past(std::size_t piece, std::uint32_t layer) const noexcept {
      return piece == pieces.size() || pieces[piece].layer > layer;
    }
  };
  struct copied_layer {
    std::uint64_t request;
    std::uint32_t layer;
    std::size_t pieces;
    std::uint64_t bytes;
    event_handle done;
  };
  // Without an event: one that has failed, of which some may be under way.
  struct store_event {
    std::uint64_t request;
    event_handle done;
  };

  basic_cache_loader(Placement& placement, std::uint64_t ahead, const Runtime& runtime, stream_handle to_device,
                     stream_handle to_host) noexcept
      : placement_(&placement), ahead_(ahead), runtime_(runtime), to_device_(std::move(to_device)), to_host_(std::move(to_host)) {}

  template <class Handle>
  [[nodiscard]] static result<owned_handle<Runtime, Handle>> own(const Runtime& runtime, const result<Handle>& made) noexcept {
    if (!made) return made.error();
    return owned_handle<Runtime, Handle>(*made, {runtime});
  }
  [[nodiscard]] static std::uint64_t bytes_of(std::span<const cache_piece> pieces) noexcept {
    std::uint64_t sum = 0;
    for (const cache_piece& each : pieces) sum += each.bytes;
    return sum;
  }
  [[nodiscard]] static error no_load() noexcept { return {error_code::out_of_range, "no load of this request was started"}; }
  template <class Check>
  [[nodiscard]] static result<void> poll(std::chrono::nanoseconds limit, const Check& check) noexcept {
    for (const auto begin = std::chrono::steady_clock::now();;) {
      const result<bool> done = check();
      if (!done) return done.error();
      if (*done) return {};
      if (std::chrono::steady_clock::now() - begin >= limit) return error{error_code::timed_out, "copies are still under way"};
      std::this_thread::yield();
    }
  }

  [[nodiscard]] load* find(std::uint64_t request) noexcept {
    const auto found = std::ranges::find(loads_, request, &load::request);
    return found == loads_.end() ? nullptr : &*found;
  }
  result<void> add(std::uint64_t request, std::span<const cache_piece> pieces) noexcept {
    if (!std::ranges::is_sorted(pieces, {}, &cache_piece::layer))
      return error{error_code::invalid_argument, "pieces of a cache come layer by layer"};
    try {
      loads_.push_back({request, pieces, bytes_of(pieces)});
    } catch (...) {
      return error{error_code::out_of_memory, "a load of a cache"};
    }
    return {};
  }
  /// When it succeeds, nothing of the request is under way any more, and the loader does not know it.
  result<void> give_up(std::uint64_t request) noexcept {
    collect();
    load* const of = find(request);
    result<void> done;
    if (of != nullptr && (of->failure || of->arrived < of->queued)) done = runtime_.synchronise(to_device_.get());
    if (done && std::ranges::find(stores_, request, &store_event::request) != stores_.end()) done = runtime_.synchronise(to_host_.get());
    if (!done) {
      if (of != nullptr) of->failure = done.error();
      return done;
    }
    std::erase_if(in_flight_, [&](const copied_layer& each) { return each.request == request; });
    std::erase_if(stores_, [&](const store_event& each) { return each.request == request; });
    if (of != nullptr) {
      loads_.erase(loads_.begin() + (of - loads_.data()));
      placement_->free(request);
    }
    return {};
  }

  void advance() noexcept {
    collect();
    queue(nullptr, 0);
  }
  /// Takes note of the layers that have arrived.
  void collect() noexcept {
    while (!in_flight_.empty()) {
      const copied_layer& first = in_flight_.front();
      const auto done = runtime_.query(first.done.get());
      if (done && !*done) return;
      load& of = *find(first.request);
      if (!done && !of.failure) of.failure = done.error().at_layer(first.layer);
      if (!of.failure) {
        of.arrived += first.pieces;
        of.left -= first.bytes;
      }
      in_flight_.erase(in_flight_.begin());
    }
  }
  /// Queues layers while no more than `ahead` bytes are under way, but at least one, and what `urgent` needs for its layer.
  void queue(const load* urgent, std::uint32_t layer) noexcept {
    std::uint64_t under_way = 0;
    for (const copied_layer& each : in_flight_) under_way += each.bytes;
    for (load& of : loads_) {
      while (!of.failure && of.queued < of.pieces.size()) {
        const auto rest = of.pieces.subspan(of.queued);
        const auto end = std::ranges::upper_bound(rest, rest.front().layer, {}, &cache_piece::layer);
        const auto pieces = rest.first(static_cast<std::size_t>(end - rest.begin()));
        const std::uint64_t bytes = bytes_of(pieces);
        const bool needed = urgent != nullptr && !urgent->failure && !urgent->is_past(urgent->queued, layer);
        if (!needed && under_way > 0 && under_way + bytes > ahead_) return;
        if (const auto queued = queue_layer(of.request, pieces, bytes); !queued) of.failure = queued.error().at_layer(rest.front().layer);
        of.queued += pieces.size();
        under_way += bytes;
      }
    }
  }
  result<void> queue_layer(std::uint64_t request, std::span<const cache_piece> pieces, std::uint64_t bytes) noexcept {
    try {
      in_flight_.reserve(in_flight_.size() + 1);
    } catch (...) {
      return error{error_code::out_of_memory, "a load of a cache"};
    }
    auto done = own(runtime_, runtime_.make_event());
    if (!done) return done.error();
    for (const cache_piece& each : pieces)
      if (const auto copied = runtime_.copy(each.device, each.host, each.bytes, to_device_.get()); !copied) return copied;
    if (const auto recorded = runtime_.record(done->get(), to_device_.get()); !recorded) return recorded;
    in_flight_.push_back({request, pieces.front().layer, pieces.size(), bytes, *std::move(done)});
    return {};
  }

  Placement* placement_;
  std::uint64_t ahead_;
  [[no_unique_address]] Runtime runtime_;
  stream_handle to_device_;
  stream_handle to_host_;
  std::vector<load> loads_;              // in the order in which they were started
  std::vector<copied_layer> in_flight_;  // in the order of their stream
  std::vector<store_event> stores_;
};

#ifdef __CUDACC__
template <cache_placement Placement>
using cache_loader = basic_cache_loader<Placement, cuda_runtime>;
#endif

}  // namespace kvexact::cuda

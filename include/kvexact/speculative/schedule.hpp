// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/reservation_ring.hpp>

namespace kvexact {

/// Of the device and its link, all in bytes.
struct schedule_options {
  std::uint64_t link = 0;            ///< that cross the link in an iteration
  std::uint64_t transient = 0;       ///< of device memory for full caches
  std::uint64_t resident = 0;        ///< of device memory for draft caches
  std::uint32_t horizon = 1024;      ///< iterations that can be planned ahead
  std::uint32_t max_requests = 256;  ///< admitted and waiting
  std::uint32_t patience = 8;        ///< iterations in which a late load, and all that are served before it, may stand still
  std::uint32_t retries = 2;         ///< of a load, in one round
};

/// Drafts that the next round should have, and may have at most.
struct draft_lengths {
  std::uint32_t wanted = 0;
  std::uint32_t most = 0;
};

/// A request, with what its caches take at its greatest length, in bytes, and what a load moves over the link.
struct scheduled_request {
  std::uint64_t id = 0;
  std::uint64_t full = 0;
  std::uint64_t draft = 0;
  std::uint64_t transfer = 0;
  draft_lengths lengths = {};
};

/// What an iteration does. A request is in at most one of `verify`, `draft` and `plain`, and in none while it waits.
struct iteration_plan {
  struct load {
    std::uint64_t id;
    std::uint32_t attempt;  ///< names the load in events, and is no other load's; loads are served in the order in which they are started
  };
  struct verification {
    std::uint64_t id;
    std::uint32_t drafts;
  };
  struct plain_step {
    std::uint64_t id;
    bool recompute;  ///< the full cache could not be loaded: drafts are void, compute it again from the committed tokens, and keep it
  };
  std::span<const load> stop;            ///< loads to give up, before anything else uses their memory
  std::span<const load> start;           ///< loads of full caches
  std::span<const verification> verify;  ///< with the full cache, whose last bytes may be on the link: wait for them by layer
  std::span<const std::uint64_t> draft;  ///< one more token each
  std::span<const plain_step> plain;     ///< one committed token each, on a full cache that stays on the device
};

/// Which requests of a batch draft and which verify, and when full caches are loaded, so that verifications are staggered and loads hide
/// behind the drafting of others. A state machine without clock, threads or tokens: events go in, plans come out, the same for the same
/// events.
///
///   submit(request) ...                      at any time
///   plan = begin_iteration()                 then the engine runs it
///   load_progress / load_failed              at any time
///   settle(id, next lengths)                 for each verification and each plain step that gave its tokens
///   end_iteration()                          a verification not settled has failed; its drafts stay
///   remove(id)                               at any time: finished or cancelled
///
/// A round's load and verification are booked when it begins: the iteration nearest to the wanted draft length in which the link and the
/// memory are free. Where a load is late, others give way; where it fails or stands still for longer than `patience`, it is booked again,
/// and after `retries` the request decodes plainly on a cache that is computed again. With a wanted length of 0 a request keeps the full
/// cache after a verification while there is room, and decodes plainly.
class offload_schedule {
 public:
  // A copy would not have the room that is reserved once and for all.
  offload_schedule(offload_schedule&&) noexcept = default;
  offload_schedule& operator=(offload_schedule&&) noexcept = default;

  /// Errors: invalid_argument, out_of_memory.
  [[nodiscard]] static result<offload_schedule> make(const schedule_options& options) noexcept {
    if (options.link == 0 || options.max_requests == 0)
      return error{error_code::invalid_argument, "a schedule needs a link and at least one request"};
    auto link = reservation_ring::make(options.link, options.horizon);
    if (!link) return link.error();
    auto memory = reservation_ring::make(options.transient, options.horizon);
    if (!memory) return memory.error();
    offload_schedule made(options, *std::move(link), *std::move(memory));
    try {
      made.entries_.reserve(options.max_requests);
      made.stop_.reserve(2 * std::size_t{options.max_requests});
      made.given_stop_.reserve(2 * std::size_t{options.max_requests});
      made.start_.reserve(options.max_requests);
      made.verify_.reserve(options.max_requests);
      made.draft_.reserve(options.max_requests);
      made.plain_.reserve(options.max_requests);
    } catch (...) {
      return error{error_code::out_of_memory, "a schedule"};
    }
    return made;
  }

  /// Requests are admitted in the order in which they come, as soon as the draft cache has room. Errors: invalid_argument (the id is in
  /// use), out_of_range (it could never run, or there are too many).
  result<void> submit(const scheduled_request& request) noexcept {
    if (find(request.id) != nullptr) return error{error_code::invalid_argument, "a request with this id is scheduled"};
    if (entries_.size() == options_.max_requests) return error{error_code::out_of_range, "as many requests as the schedule can have"};
    if (request.draft > options_.resident || request.full > options_.transient ||
        (request.transfer > 0 && (request.transfer - 1) / options_.link >= options_.horizon))
      return error{error_code::out_of_range, "a request that fits neither the memory nor the link"};
    entry added;
    added.request = request;
    begin_round(added, request.lengths);
    entries_.push_back(added);
    return {};
  }

  /// Spans are valid until the next call of it.
  [[nodiscard]] iteration_plan begin_iteration() noexcept {
    given_stop_.swap(stop_);
    stop_.clear();
    start_.clear();
    verify_.clear();
    draft_.clear();
    plain_.clear();
    admit();
    for (entry& each : entries_) each.settled = false;
    for (entry& each : entries_) keep_late(each);
    for (entry& each : entries_) plan(each);
    inside_ = true;
    return {given_stop_, start_, verify_, draft_, plain_};
  }

  /// How many bytes of a load are still to come; 0: the full cache is there. Of a load that was given up, it is ignored, as all below.
  void load_progress(std::uint64_t id, std::uint32_t attempt, std::uint64_t left) noexcept {
    entry* const of = loading(id, attempt);
    if (of == nullptr || left >= of->left) return;
    of->left = left;
    for (entry& each : entries_)
      if (each.load == transfer::running && each.order >= of->order) each.moved = memory_.begin();
  }
  void load_failed(std::uint64_t id, std::uint32_t attempt) noexcept {
    if (entry* const of = loading(id, attempt)) fail(*of);
  }

  /// The verification or plain step of this iteration has given its tokens. Errors: out_of_range (there was none).
  result<void> settle(std::uint64_t id, const draft_lengths& next) noexcept {
    entry* const of = find(id);
    if (of == nullptr || !inside_ || of->settled || !(of->state == phase::verifying || holds(*of)))
      return error{error_code::out_of_range, "nothing to settle for this request in this iteration"};
    bool keep = next.wanted == 0;
    if (of->state == phase::verifying) {
      if (keep) {
        of->first = memory_.hold(of->request.full);
        keep = of->first != memory_.end() && of->first <= next_slot();
        if (!keep && of->first != memory_.end()) memory_.end_hold(of->first, of->first, of->request.full);
      }
    } else if (!keep) {
      memory_.end_hold(of->first, next_slot(), of->request.full);
    }
    begin_round(*of, next);
    of->state = keep ? phase::plain : phase::drafting;
    of->settled = true;
    return {};
  }
  /// The drafter has ended this round early; the load stays where it is booked.
  void stop_drafting(std::uint64_t id) noexcept {
    if (entry* const of = find(id)) of->lengths.most = std::min(of->lengths.most, of->drafted);
  }
  void end_iteration() noexcept {
    for (entry& each : entries_) {
      if (each.state != phase::verifying) continue;
      if (each.left > 0) stop_.push_back({each.request.id, each.attempt});  // its load is still on the link
      fail(each);
    }
    inside_ = false;
    link_.advance();
    memory_.advance();
  }
  /// Finished or cancelled: nothing is planned for it any more. Its load, if one is under way, is in `stop` of the next plan. Errors:
  /// out_of_range (no such request).
  result<void> remove(std::uint64_t id) noexcept {
    entry* const of = find(id);
    if (of == nullptr) return error{error_code::out_of_range, "no request with this id is scheduled"};
    if (of->load == transfer::running && of->left > 0) stop_.push_back({id, of->attempt});
    cancel_load(*of);
    if (of->state == phase::plain || of->state == phase::recomputing) memory_.end_hold(of->first, next_slot(), of->request.full);
    if (of->state != phase::waiting) resident_ -= of->request.draft;
    entries_.erase(entries_.begin() + (of - entries_.data()));
    return {};
  }

  /// Whether the request's full cache stays on the device after this iteration; else the engine frees it once it has verified.
  [[nodiscard]] bool keeps(std::uint64_t id) const noexcept {
    return std::ranges::any_of(entries_, [&](const entry& each) { return each.request.id == id && each.state == phase::plain; });
  }
  [[nodiscard]] const reservation_ring& link() const noexcept { return link_; }
  [[nodiscard]] const reservation_ring& memory() const noexcept { return memory_; }
  /// Bytes of draft caches admitted.
  [[nodiscard]] std::uint64_t resident() const noexcept { return resident_; }
  [[nodiscard]] std::size_t requests() const noexcept { return entries_.size(); }
  [[nodiscard]] std::size_t admitted() const noexcept {
    return static_cast<std::size_t>(std::ranges::count_if(entries_, [](const entry& each) { return each.state != phase::waiting; }));
  }

 private:
  enum class phase : std::uint8_t { waiting, drafting, verifying, failed, recomputing, plain };
  enum class transfer : std::uint8_t { none, booked, running };
  struct entry {
    scheduled_request request;
    draft_lengths lengths;
    std::uint32_t drafted = 0;
    std::uint32_t failures = 0;  // of loads in this round
    std::uint32_t attempt = 0;
    phase state = phase::waiting;
    transfer load = transfer::none;
    bool settled = false;          // in this iteration
    std::uint64_t first = 0;       // slot of the load, or of memory that is held
    std::uint64_t last = 0;        // slot of the verification
    std::uint64_t end = 0;         // of memory reserved for the load
    std::uint64_t first_link = 0;  // bytes in the first slot; those between are whole
    std::uint64_t last_link = 0;
    std::uint64_t left = 0;   // bytes of the load
    std::uint64_t order = 0;  // in which it was started
    std::uint64_t moved = 0;  // slot in which it, or one served before it, last did
  };

  offload_schedule(const schedule_options& options, reservation_ring link, reservation_ring memory) noexcept
      : options_(options), link_(std::move(link)), memory_(std::move(memory)) {}

  [[nodiscard]] entry* find(std::uint64_t id) noexcept {
    const auto found = std::ranges::find_if(entries_, [&](const entry& each) { return each.request.id == id; });
    return found == entries_.end() ? nullptr : &*found;
  }
  [[nodiscard]] entry* loading(std::uint64_t id, std::uint32_t attempt) noexcept {
    entry* const of = find(id);
    return of != nullptr && of->load == transfer::running && of->attempt == attempt ? of : nullptr;
  }
  /// The first slot whose reservations can still change.
  [[nodiscard]] std::uint64_t next_slot() const noexcept { return memory_.begin() + (inside_ ? 1 : 0); }

  void begin_round(entry& of, const draft_lengths& lengths) noexcept {
    of.lengths = {lengths.wanted, std::max(lengths.wanted, lengths.most)};
    of.drafted = 0;
    of.failures = 0;
    of.load = transfer::none;
  }
  void admit() noexcept {
    for (entry& each : entries_) {
      if (each.state != phase::waiting) continue;
      if (options_.resident - resident_ < each.request.draft) return;
      resident_ += each.request.draft;
      each.state = phase::drafting;
    }
  }
  /// Gives back what is booked from the next slot on.
  void cancel_load(entry& of) noexcept {
    if (of.load == transfer::none) return;
    const std::uint64_t from = next_slot();
    memory_.release(std::max(of.first, from), of.end, of.request.full);
    if (of.first >= from) link_.release(of.first, of.first + 1, of.first_link);
    link_.release(std::max(of.first + 1, from), of.last, link_.capacity());
    if (of.last > of.first && of.last >= from) link_.release(of.last, of.last + 1, of.last_link);
    of.load = transfer::none;
  }
  void fail(entry& of) noexcept {
    cancel_load(of);
    of.state = ++of.failures > options_.retries ? phase::failed : phase::drafting;
  }

  /// Memory for one more slot of a load that should have been done, or an end to it.
  void keep_late(entry& of) noexcept {
    const std::uint64_t now = memory_.begin();
    if (of.load != transfer::running || of.end > now) return;
    if (now > std::max(of.last, of.moved) + options_.patience) {
      given_stop_.push_back({of.request.id, of.attempt});
      fail(of);
      return;
    }
    // What is under way fitted into the slot before, so it fits where everything gives way that would begin now.
    while (!memory_.reserve(now, now + 1, of.request.full)) {
      const auto other = std::ranges::find_if(entries_, [&](const entry& each) {
        return each.first == now && (each.load == transfer::booked || each.state == phase::recomputing);
      });
      if (other->load == transfer::booked) {
        cancel_load(*other);
      } else {
        memory_.end_hold(now, now, other->request.full);
        other->state = phase::failed;
      }
    }
    of.end = now + 1;
  }
  void plan(entry& of) noexcept {
    const std::uint64_t now = memory_.begin();
    if (of.state == phase::failed) {
      of.first = memory_.hold(of.request.full);
      if (of.first != memory_.end()) of.state = phase::recomputing;
    }
    if (holds(of)) plain_.push_back({of.request.id, of.state == phase::recomputing});
    if (of.state != phase::drafting) return;
    if (of.load == transfer::none) book(of);
    if (of.load == transfer::booked && of.first == now) {
      of.load = transfer::running;
      of.left = of.request.transfer;
      of.order = ++started_;
      of.attempt = static_cast<std::uint32_t>(of.order);
      start_.push_back({of.request.id, of.attempt});
    }
    if (of.load == transfer::running && now >= of.last && of.left <= link_.capacity()) {
      of.state = phase::verifying;
      verify_.push_back({of.request.id, of.drafted});
    } else if (of.drafted < of.lengths.most) {
      ++of.drafted;
      draft_.push_back(of.request.id);
    }
  }
  [[nodiscard]] bool holds(const entry& of) const noexcept {
    return of.state == phase::plain || (of.state == phase::recomputing && of.first <= memory_.begin());
  }
  /// The iteration nearest to the wanted draft length, the earlier of two, but not before half of it; none if nothing is free.
  void book(entry& of) noexcept {
    const std::uint64_t now = memory_.begin();
    const std::uint32_t half = (of.lengths.wanted + 1) / 2;
    const std::uint64_t target = std::min(now + of.lengths.wanted - std::min(of.drafted, of.lengths.wanted), memory_.end() - 1);
    const std::uint64_t earliest = std::min(now + half - std::min(of.drafted, half), target);
    for (std::uint64_t far = 0; earliest + far <= target || target + far < memory_.end(); ++far) {
      if (earliest + far <= target && reserve_load(of, target - far)) return;
      if (far > 0 && target + far < memory_.end() && reserve_load(of, target + far)) return;
    }
  }
  /// A load that ends in the slot of its verification, without a gap: whatever was booked before it is served before it.
  [[nodiscard]] bool reserve_load(entry& of, std::uint64_t last) noexcept {
    std::uint64_t left = of.request.transfer;
    std::uint64_t taken = std::min(link_.free(last), left);
    std::uint64_t first = last;
    const std::uint64_t last_link = taken;
    if (taken == 0 && left > 0) return false;
    while ((left -= taken) > 0) {
      if (first == link_.begin()) return false;
      taken = std::min(link_.capacity(), left);
      if (link_.free(--first) < taken) return false;
    }
    if (!memory_.reserve(first, last + 1, of.request.full)) return false;
    of.first = first;
    of.last = last;
    of.end = last + 1;
    of.first_link = taken;
    of.last_link = last_link;
    of.load = transfer::booked;
    (void)link_.reserve(first, first + 1, taken);
    (void)link_.reserve(std::min(first + 1, last), last, link_.capacity());
    if (last > first) (void)link_.reserve(last, last + 1, last_link);
    return true;
  }

  schedule_options options_;
  reservation_ring link_;
  reservation_ring memory_;
  std::vector<entry> entries_;  // in the order in which they came
  std::uint64_t resident_ = 0;
  std::uint64_t started_ = 0;  // loads
  bool inside_ = false;        // an iteration
  std::vector<iteration_plan::load> stop_;
  std::vector<iteration_plan::load> given_stop_;
  std::vector<iteration_plan::load> start_;
  std::vector<iteration_plan::verification> verify_;
  std::vector<std::uint64_t> draft_;
  std::vector<iteration_plan::plain_step> plain_;
};

}  // namespace kvexact

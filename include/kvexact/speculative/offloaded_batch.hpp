// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/speculative/cache_loader.hpp>
#include <kvexact/speculative/schedule.hpp>
#include <kvexact/speculative/speculative_decoder.hpp>

namespace kvexact {

/// What happened to a sequence in an iteration.
struct batch_event {
  std::uint64_t id = 0;
  // One of both.
  std::optional<round_report> round = {};  ///< that it has committed
  std::optional<error> failure = {};       ///< of a load, the drafter or a verification, which is tried again or done without
  bool left = false;                       ///< the sequence has left the batch: it has ended, or could not go on
};

/// Decodes many sequences whose full caches live elsewhere and are brought to the engine only to be verified: does what an
/// `offload_schedule` plans. `Decoder` is a `speculative_decoder`. The sequences have the tokens that each would have alone, whatever
/// becomes of loads and drafts.
///
///   decoder.begin(prompt), loader.release(id), submit(decoder, ...)     for each sequence, at any time between iterations
///   while (batch.size() > 0) for (const batch_event& each : batch.iterate()) ...
///
/// Between them stands the engine of a sequence, which knows the loader and its request:
///
/// - `forward` waits for the rows of each layer with `loader.wait` before it reads them, and ends with the error of that; the verification
///   is then tried again with another load. It also puts the rows that it appends where the full cache lives; once `loader.release` has
///   been called, they must be there.
/// - The rows can be read until `loader.release`. Verification, truncation and the drafter's `synchronise` come before it.
/// - `truncate(0)`, where no load is under way, is a full cache that could not be loaded: `forward` computes it again and waits for
///   nothing, and `loader.release` frees its memory like that of a load.
///
/// A sequence whose plain steps fail more than `retries` times in a row (the engine's cache is full, or cannot be computed again since
/// `max_rollback` is too small) leaves the batch, with the tokens that it has; it could be submitted again.
///
/// Engines whose rows depend on the width (D4) may have other rows, and then tokens, where a full cache is computed again.
template <class Decoder, cache_loader Loader>
class offloaded_batch {
 public:
  /// `loader` outlives the batch. Errors: those of offload_schedule::make, out_of_memory.
  [[nodiscard]] static result<offloaded_batch> make(Loader& loader, const schedule_options& options) noexcept {
    auto schedule = offload_schedule::make(options);
    if (!schedule) return schedule.error();
    offloaded_batch made(loader, *std::move(schedule), options.retries);
    try {
      made.sequences_.reserve(options.max_requests);
      made.events_.reserve(4 * std::size_t{options.max_requests});
    } catch (...) {
      return error{error_code::out_of_memory, "a batch"};
    }
    return made;
  }

  // The room for events is reserved once and for all.
  offloaded_batch(offloaded_batch&&) noexcept = default;
  offloaded_batch& operator=(offloaded_batch&&) = delete;
  /// Gives up the loads that are under way.
  ~offloaded_batch() {
    for (const sequence& each : sequences_) loader_->release(each.id);
  }

  /// A sequence that has begun, with nothing of its full cache on the device. It stays where it is, and is left alone, until it has ended
  /// or was cancelled. The draft lengths of `request` are not read, the decoder's policy says them. Errors: those of
  /// offload_schedule::submit; invalid_argument (not begun, ended).
  result<void> submit(Decoder& decoder, scheduled_request request) noexcept {
    if (decoder.tokens().empty() || decoder.stop())
      return error{error_code::invalid_argument, "a sequence that has not begun, or has ended"};
    request.lengths = next_lengths(decoder);
    const auto done = schedule_.submit(request);
    if (done) sequences_.push_back({request.id, &decoder});
    return done;
  }
  /// Between rounds; the decoder has the tokens committed so far. Errors: out_of_range (no such sequence).
  result<void> cancel(std::uint64_t id) noexcept {
    const auto done = schedule_.remove(id);
    if (!done) return done;
    loader_->release(id);
    std::erase_if(sequences_, [&](const sequence& each) { return each.id == id; });
    return done;
  }

  /// One iteration of the schedule. Valid until the next one. If every sequence waits for a load (`is_idle`), it ends at once: the caller
  /// then lets the time of an ordinary one pass, since the schedule counts in iterations.
  [[nodiscard]] std::span<const batch_event> iterate() noexcept {
    events_.clear();
    for (sequence& each : sequences_) follow_load(each);
    const iteration_plan plan = schedule_.begin_iteration();
    for (const auto& each : plan.stop) {
      sequence* const of = find(each.id);
      if (of == nullptr || of->load != each.attempt) continue;
      release(*of);
      note_failure(*of, {error_code::timed_out, "a load that stood still"});
    }
    for (const auto& each : plan.start) start_load(*find(each.id), each.attempt);
    // Loads proceed meanwhile, so what needs them comes last.
    for (const std::uint64_t id : plan.draft) draft(*find(id));
    for (const auto& each : plan.plain) {
      sequence& of = *find(each.id);
      const auto ready = each.recompute ? of.decoder->forget_rows() : result<void>();
      if (const auto done = ready ? verify(of) : ready; !done) fail_plain(of, done.error());
    }
    for (const auto& each : plan.verify) {
      sequence& of = *find(each.id);
      if (!of.load) continue;  // it could not even be started
      if (const auto done = verify(of); !done) {
        release(of);
        note_failure(of, done.error());
      }
    }
    is_idle_ = plan.draft.empty() && plan.plain.empty() && plan.verify.empty();
    schedule_.end_iteration();
    std::erase_if(sequences_, [](const sequence& each) { return each.has_left; });
    return events_;
  }

  /// Whether the last iteration had nothing to run.
  [[nodiscard]] bool is_idle() const noexcept { return is_idle_; }
  /// Sequences that have not ended.
  [[nodiscard]] std::size_t size() const noexcept { return sequences_.size(); }
  [[nodiscard]] const offload_schedule& schedule() const noexcept { return schedule_; }

 private:
  struct sequence {
    std::uint64_t id;
    Decoder* decoder;
    std::optional<std::uint32_t> load = {};  // the attempt whose rows are on the device or come there
    std::uint32_t failed_steps = 0;          // plain ones, in a row
    bool has_left = false;
  };

  offloaded_batch(Loader& loader, offload_schedule schedule, std::uint32_t retries) noexcept
      : loader_(&loader), schedule_(std::move(schedule)), retries_(retries) {}

  [[nodiscard]] sequence* find(std::uint64_t id) noexcept {
    const auto found = std::ranges::find(sequences_, id, &sequence::id);
    return found == sequences_.end() ? nullptr : &*found;
  }
  [[nodiscard]] static draft_lengths next_lengths(Decoder& decoder) noexcept {
    const std::uint32_t most = decoder.most_drafts(), wanted = std::min(most, decoder.length_policy().next(most));
    return {wanted, std::min(most, wanted + wanted / 2)};
  }
  void note_failure(const sequence& of, const error& failure) noexcept { events_.push_back({.id = of.id, .failure = failure}); }
  void release(sequence& of) noexcept {
    loader_->release(of.id);
    of.load.reset();
  }
  void leave(sequence& of) noexcept {
    (void)schedule_.remove(of.id);
    release(of);
    of.has_left = true;
    events_.back().left = true;
  }
  void fail_plain(sequence& of, const error& failure) noexcept {
    note_failure(of, failure);
    if (of.failed_steps++ == retries_) leave(of);
  }
  void fail_load(sequence& of, std::uint32_t attempt, const error& failure) noexcept {
    release(of);
    schedule_.load_failed(of.id, attempt);
    note_failure(of, failure);
  }

  void follow_load(sequence& of) noexcept {
    if (!of.load) return;
    const auto left = loader_->left(of.id);
    if (!left) return fail_load(of, *of.load, left.error());
    schedule_.load_progress(of.id, *of.load, *left);
  }
  void start_load(sequence& of, std::uint32_t attempt) noexcept {
    const auto started = loader_->start(of.id, attempt);
    if (!started) return fail_load(of, attempt, started.error());
    of.load = attempt;
  }
  void draft(sequence& of) noexcept {
    const std::size_t before = of.decoder->drafted();
    const auto done = of.decoder->draft(1);
    if (!done) note_failure(of, done.error());
    if (!done || of.decoder->drafted() <= before) schedule_.stop_drafting(of.id);
  }
  /// With the full cache, which leaves the device afterwards unless it is to stay.
  [[nodiscard]] result<void> verify(sequence& of) noexcept {
    const auto report = of.decoder->verify();
    if (!report) return report.error();
    events_.push_back({.id = of.id, .round = *report});
    of.failed_steps = 0;
    if (report->stop) {
      leave(of);
      return {};
    }
    if (const auto synchronised = of.decoder->synchronise(); !synchronised) note_failure(of, synchronised.error());
    (void)schedule_.settle(of.id, next_lengths(*of.decoder));
    if (!schedule_.keeps(of.id)) release(of);
    of.load.reset();
    return {};
  }

  Loader* loader_;
  offload_schedule schedule_;
  std::uint32_t retries_;
  std::vector<sequence> sequences_;
  std::vector<batch_event> events_;
  bool is_idle_ = false;
};

}  // namespace kvexact

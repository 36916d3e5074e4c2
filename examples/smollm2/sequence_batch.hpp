// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace kvexact::examples {

/// Passes of several sequences made together. Each sequence is decoded on a thread of its own, as if it were alone; a pass waits until all
/// members have asked for one, or have left, and then all are one pass of the engine. Draft steps and verifications mix.
class sequence_batch {
 public:
  explicit sequence_batch(engine& model) noexcept : model_(&model) {}
  sequence_batch(const sequence_batch&) = delete;
  sequence_batch& operator=(const sequence_batch&) = delete;

  /// Before the members' threads start, so that none runs ahead of those to come.
  void expect(std::size_t members) noexcept {
    const std::lock_guard lock(mutex_);
    members_ += members;
  }
  /// The calling thread makes no more passes.
  void leave() noexcept {
    const std::lock_guard lock(mutex_);
    --members_;
    if (!asked_.empty() && asked_.size() >= members_) run_all();
  }

  /// As `engine::forward`, then the logits of the last of the part's rows, [rows, vocabulary]; none if empty.
  void run(sequence_pass& part, std::span<float> logits) noexcept {
    bool ready = false;
    std::unique_lock lock(mutex_);
    try {
      asked_.push_back({&part, logits, &ready});
    } catch (...) {
      part.outcome = failure{error_code::out_of_memory, {}};
      return;
    }
    if (asked_.size() >= members_) {
      run_all();
    } else {
      made_.wait(lock, [&] { return ready; });
    }
  }

 private:
  struct request {
    sequence_pass* part;
    std::span<float> logits;
    bool* ready;
  };

  void run_all() noexcept {
    try {
      run_together();
    } catch (...) {
      for (const request& each : asked_) each.part->outcome = failure{error_code::out_of_memory, {}};
    }
    for (const request& each : asked_) *each.ready = true;
    asked_.clear();
    made_.notify_all();
  }
  void run_together() {
    std::vector<sequence_pass> parts;
    for (const request& each : asked_) parts.push_back(std::move(*each.part));
    model_->forward(parts);
    const std::size_t width = model_->shape().width, vocabulary = model_->shape().vocabulary;
    std::vector<bf16> hidden;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      sequence_pass& part = *asked_[i].part = std::move(parts[i]);
      if (!part.outcome) continue;
      const std::size_t rows = asked_[i].logits.size() / vocabulary;
      hidden.insert(hidden.end(), part.hidden.end() - static_cast<std::ptrdiff_t>(rows * width), part.hidden.end());
    }
    logits_.resize(hidden.size() / width * vocabulary);
    model_->logits(hidden, logits_);
    auto next = logits_.begin();
    for (const request& each : asked_) {
      if (!each.part->outcome) continue;
      std::copy_n(next, each.logits.size(), each.logits.begin());
      next += static_cast<std::ptrdiff_t>(each.logits.size());
    }
  }

  engine* model_;
  std::mutex mutex_;
  std::condition_variable made_;
  std::size_t members_ = 0;
  std::vector<request> asked_;
  std::vector<float> logits_;
};

}  // namespace kvexact::examples

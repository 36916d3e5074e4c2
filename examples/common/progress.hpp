// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>

namespace kvexact::examples {

/// A bar on standard error, drawn only on a terminal.
class progress_bar {
 public:
  progress_bar(const char* what, std::uint64_t total, bool wanted) : what_(what), total_(total), shown_(wanted && ::isatty(STDERR_FILENO) != 0) {}
  ~progress_bar() {
    if (shown_) std::fputs("\r\x1b[K", stderr);
  }
  progress_bar(const progress_bar&) = delete;
  progress_bar& operator=(const progress_bar&) = delete;

  void set(std::uint64_t reached) {
    if (!shown_ || total_ == 0) return;
    constexpr int width = 40;
    const int filled = static_cast<int>(reached * width / total_);
    std::fprintf(stderr, "\r%s [%.*s%.*s] %3d %%", what_, filled, "########################################", width - filled,
                 "                                        ", static_cast<int>(reached * 100 / total_));
    std::fflush(stderr);
  }

 private:
  const char* what_;
  std::uint64_t total_;
  bool shown_;
};

/// A line of text in the same place, for work of unknown length.
class progress_note {
 public:
  progress_note(const char* what, bool wanted) : shown_(wanted && ::isatty(STDERR_FILENO) != 0) {
    if (shown_) std::fputs(what, stderr);
  }
  ~progress_note() {
    if (shown_) std::fputs("\r\x1b[K", stderr);
  }
  progress_note(const progress_note&) = delete;
  progress_note& operator=(const progress_note&) = delete;

 private:
  bool shown_;
};

}  // namespace kvexact::examples

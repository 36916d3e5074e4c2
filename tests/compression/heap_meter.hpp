// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace kvexact::test {

/// Watches operator new and delete of the whole program while it lives; one at a time, one thread.
class heap_meter {
 public:
  /// `allowed`: allocations before the first that fails (all later ones fail, too).
  explicit heap_meter(std::size_t allowed = ~std::size_t{0});
  ~heap_meter();
  heap_meter(const heap_meter&) = delete;
  heap_meter& operator=(const heap_meter&) = delete;

  /// Bytes asked for and not given back since the meter was made.
  [[nodiscard]] std::size_t live() const;
  /// The most bytes that were live at any time since then.
  [[nodiscard]] std::size_t peak() const;
  [[nodiscard]] bool failed() const;
};

}  // namespace kvexact::test

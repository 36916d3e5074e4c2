// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace kvexact::test {

/// Watches operator new of the whole program while it lives; one at a time, one thread.
class allocation_meter {
 public:
  /// `allowed`: allocations before the first that fails (all later ones fail, too).
  explicit allocation_meter(std::size_t allowed = ~std::size_t{0});
  ~allocation_meter();
  allocation_meter(const allocation_meter&) = delete;
  allocation_meter& operator=(const allocation_meter&) = delete;

  /// Sum of all requests in bytes, whether freed since or not.
  [[nodiscard]] std::size_t bytes() const;
  [[nodiscard]] bool failed() const;
};

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace kvexact::detail {

/// Room for `size` elements, a 64th more where memory must be taken: a cache is copied 64 times while it grows, which costs far less than the
/// attention over it, and a vector of its own accord doubles. Throws what the vector throws.
template <class T>
void reserve_sparingly(std::vector<T>& buffer, std::size_t size) {
  if (size > buffer.capacity()) buffer.reserve(size + size / 64);
}

template <class T>
[[nodiscard]] std::size_t bytes_of(const std::vector<T>& buffer) noexcept {
  return buffer.capacity() * sizeof(T);
}

}  // namespace kvexact::detail

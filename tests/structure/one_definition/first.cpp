// SPDX-License-Identifier: Apache-2.0
#include <kvexact/kvexact.hpp>

bool second_agrees(const kvexact::error& seen);

int main() {
  const kvexact::error seen{kvexact::error_code::corrupt, "seen by both"};
  return second_agrees(seen) ? 0 : 1;
}

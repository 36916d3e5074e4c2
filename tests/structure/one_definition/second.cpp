// SPDX-License-Identifier: Apache-2.0
#include <kvexact/kvexact.hpp>

bool second_agrees(const kvexact::error& seen);

bool second_agrees(const kvexact::error& seen) { return seen.message() == "corrupt: seen by both"; }

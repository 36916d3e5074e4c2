// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvexact/compression/asymmetric.hpp>
#include <kvexact/compression/asymmetric_by_channel.hpp>
#include <kvexact/compression/quantised.hpp>

namespace kvexact {

/// KIVI (arXiv 2402.02750): keys channel by channel in groups of tokens, values token by token in groups of channels, the newest tokens exact
/// (`tail`, and whatever does not fill a group). The paper has groups of 32 and a tail of 128.
template <class Scalar, int KeyBits, int ValueBits>
using kivi = quantised<Scalar, asymmetric_by_channel<KeyBits>, asymmetric<ValueBits>>;

}  // namespace kvexact

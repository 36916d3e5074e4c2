// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>

#include <kvexact/bitstream/bit_io.hpp>

namespace kvexact {

/// Values coded side by side; each owns a lane of the entropy coder. Part of the format.
inline constexpr int row_lanes = 32;

/// Turns a value and its prediction into a symbol for the entropy coder plus raw bits, and back. All arithmetic is on integers, so the
/// result is the same on every machine.
///
/// A row is up to `row_lanes` values of one channel. Means arrive as bits of IEEE binary32 in the unit of the cache's numbers (storage
/// scale divided out), sigmas as log2 in 1/256 octave in the same unit.
///
/// - `prepare(means, sigmas, row)` works on full rows (pad freely) and gives each lane a context, `row.context[i]`.
/// - `to_symbols(values, row, symbols, n)`: symbols of the first `n` values. The caller may then replace any symbol by the escape symbol
///   (one whose table has no room for it).
/// - `put_raw(values, row, symbols, writer, n)`: the bits that the symbols leave open, in lane order.
/// - `decode(symbols, row, reader, values, n)`: both undone. Any symbols and any bits give some values, in bounded time.
template <class R>
concept residual_model = requires(typename R::row& row, const typename R::row& ready, const std::uint32_t* means, const std::int32_t* sigmas,
                                  typename R::bits_type* values, const typename R::bits_type* known, std::uint8_t* symbols,
                                  const std::uint8_t* decoded, bit_writer& writer, bit_reader& reader, int n) {
  typename R::format;
  { R::id } -> std::convertible_to<std::uint32_t>;      // names the model in streams and profiles
  { R::alphabet } -> std::convertible_to<int>;          // symbols are below this, at most 256
  { R::escape_symbol } -> std::convertible_to<int>;     // the highest symbol
  { R::shared_contexts } -> std::convertible_to<int>;   // contexts 0 .. shared-1 have one table for all layers
  { R::contexts } -> std::convertible_to<int>;          // the rest have one per (layer, part)
  { R::prepare(means, sigmas, row) } noexcept;
  { R::to_symbols(known, ready, symbols, n) } noexcept;
  { R::put_raw(known, ready, decoded, writer, n) } noexcept;
  { R::decode(decoded, ready, reader, values, n) } noexcept;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>

namespace kvexact {

/// How the keys or the values of a layer are stored in few bits. The unit is a group: `group_tokens()` tokens of one head, starting at a
/// position that is a multiple of it, [group_tokens, dim] floats, which take `packed_bytes()` bytes whatever they are.
///
/// - `make(heads, dim, options)`: errors: invalid_argument, shape_mismatch (options that do not fit the sizes), out_of_memory.
/// - `pack(head, values, packed, scratch)`: one group or several, one after another. Values must be finite and at most 1e30 in magnitude.
///   Returns how much was too large for the format and became the nearest that it has: values, or the vectors or lines that share a number.
/// - `unpack(head, packed, values, scratch)`: the same groups back, approximately.
/// - `scratch_floats()`: size of the scratch memory that both need; what it holds means nothing.
///
/// Exactness: the same values give the same bytes with every compiler, instruction set and number of groups a call, from the same tables.
/// (Tables of TurboQuant come from the C library's exponential and logarithm, Haar matrices from its logarithm and cosine: these may differ in a last
/// bit.)
template <class Q>
concept quantiser = std::copy_constructible<Q> && requires(const Q& format, std::uint32_t number, const typename Q::options& options,
                                                           std::span<const float> values, std::span<std::byte> packed,
                                                           std::span<const std::byte> stored, std::span<float> out) {
  { Q::make(number, number, options) } noexcept -> std::same_as<result<Q>>;
  { format.dim() } noexcept -> std::same_as<std::uint32_t>;
  { format.group_tokens() } noexcept -> std::same_as<std::uint32_t>;
  { format.packed_bytes() } noexcept -> std::same_as<std::size_t>;
  { format.scratch_floats() } noexcept -> std::same_as<std::size_t>;
  { format.pack(number, values, packed, out) } noexcept -> std::same_as<std::uint64_t>;
  { format.unpack(number, stored, out, out) } noexcept;
};

/// A quantiser whose groups can be used without unpacking them. Everything that a query or a sum needs once, whatever the number of groups,
/// happens in `prepare` and `finish`:
///
/// - `dot(prepared, packed, scores)`: products of a query with the `group_tokens` rows of one group.
/// - `add_weighted(weights, packed, sums)`: adds the rows of one group, times their weights [group_tokens].
/// - `prepare(head, query, prepared, scratch)`: from [dim] to [working_floats]. `finish(head, weight, sums, out, scratch)`: from
///   [working_floats], at first all 0, to [dim]; `weight` is the sum of all weights.
template <class Q>
concept computes_on_codes = quantiser<Q> && requires(const Q& format, std::uint32_t head, std::span<const float> in,
                                                     std::span<const std::byte> stored, std::span<float> out, float weight) {
  { format.working_floats() } noexcept -> std::same_as<std::size_t>;
  { format.prepare(head, in, out, out) } noexcept;
  { format.dot(in, stored, out) } noexcept;
  { format.add_weighted(in, stored, out) } noexcept;
  { format.finish(head, weight, in, out, out) } noexcept;
};

/// Bits that a value takes, scales and everything else that is stored with a group counted.
template <quantiser Q>
[[nodiscard]] double bits_per_value(const Q& format) noexcept {
  return 8.0 * static_cast<double>(format.packed_bytes()) / (static_cast<double>(format.group_tokens()) * format.dim());
}

}  // namespace kvexact

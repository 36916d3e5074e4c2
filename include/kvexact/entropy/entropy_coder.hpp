// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/entropy/entropy_model.hpp>

namespace kvexact {

/// The order in which an encoder must be given the rows; the decoder always gives them first to last.
enum class row_order : std::uint8_t {
  forward,  ///< first row first (a queue, as in range coding)
  reverse,  ///< last row first (a stack, as in rANS)
};

/// Writes rows of symbols into a caller's buffer.
///
/// - `E(buffer)` starts an empty output; nothing outside `buffer` is ever written.
/// - `put_row(model, contexts, symbols, n)` codes `n` symbols (0 to the coder's lanes), symbol i in lane i with the distribution
///   contexts[i]; lanes n and up stay untouched. Every context is below model.size() and the model was built for encoding. False
///   once the coder has failed; failure is sticky and needs to be looked at only in `finish`.
/// - `finish()` gives the coded bytes, a part of `buffer`, once. Errors: workspace_too_small (the buffer was full),
///   invalid_argument (a symbol had frequency 0).
template <class E, class Model>
concept entropy_encoder = entropy_model<Model> && std::constructible_from<E, std::span<std::byte>> &&
                          requires(E encoder, const Model& model, const std::uint16_t* contexts, const std::uint8_t* symbols, int n) {
                            { encoder.put_row(model, contexts, symbols, n) } noexcept -> std::same_as<bool>;
                            { encoder.finish() } noexcept -> std::same_as<result<std::span<const std::byte>>>;
                          };

/// Reads rows of symbols back, in the order first row to last, with the row lengths and contexts of the encoder.
///
/// - `D::open(coded)` reads the start of the coder. `coded` needs no alignment, must outlive the decoder and is never read
///   outside. Errors: truncated, corrupt.
/// - `get_row(model, contexts, symbols, n)` decodes `n` symbols (0 to the coder's lanes) into `symbols`. Preconditions as for
///   `put_row`, with a model built for decoding. Bad input gives wrong symbols (each one codable in its context) and nothing
///   worse; past the end zeros are read.
/// - `finish()` says whether the input was what an encoder writes: all bytes used, none missing, and the state back where the
///   encoder began. Errors: truncated, corrupt. A success is no proof of equal data; use a checksum.
template <class D, class Model>
concept entropy_decoder = entropy_model<Model> && requires(D decoder, const Model& model, std::span<const std::byte> coded,
                                                           const std::uint16_t* contexts, std::uint8_t* symbols, int n) {
  { D::open(coded) } noexcept -> std::same_as<result<D>>;
  { decoder.get_row(model, contexts, symbols, n) } noexcept -> std::same_as<void>;
  { decoder.finish() } noexcept -> std::same_as<result<void>>;
};

/// An entropy coder policy: a matching encoder and decoder, and what a stream must say about them.
///
/// - `lanes`: symbols in a full row, `precision`: bits of the frequency tables, `id`: stable number of the method in streams. The
///   three together fix the coded bytes; nothing else does.
/// - `encode_order`: order of rows for the encoder.
/// - `max_coded_bytes(symbols)`: a buffer of this size never overflows with that many codable symbols, however they fall into rows.
///   `symbols` is at most 2^60.
///
///     using coder = kvexact::interleaved_rans<>;
///     std::vector<std::byte> buffer(coder::max_coded_bytes(rows * coder::lanes));
///     coder::encoder encoder(buffer);
///     for (std::size_t r = rows; r-- > 0;) encoder.put_row(model, contexts + r * coder::lanes, symbols + r * coder::lanes, coder::lanes);
///     auto coded = encoder.finish();
template <class C, class Model = table_set<C::precision>>
concept entropy_coder = entropy_encoder<typename C::encoder, Model> && entropy_decoder<typename C::decoder, Model> && requires {
  { C::lanes } -> std::convertible_to<int>;
  { C::precision } -> std::convertible_to<int>;
  { C::id } -> std::convertible_to<std::uint32_t>;
  { C::encode_order } -> std::convertible_to<row_order>;
  { C::max_coded_bytes(std::size_t{}) } -> std::same_as<std::size_t>;
};

}  // namespace kvexact

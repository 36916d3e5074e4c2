// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvexact/bitstream/container.hpp>
#include <kvexact/codec/chunk_coder.hpp>
#include <kvexact/codec/profile.hpp>
#include <kvexact/codec/stream_format.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// A stream's parts, validated but for the chunks' contents.
struct opened_stream {
  stream_header header;
  detail::stream_index index;
  std::span<const std::byte> chunks;
  std::vector<std::uint32_t> token_ids;  ///< if the stream carries them
  std::vector<section_entry> sections;   ///< header, chunks, index, and perhaps token ids
};

/// Opens a stream without a profile, to look at it. Errors: truncated, corrupt, checksum_mismatch, unsupported, out_of_memory. Whatever a
/// file says that cannot be is `corrupt`.
[[nodiscard]] inline result<opened_stream> inspect_stream(std::span<const std::byte> stream) noexcept {
  try {
    const auto container = container_reader::open(stream, container_kind::stream);
    if (!container) return container.error();
    const auto& sections = container->sections();
    const bool with_ids = sections.size() == 4 && sections[3].id == detail::token_section && sections[3].flags == 0;
    if ((sections.size() != 3 && !with_ids) || sections[0].id != detail::head_section || sections[1].id != detail::chunk_section ||
        sections[2].id != detail::index_section || sections[1].flags != section_entry::self_checked || sections[0].flags != 0 ||
        sections[2].flags != 0)
      return error{error_code::corrupt, "the stream's sections are not header, chunks, index and perhaps token ids"};
    const auto head = container->section(detail::head_section);
    if (!head) return head.error();
    auto header = detail::read_stream_header(*head);
    if (!header) return header.error();
    const auto chunks = container->section(detail::chunk_section);
    const auto index_bytes = container->section(detail::index_section);
    if (!index_bytes) return index_bytes.error();
    auto index = detail::read_index(*index_bytes, header->shape, chunks->size());
    if (!index) return index.error();
    std::vector<std::uint32_t> token_ids;
    if (with_ids) {
      const auto id_bytes = container->section(detail::token_section);
      if (!id_bytes) return id_bytes.error();
      auto ids = detail::read_token_ids(*id_bytes, index->tokens);
      if (!ids) return ids.error();
      token_ids = *std::move(ids);
    }
    return opened_stream{*std::move(header), *std::move(index), *chunks, std::move(token_ids), sections};
  } catch (...) {
    return error{error_code::out_of_memory, "stream"};
  }
}

/// Opens a stream and compares it with a profile. Errors: those of `inspect_stream`, dtype_mismatch, shape_mismatch, profile_mismatch,
/// unsupported (other policies than those of `Codec`), corrupt (a chunk of more tokens than the profile's correction allows).
template <class Codec>
[[nodiscard]] result<opened_stream> open_stream(const profile<Codec>& parameters, std::span<const std::byte> stream) noexcept {
  auto opened = inspect_stream(stream);
  if (!opened) return opened.error();
  const stream_header& header = opened->header;
  if (header.format != Codec::format) return error{error_code::dtype_mismatch, "the stream holds another number format"};
  if (header.predictor != Codec::predictor_type::id) return error{error_code::unsupported, "the stream was written with another predictor"};
  if (header.residual != Codec::residual_model_type::id) return error{error_code::unsupported, "the stream was written with another residual model"};
  if (header.coder != Codec::entropy_coder_type::id || header.lanes != Codec::entropy_coder_type::lanes ||
      header.precision != Codec::entropy_coder_type::precision)
    return error{error_code::unsupported, "the stream was written with another entropy coder"};
  if (const auto fits = expect_shape(header.shape, parameters.shape()); !fits) return fits.error();
  if (header.profile_hash != parameters.hash()) return error{error_code::profile_mismatch, "the stream was written with another profile"};
  const std::uint64_t most = detail::most_chunk_tokens(parameters);
  for (const chunk_record& record : opened->index.chunks) {
    if (detail::pad_to_rows(record.token_count) > most)
      return error{error_code::corrupt, "too many tokens in a chunk for the correction"}.at_token(static_cast<std::int64_t>(record.token_begin));
  }
  return opened;
}

/// Reads a stream that lies in memory. Decoding is const and needs a workspace of its own, so threads may share a decoder and decode
/// different ranges.
template <class Codec>
class stream_decoder {
 public:
  using scalar = typename Codec::scalar;

  /// The stream and the profile must outlive the decoder. Errors: those of `open_stream`, invalid_argument (a profile built for
  /// encoding only).
  [[nodiscard]] static result<stream_decoder> open(const profile<Codec>& parameters, std::span<const std::byte> stream,
                                                   instruction_set set = best_instruction_set()) noexcept {
    if (!parameters.can_decode()) return error{error_code::invalid_argument, "the profile was built for encoding only"};
    auto opened = open_stream<Codec>(parameters, stream);
    if (!opened) return opened.error();
    return stream_decoder(parameters, *std::move(opened), set);
  }
  /// A profile that would not live on.
  static result<stream_decoder> open(const profile<Codec>&& parameters, std::span<const std::byte> stream,
                                     instruction_set set = best_instruction_set()) = delete;

  [[nodiscard]] const cache_shape& shape() const noexcept { return stream_.header.shape; }
  [[nodiscard]] std::uint64_t tokens() const noexcept { return stream_.index.tokens; }
  [[nodiscard]] const stream_header& header() const noexcept { return stream_.header; }
  [[nodiscard]] std::span<const chunk_record> chunks() const noexcept { return stream_.index.chunks; }
  /// One a token if the stream carries them, else none.
  [[nodiscard]] std::span<const std::uint32_t> token_ids() const noexcept { return stream_.token_ids; }

  /// Bytes of workspace that `decode` needs for this stream, whatever it says: at most 16 MiB, with maps 256 MiB. Streams of chunks of the
  /// usual size need far less.
  [[nodiscard]] std::size_t workspace_bytes() const noexcept {
    workspace counter;
    (void)take_buffers(counter);
    return counter.needed();
  }

  /// Decodes the given layers and tokens into `cache`, which must hold these tokens (by position) in all of these layers.
  /// `prediction`: a cache that covers the tokens of every chunk touched (`covering_tokens`), or for `closed_loop` an engine that stands at
  /// the first token of a chunk, not behind `tokens.begin`; it is taken through all layers up to the last chunk touched.
  /// Each chunk is checked before any of its values is written; on an error the chunks before the named one are in place and the rest is
  /// untouched. With a predictor that needs lower layers or earlier tokens, chunks that hold them are decoded first, and the error may name
  /// one of those.
  /// After an error in the closed loop the engine has seen values that were not checked: begin anew with a fresh one, or take it back to
  /// `tokens()` as before the call or earlier. One that still stands at the token named and forgets a range that is begun again
  /// (`layerwise_predictor`) may go on from there; behind a band whose last chunk is bad it does not.
  /// Errors: out_of_range, shape_mismatch, workspace_too_small, prediction_missing, prediction_mismatch, truncated, corrupt,
  /// checksum_mismatch, with the first layer and token of the chunk; those of the engine.
  template <kv_cache Cache, class Prediction = const no_prediction>
  [[nodiscard]] result<void> decode(index_range layers, index_range tokens, const Cache& cache, std::span<std::byte> memory,
                                    Prediction&& prediction = no_prediction{}) const noexcept {
    static_assert(std::same_as<typename Cache::value_type, scalar>, "kvexact: the cache must hold the codec's number format and be writable");
    static_assert(detail::takes_prediction<Codec, Prediction> || std::same_as<std::remove_cvref_t<Prediction>, no_prediction>,
                  "kvexact: the prediction must be a kv_cache of bf16, for closed_loop a layerwise_predictor (engine/layerwise_predictor.hpp)");
    if (layers.begin > layers.end || layers.end > shape().layers()) return error{error_code::out_of_range, "layers outside the stream"};
    if (tokens.begin > tokens.end || tokens.end > this->tokens()) return error{error_code::out_of_range, "tokens outside the stream"};
    if (const auto fits = expect_shape(cache.shape(), shape()); !fits) return fits.error();
    if (cache.tokens().begin > tokens.begin || cache.tokens().end < tokens.end)
      return error{error_code::out_of_range, "the cache has no room for the tokens"};
    if constexpr (kv_cache<std::remove_cvref_t<Prediction>>) {
      if (const auto fits = expect_shape(prediction.shape(), shape()); !fits) return fits.error();
      const index_range needed = covering_tokens(tokens);
      if (needed.size() > 0 && (prediction.tokens().begin > needed.begin || prediction.tokens().end < needed.end))
        return error{error_code::out_of_range, "the prediction does not cover the chunks"}.at_token(static_cast<std::int64_t>(needed.begin));
    }
    if (layers.begin == layers.end || tokens.begin == tokens.end) return {};
    index_range walked = tokens;  // what is decoded, if not published
    std::uint64_t walked_layers = layers.end;
    if constexpr (Codec::predictor_type::needs == dependency::all_previous && !std::same_as<std::remove_cvref_t<Prediction>, no_prediction>) {
      walked.begin = prediction.tokens();
      walked_layers = shape().layers();
      if (walked.begin > tokens.begin)
        return error{error_code::out_of_range, "the engine stands behind the first token"}.at_token(static_cast<std::int64_t>(tokens.begin));
    }
    if (!chunks().empty() && memory.size() < workspace_bytes()) return error{error_code::workspace_too_small, "see stream_decoder::workspace_bytes"};
    workspace space(memory);
    auto buffers = take_buffers(space);
    detail::chunk_coder<Codec> coder(*profile_, stream_.header.storage_scales, set_, buffers);
    for (const chunk_record& record : touched(walked)) {
      const bool wanted = touches(record.layers(), layers) && touches(record.tokens(), tokens);
      if (!wanted && (Codec::predictor_type::needs == dependency::none || record.layer_begin >= walked_layers)) continue;
      const auto bytes = stream_.chunks.subspan(static_cast<std::size_t>(record.offset), static_cast<std::size_t>(record.bytes));
      if (const auto decoded = coder.decode(bytes, record, prediction, buffers); !decoded)
        return decoded.error().at_layer(record.layer_begin).at_token(static_cast<std::int64_t>(record.token_begin));
      if (wanted) coder.publish(record, layers, tokens, buffers, cache);
    }
    return {};
  }

  /// Everything.
  template <kv_cache Cache, class Prediction = const no_prediction>
  [[nodiscard]] result<void> decode(const Cache& cache, std::span<std::byte> memory, Prediction&& prediction = no_prediction{}) const noexcept {
    return decode({0, shape().layers()}, {0, tokens()}, cache, memory, prediction);
  }

  /// Tokens of all chunks that hold some of `tokens`.
  [[nodiscard]] index_range covering_tokens(index_range tokens) const noexcept {
    const std::span<const chunk_record> records = touched(tokens);
    if (records.empty()) return tokens;
    return {std::min(tokens.begin, records.front().token_begin), std::max(tokens.end, records.back().tokens().end)};
  }

 private:
  stream_decoder(const profile<Codec>& parameters, opened_stream stream, instruction_set set) noexcept
      : profile_(&parameters), stream_(std::move(stream)), set_(set) {
    for (const chunk_record& record : chunks()) most_.include(shape(), record);
  }

  /// The chunks that hold some of `tokens`: neighbours, as chunks are in order of their tokens.
  [[nodiscard]] std::span<const chunk_record> touched(index_range tokens) const noexcept {
    if (tokens.begin >= tokens.end) return {};
    const auto all = chunks();
    const auto first = std::partition_point(all.begin(), all.end(), [&](const chunk_record& record) { return record.tokens().end <= tokens.begin; });
    const auto last = std::partition_point(first, all.end(), [&](const chunk_record& record) { return record.token_begin < tokens.end; });
    return {first, last};
  }

  [[nodiscard]] static constexpr bool touches(index_range a, index_range b) noexcept {
    return std::max(a.begin, b.begin) < std::min(a.end, b.end);
  }

  [[nodiscard]] detail::chunk_buffers<Codec> take_buffers(workspace& memory) const noexcept {
    return detail::chunk_buffers<Codec>::take(memory, *profile_, most_, false);
  }

  const profile<Codec>* profile_;
  opened_stream stream_;
  instruction_set set_;
  typename detail::chunk_buffers<Codec>::sizes most_;
};

}  // namespace kvexact

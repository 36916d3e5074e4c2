// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/bitstream/container.hpp>
#include <kvexact/codec/chunk_coder.hpp>
#include <kvexact/codec/options.hpp>
#include <kvexact/codec/profile.hpp>
#include <kvexact/codec/stream_decoder.hpp>
#include <kvexact/codec/stream_format.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// Everything that an encoder of `Codec` needs beside the profile.
struct encoder_options {
  chunk_options chunks{};
  instruction_set set = best_instruction_set();
};

/// Writes a stream, chunk by chunk, into a sink.
///
///     auto encoder = stream_encoder<codec, decltype(sink)>::begin(profile, workspace, sink);
///     encoder->append(cache, prediction);   // as often as tokens arrive
///     encoder->finish();                    // the chunk index
///
/// The bytes depend on the cache, the profile, the chunk options and where `append` was called, never on the machine.
/// The profile, the workspace and the sink must outlive the encoder.
///
/// A call of `append` that fails when some of its chunks are written leaves part of a band behind: from then on every call gives the same
/// error, and what the sink got is no stream. Who continues a finished one should keep what `resume_offset()` cuts off until `finish` has
/// succeeded.
template <class Codec, byte_sink Sink>
class stream_encoder {
 public:
  using scalar = typename Codec::scalar;

  stream_encoder(stream_encoder&&) noexcept = default;
  stream_encoder& operator=(stream_encoder&&) noexcept = default;

  /// Bytes of workspace for any cache of the profile's shape: at most 30 MiB, with maps 256 MiB; for chunks of the usual size far less
  /// (see docs/results.md).
  [[nodiscard]] static std::size_t workspace_bytes(const profile<Codec>& parameters, chunk_options options = {}) noexcept {
    workspace counter;
    (void)take_buffers(parameters, fitting(parameters, options), counter);
    return counter.needed();
  }

  /// Starts a new stream. `storage_scales`: for fp8 caches, bits of the binary32 scale of each (layer, part) in coding order (layer 0 K,
  /// layer 0 V, layer 1 K, ...; absent V skipped), restored to the bit; empty for none. Values that are not positive, finite and
  /// normal are kept but count as 1.
  /// Errors: workspace_too_small, shape_mismatch (number of scales), invalid_argument (scales for a 16-bit format, or a profile built
  /// for decoding only), output_failed, out_of_memory.
  [[nodiscard]] static result<stream_encoder> begin(const profile<Codec>& parameters, std::span<std::byte> memory, Sink& sink,
                                                    std::span<const std::uint32_t> storage_scales = {}, encoder_options options = {}) noexcept {
    if (!parameters.can_encode()) return error{error_code::invalid_argument, "the profile was built for decoding only"};
    if (!storage_scales.empty() && !has_storage_scale<scalar>)
      return error{error_code::invalid_argument, "16-bit formats have no storage scales"};
    if (!storage_scales.empty() && storage_scales.size() != count_tiles(parameters.shape()))
      return error{error_code::shape_mismatch, "one storage scale per layer and part is needed"};
    try {
      stream_header header = detail::stream_header_of(parameters);
      header.storage_scales.assign(storage_scales.begin(), storage_scales.end());
      stream_encoder encoder(parameters, std::move(header), container_writer(sink, container_kind::stream), options);
      if (const auto taken = encoder.take_memory(memory); !taken) return taken.error();
      if (const auto head = encoder.writer_.add_section(detail::head_section, detail::write_stream_header(encoder.header_)); !head)
        return head.error();
      if (const auto opened = encoder.writer_.open_section(detail::chunk_section); !opened) return opened.error();
      return encoder;
    } catch (...) {
      return error{error_code::out_of_memory, "stream encoder"};
    }
  }
  /// A profile that would not live on.
  static result<stream_encoder> begin(const profile<Codec>&& parameters, std::span<std::byte> memory, Sink& sink,
                                      std::span<const std::uint32_t> storage_scales = {}, encoder_options options = {}) = delete;

  /// Continues a finished stream: `stream` is all of it, and what the sink receives replaces everything from `resume_offset()` on. Token ids
  /// that the stream carries are cut off as well: hand them over again, with the new ones, to `finish`.
  /// Errors: those of opening a stream, workspace_too_small, invalid_argument (a profile built for decoding only).
  [[nodiscard]] static result<stream_encoder> resume(const profile<Codec>& parameters, std::span<std::byte> memory, Sink& sink,
                                                     std::span<const std::byte> stream, encoder_options options = {}) noexcept {
    if (!parameters.can_encode()) return error{error_code::invalid_argument, "the profile was built for decoding only"};
    auto opened = open_stream<Codec>(parameters, stream);
    if (!opened) return opened.error();
    try {
      opened->sections.resize(2);  // index and token ids are written anew
      stream_encoder encoder(parameters, std::move(opened->header),
                             container_writer(sink, container_kind::stream, std::move(opened->sections)), options);
      encoder.chunks_ = std::move(opened->index.chunks);
      encoder.tokens_ = opened->index.tokens;
      encoder.chunk_bytes_ = opened->chunks.size();
      if (const auto taken = encoder.take_memory(memory); !taken) return taken.error();
      return encoder;
    } catch (...) {
      return error{error_code::out_of_memory, "stream encoder"};
    }
  }
  /// A profile that would not live on.
  static result<stream_encoder> resume(const profile<Codec>&& parameters, std::span<std::byte> memory, Sink& sink,
                                       std::span<const std::byte> stream, encoder_options options = {}) = delete;

  /// Offset in the stream of the next byte that the sink gets.
  [[nodiscard]] std::uint64_t resume_offset() const noexcept { return writer_.offset(); }
  /// Tokens in the stream so far.
  [[nodiscard]] std::uint64_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::span<const chunk_record> chunks() const noexcept { return chunks_; }

  /// Appends all tokens of `cache` from position `tokens()` on. `prediction`: a cache that covers the same positions (bf16, same shape), or
  /// for `closed_loop` an engine that stands at `tokens()`.
  /// Errors: shape_mismatch, out_of_range (the cache or the prediction does not start or end where needed), invalid_argument (the stream
  /// is finished), output_failed, out_of_memory, those of the engine. If one of the last three comes after chunks of this call were written,
  /// the encoder is of no more use; see `closed_loop` for the engine.
  template <kv_cache Cache, class Prediction = const no_prediction>
  [[nodiscard]] result<void> append(const Cache& cache, Prediction&& prediction = no_prediction{}) noexcept {
    static_assert(std::same_as<std::remove_const_t<typename Cache::value_type>, scalar>, "kvexact: the cache must hold the codec's number format");
    static_assert(!Codec::predictor_type::needs_prediction || !std::same_as<std::remove_cvref_t<Prediction>, no_prediction>,
                  "kvexact: this codec's predictor needs a predicted cache or an engine as second argument of append");
    static_assert(detail::takes_prediction<Codec, Prediction> || std::same_as<std::remove_cvref_t<Prediction>, no_prediction>,
                  "kvexact: the prediction must be a kv_cache of bf16, for closed_loop a layerwise_predictor (engine/layerwise_predictor.hpp)");
    if (!state_) return state_;
    if (finished_) return error{error_code::invalid_argument, "the stream is finished"};
    if (const auto fits = expect_shape(cache.shape(), profile_->shape()); !fits) return fits.error();
    const index_range tokens{tokens_, cache.tokens().end};
    if (cache.tokens().begin > tokens_ || tokens.end < tokens.begin)
      return error{error_code::out_of_range, "the cache does not continue the stream"}.at_token(static_cast<std::int64_t>(tokens_));
    if constexpr (kv_cache<std::remove_cvref_t<Prediction>>) {
      if (const auto fits = expect_shape(prediction.shape(), profile_->shape()); !fits) return fits.error();
      if (tokens.size() > 0 && (prediction.tokens().begin > tokens.begin || prediction.tokens().end < tokens.end))
        return error{error_code::out_of_range, "the prediction does not cover the tokens"}.at_token(static_cast<std::int64_t>(tokens_));
    }
    detail::chunk_coder<Codec> coder(*profile_, header_.storage_scales, options_.set, buffers_);
    const std::size_t chunks_before = chunks_.size();
    result<void> status;
    detail::for_each_chunk(profile_->shape(), options_.chunks, tokens, [&](const chunk_record& where) {
      auto coded = coder.encode(cache, prediction, where, buffers_);
      if (coded) {
        coded->header.record.offset = chunk_bytes_;
        status = write_chunk(coded->header, coded->payload);
      } else {
        status = coded.error();
      }
      return static_cast<bool>(status);
    });
    if (status) {
      tokens_ = tokens.end;
    } else if (chunks_.size() > chunks_before) {
      state_ = status;
    }
    return status;
  }

  /// Writes the chunk index and the footer; the stream is complete. `token_ids`: none, or one for each token of the whole stream, to be
  /// carried along for whoever decodes with an engine.
  /// Errors: output_failed, out_of_memory, shape_mismatch (number of ids), invalid_argument (the stream was finished already), that of an
  /// `append` that left part of a band behind.
  [[nodiscard]] result<void> finish(std::span<const std::uint32_t> token_ids = {}) noexcept {
    if (!state_) return state_;
    if (finished_) return error{error_code::invalid_argument, "the stream is finished"};
    if (!token_ids.empty() && token_ids.size() != tokens_) return error{error_code::shape_mismatch, "one id per token is needed"};
    finished_ = true;
    try {
      if (const auto index = writer_.add_section(detail::index_section, detail::write_index(tokens_, chunks_)); !index) return index.error();
      if (!token_ids.empty()) {
        if (const auto ids = writer_.add_section(detail::token_section, detail::write_token_ids(token_ids)); !ids) return ids.error();
      }
    } catch (...) {
      return error{error_code::out_of_memory, "chunk index"};
    }
    return writer_.finish();
  }

 private:
  stream_encoder(const profile<Codec>& parameters, stream_header header, container_writer<Sink> writer, encoder_options options) noexcept
      : profile_(&parameters), header_(std::move(header)), writer_(std::move(writer)), options_{fitting(parameters, options.chunks), options.set} {}

  using buffers_type = detail::chunk_buffers<Codec>;

  /// The options with no more tokens than a chunk may have.
  [[nodiscard]] static chunk_options fitting(const profile<Codec>& parameters, chunk_options options) noexcept {
    options.tokens_per_chunk = static_cast<std::uint32_t>(std::min<std::uint64_t>(options.tokens_per_chunk, detail::most_chunk_tokens(parameters)));
    return options;
  }

  [[nodiscard]] static buffers_type take_buffers(const profile<Codec>& parameters, chunk_options options, workspace& memory) noexcept {
    const cache_shape& shape = parameters.shape();
    typename buffers_type::sizes most;
    // A full band has the largest tiles; the largest chunks are those of a full band or of one row, into which most layers fit.
    for (const std::uint64_t tokens : {std::uint64_t{1}, max_chunk_values}) {
      detail::for_each_chunk(shape, options, {0, tokens}, [&](const chunk_record& record) {
        most.include(shape, record);
        return record.layers().end < shape.layers();
      });
    }
    // Bands in between pad by less than a factor of two.
    most.values = std::max(most.values, std::min(2 * std::uint64_t{options.values_per_chunk}, max_chunk_values));
    return buffers_type::take(memory, parameters, most, true);
  }
  [[nodiscard]] result<void> take_memory(std::span<std::byte> memory) noexcept {
    if (memory.size() < workspace_bytes(*profile_, options_.chunks)) return error{error_code::workspace_too_small, "see stream_encoder::workspace_bytes"};
    workspace space(memory);
    buffers_ = take_buffers(*profile_, options_.chunks, space);
    return {};
  }
  [[nodiscard]] result<void> write_chunk(const chunk_header& header, std::span<const std::byte> payload) noexcept {
    try {
      chunks_.push_back(header.record);
    } catch (...) {
      return error{error_code::out_of_memory, "chunk index"};
    }
    chunk_bytes_ += header.record.bytes;
    if (const auto written = writer_.append(detail::write_chunk_header(header, payload)); !written) return written.error();
    return writer_.append(payload);
  }

  const profile<Codec>* profile_;
  stream_header header_;
  container_writer<Sink> writer_;
  encoder_options options_;
  buffers_type buffers_;
  std::vector<chunk_record> chunks_;
  std::uint64_t tokens_ = 0;
  std::uint64_t chunk_bytes_ = 0;
  bool finished_ = false;
  result<void> state_;  // why nothing can be added any more
};

}  // namespace kvexact

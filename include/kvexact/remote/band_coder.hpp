// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/codec/chunk_coder.hpp>
#include <kvexact/codec/options.hpp>
#include <kvexact/codec/profile.hpp>
#include <kvexact/codec/stream_format.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// Rows of any tokens, at their positions, as bands of a stream (docs/format.md) without its header and index, of which both sides know all
/// but the chunks' modes and sizes. Lossless. Cut as the encoder cuts a stream by default. The profile must outlive it.
template <class Codec>
class band_coder {
  static_assert(!Codec::predictor_type::needs_prediction && Codec::predictor_type::needs != dependency::all_previous,
                "kvexact: rows can cross a link with codecs that need no prediction, such as codec_without_model");

 public:
  using scalar = typename Codec::scalar;

  explicit band_coder(const profile<Codec>& parameters) noexcept : profile_(&parameters) {}
  explicit band_coder(const profile<Codec>&& parameters) = delete;

  /// Most bytes that so many tokens can take.
  [[nodiscard]] std::uint64_t most_bytes(index_range tokens) const noexcept {
    std::uint64_t sum = 0;
    detail::for_each_chunk(profile_->shape(), {}, tokens, [&](const chunk_record& record) {
      const auto layers = profile_->shape().all().subspan(record.layer_begin, record.layer_count);
      sum += detail::chunk_header_bytes;
      for (const layer_shape& layer : layers) sum += std::uint64_t{layer.channels()} * record.token_count * sizeof(scalar);
      return true;
    });
    return sum;
  }

  /// Appends the tokens, which `cache` holds. Errors: out_of_memory.
  template <kv_cache Cache>
  [[nodiscard]] result<void> encode(const Cache& cache, index_range tokens, std::vector<std::byte>& out) noexcept {
    return for_each_chunk(tokens, true, [&](auto& coder, chunk_record& record) -> result<void> {
      const auto coded = coder.encode(cache, none, record, buffers_);
      if (!coded) return coded.error();
      const auto header = detail::write_chunk_header(coded->header, coded->payload);
      out.insert(out.end(), header.begin(), header.end());
      out.insert(out.end(), coded->payload.begin(), coded->payload.end());
      return {};
    });
  }

  /// Writes to `cache` what `bytes` holds of the tokens. Errors: truncated, corrupt, checksum_mismatch, unsupported, with layer and token;
  /// out_of_memory.
  template <kv_cache Cache>
  [[nodiscard]] result<void> decode(std::span<const std::byte> bytes, index_range tokens, const Cache& cache) noexcept {
    const auto done = for_each_chunk(tokens, false, [&](auto& coder, chunk_record& record) -> result<void> {
      byte_reader in(bytes);
      (void)in.get<std::uint32_t>();
      record.mode = in.get<std::uint32_t>();
      (void)in.get_bytes(24);
      record.bytes = in.get<std::uint64_t>();
      if (!in.ok() || record.bytes > bytes.size()) return error{error_code::truncated, "a chunk of rows"};
      const auto decoded = coder.decode(bytes.first(static_cast<std::size_t>(record.bytes)), record, none, buffers_);
      if (!decoded) return decoded;
      coder.publish(record, record.layers(), record.tokens(), buffers_, cache);
      bytes = bytes.subspan(static_cast<std::size_t>(record.bytes));
      return {};
    });
    if (done && !bytes.empty()) return error{error_code::corrupt, "bytes behind the chunks of rows"};
    return done;
  }

 private:
  static constexpr no_prediction none{};

  template <class Visit>
  [[nodiscard]] result<void> for_each_chunk(index_range tokens, bool encode, Visit&& visit) noexcept {
    try {
      typename detail::chunk_buffers<Codec>::sizes most;
      std::vector<chunk_record> records;
      detail::for_each_chunk(profile_->shape(), {}, tokens, [&](const chunk_record& record) {
        most.include(profile_->shape(), record);
        records.push_back(record);
        return true;
      });
      workspace counter;
      (void)detail::chunk_buffers<Codec>::take(counter, *profile_, most, encode);
      memory_.resize(std::max(memory_.size(), counter.needed()));
      workspace space(memory_);
      buffers_ = detail::chunk_buffers<Codec>::take(space, *profile_, most, encode);
      detail::chunk_coder<Codec> coder(*profile_, {}, best_instruction_set(), buffers_);
      for (chunk_record& record : records) {
        const result<void> done = visit(coder, record);
        if (!done) return done.error().at_layer(record.layer_begin).at_token(static_cast<std::int64_t>(record.token_begin));
      }
      return {};
    } catch (...) {
      return error{error_code::out_of_memory, "rows for another machine"};
    }
  }

  const profile<Codec>* profile_;
  std::vector<std::byte> memory_;
  detail::chunk_buffers<Codec> buffers_;  // in `memory_`
};

}  // namespace kvexact

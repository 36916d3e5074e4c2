// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/bitstream/container.hpp>
#include <kvexact/codec/profile.hpp>
#include <kvexact/codec/profile_data.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/residual/residual_model.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// Value of a chunk's `mode` for values kept as they are; any other value is the id of the predictor.
inline constexpr std::uint32_t stored_mode = 0;

/// Most padded values of a chunk (tokens rounded up to full rows); bounds the memory of encoders and decoders.
inline constexpr std::uint64_t max_chunk_values = std::uint64_t{1} << 21;
/// Most numbers of the correction that a closed loop's engine gets for a chunk: hidden width * tokens rounded up to full rows.
inline constexpr std::uint64_t max_chunk_correction = std::uint64_t{1} << 24;

/// What a stream says of itself. See docs/format.md.
struct stream_header {
  number_format format = number_format::bfloat16;
  std::uint32_t predictor = 0;
  std::uint32_t residual = 0;
  std::uint32_t coder = 0;
  std::uint32_t lanes = 0;
  std::uint32_t precision = 0;
  std::uint64_t profile_hash = 0;
  cache_shape shape;
  std::vector<std::uint32_t> storage_scales;  ///< bits of binary32, one a tile, or empty
};

/// Place and kind of one chunk.
struct chunk_record {
  std::uint32_t mode = stored_mode;
  std::uint32_t layer_begin = 0;
  std::uint32_t layer_count = 0;
  std::uint32_t token_count = 0;
  std::uint64_t token_begin = 0;
  std::uint64_t offset = 0;  ///< from the first chunk
  std::uint64_t bytes = 0;   ///< with its header

  [[nodiscard]] index_range tokens() const noexcept { return {token_begin, token_begin + token_count}; }
  [[nodiscard]] index_range layers() const noexcept { return {layer_begin, std::uint64_t{layer_begin} + layer_count}; }
};

/// What stands before a chunk's payload.
struct chunk_header {
  chunk_record record;                ///< `offset` is not stored here
  std::uint64_t fingerprint = 0;      ///< of the external predictions; 0 if the mode uses none
  std::uint64_t values_checksum = 0;  ///< of the decoded values
  std::uint64_t coded_checksum = 0;   ///< of the header before it and of the payload
};

namespace detail {

inline constexpr std::uint32_t head_section = 1;
inline constexpr std::uint32_t chunk_section = 2;
inline constexpr std::uint32_t index_section = 3;
inline constexpr std::uint32_t token_section = 4;
inline constexpr std::uint32_t chunk_magic = 0x4b485843U;  // "CXHK"
inline constexpr std::size_t chunk_header_bytes = 64;
inline constexpr std::size_t chunk_record_bytes = 40;

/// Of a stream that is written with this profile, without storage scales.
template <class Codec>
[[nodiscard]] stream_header stream_header_of(const profile<Codec>& parameters) {
  stream_header header;
  header.format = Codec::format;
  header.predictor = Codec::predictor_type::id;
  header.residual = Codec::residual_model_type::id;
  header.coder = Codec::entropy_coder_type::id;
  header.lanes = Codec::entropy_coder_type::lanes;
  header.precision = Codec::entropy_coder_type::precision;
  header.profile_hash = parameters.hash();
  header.shape = parameters.shape();
  return header;
}

[[nodiscard]] inline std::vector<std::byte> write_stream_header(const stream_header& header) {
  std::vector<std::byte> bytes;
  byte_writer out(bytes);
  out.put(static_cast<std::uint32_t>(header.format));
  out.put(header.predictor);
  out.put(header.residual);
  out.put(header.coder);
  out.put(header.lanes);
  out.put(header.precision);
  out.put(header.profile_hash);
  put_shape(out, header.shape);
  out.put(static_cast<std::uint32_t>(header.storage_scales.size()));
  for (const std::uint32_t scale : header.storage_scales) out.put(scale);
  return bytes;
}

[[nodiscard]] inline result<stream_header> read_stream_header(std::span<const std::byte> bytes) {
  byte_reader in(bytes);
  stream_header header;
  const auto format = in.get<std::uint32_t>();
  header.predictor = in.get<std::uint32_t>();
  header.residual = in.get<std::uint32_t>();
  header.coder = in.get<std::uint32_t>();
  header.lanes = in.get<std::uint32_t>();
  header.precision = in.get<std::uint32_t>();
  header.profile_hash = in.get<std::uint64_t>();
  if (!in.ok()) return error{error_code::truncated, "stream header"};
  if (format < 1 || format > 4) return error{error_code::unsupported, "number format of the stream"};
  header.format = static_cast<number_format>(format);
  auto shape = get_shape(in);
  if (!shape) return shape.error();
  header.shape = *std::move(shape);
  const auto scales = in.get<std::uint32_t>();
  if (scales != 0 && scales != count_tiles(header.shape)) return error{error_code::corrupt, "number of storage scales"};
  header.storage_scales.resize(scales);
  for (std::uint32_t& scale : header.storage_scales) scale = in.get<std::uint32_t>();
  if (!in.ok() || in.remaining() != 0) return error{error_code::corrupt, "size of the stream header"};
  return header;
}

inline void put_record(byte_writer& out, const chunk_record& record) {
  out.put(record.mode);
  out.put(record.layer_begin);
  out.put(record.layer_count);
  out.put(record.token_count);
  out.put(record.token_begin);
  out.put(record.offset);
  out.put(record.bytes);
}

[[nodiscard]] inline chunk_record get_record(byte_reader& in) noexcept {
  chunk_record record;
  record.mode = in.get<std::uint32_t>();
  record.layer_begin = in.get<std::uint32_t>();
  record.layer_count = in.get<std::uint32_t>();
  record.token_count = in.get<std::uint32_t>();
  record.token_begin = in.get<std::uint64_t>();
  record.offset = in.get<std::uint64_t>();
  record.bytes = in.get<std::uint64_t>();
  return record;
}

/// Header and payload checksummed together; fills in the coded checksum.
[[nodiscard]] inline std::array<std::byte, chunk_header_bytes> write_chunk_header(const chunk_header& header,
                                                                                  std::span<const std::byte> payload) noexcept {
  std::array<std::byte, chunk_header_bytes> bytes{};
  std::byte* const to = bytes.data();
  store_little_endian(to, chunk_magic);
  store_little_endian(to + 4, header.record.mode);
  store_little_endian(to + 8, header.record.layer_begin);
  store_little_endian(to + 12, header.record.layer_count);
  store_little_endian(to + 16, header.record.token_count);
  store_little_endian(to + 20, std::uint32_t{0});
  store_little_endian(to + 24, header.record.token_begin);
  store_little_endian(to + 32, header.record.bytes);
  store_little_endian(to + 40, header.fingerprint);
  store_little_endian(to + 48, header.values_checksum);
  chained_checksum sum;
  sum.update(std::span(bytes).first(56));
  sum.update(payload);
  store_little_endian(to + 56, sum.digest());
  return bytes;
}

/// Reads the header of the chunk that `bytes` holds and checks its magic number, size and coded checksum.
[[nodiscard]] inline result<chunk_header> read_chunk_header(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() < chunk_header_bytes) return error{error_code::truncated, "chunk header"};
  const std::byte* const from = bytes.data();
  if (load_little_endian<std::uint32_t>(from) != chunk_magic) return error{error_code::corrupt, "not a chunk: wrong magic number"};
  chunk_header header;
  header.record.mode = load_little_endian<std::uint32_t>(from + 4);
  header.record.layer_begin = load_little_endian<std::uint32_t>(from + 8);
  header.record.layer_count = load_little_endian<std::uint32_t>(from + 12);
  header.record.token_count = load_little_endian<std::uint32_t>(from + 16);
  header.record.token_begin = load_little_endian<std::uint64_t>(from + 24);
  header.record.bytes = load_little_endian<std::uint64_t>(from + 32);
  header.fingerprint = load_little_endian<std::uint64_t>(from + 40);
  header.values_checksum = load_little_endian<std::uint64_t>(from + 48);
  header.coded_checksum = load_little_endian<std::uint64_t>(from + 56);
  if (header.record.bytes != bytes.size()) return error{error_code::corrupt, "chunk size"};
  chained_checksum sum;
  sum.update(bytes.first(56));
  sum.update(bytes.subspan(chunk_header_bytes));
  if (sum.digest() != header.coded_checksum) return error{error_code::checksum_mismatch, "coded bytes of a chunk"};
  if (load_little_endian<std::uint32_t>(from + 20) != 0) return error{error_code::unsupported, "reserved field of a chunk"};
  return header;
}

/// Index: u64 tokens, then one record a chunk.
[[nodiscard]] inline std::vector<std::byte> write_index(std::uint64_t tokens, std::span<const chunk_record> chunks) {
  std::vector<std::byte> bytes;
  bytes.reserve(8 + chunks.size() * chunk_record_bytes);
  byte_writer out(bytes);
  out.put(tokens);
  for (const chunk_record& record : chunks) put_record(out, record);
  return bytes;
}

/// Token ids: u32 bytes for each (1 to 4), then the ids.
[[nodiscard]] inline std::vector<std::byte> write_token_ids(std::span<const std::uint32_t> ids) {
  const std::uint32_t largest = ids.empty() ? 0 : *std::max_element(ids.begin(), ids.end());
  const auto size = static_cast<std::uint32_t>(std::max((static_cast<int>(std::bit_width(largest)) + 7) / 8, 1));
  std::vector<std::byte> bytes;
  bytes.reserve(4 + ids.size() * size);
  byte_writer out(bytes);
  out.put(size);
  for (const std::uint32_t id : ids) {
    for (std::uint32_t b = 0; b < size; ++b) out.put(static_cast<std::uint8_t>(id >> (8 * b)));
  }
  return bytes;
}

[[nodiscard]] inline result<std::vector<std::uint32_t>> read_token_ids(std::span<const std::byte> bytes, std::uint64_t tokens) {
  byte_reader in(bytes);
  const auto size = in.get<std::uint32_t>();
  if (!in.ok() || size < 1 || size > 4 || in.remaining() % size != 0 || in.remaining() / size != tokens)
    return error{error_code::corrupt, "size of the token ids"};
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(tokens));
  for (std::uint32_t& id : ids) {
    for (std::uint32_t b = 0; b < size; ++b) id |= std::uint32_t{in.get<std::uint8_t>()} << (8 * b);
  }
  return ids;
}

/// Tokens rounded up to full rows.
[[nodiscard]] constexpr std::uint64_t pad_to_rows(std::uint64_t tokens) noexcept { return (tokens + row_lanes - 1) / row_lanes * row_lanes; }

/// Values of a chunk with its tokens rounded up to full rows.
[[nodiscard]] inline std::uint64_t padded_values(const cache_shape& shape, index_range layers, std::uint64_t tokens) noexcept {
  std::uint64_t channels = 0;
  for (std::uint64_t l = layers.begin; l < layers.end; ++l) channels += shape.layer(static_cast<std::uint32_t>(l)).channels();
  return channels * pad_to_rows(tokens);
}

/// Padded values of the largest tile of a chunk.
[[nodiscard]] inline std::uint64_t largest_tile(const cache_shape& shape, const chunk_record& record) noexcept {
  std::uint64_t channels = 0;
  for (std::uint64_t l = record.layers().begin; l < record.layers().end; ++l) {
    const layer_shape& layer = shape.layer(static_cast<std::uint32_t>(l));
    channels = std::max<std::uint64_t>({channels, layer.channels(cache_part::key), layer.channels(cache_part::value)});
  }
  return channels * pad_to_rows(record.token_count);
}

struct stream_index {
  std::uint64_t tokens = 0;
  std::vector<chunk_record> chunks;
};

/// Reads and validates an index: chunks follow each other without gaps, in bands of equal token ranges that each cover all layers in
/// order, and none exceeds `max_chunk_values`.
[[nodiscard]] inline result<stream_index> read_index(std::span<const std::byte> bytes, const cache_shape& shape, std::uint64_t chunk_bytes) {
  if (bytes.size() < 8 || (bytes.size() - 8) % chunk_record_bytes != 0) return error{error_code::corrupt, "size of the chunk index"};
  byte_reader in(bytes);
  stream_index index;
  index.tokens = in.get<std::uint64_t>();
  const std::size_t count = (bytes.size() - 8) / chunk_record_bytes;
  index.chunks.reserve(count);
  std::uint64_t offset = 0;
  std::uint64_t layer = 0;
  index_range band;
  for (std::size_t i = 0; i < count; ++i) {
    const chunk_record record = get_record(in);
    const error bad{error_code::corrupt, "chunk index", record.layer_begin, static_cast<std::int64_t>(record.token_begin & INT64_MAX)};
    if (layer == 0) {
      if (record.token_begin != band.end || record.token_count == 0) return bad;
      band = {band.end, band.end + record.token_count};
    }
    if (record.tokens() != band || record.layer_begin != layer || record.layer_count == 0 || record.layers().end > shape.layers()) return bad;
    if (record.offset != offset || record.bytes < chunk_header_bytes || record.bytes > chunk_bytes - offset) return bad;
    if (padded_values(shape, record.layers(), record.token_count) > max_chunk_values) return bad;
    offset += record.bytes;
    layer = record.layers().end == shape.layers() ? 0 : record.layers().end;
    index.chunks.push_back(record);
  }
  if (layer != 0 || offset != chunk_bytes || band.end != index.tokens) return error{error_code::corrupt, "chunk index does not cover the stream"};
  return index;
}

}  // namespace detail
}  // namespace kvexact

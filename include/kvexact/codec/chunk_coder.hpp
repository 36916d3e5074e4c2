// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <kvexact/bitstream/bit_io.hpp>
#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/codec/profile.hpp>
#include <kvexact/codec/stream_format.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/entropy/entropy_coder.hpp>
#include <kvexact/numeric/fixed_point.hpp>
#include <kvexact/prediction/map_session.hpp>
#include <kvexact/prediction/predictor.hpp>
#include <kvexact/residual/residual_model.hpp>
#include <kvexact/tensor/channel_blocks.hpp>
#include <kvexact/tensor/tile.hpp>

namespace kvexact::detail {

// Checksums of values and predictions are taken over them as they lie in memory.
static_assert(std::endian::native == std::endian::little, "kvexact: the codec needs a little-endian machine");

/// Whether something of type `Prediction` can predict for a codec.
template <class Codec, class Prediction>
concept takes_prediction = (std::same_as<typename Codec::predictor_type, closed_loop> ? layerwise_predictor<std::remove_cvref_t<Prediction>>
                                                                                      : kv_cache<std::remove_cvref_t<Prediction>>);

/// Stands where the state of a mapped predictor would, for predictors of single tiles.
struct no_session {
  struct buffers {};
};

template <class Codec>
struct session_of {
  using type = no_session;
};
template <class Codec>
  requires mapped_predictor<typename Codec::predictor_type>
struct session_of<Codec> {
  using type = map_session<typename Codec::predictor_type, typename Codec::scalar>;
};
/// What goes from one chunk of a token range to the next.
template <class Codec>
using session_type = typename session_of<Codec>::type;

/// Most tokens of a chunk, whatever the number of its values: a multiple of `row_lanes`, at least 256.
template <class Codec>
[[nodiscard]] std::uint64_t most_chunk_tokens(const profile<Codec>& parameters) noexcept {
  std::uint64_t width = 1;
  if constexpr (mapped_predictor<typename Codec::predictor_type>)
    width = std::max<std::uint64_t>(parameters.template model<typename Codec::predictor_type>().maps().hidden_width(), 1);
  return max_chunk_correction / width / row_lanes * row_lanes;
}

/// Memory that coding one chunk needs, carved from the caller's workspace.
template <class Codec>
struct chunk_buffers {
  using bits_type = typename Codec::residual_model_type::bits_type;

  std::span<bits_type> values;          // tiles of the chunk, one after the other, [channel][padded token]
  std::span<std::uint32_t> means;       // one tile
  std::span<std::uint8_t> symbols;      // encoder only: the whole chunk in coding order
  std::span<std::uint16_t> tables;      // encoder only, beside the symbols
  std::span<std::byte> payload;         // encoder only
  std::span<std::byte> second_payload;  // encoder only, where there are two predictors to choose from
  std::span<std::byte> raw_bits;        // encoder only
  typename session_type<Codec>::buffers session;

  static constexpr bool has_choice = !std::same_as<typename Codec::predictor_type, channel_mean>;

  /// What the largest chunk needs, in padded values, and the longest token range.
  struct sizes {
    std::uint64_t values = 0;
    std::uint64_t tile = 0;    // of one tile
    std::uint64_t stride = 0;  // tokens

    void include(const cache_shape& shape, const chunk_record& record) noexcept {
      values = std::max(values, padded_values(shape, record.layers(), record.token_count));
      tile = std::max(tile, largest_tile(shape, record));
      stride = std::max(stride, pad_to_rows(record.token_count));
    }
  };
  static chunk_buffers take(workspace& memory, const profile<Codec>& parameters, const sizes& most, bool encode) noexcept {
    chunk_buffers buffers;
    const auto most_values = static_cast<std::size_t>(most.values);
    buffers.values = memory.take<bits_type>(most_values);
    buffers.means = memory.take<std::uint32_t>(static_cast<std::size_t>(most.tile));
    if constexpr (mapped_predictor<typename Codec::predictor_type>) {
      const auto& model = parameters.template model<typename Codec::predictor_type>();
      buffers.session = session_type<Codec>::buffers::take(memory, parameters.shape(), parameters.rotation(), model.maps(), static_cast<std::size_t>(most.stride));
    }
    if (!encode) return buffers;
    const std::size_t payload_bytes = most_values * sizeof(bits_type) + 1024;
    buffers.symbols = memory.take<std::uint8_t>(most_values);
    buffers.tables = memory.take<std::uint16_t>(most_values);
    buffers.payload = memory.take<std::byte>(payload_bytes);
    if (has_choice) buffers.second_payload = memory.take<std::byte>(payload_bytes);
    buffers.raw_bits = memory.take<std::byte>(payload_bytes);
    return buffers;
  }
};

/// What a kernel needs of one tile.
struct tile_job {
  std::uint32_t channels = 0;
  std::uint32_t tokens = 0;
  std::size_t stride = 0;
  const std::uint32_t* means = nullptr;
  const std::int16_t* sigmas = nullptr;
  std::int32_t sigma_shift = 0;            // log2 of the storage scale
  const std::int32_t* token_scales = nullptr;  // log2, one a token, or null
  const std::uint16_t* tables = nullptr;   // context -> table
};

/// Prepares the row that starts at token `first` of channel `c`.
template <class Residual>
KVEXACT_ALWAYS_INLINE void prepare_row(const tile_job& job, std::size_t c, std::size_t first, typename Residual::row& row,
                                       std::uint16_t* tables) noexcept {
  alignas(64) std::array<std::int32_t, row_lanes> sigmas;
  const std::int32_t sigma = job.sigmas[c] - job.sigma_shift;
  if (job.token_scales == nullptr) {
    sigmas.fill(sigma);
  } else {
    for (std::size_t i = 0; i < row_lanes; ++i) sigmas[i] = sigma + job.token_scales[first + i];
  }
  Residual::prepare(job.means + c * job.stride + first, sigmas.data(), row);
  for (std::size_t i = 0; i < row_lanes; ++i) tables[i] = job.tables[row.context[i]];
}

/// Values of a tile to symbols, tables (both [channel][padded token]) and raw bits.
template <class Residual>
struct symbolize_kernel {
  KVEXACT_ALWAYS_INLINE static void run(const tile_job& job, const encode_entry* entries, const typename Residual::bits_type* values,
                                        std::uint8_t* symbols, std::uint16_t* tables, bit_writer& raw_bits) noexcept {
    typename Residual::row row;
    bit_writer bits_out = raw_bits;
    const std::size_t full = job.tokens / row_lanes * row_lanes;
    for (std::size_t c = 0; c < job.channels; ++c) {
      const std::size_t at = c * job.stride;
      for (std::size_t first = 0; first < job.tokens; first += row_lanes) {
        prepare_row<Residual>(job, c, first, row, tables + at + first);
        if (first < full) {
          run_row(entries, values + at + first, row, symbols + at + first, tables + at + first, bits_out, row_lanes);
        } else {
          run_short_row(entries, values + at + first, row, symbols + at + first, tables + at + first, bits_out, static_cast<int>(job.tokens - first));
        }
      }
    }
    raw_bits = bits_out;
  }

 private:
  KVEXACT_ALWAYS_INLINE static void run_row(const encode_entry* entries, const typename Residual::bits_type* values,
                                            const typename Residual::row& row, std::uint8_t* symbols, const std::uint16_t* tables,
                                            bit_writer& raw_bits, int n) noexcept {
    Residual::to_symbols(values, row, symbols, n);
    for (int i = 0; i < n; ++i) {
      const bool codable = entries[(std::size_t{tables[i]} << 8) + symbols[i]].frequency != 0;
      symbols[i] = codable ? symbols[i] : static_cast<std::uint8_t>(Residual::escape_symbol);
    }
    Residual::put_raw(values, row, symbols, raw_bits, n);
  }
  KVEXACT_NO_INLINE static void run_short_row(const encode_entry* entries, const typename Residual::bits_type* values,
                                              const typename Residual::row& row, std::uint8_t* symbols, const std::uint16_t* tables,
                                              bit_writer& raw_bits, int n) noexcept {
    run_row(entries, values, row, symbols, tables, raw_bits, n);
  }
};

/// Symbols of a tile to the entropy coder, in the order it wants.
template <class Coder>
struct code_kernel {
  template <class Model>
  KVEXACT_ALWAYS_INLINE static void run(const tile_job& job, const Model& model, const std::uint8_t* symbols, const std::uint16_t* tables,
                                        typename Coder::encoder& encoder) noexcept {
    const std::size_t rows = (job.tokens + row_lanes - 1) / row_lanes;
    for (std::size_t i = 0; i < job.channels; ++i) {
      const std::size_t c = Coder::encode_order == row_order::reverse ? job.channels - 1 - i : i;
      for (std::size_t j = 0; j < rows; ++j) {
        const std::size_t first = (Coder::encode_order == row_order::reverse ? rows - 1 - j : j) * row_lanes;
        const std::size_t at = c * job.stride + first;
        if (job.tokens - first >= row_lanes) {
          (void)encoder.put_row(model, tables + at, symbols + at, row_lanes);
        } else {
          put_short_row(model, symbols + at, tables + at, encoder, static_cast<int>(job.tokens - first));
        }
      }
    }
  }

 private:
  template <class Model>
  KVEXACT_NO_INLINE static void put_short_row(const Model& model, const std::uint8_t* symbols, const std::uint16_t* tables,
                                              typename Coder::encoder& encoder, int n) noexcept {
    (void)encoder.put_row(model, tables, symbols, n);
  }
};

#ifdef KVEXACT_TARGET_AVX512
/// Both policies do full rows by AVX-512.
template <class Residual, class Coder, class Model>
concept has_avx512_rows = requires(typename Coder::decoder::avx512 rows, typename Residual::avx512::row row, const Model& model) {
  rows.get_row(model, row.table);
};
#endif

template <class Residual, class Coder>
struct decode_kernel {
  template <class Model>
  KVEXACT_ALWAYS_INLINE static void run(const tile_job& job, const Model& model, typename Coder::decoder& decoder, bit_reader& raw_bits,
                                        typename Residual::bits_type* values) noexcept {
    // Local copies: the compiler need not fear that stores to the values change them.
    typename Coder::decoder symbols_in = decoder;
    bit_reader bits_in = raw_bits;
    typename Residual::row row;
    alignas(64) std::array<std::uint16_t, row_lanes> tables{};
    alignas(64) std::array<std::uint8_t, row_lanes> symbols{};
    const std::size_t full = job.tokens / row_lanes * row_lanes;
    for (std::size_t c = 0; c < job.channels; ++c) {
      typename Residual::bits_type* const out = values + c * job.stride;
      for (std::size_t first = 0; first < job.tokens; first += row_lanes) {
        prepare_row<Residual>(job, c, first, row, tables.data());
        if (first < full) {
          symbols_in.get_row(model, tables.data(), symbols.data(), row_lanes);
          Residual::decode(symbols.data(), row, bits_in, out + first, row_lanes);
        } else {
          decode_short_row(model, row, tables.data(), symbols_in, bits_in, out + first, static_cast<int>(job.tokens - first));
        }
      }
    }
    decoder = symbols_in;
    raw_bits = bits_in;
  }

#ifdef KVEXACT_TARGET_AVX512
  template <class Model>
  KVEXACT_TARGET_AVX512 static void run_avx512(const tile_job& job, const Model& model, typename Coder::decoder& decoder,
                                               bit_reader& raw_bits, typename Residual::bits_type* values) noexcept
    requires has_avx512_rows<Residual, Coder, Model>
  {
    // Rows by AVX-512 have one sigma each.
    if (job.token_scales != nullptr) return run(job, model, decoder, raw_bits, values);
    bit_reader bits_in = raw_bits;
    typename Coder::decoder::avx512 symbols_in(decoder);
    const std::size_t full = job.tokens / row_lanes * row_lanes;
    for (std::size_t c = 0; c < job.channels; ++c) {
      typename Residual::bits_type* const out = values + c * job.stride;
      const auto channel = Residual::avx512::start(job.sigmas[c] - job.sigma_shift, job.tables);
      for (std::size_t first = 0; first < full; first += row_lanes) {
        const auto row = Residual::avx512::prepare(channel, job.means + c * job.stride + first);
        Residual::avx512::decode(channel, row, symbols_in.get_row(model, row.table), bits_in, out + first);
      }
      if (full == job.tokens) continue;
      symbols_in.stop();
      typename Residual::row row;
      std::array<std::uint16_t, row_lanes> tables;
      prepare_row<Residual>(job, c, full, row, tables.data());
      decode_short_row(model, row, tables.data(), decoder, bits_in, out + full, static_cast<int>(job.tokens - full));
      symbols_in = typename Coder::decoder::avx512(decoder);
    }
    symbols_in.stop();
    raw_bits = bits_in;
  }
#endif

 private:
  template <class Model>
  KVEXACT_NO_INLINE static void decode_short_row(const Model& model, const typename Residual::row& row, const std::uint16_t* tables,
                                                 typename Coder::decoder& decoder, bit_reader& raw_bits,
                                                 typename Residual::bits_type* values, int n) noexcept {
    std::array<std::uint8_t, row_lanes> symbols{};
    decoder.get_row(model, tables, symbols.data(), n);
    Residual::decode(symbols.data(), row, raw_bits, values, n);
  }
};

/// Codes single chunks. Stateless but for references and the session; the same bytes whatever the instruction set.
template <class Codec>
class chunk_coder {
 public:
  using residual = typename Codec::residual_model_type;
  using coder = typename Codec::entropy_coder_type;
  using bits_type = typename residual::bits_type;
  using buffers_type = chunk_buffers<Codec>;
  using predictor_type = typename Codec::predictor_type;
  static constexpr bool is_mapped = mapped_predictor<predictor_type>;

  /// `scales`: bits of the storage scales, one a tile, or empty.
  chunk_coder(const profile<Codec>& parameters, std::span<const std::uint32_t> scales, instruction_set set, const buffers_type& buffers) noexcept
      : profile_(&parameters), scales_(scales), set_(set) {
    if constexpr (is_mapped)
      session_ = session_type<Codec>(parameters.shape(), parameters.rotation(), parameters.template model<predictor_type>().maps(), scales, set, buffers.session);
  }

  /// Encodes `cache` in the range of `record` and sets the record's mode and bytes. The result's payload lies in `buffers`. Chunks of a
  /// token range must come in order. Errors: those of a closed loop's engine.
  struct encoded {
    chunk_header header;
    std::span<const std::byte> payload;
  };
  template <class Cache, class Prediction>
  [[nodiscard]] result<encoded> encode(const Cache& cache, Prediction& prediction, const chunk_record& record, buffers_type& buffers) noexcept {
    encoded out;
    out.header.record = record;
    chained_checksum sum;
    std::size_t at = 0;
    std::uint64_t values = 0;
    for_each_tile(record, [&](const tile_shape& shape, std::size_t) {
      bits_type* const tile = buffers.values.data() + at;
      gather_tile(cache, shape, tile);
      const auto tokens = static_cast<std::size_t>(shape.tokens.size());
      for (std::size_t c = 0; c < shape.channels(); ++c) std::fill(tile + c * shape.stride + tokens, tile + (c + 1) * shape.stride, bits_type{0});
      sum.update(std::as_bytes(std::span(tile, shape.channels() * shape.stride)));
      at += shape.channels() * shape.stride;
      values += shape.channels() * tokens;
    });
    out.header.values_checksum = sum.digest();

    const std::size_t stored_bytes = static_cast<std::size_t>(values) * sizeof(bits_type);
    const auto attempt = [&]<class Predictor>(const Predictor&, std::span<std::byte> payload, std::size_t limit) -> result<void> {
      std::uint64_t fingerprint = 0;
      const auto bytes = encode_with<Predictor>(prediction, record, buffers, payload, limit, fingerprint);
      if (!bytes) return bytes.error();
      if (*bytes == 0) return {};
      out.header.record.mode = Predictor::id;
      out.header.fingerprint = fingerprint;
      out.payload = payload.first(*bytes);
      return {};
    };
    if (const auto tried = attempt(predictor_type{}, buffers.payload, stored_bytes); !tried) return tried.error();
    if constexpr (buffers_type::has_choice) {
      // Where the prediction does no better than no prediction usually does, see what that gives here.
      const std::uint64_t usual = profile_->fallback_bits_q8() * values / (256 * 8);
      if (profile_->has_fallback() && (out.payload.empty() || out.payload.size() * 10 > usual * 9)) {
        const std::size_t limit = out.payload.empty() ? stored_bytes : out.payload.size() - 1;
        if (const auto tried = attempt(channel_mean{}, buffers.second_payload, limit); !tried) return tried.error();
      }
    }
    if (out.payload.empty()) store(record, buffers, out);
    out.header.record.bytes = chunk_header_bytes + out.payload.size();
    return out;
  }

  /// Decodes the chunk in `bytes`, whose place the index gives as `record`, into `buffers.values`; nothing else is touched. Chunks of a
  /// token range must come in order if the predictor needs that.
  template <class Prediction>
  [[nodiscard]] result<void> decode(std::span<const std::byte> bytes, const chunk_record& record, Prediction& prediction, buffers_type& buffers) noexcept {
    const auto header = read_chunk_header(bytes);
    if (!header) return header.error();
    const chunk_record& own = header->record;
    if (own.mode != record.mode || own.layers() != record.layers() || own.tokens() != record.tokens())
      return error{error_code::corrupt, "a chunk's header differs from the index"};
    const std::span<const std::byte> payload = bytes.subspan(chunk_header_bytes);
    constexpr bool lacks_prediction = predictor_type::needs_prediction && std::same_as<std::remove_cv_t<Prediction>, no_prediction>;
    if (record.mode == predictor_type::id) {
      if constexpr (lacks_prediction) {
        return error{error_code::prediction_missing, "the chunk was coded against a prediction, and none was given"};
      } else {
        return decode_with<predictor_type>(prediction, record, payload, *header, buffers);
      }
    }
    if (record.mode == stored_mode) {
      if (const auto restored = restore(record, payload, *header, buffers); !restored) return restored;
    } else if (record.mode == channel_mean::id) {
      if (!profile_->has_fallback()) return error{error_code::corrupt, "the chunk needs channel means that the profile lacks"};
      if (const auto decoded = decode_with<channel_mean>(prediction, record, payload, *header, buffers); !decoded) return decoded;
    } else {
      return error{error_code::unsupported, "unknown mode of a chunk"};
    }
    if constexpr (is_mapped && !lacks_prediction) return follow(prediction, record, buffers);
    return {};
  }

  /// Copies the values of the last decoded chunk that lie in the wanted ranges into a cache.
  template <class Cache>
  void publish(const chunk_record& record, index_range layers, index_range tokens, const buffers_type& buffers, const Cache& cache) const noexcept {
    std::size_t at = 0;
    for_each_tile(record, [&](const tile_shape& shape, std::size_t) {
      if (shape.layer >= layers.begin && shape.layer < layers.end) scatter_tile(cache, shape, tokens, buffers.values.data() + at);
      at += shape.channels() * shape.stride;
    });
  }

 private:
  [[nodiscard]] tile_shape tile_of(const chunk_record& record, std::uint32_t layer, cache_part part) const noexcept {
    const layer_shape& shape = profile_->shape().layer(layer);
    return {layer, part, record.tokens(), shape.kv_heads, shape.dim(part), static_cast<std::size_t>(pad_to_rows(record.token_count))};
  }

  /// Calls visit(tile shape, tile number) in coding order.
  template <class Visit>
  void for_each_tile(const chunk_record& record, Visit&& visit) const noexcept {
    for (std::uint64_t l = record.layer_begin; l < record.layers().end; ++l) {
      const auto layer = static_cast<std::uint32_t>(l);
      for (const cache_part part : cache_parts) {
        const tile_shape shape = tile_of(record, layer, part);
        if (shape.channels() > 0) visit(shape, profile_->tile_number(layer, part));
      }
    }
  }

  template <class Predictor>
  static constexpr bool runs_session = is_mapped && std::same_as<Predictor, predictor_type>;

  template <class Predictor, class Prediction>
  [[nodiscard]] result<void> begin(Prediction& prediction, const chunk_record& record) noexcept {
    if constexpr (runs_session<Predictor>) {
      if (record.layer_begin == 0) return session_.begin(record.tokens(), static_cast<std::size_t>(pad_to_rows(record.token_count)), prediction);
    }
    return {};
  }

  template <class Predictor>
  [[nodiscard]] std::span<const channel_block> blocks_of_tile(std::size_t tile, const channel_block& whole) const noexcept {
    if constexpr (runs_session<Predictor>) return session_.blocks(tile);
    return {&whole, 1};
  }

  /// Predicts a tile block by block and calls code(job, first scalar in the tile) for each run of channels, after which `values` must hold
  /// those of the run. `fingerprint` takes up the predictions.
  template <class Predictor, class Prediction, class Code>
  [[nodiscard]] result<void> walk_tile(const tile_shape& shape, std::size_t tile, const bits_type* values, Prediction& prediction, buffers_type& buffers,
                                       chained_checksum& fingerprint, Code&& code) noexcept {
    const auto& model = profile_->template model<Predictor>();
    std::uint32_t* const means = buffers.means.data();
    const std::size_t count = shape.channels() * shape.stride;
    if constexpr (runs_session<Predictor>) {
      if (const auto begun = session_.begin_tile(shape, tile, model.means(tile), prediction); !begun) return begun;
      if constexpr (Predictor::needs_prediction) fingerprint.update(std::as_bytes(session_.base().first(count)));
    } else {
      Predictor::predict(shape, {model.means(tile), &profile_->rotation()}, prediction, means);
      if constexpr (Predictor::needs_prediction) fingerprint.update(std::as_bytes(std::span(means, count)));
    }
    const bool scaled = !scales_.empty() && is_positive_normal(scales_[tile]);
    const integer_divider divide(scaled ? scales_[tile] : 0U);
    const channel_block whole = whole_tile(shape.channels());
    for (const channel_block& block : blocks_of_tile<Predictor>(tile, whole)) {
      if constexpr (runs_session<Predictor>) session_.predict(shape, tile, block, means);
      for (const channel_run& run : block.runs()) {
        const std::size_t first = run.first * shape.stride;
        if (scaled) {
          for (std::size_t i = first; i < first + run.count * shape.stride; ++i) means[i] = divide(means[i]);
        }
        tile_job job{run.count,          static_cast<std::uint32_t>(shape.tokens.size()),       shape.stride, means + first,
                     model.sigmas(tile).data() + run.first, scaled ? log2_in_256ths(scales_[tile]) : 0, nullptr,
                     model.context_tables(tile).data()};
        if constexpr (runs_session<Predictor>) job.token_scales = session_.token_scales();
        code(job, first);
      }
      if constexpr (runs_session<Predictor>) session_.accept(shape, tile, block, values);
    }
    if constexpr (runs_session<Predictor>) return session_.end_tile(shape, prediction);
    return {};
  }

  /// Keeps the session going past a chunk that was decoded without it.
  template <class Prediction>
  [[nodiscard]] result<void> follow(Prediction& prediction, const chunk_record& record, buffers_type& buffers) noexcept {
    result<void> status = begin<predictor_type>(prediction, record);
    const auto& model = profile_->template model<predictor_type>();
    std::size_t at = 0;
    for_each_tile(record, [&](const tile_shape& shape, std::size_t tile) {
      if (status) status = session_.begin_tile(shape, tile, model.means(tile), prediction);
      if (!status) return;
      for (const channel_block& block : session_.blocks(tile)) {
        session_.predict(shape, tile, block, buffers.means.data());
        session_.accept(shape, tile, block, buffers.values.data() + at);
      }
      status = session_.end_tile(shape, prediction);
      at += shape.channels() * shape.stride;
    });
    return status;
  }

  /// Size of the payload, or 0 if it would exceed `limit`.
  template <class Predictor, class Prediction>
  [[nodiscard]] result<std::size_t> encode_with(Prediction& prediction, const chunk_record& record, buffers_type& buffers, std::span<std::byte> payload,
                                                std::size_t limit, std::uint64_t& fingerprint) noexcept {
    const auto& model = profile_->template model<Predictor>();
    chained_checksum predictions;
    bit_writer raw_bits(buffers.raw_bits);
    result<void> status = begin<Predictor>(prediction, record);
    std::size_t at = 0;
    for_each_tile(record, [&](const tile_shape& shape, std::size_t tile) {
      if (!status) return;
      const bits_type* const values = buffers.values.data() + at;
      status = walk_tile<Predictor>(shape, tile, values, prediction, buffers, predictions, [&](const tile_job& job, std::size_t first) {
        run_on<symbolize_kernel<residual>>(set_, job, model.tables().entries(), values + first, buffers.symbols.data() + at + first,
                                           buffers.tables.data() + at + first, raw_bits);
      });
      at += shape.channels() * shape.stride;
    });
    if (!status) return status.error();
    if constexpr (Predictor::needs_prediction) fingerprint = predictions.digest();

    typename coder::encoder encoder(payload.subspan(4));
    const auto code_run = [&](std::size_t tile_at, const tile_shape& shape, const channel_run& run) {
      tile_job job;
      job.channels = run.count;
      job.tokens = record.token_count;
      job.stride = shape.stride;
      const std::size_t first = tile_at + run.first * shape.stride;
      run_on<code_kernel<coder>>(set_, job, model.tables(), buffers.symbols.data() + first, buffers.tables.data() + first, encoder);
    };
    if constexpr (coder::encode_order == row_order::reverse) {
      for_each_tile_reversed(record, [&](const tile_shape& shape, std::size_t tile) {
        at -= shape.channels() * shape.stride;
        const channel_block whole = whole_tile(shape.channels());
        const auto blocks = blocks_of_tile<Predictor>(tile, whole);
        for (std::size_t b = blocks.size(); b-- > 0;) {
          for (std::size_t r = blocks[b].runs().size(); r-- > 0;) code_run(at, shape, blocks[b].runs()[r]);
        }
      });
    } else {
      at = 0;
      for_each_tile(record, [&](const tile_shape& shape, std::size_t tile) {
        const channel_block whole = whole_tile(shape.channels());
        for (const channel_block& block : blocks_of_tile<Predictor>(tile, whole)) {
          for (const channel_run& run : block.runs()) code_run(at, shape, run);
        }
        at += shape.channels() * shape.stride;
      });
    }
    const auto coded = encoder.finish();
    const auto raw = raw_bits.finish();
    if (!coded || raw_bits.overflowed() || 4 + coded->size() + raw.size() > limit) return std::size_t{0};
    std::byte* const out = payload.data();
    store_little_endian(out, static_cast<std::uint32_t>(coded->size()));
    std::copy(coded->begin(), coded->end(), out + 4);  // downwards, may overlap
    std::copy(raw.begin(), raw.end(), out + 4 + coded->size());
    return 4 + coded->size() + raw.size();
  }

  template <class Visit>
  void for_each_tile_reversed(const chunk_record& record, Visit&& visit) const noexcept {
    for (std::uint64_t l = record.layers().end; l-- > record.layer_begin;) {
      const auto layer = static_cast<std::uint32_t>(l);
      for (const cache_part part : {cache_part::value, cache_part::key}) {
        const tile_shape shape = tile_of(record, layer, part);
        if (shape.channels() > 0) visit(shape, profile_->tile_number(layer, part));
      }
    }
  }

  template <class Predictor, class Prediction>
  [[nodiscard]] result<void> decode_with(Prediction& prediction, const chunk_record& record, std::span<const std::byte> payload,
                                         const chunk_header& header, buffers_type& buffers) noexcept {
    const auto& model = profile_->template model<Predictor>();
    if (payload.size() < 4) return error{error_code::truncated, "payload of a chunk"};
    const auto coded_bytes = load_little_endian<std::uint32_t>(payload.data());
    if (coded_bytes > payload.size() - 4) return error{error_code::corrupt, "size of a chunk's coded symbols"};
    auto decoder = coder::decoder::open(payload.subspan(4, coded_bytes));
    if (!decoder) return decoder.error();
    bit_reader raw_bits(payload.subspan(4 + coded_bytes));
    chained_checksum predictions;
    chained_checksum sum;
    result<void> status = begin<Predictor>(prediction, record);
    std::size_t at = 0;
    for_each_tile(record, [&](const tile_shape& shape, std::size_t tile) {
      if (!status) return;
      bits_type* const values = buffers.values.data() + at;
      if (record.token_count % row_lanes != 0) std::fill_n(values, shape.channels() * shape.stride, bits_type{0});
      status = walk_tile<Predictor>(shape, tile, values, prediction, buffers, predictions, [&](const tile_job& job, std::size_t first) {
        run_on<decode_kernel<residual, coder>>(set_, job, model.tables(), *decoder, raw_bits, values + first);
      });
      sum.update(std::as_bytes(std::span(values, shape.channels() * shape.stride)));
      at += shape.channels() * shape.stride;
    });
    if (!status) return status;
    if constexpr (Predictor::needs_prediction) {
      if (predictions.digest() != header.fingerprint)
        return error{error_code::prediction_mismatch, "the prediction differs from the one the chunk was coded with"};
    }
    if (const auto finished = decoder->finish(); !finished) return finished.error();
    if (!raw_bits.finish()) return error{error_code::corrupt, "raw bits of a chunk"};
    if (sum.digest() != header.values_checksum) return error{error_code::checksum_mismatch, "decoded values of a chunk"};
    return {};
  }

  /// Values as they are, tile by tile and channel by channel, without padding.
  void store(const chunk_record& record, buffers_type& buffers, encoded& out) const noexcept {
    std::byte* to = buffers.payload.data();
    const bits_type* tile = buffers.values.data();
    for_each_tile(record, [&](const tile_shape& shape, std::size_t) {
      for (std::size_t c = 0; c < shape.channels(); ++c, tile += shape.stride) {
        for (std::size_t t = 0; t < shape.tokens.size(); ++t, to += sizeof(bits_type)) store_little_endian(to, tile[t]);
      }
    });
    out.header.record.mode = stored_mode;
    out.header.fingerprint = 0;
    out.payload = std::span(buffers.payload).first(static_cast<std::size_t>(to - buffers.payload.data()));
  }

  [[nodiscard]] result<void> restore(const chunk_record& record, std::span<const std::byte> payload, const chunk_header& header,
                                     buffers_type& buffers) const noexcept {
    std::uint64_t values = 0;
    for_each_tile(record, [&](const tile_shape& shape, std::size_t) { values += std::uint64_t{shape.channels()} * record.token_count; });
    if (payload.size() != values * sizeof(bits_type)) return error{error_code::corrupt, "size of a chunk with stored values"};
    const std::byte* from = payload.data();
    bits_type* tile = buffers.values.data();
    chained_checksum sum;
    for_each_tile(record, [&](const tile_shape& shape, std::size_t) {
      bits_type* const begin = tile;
      for (std::size_t c = 0; c < shape.channels(); ++c, tile += shape.stride) {
        for (std::size_t t = 0; t < shape.tokens.size(); ++t, from += sizeof(bits_type)) tile[t] = load_little_endian<bits_type>(from);
        std::fill(tile + shape.tokens.size(), tile + shape.stride, bits_type{0});
      }
      sum.update(std::as_bytes(std::span(begin, tile)));
    });
    if (sum.digest() != header.values_checksum) return error{error_code::checksum_mismatch, "stored values of a chunk"};
    return {};
  }

  const profile<Codec>* profile_;
  std::span<const std::uint32_t> scales_;
  instruction_set set_;
  [[no_unique_address]] session_type<Codec> session_;
};

}  // namespace kvexact::detail

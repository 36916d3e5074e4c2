// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <kvexact/codec/map_calibration.hpp>
#include <kvexact/codec/options.hpp>
#include <kvexact/codec/profile_data.hpp>
#include <kvexact/codec/stream_encoder.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/entropy/entropy_model.hpp>

#include "example_cache.hpp"

/// The codec behind virtual functions, so that its kernels are compiled once a format and not once a test file, and tests can loop over
/// all codecs. Everything is passed on as it is.
namespace kvexact::test {

enum class layout { nhd, hnd, paged_nhd, paged_hnd };
inline constexpr std::array all_layouts{layout::nhd, layout::hnd, layout::paged_nhd, layout::paged_hnd};

/// The tokens of a cache that a view shows, and how they lie in memory. Paged views start at token 0.
struct source {
  const bits_cache* cache = nullptr;
  index_range tokens;
  layout how = layout::nhd;

  source(const bits_cache& all, layout lies = layout::nhd) : cache(&all), tokens{0, all.tokens}, how(lies) {}
  source(const bits_cache& some, index_range of, layout lies = layout::nhd) : cache(&some), tokens(of), how(lies) {}
};
using optional_source = std::optional<source>;

class fake_engine;

/// What a predictor may want beside the cache: nothing, a predicted cache, or an engine.
struct side_information {
  optional_source cache;
  fake_engine* engine = nullptr;

  side_information() = default;
  side_information(const source& prediction) : cache(prediction) {}
  side_information(const optional_source& prediction) : cache(prediction) {}
  side_information(fake_engine& predictor) : engine(&predictor) {}
};

/// Keeps what it is given, but refuses one call.
struct byte_collector {
  std::vector<std::byte> bytes;
  std::size_t calls = 0;
  std::size_t refused_call = ~std::size_t{0};

  bool operator()(std::span<const std::byte> piece) {
    if (calls++ == refused_call) return false;
    bytes.insert(bytes.end(), piece.begin(), piece.end());
    return true;
  }
};

class erased_encoder {
 public:
  virtual ~erased_encoder() = default;
  virtual result<void> append(const source& cache, const side_information& side = {}) = 0;
  virtual result<void> finish(std::span<const std::uint32_t> token_ids = {}) = 0;
  virtual std::uint64_t resume_offset() const = 0;
  virtual std::uint64_t tokens() const = 0;
  virtual std::span<const chunk_record> chunks() const = 0;
};

struct decode_call {
  index_range layers;
  index_range tokens;
  index_range room;  ///< tokens that the view of the destination shows
  layout how = layout::nhd;
  std::optional<std::size_t> workspace_bytes = {};  ///< as many as needed unless given
};

class erased_decoder {
 public:
  virtual ~erased_decoder() = default;
  /// Fails the running test if memory outside the view of `to` changes.
  virtual result<void> decode(const decode_call& call, bits_cache& to, const side_information& side = {}) const = 0;
  virtual std::uint64_t tokens() const = 0;
  virtual const stream_header& header() const = 0;
  virtual std::span<const chunk_record> chunks() const = 0;
  virtual std::span<const std::uint32_t> token_ids() const = 0;
  virtual std::size_t workspace_bytes() const = 0;
  virtual index_range covering_tokens(index_range tokens) const = 0;

  result<void> decode_all(bits_cache& to, const side_information& side = {}, layout how = layout::nhd) const {
    return decode({{0, header().shape.layers()}, {0, tokens()}, {0, to.tokens}, how}, to, side);
  }
};

struct encoder_call {
  std::span<const std::uint32_t> scales = {};
  encoder_options options = {};
  std::optional<std::size_t> workspace_bytes = {};
  std::span<const std::uint32_t> token_ids = {};  ///< for `encode`
};

/// A profile made ready.
class ready_codec {
 public:
  virtual ~ready_codec() = default;
  virtual std::uint64_t hash() const = 0;
  virtual const cache_shape& shape() const = 0;
  virtual std::size_t encoder_workspace_bytes(chunk_options options = {}) const = 0;
  virtual result<std::unique_ptr<erased_encoder>> begin(byte_collector& sink, const encoder_call& call = {}) const = 0;
  virtual result<std::unique_ptr<erased_encoder>> resume(byte_collector& sink, std::span<const std::byte> stream,
                                                         const encoder_call& call = {}) const = 0;
  virtual result<std::unique_ptr<erased_decoder>> open(std::span<const std::byte> stream,
                                                       instruction_set set = best_instruction_set()) const = 0;

  /// A whole stream by one call of append.
  result<std::vector<std::byte>> encode(const source& cache, const side_information& side = {}, const encoder_call& call = {}) const {
    byte_collector sink;
    const auto encoder = begin(sink, call);
    if (!encoder) return encoder.error();
    if (const auto appended = (*encoder)->append(cache, side); !appended) return appended.error();
    if (const auto finished = (*encoder)->finish(call.token_ids); !finished) return finished.error();
    return sink.bytes;
  }
};

/// An example to calibrate with; not paged.
struct calibration_input {
  source cache;
  side_information side = {};
  std::span<const std::uint32_t> scales = {};
};

enum class codec_kind { channel_mean, external, cross_layer, cross_layer_external, closed_loop };
inline constexpr std::array all_kinds{codec_kind::channel_mean, codec_kind::external, codec_kind::cross_layer,
                                      codec_kind::cross_layer_external};

inline const char* to_string(codec_kind kind) {
  switch (kind) {
    case codec_kind::channel_mean: return "channel_mean";
    case codec_kind::external: return "external";
    case codec_kind::cross_layer: return "cross_layer";
    case codec_kind::cross_layer_external: return "cross_layer_external";
    case codec_kind::closed_loop: break;
  }
  return "closed_loop";
}
/// Formats with all kinds. The mapped ones of fp8_e5m2 add nothing but compile time: the tests of the command line have them.
#if KVEXACT_TEST_FP16_MAPS
inline constexpr std::array mapped_formats{number_format::bfloat16, number_format::float16, number_format::float8_e4m3};
#else
inline constexpr std::array mapped_formats{number_format::bfloat16, number_format::float8_e4m3};
#endif
constexpr bool has_maps(number_format format) { return std::find(mapped_formats.begin(), mapped_formats.end(), format) != mapped_formats.end(); }
/// fp16 where it is built with maps, else the other format of 16 bits.
inline constexpr number_format mapped_float16 = has_maps(number_format::float16) ? number_format::float16 : number_format::bfloat16;
inline bool is_mapped(codec_kind kind) { return kind != codec_kind::channel_mean && kind != codec_kind::external; }

class codec_under_test {
 public:
  virtual ~codec_under_test() = default;
  virtual codec_kind kind() const = 0;
  virtual number_format format() const = 0;
  virtual std::uint32_t predictor() const = 0;
  virtual bool needs_prediction() const = 0;
  virtual result<profile_data> calibrate(const cache_shape& shape, const rotary& rotation, std::span<const calibration_input> examples,
                                         const calibration_options& options = {}) const = 0;
  virtual result<std::unique_ptr<ready_codec>> parse(std::span<const std::byte> profile_file, build_for use = build_for::both) const = 0;
  virtual result<std::unique_ptr<ready_codec>> make(const profile_data& data, std::uint64_t hash) const = 0;

  std::string name() const { return std::string(kvexact::to_string(format())) + " " + to_string(kind()); }
  optional_source prediction_of(const example& from) const { return needs_prediction() ? optional_source(from.prediction) : std::nullopt; }

  /// The profile file for some examples.
  result<std::vector<std::byte>> profile_for(std::span<const example> examples, const rotary& rotation = {},
                                             std::span<const std::uint32_t> scales = {}, const calibration_options& options = {}) const {
    std::vector<calibration_input> inputs;
    for (const example& each : examples) inputs.push_back({each.cache, prediction_of(each), scales});
    const auto data = calibrate(examples.front().cache.shape, rotation, inputs, options);
    if (!data) return data.error();
    return serialize_profile(*data);
  }
};

/// The codec of a format and a kind, with rANS.
const codec_under_test& codec_for(number_format format, codec_kind kind);
/// As `external` of fp8_e4m3, but with the range coder.
const codec_under_test& codec_with_range_coder();

/// The kinds of a format, but the closed loop, which needs an engine.
inline std::vector<codec_kind> kinds_of(number_format format) {
  std::vector<codec_kind> kinds;
  for (const codec_kind kind : all_kinds)
    if (!is_mapped(kind) || has_maps(format)) kinds.push_back(kind);
  return kinds;
}
/// All formats and their kinds.
inline std::vector<const codec_under_test*> all_codecs() {
  std::vector<const codec_under_test*> all;
  for (const number_format format : all_formats)
    for (const codec_kind kind : kinds_of(format)) all.push_back(&codec_for(format, kind));
  return all;
}
/// The same without the mapped kinds of fp16: for what takes long and has little to do with both maps and formats.
inline std::vector<const codec_under_test*> most_codecs() {
  std::vector<const codec_under_test*> most;
  for (const number_format format : all_formats) {
    for (const codec_kind kind : all_kinds) {
      if (is_mapped(kind) && format != number_format::bfloat16 && format != number_format::float8_e4m3) continue;
      most.push_back(&codec_for(format, kind));
    }
  }
  return most;
}

/// A codec with the profile for `tokens` tokens of examples. What the calls cannot fail at is not checked again.
struct prepared {
  const codec_under_test* codec;
  std::vector<std::byte> profile;
  std::unique_ptr<ready_codec> ready;

  prepared(const codec_under_test& of, const cache_shape& shape, const rotary& rotation = {}, std::uint64_t tokens = 300)
      : prepared(of, std::vector{make_example(shape, tokens, of.format(), 1)}, rotation) {}
  prepared(const codec_under_test& of, std::span<const example> examples, const rotary& rotation = {},
           std::span<const std::uint32_t> scales = {}, const calibration_options& options = {})
      : codec(&of), profile(*of.profile_for(examples, rotation, scales, options)), ready(*of.parse(profile)) {}

  optional_source prediction_of(const example& from) const { return codec->prediction_of(from); }
  std::vector<std::byte> encode(const example& from, const encoder_call& call = {}) const {
    return *ready->encode(from.cache, prediction_of(from), call);
  }
};

}  // namespace kvexact::test

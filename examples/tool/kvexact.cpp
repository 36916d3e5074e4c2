// SPDX-License-Identifier: Apache-2.0
// The codec on the command line, see --help.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <common/cache_file.hpp>
#include <common/interruption.hpp>
#include <common/map_costs.hpp>
#include <common/mapped_file.hpp>
#include <common/outcome.hpp>
#include <common/output_file.hpp>
#include <common/profile_fit.hpp>
#include <common/progress.hpp>
#include <common/safetensors.hpp>
#include <common/text_file.hpp>
#include <kvexact/codec/calibrate.hpp>
#include <kvexact/codec/codec.hpp>
#include <kvexact/core/version.hpp>

using namespace kvexact;
using namespace kvexact::examples;
using json = nlohmann::ordered_json;

namespace {

struct arguments {
  std::vector<std::string> inputs;
  std::vector<std::string> predictions;
  std::string out;
  std::string profile;
  std::optional<std::string> rotary_pairing;
  std::optional<double> rotary_base;
  std::optional<std::uint32_t> rotary_dim;
  std::string rotary_frequencies;
  std::string predictor = "cross_layer";
  bool plain = false;
  calibration_options maps;
  bool asks_for_maps = false;  // some option of `maps` was given
  bool as_json = false;
};

failure at(const std::string& path, const kvexact::error& why) { return {why.code, path + ": " + why.message()}; }

/// An output that is one of the inputs would take the place of what is needed to read it.
status expect_separate_output(const arguments& args) {
  std::vector<std::string> read = args.inputs;
  read.insert(read.end(), args.predictions.begin(), args.predictions.end());
  read.insert(read.end(), {args.profile, args.rotary_frequencies});
  for (const std::string& path : read) {
    std::error_code ignored;
    if (std::filesystem::equivalent(path, args.out, ignored))
      return failure{error_code::invalid_argument, args.out + ": would replace an input (" + path + "); give the output another name"};
  }
  return done;
}

/// Compares the shape of a cache with that of a profile or of another cache, `owner`, and says what differs.
status expect_same_shape(const std::string& path, const cache_shape& actual, const std::string& owner, const cache_shape& expected) {
  const auto fits = expect_shape(actual, expected);
  if (fits) return done;
  const auto layer = [&](const cache_shape& shape) {
    const layer_shape& of = shape.layer(static_cast<std::uint32_t>(fits.error().layer));
    return std::to_string(of.kv_heads) + " heads, key dim " + std::to_string(of.key_dim) + ", value dim " + std::to_string(of.value_dim);
  };
  const std::string found = path + ": shape_mismatch: ";
  if (fits.error().layer < 0)
    return failure{fits.error().code,
                   found + std::to_string(actual.layers()) + " layers, but " + owner + " has " + std::to_string(expected.layers())};
  return failure{fits.error().code, found + "layer " + std::to_string(fits.error().layer) + " has " + layer(actual) + ", but in " + owner +
                                        " " + layer(expected)};
}

void print_json(const json& report) {
  // A path may hold any bytes; JSON may not.
  std::printf("%s\n", report.dump(2, ' ', false, json::error_handler_t::replace).c_str());
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, value);
  return text;
}

double megabytes(std::uint64_t bytes) { return static_cast<double>(bytes) / 1e6; }

/// "512 bytes", "20.48 kB", "47.19 MB"
std::string size_in_words(std::uint64_t bytes) {
  if (bytes < 10000) return std::to_string(bytes) + " bytes";
  char text[40];
  const bool few = bytes < 1000000;
  std::snprintf(text, sizeof text, "%.2f %s", few ? static_cast<double>(bytes) / 1e3 : megabytes(bytes), few ? "kB" : "MB");
  return text;
}

class stopwatch {
 public:
  [[nodiscard]] double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Calls work.operator()<Codec>() for a number format and the id of a predictor, for which `path` asks.
template <class Work>
status with_codec(const std::string& path, number_format format, std::uint32_t predictor, Work&& work) {
  const auto choose = [&]<class Scalar>() -> status {
    switch (predictor) {
      case channel_mean::id: return work.template operator()<plain_codec_without_model<Scalar>>();
      case external::id: return work.template operator()<plain_codec_with_prediction<Scalar>>();
      case cross_layer<channel_mean>::id: return work.template operator()<codec_without_model<Scalar>>();
      case cross_layer<external>::id: return work.template operator()<codec_with_prediction<Scalar>>();
      default: return failure{error_code::unsupported, path + ": unsupported: unknown predictor " + std::to_string(predictor)};
    }
  };
  switch (format) {
    case number_format::bfloat16: return choose.template operator()<bf16>();
    case number_format::float16: return choose.template operator()<fp16>();
    case number_format::float8_e4m3: return choose.template operator()<fp8_e4m3>();
    case number_format::float8_e5m2: return choose.template operator()<fp8_e5m2>();
  }
  return failure{error_code::unsupported, path + ": unsupported: unknown number format"};
}

const char* predictor_name(std::uint32_t id) {
  switch (id) {
    case stored_mode: return "stored";
    case channel_mean::id: return channel_mean::name;
    case external::id: return external::name;
    case cross_layer<channel_mean>::id: return cross_layer<channel_mean>::name;
    case cross_layer<external>::id: return cross_layer<external>::name;
    case closed_loop::id: return closed_loop::name;
    default: return "unknown";
  }
}

/// The closed loop needs an engine, which this tool has none of.
status expect_no_loop(const std::string& path, std::uint32_t predictor) {
  if (predictor != closed_loop::id) return done;
  return failure{error_code::unsupported, path +
                                              ": unsupported: for the closed loop, which needs an engine that predicts layer by layer; "
                                              "kvexact has none, smollm2_codec has that of SmolLM2"};
}

/// A cache file and a view of it.
template <class T>
struct viewed_cache {
  std::vector<layer_tensors<const T>> layers;
  kv_cache_view<const T> view;
  explicit viewed_cache(const cache_file& file)
      : layers(file.layers<T>()), view(*kv_cache_view<const T>::make(file.about().shape, layers, {0, file.about().tokens})) {}
};

/// Opens the prediction of a cache and checks that it fits.
outcome<cache_file> open_prediction(const std::string& path, const cache_description& cache, const std::string& cache_path) {
  auto prediction = cache_file::open(path);
  if (!prediction) return prediction;
  if (prediction->about().format != number_format::bfloat16) return failure{error_code::dtype_mismatch, path + ": a prediction is BF16"};
  if (prediction->about().tokens != cache.tokens)
    return failure{error_code::shape_mismatch, path + ": a prediction has as many tokens as its cache: this has " +
                                                   std::to_string(prediction->about().tokens) + " tokens, " + cache_path + " has " +
                                                   std::to_string(cache.tokens)};
  if (const auto fits = expect_same_shape(path, prediction->about().shape, cache_path, cache.shape); !fits) return fits.error();
  return prediction;
}

/// The rotary embedding that the options describe, or none.
outcome<rotary> described_rotary(const arguments& args, const cache_shape& shape) {
  const auto pairing = args.rotary_pairing == "interleaved" ? rotary_pairing::interleaved : rotary_pairing::half_split;
  if (args.rotary_pairing && !args.rotary_base && args.rotary_frequencies.empty())
    return failure{error_code::invalid_argument, "calibrate: --rope-pairs needs --rope-base or --rope-frequencies"};
  if (!args.rotary_frequencies.empty()) {
    auto text = read_text(args.rotary_frequencies, std::size_t{1} << 20);
    if (!text) return text.error();
    std::istringstream file(*std::move(text));
    std::vector<double> radians;
    for (std::string word; radians.size() <= rotary::max_dim && file >> word;) {
      double value = 0;
      const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), value);
      if (problem != std::errc{} || end != word.data() + word.size())
        return failure{error_code::invalid_argument,
                       args.rotary_frequencies + ": " + in_quotes(word) + " where a decimal number should stand"};
      radians.push_back(value);
    }
    if (radians.empty())
      return failure{error_code::invalid_argument, args.rotary_frequencies + ": should hold decimal numbers"};
    const auto made = rotary::from_radians(pairing, radians);
    if (!made) return at(args.rotary_frequencies, made.error());
    return *made;
  }
  if (!args.rotary_base) return rotary{};
  const auto made = rotary::from_base(pairing, args.rotary_dim.value_or(shape.layer(0).key_dim), *args.rotary_base);
  if (!made) return at("calibrate", made.error());
  return *made;
}

status calibrate(const arguments& args) {
  const bool predicted = !args.predictions.empty();
  if (predicted && args.predictions.size() != args.inputs.size())
    return failure{error_code::invalid_argument, "calibrate: give one --prediction for each cache, in the same order"};
  if (predicted && args.predictor == "none")
    return failure{error_code::invalid_argument,
                   "calibrate: --predictor none has no use for --prediction (--plain takes predictions as they are)"};
  const bool plain = args.plain || args.predictor == "none";
  if (plain && args.asks_for_maps)
    return failure{error_code::invalid_argument,
                   std::string("calibrate: --layers-back, --rank, --per-head and --block-size shape the maps across "
                               "layers, and with ") +
                       (args.plain ? "--plain" : "--predictor none") + " there are none"};
  const std::uint32_t predictor =
      predicted ? (plain ? external::id : cross_layer<external>::id) : (plain ? channel_mean::id : cross_layer<channel_mean>::id);
  const stopwatch watch;
  std::vector<cache_file> caches;
  std::vector<cache_file> predictions;
  std::uint64_t tokens = 0;
  for (std::size_t i = 0; i < args.inputs.size(); ++i) {
    auto cache = cache_file::open(args.inputs[i]);
    if (!cache) return cache.error();
    caches.push_back(*std::move(cache));
    const cache_description& first = caches.front().about();
    if (caches[i].about().format != first.format)
      return failure{error_code::dtype_mismatch, args.inputs[i] + ": other number format than " + args.inputs[0]};
    if (const auto fits = expect_same_shape(args.inputs[i], caches[i].about().shape, args.inputs[0], first.shape); !fits) return fits;
    tokens += caches[i].about().tokens;
    if (!predicted) continue;
    auto prediction = open_prediction(args.predictions[i], caches[i].about(), args.inputs[i]);
    if (!prediction) return prediction.error();
    predictions.push_back(*std::move(prediction));
  }
  const cache_description& about = caches.front().about();
  return with_codec("calibrate", about.format, predictor, [&]<class Codec>() -> status {
    using scalar = typename Codec::scalar;
    const auto rotation = described_rotary(args, about.shape);
    if (!rotation) return rotation.error();
    std::deque<viewed_cache<scalar>> seen;
    for (const cache_file& cache : caches) seen.emplace_back(cache);
    std::optional<progress_note> note(std::in_place, plain ? "calibrating ..." : "calibrating, some seconds a cache ...", !args.as_json);
    const auto run = [&]<class Example>(std::vector<Example> examples) {
      return kvexact::calibrate<Codec>(about.shape, *rotation, examples, args.maps);
    };
    result<profile_data> data = error{};
    if constexpr (Codec::predictor_type::needs_prediction) {
      std::deque<viewed_cache<bf16>> guessed;
      for (const cache_file& prediction : predictions) guessed.emplace_back(prediction);
      std::vector<calibration_example<kv_cache_view<const scalar>, kv_cache_view<const bf16>>> examples;
      for (std::size_t i = 0; i < caches.size(); ++i) examples.push_back({seen[i].view, guessed[i].view, caches[i].about().scales});
      data = run(std::move(examples));
    } else {
      std::vector<calibration_example<kv_cache_view<const scalar>>> examples;
      for (std::size_t i = 0; i < caches.size(); ++i) examples.push_back({seen[i].view, {}, caches[i].about().scales});
      data = run(std::move(examples));
    }
    note.reset();
    if (!data) return at("calibrate", data.error());
    const auto bytes = serialize_profile(*data);
    if (!bytes) return at(args.out, bytes.error());
    auto file = output_file::create(args.out);
    if (!file) return file.error();
    if (auto written = file->append(*bytes); !written) return written;
    if (auto committed = file->commit(); !committed) return committed;
    if (args.as_json) {
      json report{{"profile", args.out},          {"bytes", bytes->size()}, {"dtype", to_string(about.format)},
                  {"caches", args.inputs.size()}, {"tokens", tokens},       {"seconds", watch.seconds()}};
      for (const model_parameters& model : data->models)
        report["bits_per_scalar"][predictor_name(model.predictor)] = model.bits_per_value_q8 / 256.0;
      print_json(report);
    } else {
      std::printf("%s: %s, from %zu caches of %s, %" PRIu64 " tokens, %.1f s\n", args.out.c_str(), size_in_words(bytes->size()).c_str(),
                  args.inputs.size(), to_string(about.format), tokens, watch.seconds());
      for (const model_parameters& model : data->models)
        std::printf("  %-23s %.3f bits per scalar on this data\n", predictor_name(model.predictor), model.bits_per_value_q8 / 256.0);
    }
    return done;
  });
}

void report_coding(const arguments& args, const char* action, const cache_description& about, std::uint64_t stream_bytes, double seconds,
                   const std::string& warning = {}) {
  const std::uint64_t scalars = about.tokens * about.shape.channels();
  const double bits = scalars == 0 ? 0 : 8.0 * static_cast<double>(stream_bytes) / static_cast<double>(scalars);
  const double ratio = stream_bytes == 0 ? 0 : static_cast<double>(about.value_bytes()) / static_cast<double>(stream_bytes);
  const double speed = seconds > 0 ? megabytes(about.value_bytes()) / seconds : 0;
  if (args.as_json) {
    json report{{"file", args.out},
                {"dtype", to_string(about.format)},
                {"tokens", about.tokens},
                {"scalars", scalars},
                {"cache_bytes", about.value_bytes()},
                {"stream_bytes", stream_bytes},
                {"bits_per_scalar", bits},
                {"ratio", ratio},
                {"seconds", seconds},
                {"megabytes_per_second", speed}};
    if (!warning.empty()) report["warning"] = warning;
    print_json(report);
  } else {
    std::printf("%s: %s %" PRIu64 " tokens of %s, cache %s, stream %s, %.3f bits per scalar, ratio %.3f, %.0f MB/s\n", args.out.c_str(),
                action, about.tokens, to_string(about.format), size_in_words(about.value_bytes()).c_str(),
                size_in_words(stream_bytes).c_str(), bits, ratio, speed);
  }
  if (!warning.empty()) std::fprintf(stderr, "kvexact: warning: %s: %s\n", args.out.c_str(), warning.c_str());
}

status encode(const arguments& args) {
  auto cache = cache_file::open(args.inputs.front());
  if (!cache) return cache.error();
  auto profile_bytes = mapped_file::open(args.profile);
  if (!profile_bytes) return profile_bytes.error();
  const cache_description& about = cache->about();
  const auto parsed = parse_profile(profile_bytes->bytes());
  if (!parsed) return at(args.profile, parsed.error());
  const std::uint32_t predictor = parsed->data.models.front().predictor;
  if (auto fits = expect_no_loop(args.profile, predictor); !fits) return fits;
  return with_codec(args.profile, about.format, predictor, [&]<class Codec>() -> status {
    const auto parameters = profile<Codec>::make(parsed->data, parsed->hash, build_for::encode);
    if (!parameters) return at(args.profile, parameters.error());
    if (Codec::predictor_type::needs_prediction && args.predictions.empty())
      return failure{error_code::prediction_missing,
                     args.profile + ": prediction_missing: was calibrated with predictions; give that of the cache with --prediction"};
    if (!Codec::predictor_type::needs_prediction && !args.predictions.empty())
      return failure{error_code::profile_mismatch, args.profile + ": profile_mismatch: calibrate with --prediction to encode with one"};
    if (const auto fits = expect_same_shape(cache->path(), about.shape, args.profile, parameters->shape()); !fits) return fits;
    auto file = output_file::create(args.out);
    if (!file) return file.error();
    catch_interruptions();

    std::uint64_t written = 0;
    status io = done;
    auto sink = [&](std::span<const std::byte> bytes) {
      io = file->append(bytes);
      written += bytes.size();
      return static_cast<bool>(io);
    };
    using encoder_type = stream_encoder<Codec, decltype(sink)>;
    std::vector<std::byte> memory(encoder_type::workspace_bytes(*parameters));
    auto encoder = encoder_type::begin(*parameters, memory, sink, about.scales);
    if (!encoder) return io ? at(args.out, encoder.error()) : io;

    // Some chunks at a time, for the sake of the progress bar; bounds at multiples of the chunk size leave the bytes as they are.
    constexpr std::uint64_t step = 1024;
    std::optional<progress_bar> bar(std::in_place, "encoding", about.tokens, !args.as_json);
    const auto layers = cache->layers<typename Codec::scalar>();
    const stopwatch watch;
    const auto append_all = [&](const auto& prediction) -> status {
      while (encoder->tokens() < about.tokens) {
        if (auto wanted = expect_no_interruption(); !wanted) return wanted;
        const std::uint64_t end = std::min(about.tokens, encoder->tokens() + step);
        const auto view = *kv_cache_view<const typename Codec::scalar>::make(about.shape, layers, {0, end});
        if (const auto appended = encoder->append(view, prediction); !appended) return io ? at(cache->path(), appended.error()) : io;
        bar->set(end);
      }
      return done;
    };
    if constexpr (Codec::predictor_type::needs_prediction) {
      auto prediction = open_prediction(args.predictions.front(), about, cache->path());
      if (!prediction) return prediction.error();
      if (auto appended = append_all(viewed_cache<bf16>(*prediction).view); !appended) return appended;
    } else {
      if (auto appended = append_all(no_prediction{}); !appended) return appended;
    }
    if (const auto finished = encoder->finish(); !finished) return io ? at(args.out, finished.error()) : io;
    const double seconds = watch.seconds();
    bar.reset();
    if (auto committed = file->commit(); !committed) return committed;
    report_coding(args, "encoded", about, written, seconds, misfit(about.shape, encoder->chunks(), parsed->data.models.front()));
    return done;
  });
}

status decode(const arguments& args) {
  const std::string& path = args.inputs.front();
  auto stream = mapped_file::open(path);
  if (!stream) return stream.error();
  auto profile_bytes = mapped_file::open(args.profile);
  if (!profile_bytes) return profile_bytes.error();
  const auto opened = inspect_stream(stream->bytes());
  if (!opened) return at(path, opened.error());
  const cache_description about{opened->header.shape, opened->header.format, opened->index.tokens, opened->header.storage_scales};
  if (auto fits = expect_no_loop(path, opened->header.predictor); !fits) return fits;
  return with_codec(path, about.format, opened->header.predictor, [&]<class Codec>() -> status {
    if (!Codec::predictor_type::needs_prediction && !args.predictions.empty())
      return failure{error_code::invalid_argument, path + ": was encoded without a prediction; decode it without --prediction"};
    const auto parameters = profile<Codec>::parse(profile_bytes->bytes(), build_for::decode);
    if (!parameters) return at(args.profile, parameters.error());
    const auto decoder = stream_decoder<Codec>::open(*parameters, stream->bytes());
    if (!decoder) {
      failure why = at(path, decoder.error());
      if (why.code == error_code::profile_mismatch)
        why.text += ": it needs " + hex(opened->header.profile_hash) + ", " + args.profile + " is " + hex(parameters->hash());
      return why;
    }
    auto out = cache_output::create(args.out, about);
    if (!out) return out.error();
    catch_interruptions();
    const auto layers = out->layers<typename Codec::scalar>();
    const auto view = *kv_cache_view<typename Codec::scalar>::make(about.shape, layers, {0, about.tokens});
    std::vector<std::byte> memory(decoder->workspace_bytes());

    std::optional<progress_bar> bar(std::in_place, "decoding", about.tokens, !args.as_json);
    const stopwatch watch;
    const auto decode_all = [&](const auto& prediction) -> status {
      for (std::uint64_t token = 0; token < about.tokens;) {
        const std::uint64_t end = decoder->covering_tokens({token, token + 1}).end;
        if (auto wanted = expect_no_interruption(); !wanted) return wanted;
        if (const auto decoded = decoder->decode({0, about.shape.layers()}, {token, end}, view, memory, prediction); !decoded) {
          failure why = at(path, decoded.error());
          if (why.code == error_code::prediction_missing) why.text += "; give it with --prediction";
          return why;
        }
        bar->set(token = end);
      }
      return done;
    };
    if (!args.predictions.empty()) {
      auto prediction = open_prediction(args.predictions.front(), about, path);
      if (!prediction) return prediction.error();
      if (auto decoded = decode_all(viewed_cache<bf16>(*prediction).view); !decoded) return decoded;
    } else {
      if (auto decoded = decode_all(no_prediction{}); !decoded) return decoded;
    }
    const double seconds = watch.seconds();
    bar.reset();
    if (auto committed = out->commit(); !committed) return committed;
    report_coding(args, "decoded", about, stream->bytes().size(), seconds);
    return done;
  });
}

/// What of a stream can be decoded without the rest of it.
const char* decodes_alone(std::uint32_t predictor) {
  if (predictor == channel_mean::id || predictor == external::id) return "any layers and tokens";
  return predictor == closed_loop::id ? "any token prefix" : "any token range";
}

json describe_maps(const layer_maps& maps, const cache_shape& shape) {
  const map_costs costs = costs_of(maps);
  return {{"layers_back", maps.layers_back},
          {"rank", maps.rank},
          {"block_size", maps.block_size},
          {"per_head", maps.per_head},
          {"clamped_feedback", maps.clamped_feedback},
          {"corrected_hidden_width", maps.hidden_width},
          {"bytes", costs.bytes},
          {"multiply_adds_per_scalar", static_cast<double>(costs.multiply_adds) / static_cast<double>(shape.channels())}};
}

std::string maps_in_words(const json& maps) {
  std::string text = std::to_string(maps["layers_back"].get<int>()) + " layers back, ";
  if (maps["per_head"].get<bool>()) {
    text += "each head on its own, ";
  } else if (const int rank = maps["rank"].get<int>(); rank > 0) {
    text += "rank " + std::to_string(rank) + ", ";
  }
  const auto block_size = maps["block_size"].get<std::uint32_t>();
  text += block_size == 0 ? "whole tiles" : "blocks of " + std::to_string(block_size) + " channels";
  if (maps["clamped_feedback"].get<bool>()) text += ", clamped feedback";
  if (const int width = maps["corrected_hidden_width"].get<int>(); width > 0)
    text += ", corrects " + std::to_string(width) + " hidden channels";
  char costs[60];
  std::snprintf(costs, sizeof costs, "%.0f multiply-adds per scalar", maps["multiply_adds_per_scalar"].get<double>());
  return text + "; " + size_in_words(maps["bytes"].get<std::uint64_t>()) + ", " + costs;
}

json describe_shape(const cache_shape& shape) {
  json layers = json::array();
  for (std::uint32_t l = 0; l < shape.layers();) {
    const layer_shape& layer = shape.layer(l);
    std::uint32_t end = l;
    while (end < shape.layers() && shape.layer(end) == layer) ++end;
    layers.push_back({{"layers", end - l}, {"kv_heads", layer.kv_heads}, {"key_dim", layer.key_dim}, {"value_dim", layer.value_dim}});
    l = end;
  }
  return layers;
}

status inspect_a_stream(const arguments& args, std::span<const std::byte> bytes) {
  const std::string& path = args.inputs.front();
  const auto opened = inspect_stream(bytes);
  if (!opened) return at(path, opened.error());
  const stream_header& header = opened->header;
  const cache_description about{header.shape, header.format, opened->index.tokens, header.storage_scales};
  json report{{"file", path},
              {"kind", "stream"},
              {"dtype", to_string(header.format)},
              {"predictor", predictor_name(header.predictor)},
              {"profile_hash", hex(header.profile_hash)},
              {"tokens", about.tokens},
              {"shape", describe_shape(header.shape)},
              {"storage_scales", header.storage_scales.size()},
              {"token_ids", opened->token_ids.size()},
              {"chunks", opened->index.chunks.size()},
              {"lanes", header.lanes},
              {"precision", header.precision},
              {"bytes", bytes.size()},
              {"ratio", static_cast<double>(about.value_bytes()) / static_cast<double>(bytes.size())}};
  struct group {
    std::uint64_t values = 0, bytes = 0;
    std::set<std::uint32_t> modes;
  };
  std::map<std::pair<std::uint64_t, std::uint64_t>, group> groups;
  bool needs_prediction = false, needs_engine = false;
  for (const chunk_record& record : opened->index.chunks) {
    group& sum = groups[{record.layers().begin, record.layers().end}];
    std::uint64_t channels = 0;
    for (std::uint64_t l = record.layers().begin; l < record.layers().end; ++l)
      channels += header.shape.layer(static_cast<std::uint32_t>(l)).channels();
    sum.values += channels * record.token_count;
    sum.bytes += record.bytes;
    sum.modes.insert(record.mode);
    needs_prediction = needs_prediction || record.mode == external::id || record.mode == cross_layer<external>::id;
    needs_engine = needs_engine || record.mode == closed_loop::id;
  }
  const std::uint64_t scalar_bytes = dtype_size(dtype_of(header.format));
  report["layers"] = json::array();
  for (const auto& [layers, sum] : groups) {
    json modes = json::array();
    for (const std::uint32_t mode : sum.modes) modes.push_back(predictor_name(mode));
    report["layers"].push_back({{"begin", layers.first},
                                {"end", layers.second},
                                {"bits_per_scalar", 8.0 * static_cast<double>(sum.bytes) / static_cast<double>(sum.values)},
                                {"ratio", static_cast<double>(sum.values * scalar_bytes) / static_cast<double>(sum.bytes)},
                                {"modes", modes}});
  }
  json needs = json::array({"profile " + hex(header.profile_hash)});
  if (needs_prediction) needs.push_back("the prediction it was encoded with");
  if (needs_engine) needs.push_back("the engine it was encoded with");
  if (needs_engine && opened->token_ids.empty()) needs.push_back("the ids of its tokens");
  report["decoding_needs"] = needs;
  report["decodes_alone"] = decodes_alone(header.predictor);
  if (args.as_json) {
    print_json(report);
    return done;
  }
  std::printf("%s: stream of %" PRIu64 " tokens, %s, predictor %s, %zu bytes, ratio %.3f\n", path.c_str(), about.tokens,
              to_string(header.format), predictor_name(header.predictor), bytes.size(), report["ratio"].get<double>());
  for (const auto& run : report["shape"])
    std::printf("  %d layers of %d kv heads, key dim %d, value dim %d\n", run["layers"].get<int>(), run["kv_heads"].get<int>(),
                run["key_dim"].get<int>(), run["value_dim"].get<int>());
  std::printf("  %zu chunks, interleaved rANS with %u lanes and %u bits, %zu storage scales\n", opened->index.chunks.size(), header.lanes,
              header.precision, header.storage_scales.size());
  std::printf("  decoding needs: ");
  for (const auto& each : needs) std::printf("%s%s", &each == &needs.front() ? "" : " and ", each.get<std::string>().c_str());
  if (!opened->token_ids.empty()) std::printf("; carries the ids of its tokens");
  std::printf("\n  decodes alone: %s\n  layers      bits per scalar   ratio   coded by\n", decodes_alone(header.predictor));
  for (const auto& [layers, sum] : groups) {
    std::printf("  %4" PRIu64 " - %-4" PRIu64 " %15.3f %7.3f  ", layers.first, layers.second - 1,
                8.0 * static_cast<double>(sum.bytes) / static_cast<double>(sum.values),
                static_cast<double>(sum.values * scalar_bytes) / static_cast<double>(sum.bytes));
    for (const std::uint32_t mode : sum.modes) std::printf(" %s,", predictor_name(mode));
    std::printf("\n");
  }
  return done;
}

status inspect_a_profile(const arguments& args, std::span<const std::byte> bytes) {
  const std::string& path = args.inputs.front();
  const auto parsed = parse_profile(bytes);
  if (!parsed) return at(path, parsed.error());
  json report{{"file", path},
              {"kind", "profile"},
              {"dtype", to_string(parsed->data.format)},
              {"profile_hash", hex(parsed->hash)},
              {"shape", describe_shape(parsed->data.shape)},
              {"precision", parsed->data.precision},
              {"bytes", bytes.size()}};
  const rotary& rotation = parsed->data.rotation;
  if (rotation.dim() > 0)
    report["rotary"] = {{"pairs", rotation.pairing() == rotary_pairing::interleaved ? "interleaved" : "half"}, {"dim", rotation.dim()}};
  if (!parsed->data.note.empty()) report["note"] = parsed->data.note;
  for (const model_parameters& model : parsed->data.models) {
    report["models"].push_back({{"predictor", predictor_name(model.predictor)},
                                {"tables", model.tables.size()},
                                {"bits_per_scalar", model.bits_per_value_q8 / 256.0}});
    if (!model.maps.empty()) report["models"].back()["maps"] = describe_maps(model.maps, parsed->data.shape);
  }
  if (args.as_json) {
    print_json(report);
    return done;
  }
  std::printf("%s: profile %s for %s, %zu bytes\n", path.c_str(), hex(parsed->hash).c_str(), to_string(parsed->data.format), bytes.size());
  for (const auto& run : report["shape"])
    std::printf("  %d layers of %d kv heads, key dim %d, value dim %d\n", run["layers"].get<int>(), run["kv_heads"].get<int>(),
                run["key_dim"].get<int>(), run["value_dim"].get<int>());
  if (rotation.dim() > 0)
    std::printf("  keys rotated by position, %u dimensions in %s pairs\n", rotation.dim(),
                report["rotary"]["pairs"].get<std::string>().c_str());
  for (const auto& model : report["models"]) {
    std::printf("  %-23s %5d tables, %.3f bits per scalar on the calibration data\n", model["predictor"].get<std::string>().c_str(),
                model["tables"].get<int>(), model["bits_per_scalar"].get<double>());
    if (model.contains("maps")) std::printf("    maps: %s\n", maps_in_words(model["maps"]).c_str());
  }
  if (!parsed->data.note.empty()) std::printf("  note: %s\n", in_quotes(parsed->data.note).c_str());
  return done;
}

status inspect(const arguments& args) {
  auto file = mapped_file::open(args.inputs.front());
  if (!file) return file.error();
  const auto bytes = file->bytes();
  // A container says what it holds in bytes 8 to 11; whatever is no profile is judged as a stream.
  const bool is_profile =
      bytes.size() >= 12 && load_little_endian<std::uint32_t>(bytes.data() + 8) == static_cast<std::uint32_t>(container_kind::profile);
  return is_profile ? inspect_a_profile(args, bytes) : inspect_a_stream(args, bytes);
}

/// Index of the first differing element in words: "token 5, head 1, dim 7" for three dimensions, plain indices else.
std::string place_in(const tensor& values, std::uint64_t element) {
  if (values.shape.size() == 3) {
    const std::uint64_t heads = values.shape[1], dim = values.shape[2];
    return "token " + std::to_string(element / (heads * dim)) + ", head " + std::to_string(element / dim % heads) + ", dim " +
           std::to_string(element % dim);
  }
  return "element " + std::to_string(element);
}

/// The first difference of two caches, or nothing.
std::string first_difference(const safetensors_file& a, const safetensors_file& b) {
  for (const tensor& left : a.tensors()) {
    const tensor* const right = b.find(left.name);
    if (right == nullptr) return "tensor " + in_quotes(left.name) + " is missing in " + b.path();
    if (left.type != right->type || left.shape != right->shape)
      return "tensor " + in_quotes(left.name) + " is " + left.description() + " in " + a.path() + " and " + right->description() + " in " +
             b.path();
    if (left.data.size() == 0 || std::memcmp(left.data.data(), right->data.data(), left.data.size()) == 0) continue;
    const auto different = std::mismatch(left.data.begin(), left.data.end(), right->data.begin()).first;
    const std::uint64_t size = dtype_size(left.type);
    const std::uint64_t element = static_cast<std::uint64_t>(different - left.data.begin()) / size;
    std::string text = "tensor " + in_quotes(left.name) + " differs first at " + place_in(left, element) + ": 0x";
    for (const tensor* const side : {&left, right}) {
      for (std::uint64_t i = size; i-- > 0;) {
        char digits[3];
        std::snprintf(digits, sizeof digits, "%02x", std::to_integer<unsigned>(side->data[static_cast<std::size_t>(element * size + i)]));
        text += digits;
      }
      if (side == &left) text += " and 0x";
    }
    return text;
  }
  for (const tensor& right : b.tensors()) {
    if (a.find(right.name) == nullptr) return "tensor " + in_quotes(right.name) + " is missing in " + a.path();
  }
  return {};
}

constexpr int exit_failed = 1;
constexpr int exit_different = 3;

outcome<int> verify(const arguments& args) {
  const auto a = safetensors_file::open(args.inputs[0]);
  if (!a) return a.error();
  const auto b = safetensors_file::open(args.inputs[1]);
  if (!b) return b.error();
  const std::string difference = first_difference(*a, *b);
  if (args.as_json) {
    json report{{"a", a->path()}, {"b", b->path()}, {"bit_exact", difference.empty()}};
    if (!difference.empty()) report["difference"] = difference;
    print_json(report);
  } else {
    std::printf("bit-exact: %s\n", difference.empty() ? "yes" : ("no; " + difference).c_str());
  }
  return difference.empty() ? 0 : exit_different;
}

int finish(const status& ended) {
  if (ended) return 0;
  std::fprintf(stderr, "kvexact: %s\n", ended.error().text.c_str());
  pass_on_interruption();
  return exit_failed;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app(
      "Makes KV caches small without changing a bit.\n\n"
      "A cache is a safetensors file with tensors layers.N.k and layers.N.v, shape [tokens, heads, head_dim], in BF16, F16, F8_E4M3 or\n"
      "F8_E5M2 (keys as the engine caches them); fp8 caches may have one F32 scale for each, layers.N.k_scale and layers.N.v_scale.\n"
      "Files with other tensors are refused; __metadata__ is not kept. For Hugging Face caches, k and v of shape [1, heads, tokens, dim]:\n"
      "  safetensors.torch.save_file({f\"layers.{n}.{name}\": x[0].transpose(0, 1).contiguous()\n"
      "                               for n, (k, v) in enumerate(layers) for name, x in ((\"k\", k), (\"v\", v))}, \"a.safetensors\")\n"
      "A prediction is another cache of the same shape in BF16, for example from a quantised copy of the model; it makes streams much\n"
      "smaller, and decoding needs it again, equal to the bit. Without one, decoding needs nothing but the profile.\n");
  app.footer(
      "Example, from a few caches of your model to one that is small:\n"
      "  kvexact calibrate --out model.kvp a.safetensors b.safetensors c.safetensors\n"
      "  kvexact encode d.safetensors -o d.kvx --profile model.kvp\n"
      "  kvexact decode d.kvx -o d2.safetensors --profile model.kvp\n"
      "  kvexact verify d.safetensors d2.safetensors\n"
      "With predictions:\n"
      "  kvexact calibrate --out model.kvp a.safetensors b.safetensors --prediction a_int8.safetensors --prediction b_int8.safetensors\n"
      "  kvexact encode d.safetensors -o d.kvx --profile model.kvp --prediction d_int8.safetensors\n"
      "  kvexact decode d.kvx -o d2.safetensors --profile model.kvp --prediction d_int8.safetensors\n\n"
      "Exit codes: 0 done; 1 failed, the message says what and where, and no output is left behind; 3 verify found a difference;\n"
      "100 and above: wrong command line. An existing output is replaced only on success; an output may not be one of the inputs.");
  app.require_subcommand(1);
  app.set_version_flag("--version", std::to_string(KVEXACT_VERSION_MAJOR) + "." + std::to_string(KVEXACT_VERSION_MINOR) + "." +
                                        std::to_string(KVEXACT_VERSION_PATCH));
  arguments args;
  const auto add_json = [&args](CLI::App* command) {
    command->add_flag("--json", args.as_json, "Print the report as JSON, and no progress bar");
  };
  const auto add_profile = [&args](CLI::App* command) {
    command->add_option("--profile", args.profile, "Profile made by calibrate")->required()->type_name("PROFILE");
  };

  CLI::App* const calibrate_command = app.add_subcommand("calibrate", "Makes a profile from example caches of one model");
  calibrate_command->add_option("caches", args.inputs, "Example caches; 16 sequences of 1024 tokens are plenty")
      ->required()
      ->type_name("CACHE...");
  calibrate_command->add_option("--out,-o", args.out, "The profile")->required()->type_name("PROFILE");
  calibrate_command->add_option("--prediction", args.predictions, "Prediction of a cache: once for each cache, in the same order")
      ->type_name("FILE")
      ->allow_extra_args(false);
  CLI::Option* const rope_base =
      calibrate_command
          ->add_option("--rope-base", args.rotary_base,
                       "Base of the rotary embedding (rope_theta), e.g. 10000, if keys are cached rotated: streams get smaller")
          ->type_name("BASE");
  calibrate_command
      ->add_option("--rope-frequencies", args.rotary_frequencies,
                   "The same by a text file of inverse frequencies (radians a token), one a pair, for scaled embeddings")
      ->type_name("FILE")
      ->excludes(rope_base);
  calibrate_command
      ->add_option("--rope-pairs", args.rotary_pairing,
                   "half (default): dimensions (i, i + d/2) turn together (Hugging Face), interleaved: (2i, 2i + 1) (llama.cpp)")
      ->check(CLI::IsMember({"half", "interleaved"}))
      ->type_name("PAIRS");
  calibrate_command
      ->add_option("--rope-dim", args.rotary_dim, "With --rope-base: dimensions that are rotated, from the first on (default: all)")
      ->type_name("N")
      ->needs(rope_base);
  calibrate_command
      ->add_option(
          "--predictor", args.predictor,
          "none: channel statistics only, small profiles and the fastest. cross_layer: each layer also from those below it, much smaller "
          "streams for a profile of megabytes; with --prediction it sharpens the prediction")
      ->check(CLI::IsMember({"none", "cross_layer"}))
      ->capture_default_str()
      ->type_name("NAME");
  calibrate_command->add_flag("--plain", args.plain,
                              "No maps across layers: with --prediction the published method, else the same as --predictor none");
  const CLI::Option* const layers_back = calibrate_command
                                             ->add_option("--layers-back", args.maps.layers_back,
                                                          "Layers that cross_layer looks back at, 1 to 8 (default 3, with --prediction 1)")
                                             ->check(CLI::Range(1U, layer_maps::most_layers_back))
                                             ->type_name("N");
  CLI::Option* const rank =
      calibrate_command
          ->add_option("--rank", args.maps.rank, "Rank of cross_layer's maps: smaller profiles, fewer multiply-adds (default: full)")
          ->check(CLI::Range(1, 65536))
          ->type_name("N");
  const CLI::Option* const per_head =
      calibrate_command->add_flag("--per-head", args.maps.per_head, "Maps within each head only: smaller and faster still")->excludes(rank);
  const CLI::Option* const block_size =
      calibrate_command
          ->add_option("--block-size", args.maps.block_size,
                       "Channels that are coded together and then help to predict the next of their tile; 0: whole tiles")
          ->check(CLI::Range(0, 65536))
          ->capture_default_str()
          ->type_name("N");
  add_json(calibrate_command);

  CLI::App* const encode_command = app.add_subcommand("encode", "Writes a cache as a stream");
  encode_command->add_option("cache", args.inputs, "The cache")->required()->expected(1)->type_name("CACHE");
  encode_command->add_option("--out,-o", args.out, "The stream")->required()->type_name("STREAM");
  add_profile(encode_command);
  encode_command->add_option("--prediction", args.predictions, "Prediction of the cache; decoding needs it too")
      ->expected(1)
      ->type_name("FILE");
  add_json(encode_command);

  CLI::App* const decode_command = app.add_subcommand("decode", "Gives back the cache of a stream, every bit of it");
  decode_command->add_option("stream", args.inputs, "The stream")->required()->expected(1)->type_name("STREAM");
  decode_command->add_option("--out,-o", args.out, "The cache")->required()->type_name("CACHE");
  add_profile(decode_command);
  decode_command->add_option("--prediction", args.predictions, "The prediction that the stream was encoded with")
      ->expected(1)
      ->type_name("FILE");
  add_json(decode_command);

  CLI::App* const inspect_command = app.add_subcommand("inspect", "Shows what a stream or a profile holds and what decoding needs");
  inspect_command->add_option("file", args.inputs, "Stream or profile")->required()->expected(1)->type_name("FILE");
  add_json(inspect_command);

  CLI::App* const verify_command = app.add_subcommand("verify", "Compares two caches bit by bit and names the first difference");
  verify_command->add_option("files", args.inputs, "Two safetensors files")->required()->expected(2)->type_name("A B");
  add_json(verify_command);

  const auto is_named = [&](const CLI::App* command) { return command->check_name(argv[1]); };
  if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_named).empty()) {
    std::fprintf(stderr, "kvexact: there is no command %s; see kvexact --help\n", in_quotes(argv[1]).c_str());
    return static_cast<int>(CLI::ExitCodes::ExtrasError);
  }
  CLI11_PARSE(app, argc, argv);
  for (const CLI::Option* const option : {layers_back, static_cast<const CLI::Option*>(rank), per_head, block_size})
    args.asks_for_maps = args.asks_for_maps || option->count() > 0;
  if (!args.out.empty()) {
    if (auto separate = expect_separate_output(args); !separate) return finish(separate);
    if (auto possible = output_file::probe(args.out); !possible) return finish(possible);
  }
  if (calibrate_command->parsed()) return finish(calibrate(args));
  if (encode_command->parsed()) return finish(encode(args));
  if (decode_command->parsed()) return finish(decode(args));
  if (inspect_command->parsed()) return finish(inspect(args));
  const auto compared = verify(args);
  return compared ? *compared : finish(compared.error());
} catch (const std::exception& caught) {
  std::fprintf(stderr, "kvexact: %s\n", caught.what());
  return 1;
}

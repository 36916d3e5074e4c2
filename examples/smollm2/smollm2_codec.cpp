// SPDX-License-Identifier: Apache-2.0
// The codec in closed loop with the reference engine, see --help.
#include <chrono>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <common/cache_file.hpp>
#include <common/interruption.hpp>
#include <common/mapped_file.hpp>
#include <common/outcome.hpp>
#include <common/output_file.hpp>
#include <common/profile_fit.hpp>
#include <common/progress.hpp>
#include <kvexact/codec/calibrate.hpp>
#include <kvexact/codec/codec.hpp>

#include "cache_writer.hpp"
#include "engine.hpp"
#include "layerwise_engine.hpp"
#include "token_file.hpp"
#include "tool_options.hpp"

using namespace kvexact;
using namespace kvexact::examples;
using json = nlohmann::ordered_json;

namespace {

struct arguments {
  std::vector<std::string> tokens;
  std::string out, cache, stream, profile;
  std::string dtype_name = "bf16";
  bool without_ids = false;
  bool as_json = false;
  calibration_options maps;
  engine_choice engine;
};

failure at(const std::string& path, const kvexact::error& why) { return {why.code, path + ": " + why.message()}; }

/// An output that is one of the inputs would take the place of what is needed to read it.
status expect_separate_output(const arguments& args) {
  std::vector<std::string> read = args.tokens;
  read.insert(read.end(), {args.cache, args.stream, args.profile});
  for (const std::string& path : read) {
    std::error_code ignored;
    if (std::filesystem::equivalent(path, args.out, ignored))
      return failure{error_code::invalid_argument, args.out + ": would replace an input (" + path + "); give the output another name"};
  }
  return done;
}

/// `path`: what asks for the format.
template <class Work>
status with_codec(const std::string& path, number_format format, Work&& work) {
  switch (format) {
    case number_format::bfloat16: return work.template operator()<codec_closed_loop<bf16>>();
    case number_format::float16: return work.template operator()<codec_closed_loop<fp16>>();
    case number_format::float8_e4m3: return work.template operator()<codec_closed_loop<fp8_e4m3>>();
    default: return failure{error_code::unsupported, path + ": unsupported: the closed loop is not built for " + to_string(format)};
  }
}

class stopwatch {
 public:
  [[nodiscard]] double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The engine's options travel in the profile's note, so that encoding and decoding set it up as calibration did.
std::string note_of(const engine_choice& engine) {
  return json{{"engine", engine.name},
              {"rotated", !engine.unrotated},
              {"group", engine.group},
              {"exact_kv", engine.exact_kv},
              {"exact_layers", engine.exact_layers},
              {"depth", engine.depth},
              {"window", {engine.window.sinks, engine.window.newest}}}
      .dump();
}

/// A note may say anything: what a conversion would make of -1, 1.5 or 1e300 is no count.
std::size_t count_of(const json& value) {
  if (!value.is_number_unsigned()) throw std::out_of_range(value.dump(-1, ' ', true, json::error_handler_t::replace));
  return value.get<std::size_t>();
}

outcome<engine_choice> engine_of(const std::string& path, const std::string& note, const engine_choice& given) {
  const json options = json::parse(note, nullptr, false);
  const failure bad{error_code::profile_mismatch, path + ": was not made by smollm2_codec calibrate"};
  if (!options.is_object()) return bad;
  try {
    engine_choice engine = given;  // folder and threads
    engine.name = options.at("engine").get<std::string>();
    engine.unrotated = !options.at("rotated").get<bool>();
    engine.group = count_of(options.at("group"));
    engine.exact_kv = options.at("exact_kv").get<bool>();
    engine.exact_layers = count_of(options.at("exact_layers"));
    engine.depth = count_of(options.at("depth"));
    engine.window = {count_of(options.at("window").at(0)), count_of(options.at("window").at(1))};
    if ((engine.name != "int8" && engine.name != "fp8" && engine.name != "bf16") || (engine.group != 32 && engine.group != 64)) return bad;
    if (given.window.newest != 0 && (given.window.newest != engine.window.newest || given.window.sinks != engine.window.sinks))
      return failure{error_code::profile_mismatch, path + ": was calibrated with another --window"};
    return engine;
  } catch (const json::exception&) {
    return bad;
  } catch (const std::out_of_range& number) {
    return failure{error_code::corrupt, path + ": the profile's note has " + in_quotes(number.what()) + " where a count should stand"};
  }
}

json describe(const engine_choice& engine) {
  json about{{"engine", engine.name}};
  if (engine.name == "int8") about["rotated"] = !engine.unrotated, about["group"] = engine.group;
  if (engine.exact_kv) about["exact_kv"] = true;
  if (engine.exact_layers > 0) about["exact_layers"] = engine.exact_layers;
  if (engine.depth != ~std::size_t{0}) about["depth"] = engine.depth;
  if (engine.window.newest > 0) about["window"] = std::to_string(engine.window.sinks) + "+" + std::to_string(engine.window.newest);
  return about;
}

/// The target's caches of all sequences, as files in a folder of their own that goes away with this object.
class calibration_caches {
 public:
  static outcome<std::unique_ptr<calibration_caches>> make(examples::engine& target, std::span<const std::vector<std::uint32_t>> sequences,
                                                           dtype format, const std::string& beside, bool show) {
    auto made = std::make_unique<calibration_caches>();
    std::error_code problem;
    made->folder_ = beside + ".caches." + std::to_string(::getpid());
    if (!std::filesystem::create_directory(made->folder_, problem))
      return failure{error_code::output_failed, made->folder_ + ": cannot make this folder for the calibration caches"};
    progress_bar bar("running the target", sequences.size(), show);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      if (auto wanted = expect_no_interruption(); !wanted) return wanted.error();
      const std::string path = made->folder_ + "/" + std::to_string(i);
      if (auto written = write(target, sequences[i], format, path); !written) return written.error();
      auto file = cache_file::open(path);
      if (!file) return file.error();
      made->files_.push_back(*std::move(file));
      bar.set(i + 1);
    }
    return made;
  }
  ~calibration_caches() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  [[nodiscard]] const std::vector<cache_file>& files() const noexcept { return files_; }

 private:
  static status write(examples::engine& target, const std::vector<std::uint32_t>& ids, dtype format, const std::string& path) {
    auto hidden = target.embed(ids);
    if (!hidden) return hidden.error();
    auto cache = target.make_cache(ids.size());
    if (!cache) return cache.error();
    auto file = cache_writer::create(path, target.shape(), ids.size(), format);
    if (!file) return file.error();
    key_value_sums sums;
    for (std::size_t layer = 0; layer < target.shape().layers; ++layer) {
      target.keys_values(layer, *hidden, sums);
      cache->write(layer, 0, sums);
      file->write(layer, sums, *cache);
      if (layer + 1 < target.shape().layers) target.rest(layer, *hidden, 0, *cache);
    }
    return file->commit();
  }

  std::string folder_;
  std::vector<cache_file> files_;
};

template <class T>
struct viewed_cache {
  std::vector<layer_tensors<const T>> layers;
  kv_cache_view<const T> view;
  explicit viewed_cache(const cache_file& file)
      : layers(file.layers<T>()), view(*kv_cache_view<const T>::make(file.about().shape, layers, {0, file.about().tokens})) {}
};

/// Fitting goes on for minutes; this lets an interruption end it.
class interruptible_pair : public layerwise_pair {
 public:
  using layerwise_pair::layerwise_pair;

  [[nodiscard]] result<void> predict(std::uint32_t layer, std::span<float> keys, std::span<float> values) noexcept {
    if (!expect_no_interruption()) return error{error_code::output_failed, "interrupted"};
    return layerwise_pair::predict(layer, keys, values);
  }
};

status calibrate(const arguments& args) {
  const stopwatch watch;
  engine_choice exact;
  exact.folder = args.engine.folder;
  exact.threads = args.engine.threads;
  auto target = exact.load();
  if (!target) return target.error();
  auto model = args.engine.load();
  if (!model) return model.error();
  std::vector<std::vector<std::uint32_t>> sequences;
  std::size_t longest = 1, tokens = 0;
  for (const std::string& path : args.tokens) {
    auto ids = read_tokens(path);
    if (!ids) return ids.error();
    if (ids->empty()) return failure{error_code::invalid_argument, path + ": holds no tokens"};
    if (auto known = expect_known(path, *ids, target->shape().vocabulary); !known) return known;
    longest = std::max(longest, ids->size());
    tokens += ids->size();
    sequences.push_back(*std::move(ids));
  }
  catch_interruptions();
  const number_format format = args.dtype_name == "bf16"   ? number_format::bfloat16
                               : args.dtype_name == "fp16" ? number_format::float16
                                                           : number_format::float8_e4m3;
  const auto caches = calibration_caches::make(*target, sequences, dtype_of(format), args.out, !args.as_json);
  if (!caches) return caches.error();
  const cache_shape& shape = (*caches)->files().front().about().shape;
  const auto rotation = rotary::from_base(rotary_pairing::interleaved, static_cast<std::uint32_t>(model->shape().head_dim),
                                          static_cast<double>(model->shape().rope_base));
  if (!rotation) return at("rotary embedding", rotation.error());
  // One cache for all sequences: they are always at the same layer.
  auto own_rows = model->make_cache(longest);
  if (!own_rows) return own_rows.error();
  auto target_rows = target->make_cache(longest);
  if (!target_rows) return target_rows.error();

  return with_codec("calibrate", format, [&]<class Codec>() -> status {
    using scalar = typename Codec::scalar;
    std::deque<viewed_cache<scalar>> seen;
    std::deque<interruptible_pair> engines;
    std::vector<calibration_example<kv_cache_view<const scalar>, interruptible_pair*>> examples;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      seen.emplace_back((*caches)->files()[i]);
      engines.emplace_back(layerwise_engine(*model, *own_rows, sequences[i]), *target, *target_rows);
      examples.push_back({seen.back().view, &engines.back(), (*caches)->files()[i].about().scales});
    }
    std::optional<progress_note> note(std::in_place, "fitting, some seconds a sequence ...", !args.as_json);
    auto data = kvexact::calibrate<Codec>(shape, *rotation, examples, args.maps);
    note.reset();
    if (!data) return at("calibrate", data.error());
    data->note = note_of(args.engine);
    const auto bytes = serialize_profile(*data);
    if (!bytes) return at(args.out, bytes.error());
    auto file = output_file::create(args.out);
    if (!file) return file.error();
    if (auto written = file->append(*bytes); !written) return written;
    if (auto committed = file->commit(); !committed) return committed;
    const double bits = data->models.front().bits_per_value_q8 / 256.0;
    if (args.as_json) {
      const json report{{"profile", args.out},        {"bytes", bytes->size()},  {"dtype", args.dtype_name},       {"tokens", tokens},
                        {"seconds", watch.seconds()}, {"bits_per_scalar", bits}, {"engine", describe(args.engine)}};
      std::printf("%s\n", report.dump(2, ' ', false, json::error_handler_t::replace).c_str());
    } else {
      std::printf("%s: %.2f MB, from %zu sequences, %zu tokens, %.0f s; %.3f bits per scalar of %s on this data\n", args.out.c_str(),
                  static_cast<double>(bytes->size()) / 1e6, sequences.size(), tokens, watch.seconds(), bits, args.dtype_name.c_str());
    }
    return done;
  });
}

/// What encoding and decoding have in common: the profile and the engine it asks for, at the start of a sequence.
struct set_up {
  parsed_profile parsed;
  engine_choice choice;
  std::optional<examples::engine> model;
  std::optional<examples::kv_cache> rows;
  std::optional<layerwise_engine> loop;

  /// `ids_path`: where the ids are from.
  status load(const arguments& args, std::vector<std::uint32_t> ids, const std::string& ids_path) {
    auto bytes = mapped_file::open(args.profile);
    if (!bytes) return bytes.error();
    auto read = parse_profile(bytes->bytes());
    if (!read) return at(args.profile, read.error());
    parsed = *std::move(read);
    auto engine = engine_of(args.profile, parsed.data.note, args.engine);
    if (!engine) return engine.error();
    choice = *std::move(engine);
    auto loaded = choice.load();
    if (!loaded) return loaded.error();
    model = std::move(*loaded);
    if (auto known = expect_known(ids_path, ids, model->shape().vocabulary); !known) return known;
    auto made = model->make_cache(std::max<std::size_t>(ids.size(), 1));
    if (!made) return made.error();
    rows = std::move(*made);
    loop.emplace(*model, *rows, std::move(ids));
    return done;
  }
};

void report_coding(const arguments& args, const char* action, const cache_description& about, std::uint64_t stream_bytes,
                   const set_up& with, double seconds, const std::string& warning = {}) {
  const std::uint64_t scalars = about.tokens * about.shape.channels();
  const double bits = scalars == 0 ? 0 : 8.0 * static_cast<double>(stream_bytes) / static_cast<double>(scalars);
  const double ratio = stream_bytes == 0 ? 0 : static_cast<double>(about.value_bytes()) / static_cast<double>(stream_bytes);
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
                {"engine", describe(with.choice)}};
    if (!warning.empty()) report["warning"] = warning;
    std::printf("%s\n", report.dump(2, ' ', false, json::error_handler_t::replace).c_str());
  } else {
    std::printf("%s: %s %llu tokens of %s, cache %.2f MB, stream %.2f MB, %.3f bits per scalar, ratio %.3f, %.1f s with the engine\n",
                args.out.c_str(), action, static_cast<unsigned long long>(about.tokens), to_string(about.format),
                static_cast<double>(about.value_bytes()) / 1e6, static_cast<double>(stream_bytes) / 1e6, bits, ratio, seconds);
  }
  if (!warning.empty()) std::fprintf(stderr, "smollm2_codec: warning: %s: %s\n", args.out.c_str(), warning.c_str());
}

status encode(const arguments& args) {
  auto cache = cache_file::open(args.cache);
  if (!cache) return cache.error();
  const cache_description& about = cache->about();
  auto ids = read_tokens(args.tokens.front());
  if (!ids) return ids.error();
  if (ids->size() != about.tokens)
    return failure{error_code::shape_mismatch, args.tokens.front() + ": " + std::to_string(ids->size()) + " tokens, but " + args.cache +
                                                   " has " + std::to_string(about.tokens)};
  set_up with;
  if (auto loaded = with.load(args, *ids, args.tokens.front()); !loaded) return loaded;
  return with_codec(args.cache, about.format, [&]<class Codec>() -> status {
    const auto parameters = profile<Codec>::make(with.parsed.data, with.parsed.hash, build_for::encode);
    if (!parameters) return at(args.profile, parameters.error());
    if (const auto fits = expect_shape(about.shape, parameters->shape()); !fits) return at(args.cache, fits.error());
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
    const stopwatch watch;
    auto encoder = encoder_type::begin(*parameters, memory, sink, about.scales);
    if (!encoder) return io ? at(args.out, encoder.error()) : io;
    std::optional<progress_bar> bar(std::in_place, "encoding", about.tokens, !args.as_json);
    const auto layers = cache->layers<typename Codec::scalar>();
    constexpr std::uint64_t step = 256;
    while (encoder->tokens() < about.tokens) {
      if (auto wanted = expect_no_interruption(); !wanted) return wanted;
      const std::uint64_t end = std::min(about.tokens, encoder->tokens() + step);
      const auto view = *kv_cache_view<const typename Codec::scalar>::make(about.shape, layers, {0, end});
      if (const auto appended = encoder->append(view, *with.loop); !appended) return io ? at(args.cache, appended.error()) : io;
      bar->set(end);
    }
    const std::span<const std::uint32_t> carried =
        args.without_ids ? std::span<const std::uint32_t>{} : std::span<const std::uint32_t>(*ids);
    if (const auto finished = encoder->finish(carried); !finished) return io ? at(args.out, finished.error()) : io;
    const double seconds = watch.seconds();
    bar.reset();
    if (auto committed = file->commit(); !committed) return committed;
    const profile_data& data = with.parsed.data;
    report_coding(args, "encoded", about, written, with, seconds,
                  misfit(about.shape, encoder->chunks(), data.models[data.find_model(closed_loop::id)],
                         args.tokens.front() + " has the token ids of another cache"));
    return done;
  });
}

status decode(const arguments& args) {
  auto stream = mapped_file::open(args.stream);
  if (!stream) return stream.error();
  const auto opened = inspect_stream(stream->bytes());
  if (!opened) return at(args.stream, opened.error());
  const cache_description about{opened->header.shape, opened->header.format, opened->index.tokens, opened->header.storage_scales};
  if (opened->header.predictor != closed_loop::id)
    return failure{error_code::unsupported, args.stream + ": was not coded in closed loop; use kvexact decode"};
  std::vector<std::uint32_t> ids = opened->token_ids;
  if (!args.tokens.empty()) {
    auto read = read_tokens(args.tokens.front());
    if (!read) return read.error();
    ids = *std::move(read);
  }
  if (ids.size() != about.tokens)
    return failure{error_code::prediction_missing, args.stream + ": needs the ids of its " + std::to_string(about.tokens) + " tokens; " +
                                                       (args.tokens.empty() ? "it carries none, give them with --tokens"
                                                                            : args.tokens.front() + " has " + std::to_string(ids.size()))};
  set_up with;
  if (auto loaded = with.load(args, std::move(ids), args.tokens.empty() ? args.stream : args.tokens.front()); !loaded) return loaded;
  return with_codec(args.stream, about.format, [&]<class Codec>() -> status {
    const auto parameters = profile<Codec>::make(with.parsed.data, with.parsed.hash, build_for::decode);
    if (!parameters) return at(args.profile, parameters.error());
    const auto decoder = stream_decoder<Codec>::open(*parameters, stream->bytes());
    if (!decoder) return at(args.stream, decoder.error());
    auto out = cache_output::create(args.out, about);
    if (!out) return out.error();
    catch_interruptions();
    const auto layers = out->layers<typename Codec::scalar>();
    const auto view = *kv_cache_view<typename Codec::scalar>::make(about.shape, layers, {0, about.tokens});
    std::vector<std::byte> memory(decoder->workspace_bytes());
    std::optional<progress_bar> bar(std::in_place, "decoding", about.tokens, !args.as_json);
    const stopwatch watch;
    for (std::uint64_t token = 0; token < about.tokens;) {
      if (auto wanted = expect_no_interruption(); !wanted) return wanted;
      const std::uint64_t end = decoder->covering_tokens({token, token + 1}).end;
      if (const auto decoded = decoder->decode({0, about.shape.layers()}, {token, end}, view, memory, *with.loop); !decoded) {
        failure why = at(args.stream, decoded.error());
        if (why.code == error_code::prediction_mismatch) why.text += "; other token ids, or another model than it was encoded with?";
        return why;
      }
      bar->set(token = end);
    }
    const double seconds = watch.seconds();
    bar.reset();
    if (auto committed = out->commit(); !committed) return committed;
    report_coding(args, "decoded", about, stream->bytes().size(), with, seconds);
    return done;
  });
}

int finish(const status& ended) {
  if (ended) return 0;
  std::fprintf(stderr, "smollm2_codec: %s\n", ended.error().text.c_str());
  pass_on_interruption();
  return 1;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app(
      "The codec in closed loop: a quantised copy of SmolLM2-135M predicts the KV cache layer by layer and learns the exact values on the\n"
      "way. Streams are the smallest there are; decoding needs the profile, the token ids (carried in the stream), the model, and one pass "
      "of\n"
      "the copy over the tokens. The copy gives the same bits on every machine.\n\n"
      "Get the model first: examples/smollm2/fetch.sh; token files: make_tokens.py or text_to_tokens.py beside it; caches: smollm2_cache.");
  app.footer(
      "Example:\n"
      "  smollm2_codec calibrate --out loop.kvp a.txt b.txt c.txt\n"
      "  smollm2_cache --tokens d.txt --out d.safetensors\n"
      "  smollm2_codec encode --tokens d.txt --cache d.safetensors --profile loop.kvp -o d.kvx\n"
      "  smollm2_codec decode d.kvx --profile loop.kvp -o d2.safetensors\n"
      "  kvexact verify d.safetensors d2.safetensors\n\n"
      "Exit codes: 0 done; 1 failed, the message says what and where, and no output is left behind; 100 and above: wrong command line.");
  app.require_subcommand(1);
  arguments args;
  args.engine.name = "int8";
  args.engine.exact_kv = true;
  const auto add_common = [&](CLI::App* command) {
    command->add_flag("--json", args.as_json, "Print the report as JSON, and no progress bar");
  };
  const auto add_profile = [&](CLI::App* command) {
    command->add_option("--profile", args.profile, "Profile made by calibrate")->required()->type_name("PROFILE");
    command->add_option("--model", args.engine.folder, "Folder with model.safetensors")->capture_default_str()->type_name("DIR");
    command->add_option("--threads", args.engine.threads, "0: all cores")->check(CLI::Range(0, 256))->capture_default_str()->type_name("N");
  };

  CLI::App* const calibrate_command = app.add_subcommand("calibrate", "Makes a profile from example texts: runs target and copy over them");
  calibrate_command->add_option("tokens", args.tokens, "Token ids as decimal text, one sequence a file; 16 of 1024 tokens are plenty")
      ->required()
      ->type_name("TOKENS...");
  calibrate_command->add_option("--out,-o", args.out, "The profile")->required()->type_name("PROFILE");
  calibrate_command->add_option("--dtype", args.dtype_name, "Number format of the caches to be coded")
      ->check(CLI::IsMember({"bf16", "fp16", "f8_e4m3"}))
      ->capture_default_str()
      ->type_name("NAME");
  calibrate_command->add_option("--layers-back", args.maps.layers_back, "Layers that the maps look back at, 1 to 8 (default 1)")
      ->check(CLI::Range(1U, layer_maps::most_layers_back))
      ->type_name("N");
  CLI::Option* const rank = calibrate_command->add_option("--rank", args.maps.rank, "Rank of the maps (default: full)")
                                ->check(CLI::Range(1, 65536))
                                ->type_name("N");
  calibrate_command->add_flag("--per-head", args.maps.per_head, "Maps within each head only")->excludes(rank);
  calibrate_command
      ->add_option("--block-size", args.maps.block_size,
                   "Channels that are coded together and then help to predict the next of their tile; 0: whole tiles")
      ->check(CLI::Range(0, 65536))
      ->capture_default_str()
      ->type_name("N");
  args.engine.add_to(*calibrate_command);
  calibrate_command
      ->add_option("--depth", args.engine.depth,
                   "The copy runs only the first K layers whole; above, its hidden states follow from what the projections missed. With "
                   "--exact-layers K: the target's own first layers, and nothing but projections after them")
      ->check(CLI::Range(0, 100'000))
      ->type_name("K");
  add_common(calibrate_command);

  CLI::App* const encode_command = app.add_subcommand("encode", "Writes a cache as a stream");
  encode_command->add_option("--tokens", args.tokens, "The cache's token ids")->required()->expected(1)->type_name("FILE");
  encode_command->add_option("--cache", args.cache, "The cache")->required()->type_name("CACHE");
  encode_command->add_option("--out,-o", args.out, "The stream")->required()->type_name("STREAM");
  encode_command->add_flag("--without-token-ids", args.without_ids,
                           "Do not carry the token ids in the stream; decoding needs --tokens then");
  add_profile(encode_command);
  add_common(encode_command);

  CLI::App* const decode_command = app.add_subcommand("decode", "Gives back the cache of a stream, every bit of it");
  decode_command->add_option("stream", args.stream, "The stream")->required()->type_name("STREAM");
  decode_command->add_option("--tokens", args.tokens, "Its token ids, if it does not carry them")->expected(1)->type_name("FILE");
  decode_command->add_option("--out,-o", args.out, "The cache")->required()->type_name("CACHE");
  add_profile(decode_command);
  add_common(decode_command);

  CLI11_PARSE(app, argc, argv);
  if (auto separate = expect_separate_output(args); !separate) return finish(separate);
  if (auto possible = output_file::probe(args.out); !possible) return finish(possible);
  if (calibrate_command->parsed()) return finish(calibrate(args));
  return finish(encode_command->parsed() ? encode(args) : decode(args));
} catch (const std::exception& caught) {
  std::fprintf(stderr, "smollm2_codec: %s\n", caught.what());
  return 1;
}

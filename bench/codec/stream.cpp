// SPDX-License-Identifier: Apache-2.0
// Encoding and decoding of a cache in memory by one thread, prediction given, beside memcpy of the same bytes in the same run.
//   bench_codec_stream --cache CACHE --profile PROFILE [--prediction FILE] [Google Benchmark options]
// `bytes_per_second` counts bytes of the cache, not of the stream.
#include <benchmark/benchmark.h>

#include <CLI/CLI.hpp>
#include <common/mapped_file.hpp>
#include <cstdio>
#include <cstring>
#include <string>
#include <common/cache_file.hpp>
#include <vector>

#include <kvexact/codec/codec.hpp>

using namespace kvexact;
using namespace kvexact::examples;

namespace {

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "bench_codec_stream: %s\n", why.c_str());
  std::exit(1);
}

const char* name_of(instruction_set set) {
  return set == instruction_set::avx512 ? "avx512" : set == instruction_set::avx2 ? "avx2" : "baseline";
}

/// The tiles of a stream with their predictions ready, so that what is left of decoding is the residual model and the entropy coder. For
/// predictors of single tiles; with others nothing is ready before the tiles below are decoded.
template <class Codec>
class entropy_stage {
 public:
  template <class Prediction>
  entropy_stage(const profile<Codec>& parameters, std::span<const std::byte> stream, const Prediction& prediction)
      : model_(&parameters.template model<typename Codec::predictor_type>()) {
    const auto opened = open_stream<Codec>(parameters, stream);
    if (!opened) give_up(opened.error().message());
    for (const chunk_record& record : opened->index.chunks) {
      if (record.mode != Codec::predictor_type::id) give_up("a chunk is not coded with the codec's predictor");
      chunk part;
      part.payload = opened->chunks.subspan(static_cast<std::size_t>(record.offset), static_cast<std::size_t>(record.bytes)).subspan(kvexact::detail::chunk_header_bytes);
      for (std::uint64_t l = record.layers().begin; l < record.layers().end; ++l) {
        for (const cache_part which : cache_parts) {
          const layer_shape& shape = parameters.shape().layer(static_cast<std::uint32_t>(l));
          if (shape.channels(which) == 0) continue;
          const std::size_t number = parameters.tile_number(static_cast<std::uint32_t>(l), which);
          const tile_shape where{static_cast<std::uint32_t>(l), which, record.tokens(), shape.kv_heads, shape.dim(which),
                                 static_cast<std::size_t>(kvexact::detail::pad_to_rows(record.token_count))};
          tile made;
          made.means.resize(where.channels() * where.stride);
          Codec::predictor_type::predict(where, {model_->means(number), &parameters.rotation()}, prediction, made.means.data());
          made.job = {where.channels(), record.token_count, where.stride, nullptr, model_->sigmas(number).data(), 0, nullptr,
                      model_->context_tables(number).data()};
          if (!opened->header.storage_scales.empty()) {
            const std::uint32_t scale = opened->header.storage_scales[number];
            const integer_divider divide(scale);
            for (std::uint32_t& mean : made.means) mean = divide(mean);
            made.job.sigma_shift = log2_in_256ths(scale);
          }
          part.tiles.push_back(std::move(made));
          part.tiles.back().job.means = part.tiles.back().means.data();
          values_.resize(std::max(values_.size(), part.tiles.back().means.size()));
        }
      }
      chunks_.push_back(std::move(part));
    }
  }

  void decode(instruction_set set) {
    using coder = typename Codec::entropy_coder_type;
    for (const chunk& part : chunks_) {
      const auto coded = load_little_endian<std::uint32_t>(part.payload.data());
      auto decoder = coder::decoder::open(part.payload.subspan(4, coded));
      bit_reader raw_bits(part.payload.subspan(4 + coded));
      for (const tile& each : part.tiles)
        run_on<kvexact::detail::decode_kernel<typename Codec::residual_model_type, coder>>(set, each.job, model_->tables(), *decoder, raw_bits, values_.data());
      if (!decoder->finish() || !raw_bits.finish()) give_up("the entropy stage did not end where it should");
    }
  }

 private:
  struct tile {
    std::vector<std::uint32_t> means;
    kvexact::detail::tile_job job;
  };
  struct chunk {
    std::span<const std::byte> payload;
    std::vector<tile> tiles;
  };

  const typename profile<Codec>::model_view* model_;
  std::vector<chunk> chunks_;
  std::vector<typename Codec::scalar::bits_type> values_;
};

template <class Codec, class Prediction>
void run(const cache_file& cache, const profile<Codec>& parameters, const Prediction& prediction) {
  using scalar = typename Codec::scalar;
  const cache_description& about = cache.about();
  const std::size_t values = static_cast<std::size_t>(about.tokens * about.shape.channels());
  // Everything in ordinary memory and touched once, so that no page is mapped while the clock runs.
  std::vector<scalar> source;
  const auto mapped = cache.layers<scalar>();
  for (std::uint32_t l = 0; l < about.shape.layers(); ++l) {
    for (const cache_part part : cache_parts) {
      const scalar* const data = mapped[l].part(part).data;
      source.insert(source.end(), data, data + about.tokens * about.shape.layer(l).channels(part));
    }
  }
  std::vector<scalar> target(values);
  const auto place = [&](auto* data) {
    std::vector<layer_tensors<std::remove_pointer_t<decltype(data)>>> layers;
    for (const layer_shape& shape : about.shape.all()) {
      layers.emplace_back();
      layers.back().key = layers.back().key.nhd(data, shape.kv_heads, shape.key_dim);
      data += about.tokens * shape.channels(cache_part::key);
      layers.back().value = layers.back().value.nhd(data, shape.kv_heads, shape.value_dim);
      data += about.tokens * shape.channels(cache_part::value);
    }
    return layers;
  };
  const auto from = place(static_cast<const scalar*>(source.data()));
  const auto to = place(target.data());
  const auto in = *kv_cache_view<const scalar>::make(about.shape, from, {0, about.tokens});
  const auto out = *kv_cache_view<scalar>::make(about.shape, to, {0, about.tokens});
  const auto cache_bytes = static_cast<std::int64_t>(values * sizeof(scalar));

  std::vector<std::byte> stream;
  stream.reserve(values * sizeof(scalar) + (1U << 20));
  vector_sink sink(stream);
  std::vector<std::byte> memory(stream_encoder<Codec, vector_sink>::workspace_bytes(parameters));
  const auto encode = [&](instruction_set set) {
    stream.clear();
    encoder_options options;
    options.set = set;
    auto encoder = stream_encoder<Codec, vector_sink>::begin(parameters, memory, sink, about.scales, options);
    if (!encoder) give_up(encoder.error().message());
    if (const auto appended = encoder->append(in, prediction); !appended) give_up(appended.error().message());
    if (const auto finished = encoder->finish(); !finished) give_up(finished.error().message());
  };
  const auto decode = [&](instruction_set set) {
    const auto decoder = stream_decoder<Codec>::open(parameters, stream, set);
    if (!decoder) give_up(decoder.error().message());
    if (const auto decoded = decoder->decode(out, memory, prediction); !decoded) give_up(decoded.error().message());
  };

  benchmark::RegisterBenchmark("memcpy", [&](benchmark::State& state) {
    for (auto _ : state) {
      std::memcpy(target.data(), source.data(), values * sizeof(scalar));
      benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(state.iterations() * cache_bytes);
  });
  for (const instruction_set set : {instruction_set::baseline, instruction_set::avx2, instruction_set::avx512}) {
    if (set > best_instruction_set()) continue;
    benchmark::RegisterBenchmark((std::string("encode/") + name_of(set)).c_str(), [&, set](benchmark::State& state) {
      for (auto _ : state) encode(set);
      state.SetBytesProcessed(state.iterations() * cache_bytes);
      state.counters["ratio"] = static_cast<double>(cache_bytes) / static_cast<double>(stream.size());
    });
    benchmark::RegisterBenchmark((std::string("decode/") + name_of(set)).c_str(), [&, set](benchmark::State& state) {
      encode(set);
      for (auto _ : state) decode(set);
      state.SetBytesProcessed(state.iterations() * cache_bytes);
      if (std::memcmp(source.data(), target.data(), values * sizeof(scalar)) != 0) state.SkipWithError("the decoded cache differs");
    });
    if constexpr (!mapped_predictor<typename Codec::predictor_type>) {
      benchmark::RegisterBenchmark((std::string("decode, entropy stage/") + name_of(set)).c_str(), [&, set](benchmark::State& state) {
        encode(set);
        entropy_stage<Codec> stage(parameters, stream, prediction);
        for (auto _ : state) stage.decode(set);
        state.SetBytesProcessed(state.iterations() * cache_bytes);
      });
    }
  }
  benchmark::RunSpecifiedBenchmarks();
}

template <class Codec, class Prediction>
void start(const cache_file& cache, const std::string& path, const mapped_file& file, const Prediction& prediction) {
  const auto parameters = profile<Codec>::parse(file.bytes());
  if (!parameters) give_up(path + ": " + parameters.error().message());
  run<Codec>(cache, *parameters, prediction);
}

/// The profile says whether there are maps.
template <class Scalar>
void choose(const cache_file& cache, const std::string& profile_path, const std::string& prediction_path) {
  const auto file = mapped_file::open(profile_path);
  if (!file) give_up(file.error().text);
  const auto with = [&]<class Plain, class Mapped>(const auto& prediction) {
    const auto parsed = parse_profile(file->bytes());
    if (!parsed) give_up(profile_path + ": " + parsed.error().message());
    const bool has_maps = parsed->data.find_model(Mapped::predictor_type::id) < parsed->data.models.size();
    has_maps ? start<Mapped>(cache, profile_path, *file, prediction) : start<Plain>(cache, profile_path, *file, prediction);
  };
  if (prediction_path.empty()) {
    with.template operator()<plain_codec_without_model<Scalar>, codec_without_model<Scalar>>(no_prediction{});
  } else {
    const auto prediction = cache_file::open(prediction_path);
    if (!prediction) give_up(prediction.error().text);
    const auto layers = prediction->layers<bf16>();
    with.template operator()<plain_codec_with_prediction<Scalar>, codec_with_prediction<Scalar>>(
        *kv_cache_view<const bf16>::make(prediction->about().shape, layers, {0, prediction->about().tokens}));
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  CLI::App app("Speed of the codec on one cache in memory, one thread; takes Google Benchmark's options too.");
  std::string cache_path, profile_path, prediction_path;
  app.add_option("--cache", cache_path, "Cache, safetensors")->required();
  app.add_option("--profile", profile_path, "Profile for it")->required();
  app.add_option("--prediction", prediction_path, "Prediction of the cache");
  CLI11_PARSE(app, argc, argv);
  const auto cache = cache_file::open(cache_path);
  if (!cache) give_up(cache.error().text);
  switch (cache->about().format) {
    case number_format::bfloat16: choose<bf16>(*cache, profile_path, prediction_path); break;
    case number_format::float16: choose<fp16>(*cache, profile_path, prediction_path); break;
    case number_format::float8_e4m3: choose<fp8_e4m3>(*cache, profile_path, prediction_path); break;
    case number_format::float8_e5m2: choose<fp8_e5m2>(*cache, profile_path, prediction_path); break;
  }
  return 0;
}

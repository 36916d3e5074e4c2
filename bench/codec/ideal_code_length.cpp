// SPDX-License-Identifier: Apache-2.0
// Size of real streams beside the ideal code length of the published model, in double precision: the density integrated over each
// number's rounding interval, N(mean, sigma) and the mixture 0.95 N(mean, sigma) + 0.03 N(mean, 3 sigma) + 0.02 empirical, with the means
// and sigmas of the profile; the empirical part is the distribution of each (layer, part) over the calibration caches.
//   bench_codec_ideal_code_length --profile PROFILE --calibration CACHE... --cache CACHE... [--prediction FILE...]
#include <CLI/CLI.hpp>
#include <cmath>
#include <common/mapped_file.hpp>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <common/cache_file.hpp>
#include <vector>

#include <kvexact/codec/codec.hpp>

using namespace kvexact;
using namespace kvexact::examples;

namespace {

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "bench_codec_ideal_code_length: %s\n", why.c_str());
  std::exit(1);
}

/// The codes of a format in the order of their values; -0 below 0. Infinities and NaNs lie beyond the largest finite numbers.
template <class T>
struct ordered_codes {
  static constexpr std::size_t half = std::size_t{1} << (T::bit_count - 1);

  static std::size_t index(T x) {
    const std::size_t magnitude = x.bits & T::magnitude_mask;
    return (x.bits & T::sign_mask) != 0 ? half - 1 - magnitude : half + magnitude;
  }
  /// Where numbers start to round to code `i` rather than to the one below.
  std::vector<double> lower_edge = std::vector<double>(2 * half + 1);

  ordered_codes() {
    const auto value = [](std::size_t i) {
      const std::size_t magnitude = i < half ? half - 1 - i : i - half;
      const double size = magnitude > T::max_finite ? INFINITY : static_cast<double>(T::from_bits(static_cast<typename T::bits_type>(magnitude)).to_float());
      return i < half ? -size : size;
    };
    lower_edge.front() = -INFINITY;
    lower_edge.back() = INFINITY;
    for (std::size_t i = 1; i < 2 * half; ++i) lower_edge[i] = std::isfinite(value(i - 1)) && std::isfinite(value(i)) ? (value(i - 1) + value(i)) / 2 : value(i);
  }
};

struct code_lengths {
  double gaussian = 0, mixture = 0, stream = 0;
  std::uint64_t values = 0;
};

template <class Codec>
class measurement {
 public:
  using scalar = typename Codec::scalar;

  measurement(const profile<Codec>& parameters, const std::vector<std::string>& calibration) : profile_(parameters) {
    for (const std::string& path : calibration) {
      const auto cache = cache_file::open(path);
      if (!cache) give_up(cache.error().text);
      const auto layers = cache->layers<scalar>();
      const auto view = *kv_cache_view<const scalar>::make(cache->about().shape, layers, {0, cache->about().tokens});
      for_each_tile(view, no_prediction{}, cache->about().scales, [&](std::size_t tile, scalar x, double, double, double) {
        if (tile == counts_.size()) counts_.emplace_back(2 * ordered_codes<scalar>::half, 0.01);
        ++counts_[tile][ordered_codes<scalar>::index(x)];
      }, false);
    }
    for (auto& each : counts_) {
      double sum = 0;
      for (const double count : each) sum += count;
      for (double& count : each) count /= sum;
    }
  }

  template <class View, class Prediction>
  void add(const View& view, const Prediction& prediction, std::span<const std::uint32_t> scales, code_lengths& total) {
    for_each_tile(view, prediction, scales, [&](std::size_t tile, scalar x, double mean, double sigma, double scale) {
      const std::size_t i = ordered_codes<scalar>::index(x);
      const double from = (codes_.lower_edge[i] * scale - mean) / sigma;
      const double to = (codes_.lower_edge[i + 1] * scale - mean) / sigma;
      const double gaussian = density::gaussian().mass(from, to);
      const double rest = counts_.empty() ? 0 : 0.02 * counts_[tile][i];
      total.gaussian -= std::log2(std::max(gaussian, 1e-30));
      total.mixture -= std::log2(std::max(density::mixture().mass(from, to) + rest, 1e-30));
      ++total.values;
    }, true);
    std::vector<std::byte> stream, memory(stream_encoder<Codec, vector_sink>::workspace_bytes(profile_));
    vector_sink sink(stream);
    auto encoder = stream_encoder<Codec, vector_sink>::begin(profile_, memory, sink, scales);
    if (!encoder) give_up(encoder.error().message());
    if (const auto done = encoder->append(view, prediction); !done) give_up(done.error().message());
    if (const auto done = encoder->finish(); !done) give_up(done.error().message());
    total.stream += 8.0 * static_cast<double>(stream.size());
  }

 private:
  /// visit(tile, number, mean, sigma, scale); means and sigmas in real units.
  template <class View, class Prediction, class Visit>
  void for_each_tile(const View& view, const Prediction& prediction, std::span<const std::uint32_t> scales, Visit&& visit, bool with_means) {
    std::size_t tile = 0;
    for (std::uint32_t l = 0; l < view.shape().layers(); ++l) {
      const layer_shape& layer = view.shape().layer(l);
      for (const cache_part part : cache_parts) {
        if (layer.channels(part) == 0) continue;
        const auto& model = profile_.template model<typename Codec::predictor_type>();
        const auto tokens = static_cast<std::size_t>(view.tokens().size());
        const tile_shape where{l, part, view.tokens(), layer.kv_heads, layer.dim(part), tokens};
        std::vector<typename scalar::bits_type> values(where.channels() * tokens);
        std::vector<std::uint32_t> means(values.size());
        gather_tile(view, where, values.data());
        if constexpr (!Codec::predictor_type::needs_prediction || !std::same_as<Prediction, no_prediction>) {
          if (with_means) Codec::predictor_type::predict(where, {model.means(tile), &profile_.rotation()}, prediction, means.data());
        }
        const double scale = scales.empty() ? 1.0 : static_cast<double>(std::bit_cast<float>(scales[tile]));
        for (std::size_t i = 0; i < values.size(); ++i)
          visit(tile, scalar::from_bits(values[i]), static_cast<double>(std::bit_cast<float>(means[i])), std::exp2(model.sigmas(tile)[i / tokens] / 256.0), scale);
        ++tile;
      }
    }
  }

  const profile<Codec>& profile_;
  ordered_codes<scalar> codes_;
  std::vector<std::vector<double>> counts_;
};

struct arguments {
  std::string profile;
  std::vector<std::string> calibration, caches, predictions;
};

template <class Codec>
void run(const arguments& args) {
  const auto file = mapped_file::open(args.profile);
  if (!file) give_up(file.error().text);
  const auto parameters = profile<Codec>::parse(file->bytes());
  if (!parameters) give_up(args.profile + ": " + parameters.error().message());
  measurement<Codec> measured(*parameters, args.calibration);
  code_lengths total;
  for (std::size_t i = 0; i < args.caches.size(); ++i) {
    const auto cache = cache_file::open(args.caches[i]);
    if (!cache) give_up(cache.error().text);
    const auto layers = cache->layers<typename Codec::scalar>();
    const auto view = *kv_cache_view<const typename Codec::scalar>::make(cache->about().shape, layers, {0, cache->about().tokens});
    if constexpr (Codec::predictor_type::needs_prediction) {
      const auto prediction = cache_file::open(args.predictions[i]);
      if (!prediction) give_up(prediction.error().text);
      const auto predicted = prediction->layers<bf16>();
      measured.add(view, *kv_cache_view<const bf16>::make(prediction->about().shape, predicted, {0, prediction->about().tokens}), cache->about().scales, total);
    } else {
      measured.add(view, no_prediction{}, cache->about().scales, total);
    }
  }
  const auto values = static_cast<double>(total.values);
  std::printf("%-8s %-12s ideal Gaussian %.4f, ideal mixture %.4f, stream file %.4f bits per scalar: %+.2f %% to Gaussian, %+.2f %% to mixture\n",
              to_string(Codec::format), Codec::predictor_type::name, total.gaussian / values, total.mixture / values, total.stream / values,
              100 * (total.stream / total.gaussian - 1), 100 * (total.stream / total.mixture - 1));
}

template <class Scalar>
void choose(const arguments& args) {
  if (args.predictions.empty()) return run<plain_codec_without_model<Scalar>>(args);
  run<plain_codec_with_prediction<Scalar>>(args);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Streams beside the ideal code length of the published model.");
  arguments args;
  app.add_option("--profile", args.profile, "Profile")->required();
  app.add_option("--calibration", args.calibration, "Caches for the empirical part of the mixture");
  app.add_option("--cache", args.caches, "Caches to measure")->required();
  app.add_option("--prediction", args.predictions, "Their predictions, in the same order");
  CLI11_PARSE(app, argc, argv);
  if (!args.predictions.empty() && args.predictions.size() != args.caches.size()) give_up("one prediction for each cache is needed");
  const auto first = cache_file::open(args.caches.front());
  if (!first) give_up(first.error().text);
  switch (first->about().format) {
    case number_format::bfloat16: choose<bf16>(args); break;
    case number_format::float16: choose<fp16>(args); break;
    case number_format::float8_e4m3: choose<fp8_e4m3>(args); break;
    case number_format::float8_e5m2: choose<fp8_e5m2>(args); break;
  }
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// A made-up transformer and a rough copy of it in the closed loop: calibrate, encode, decode, compare.
#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include <kvexact/codec/calibrate.hpp>
#include <kvexact/codec/codec.hpp>

using kvexact::bf16;
using codec = kvexact::codec_closed_loop<bf16>;

constexpr std::uint32_t layer_count = 4, heads = 2, dim = 16, width = heads * dim;
constexpr std::uint64_t token_count = 300;
using state = std::array<float, width>;

// Keys are not rotated, and attention is the mean over all tokens so far. `step`: weights are rounded to multiples of it.
struct my_model {
  float step;

  float weight(std::uint32_t matrix, std::uint32_t row, std::uint32_t column) const {
    return step * std::round(std::sin(static_cast<float>((matrix * width + row) * width + column) * 1.7F) / step);
  }
  static state embed(std::uint32_t id) {
    state h;
    for (std::uint32_t i = 0; i < width; ++i) h[i] = std::sin(static_cast<float>(id * width + i) * 0.9F);
    return h;
  }
  void project(std::uint32_t matrix, const state& h, float* out) const {
    for (std::uint32_t row = 0; row < width; ++row) {
      out[row] = 0;
      for (std::uint32_t i = 0; i < width; ++i) out[row] += weight(matrix, row, i) * h[i];
    }
  }
  // `seen`: sum of the keys and values of a layer over the tokens before, `count` of them.
  static void rest(state& h, const float* keys, const float* values, state& seen, std::uint64_t count) {
    for (std::uint32_t i = 0; i < width; ++i) {
      seen[i] += keys[i] * 0.2F + values[i];
      h[i] = 0.7F * h[i] + 0.2F * seen[i] / static_cast<float>(count + 1);
    }
  }
};

// One sequence in the engine that predicts.
class my_sequence {
 public:
  my_sequence(const my_model& model, const std::vector<std::uint32_t>& ids) : model_(&model), ids_(&ids) {}

  std::uint64_t tokens() const noexcept { return range_.begin; }
  std::size_t hidden_width() const noexcept { return width; }  // 0: takes no correction

  kvexact::result<void> begin(kvexact::index_range tokens) noexcept {
    if (tokens.end > ids_->size()) return kvexact::error{kvexact::error_code::out_of_range, "tokens whose ids are not known"};
    range_ = tokens;
    now_ = before_;  // a range that was begun before and not finished is forgotten
    hidden_.clear();
    for (std::uint64_t t = tokens.begin; t < tokens.end; ++t) hidden_.push_back(my_model::embed((*ids_)[t]));
    return {};
  }
  kvexact::result<void> predict(std::uint32_t layer, std::span<float> keys, std::span<float> values) noexcept {
    for (std::size_t t = 0; t < hidden_.size(); ++t) {
      model_->project(2 * layer, hidden_[t], &keys[t * width]);
      model_->project(2 * layer + 1, hidden_[t], &values[t * width]);
    }
    return {};
  }
  kvexact::result<void> advance(std::uint32_t layer, std::span<const float> keys, std::span<const float> values,
                                std::span<const float> correction) noexcept {
    for (std::size_t t = 0; t < hidden_.size(); ++t) {
      if (!correction.empty()) correct(hidden_[t], correction.subspan(t * width, width));  // h <- h + rms(h) * correction
      my_model::rest(hidden_[t], &keys[t * width], &values[t * width], now_[layer], range_.begin + t);
    }
    if (layer + 1 < layer_count) return {};
    before_ = now_;
    range_.begin = range_.end;
    return {};
  }

 private:
  static void correct(state& h, std::span<const float> by) {
    float squares = 0;
    for (const float each : h) squares += each * each;
    const float rms = std::sqrt(squares / width);
    for (std::size_t i = 0; i < width; ++i) h[i] += rms * by[i];
  }

  const my_model* model_;
  const std::vector<std::uint32_t>* ids_;
  kvexact::index_range range_;
  std::vector<state> hidden_;
  std::array<state, layer_count> before_{};  // what attention has seen up to the range
  std::array<state, layer_count> now_{};     // and with what of it is done
};
static_assert(kvexact::layerwise_predictor<my_sequence>);

// The cache that the true model makes, [layer][token][K, then V].
using cache = std::vector<bf16>;
template <class T>
std::vector<kvexact::layer_tensors<T>> tensors_of(T* data) {
  std::vector<kvexact::layer_tensors<T>> all;
  for (std::size_t l = 0; l < 2 * layer_count; l += 2) {
    T* const keys = data + l * token_count * width;
    all.push_back(
        {kvexact::strided_tensor<T>::nhd(keys, heads, dim), kvexact::strided_tensor<T>::nhd(keys + token_count * width, heads, dim)});
  }
  return all;
}
cache make_cache(const my_model& model, const std::vector<std::uint32_t>& ids) {
  cache made(2 * layer_count * token_count * width);
  std::array<state, layer_count> seen{};
  for (std::uint64_t t = 0; t < token_count; ++t) {
    state h = my_model::embed(ids[t]);
    for (std::uint32_t l = 0; l < layer_count; ++l) {
      std::array<float, 2 * width> rows;
      model.project(2 * l, h, rows.data());
      model.project(2 * l + 1, h, rows.data() + width);
      for (std::uint32_t i = 0; i < 2 * width; ++i) {
        bf16& value = made[((2 * l + i / width) * token_count + t) * width + i % width];
        value = bf16::from_float(rows[i]);
        rows[i] = value.to_float();
      }
      my_model::rest(h, rows.data(), rows.data() + width, seen[l], t);
    }
  }
  return made;
}

kvexact::result<void> round_trip(const my_model& copy, const std::vector<std::uint32_t>& ids, const cache& source, cache& target,
                                 std::vector<std::byte>& stream) {
  const auto shape = kvexact::cache_shape::uniform(layer_count, {heads, dim, dim});
  if (!shape) return shape.error();
  const auto from = tensors_of(source.data());
  const auto to = tensors_of(target.data());
  const auto in = kvexact::kv_cache_view<const bf16>::make(*shape, from, {0, token_count});
  const auto out = kvexact::kv_cache_view<bf16>::make(*shape, to, {0, token_count});
  if (!in) return in.error();
  if (!out) return out.error();

  my_sequence shown(copy, ids);
  const std::vector<kvexact::calibration_example<kvexact::kv_cache_view<const bf16>, my_sequence*>> examples{{*in, &shown}};
  const auto data = kvexact::calibrate<codec>(*shape, {}, examples);
  if (!data) return data.error();
  const auto file = kvexact::serialize_profile(*data);
  if (!file) return file.error();
  const auto profile = kvexact::profile<codec>::parse(*file);
  if (!profile) return profile.error();

  kvexact::vector_sink sink(stream);
  using encoder_type = kvexact::stream_encoder<codec, kvexact::vector_sink>;
  std::vector<std::byte> memory(encoder_type::workspace_bytes(*profile));
  auto encoder = encoder_type::begin(*profile, memory, sink);
  if (!encoder) return encoder.error();
  // The engine goes where a prediction would; the stream can carry the token ids.
  my_sequence sender(copy, ids);
  if (const auto done = encoder->append(*in, sender); !done) return done.error();
  if (const auto done = encoder->finish(ids); !done) return done.error();

  const auto decoder = kvexact::stream_decoder<codec>::open(*profile, stream);
  if (!decoder) return decoder.error();
  const std::vector<std::uint32_t> carried(decoder->token_ids().begin(), decoder->token_ids().end());
  my_sequence receiver(copy, carried);
  memory.resize(decoder->workspace_bytes());
  return decoder->decode(*out, memory, receiver);
}

int main() {
  std::vector<std::uint32_t> ids;
  for (std::uint32_t t = 0; t < token_count; ++t) ids.push_back(t * t % 97);
  const cache source = make_cache({0.001F}, ids);
  cache target(source.size());
  std::vector<std::byte> stream;
  if (const auto done = round_trip({0.05F}, ids, source, target, stream); !done) {
    std::printf("%s\n", done.error().message().c_str());
    return 1;
  }
  bool exact = true;
  for (std::size_t i = 0; i < source.size(); ++i) exact = exact && source[i].bits == target[i].bits;
  std::printf("%zu bytes -> %zu bytes, bit-exact: %s\n", source.size() * sizeof(bf16), stream.size(), exact ? "yes" : "no");
  return exact ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
// A made-up cache of 2 layers through the whole codec: calibrate, encode, decode, compare.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include <kvexact/codec/calibrate.hpp>
#include <kvexact/codec/codec.hpp>

using kvexact::bf16;
using codec = kvexact::codec_without_model<bf16>;

constexpr std::uint32_t layer_count = 2, heads = 4, dim = 32;
constexpr std::uint64_t token_count = 300;

// The engine's memory: here one array for K and one for V, [layer, token, head, dim].
struct my_cache {
  std::vector<bf16> keys = std::vector<bf16>(layer_count * token_count * heads * dim);
  std::vector<bf16> values = keys;

  template <class T>
  std::vector<kvexact::layer_tensors<T>> tensors() {
    std::vector<kvexact::layer_tensors<T>> all;
    for (std::size_t l = 0; l < layer_count; ++l) {
      const std::size_t at = l * token_count * heads * dim;
      all.push_back(
          {kvexact::strided_tensor<T>::nhd(keys.data() + at, heads, dim), kvexact::strided_tensor<T>::nhd(values.data() + at, heads, dim)});
    }
    return all;
  }
};

kvexact::result<void> round_trip(my_cache& source, my_cache& target, std::vector<std::byte>& stream) {
  // A view says where the tokens lie; nothing is copied. paged_kv_cache_view does the same for block tables.
  const auto shape = kvexact::cache_shape::uniform(layer_count, {heads, dim, dim});
  if (!shape) return shape.error();
  const auto from = source.tensors<const bf16>();
  const auto to = target.tensors<bf16>();
  const auto in = kvexact::kv_cache_view<const bf16>::make(*shape, from, {0, token_count});
  const auto out = kvexact::kv_cache_view<bf16>::make(*shape, to, {0, token_count});
  if (!in) return in.error();
  if (!out) return out.error();

  // Once a model: example caches -> profile. Tell it how keys are rotated, if they are.
  const auto rope = kvexact::rotary::from_base(kvexact::rotary_pairing::half_split, dim, 10000.0);
  if (!rope) return rope.error();
  const std::vector<kvexact::calibration_example<kvexact::kv_cache_view<const bf16>>> examples{{*in}};
  const auto data = kvexact::calibrate<codec>(*shape, *rope, examples);
  if (!data) return data.error();
  const auto file = kvexact::serialize_profile(*data);
  if (!file) return file.error();

  // Once a process: the profile, made ready for use and shared by all threads.
  const auto profile = kvexact::profile<codec>::parse(*file);
  if (!profile) return profile.error();

  // Encode: any sink will do, append as tokens arrive.
  kvexact::vector_sink sink(stream);
  using encoder_type = kvexact::stream_encoder<codec, kvexact::vector_sink>;
  std::vector<std::byte> memory(encoder_type::workspace_bytes(*profile));
  auto encoder = encoder_type::begin(*profile, memory, sink);
  if (!encoder) return encoder.error();
  if (const auto done = encoder->append(*in); !done) return done.error();
  if (const auto done = encoder->finish(); !done) return done.error();

  // Decode everything, or any layers and tokens: decode({0, 1}, {100, 200}, ...). Chunks below are decoded on the way.
  const auto decoder = kvexact::stream_decoder<codec>::open(*profile, stream);
  if (!decoder) return decoder.error();
  memory.resize(decoder->workspace_bytes());
  return decoder->decode(*out, memory);
}

int main() {
  my_cache source, target;
  for (std::size_t i = 0; i < source.keys.size(); ++i) {
    const auto channel = static_cast<float>(i % (heads * dim));
    source.keys[i] = bf16::from_float(std::sin(static_cast<float>(i) * 0.37F) + channel * 0.1F);
    source.values[i] = bf16::from_float(std::cos(static_cast<float>(i) * 0.61F) * (1.0F + channel * 0.02F));
  }
  std::vector<std::byte> stream;
  if (const auto done = round_trip(source, target, stream); !done) {
    std::printf("%s\n", done.error().message().c_str());
    return 1;
  }
  const std::size_t bytes = source.keys.size() * sizeof(bf16);
  const bool exact = std::memcmp(source.keys.data(), target.keys.data(), bytes) == 0 &&
                     std::memcmp(source.values.data(), target.values.data(), bytes) == 0;
  std::printf("%zu bytes -> %zu bytes, bit-exact: %s\n", 2 * bytes, stream.size(), exact ? "yes" : "no");
  return exact ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/codec/calibrate.hpp>
#include <kvexact/codec/codec.hpp>
#include <kvexact/entropy/range_coder.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>
#include <kvexact/tensor/paged_kv_cache_view.hpp>

#include "codec_under_test.hpp"
#include "fake_engine.hpp"

namespace kvexact::test {

/// A copy of some tokens of a cache in a given layout, with gaps that must not be touched: around and between strided tensors, and in
/// blocks of a pool that belong to nobody.
template <class T>
class placed {
 public:
  placed(const bits_cache& from, index_range tokens, layout how) : shape_(&from.shape), tokens_(tokens), how_(how) {
    const auto capacity = static_cast<std::size_t>(tokens.size());
    const std::size_t blocks = capacity / block_size + (capacity % block_size != 0);
    pool_blocks_ = 2 * blocks + 1;
    for (std::size_t b = 0; is_paged() && b < blocks; ++b) table_.push_back(static_cast<std::int32_t>(2 * (blocks - 1 - b) + 1));
    for (const layer_shape& layer : shape_->all()) {
      for (const cache_part part : cache_parts) {
        const std::size_t per_token = layer.channels(part);
        const std::size_t room = is_paged() ? pool_blocks_ * block_size : capacity + spare_tokens;
        memory_.emplace_back(2 * margin + per_token * room, T::from_bits(guard));
      }
      T* const key = memory_[memory_.size() - 2].data() + margin;
      T* const value = memory_[memory_.size() - 1].data() + margin;
      const auto tensor = [&](T* data, std::uint32_t dim) {
        return how == layout::hnd ? strided_tensor<T>::hnd(data, capacity + spare_tokens, dim)
                                  : strided_tensor<T>::nhd(data, layer.kv_heads, dim);
      };
      const auto pool = [&](T* data, std::uint32_t dim) {
        return how == layout::paged_hnd ? block_pool<T>::hnd(data, block_size, layer.kv_heads, dim)
                                        : block_pool<T>::nhd(data, block_size, layer.kv_heads, dim);
      };
      tensors_.push_back({tensor(key, layer.key_dim), tensor(value, layer.value_dim)});
      const auto constant = [](const strided_tensor<T>& from_tensor) {
        return strided_tensor<const T>{from_tensor.data, from_tensor.token_stride, from_tensor.head_stride};
      };
      constant_tensors_.push_back({constant(tensors_.back().key), constant(tensors_.back().value)});
      pools_.push_back({pool(key, layer.key_dim), pool(value, layer.value_dim)});
    }
    for_each_value(
        [&](T& value, std::size_t part, std::size_t at) { value.bits = static_cast<typename T::bits_type>(from.parts[part][at]); });
  }
  placed(const placed&) = delete;
  placed& operator=(const placed&) = delete;

  /// Calls use(view).
  template <class Use>
  auto read(Use&& use) {
    if (is_paged()) return use(paged_view());
    return use(strided_view());
  }
  [[nodiscard]] kv_cache_view<const T> strided_view() const {
    REQUIRE(!is_paged());
    return *kv_cache_view<const T>::make(*shape_, constant_tensors_, tokens_);
  }
  template <class Use>
  auto write(Use&& use) {
    if (is_paged()) return use(paged_view());
    return use(*kv_cache_view<T>::make(*shape_, tensors_, tokens_));
  }

  /// Copies the values back and says whether the gaps are as they were. Ends this object's use.
  [[nodiscard]] bool take_back(bits_cache& to) {
    for_each_value([&](T& value, std::size_t part, std::size_t at) {
      to.parts[part][at] = value.bits;
      value.bits = guard;
    });
    for (const std::vector<T>& memory : memory_)
      for (const T& each : memory)
        if (each.bits != guard) return false;
    return true;
  }

 private:
  static constexpr std::uint32_t block_size = 5;
  static constexpr std::size_t spare_tokens = 3;
  static constexpr std::size_t margin = 16;
  static constexpr auto guard = static_cast<typename T::bits_type>(0x5aa5);

  [[nodiscard]] bool is_paged() const { return how_ == layout::paged_nhd || how_ == layout::paged_hnd; }
  [[nodiscard]] paged_kv_cache_view<T> paged_view() const {
    REQUIRE(tokens_.begin == 0);
    return *paged_kv_cache_view<T>::make(*shape_, pools_, {table_, block_size, static_cast<std::uint32_t>(pool_blocks_)}, tokens_.end);
  }
  /// Calls visit(value here, part, place in bits_cache), with the places worked out anew.
  template <class Visit>
  void for_each_value(Visit&& visit) {
    const auto capacity = static_cast<std::size_t>(tokens_.size());
    for (std::size_t part = 0; part < memory_.size(); ++part) {
      const layer_shape& layer = shape_->layer(static_cast<std::uint32_t>(part / 2));
      const std::size_t heads = layer.kv_heads;
      const std::size_t dim = layer.dim(cache_parts[part % 2]);
      for (std::size_t t = 0; t < capacity; ++t) {
        for (std::size_t h = 0; h < heads; ++h) {
          std::size_t row = 0;
          switch (how_) {
            case layout::nhd: row = t * heads + h; break;
            case layout::hnd: row = h * (capacity + spare_tokens) + t; break;
            case layout::paged_nhd:
              row = (static_cast<std::size_t>(table_[t / block_size]) * block_size + t % block_size) * heads + h;
              break;
            case layout::paged_hnd:
              row = (static_cast<std::size_t>(table_[t / block_size]) * heads + h) * block_size + t % block_size;
              break;
          }
          const std::size_t at = ((static_cast<std::size_t>(tokens_.begin) + t) * heads + h) * dim;
          for (std::size_t d = 0; d < dim; ++d) visit(memory_[part][margin + row * dim + d], part, at + d);
        }
      }
    }
  }

  const cache_shape* shape_;
  index_range tokens_;
  layout how_;
  std::size_t pool_blocks_ = 0;
  std::vector<std::int32_t> table_;
  std::vector<std::vector<T>> memory_;
  std::vector<layer_tensors<T>> tensors_;
  std::vector<layer_tensors<const T>> constant_tensors_;
  std::vector<layer_pools<T>> pools_;
};

/// Calls use(what the codec's predictor wants to be handed).
template <class Codec, class Use>
auto with_side(const side_information& side, Use&& use) {
  if constexpr (std::same_as<typename Codec::predictor_type, closed_loop>) {
    REQUIRE(side.engine != nullptr);
    return use(*side.engine);
  } else if constexpr (Codec::predictor_type::needs_prediction) {
    REQUIRE(side.cache.has_value());
    placed<bf16> predicted(*side.cache->cache, side.cache->tokens, side.cache->how);
    return predicted.read([&](const auto& guess) { return use(guess); });
  } else {
    return use(no_prediction{});
  }
}

template <class Codec>
class encoder_instance final : public erased_encoder {
 public:
  encoder_instance(stream_encoder<Codec, byte_collector> encoder, std::vector<std::byte> memory)
      : encoder_(std::move(encoder)), memory_(std::move(memory)) {}

  result<void> append(const source& cache, const side_information& side) override {
    placed<typename Codec::scalar> values(*cache.cache, cache.tokens, cache.how);
    return values.read(
        [&](const auto& view) { return with_side<Codec>(side, [&](auto&& given) { return encoder_.append(view, given); }); });
  }
  result<void> finish(std::span<const std::uint32_t> token_ids) override { return encoder_.finish(token_ids); }
  std::uint64_t resume_offset() const override { return encoder_.resume_offset(); }
  std::uint64_t tokens() const override { return encoder_.tokens(); }
  std::span<const chunk_record> chunks() const override { return encoder_.chunks(); }

 private:
  stream_encoder<Codec, byte_collector> encoder_;
  std::vector<std::byte> memory_;
};

template <class Codec>
class decoder_instance final : public erased_decoder {
 public:
  explicit decoder_instance(stream_decoder<Codec> decoder) : decoder_(std::move(decoder)) {}

  result<void> decode(const decode_call& call, bits_cache& to, const side_information& side) const override {
    std::vector<std::byte> memory(call.workspace_bytes.value_or(decoder_.workspace_bytes()));
    placed<typename Codec::scalar> values(to, call.room, call.how);
    const auto decoded = values.write([&](const auto& view) -> result<void> {
      if (!side.cache && side.engine == nullptr) return decoder_.decode(call.layers, call.tokens, view, memory);
      return with_side<Codec>(side, [&](auto&& given) { return decoder_.decode(call.layers, call.tokens, view, memory, given); });
    });
    if (!values.take_back(to)) FAIL_CHECK("decoding touched memory outside the view");
    return decoded;
  }
  std::uint64_t tokens() const override { return decoder_.tokens(); }
  const stream_header& header() const override { return decoder_.header(); }
  std::span<const chunk_record> chunks() const override { return decoder_.chunks(); }
  std::span<const std::uint32_t> token_ids() const override { return decoder_.token_ids(); }
  std::size_t workspace_bytes() const override { return decoder_.workspace_bytes(); }
  index_range covering_tokens(index_range tokens) const override { return decoder_.covering_tokens(tokens); }

 private:
  stream_decoder<Codec> decoder_;
};

template <class Codec>
class ready_instance final : public ready_codec {
 public:
  using encoder_type = stream_encoder<Codec, byte_collector>;

  explicit ready_instance(profile<Codec> parameters) : profile_(std::move(parameters)) {}

  std::uint64_t hash() const override { return profile_.hash(); }
  const cache_shape& shape() const override { return profile_.shape(); }
  std::size_t encoder_workspace_bytes(chunk_options options) const override { return encoder_type::workspace_bytes(profile_, options); }
  result<std::unique_ptr<erased_encoder>> begin(byte_collector& sink, const encoder_call& call) const override {
    std::vector<std::byte> memory(call.workspace_bytes.value_or(encoder_workspace_bytes(call.options.chunks)));
    auto encoder = encoder_type::begin(profile_, memory, sink, call.scales, call.options);
    return erase(std::move(encoder), std::move(memory));
  }
  result<std::unique_ptr<erased_encoder>> resume(byte_collector& sink, std::span<const std::byte> stream,
                                                 const encoder_call& call) const override {
    std::vector<std::byte> memory(call.workspace_bytes.value_or(encoder_workspace_bytes(call.options.chunks)));
    auto encoder = encoder_type::resume(profile_, memory, sink, stream, call.options);
    return erase(std::move(encoder), std::move(memory));
  }
  result<std::unique_ptr<erased_decoder>> open(std::span<const std::byte> stream, instruction_set set) const override {
    auto decoder = stream_decoder<Codec>::open(profile_, stream, set);
    if (!decoder) return decoder.error();
    return std::unique_ptr<erased_decoder>(std::make_unique<decoder_instance<Codec>>(*std::move(decoder)));
  }

 private:
  static result<std::unique_ptr<erased_encoder>> erase(result<encoder_type> encoder, std::vector<std::byte> memory) {
    if (!encoder) return encoder.error();
    return std::unique_ptr<erased_encoder>(std::make_unique<encoder_instance<Codec>>(*std::move(encoder), std::move(memory)));
  }

  profile<Codec> profile_;
};

template <class Codec, codec_kind Kind>
class codec_instance final : public codec_under_test {
 public:
  using scalar = typename Codec::scalar;

  codec_kind kind() const override { return Kind; }
  number_format format() const override { return Codec::format; }
  std::uint32_t predictor() const override { return Codec::predictor_type::id; }
  bool needs_prediction() const override { return Codec::predictor_type::needs_prediction; }
  result<profile_data> calibrate(const cache_shape& shape, const rotary& rotation, std::span<const calibration_input> inputs,
                                 const calibration_options& options) const override {
    std::vector<std::unique_ptr<placed<scalar>>> caches;
    std::vector<std::unique_ptr<placed<bf16>>> predictions;
    const auto run = [&]<class Prediction>(auto&& prediction_of, const Prediction&) {
      std::vector<calibration_example<kv_cache_view<const scalar>, Prediction>> examples;
      for (const calibration_input& each : inputs) {
        caches.push_back(std::make_unique<placed<scalar>>(*each.cache.cache, each.cache.tokens, each.cache.how));
        examples.push_back({caches.back()->strided_view(), prediction_of(each.side), each.scales});
      }
      return kvexact::calibrate<Codec>(shape, rotation, examples, options);
    };
    if constexpr (Kind == codec_kind::closed_loop) {
      return run([](const side_information& side) { return side.engine; }, static_cast<fake_engine*>(nullptr));
    } else if constexpr (Codec::predictor_type::needs_prediction) {
      const auto place = [&](const side_information& side) {
        predictions.push_back(std::make_unique<placed<bf16>>(*side.cache->cache, side.cache->tokens, side.cache->how));
        return predictions.back()->strided_view();
      };
      return run(place, *kv_cache_view<const bf16>::make({}, {}, {}));
    } else {
      return run([](const side_information&) { return no_prediction{}; }, no_prediction{});
    }
  }
  result<std::unique_ptr<ready_codec>> parse(std::span<const std::byte> profile_file, build_for use) const override {
    return erase(profile<Codec>::parse(profile_file, use));
  }
  result<std::unique_ptr<ready_codec>> make(const profile_data& data, std::uint64_t hash) const override {
    return erase(profile<Codec>::make(data, hash));
  }

 private:
  static result<std::unique_ptr<ready_codec>> erase(result<profile<Codec>> parameters) {
    if (!parameters) return parameters.error();
    return std::unique_ptr<ready_codec>(std::make_unique<ready_instance<Codec>>(*std::move(parameters)));
  }
};

template <class Scalar, codec_kind Kind>
struct codec_of;
template <class Scalar>
struct codec_of<Scalar, codec_kind::channel_mean> {
  using type = plain_codec_without_model<Scalar>;
};
template <class Scalar>
struct codec_of<Scalar, codec_kind::external> {
  using type = plain_codec_with_prediction<Scalar>;
};
template <class Scalar>
struct codec_of<Scalar, codec_kind::cross_layer> {
  using type = codec_without_model<Scalar>;
};
template <class Scalar>
struct codec_of<Scalar, codec_kind::cross_layer_external> {
  using type = codec_with_prediction<Scalar>;
};
template <class Scalar>
struct codec_of<Scalar, codec_kind::closed_loop> {
  using type = codec_closed_loop<Scalar>;
};

/// Instantiated in several files, which compile in parallel.
template <class Scalar, codec_kind Kind>
const codec_under_test& instance_of() {
  static const codec_instance<typename codec_of<Scalar, Kind>::type, Kind> made;
  return made;
}

}  // namespace kvexact::test

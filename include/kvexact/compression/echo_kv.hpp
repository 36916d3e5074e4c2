// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/compression/attention.hpp>
#include <kvexact/compression/buffer.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/group_compressor.hpp>
#include <kvexact/compression/rows.hpp>
#include <kvexact/compression/unrotated_keys.hpp>
#include <kvexact/compression/uncompressed.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/core/instruction_set.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>
#include <kvexact/tensor/rotary.hpp>

namespace kvexact {

/// How the K or the V of a layer follows from that of the first layer of its group: the layer stores the channels `kept`
/// (head * dim + index in the head, increasing), and every other channel, in order, is bias + weights * [first layer's channels, kept ones].
struct echo_map {
  std::vector<std::uint32_t> kept;
  std::vector<float> weights;  ///< [channels - kept, channels of the first layer + kept]
  std::vector<float> bias;     ///< [channels - kept]
};

/// The calibrated maps of a group of layers, shared by all sequences; see `echo_calibration`.
struct echo_group {
  rotary rotation;                                ///< keys are mapped as they are before this
  std::vector<std::array<echo_map, 2>> followers;  ///< K and V of each layer but the first
};

/// EchoKV (arXiv 2603.22910): of a group of adjacent layers the first one is kept, by any compressor that drops no tokens; of the others
/// each token keeps some channels, and linear maps restore the rest from these and the first layer. Keys are stored and mapped as they are
/// before the rotary embedding. Per value of a group of S layers it keeps (D + (S - 1) D_kept) / (S D) of the channels.
///
/// The first `whole_tokens` tokens, and those that are appended while `keeps_whole()`, are stored exactly (`switchable`).
template <cache_scalar Scalar, layer_compressor First = uncompressed<Scalar>>
class echo_kv {
  static_assert(!observes_attention<First> && !summarises_attention<First>, "kvexact: the first layer of EchoKV must keep all tokens");

 public:
  using scalar = Scalar;

  struct options {
    std::shared_ptr<const echo_group> maps;
    typename First::options first = {};
    std::uint64_t whole_tokens = 4;
  };

  static constexpr float largest_value = 1e30F;

  /// Errors: not_calibrated (no maps), shape_mismatch (maps that do not fit the layers), invalid_argument (a weight that is not finite, a
  /// layer without values), those of the first layer's `make`, out_of_memory.
  [[nodiscard]] static result<echo_kv> make(std::span<const layer_shape> layers, const options& chosen) noexcept {
    if (chosen.maps == nullptr) return error{error_code::not_calibrated, "EchoKV needs the maps of its layers"};
    const std::size_t count = chosen.maps->followers.size() + 1;
    if (layers.size() < count) return error{error_code::shape_mismatch, "the maps of EchoKV are for more layers"};
    for (std::size_t l = 1; l < count; ++l) {
      const auto fits = check(*chosen.maps, layers[0], layers[l], l - 1);
      if (!fits) return fits.error().at_layer(static_cast<std::int64_t>(l));
    }
    auto first = First::make(layers[0], chosen.first);
    if (!first) return first.error();
    try {
      return echo_kv(layers.first(count), chosen, *std::move(first));
    } catch (...) {
      return error{error_code::out_of_memory, "a group of layers"};
    }
  }

  [[nodiscard]] std::uint32_t layers() const noexcept { return static_cast<std::uint32_t>(shapes_.size()); }
  [[nodiscard]] const layer_shape& shape(std::uint32_t layer) const noexcept { return shapes_[layer]; }
  [[nodiscard]] std::uint64_t length(std::uint32_t layer) const noexcept { return layer == 0 ? first_.length() : followers_[layer - 1].length; }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return first_.max_rollback(); }
  [[nodiscard]] std::size_t entries(std::uint32_t layer, std::uint32_t head) const noexcept {
    return layer == 0 ? first_.entries(head) : static_cast<std::size_t>(followers_[layer - 1].length);
  }
  [[nodiscard]] bool keeps_whole() const noexcept { return whole_; }
  void keep_whole(bool whole) noexcept { whole_ = whole; }

  [[nodiscard]] std::size_t bytes() const noexcept {
    std::size_t sum = sizeof(*this) + first_.bytes() - sizeof(first_) + detail::bytes_of(shapes_) + detail::bytes_of(followers_);
    for (const follower& each : followers_) sum += detail::bytes_of(each.runs) + detail::bytes_of(each.whole) + detail::bytes_of(each.kept);
    return sum;
  }

  result<void> append(std::uint32_t layer, const layer_tensors<const Scalar>& rows, std::uint64_t tokens) noexcept {
    if (layer == 0) return first_.append(rows, tokens);
    follower& to = followers_[layer - 1];
    const layer_shape& shape = shapes_[layer];
    const auto usable = detail::expect_rows(shape, rows, to.length, tokens);
    if (!usable) return usable;
    if (tokens > first_.length() || to.length > first_.length() - tokens)
      return error{error_code::out_of_range, "the first layer of a group comes before the others"};
    if (tokens == 0) return {};
    const auto& [keys, values] = maps_->followers[layer - 1];
    try {
      // Memory first, so that nothing has changed where there is none.
      detail::unrotated_keys turn(maps_->rotation);
      std::vector<float> row(shape.key_dim);
      const std::uint64_t whole = whole_ ? tokens : std::min(tokens, sinks_ - std::min(sinks_, to.length));
      detail::reserve_sparingly(to.whole, to.whole.size() + static_cast<std::size_t>(whole) * shape.channels());
      detail::reserve_sparingly(to.kept, to.kept.size() + static_cast<std::size_t>(tokens - whole) * (keys.kept.size() + values.kept.size()));
      to.runs.reserve(to.runs.size() + 2);
      for (std::uint64_t t = 0; t < tokens; ++t) {
        if (t < whole) {
          store_whole(to, shape, rows, t);
        } else {
          turn.at(to.length);
          store_kept(to.kept, keys.kept, shape.key_dim, rows.key, t, [&](std::span<float> key) { turn.backward(key); }, row);
          store_kept(to.kept, values.kept, shape.value_dim, rows.value, t, [](std::span<float>) {}, row);
        }
        if (to.runs.empty() || to.runs.back().whole != (t < whole)) to.runs.push_back({to.length, t < whole});
        ++to.length;
      }
    } catch (...) {
      return error{error_code::out_of_memory, "the draft cache of a layer"};
    }
    return {};
  }

  result<void> truncate(std::uint32_t layer, std::uint64_t length) noexcept {
    if (layer == 0) return first_.truncate(length);
    follower& of = followers_[layer - 1];
    if (length > of.length) return error{error_code::out_of_range, "a cache cannot be truncated to more than it holds"};
    of.length = length;
    while (!of.runs.empty() && of.runs.back().begin >= length) of.runs.pop_back();
    const auto& [keys, values] = maps_->followers[layer - 1];
    const std::uint64_t whole = whole_tokens(of);
    of.whole.resize(static_cast<std::size_t>(whole) * shapes_[layer].channels());
    of.kept.resize(static_cast<std::size_t>(length - whole) * (keys.kept.size() + values.kept.size()));
    return {};
  }

  result<void> materialise(std::uint32_t layer, std::uint32_t head, const materialised_head& out) const noexcept {
    if (layer == 0) return first_.materialise(head, out);
    const layer_shape& shape = shapes_[layer];
    const std::size_t count = entries(layer, head);
    const auto usable = detail::expect_room(shape, head, count, out);
    if (!usable) return usable;
    try {
      planes keys, values;
      const auto gathered = gather(layer, keys, values);
      if (!gathered) return gathered;
      for (std::size_t i = 0; i < count; ++i) out.positions[i] = i;
      restore_keys(layer, head, keys, out.keys);
      const echo_map& map = maps_->followers[layer - 1][1];
      std::vector<float> channel(count);
      for (std::uint32_t c = 0; c < shape.value_dim; ++c) {
        restore(map, head * shape.value_dim + c, values, channel);
        for (std::size_t t = 0; t < count; ++t) out.values[t * shape.value_dim + c] = channel[t];
      }
      for_each_whole(layer, [&](std::size_t t, const Scalar* row) {
        const Scalar* const value = row + shape.channels(cache_part::key) + head * shape.value_dim;
        for (std::size_t c = 0; c < shape.value_dim; ++c) out.values[t * shape.value_dim + c] = value[c].to_float();
      });
    } catch (...) {
      return error{error_code::out_of_memory, "scratch memory"};
    }
    return {};
  }

  /// Values are summed before they are mapped.
  result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) const noexcept {
    if (layer == 0) return kvexact::attend(first_, head, call);
    const layer_shape& shape = shapes_[layer];
    const std::size_t count = entries(layer, head);
    const auto usable = detail::expect_call(shape, head, count, call);
    if (!usable) return usable;
    try {
      planes key_planes, value_planes;
      const auto gathered = gather(layer, key_planes, value_planes);
      if (!gathered) return gathered;
      std::vector<float> keys(count * shape.key_dim), weights(count), sums(value_planes.channels);
      restore_keys(layer, head, key_planes, keys);
      for (std::size_t q = 0; q < call.log_mass.size(); ++q) {
        const auto query = call.queries.subspan(q * shape.key_dim, shape.key_dim);
        const auto out = call.out.subspan(q * shape.value_dim, shape.value_dim);
        for (std::size_t t = 0; t < count; ++t) {
          float score = 0;
          for (std::size_t c = 0; c < shape.key_dim; ++c) score += query[c] * keys[t * shape.key_dim + c];
          weights[t] = score;
        }
        call.log_mass[q] = detail::softmax(weights);
        std::fill(out.begin(), out.end(), 0.0F);
        for_each_whole(layer, [&](std::size_t t, const Scalar* row) {
          const Scalar* const value = row + shape.channels(cache_part::key) + head * shape.value_dim;
          for (std::size_t c = 0; c < shape.value_dim; ++c) out[c] += weights[t] * value[c].to_float();
          weights[t] = 0;
        });
        add_mapped(layer, head, weights, value_planes, sums, out);
      }
    } catch (...) {
      return error{error_code::out_of_memory, "scratch memory"};
    }
    return {};
  }

 private:
  /// Tokens from `begin` on are stored the same way.
  struct run {
    std::uint64_t begin;
    bool whole;
  };
  struct follower {
    std::uint64_t length = 0;
    std::vector<run> runs;
    std::vector<Scalar> whole;  // [whole tokens][heads, key_dim; heads, value_dim], as appended
    std::vector<Scalar> kept;   // [other tokens][kept K; kept V], keys before the rotary embedding
  };
  /// What a map reads, [channels][tokens]: the first layer's, then the kept ones; 0 for tokens that are whole.
  struct planes {
    std::size_t channels = 0, tokens = 0;
    std::vector<float> values;

    void resize(std::size_t all_channels, std::size_t all_tokens) {
      channels = all_channels;
      tokens = all_tokens;
      values.assign(channels * tokens, 0.0F);
    }
    [[nodiscard]] std::span<float> operator[](std::size_t channel) noexcept { return std::span(values).subspan(channel * tokens, tokens); }
    [[nodiscard]] std::span<const float> operator[](std::size_t channel) const noexcept { return std::span(values).subspan(channel * tokens, tokens); }
  };

  echo_kv(std::span<const layer_shape> layers, const options& chosen, First first)
      : shapes_(layers.begin(), layers.end()), maps_(chosen.maps), first_(std::move(first)), followers_(layers.size() - 1), sinks_(chosen.whole_tokens) {}

  [[nodiscard]] static result<void> check(const echo_group& maps, const layer_shape& first, const layer_shape& own, std::size_t follower) noexcept {
    if (const auto fits = cache_shape::uniform(1, own); !fits) return fits.error();
    if (own.value_dim == 0) return error{error_code::invalid_argument, "EchoKV needs keys and values"};
    if (maps.rotation.dim() > std::min(first.key_dim, own.key_dim)) return error{error_code::shape_mismatch, "the rotary embedding is wider than the keys"};
    for (const cache_part part : cache_parts) {
      const echo_map& map = maps.followers[follower][static_cast<std::size_t>(part)];
      const std::size_t channels = own.channels(part), kept = map.kept.size();
      if (kept > channels || map.bias.size() != channels - kept || map.weights.size() != (channels - kept) * (first.channels(part) + kept))
        return error{error_code::shape_mismatch, "a map of EchoKV has another size"};
      if (std::adjacent_find(map.kept.begin(), map.kept.end(), std::greater_equal<>()) != map.kept.end() || (kept > 0 && map.kept.back() >= channels))
        return error{error_code::shape_mismatch, "the kept channels of EchoKV are not increasing channels of the layer"};
      const auto is_finite = [](float each) { return std::isfinite(each); };
      if (!std::all_of(map.weights.begin(), map.weights.end(), is_finite) || !std::all_of(map.bias.begin(), map.bias.end(), is_finite))
        return error{error_code::invalid_argument, "a weight of EchoKV is not finite"};
    }
    return {};
  }

  [[nodiscard]] static float clipped(float value) noexcept { return std::clamp(value, -largest_value, largest_value); }

  [[nodiscard]] static std::uint64_t end_of_run(const follower& of, std::size_t run) noexcept {
    return run + 1 < of.runs.size() ? of.runs[run + 1].begin : of.length;
  }
  [[nodiscard]] static std::uint64_t whole_tokens(const follower& of) noexcept {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < of.runs.size(); ++i) {
      const std::uint64_t end = end_of_run(of, i);
      sum += of.runs[i].whole ? end - of.runs[i].begin : 0;
    }
    return sum;
  }

  static void store_whole(follower& to, const layer_shape& shape, const layer_tensors<const Scalar>& rows, std::uint64_t token) {
    for (const cache_part part : cache_parts) {
      for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
        const Scalar* const row = detail::row_of(rows.part(part), token, h);
        to.whole.insert(to.whole.end(), row, row + shape.dim(part));
      }
    }
  }
  template <class Turn>
  static void store_kept(std::vector<Scalar>& to, std::span<const std::uint32_t> kept, std::uint32_t dim, const strided_tensor<const Scalar>& from,
                         std::uint64_t token, Turn&& turn, std::vector<float>& row) {
    row.resize(std::max<std::size_t>(row.size(), dim));
    std::uint64_t saturated = 0;
    for (std::size_t i = 0; i < kept.size();) {
      const std::uint32_t head = kept[i] / dim;
      const Scalar* const source = detail::row_of(from, token, head);
      for (std::uint32_t c = 0; c < dim; ++c) row[c] = clipped(source[c].to_float());
      turn(std::span(row).first(dim));
      // Taking off the rotation can make a component larger than any that the format has.
      for (; i < kept.size() && kept[i] / dim == head; ++i) to.push_back(Scalar::from_float_saturating(row[kept[i] % dim], saturated));
    }
  }

  /// Calls use(token, row) for every token that is stored whole.
  template <class Use>
  void for_each_whole(std::uint32_t layer, Use&& use) const {
    const follower& of = followers_[layer - 1];
    const Scalar* row = of.whole.data();
    for (std::size_t i = 0; i < of.runs.size(); ++i) {
      const std::uint64_t end = end_of_run(of, i);
      if (!of.runs[i].whole) continue;
      for (std::uint64_t t = of.runs[i].begin; t < end; ++t, row += shapes_[layer].channels()) use(static_cast<std::size_t>(t), row);
    }
  }

  result<void> gather(std::uint32_t layer, planes& keys, planes& values) const {
    const follower& of = followers_[layer - 1];
    const layer_shape& first = shapes_[0];
    const auto count = static_cast<std::size_t>(of.length);
    if (first_.length() < of.length) return error{error_code::out_of_range, "the first layer of the group is shorter"};
    const auto& [key_map, value_map] = maps_->followers[layer - 1];
    keys.resize(first.channels(cache_part::key) + key_map.kept.size(), count);
    values.resize(first.channels(cache_part::value) + value_map.kept.size(), count);

    const std::size_t held = first_.entries(0);
    if (held != first_.length()) return error{error_code::invalid_argument, "the first layer of EchoKV must keep all tokens"};
    std::vector<std::uint64_t> positions(held);
    std::vector<float> key_rows(held * first.key_dim), value_rows(held * first.value_dim);
    detail::unrotated_keys turn(maps_->rotation);
    for (std::uint32_t h = 0; h < first.kv_heads; ++h) {
      const auto done = first_.materialise(h, {positions, key_rows, value_rows});
      if (!done) return done;
      for (std::size_t t = 0; t < count; ++t) {
        const auto key = std::span(key_rows).subspan(t * first.key_dim, first.key_dim);
        for (float& each : key) each = clipped(each);
        turn.at(t);
        turn.backward(key);
        for (std::size_t c = 0; c < first.key_dim; ++c) keys[h * first.key_dim + c][t] = key[c];
        for (std::size_t c = 0; c < first.value_dim; ++c) values[h * first.value_dim + c][t] = clipped(value_rows[t * first.value_dim + c]);
      }
    }
    const Scalar* row = of.kept.data();
    for (std::size_t i = 0; i < of.runs.size(); ++i) {
      const std::uint64_t end = end_of_run(of, i);
      for (std::uint64_t t = of.runs[i].begin; t < end; ++t) {
        const auto at = static_cast<std::size_t>(t);
        if (of.runs[i].whole) {
          for (std::size_t c = 0; c < keys.channels; ++c) keys[c][at] = 0;
          for (std::size_t c = 0; c < values.channels; ++c) values[c][at] = 0;
          continue;
        }
        for (std::size_t c = 0; c < key_map.kept.size(); ++c) keys[first.channels(cache_part::key) + c][at] = (row++)->to_float();
        for (std::size_t c = 0; c < value_map.kept.size(); ++c) values[first.channels(cache_part::value) + c][at] = (row++)->to_float();
      }
    }
    return {};
  }

  struct map_kernel {
    /// out = bias + the sum of the planes, each times its weight. A block of tokens after another, which stays in the first level cache.
    KVEXACT_ALWAYS_INLINE static void run(float bias, std::span<const float> weights, const float* planes, std::span<float> out) noexcept {
      constexpr std::size_t block = 1024;
      for (std::size_t first = 0; first < out.size(); first += block) {
        const std::size_t count = std::min(block, out.size() - first);
        float* const to = out.data() + first;
        std::fill_n(to, count, bias);
        for (std::size_t c = 0; c < weights.size(); ++c) {
          const float* const from = planes + c * out.size() + first;
          for (std::size_t t = 0; t < count; ++t) to[t] += weights[c] * from[t];
        }
      }
    }
  };
  /// One channel of a layer at all tokens.
  static void restore(const echo_map& map, std::uint32_t channel, const planes& from, std::span<float> out) noexcept {
    const auto place = std::lower_bound(map.kept.begin(), map.kept.end(), channel);
    const auto before = static_cast<std::size_t>(place - map.kept.begin());
    if (place != map.kept.end() && *place == channel) {
      std::ranges::copy(from[from.channels - map.kept.size() + before], out.begin());
      return;
    }
    const std::size_t other = channel - before;
    run_on<map_kernel>(best_instruction_set(), map.bias[other], std::span(map.weights).subspan(other * from.channels, from.channels), from.values.data(), out);
  }

  void restore_keys(std::uint32_t layer, std::uint32_t head, const planes& from, std::span<float> keys) const {
    const layer_shape& shape = shapes_[layer];
    std::vector<float> channel(from.tokens);
    for (std::uint32_t c = 0; c < shape.key_dim; ++c) {
      restore(maps_->followers[layer - 1][0], head * shape.key_dim + c, from, channel);
      for (std::size_t t = 0; t < from.tokens; ++t) keys[t * shape.key_dim + c] = channel[t];
    }
    detail::unrotated_keys turn(maps_->rotation);
    for (std::size_t t = 0; t < from.tokens; ++t) {
      turn.at(t);
      turn.forward(keys.subspan(t * shape.key_dim, shape.key_dim));
    }
    for_each_whole(layer, [&](std::size_t t, const Scalar* row) {
      for (std::size_t c = 0; c < shape.key_dim; ++c) keys[t * shape.key_dim + c] = row[head * shape.key_dim + c].to_float();
    });
  }

  /// Adds the weighted sum of a head's mapped values: the map of the weighted sums.
  void add_mapped(std::uint32_t layer, std::uint32_t head, std::span<const float> weights, const planes& from, std::span<float> sums,
                  std::span<float> out) const noexcept {
    const echo_map& map = maps_->followers[layer - 1][1];
    float mass = 0;
    for (const float each : weights) mass += each;
    for (std::size_t c = 0; c < from.channels; ++c) {
      float sum = 0;
      for (std::size_t t = 0; t < from.tokens; ++t) sum += weights[t] * from[c][t];
      sums[c] = sum;
    }
    for (std::uint32_t c = 0; c < out.size(); ++c) {
      const auto channel = static_cast<std::uint32_t>(head * out.size() + c);
      const auto place = std::lower_bound(map.kept.begin(), map.kept.end(), channel);
      const auto before = static_cast<std::size_t>(place - map.kept.begin());
      if (place != map.kept.end() && *place == channel) {
        out[c] += sums[from.channels - map.kept.size() + before];
        continue;
      }
      const std::size_t other = channel - before;
      float sum = map.bias[other] * mass;
      for (std::size_t f = 0; f < from.channels; ++f) sum += map.weights[other * from.channels + f] * sums[f];
      out[c] += sum;
    }
  }

  std::vector<layer_shape> shapes_;
  std::shared_ptr<const echo_group> maps_;
  First first_;
  std::vector<follower> followers_;
  std::uint64_t sinks_;
  bool whole_ = false;
};

}  // namespace kvexact

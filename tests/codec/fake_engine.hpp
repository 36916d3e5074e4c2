// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/engine/layerwise_predictor.hpp>
#include <kvexact/numeric/integer_rotation.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/rotary.hpp>

#include "example_cache.hpp"

namespace kvexact::test {

/// Something like a transformer, in integers, so that it gives the same bits everywhere: K and V are linear in the hidden state, and what a
/// layer does to the hidden state depends on the K and V of this token and, with fading weight, of all before. Real K and V are its
/// integers in units of 2^-19, hidden states lie within +-4095.
class fake_model {
 public:
  static constexpr std::size_t width = 24;
  using hidden = std::array<std::int64_t, width>;

  /// `seed` names the weights; they are within +-127, and those of a copy are off by up to `error`.
  fake_model(const cache_shape& shape, const rotary& rotation, std::uint64_t seed, std::int64_t error = 0)
      : shape_(shape), rotation_(rotation) {
    random_integers random(seed);
    random_integers errors(seed + 77);
    const auto weights = [&](std::size_t count) {
      std::vector<std::int64_t> made(count);
      for (std::int64_t& weight : made) {
        weight = static_cast<std::int64_t>(random.below(255)) - 127;
        weight += static_cast<std::int64_t>(errors.below(2 * static_cast<std::uint64_t>(error) + 1)) - error;
      }
      return made;
    };
    for (const layer_shape& layer : shape.all()) {
      for (const cache_part part : cache_parts) {
        project_.push_back(weights(layer.channels(part) * width));
        attend_.push_back(weights(layer.channels(part) * width));
      }
    }
  }

  [[nodiscard]] const cache_shape& shape() const { return shape_; }

  [[nodiscard]] static hidden embed(std::uint32_t id) {
    random_integers random(id);
    hidden state;
    for (std::int64_t& each : state) each = static_cast<std::int64_t>(random.below(8191)) - 4095;
    return state;
  }

  /// K or V of a token, keys turned by its position.
  void project(std::uint32_t layer, cache_part part, std::uint64_t token, const hidden& state, std::span<float> out) const {
    const std::vector<std::int64_t>& weights = project_[2 * layer + static_cast<std::size_t>(part)];
    std::vector<std::int64_t> sums(out.size());
    for (std::size_t c = 0; c < sums.size(); ++c) {
      for (std::size_t w = 0; w < width; ++w) sums[c] += weights[c * width + w] * state[w];
    }
    if (part == cache_part::key) {
      const std::uint32_t dim = shape_.layer(layer).key_dim;
      for (std::size_t head = 0; head < shape_.layer(layer).kv_heads; ++head) {
        for (std::uint32_t i = 0; i < rotation_.dim() / 2; ++i) {
          const integer_rotation by = rotation_by_turns(token * rotation_.turns()[i]);
          std::int64_t& a = sums[head * dim + rotation_.pair(i).first];
          std::int64_t& b = sums[head * dim + rotation_.pair(i).second];
          std::tie(a, b) = std::pair{(a * by.cosine - b * by.sine) >> 30, (a * by.sine + b * by.cosine) >> 30};
        }
      }
    }
    for (std::size_t c = 0; c < sums.size(); ++c) out[c] = std::ldexp(static_cast<float>(sums[c]), -19);
  }

  /// The rest of a layer; `memory` is its state over the tokens.
  void attend(std::uint32_t layer, std::span<const float> keys, std::span<const float> values, hidden& memory, hidden& state) const {
    hidden seen{};
    for (const cache_part part : cache_parts) {
      const std::span<const float> from = part == cache_part::key ? keys : values;
      const std::vector<std::int64_t>& weights = attend_[2 * layer + static_cast<std::size_t>(part)];
      for (std::size_t c = 0; c < from.size(); ++c) {
        const std::int64_t value = std::llrint(std::ldexp(static_cast<double>(std::clamp(from[c], -256.0F, 256.0F)), 9));
        for (std::size_t w = 0; w < width; ++w) seen[w] += weights[c * width + w] * value;
      }
    }
    for (std::size_t w = 0; w < width; ++w) {
      memory[w] += ((seen[w] >> 7) - memory[w]) >> 2;
      state[w] = std::clamp<std::int64_t>(state[w] - (state[w] >> 2) + (memory[w] >> 1), -4095, 4095);
    }
  }

 private:
  cache_shape shape_;
  rotary rotation_;
  std::vector<std::vector<std::int64_t>> project_;  // [layer, part][channel][width]
  std::vector<std::vector<std::int64_t>> attend_;
};

/// Token ids and the cache that a model makes of them, in numbers of `format` times `storage_scale`.
struct model_example {
  std::vector<std::uint32_t> ids;
  bits_cache cache;

  model_example(const fake_model& model, std::uint64_t tokens, number_format format, std::uint64_t seed, float storage_scale = 1)
      : cache(model.shape(), tokens) {
    random_integers random(seed);
    for (std::uint64_t t = 0; t < tokens; ++t) ids.push_back(static_cast<std::uint32_t>(random.below(1000)));
    std::vector<fake_model::hidden> memory(model.shape().layers(), fake_model::hidden{});
    for (std::size_t t = 0; t < ids.size(); ++t) {
      fake_model::hidden state = fake_model::embed(ids[t]);
      for (std::uint32_t l = 0; l < model.shape().layers(); ++l) {
        std::array<std::vector<float>, 2> rows;
        for (const cache_part part : cache_parts) {
          std::vector<float>& row = rows[static_cast<std::size_t>(part)];
          row.resize(model.shape().layer(l).channels(part));
          model.project(l, part, t, state, row);
          for (std::size_t c = 0; c < row.size(); ++c) cache.part(l, part)[t * row.size() + c] = bits_of(format, row[c] / storage_scale);
        }
        model.attend(l, rows[0], rows[1], memory[l], state);
      }
    }
  }
};

/// Predicts by a model, usually a bad copy of the one that made the cache, and keeps a list of what it was asked. If it is shown that one
/// it can also teach.
class fake_engine {
 public:
  struct call {
    char what;  ///< b, p or a
    index_range tokens;
    std::uint32_t layer;
    std::uint64_t checksum;  ///< of what was handed over

    friend bool operator==(const call&, const call&) = default;
  };

  fake_engine(const fake_model& model, std::vector<std::uint32_t> ids, bool takes_correction = true, const fake_model* target = nullptr)
      : model_(&model),
        target_(target),
        ids_(std::move(ids)),
        takes_correction_(takes_correction),
        own_(model.shape().layers()),
        true_(own_) {}

  std::vector<call> calls;
  std::size_t failing_call = ~std::size_t{0};  ///< the one that gives an error, once
  std::size_t misuses = 0;                     ///< calls against the contract
  std::int64_t disturbance = 0;                ///< each layer's hidden states are off by up to this
  double missed_before = 0;                    ///< squares of what hidden states missed before and after the corrections
  double missed_after = 0;

  [[nodiscard]] std::uint64_t tokens() const noexcept { return position_; }
  [[nodiscard]] std::size_t hidden_width() const noexcept { return takes_correction_ ? fake_model::width : 0; }

  [[nodiscard]] result<void> begin(index_range tokens) noexcept {
    if (!admit('b', 0, {}, {}, {}, tokens)) return failure;
    misuses += tokens.begin != position_ || tokens.end < tokens.begin || tokens.end > ids_.size() ? 1U : 0U;
    range_ = tokens;
    layer_ = 0;
    predicted_ = false;
    for (track* each : {&own_, &true_}) {
      each->working = each->kept;
      each->states.clear();
      for (std::uint64_t t = tokens.begin; t < tokens.end; ++t)
        each->states.push_back(fake_model::embed(ids_[static_cast<std::size_t>(t)]));
    }
    disturb();
    return {};
  }

  [[nodiscard]] result<void> predict(std::uint32_t layer, std::span<float> keys, std::span<float> values) noexcept {
    if (!admit('p', layer, {}, {}, {}, range_)) return failure;
    check(layer, keys, values, predicted_);
    predicted_ = true;
    project(*model_, own_, keys, values);
    return {};
  }

  [[nodiscard]] result<void> hidden_error(std::uint32_t layer, std::span<float> out) noexcept {
    misuses += target_ == nullptr || layer != layer_ || out.size() != own_.states.size() * hidden_width() ? 1U : 0U;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::size_t t = i / fake_model::width;
      const std::size_t w = i % fake_model::width;
      out[i] = static_cast<float>(static_cast<double>(true_.states[t][w] - own_.states[t][w]) / size_of(own_.states[t]));
    }
    return {};
  }

  [[nodiscard]] result<void> advance(std::uint32_t layer, std::span<const float> keys, std::span<const float> values,
                                     std::span<const float> correction) noexcept {
    if (!admit('a', layer, keys, values, correction, range_)) return failure;
    check(layer, keys, values, !predicted_);
    misuses += correction.size() != 0 && correction.size() != own_.states.size() * hidden_width() ? 1U : 0U;
    missed_before += missed();
    for (std::size_t t = 0; t < own_.states.size() && !correction.empty(); ++t) {
      const double size = size_of(own_.states[t]);
      for (std::size_t w = 0; w < fake_model::width; ++w)
        own_.states[t][w] += std::llrint(std::clamp(size * static_cast<double>(correction[t * fake_model::width + w]), -10000.0, 10000.0));
    }
    missed_after += missed();
    attend(*model_, own_, keys, values);
    if (target_ != nullptr) {
      std::vector<float> true_keys(keys.size());
      std::vector<float> true_values(values.size());
      project(*target_, true_, true_keys, true_values);
      attend(*target_, true_, true_keys, true_values);
    }
    predicted_ = false;
    if (++layer_ == model_->shape().layers()) {
      position_ = range_.end;
      own_.kept = own_.working;
      true_.kept = true_.working;
    }
    disturb();
    return {};
  }

  static constexpr error failure{error_code::unsupported, "the engine has had enough"};

 private:
  struct track {
    explicit track(std::size_t layers) : kept(layers, fake_model::hidden{}), working(kept) {}

    std::vector<fake_model::hidden> kept;     // memory of each layer up to `position_`
    std::vector<fake_model::hidden> working;  // within the range
    std::vector<fake_model::hidden> states;   // of the range's tokens
  };

  [[nodiscard]] bool admit(char what, std::uint32_t layer, std::span<const float> keys, std::span<const float> values,
                           std::span<const float> correction, index_range tokens) {
    chained_checksum sum;
    for (const std::span<const float> each : {keys, values, correction}) {
      sum.update(std::as_bytes(each));
      for (const float value : each) misuses += std::isfinite(value) ? 0U : 1U;
    }
    calls.push_back({what, tokens, layer, sum.digest()});
    return calls.size() - 1 != failing_call;
  }
  void check(std::uint32_t layer, std::span<const float> keys, std::span<const float> values, bool out_of_turn) {
    const layer_shape& shape = model_->shape().layer(std::min(layer, model_->shape().layers() - 1));
    const std::size_t count = own_.states.size();
    misuses += layer != layer_ || out_of_turn || keys.size() != count * shape.channels(cache_part::key) ||
                       values.size() != count * shape.channels(cache_part::value)
                   ? 1U
                   : 0U;
  }
  [[nodiscard]] static double size_of(const fake_model::hidden& state) {
    std::int64_t sum = 0;
    for (const std::int64_t each : state) sum += each * each;
    return std::max(std::sqrt(static_cast<double>(sum) / static_cast<double>(state.size())), 1.0);
  }
  [[nodiscard]] double missed() const {
    double sum = 0;
    for (std::size_t t = 0; t < own_.states.size(); ++t)
      for (std::size_t w = 0; w < fake_model::width; ++w) sum += std::pow(static_cast<double>(true_.states[t][w] - own_.states[t][w]), 2);
    return target_ != nullptr ? sum : 0;
  }
  void disturb() {
    for (std::size_t t = 0; disturbance > 0 && t < own_.states.size(); ++t) {
      random_integers random(1000 * (range_.begin + t) + layer_);
      for (std::int64_t& each : own_.states[t])
        each += static_cast<std::int64_t>(random.below(2 * static_cast<std::uint64_t>(disturbance) + 1)) - disturbance;
    }
  }
  void project(const fake_model& model, const track& by, std::span<float> keys, std::span<float> values) const {
    for (std::size_t t = 0; t < by.states.size(); ++t) {
      for (const cache_part part : cache_parts) {
        const std::size_t channels = model.shape().layer(layer_).channels(part);
        model.project(layer_, part, range_.begin + t, by.states[t],
                      (part == cache_part::key ? keys : values).subspan(t * channels, channels));
      }
    }
  }
  void attend(const fake_model& model, track& by, std::span<const float> keys, std::span<const float> values) const {
    const layer_shape& shape = model.shape().layer(layer_);
    for (std::size_t t = 0; t < by.states.size(); ++t) {
      const std::size_t k = shape.channels(cache_part::key);
      const std::size_t v = shape.channels(cache_part::value);
      model.attend(layer_, keys.subspan(t * k, k), values.subspan(t * v, v), by.working[layer_], by.states[t]);
    }
  }

  const fake_model* model_;
  const fake_model* target_;
  std::vector<std::uint32_t> ids_;
  bool takes_correction_;
  std::uint64_t position_ = 0;
  index_range range_;
  std::uint32_t layer_ = 0;
  bool predicted_ = false;
  track own_;
  track true_;
};

static_assert(layerwise_teacher<fake_engine>);

}  // namespace kvexact::test

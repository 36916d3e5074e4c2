// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <kvexact/compression/attention.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/group_compressor.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// What a layer of a `draft_cache` can be served by: a compressor of its own, or one of a group of layers.
template <class C>
concept draft_compressor = layer_compressor<C> || group_compressor<C>;

/// Compressors for the first or the last layers of a `draft_cache`.
template <std::uint32_t Count, draft_compressor Layer>
struct first_layers {
  using layer_type = Layer;
  [[nodiscard]] static constexpr bool applies(std::uint32_t layer, std::uint32_t) noexcept { return layer < Count; }
};
template <std::uint32_t Count, draft_compressor Layer>
struct last_layers {
  using layer_type = Layer;
  [[nodiscard]] static constexpr bool applies(std::uint32_t layer, std::uint32_t layers) noexcept { return layer + Count >= layers; }
};

namespace detail {

template <class Rule>
struct layers_of {
  using layer_type = Rule;
  [[nodiscard]] static constexpr bool applies(std::uint32_t, std::uint32_t) noexcept { return true; }
};
template <std::uint32_t Count, class Layer>
struct layers_of<first_layers<Count, Layer>> : first_layers<Count, Layer> {};
template <std::uint32_t Count, class Layer>
struct layers_of<last_layers<Count, Layer>> : last_layers<Count, Layer> {};

template <class Rule>
using layer_of = typename layers_of<Rule>::layer_type;

}  // namespace detail

/// The draft cache of one sequence: a compressor for each layer, by the first rule that applies; the last one is a compressor, for all others:
///
///   draft_cache<quantised<bf16, turbo_quant<4>, turbo_quant<3>>>                       // the same everywhere
///   draft_cache<first_layers<2, uncompressed<bf16>>, kivi<bf16, 4, 2>>                 // the first two layers exact
///   draft_cache<first_layers<2, uncompressed<bf16>>, echo_kv<bf16>>                    // the others in groups
///
/// Layers are filled one after another, as an engine computes them, so their lengths may differ while a step runs.
template <class... Rules>
class draft_cache {
  static_assert(sizeof...(Rules) > 0 && (draft_compressor<detail::layer_of<Rules>> && ...),
                "kvexact: draft_cache needs layer compressors or group compressors");
  using last_rule = std::tuple_element_t<sizeof...(Rules) - 1, std::tuple<Rules...>>;
  static_assert(draft_compressor<last_rule>, "kvexact: the last rule of draft_cache must serve all layers");
  using first_layer = detail::layer_of<std::tuple_element_t<0, std::tuple<Rules...>>>;

 public:
  using scalar = typename first_layer::scalar;
  static_assert((std::same_as<scalar, typename detail::layer_of<Rules>::scalar> && ...), "kvexact: all layers of draft_cache must have one scalar");
  /// One set of options for each rule.
  using options = std::tuple<typename detail::layer_of<Rules>::options...>;

  /// The same options for all layers of a rule. Errors: those of the layers' `make`, with the layer; out_of_memory.
  [[nodiscard]] static result<draft_cache> make(const cache_shape& shape, const options& chosen = {}) noexcept {
    return make(shape, [&](std::uint32_t) -> const options& { return chosen; });
  }
  /// Options by layer, where they are calibrated: choose(layer) gives an `options`, of which the layer's rule is read; it is called for the
  /// first layer of a group only.
  template <class Choose>
    requires std::is_invocable_r_v<options, Choose&, std::uint32_t>
  [[nodiscard]] static result<draft_cache> make(const cache_shape& shape, Choose&& choose) noexcept {
    draft_cache made;
    try {
      made.shape_ = shape;
      made.places_.reserve(shape.layers());
      made.compressors_.reserve(shape.layers());
      while (made.places_.size() < shape.layers()) {
        const auto layer = static_cast<std::uint32_t>(made.places_.size());
        const auto added = made.add(layer, choose(layer), std::index_sequence_for<Rules...>());
        if (!added) return added.error().at_layer(layer + std::max<std::int64_t>(added.error().layer, 0));
      }
    } catch (...) {
      return error{error_code::out_of_memory, "a draft cache"};
    }
    return made;
  }

  [[nodiscard]] const cache_shape& shape() const noexcept { return shape_; }
  /// 0 in a layer that it does not have.
  [[nodiscard]] std::uint64_t length(std::uint32_t layer) const noexcept {
    return layer >= places_.size() ? 0 : visit(layer, [](const auto& cache) { return cache.length(); });
  }
  /// What all layers can take back.
  [[nodiscard]] std::uint64_t max_rollback() const noexcept {
    std::uint64_t least = ~std::uint64_t{0};
    for (const any_compressor& each : compressors_)
      least = std::min(least, std::visit([](const auto& cache) { return cache.max_rollback(); }, each));
    return least;
  }
  [[nodiscard]] std::size_t entries(std::uint32_t layer, std::uint32_t head) const noexcept {
    return layer >= places_.size() ? 0 : visit(layer, [&](const auto& cache) { return cache.entries(head); });
  }
  [[nodiscard]] std::size_t bytes() const noexcept {
    std::size_t sum = sizeof(*this) + compressors_.capacity() * sizeof(any_compressor) + places_.capacity() * sizeof(place) +
                      shape_.layers() * sizeof(layer_shape);
    for (const any_compressor& each : compressors_) sum += std::visit([](const auto& cache) { return cache.bytes() - sizeof(cache); }, each);
    return sum;
  }

  /// K and V of the next tokens of a layer, see `layer_compressor`; errors name the layer.
  result<void> append(std::uint32_t layer, const layer_tensors<const scalar>& rows, std::uint64_t tokens) noexcept {
    const auto done = in_layer(*this, layer, [&](auto&& cache) { return cache.append(rows, tokens); });
    if (done) greatest_ = std::max(greatest_, length(layer));
    return done;
  }
  /// All layers that are longer. Errors: out_of_range (longer than every layer, or further back than `max_rollback()` from the greatest length
  /// so far); then nothing has changed.
  result<void> truncate(std::uint64_t length) noexcept {
    std::uint64_t longest = 0;
    for (std::uint32_t l = 0; l < shape_.layers(); ++l) longest = std::max(longest, this->length(l));
    if (length > longest) return error{error_code::out_of_range, "a cache cannot be truncated to more than it holds"};
    if (length < greatest_ && greatest_ - length > max_rollback())
      return error{error_code::out_of_range, "a draft cache cannot be taken back so far"};
    for (std::uint32_t l = 0; l < shape_.layers(); ++l) {
      if (this->length(l) <= length) continue;
      const auto done = in_layer(*this, l, [&](auto&& cache) { return cache.truncate(length); });
      if (!done) return done;
    }
    return {};
  }
  result<void> materialise(std::uint32_t layer, std::uint32_t head, const materialised_head& out) const noexcept {
    return in_layer(*this, layer, [&](const auto& cache) { return cache.materialise(head, out); });
  }
  /// On codes in layers that can, else on what the layer gives back.
  result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) const noexcept {
    return in_layer(*this, layer, [&](const auto& cache) { return kvexact::attend(cache, head, call); });
  }
  /// The same, with the weights that `observe` takes, [query heads, entries].
  result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call, std::span<float> weights) const noexcept {
    return in_layer(*this, layer, [&](const auto& cache) { return attend_materialised(cache, head, call, weights); });
  }
  [[nodiscard]] bool observes(std::uint32_t layer, std::uint64_t position) const noexcept {
    return layer < places_.size() && visit(layer, [&]<class Layer>(const Layer& cache) {
      if constexpr (observes_attention<Layer>) {
        return cache.observes(position);
      } else {
        return false;
      }
    });
  }
  /// For layers that observe; others need nothing.
  result<void> observe(std::uint32_t layer, const attention_rows& rows) noexcept {
    return in_layer(*this, layer, [&]<class Layer>(Layer&& cache) -> result<void> {
      if constexpr (observes_attention<std::remove_cvref_t<Layer>>) {
        return cache.observe(rows);
      } else {
        return {};
      }
    });
  }
  /// For layers that are `switchable`; others stay as they are.
  void keep_whole(bool whole) noexcept {
    for (any_compressor& each : compressors_) {
      std::visit(
          [&](auto& cache) {
            if constexpr (requires { cache.keep_whole(whole); }) cache.keep_whole(whole);
          },
          each);
    }
  }

  /// The layer's own compressor, or its part of a group's: calls use(const layer_compressor&). The layer must be there.
  template <class Use>
  decltype(auto) visit(std::uint32_t layer, Use&& use) const noexcept {
    return visit(*this, layer, std::forward<Use>(use));
  }

 private:
  /// Types that several rules share are one alternative.
  template <class Done, class... Left>
  struct distinct {
    using type = Done;
  };
  template <class... Done, class Next, class... Left>
  struct distinct<std::variant<Done...>, Next, Left...>
      : distinct<std::conditional_t<(std::same_as<Next, Done> || ...), std::variant<Done...>, std::variant<Done..., Next>>, Left...> {};
  using any_compressor = typename distinct<std::variant<>, detail::layer_of<Rules>...>::type;

  /// Of a layer: its compressor, and its number there.
  struct place {
    std::uint32_t compressor;
    std::uint32_t layer;
  };

  draft_cache() noexcept = default;

  /// The first rule that applies.
  [[nodiscard]] std::size_t rule_of(std::uint32_t layer) const noexcept {
    std::size_t found = 0;
    (void)((detail::layers_of<Rules>::applies(layer, shape_.layers()) || (++found, false)) || ...);
    return found;
  }
  template <std::size_t... I>
  result<void> add(std::uint32_t layer, const options& chosen, std::index_sequence<I...>) {
    const std::size_t rule = rule_of(layer);
    std::uint32_t end = layer + 1;
    while (end < shape_.layers() && rule_of(end) == rule) ++end;
    result<void> outcome;
    (void)((rule == I && (outcome = add<detail::layer_of<Rules>>({layer, end}, std::get<I>(chosen)), true)) || ...);
    return outcome;
  }
  /// The first of the `layers`, or as many as a group takes.
  template <class Own>
  result<void> add(index_range layers, const typename Own::options& chosen) {
    const auto shapes = shape_.all().subspan(static_cast<std::size_t>(layers.begin), static_cast<std::size_t>(layers.size()));
    std::uint32_t count = 1;
    auto made = [&] {
      if constexpr (group_compressor<Own>) {
        return Own::make(shapes, chosen);
      } else {
        return Own::make(shapes.front(), chosen);
      }
    }();
    if (!made) return made.error();
    if constexpr (group_compressor<Own>) count = made->layers();
    for (std::uint32_t l = 0; l < count; ++l) places_.push_back({static_cast<std::uint32_t>(compressors_.size()), l});
    compressors_.push_back(any_compressor(*std::move(made)));
    return {};
  }

  /// `self`: const or not, and so is what `use` is given.
  template <class Self, class Use>
  static decltype(auto) visit(Self& self, std::uint32_t layer, Use&& use) noexcept {
    const place where = self.places_[layer];
    return std::visit(
        [&]<class Own>(Own& cache) -> decltype(auto) {
          if constexpr (group_compressor<std::remove_const_t<Own>>) {
            return use(group_layer<Own>(cache, where.layer));
          } else {
            return use(cache);
          }
        },
        self.compressors_[where.compressor]);
  }
  template <class Self, class Use>
  static result<void> in_layer(Self& self, std::uint32_t layer, Use&& use) noexcept {
    if (layer >= self.places_.size()) return error{error_code::out_of_range, "the draft cache has no such layer", layer};
    const result<void> outcome = visit(self, layer, use);
    return outcome ? outcome : result<void>(outcome.error().at_layer(layer));
  }

  cache_shape shape_;
  std::vector<any_compressor> compressors_;
  std::vector<place> places_;   // of each layer
  std::uint64_t greatest_ = 0;  // length of any layer so far
};

/// Whether any layer of a draft cache observes the attention of this position.
template <class Cache>
[[nodiscard]] bool observes_anywhere(const Cache& cache, std::uint64_t position) noexcept {
  for (std::uint32_t l = 0; l < cache.shape().layers(); ++l)
    if (cache.observes(l, position)) return true;
  return false;
}

/// Attention of the newest token, at `position`, in a layer of a draft cache, which is handed its weights if it observes them. `weights` is
/// working memory. Errors: those of `attend` and `observe`, out_of_memory.
template <class Cache>
[[nodiscard]] result<void> attend_observed(Cache& cache, std::uint32_t layer, std::uint32_t head, std::uint64_t position, const attention_call& call,
                                           std::vector<float>& weights) noexcept {
  if (!cache.observes(layer, position)) return cache.attend(layer, head, call);
  try {
    weights.resize(call.log_mass.size() * cache.entries(layer, head));
  } catch (...) {
    return error{error_code::out_of_memory, "attention of a token"};
  }
  const result<void> done = cache.attend(layer, head, call, weights);
  return done ? cache.observe(layer, {head, position, weights, call.queries}) : done;
}

}  // namespace kvexact

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
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// Compressors for the first or the last layers of a `draft_cache`.
template <std::uint32_t Count, layer_compressor Layer>
struct first_layers {
  using layer_type = Layer;
  [[nodiscard]] static constexpr bool applies(std::uint32_t layer, std::uint32_t) noexcept { return layer < Count; }
};
template <std::uint32_t Count, layer_compressor Layer>
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
///
/// Layers are filled one after another, as an engine computes them, so their lengths may differ while a step runs.
template <class... Rules>
class draft_cache {
  static_assert(sizeof...(Rules) > 0 && (layer_compressor<detail::layer_of<Rules>> && ...), "kvexact: draft_cache needs layer compressors");
  using last_rule = std::tuple_element_t<sizeof...(Rules) - 1, std::tuple<Rules...>>;
  static_assert(layer_compressor<last_rule>, "kvexact: the last rule of draft_cache must serve all layers");
  using first_layer = detail::layer_of<std::tuple_element_t<0, std::tuple<Rules...>>>;

 public:
  using scalar = typename first_layer::scalar;
  static_assert((std::same_as<scalar, typename detail::layer_of<Rules>::scalar> && ...), "kvexact: all layers of draft_cache must have one scalar");
  /// One set of options for each rule.
  using options = std::tuple<typename detail::layer_of<Rules>::options...>;

  /// Errors: those of the layers' `make`, with the layer; out_of_memory.
  [[nodiscard]] static result<draft_cache> make(const cache_shape& shape, const options& chosen = {}) noexcept {
    draft_cache made;
    try {
      made.shape_ = shape;
      made.layers_.reserve(shape.layers());
      for (std::uint32_t l = 0; l < shape.layers(); ++l) {
        const auto added = made.add(l, chosen, std::index_sequence_for<Rules...>());
        if (!added) return added.error().at_layer(l);
      }
    } catch (...) {
      return error{error_code::out_of_memory, "a draft cache"};
    }
    return made;
  }

  [[nodiscard]] const cache_shape& shape() const noexcept { return shape_; }
  /// 0 in a layer that it does not have.
  [[nodiscard]] std::uint64_t length(std::uint32_t layer) const noexcept {
    return layer >= layers_.size() ? 0 : visit(layer, [](const auto& cache) { return cache.length(); });
  }
  /// What all layers can take back.
  [[nodiscard]] std::uint64_t max_rollback() const noexcept {
    std::uint64_t least = ~std::uint64_t{0};
    for (std::uint32_t l = 0; l < shape_.layers(); ++l)
      least = std::min(least, visit(l, [](const auto& cache) { return cache.max_rollback(); }));
    return least;
  }
  [[nodiscard]] std::size_t entries(std::uint32_t layer, std::uint32_t head) const noexcept {
    return layer >= layers_.size() ? 0 : visit(layer, [&](const auto& cache) { return cache.entries(head); });
  }
  [[nodiscard]] std::size_t bytes() const noexcept {
    std::size_t sum = sizeof(*this) + layers_.capacity() * sizeof(any_layer) + shape_.layers() * sizeof(layer_shape);
    for (std::uint32_t l = 0; l < shape_.layers(); ++l) sum += visit(l, [](const auto& cache) { return cache.bytes() - sizeof(cache); });
    return sum;
  }

  /// K and V of the next tokens of a layer, see `layer_compressor`; errors name the layer.
  result<void> append(std::uint32_t layer, const layer_tensors<const scalar>& rows, std::uint64_t tokens) noexcept {
    const auto done = in_layer(layers_, layer, [&](auto& cache) { return cache.append(rows, tokens); });
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
      const auto done = in_layer(layers_, l, [&](auto& cache) { return cache.truncate(length); });
      if (!done) return done;
    }
    return {};
  }
  result<void> materialise(std::uint32_t layer, std::uint32_t head, const materialised_head& out) const noexcept {
    return in_layer(layers_, layer, [&](const auto& cache) { return cache.materialise(head, out); });
  }
  /// On codes in layers that can, else on what the layer gives back.
  result<void> attend(std::uint32_t layer, std::uint32_t head, const attention_call& call) const noexcept {
    return in_layer(layers_, layer, [&](const auto& cache) { return kvexact::attend(cache, head, call); });
  }
  [[nodiscard]] bool observes(std::uint32_t layer, std::uint64_t position) const noexcept {
    return layer < layers_.size() && visit(layer, [&]<class Layer>(const Layer& cache) {
      if constexpr (observes_attention<Layer>) {
        return cache.observes(position);
      } else {
        return false;
      }
    });
  }
  /// For layers that observe; others need nothing.
  result<void> observe(std::uint32_t layer, const attention_rows& rows) noexcept {
    return in_layer(layers_, layer, [&]<class Layer>(Layer& cache) -> result<void> {
      if constexpr (observes_attention<Layer>) {
        return cache.observe(rows);
      } else {
        return {};
      }
    });
  }

  /// The layer's own compressor: calls use(const compressor&). The layer must be there.
  template <class Use>
  decltype(auto) visit(std::uint32_t layer, Use&& use) const noexcept {
    return std::visit(std::forward<Use>(use), layers_[layer]);
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
  using any_layer = typename distinct<std::variant<>, detail::layer_of<Rules>...>::type;

  draft_cache() noexcept = default;

  template <std::size_t... I>
  result<void> add(std::uint32_t layer, const options& chosen, std::index_sequence<I...>) {
    result<void> outcome;
    bool found = false;
    const auto try_rule = [&]<std::size_t Rule>() {
      using rule = detail::layers_of<std::tuple_element_t<Rule, std::tuple<Rules...>>>;
      if (found || !rule::applies(layer, shape_.layers())) return;
      found = true;
      auto made = rule::layer_type::make(shape_.layer(layer), std::get<Rule>(chosen));
      if (made) {
        layers_.push_back(any_layer(*std::move(made)));
      } else {
        outcome = made.error();
      }
    };
    (try_rule.template operator()<I>(), ...);
    return outcome;
  }
  /// `all`: the layers, const or not.
  template <class Layers, class Use>
  static result<void> in_layer(Layers& all, std::uint32_t layer, Use&& use) noexcept {
    if (layer >= all.size()) return error{error_code::out_of_range, "the draft cache has no such layer", layer};
    const result<void> outcome = std::visit(use, all[layer]);
    return outcome ? outcome : result<void>(outcome.error().at_layer(layer));
  }

  cache_shape shape_;
  std::vector<any_layer> layers_;
  std::uint64_t greatest_ = 0;  // length of any layer so far
};

}  // namespace kvexact

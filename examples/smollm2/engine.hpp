// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <common/outcome.hpp>
#include <common/safetensors.hpp>
#include <kvexact/numeric/bf16.hpp>

#include "instruction_set.hpp"
#include "kernels.hpp"
#include "lanes.hpp"
#include "rotary.hpp"
#include "workers.hpp"

namespace kvexact::examples {

/// A small reference engine for models of the Llama architecture (SmolLM2-135M). It is here to make real KV caches and predictions of
/// them, and to show what the codec expects of an engine; it is not meant to compete with one.
///
/// Exactness: every output is one fixed sequence of IEEE operations. It does not depend on how many rows (tokens) a call computes, on
/// the number of threads, on the instruction set or on the C library, so a row computed alone and in a block has equal bits
/// (as long as all values are finite).

/// How the linear layers of the blocks are computed. Embedding, output and everything between the linear layers is the same for all:
/// values travel as bf16, sums are float.
enum class precision : std::uint8_t {
  bf16,  ///< bf16 weights and activations: the target
  fp8,   ///< e4m3 weights, one scale per block of 128 x 128 (amax / 448); e4m3 activations, one scale per 64
  int8,  ///< int8 weights and activations, one scale per 64 or 32 (amax / 127)
};

/// Which earlier tokens a token attends to: the first `sinks` ones and, itself included, the `newest` ones; all if `newest` is 0. The cost
/// of a token then does not grow with its position.
struct attention_window {
  std::size_t sinks = 0, newest = 0;
};

struct engine_options {
  examples::precision precision = precision::bf16;
  /// int8 only: rotate every 64 input channels by an orthonormal Hadamard matrix first, which spreads outlier channels.
  bool rotated = true;
  /// Threads, the caller included; 0 for as many as the machine has cores.
  unsigned threads = 0;
  instruction_set isa = detect_instruction_set();
  /// The first so many layers are computed as the target computes them, whatever `precision` and `window` say, so that their keys and
  /// values equal the target's bit by bit; more than the model has mean all.
  std::size_t exact_layers = 0;
  attention_window window = {};
  /// The projections to keys and values, a few percent of the work, are computed as the target computes them, from hidden states that are
  /// not the target's.
  bool exact_projections = false;
  /// For `layerwise_engine` only: attention and feed-forward run in the first so many layers; later hidden states change by corrections alone.
  std::size_t depth = ~std::size_t{0};
  /// int8 only: input channels that share a scale, 64 or 32. Rotated are 64 in any case.
  std::size_t group = 64;
};

/// Sizes of a model. `width` and `hidden` are multiples of 64, `head_dim` and `vocabulary` of 16; heads = a multiple of kv_heads,
/// at most 16 times as many; width = heads * head_dim.
struct model_shape {
  std::size_t layers = 0, heads = 0, kv_heads = 0, head_dim = 0, width = 0, hidden = 0, vocabulary = 0;
  float rope_base = 0, norm_epsilon = 0;

  [[nodiscard]] std::size_t kv_width() const noexcept { return kv_heads * head_dim; }
};

/// What a layer computes for its cache from rows of hidden states: float sums before any rounding, keys not rotated; [rows, kv_width].
struct key_value_sums {
  std::vector<float> keys, values;
};

/// Keys (rotated) and values of every layer, as bf16, for positions 0 to capacity - 1. It holds no length: a call names its positions.
class kv_cache {
 public:
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] const rotary_table& rotary() const noexcept { return rotary_; }

  /// The first `tokens` rows of a layer, [tokens, kv_heads, head_dim].
  [[nodiscard]] std::span<const bf16> keys(std::size_t layer, std::size_t tokens) const noexcept {
    return {layers_[layer].keys.data(), tokens * kv_width_};
  }
  [[nodiscard]] std::span<const bf16> values(std::size_t layer, std::size_t tokens) const noexcept {
    return {layers_[layer].values.data(), tokens * kv_width_};
  }

  /// Stores rows of a layer (any: computed, decoded, approximate) from position `first` on; keys rotated. [rows, kv_heads, head_dim].
  void write(std::size_t layer, std::size_t first, std::span<const bf16> keys, std::span<const bf16> values) noexcept;

  /// Rounds what `engine::keys_values` gave to bf16, rotates the keys, rounds again, and stores them.
  void write(std::size_t layer, std::size_t first, const key_value_sums& sums) noexcept;

 private:
  friend class engine;
  struct layer_rows {
    lanes::buffer<bf16> keys, values;  // [capacity, kv_width]
    lanes::buffer<float> key_tiles;    // [kv_heads][ceil(capacity / 16)][head_dim][16]
  };

  kv_cache(const model_shape& shape, std::size_t capacity, std::size_t workers);

  std::size_t capacity_, kv_heads_, head_dim_, kv_width_, tiles_;
  rotary_table rotary_;
  std::vector<layer_rows> layers_;
  std::vector<lanes::buffer<float>> scores_;  // one per worker, [tiles * 16][16]
};

/// A cache of any kind, one token at a time, for `engine::step`.
class token_cache {
 public:
  virtual ~token_cache() = default;

  /// Takes a layer's keys (rotated) and values of the next position, [kv_heads, head_dim] each.
  virtual status append(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) = 0;
  /// Attention of the position appended last: from queries (rotated, not yet divided by sqrt(head_dim)) to weighted means of values,
  /// [heads, head_dim] each.
  virtual status attend(std::size_t layer, std::span<const float> queries, std::span<float> out) = 0;
};

/// A sequence's part of a pass: tokens at positions first, first + 1, ..., what holds their keys and values, and what becomes of them.
struct sequence_pass {
  std::span<const std::uint32_t> ids;
  std::size_t first = 0;
  kv_cache* own = nullptr;               ///< attended by the engine; or, if null:
  token_cache* outside = nullptr;        ///< what the cache makes of keys, values and queries is its own affair; one token
  const rotary_table* rotary = nullptr;  ///< of `outside`

  status outcome = done;
  std::vector<bf16> hidden = {};  ///< after the last layer, [ids, width]
};

/// One call at a time: the engine spreads a call over its own threads and reuses their scratch memory.
class engine {
 public:
  /// Reads a model.safetensors as the conversion script writes it (GGUF names, bf16, hyperparameters in the metadata). Fails on unusable
  /// options, too.
  [[nodiscard]] static outcome<engine> load(const std::string& path, const engine_options& options = {}) noexcept;

  [[nodiscard]] const model_shape& shape() const noexcept { return shape_; }

  /// Whether the engine computes this layer's keys and values as the target does (given the target's in the layers below).
  [[nodiscard]] bool is_exact(std::size_t layer) const noexcept { return layer < exact_layers_; }
  /// Whether the second half of the layer runs, see `engine_options::depth`.
  [[nodiscard]] bool is_run(std::size_t layer) const noexcept { return layer < depth_; }

  /// An empty cache for positions 0 to capacity - 1.
  [[nodiscard]] outcome<kv_cache> make_cache(std::size_t capacity) const noexcept;

  /// Hidden states of token ids, [ids, width]. Fails on an id outside the vocabulary.
  [[nodiscard]] outcome<std::vector<bf16>> embed(std::span<const std::uint32_t> ids) const noexcept;

  /// First half of a layer: keys and values from the layer's input, [rows, width].
  void keys_values(std::size_t layer, std::span<const bf16> hidden, key_value_sums& sums) noexcept;

  /// Second half of a layer: attention of rows at positions first, first + 1, ... over whatever the cache holds for the positions up to
  /// each row's own, then the feed-forward part. `hidden` [rows, width] is the layer's input and becomes its output.
  void rest(std::size_t layer, std::span<bf16> hidden, std::size_t first, kv_cache& cache) noexcept;

  /// All layers for tokens of several sequences together, each with the bits that a pass of its own gives. A part fails on an id outside the
  /// vocabulary, on a position outside the cache, and as an outside cache does (then its first layers have the token and the others do not);
  /// the other parts go on. All fail where memory runs out.
  void forward(std::span<sequence_pass> parts) noexcept;

  /// One sequence on a cache of the engine: fills it and returns the hidden states after the last layer.
  [[nodiscard]] outcome<std::vector<bf16>> forward(std::span<const std::uint32_t> ids, std::size_t first, kv_cache& cache) noexcept;

  /// One token with the cache outside. With exact attention to all tokens it differs from `forward` without a window by the rounding of sums
  /// alone.
  [[nodiscard]] outcome<std::vector<bf16>> step(std::uint32_t id, std::size_t position, const rotary_table& rotary, token_cache& cache) noexcept;

  /// Logits [rows, vocabulary] of hidden states after the last layer, as float sums.
  void logits(std::span<const bf16> hidden, std::span<float> out) noexcept;

 private:
  struct matrix {
    std::size_t outputs = 0, inputs = 0;
    kernels::quantisation kind = kernels::quantisation::none;  // of the weights and of what they multiply
    lanes::buffer<std::uint16_t> panels;                       // [outputs / 16][inputs][16], empty for integers
    lanes::buffer<std::int32_t> pairs;                         // [outputs / 16][inputs / 2][16], of integers only
    lanes::buffer<float> scales;                               // [outputs / 16][inputs / 64 or group_][16], empty for bf16
  };
  struct layer_weights {
    std::vector<float> attention_norm, feed_forward_norm;
    matrix query, key, value, output, gate, up, down;
  };
  struct scratch {  // of one worker, for a block of rows
    lanes::buffer<float> tiles, scales, a, b, attended;
    lanes::buffer<std::int32_t> pairs;
    lanes::buffer<std::uint16_t> queries;
  };

  engine(const model_shape& shape, const engine_options& options);
  status read(const safetensors_file& file, const engine_options& options);
  matrix pack(std::span<const bf16> weights, std::size_t outputs, kernels::quantisation kind);
  void load_hidden(scratch& s, const bf16* hidden, std::size_t rows, const std::vector<float>& gain) const noexcept;
  void load_rows(scratch& s, const float* values, std::size_t rows, std::size_t inputs) const noexcept;
  void quantise(scratch& s, const matrix& weights, std::size_t rows) const noexcept;
  void multiply(const scratch& s, const matrix& weights, std::size_t rows, float* out) const noexcept;
  [[nodiscard]] status check(const sequence_pass& part) const;
  void queries(scratch& s, std::size_t layer, const bf16* hidden, std::size_t rows) const noexcept;
  void attend(scratch& s, std::size_t layer, std::size_t begin, std::size_t rows, std::size_t first, kv_cache& cache, std::size_t worker) const noexcept;
  void attend_outside(scratch& s, std::size_t layer, std::size_t row, sequence_pass& part) const noexcept;
  void after_attention(scratch& s, std::size_t layer, bf16* hidden, std::size_t rows) const noexcept;
  template <class Body>
  void for_blocks(std::size_t rows, Body&& body);

  model_shape shape_;
  instruction_set isa_;
  attention_window window_;
  std::size_t exact_layers_, group_;
  bool exact_projections_;
  std::size_t depth_;
  std::unique_ptr<workers> workers_;
  std::vector<scratch> scratch_;
  std::vector<layer_weights> layers_;
  std::vector<float> output_norm_;
  matrix embedding_;
};

}  // namespace kvexact::examples

// SPDX-License-Identifier: Apache-2.0
#include "engine.hpp"

#include <algorithm>
#include <cassert>
#include <charconv>
#include <cmath>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

namespace kvexact::examples {

namespace {

constexpr std::size_t block_rows = 64;  // rows that pass through a layer together, so that their scratch stays in the cache
constexpr std::size_t width = kernels::width;
static_assert(block_rows % width == 0);

constexpr std::size_t round_up(std::size_t n, std::size_t multiple) noexcept { return (n + multiple - 1) / multiple * multiple; }

static_assert(sizeof(bf16) == sizeof(std::uint16_t));
std::uint16_t* bits_of(bf16* values) noexcept { return reinterpret_cast<std::uint16_t*>(values); }
const std::uint16_t* bits_of(const bf16* values) noexcept { return reinterpret_cast<const std::uint16_t*>(values); }

/// Reads a number of the metadata; `value` is left alone where it is missing or malformed.
template <class T>
bool read_number(const std::map<std::string, std::string>& metadata, const char* key, T& value) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return false;
  const char* const end = found->second.data() + found->second.size();
  const auto [stop, problem] = std::from_chars(found->second.data(), end, value);
  return problem == std::errc{} && stop == end;
}

failure bad_model(const safetensors_file& file, const std::string& text) { return {error_code::unsupported, file.path() + ": " + text}; }

outcome<model_shape> read_shape(const safetensors_file& file) {
  model_shape shape;
  for (const auto& [key, value] : {std::pair{"layers", &shape.layers}, {"heads", &shape.heads}, {"kv_heads", &shape.kv_heads}}) {
    if (!read_number(file.metadata(), key, *value) || *value == 0 || *value > 100'000) {
      return bad_model(file, std::string("the metadata lacks a usable number '") + key + "'");
    }
  }
  for (const auto& [key, value] : {std::pair{"rope_base", &shape.rope_base}, {"norm_epsilon", &shape.norm_epsilon}}) {
    if (!read_number(file.metadata(), key, *value) || !(*value > 0) || !std::isfinite(*value)) {
      return bad_model(file, std::string("the metadata lacks a usable number '") + key + "'");
    }
  }
  const tensor* const embedding = file.find("token_embd.weight");
  const tensor* const gate = file.find("blk.0.ffn_gate.weight");
  if (embedding == nullptr || embedding->shape.size() != 2) return bad_model(file, "lacks the matrix token_embd.weight");
  if (gate == nullptr || gate->shape.size() != 2) return bad_model(file, "lacks the matrix blk.0.ffn_gate.weight");
  if (file.find("output.weight") != nullptr) return bad_model(file, "has its own output matrix; only a tied embedding is handled");
  shape.vocabulary = embedding->shape[0];
  shape.width = embedding->shape[1];
  shape.hidden = gate->shape[0];
  shape.head_dim = shape.width / shape.heads;
  if (shape.width == 0 || shape.hidden == 0 || shape.vocabulary == 0 || shape.width % kernels::block != 0 ||
      shape.hidden % kernels::block != 0 || shape.vocabulary % width != 0 || shape.width % shape.heads != 0 ||
      shape.head_dim % width != 0 || shape.heads % shape.kv_heads != 0 || shape.heads / shape.kv_heads > width) {
    return bad_model(file, "sizes that this engine does not handle (see model_shape)");
  }
  return shape;
}

std::string bad_token(std::size_t row, std::size_t id, std::size_t vocabulary) {
  return "token " + std::to_string(row) + " has id " + std::to_string(id) + "; the vocabulary has " + std::to_string(vocabulary) + " ids";
}

}  // namespace

kv_cache::kv_cache(const model_shape& shape, std::size_t capacity, std::size_t workers)
    : capacity_(capacity),
      kv_heads_(shape.kv_heads),
      head_dim_(shape.head_dim),
      kv_width_(shape.kv_width()),
      tiles_(round_up(capacity, width) / width),
      rotary_(shape.rope_base, shape.head_dim, capacity),
      layers_(shape.layers) {
  for (auto& layer : layers_) {
    layer.keys.resize(capacity * kv_width_);
    layer.values.resize(capacity * kv_width_);
    layer.key_tiles.resize(kv_heads_ * tiles_ * head_dim_ * width);
  }
  for (std::size_t i = 0; i < workers; ++i) scores_.emplace_back(tiles_ * width * width);
}

void kv_cache::write(std::size_t layer, std::size_t first, std::span<const bf16> keys, std::span<const bf16> values) noexcept {
  assert(keys.size() == values.size() && keys.size() % kv_width_ == 0 && first + keys.size() / kv_width_ <= capacity_);
  layer_rows& rows = layers_[layer];
  std::copy(keys.begin(), keys.end(), rows.keys.begin() + static_cast<std::ptrdiff_t>(first * kv_width_));
  std::copy(values.begin(), values.end(), rows.values.begin() + static_cast<std::ptrdiff_t>(first * kv_width_));
  for (std::size_t row = 0; row < keys.size() / kv_width_; ++row) {
    const std::size_t token = first + row;
    for (std::size_t head = 0; head < kv_heads_; ++head) {
      float* const tile = rows.key_tiles.data() + (head * tiles_ + token / width) * head_dim_ * width + token % width;
      for (std::size_t d = 0; d < head_dim_; ++d) tile[d * width] = keys[row * kv_width_ + head * head_dim_ + d].to_float();
    }
  }
}

namespace {

/// As the model stores them: rounded, keys rotated, rounded again.
struct stored_rows {
  std::vector<bf16> keys, values;

  stored_rows(std::span<const float> key_sums, std::span<const float> value_sums, const rotary_table& rotary, std::size_t first, std::size_t kv_width)
      : keys(key_sums.size()), values(value_sums.size()) {
    std::vector<float> turned(kv_width);
    for (std::size_t i = 0; i < keys.size(); i += kv_width) {
      for (std::size_t d = 0; d < kv_width; ++d) turned[d] = bf16::from_float(key_sums[i + d]).to_float();
      rotary.rotate(turned, first + i / kv_width);
      for (std::size_t d = 0; d < kv_width; ++d) keys[i + d] = bf16::from_float(turned[d]);
    }
    std::transform(value_sums.begin(), value_sums.end(), values.begin(), bf16::from_float);
  }
};

}  // namespace

void kv_cache::write(std::size_t layer, std::size_t first, const key_value_sums& sums) noexcept {
  const stored_rows rows(sums.keys, sums.values, rotary_, first, kv_width_);
  write(layer, first, rows.keys, rows.values);
}

engine::engine(const model_shape& shape, const engine_options& options)
    : shape_(shape),
      isa_(options.isa),
      window_(options.window),
      exact_layers_(options.precision == precision::bf16 && options.window.newest == 0 ? shape.layers : options.exact_layers),
      group_(options.group),
      exact_projections_(options.exact_projections),
      depth_(options.depth),
      workers_(std::make_unique<workers>(options.threads != 0 ? options.threads : std::max(1U, std::thread::hardware_concurrency()))),
      scratch_(workers_->size()) {
  const std::size_t widest = std::max(shape.width, shape.hidden);
  for (scratch& s : scratch_) {
    for (auto* buffer : {&s.tiles, &s.a, &s.b}) buffer->resize(block_rows * widest);
    s.pairs.resize(block_rows * widest / 2);
    s.scales.resize(block_rows * widest / std::min(kernels::block, group_));
    s.queries.resize(shape.head_dim * width);
    s.attended.resize(shape.head_dim * width);
  }
}

outcome<engine> engine::load(const std::string& path, const engine_options& options) noexcept {
  if (options.group != 64 && options.group != 32) return failure{error_code::invalid_argument, "int8 groups have 64 or 32 channels"};
  try {
    const auto file = safetensors_file::open(path);
    if (!file) return file.error();
    const auto shape = read_shape(*file);
    if (!shape) return shape.error();
    engine loaded(*shape, options);
    if (auto read = loaded.read(*file, options); !read) return read.error();
    return loaded;
  } catch (const std::exception& caught) {
    return failure{error_code::out_of_memory, path + ": " + caught.what()};
  }
}

status engine::read(const safetensors_file& file, const engine_options& options) {
  using kernels::quantisation;
  const quantisation int8 = options.rotated ? quantisation::rotated_int8 : quantisation::int8;
  const quantisation approximate = options.precision == precision::bf16  ? quantisation::none
                                   : options.precision == precision::fp8 ? quantisation::e4m3
                                                                         : int8;

  std::string problem;
  const auto take = [&](const std::string& name, const std::vector<std::uint64_t>& shape) -> std::span<const bf16> {
    const tensor* const found = file.find(name);
    if (found != nullptr && found->type == dtype::bf16 && found->shape == shape) return found->as<bf16>();
    const std::string expected = tensor_info{name, dtype::bf16, shape}.description();
    if (problem.empty()) problem = name + (found ? " is " + found->description() + ", not " : " is missing; it should be ") + expected;
    return {};
  };
  const auto vector = [&](const std::string& name) {
    const auto values = take(name, {shape_.width});
    std::vector<float> floats(values.size());
    std::transform(values.begin(), values.end(), floats.begin(), [](bf16 value) { return value.to_float(); });
    return floats;
  };
  const auto matrix_of = [&](const std::string& name, std::size_t outputs, std::size_t inputs, quantisation kind) {
    const auto values = take(name, {outputs, inputs});
    return values.empty() ? matrix{} : pack(values, outputs, kind);
  };

  embedding_ = matrix_of("token_embd.weight", shape_.vocabulary, shape_.width, quantisation::none);
  output_norm_ = vector("output_norm.weight");
  for (std::size_t i = 0; i < shape_.layers && problem.empty(); ++i) {
    const std::string block = "blk." + std::to_string(i) + ".";
    const auto linear = [&](const char* name, std::size_t outputs, std::size_t inputs, bool exact = false) {
      return matrix_of(block + name + ".weight", outputs, inputs, exact || is_exact(i) ? quantisation::none : approximate);
    };
    layer_weights& l = layers_.emplace_back();
    l.attention_norm = vector(block + "attn_norm.weight");
    l.feed_forward_norm = vector(block + "ffn_norm.weight");
    l.query = linear("attn_q", shape_.width, shape_.width);
    l.key = linear("attn_k", shape_.kv_width(), shape_.width, exact_projections_);
    l.value = linear("attn_v", shape_.kv_width(), shape_.width, exact_projections_);
    l.output = linear("attn_output", shape_.width, shape_.width);
    l.gate = linear("ffn_gate", shape_.hidden, shape_.width);
    l.up = linear("ffn_up", shape_.hidden, shape_.width);
    l.down = linear("ffn_down", shape_.width, shape_.hidden);
  }
  if (!problem.empty()) return bad_model(file, problem);
  return done;
}

engine::matrix engine::pack(std::span<const bf16> weights, std::size_t outputs, kernels::quantisation kind) {
  using kernels::block, kernels::quantisation;
  constexpr std::size_t fp8_block = 128;
  matrix packed{outputs, weights.size() / outputs, kind, {}, {}, {}};
  const bool integers = kind == quantisation::int8 || kind == quantisation::rotated_int8;
  const std::size_t inputs = packed.inputs, groups = inputs / (integers ? group_ : block);
  if (kind != quantisation::none) packed.scales.resize(outputs * groups);
  if (integers) {
    packed.pairs.resize(weights.size() / 2);
  } else {
    packed.panels.resize(weights.size());
  }
  workers_->for_each(round_up(outputs, fp8_block) / fp8_block, [&](std::size_t rows, std::size_t worker) {
    const std::size_t begin = rows * fp8_block, end = std::min(outputs, begin + fp8_block);
    float* const tile = scratch_[worker].tiles.data();
    if (kind == quantisation::e4m3) {
      for (std::size_t left = 0; left < inputs; left += fp8_block) {
        const std::size_t right = std::min(inputs, left + fp8_block);
        float amax = 0;
        for (std::size_t row = begin; row < end; ++row) {
          for (std::size_t i = left; i < right; ++i) amax = std::max(amax, std::fabs(weights[row * inputs + i].to_float()));
        }
        for (std::size_t row = begin; row < end; ++row) {
          for (std::size_t g = left / block; g < right / block; ++g) {
            packed.scales[(row / width * groups + g) * width + row % width] = amax > 0 ? amax / 448 : 1;
          }
        }
      }
    }
    for (std::size_t panel = begin; panel < end; panel += width) {
      for (std::size_t i = 0; i < inputs; ++i) {
        for (std::size_t lane = 0; lane < width; ++lane) tile[i * width + lane] = weights[(panel + lane) * inputs + i].to_float();
      }
      float* const scales = packed.scales.empty() ? nullptr : packed.scales.data() + panel * groups;
      if (integers) {
        run(isa_, kernels::quantise_int8{tile, packed.pairs.data() + panel * inputs / 2, scales, inputs, group_,
                                         kind == quantisation::rotated_int8});
        continue;
      }
      if (kind == quantisation::e4m3) run(isa_, kernels::quantise_e4m3_by{tile, scales, inputs});
      // e4m3 values are bf16 values.
      for (std::size_t i = 0; i < inputs * width; ++i) packed.panels[panel * inputs + i] = bf16::from_float(tile[i]).bits;
    }
  });
  return packed;
}

outcome<kv_cache> engine::make_cache(std::size_t capacity) const noexcept {
  try {
    return kv_cache(shape_, capacity, workers_->size());
  } catch (const std::exception& caught) {
    return failure{error_code::out_of_memory, std::string("cannot make a cache: ") + caught.what()};
  }
}

outcome<std::vector<bf16>> engine::embed(std::span<const std::uint32_t> ids) const noexcept {
  try {
    std::vector<bf16> hidden(ids.size() * shape_.width);
    for (std::size_t row = 0; row < ids.size(); ++row) {
      const std::size_t id = ids[row];
      if (id >= shape_.vocabulary) {
        return failure{error_code::out_of_range, bad_token(row, id, shape_.vocabulary)};
      }
      const std::uint16_t* const column = embedding_.panels.data() + id / width * shape_.width * width + id % width;
      for (std::size_t i = 0; i < shape_.width; ++i) hidden[row * shape_.width + i].bits = column[i * width];
    }
    return hidden;
  } catch (const std::exception& caught) {
    return failure{error_code::out_of_memory, std::string("cannot embed tokens: ") + caught.what()};
  }
}

template <class Body>
void engine::for_blocks(std::size_t rows, Body&& body) {
  workers_->for_each(round_up(rows, block_rows) / block_rows, [&](std::size_t block, std::size_t worker) {
    const std::size_t row = block * block_rows;
    body(row, std::min(block_rows, rows - row), worker);
  });
}

void engine::load_rows(scratch& s, const float* values, std::size_t rows, std::size_t inputs) const noexcept {
  for (std::size_t first = 0; first < rows; first += width) {
    const std::size_t count = std::min(width, rows - first);
    float* const tile = s.tiles.data() + first * inputs;
    for (std::size_t i = 0; i < inputs; ++i) {
      for (std::size_t row = 0; row < width; ++row) tile[i * width + row] = row < count ? values[(first + row) * inputs + i] : 0;
    }
  }
}

void engine::load_hidden(scratch& s, const bf16* hidden, std::size_t rows, const std::vector<float>& gain) const noexcept {
  for (std::size_t i = 0; i < rows * shape_.width; ++i) s.a[i] = hidden[i].to_float();
  load_rows(s, s.a.data(), rows, shape_.width);
  for (std::size_t first = 0; first < rows; first += width) {
    run(isa_, kernels::rms_norm{s.tiles.data() + first * shape_.width, gain.data(), shape_.width, shape_.norm_epsilon});
  }
}

void engine::quantise(scratch& s, const matrix& weights, std::size_t rows) const noexcept {
  using kernels::quantisation;
  const std::size_t inputs = weights.inputs;
  for (std::size_t first = 0; first < rows; first += width) {
    float* const tile = s.tiles.data() + first * inputs;
    switch (weights.kind) {
      case quantisation::none: return;
      case quantisation::e4m3: run(isa_, kernels::quantise_e4m3{tile, s.scales.data() + first * inputs / kernels::block, inputs}); break;
      case quantisation::int8:
      case quantisation::rotated_int8:
        run(isa_, kernels::quantise_int8{tile, s.pairs.data() + first * inputs / 2, s.scales.data() + first * inputs / group_, inputs,
                                         group_, weights.kind == quantisation::rotated_int8});
        break;
    }
  }
}

void engine::multiply(const scratch& s, const matrix& weights, std::size_t rows, float* out) const noexcept {
  if (!weights.pairs.empty()) {
    run(isa_, kernels::integer_linear{s.pairs.data(), s.scales.data(), weights.pairs.data(), weights.scales.data(), rows, weights.inputs,
                                      weights.outputs, group_, out});
    return;
  }
  const bool scaled = !weights.scales.empty();
  run(isa_, kernels::linear{s.tiles.data(), scaled ? s.scales.data() : nullptr, weights.panels.data(),
                            scaled ? weights.scales.data() : nullptr, rows, weights.inputs, weights.outputs, out});
}

void engine::keys_values(std::size_t layer, std::span<const bf16> hidden, key_value_sums& sums) noexcept {
  const layer_weights& w = layers_[layer];
  const std::size_t rows = hidden.size() / shape_.width, kv_width = shape_.kv_width();
  sums.keys.resize(rows * kv_width);
  sums.values.resize(rows * kv_width);
  for_blocks(rows, [&](std::size_t row, std::size_t count, std::size_t worker) {
    scratch& s = scratch_[worker];
    load_hidden(s, hidden.data() + row * shape_.width, count, w.attention_norm);
    quantise(s, w.key, count);
    multiply(s, w.key, count, sums.keys.data() + row * kv_width);
    multiply(s, w.value, count, sums.values.data() + row * kv_width);
  });
}

/// Queries of rows of hidden states, [rows, width], into s.a.
void engine::queries(scratch& s, std::size_t layer, const bf16* hidden, std::size_t rows) const noexcept {
  const layer_weights& w = layers_[layer];
  load_hidden(s, hidden, rows, w.attention_norm);
  quantise(s, w.query, rows);
  multiply(s, w.query, rows, s.a.data());
}

/// Queries from s.a, attention into s.b, from row `begin` on; both [rows, width].
void engine::attend(scratch& s, std::size_t layer, std::size_t begin, std::size_t rows, std::size_t first, kv_cache& cache,
                    std::size_t worker) const noexcept {
  float* const queries = s.a.data() + begin * shape_.width;
  float* const attended = s.b.data() + begin * shape_.width;
  const std::size_t head_dim = shape_.head_dim, shared = shape_.heads / shape_.kv_heads;
  const kv_cache::layer_rows& stored = cache.layers_[layer];
  const attention_window window = is_exact(layer) ? attention_window{} : window_;
  run(isa_, kernels::round_all{queries, rows * shape_.width});
  for (std::size_t row = 0; row < rows; ++row) cache.rotary_.rotate({queries + row * shape_.width, shape_.width}, first + row);
  run(isa_, kernels::round_all{queries, rows * shape_.width});

  const std::size_t tokens_at_once = width / shared;
  for (std::size_t row = 0; row < rows; row += tokens_at_once) {
    const std::size_t tokens = std::min(tokens_at_once, rows - row), lanes = tokens * shared;
    std::int32_t positions[width];
    for (std::size_t lane = 0; lane < width; ++lane) {
      positions[lane] = static_cast<std::int32_t>(first + row + std::min(lane / shared, tokens - 1));
    }
    for (std::size_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
      // lane = token * shared + query head of the KV head's group
      const auto place = [&](std::size_t lane) {
        return (row + lane / shared) * shape_.width + (kv_head * shared + lane % shared) * head_dim;
      };
      std::fill(s.queries.begin(), s.queries.end(), std::uint16_t{0});
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        for (std::size_t d = 0; d < head_dim; ++d) s.queries[d * width + lane] = bf16::from_float(queries[place(lane) + d]).bits;
      }
      run(isa_, kernels::attention{s.queries.data(), lanes, positions, window.sinks, window.newest,
                                   stored.key_tiles.data() + kv_head * cache.tiles_ * head_dim * width,
                                   bits_of(stored.values.data()) + kv_head * head_dim, shape_.kv_width(), head_dim,
                                   cache.scores_[worker].data(), s.attended.data()});
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        std::copy_n(s.attended.data() + lane * head_dim, head_dim, attended + place(lane));
      }
    }
  }
}

/// The same for one row, whose cache is outside; nothing once it has failed.
void engine::attend_outside(scratch& s, std::size_t layer, std::size_t row, sequence_pass& part) const noexcept {
  const std::span<float> queries(s.a.data() + row * shape_.width, shape_.width), attended(s.b.data() + row * shape_.width, shape_.width);
  run(isa_, kernels::round_all{queries.data(), queries.size()});
  part.rotary->rotate(queries, part.first);
  run(isa_, kernels::round_all{queries.data(), queries.size()});
  try {
    if (part.outcome) part.outcome = part.outside->attend(layer, queries, attended);
  } catch (...) {
    part.outcome = failure{error_code::out_of_memory, {}};
  }
  if (!part.outcome) std::fill(attended.begin(), attended.end(), 0.0F);
}

/// From attention in s.b to the layer's output.
void engine::after_attention(scratch& s, std::size_t layer, bf16* hidden, std::size_t rows) const noexcept {
  const layer_weights& w = layers_[layer];
  run(isa_, kernels::round_all{s.b.data(), rows * shape_.width});
  load_rows(s, s.b.data(), rows, shape_.width);
  quantise(s, w.output, rows);
  multiply(s, w.output, rows, s.a.data());
  run(isa_, kernels::add_residual{bits_of(hidden), s.a.data(), rows * shape_.width});

  load_hidden(s, hidden, rows, w.feed_forward_norm);
  quantise(s, w.gate, rows);
  multiply(s, w.gate, rows, s.a.data());
  multiply(s, w.up, rows, s.b.data());
  run(isa_, kernels::gated_silu{s.a.data(), s.b.data(), rows * shape_.hidden});
  load_rows(s, s.a.data(), rows, shape_.hidden);
  quantise(s, w.down, rows);
  multiply(s, w.down, rows, s.b.data());
  run(isa_, kernels::add_residual{bits_of(hidden), s.b.data(), rows * shape_.width});
}

void engine::rest(std::size_t layer, std::span<bf16> hidden, std::size_t first, kv_cache& cache) noexcept {
  const std::size_t rows = hidden.size() / shape_.width;
  assert(first + rows <= cache.capacity());
  for_blocks(rows, [&](std::size_t row, std::size_t count, std::size_t worker) {
    scratch& s = scratch_[worker];
    bf16* const here = hidden.data() + row * shape_.width;
    queries(s, layer, here, count);
    attend(s, layer, 0, count, first + row, cache, worker);
    after_attention(s, layer, here, count);
  });
}

status engine::check(const sequence_pass& part) const {
  const std::size_t positions = part.own != nullptr ? part.own->capacity() : part.rotary->positions();
  if (part.first > positions || part.ids.size() > positions - part.first)
    return failure{error_code::out_of_range, "the cache ends at position " + std::to_string(positions)};
  for (std::size_t i = 0; i < part.ids.size(); ++i) {
    if (part.ids[i] >= shape_.vocabulary) return failure{error_code::out_of_range, bad_token(i, part.ids[i], shape_.vocabulary)};
  }
  return done;
}

void engine::forward(std::span<sequence_pass> parts) noexcept {
  try {
    struct rows_of {
      sequence_pass* part;
      std::size_t begin, end;
    };
    std::vector<rows_of> all;
    std::vector<std::uint32_t> ids;
    for (sequence_pass& part : parts) {
      part.outcome = check(part);
      if (!part.outcome || part.ids.empty()) continue;
      all.push_back({&part, ids.size(), ids.size() + part.ids.size()});
      ids.insert(ids.end(), part.ids.begin(), part.ids.end());
    }
    auto embedded = embed(ids);
    if (!embedded) throw std::bad_alloc();
    std::vector<bf16>& hidden = *embedded;
    const std::size_t kv_width = shape_.kv_width();
    key_value_sums sums;
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      keys_values(layer, hidden, sums);
      for (const rows_of& each : all) {
        sequence_pass& part = *each.part;
        if (!part.outcome) continue;
        const auto of_part = [&](const std::vector<float>& values) { return std::span(values).subspan(each.begin * kv_width, part.ids.size() * kv_width); };
        const stored_rows rows(of_part(sums.keys), of_part(sums.values), part.own != nullptr ? part.own->rotary() : *part.rotary, part.first, kv_width);
        if (part.own != nullptr) {
          part.own->write(layer, part.first, rows.keys, rows.values);
        } else {
          part.outcome = part.outside->append(layer, rows.keys, rows.values);
        }
      }
      for_blocks(ids.size(), [&](std::size_t row, std::size_t count, std::size_t worker) {
        scratch& s = scratch_[worker];
        queries(s, layer, hidden.data() + row * shape_.width, count);
        for (const rows_of& each : all) {
          const std::size_t begin = std::max(each.begin, row), end = std::min(each.end, row + count);
          if (begin >= end) continue;
          if (each.part->own != nullptr) {
            attend(s, layer, begin - row, end - begin, each.part->first + begin - each.begin, *each.part->own, worker);
          } else {
            attend_outside(s, layer, begin - row, *each.part);
          }
        }
        after_attention(s, layer, hidden.data() + row * shape_.width, count);
      });
    }
    for (const rows_of& each : all) {
      each.part->hidden.assign(hidden.begin() + static_cast<std::ptrdiff_t>(each.begin * shape_.width),
                               hidden.begin() + static_cast<std::ptrdiff_t>(each.end * shape_.width));
    }
  } catch (const std::exception& caught) {
    for (sequence_pass& part : parts) part.outcome = failure{error_code::out_of_memory, std::string("cannot compute tokens: ") + caught.what()};
  }
}

outcome<std::vector<bf16>> engine::forward(std::span<const std::uint32_t> ids, std::size_t first, kv_cache& cache) noexcept {
  sequence_pass pass{ids, first, &cache};
  forward(std::span(&pass, 1));
  if (!pass.outcome) return pass.outcome.error();
  return std::move(pass.hidden);
}

outcome<std::vector<bf16>> engine::step(std::uint32_t id, std::size_t position, const rotary_table& rotary, token_cache& cache) noexcept {
  sequence_pass pass{std::span(&id, 1), position, nullptr, &cache, &rotary};
  forward(std::span(&pass, 1));
  if (!pass.outcome) return pass.outcome.error();
  return std::move(pass.hidden);
}

void engine::logits(std::span<const bf16> hidden, std::span<float> out) noexcept {
  const std::size_t rows = hidden.size() / shape_.width;
  for_blocks(rows, [&](std::size_t row, std::size_t count, std::size_t worker) {
    scratch& s = scratch_[worker];
    load_hidden(s, hidden.data() + row * shape_.width, count, output_norm_);
    multiply(s, embedding_, count, out.data() + row * shape_.vocabulary);
  });
}

}  // namespace kvexact::examples

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <smollm2/cache_writer.hpp>
#include <smollm2/engine.hpp>
#include <smollm2/token_file.hpp>

#include <kvexact/numeric/fp16.hpp>
#include <kvexact/numeric/fp8_e4m3.hpp>

#include "temporary_folder.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

std::vector<instruction_set> instruction_sets() {
  std::vector<instruction_set> all{instruction_set::baseline};
  for (const auto isa : {instruction_set::avx2, instruction_set::avx512}) {
    if (detect_instruction_set() >= isa) all.push_back(isa);
  }
  return all;
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}
template <class A, class B>
bool same_bits(const A& a, const B& b) {
  using value = typename A::value_type;
  return same_bits(std::span<const value>(a), std::span<const value>(b));
}

std::vector<float> normal_floats(std::size_t n, unsigned seed, float sigma = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, sigma);
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

float rounded(double value) { return bf16::from_float(static_cast<float>(value)).to_float(); }

/// A model small enough for a test that still has what can go wrong: grouped heads, fp8 blocks cut off at the edge, several tiles.
constexpr std::size_t layers = 2, heads = 4, kv_heads = 2, head_dim = 32, width = heads * head_dim, hidden_width = 192, vocabulary = 48;
constexpr float rope_base = 10000, epsilon = 1e-5F;

struct tensor_spec {
  std::string name;
  std::vector<std::uint64_t> shape;
};

std::vector<tensor_spec> model_tensors() {
  std::vector<tensor_spec> specs{{"token_embd.weight", {vocabulary, width}}, {"output_norm.weight", {width}}};
  for (std::size_t l = 0; l < layers; ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    specs.insert(specs.end(), {{block + "attn_norm.weight", {width}},
                               {block + "ffn_norm.weight", {width}},
                               {block + "attn_q.weight", {width, width}},
                               {block + "attn_k.weight", {kv_heads * head_dim, width}},
                               {block + "attn_v.weight", {kv_heads * head_dim, width}},
                               {block + "attn_output.weight", {width, width}},
                               {block + "ffn_gate.weight", {hidden_width, width}},
                               {block + "ffn_up.weight", {hidden_width, width}},
                               {block + "ffn_down.weight", {width, hidden_width}}});
  }
  return specs;
}

std::map<std::string, std::string> model_metadata() {
  return {{"layers", "2"}, {"heads", "4"}, {"kv_heads", "2"}, {"rope_base", "10000"}, {"norm_epsilon", "1e-05"}};
}

/// Weights by name, bf16; a few input channels are outliers, as in real models.
std::vector<bf16> model_weights(const tensor_spec& spec) {
  std::size_t n = 1;
  for (const auto extent : spec.shape) n *= extent;
  const bool vector = spec.shape.size() == 1;
  unsigned seed = 1;
  for (const char c : spec.name) seed = seed * 31 + static_cast<unsigned char>(c);
  std::vector<float> values = normal_floats(n, seed, vector ? 0.2F : spec.name[0] == 't' ? 1.0F : 0.09F);
  std::vector<bf16> weights(n);
  for (std::size_t i = 0; i < n; ++i) {
    if (vector) values[i] += i % 29 == 3 ? 6.0F : 1.0F;
    weights[i] = bf16::from_float(values[i]);
  }
  return weights;
}

void write_model(const std::string& path, const std::vector<tensor_spec>& specs, const std::map<std::string, std::string>& metadata,
                 const std::string& zeroed = {}) {
  std::vector<tensor_info> infos;
  for (const auto& spec : specs) infos.push_back({spec.name, dtype::bf16, spec.shape});
  auto writer = safetensors_writer::create(path, infos, metadata);
  REQUIRE(writer);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto weights = model_weights(specs[i]);
    if (specs[i].name != zeroed) std::copy(weights.begin(), weights.end(), writer->as<bf16>(i).begin());
  }
  REQUIRE(writer->commit());
}

engine load_model(const std::string& path, const engine_options& options) {
  auto loaded = engine::load(path, options);
  REQUIRE_MESSAGE(loaded, (loaded ? "" : loaded.error().text));
  return std::move(*loaded);
}

std::vector<std::uint32_t> some_tokens(std::size_t n) {
  std::mt19937 random(5);
  std::vector<std::uint32_t> ids(n);
  for (auto& id : ids) id = static_cast<std::uint32_t>(random() % vocabulary);
  return ids;
}

struct results {
  std::vector<std::vector<bf16>> keys, values;
  std::vector<bf16> hidden;
  std::vector<float> logits;

  bool operator==(const results& other) const {
    for (std::size_t l = 0; l < layers; ++l) {
      if (!same_bits(keys[l], other.keys[l]) || !same_bits(values[l], other.values[l])) return false;
    }
    return same_bits(hidden, other.hidden) && same_bits(logits, other.logits);
  }
};

/// Runs tokens in blocks of the given sizes (the last one repeats).
results run_model(engine& model, std::span<const std::uint32_t> ids, const std::vector<std::size_t>& blocks) {
  auto cache = model.make_cache(ids.size());
  REQUIRE(cache);
  results all;
  std::size_t first = 0;
  for (std::size_t block = 0; first < ids.size(); ++block) {
    const std::size_t rows = std::min(blocks[std::min(block, blocks.size() - 1)], ids.size() - first);
    const auto hidden = model.forward(ids.subspan(first, rows), first, *cache);
    REQUIRE(hidden);
    std::vector<float> logits(rows * vocabulary);
    model.logits(*hidden, logits);
    all.hidden.insert(all.hidden.end(), hidden->begin(), hidden->end());
    all.logits.insert(all.logits.end(), logits.begin(), logits.end());
    first += rows;
  }
  for (std::size_t l = 0; l < layers; ++l) {
    const auto keys = cache->keys(l, ids.size()), values = cache->values(l, ids.size());
    all.keys.emplace_back(keys.begin(), keys.end());
    all.values.emplace_back(values.begin(), values.end());
  }
  return all;
}

}  // namespace

TEST_CASE("lanes: rounding to bf16 and e4m3 as the number formats do it") {
  // Every exponent and sign, with mantissas around all ties of both formats.
  std::vector<std::uint32_t> mantissas;
  for (std::uint32_t high = 0; high < 256; ++high) {
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x3fffU, 0x4000U, 0x7fffU}) mantissas.push_back(high << 15 | low);
  }
  std::size_t wrong_bf16 = 0, wrong_e4m3 = 0;
  for (std::uint32_t top = 0; top < 512; ++top) {
    for (std::size_t i = 0; i < mantissas.size(); i += lanes::count) {
      float in[lanes::count], out[lanes::count];
      std::uint16_t bits[lanes::count];
      for (std::size_t j = 0; j < lanes::count; ++j) in[j] = std::bit_cast<float>(top << 23 | mantissas[i + j]);
      lanes::f32 v;
      lanes::load(v, in);
      lanes::round_bf16(v);
      lanes::store_bf16(v, bits);
      for (std::size_t j = 0; j < lanes::count; ++j) wrong_bf16 += bits[j] != bf16::from_float(in[j]).bits;
      lanes::load(v, in);
      lanes::round_e4m3(v);
      lanes::store(v, out);
      for (std::size_t j = 0; j < lanes::count; ++j) {
        const float expected = fp8_e4m3::from_float(in[j]).to_float();
        if (std::fabs(in[j]) <= 448) wrong_e4m3 += std::bit_cast<std::uint32_t>(out[j]) != std::bit_cast<std::uint32_t>(expected);
      }
    }
  }
  CHECK(wrong_bf16 == 0);
  CHECK(wrong_e4m3 == 0);
}

TEST_CASE("lanes: rounding to integers, ties to even") {
  const float in[16] = {0.5F, 1.5F, 2.5F, -0.5F, -1.5F, 126.5F, 127.5F, -126.5F, 0.49999997F, -3.2F, 3.7F, 0, -0.0F, 1000.5F, 1e6F, -7};
  const float expected[16] = {0, 2, 2, 0, -2, 126, 128, -126, 0, -3, 4, 0, 0, 1000, 1e6F, -7};
  float out[16];
  lanes::f32 v;
  lanes::load(v, in);
  lanes::round_integer(v);
  lanes::store(v, out);
  for (int i = 0; i < 16; ++i) CHECK(out[i] == expected[i]);
}

TEST_CASE("lanes: exponential") {
  double worst = 0;
  for (double x = -87; x <= 88; x += 16 * 0.00107) {
    float in[16], out[16];
    for (int i = 0; i < 16; ++i) in[i] = std::min(88.0F, static_cast<float>(x + i * 0.00107));
    lanes::f32 v;
    lanes::load(v, in);
    lanes::exponential(v);
    lanes::store(v, out);
    for (int i = 0; i < 16; ++i) worst = std::max(worst, std::fabs(static_cast<double>(out[i]) / std::exp(static_cast<double>(in[i])) - 1));
  }
  CHECK(worst < 1.5e-7);
  float out[16];
  lanes::f32 v = lanes::f32{} - 1e30F;
  lanes::exponential(v);
  lanes::store(v, out);
  CHECK(out[0] == doctest::Approx(std::exp(-87.0)));
  v = lanes::f32{};
  lanes::exponential(v);
  lanes::store(v, out);
  CHECK(out[3] == 1.0F);
}

TEST_CASE("rotary: own functions against the C library's") {
  double worst_turn = 0, worst_exp = 0, worst_log = 0;
  for (double x = 0; x < 200000; x += 3.7219) {
    const auto turn = examples::detail::fixed_turn(x);
    worst_turn = std::max({worst_turn, std::fabs(turn.cosine - std::cos(x)), std::fabs(turn.sine - std::sin(x))});
    worst_log = std::max(worst_log, std::fabs(examples::detail::fixed_log(x + 0.001) - std::log(x + 0.001)));
  }
  for (double x = -30; x < 30; x += 0.0137) worst_exp = std::max(worst_exp, std::fabs(examples::detail::fixed_exp(x) / std::exp(x) - 1));
  CHECK(worst_turn < 1e-15);
  CHECK(worst_exp < 1e-15);
  CHECK(worst_log < 1e-14);
}

TEST_CASE("rotary: pairs turn by position * base^(-2i / head_dim)") {
  const rotary_table table(100000, 64, 300);
  CHECK(table.positions() == 300);
  for (const std::size_t position : {0U, 1U, 7U, 299U}) {
    std::vector<float> head(128, 0);
    for (std::size_t i = 0; i < 64; ++i) head[2 * i] = 2;
    table.rotate(head, position);
    for (std::size_t i = 0; i < 64; ++i) {
      const double angle = static_cast<double>(position) * std::pow(100000.0, -2.0 * static_cast<double>(i % 32) / 64);
      CHECK(static_cast<double>(head[2 * i]) == doctest::Approx(2 * std::cos(angle)).epsilon(1e-4));
      CHECK(std::fabs(static_cast<double>(head[2 * i + 1]) - 2 * std::sin(angle)) < 1e-4);
    }
  }
}

TEST_CASE("linear: one fixed order of operations on every instruction set and for every number of rows") {
  constexpr std::size_t k = 192, outputs = 48, most_rows = 37;
  constexpr std::size_t groups = k / kernels::group, tiles = (most_rows + 15) / 16;
  // Full floats, not bf16 values, so that a contracted multiply-add would show.
  const auto x = normal_floats(tiles * k * 16, 1), x_scales = normal_floats(tiles * groups * 16, 2),
             w_scales = normal_floats(outputs * groups, 3);
  std::vector<std::uint16_t> w(outputs * k);
  const auto w_floats = normal_floats(outputs * k, 4);
  std::transform(w_floats.begin(), w_floats.end(), w.begin(), [](float v) { return bf16::from_float(v).bits; });
  for (const bool scaled : {false, true}) {
    std::vector<float> expected(most_rows * outputs);
    for (std::size_t row = 0; row < most_rows; ++row) {
      for (std::size_t o = 0; o < outputs; ++o) {
        float sum = 0, part = 0;
        for (std::size_t i = 0; i < k; ++i) {
          const float product = x[(row / 16 * k + i) * 16 + row % 16] * bf16::from_bits(w[(o / 16 * k + i) * 16 + o % 16]).to_float();
          part = part + product;
          if (scaled && i % kernels::group == kernels::group - 1) {
            const std::size_t g = i / kernels::group;
            const float scale = x_scales[(row / 16 * groups + g) * 16 + row % 16] * w_scales[(o / 16 * groups + g) * 16 + o % 16];
            sum = sum + part * scale;
            part = 0;
          }
        }
        expected[row * outputs + o] = scaled ? sum : part;
      }
    }
    for (const auto isa : instruction_sets()) {
      for (std::size_t rows = 1; rows <= most_rows; ++rows) {
        std::vector<float> out(rows * outputs);
        run(isa, kernels::linear{x.data(), scaled ? x_scales.data() : nullptr, w.data(), scaled ? w_scales.data() : nullptr, rows, k,
                                 outputs, out.data()});
        CAPTURE(rows);
        CHECK(same_bits(std::span<const float>(out), std::span<const float>(expected).first(rows * outputs)));
      }
    }
  }
}

TEST_CASE("quantise: groups, scales and the rotation") {
  using kernels::quantisation;
  constexpr std::size_t k = 128;
  const auto original = normal_floats(k * 16, 7);
  for (const auto kind : {quantisation::none, quantisation::e4m3, quantisation::int8, quantisation::rotated_int8}) {
    std::vector<float> first_tile, first_scales;
    for (const auto isa : instruction_sets()) {
      std::vector<float> tile = original, scales(2 * 16);
      for (std::size_t i = 0; i < k; ++i) tile[i * 16 + 5] = 0;  // a row of zeros
      run(isa, kernels::quantise{kind, tile.data(), scales.data(), k});
      if (first_tile.empty()) {
        first_tile = tile;
        first_scales = scales;
      }
      CHECK(same_bits(tile, first_tile));
      CHECK(same_bits(scales, first_scales));
    }
    if (kind == quantisation::none) {
      for (std::size_t i = 0; i < k * 16; ++i) CHECK((i % 16 == 5 ? 0.0F : original[i]) == first_tile[i]);
      continue;
    }
    for (std::size_t lane = 0; lane < 16; ++lane) {
      for (std::size_t g = 0; g < 2; ++g) {
        double wanted[64], amax = 1e-12;
        for (std::size_t i = 0; i < 64; ++i) {
          wanted[i] = 0;
          if (kind == quantisation::rotated_int8) {  // Sylvester's matrix: sign by the parity of the common bits
            for (std::size_t j = 0; j < 64; ++j) {
              wanted[i] += (std::popcount(i & j) % 2 ? -1.0 : 1.0) / 8 * static_cast<double>(original[(g * 64 + j) * 16 + lane]);
            }
          } else {
            wanted[i] = static_cast<double>(original[(g * 64 + i) * 16 + lane]);
          }
          if (lane == 5) wanted[i] = 0;
          amax = std::max(amax, std::fabs(wanted[i]));
        }
        const double scale = static_cast<double>(first_scales[g * 16 + lane]);
        CHECK(scale == doctest::Approx(amax / (kind == quantisation::e4m3 ? 448 : 127)).epsilon(1e-6));
        for (std::size_t i = 0; i < 64; ++i) {
          const float q = first_tile[(g * 64 + i) * 16 + lane];
          if (kind == quantisation::e4m3) {
            CHECK(q == fp8_e4m3::from_float(q).to_float());
            CHECK(std::fabs(static_cast<double>(q) - wanted[i] / scale) <=
                  std::max(std::fabs(wanted[i] / scale) / 16, std::ldexp(1.0, -10)) * 1.0001);
          } else {
            CHECK(q == std::nearbyint(q));
            CHECK(std::fabs(static_cast<double>(q) - wanted[i] / scale) <= 0.5001);
          }
        }
      }
    }
  }
}

TEST_CASE("norm, gate, residual: against the definition, on every instruction set") {
  constexpr std::size_t k = 192;
  std::vector<float> values = normal_floats(k * 16, 11), gain = normal_floats(k, 12), up = normal_floats(k * 16, 13);
  for (auto* all : {&values, &gain})
    std::transform(all->begin(), all->end(), all->begin(), [](float v) { return rounded(static_cast<double>(v)); });
  std::vector<float> normed, gated;
  std::vector<std::uint16_t> residual;
  for (const auto isa : instruction_sets()) {
    std::vector<float> tile = values, gate = values;
    std::vector<std::uint16_t> stream(values.size());
    std::transform(values.begin(), values.end(), stream.begin(), [](float v) { return bf16::from_float(v).bits; });
    run(isa, kernels::rms_norm{tile.data(), gain.data(), k, epsilon});
    run(isa, kernels::gated_silu{gate.data(), up.data(), gate.size()});
    run(isa, kernels::add_residual{stream.data(), up.data(), stream.size()});
    if (normed.empty()) normed = tile, gated = gate, residual = stream;
    CHECK(same_bits(tile, normed));
    CHECK(same_bits(gate, gated));
    CHECK(same_bits(stream, residual));
  }
  for (std::size_t lane = 0; lane < 16; ++lane) {
    double squares = 0;
    for (std::size_t i = 0; i < k; ++i) squares += std::pow(static_cast<double>(values[i * 16 + lane]), 2);
    const double factor = 1 / std::sqrt(squares / k + static_cast<double>(epsilon));
    for (std::size_t i = 0; i < k; ++i) {
      const double expected = factor * static_cast<double>(values[i * 16 + lane]) * static_cast<double>(gain[i]);
      CHECK(std::fabs(static_cast<double>(normed[i * 16 + lane]) - expected) <= std::fabs(expected) / 127);  // two roundings
    }
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double g = static_cast<double>(values[i]), u = static_cast<double>(up[i]), expected = g / (1 + std::exp(-g)) * u;
    CHECK(std::fabs(static_cast<double>(gated[i]) - expected) <= std::fabs(expected) / 85);  // three roundings
    CHECK(residual[i] == bf16::from_float(values[i] + rounded(u)).bits);
  }
}

TEST_CASE("engine: a row alone, in any block, on any thread and instruction set has the same bits") {
  const temporary_folder folder;
  write_model(folder / "model", model_tensors(), model_metadata());
  const auto ids = some_tokens(150);
  for (const auto kind : {precision::bf16, precision::fp8, precision::int8}) {
    for (const bool rotated : {true, false}) {
      if (!rotated && kind != precision::int8) continue;
      CAPTURE(static_cast<int>(kind));
      engine reference = load_model(folder / "model", {kind, rotated, 1, instruction_set::baseline});
      const results expected = run_model(reference, ids, {ids.size()});
      CHECK(std::isfinite(std::accumulate(expected.logits.begin(), expected.logits.end(), 0.0F)));
      CHECK(run_model(reference, ids, {1}) == expected);
      for (const auto isa : instruction_sets()) {
        for (const unsigned threads : {1U, 3U}) {
          engine model = load_model(folder / "model", {kind, rotated, threads, isa});
          CHECK(run_model(model, ids, {ids.size()}) == expected);
          CHECK(run_model(model, ids, {1}) == expected);
          CHECK(run_model(model, ids, {3, 16, 70, 1, 5}) == expected);
          const auto shorter = std::span(ids).first(67);
          const results part = run_model(model, shorter, {64, 3});
          CHECK(same_bits(std::span<const float>(part.logits), std::span<const float>(expected.logits).first(part.logits.size())));
        }
      }
    }
  }
}

TEST_CASE("engine: the bf16 forward pass against a plain one in double precision") {
  const temporary_folder folder;
  write_model(folder / "model", model_tensors(), model_metadata());
  engine model = load_model(folder / "model", {});
  const auto ids = some_tokens(40);
  const std::size_t tokens = ids.size();
  const results actual = run_model(model, ids, {tokens});

  using matrix = std::vector<std::vector<double>>;
  const auto weights = [&](const std::string& name) {
    for (const auto& spec : model_tensors()) {
      if (spec.name != name) continue;
      const std::size_t columns = spec.shape.back();
      const auto flat = model_weights(spec);
      matrix m(flat.size() / columns, std::vector<double>(columns));
      for (std::size_t i = 0; i < flat.size(); ++i) m[i / columns][i % columns] = static_cast<double>(flat[i].to_float());
      return m;
    }
    return matrix{};
  };
  const auto round = [](double v) { return static_cast<double>(rounded(v)); };
  const auto linear = [&](const matrix& x, const matrix& w) {
    matrix out(x.size(), std::vector<double>(w.size()));
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t o = 0; o < w.size(); ++o) out[t][o] = round(std::inner_product(x[t].begin(), x[t].end(), w[o].begin(), 0.0));
    }
    return out;
  };
  const auto norm = [&](matrix x, const matrix& gain) {
    for (auto& row : x) {
      const double factor =
          1 / std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0) / width + static_cast<double>(epsilon));
      for (std::size_t i = 0; i < width; ++i) row[i] = round(round(row[i] * factor) * gain[0][i]);
    }
    return x;
  };
  const auto rope = [&](matrix x) {
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t i = 0; i < x[t].size(); i += 2) {
        const double angle =
            static_cast<double>(t) * std::pow(static_cast<double>(rope_base), -static_cast<double>(i % head_dim) / head_dim);
        const double a = x[t][i], b = x[t][i + 1];
        x[t][i] = round(a * std::cos(angle) - b * std::sin(angle));
        x[t][i + 1] = round(a * std::sin(angle) + b * std::cos(angle));
      }
    }
    return x;
  };
  const auto compare = [&](const char* what, const matrix& expected, std::span<const bf16> got) {
    double error = 0, power = 0;
    for (std::size_t t = 0; t < expected.size(); ++t) {
      for (std::size_t i = 0; i < expected[t].size(); ++i) {
        error += std::pow(expected[t][i] - static_cast<double>(got[t * expected[t].size() + i].to_float()), 2);
        power += std::pow(expected[t][i], 2);
      }
    }
    CAPTURE(what);
    CHECK(std::sqrt(error / power) < 0.004);  // a few values round the other way
  };

  matrix h;
  const matrix embedding = weights("token_embd.weight");
  for (const auto id : ids) h.push_back(embedding[id]);
  for (std::size_t l = 0; l < layers; ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    const matrix x = norm(h, weights(block + "attn_norm.weight"));
    const matrix q = rope(linear(x, weights(block + "attn_q.weight"))), k = rope(linear(x, weights(block + "attn_k.weight")));
    const matrix v = linear(x, weights(block + "attn_v.weight"));
    compare("keys", k, actual.keys[l]);
    compare("values", v, actual.values[l]);
    matrix attended(tokens, std::vector<double>(width));
    for (std::size_t t = 0; t < tokens; ++t) {
      for (std::size_t head = 0; head < heads; ++head) {
        const std::size_t at = head * head_dim, kv_at = head / (heads / kv_heads) * head_dim;
        std::vector<double> p(t + 1);
        double sum = 0;
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t d = 0; d < head_dim; ++d) p[s] += q[t][at + d] * k[s][kv_at + d];
          sum += p[s] = std::exp(p[s] / std::sqrt(static_cast<double>(head_dim)));
        }
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t d = 0; d < head_dim; ++d) attended[t][at + d] += round(p[s] / sum) * v[s][kv_at + d];
        }
        for (std::size_t d = 0; d < head_dim; ++d) attended[t][at + d] = round(attended[t][at + d]);
      }
    }
    const auto add = [&](const matrix& more) {
      for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t i = 0; i < width; ++i) h[t][i] = round(h[t][i] + more[t][i]);
      }
    };
    add(linear(attended, weights(block + "attn_output.weight")));
    const matrix y = norm(h, weights(block + "ffn_norm.weight"));
    matrix gate = linear(y, weights(block + "ffn_gate.weight"));
    const matrix up = linear(y, weights(block + "ffn_up.weight"));
    for (std::size_t t = 0; t < tokens; ++t) {
      for (std::size_t i = 0; i < hidden_width; ++i) gate[t][i] = round(round(gate[t][i] / (1 + std::exp(-gate[t][i]))) * up[t][i]);
    }
    add(linear(gate, weights(block + "ffn_down.weight")));
  }
  compare("hidden", h, actual.hidden);
}

TEST_CASE("engine: quantised linear layers by their definition") {
  const temporary_folder folder;
  write_model(folder / "model", model_tensors(), model_metadata());
  const auto ids = some_tokens(16);
  const std::size_t outputs = kv_heads * head_dim;
  std::vector<bf16> weights, gain;
  for (const auto& spec : model_tensors()) {
    if (spec.name == "blk.0.attn_v.weight") weights = model_weights(spec);
    if (spec.name == "blk.0.attn_norm.weight") gain = model_weights(spec);
  }
  // Every 64 numbers, rotated if asked; the quotient by the scale is float arithmetic, as in the engine, so that ties agree.
  const auto rotated = [](std::vector<float> v) {
    std::vector<float> out(v.size());
    for (std::size_t i = 0; i < v.size(); ++i) {
      double sum = 0;
      for (std::size_t j = 0; j < 64; ++j)
        sum += (std::popcount(i % 64 & j) % 2 ? -1.0 : 1.0) / 8 * static_cast<double>(v[i / 64 * 64 + j]);
      out[i] = static_cast<float>(sum);
    }
    return out;
  };
  const auto grouped = [](std::vector<float> v, bool e4m3) {
    for (std::size_t g = 0; g < v.size(); g += 64) {
      float amax = 0;
      for (std::size_t i = g; i < g + 64; ++i) amax = std::max(amax, std::fabs(v[i]));
      const float scale = amax / (e4m3 ? 448.0F : 127.0F);
      for (std::size_t i = g; i < g + 64; ++i)
        v[i] = (e4m3 ? fp8_e4m3::from_float(v[i] / scale).to_float() : std::nearbyint(v[i] / scale)) * scale;
    }
    return v;
  };
  for (const auto& choice : {std::pair{precision::fp8, false}, {precision::int8, false}, {precision::int8, true}}) {
    const precision kind = choice.first;
    const bool turn = choice.second;
    engine model = load_model(folder / "model", {kind, turn});
    const auto hidden = model.embed(ids);
    REQUIRE(hidden);
    key_value_sums sums;
    model.keys_values(0, *hidden, sums);

    std::vector<float> w(weights.size());
    std::transform(weights.begin(), weights.end(), w.begin(), [](bf16 v) { return v.to_float(); });
    if (kind == precision::fp8) {  // one block of 64 x 128
      const float amax = std::fabs(*std::max_element(w.begin(), w.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
      const float scale = amax / 448;
      for (float& v : w) v = fp8_e4m3::from_float(v / scale).to_float() * scale;
    } else {
      w = grouped(turn ? rotated(w) : w, false);
    }
    double squares = 0, power = 0;
    for (std::size_t t = 0; t < ids.size(); ++t) {
      std::vector<float> tile(width * 16), gains(width), x(width);
      for (std::size_t i = 0; i < width; ++i) {
        tile[i * 16] = (*hidden)[t * width + i].to_float();
        gains[i] = gain[i].to_float();
      }
      run(instruction_set::baseline, kernels::rms_norm{tile.data(), gains.data(), width, epsilon});
      for (std::size_t i = 0; i < width; ++i) x[i] = tile[i * 16];
      x = grouped(turn ? rotated(x) : x, kind == precision::fp8);
      for (std::size_t o = 0; o < outputs; ++o) {
        double expected = 0;
        for (std::size_t i = 0; i < width; ++i) expected += static_cast<double>(x[i]) * static_cast<double>(w[o * width + i]);
        squares += std::pow(expected - static_cast<double>(sums.values[t * outputs + o]), 2);
        power += expected * expected;
      }
    }
    CAPTURE(static_cast<int>(kind));
    CAPTURE(turn);
    CHECK(std::sqrt(squares / power) < (turn ? 1e-3 : 1e-6));  // a rotated number at a tie may go either way
  }
}

TEST_CASE("engine: quantised copies stay near the target, the rotation brings int8 nearer") {
  const temporary_folder folder;
  write_model(folder / "model", model_tensors(), model_metadata());
  const auto ids = some_tokens(64);
  const auto run_with = [&](const engine_options& options) {
    engine model = load_model(folder / "model", options);
    return run_model(model, ids, {ids.size()});
  };
  const results target = run_with({});
  const auto error = [&](const engine_options& options) {
    const results copy = run_with(options);
    double squares = 0, power = 0;
    for (std::size_t i = 0; i < target.values[1].size(); ++i) {
      const double v = static_cast<double>(target.values[1][i].to_float());
      squares += std::pow(v - static_cast<double>(copy.values[1][i].to_float()), 2);
      power += v * v;
    }
    return std::sqrt(squares / power);
  };
  const double fp8 = error({precision::fp8}), plain = error({precision::int8, false}), rotated = error({precision::int8, true});
  MESSAGE("relative error of layer 1's values: fp8 ", fp8, ", int8 ", plain, ", int8 rotated ", rotated);
  CHECK(fp8 < 0.12);
  CHECK(plain < fp8);
  CHECK(rotated < plain);
  CHECK(rotated > 0);
}

TEST_CASE("engine: attention uses what the cache holds") {
  const temporary_folder folder;
  write_model(folder / "model", model_tensors(), model_metadata());
  engine model = load_model(folder / "model", {});
  const auto ids = some_tokens(20);
  auto cache = model.make_cache(20);
  REQUIRE(cache);
  const auto hidden = model.embed(ids);
  REQUIRE(hidden);
  key_value_sums sums;
  model.keys_values(0, *hidden, sums);
  cache->write(0, 0, sums);
  std::vector<bf16> before = *hidden, after = *hidden, restored = *hidden;
  model.rest(0, before, 0, *cache);

  std::vector<bf16> keys(cache->keys(0, 20).begin(), cache->keys(0, 20).end()),
      values(cache->values(0, 20).begin(), cache->values(0, 20).end());
  const std::size_t row = kv_heads * head_dim;
  std::vector<bf16> changed(row, bf16::from_float(2.5F));
  cache->write(0, 10, std::span(keys).subspan(10 * row, row), changed);
  model.rest(0, after, 0, *cache);
  CHECK(same_bits(std::span<const bf16>(after).first(10 * width), std::span<const bf16>(before).first(10 * width)));
  for (std::size_t t = 10; t < 20; ++t) {
    CHECK_FALSE(same_bits(std::span<const bf16>(after).subspan(t * width, width), std::span<const bf16>(before).subspan(t * width, width)));
  }
  cache->write(0, 0, keys, values);
  model.rest(0, restored, 0, *cache);
  CHECK(same_bits(restored, before));
}

TEST_CASE("engine: no tokens, unknown tokens, a full cache") {
  const temporary_folder folder;
  write_model(folder / "model", model_tensors(), model_metadata());
  engine model = load_model(folder / "model", {});
  auto cache = model.make_cache(4), empty = model.make_cache(0);
  REQUIRE(cache);
  REQUIRE(empty);
  const auto none = model.forward({}, 0, *empty);
  REQUIRE(none);
  CHECK(none->empty());
  const std::vector<std::uint32_t> unknown{1, vocabulary}, five(5, 1);
  const auto failed = model.forward(unknown, 0, *cache);
  REQUIRE_FALSE(failed);
  CHECK(failed.error().text.find("token 1 has id 48") != std::string::npos);
  CHECK_FALSE(model.forward(five, 0, *cache));
  CHECK_FALSE(model.forward(std::span(five).first(1), 4, *cache));
  CHECK_FALSE(model.forward(std::span(five).first(1), std::numeric_limits<std::size_t>::max(), *cache));
  CHECK(model.forward(std::span(five).first(1), 3, *cache));
}

TEST_CASE("engine: files that are no usable model") {
  const temporary_folder folder;
  const auto refused = [&](const std::string& part) {
    const auto loaded = engine::load(folder / "model");
    REQUIRE_FALSE(loaded);
    CHECK_MESSAGE(loaded.error().text.find(part) != std::string::npos, loaded.error().text);
  };
  refused("cannot open");
  for (const auto& [key, value] :
       {std::pair{"layers", "x"}, {"heads", "0"}, {"kv_heads", "2.5"}, {"rope_base", "-1"}, {"norm_epsilon", "nan"}}) {
    auto metadata = model_metadata();
    metadata[key] = value;
    write_model(folder / "model", model_tensors(), metadata);
    refused(std::string("'") + key + "'");
    metadata.erase(key);
    write_model(folder / "model", model_tensors(), metadata);
    refused(std::string("'") + key + "'");
  }
  auto three_heads = model_metadata();
  three_heads["heads"] = "3";
  write_model(folder / "model", model_tensors(), three_heads);
  refused("sizes that this engine does not handle");
  auto more_layers = model_metadata();
  more_layers["layers"] = "3";
  write_model(folder / "model", model_tensors(), more_layers);
  refused("blk.2.attn_norm.weight is missing");
  for (const auto& spec : model_tensors()) {
    auto specs = model_tensors();
    std::erase_if(specs, [&](const auto& other) { return other.name == spec.name; });
    write_model(folder / "model", specs, model_metadata());
    refused(spec.name);
    if (spec.name == "blk.0.ffn_gate.weight" || spec.name == "token_embd.weight") continue;  // these define the sizes
    specs.push_back({spec.name, {7}});
    write_model(folder / "model", specs, model_metadata());
    refused(spec.name + " is BF16 [7], not");
  }
  auto untied = model_tensors();
  untied.push_back({"output.weight", {vocabulary, width}});
  write_model(folder / "model", untied, model_metadata());
  refused("tied");
}

TEST_CASE("cache files: what each format stores") {
  const temporary_folder folder;
  write_model(folder / "model", model_tensors(), model_metadata(), "blk.1.attn_v.weight");
  engine model = load_model(folder / "model", {});
  const auto ids = some_tokens(33);
  auto cache = model.make_cache(ids.size());
  auto hidden = model.embed(ids);
  REQUIRE(cache);
  REQUIRE(hidden);
  const std::vector<dtype> formats{dtype::bf16, dtype::f16, dtype::f8_e4m3, dtype::f8_e5m2};
  std::vector<cache_writer> writers;
  for (const dtype format : formats) {
    auto writer = cache_writer::create(folder / std::string(dtype_name(format)), model.shape(), ids.size(), format);
    REQUIRE(writer);
    writers.push_back(std::move(*writer));
  }
  CHECK_FALSE(cache_writer::create(folder / "x", model.shape(), ids.size(), dtype::f32));
  std::vector<key_value_sums> sums(layers);
  for (std::size_t l = 0; l < layers; ++l) {
    model.keys_values(l, *hidden, sums[l]);
    cache->write(l, 0, sums[l]);
    for (auto& writer : writers) writer.write(l, sums[l], *cache);
    model.rest(l, *hidden, 0, *cache);
  }
  for (auto& writer : writers) REQUIRE(writer.commit());

  for (std::size_t f = 0; f < formats.size(); ++f) {
    const auto file = safetensors_file::open(folder / std::string(dtype_name(formats[f])));
    REQUIRE(file);
    CHECK(file->tensors().size() == (f < 2 ? 2 : 4) * layers);
    for (std::size_t l = 0; l < layers; ++l) {
      for (const bool is_key : {true, false}) {
        const std::string name = "layers." + std::to_string(l) + (is_key ? ".k" : ".v");
        const auto exact = is_key ? cache->keys(l, ids.size()) : cache->values(l, ids.size());
        const tensor* const t = file->find(name);
        REQUIRE(t != nullptr);
        CHECK(t->type == formats[f]);
        CHECK(t->shape == std::vector<std::uint64_t>{33, kv_heads, head_dim});
        if (formats[f] == dtype::bf16) {
          CHECK(same_bits(t->as<bf16>(), exact));
        } else if (formats[f] == dtype::f16) {
          std::vector<float> floats = is_key ? sums[l].keys : sums[l].values;
          std::vector<fp16> expected;
          for (std::size_t i = 0; i < ids.size() && is_key; ++i) {
            cache->rotary().rotate(std::span(floats).subspan(i * kv_heads * head_dim, kv_heads * head_dim), i);
          }
          for (const float v : floats) expected.push_back(fp16::from_float(v));
          CHECK(same_bits(t->as<fp16>(), std::span<const fp16>(expected)));
        } else {
          const tensor* const stored = file->find(name + "_scale");
          REQUIRE(stored != nullptr);
          CHECK(stored->shape == std::vector<std::uint64_t>{1});
          const float scale = stored->as<float>()[0], largest = formats[f] == dtype::f8_e4m3 ? 448.0F : 57344.0F;
          float amax = 0;
          for (const bf16 v : exact) amax = std::max(amax, std::fabs(v.to_float()));
          CHECK(scale == (amax > 0 ? amax / largest : 1.0F));
          if (!is_key && l == 1) CHECK(scale == 1.0F);
          std::size_t wrong = 0;
          for (std::size_t i = 0; i < exact.size(); ++i) {
            const double step = formats[f] == dtype::f8_e4m3 ? 1.0 / 16 : 1.0 / 8,
                         smallest = std::ldexp(1.0, formats[f] == dtype::f8_e4m3 ? -10 : -17);
            const double value = static_cast<double>(exact[i].to_float()) / static_cast<double>(scale);
            const double got =
                static_cast<double>(formats[f] == dtype::f8_e4m3 ? t->as<fp8_e4m3>()[i].to_float() : t->as<fp8_e5m2>()[i].to_float());
            wrong += !(std::fabs(got - value) <= std::max(std::fabs(value) * step, smallest) * 1.00001);
          }
          CHECK(wrong == 0);
        }
      }
    }
  }
}

TEST_CASE("token files") {
  const temporary_folder folder;
  const auto with = [&](const std::string& text) {
    std::ofstream(folder / "t") << text;
    return read_tokens(folder / "t");
  };
  CHECK_FALSE(read_tokens(folder / "missing"));
  CHECK(with("")->empty());
  CHECK(*with("1 22\n\n333\t4\n") == std::vector<std::uint32_t>{1, 22, 333, 4});
  for (const char* const bad : {"1 x", "1 -2", "1 2.5", "1 4294967296", "1 2,3", "1 0x10"}) {
    const auto ids = with(bad);
    REQUIRE_FALSE(ids);
    CHECK(ids.error().text.find("word 2") != std::string::npos);
  }
}

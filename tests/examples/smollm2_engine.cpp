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

#include "small_model.hpp"
#include "temporary_folder.hpp"

using namespace kvexact;
using namespace kvexact::examples;
using namespace kvexact::examples::small_model;

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

float rounded(double value) { return bf16::from_float(static_cast<float>(value)).to_float(); }

engine load_model(const std::string& path, const engine_options& options) {
  auto loaded = engine::load(path, options);
  REQUIRE_MESSAGE(loaded, (loaded ? "" : loaded.error().text));
  return std::move(*loaded);
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
  const std::int32_t expected[16] = {0, 2, 2, 0, -2, 126, 128, -126, 0, -3, 4, 0, 0, 1000, 1000000, -7};
  std::int32_t out[16];
  lanes::f32 v;
  lanes::i32 integers;
  lanes::load(v, in);
  lanes::nearest_integer(integers, v);
  lanes::store(integers, out);
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
  constexpr std::size_t groups = k / kernels::block, tiles = (most_rows + 15) / 16;
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
          if (scaled && i % kernels::block == kernels::block - 1) {
            const std::size_t g = i / kernels::block;
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

TEST_CASE("integer linear: exact sums of groups, then one fixed order, on every instruction set and for every number of rows") {
  constexpr std::size_t k = 192, outputs = 48, most_rows = 37, tiles = (most_rows + 15) / 16;
  std::mt19937 random(6);
  const auto integers = [&](std::size_t n) {
    std::vector<int> values(n);
    for (int& value : values) value = static_cast<int>(random() % 255) - 127;
    return values;
  };
  auto x = integers(tiles * 16 * k), w = integers(outputs * k);
  std::fill_n(x.begin() + 3 * k, k, 127);  // a row and an output of the largest numbers, so that the largest sum occurs
  std::fill_n(w.begin() + 5 * k, k, -127);
  const auto pairs = [&](const std::vector<int>& rows) {
    std::vector<std::int32_t> packed(rows.size() / 2);
    for (std::size_t row = 0; row < rows.size() / k; ++row) {
      for (std::size_t i = 0; i < k; i += 2) {
        packed[(row / 16 * k + i) / 2 * 16 + row % 16] = static_cast<std::int32_t>(static_cast<std::uint32_t>(rows[row * k + i] & 0xffff) |
                                                                                   static_cast<std::uint32_t>(rows[row * k + i + 1]) << 16);
      }
    }
    return packed;
  };
  const auto x_pairs = pairs(x), w_pairs = pairs(w);
  for (const std::size_t group : {64U, 32U}) {
    const std::size_t groups = k / group;
    const auto x_scales = normal_floats(tiles * groups * 16, 2), w_scales = normal_floats(outputs * groups, 3);
    std::vector<float> expected(most_rows * outputs);
    for (std::size_t row = 0; row < most_rows; ++row) {
      for (std::size_t o = 0; o < outputs; ++o) {
        float sum = 0;
        for (std::size_t g = 0; g < groups; ++g) {
          int dot = 0;
          for (std::size_t i = g * group; i < (g + 1) * group; ++i) dot += x[row * k + i] * w[o * k + i];
          const float scale = x_scales[(row / 16 * groups + g) * 16 + row % 16] * w_scales[(o / 16 * groups + g) * 16 + o % 16];
          const float term = static_cast<float>(dot) * scale;
          sum = sum + term;
        }
        expected[row * outputs + o] = sum;
      }
    }
    for (const auto isa : instruction_sets()) {
      for (std::size_t rows = 1; rows <= most_rows; ++rows) {
        std::vector<float> out(rows * outputs);
        run(isa,
            kernels::integer_linear{x_pairs.data(), x_scales.data(), w_pairs.data(), w_scales.data(), rows, k, outputs, group, out.data()});
        CAPTURE(rows);
        CAPTURE(static_cast<int>(isa));
        CHECK(same_bits(std::span<const float>(out), std::span<const float>(expected).first(rows * outputs)));
      }
    }
  }
}

TEST_CASE("quantise: groups, scales and the rotation") {
  constexpr std::size_t k = 128;
  auto original = normal_floats(k * 16, 7);
  for (std::size_t i = 0; i < k; ++i) original[i * 16 + 5] = 0;  // a row of zeros
  struct scheme {
    bool e4m3, rotated;
    std::size_t group;
  };
  for (const scheme& choice : {scheme{true, false, 64}, {false, false, 64}, {false, true, 64}, {false, false, 32}, {false, true, 32}}) {
    const bool e4m3 = choice.e4m3, rotated = choice.rotated;
    const std::size_t group = choice.group;
    CAPTURE(rotated);
    CAPTURE(group);
    std::vector<float> quantised, scales;
    for (const auto isa : instruction_sets()) {
      std::vector<float> tile = original, their_scales(k / group * 16);
      if (e4m3) {
        run(isa, kernels::quantise_e4m3{tile.data(), their_scales.data(), k});
      } else {
        std::vector<std::int32_t> pairs(k / 2 * 16);
        run(isa, kernels::quantise_int8{tile.data(), pairs.data(), their_scales.data(), k, group, rotated});
        for (std::size_t i = 0; i < k * 16; ++i) {
          const std::int32_t pair = pairs[i / 32 * 16 + i % 16];
          tile[i] = static_cast<float>(i / 16 % 2 == 0 ? static_cast<std::int16_t>(pair) : pair >> 16);
        }
      }
      if (quantised.empty()) quantised = tile, scales = their_scales;
      CHECK(same_bits(tile, quantised));
      CHECK(same_bits(their_scales, scales));
    }
    for (std::size_t lane = 0; lane < 16; ++lane) {
      std::vector<double> wanted(k);
      for (std::size_t i = 0; i < k; ++i) {
        if (rotated) {  // Sylvester's matrix: sign by the parity of the common bits
          for (std::size_t j = 0; j < 64; ++j) {
            wanted[i] += (std::popcount(i % 64 & j) % 2 ? -1.0 : 1.0) / 8 * static_cast<double>(original[(i / 64 * 64 + j) * 16 + lane]);
          }
        } else {
          wanted[i] = static_cast<double>(original[i * 16 + lane]);
        }
      }
      for (std::size_t first = 0; first < k; first += group) {
        double amax = 1e-12;
        for (std::size_t i = first; i < first + group; ++i) amax = std::max(amax, std::fabs(wanted[i]));
        const double scale = static_cast<double>(scales[first / group * 16 + lane]);
        CHECK(scale == doctest::Approx(amax / (e4m3 ? 448 : 127)).epsilon(1e-6));
        for (std::size_t i = first; i < first + group; ++i) {
          const float q = quantised[i * 16 + lane];
          const double error = std::fabs(static_cast<double>(q) - wanted[i] / scale);
          if (e4m3) {
            CHECK(q == fp8_e4m3::from_float(q).to_float());
            CHECK(error <= std::max(std::fabs(wanted[i] / scale) / 16, std::ldexp(1.0, -10)) * 1.0001);
          } else {
            CHECK(error <= 0.5001);
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

TEST_CASE("attention: a window gives the bits of full attention over the seen keys alone, and reads no tile without one") {
  constexpr std::size_t dim = 32, keys = 117, tiles = (keys + 15) / 16, heads_here = 3;
  const auto round_all = [](std::vector<float> v) {
    for (float& value : v) value = rounded(static_cast<double>(value));
    return v;
  };
  const auto key_rows = round_all(normal_floats(tiles * 16 * dim, 21)), value_rows = round_all(normal_floats(tiles * 16 * dim, 22)),
             query_rows = round_all(normal_floats(16 * dim, 23));
  const auto bits = [](float v) { return bf16::from_float(v).bits; };
  std::vector<std::uint16_t> queries(dim * 16);
  for (std::size_t i = 0; i < queries.size(); ++i) queries[i] = bits(query_rows[i % 16 * dim + i / 16]);
  // Attention over the rows that `seen` names, in that order.
  const auto attend = [&](instruction_set isa, const std::vector<std::size_t>& seen, std::size_t count, const std::vector<std::int32_t>& at,
                          std::size_t sinks, std::size_t newest) {
    std::vector<float> key_tiles((seen.size() + 15) / 16 * 16 * dim), scratch((seen.size() + 15) / 16 * 256), out(16 * dim);
    std::vector<std::uint16_t> values(seen.size() * dim);
    for (std::size_t i = 0; i < seen.size(); ++i) {
      for (std::size_t d = 0; d < dim; ++d) {
        const bool readable = seen[i] < tiles * 16;
        key_tiles[(i / 16 * dim + d) * 16 + i % 16] = readable ? key_rows[seen[i] * dim + d] : std::numeric_limits<float>::quiet_NaN();
        values[i * dim + d] = readable ? bits(value_rows[seen[i] * dim + d]) : bits(std::numeric_limits<float>::quiet_NaN());
      }
    }
    run(isa, kernels::attention{queries.data(), count, at.data(), sinks, newest, key_tiles.data(), values.data(), dim, dim, scratch.data(),
                                out.data()});
    return out;
  };
  std::vector<std::size_t> all(tiles * 16);
  std::iota(all.begin(), all.end(), std::size_t{0});
  for (const attention_window& window :
       {attention_window{0, 1}, {4, 16}, {3, 20}, {20, 5}, {17, 33}, {60, 10}, {0, 117}, {4, 5000}, {1000, 3}, {7, 0}}) {
    const std::size_t sinks = window.sinks, newest = window.newest;
    for (const std::size_t first : {0U, 14U, 16U, 68U, 112U}) {
      CAPTURE(sinks);
      CAPTURE(newest);
      CAPTURE(first);
      std::vector<std::int32_t> at(16);
      for (std::size_t lane = 0; lane < 16; ++lane)
        at[lane] = static_cast<std::int32_t>(first + std::min<std::size_t>(lane / heads_here, 4));
      const auto seen = [&](std::size_t position, std::size_t key) {
        return key <= position && (newest == 0 || key < sinks || key + newest > position);
      };
      std::vector<std::size_t> poisoned = all;  // tiles that no query sees
      poisoned.resize(first + 5);
      for (std::size_t tile = 0; tile < poisoned.size(); tile += 16) {
        const std::size_t end = std::min(tile + 16, poisoned.size());
        bool used = false;
        for (std::size_t key = tile; key < end; ++key) {
          for (std::size_t token = 0; token < 5; ++token) used = used || seen(first + token, key);
        }
        if (!used)
          std::fill(poisoned.begin() + static_cast<std::ptrdiff_t>(tile), poisoned.begin() + static_cast<std::ptrdiff_t>(end), 1000);
      }
      for (const auto isa : instruction_sets()) {
        const auto windowed = attend(isa, poisoned, 15, at, sinks, newest);
        for (std::size_t lane = 0; lane < 15; ++lane) {
          std::vector<std::size_t> alone;
          for (std::size_t key = 0; key < keys; ++key) {
            if (seen(first + lane / heads_here, key)) alone.push_back(key);
          }
          const std::vector<std::int32_t> last(16, static_cast<std::int32_t>(alone.size() - 1));
          const auto expected = attend(isa, alone, 15, last, 0, 0);
          CHECK(same_bits(std::span<const float>(windowed).subspan(lane * dim, dim),
                          std::span<const float>(expected).subspan(lane * dim, dim)));
        }
      }
    }
  }
}

TEST_CASE("engine: a row alone, in any block, on any thread and instruction set has the same bits") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
  const auto ids = some_tokens(150);
  for (engine_options options : {engine_options{},
                                 {.precision = precision::fp8},
                                 {.precision = precision::int8},
                                 {.precision = precision::int8, .rotated = false, .group = 32},
                                 {.window = {3, 1}},
                                 {.precision = precision::int8, .exact_projections = true},
                                 {.precision = precision::int8, .exact_layers = 1, .window = {5, 20}}}) {
    CAPTURE(static_cast<int>(options.precision));
    CAPTURE(options.window.newest);
    options.threads = 1;
    options.isa = instruction_set::baseline;
    engine reference = load_model(folder / "model", options);
    const results expected = run_model(reference, ids, {ids.size()});
    CHECK(std::isfinite(std::accumulate(expected.logits.begin(), expected.logits.end(), 0.0F)));
    CHECK(run_model(reference, ids, {1}) == expected);
    for (const auto isa : instruction_sets()) {
      for (const unsigned threads : {1U, 3U}) {
        options.threads = threads;
        options.isa = isa;
        engine model = load_model(folder / "model", options);
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

TEST_CASE("engine: the bf16 forward pass against a plain one in double precision") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
  attention_window window;
  SUBCASE("full attention") {}
  SUBCASE("a window") { window = {2, 7}; }
  engine model = load_model(folder / "model", {.window = window});
  const auto ids = some_tokens(60);
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
    CHECK(std::sqrt(error / power) < 0.01);  // a few values round the other way
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
          const bool seen = window.newest == 0 || s < window.sinks || s + window.newest > t;
          sum += p[s] = seen ? std::exp(p[s] / std::sqrt(static_cast<double>(head_dim))) : 0;
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

TEST_CASE("engine: a window that holds the context changes nothing, a smaller one does") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
  const auto ids = some_tokens(80);
  const auto run_with = [&](const engine_options& options) {
    engine model = load_model(folder / "model", options);
    return run_model(model, ids, {50, 30});
  };
  for (const auto kind : {precision::bf16, precision::int8}) {
    const results full = run_with({.precision = kind});
    CHECK(run_with({.precision = kind, .window = {4, 80}}) == full);
    CHECK(run_with({.precision = kind, .window = {79, 1}}) == full);
    CHECK_FALSE(run_with({.precision = kind, .window = {0, 79}}) == full);
    CHECK_FALSE(run_with({.precision = kind, .window = {78, 1}}) == full);
  }
}

TEST_CASE("engine: its exact layers are the target's, whatever the others are") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
  const auto ids = some_tokens(70);
  engine target = load_model(folder / "model", {});
  const results expected = run_model(target, ids, {ids.size()});
  for (std::size_t layer = 0; layer <= layers; ++layer) CHECK(target.is_exact(layer) == (layer < layers));
  for (const auto kind : {precision::bf16, precision::fp8, precision::int8}) {
    for (const std::size_t exact : {0U, 1U, 2U, 3U, 9U}) {
      CAPTURE(exact);
      engine model = load_model(folder / "model", {.precision = kind, .exact_layers = exact, .window = {1, 5}});
      const results actual = run_model(model, ids, {ids.size()});
      for (std::size_t layer = 0; layer < layers; ++layer) {
        CAPTURE(layer);
        CHECK(model.is_exact(layer) == (layer < exact));
        const bool equal = same_bits(actual.keys[layer], expected.keys[layer]) && same_bits(actual.values[layer], expected.values[layer]);
        // An inexact first layer still has the target's input, so with the target's weights it has its keys and values, too.
        CHECK(equal == (layer < exact || (layer == exact && kind == precision::bf16)));
      }
      CHECK((actual == expected) == (exact >= layers));
    }
  }
}

TEST_CASE("engine: exact projections are the target's, the rest is not") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
  engine target = load_model(folder / "model", {});
  const auto hidden = target.embed(some_tokens(20));
  REQUIRE(hidden);
  key_value_sums expected, actual;
  for (const auto kind : {precision::fp8, precision::int8}) {
    for (const bool exact : {false, true}) {
      engine model = load_model(folder / "model", {.precision = kind, .exact_projections = exact});
      for (std::size_t layer = 0; layer < layers; ++layer) {
        target.keys_values(layer, *hidden, expected);
        model.keys_values(layer, *hidden, actual);
        CHECK(same_bits(actual.keys, expected.keys) == exact);
        CHECK(same_bits(actual.values, expected.values) == exact);
        CHECK_FALSE(model.is_exact(layer));
      }
      auto cache = model.make_cache(20);
      REQUIRE(cache);
      cache->write(0, 0, actual);
      std::vector<bf16> ours = *hidden, theirs = *hidden;
      model.rest(0, ours, 0, *cache);
      target.rest(0, theirs, 0, *cache);
      CHECK_FALSE(same_bits(ours, theirs));
    }
  }
}

TEST_CASE("engine: quantised linear layers by their definition") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
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
  const auto grouped = [](std::vector<float> v, std::size_t group, bool e4m3) {
    for (std::size_t g = 0; g < v.size(); g += group) {
      float amax = 0;
      for (std::size_t i = g; i < g + group; ++i) amax = std::max(amax, std::fabs(v[i]));
      const float scale = amax / (e4m3 ? 448.0F : 127.0F);
      for (std::size_t i = g; i < g + group; ++i)
        v[i] = (e4m3 ? fp8_e4m3::from_float(v[i] / scale).to_float() : std::nearbyint(v[i] / scale)) * scale;
    }
    return v;
  };
  struct scheme {
    precision kind;
    bool turn;
    std::size_t group;
  };
  for (const scheme& choice : {scheme{precision::fp8, false, 64},
                               {precision::int8, false, 64},
                               {precision::int8, true, 64},
                               {precision::int8, false, 32},
                               {precision::int8, true, 32}}) {
    const precision kind = choice.kind;
    const bool turn = choice.turn;
    const std::size_t group = choice.group;
    engine model = load_model(folder / "model", {.precision = kind, .rotated = turn, .group = group});
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
      w = grouped(turn ? rotated(w) : w, group, false);
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
      x = grouped(turn ? rotated(x) : x, group, kind == precision::fp8);
      for (std::size_t o = 0; o < outputs; ++o) {
        double expected = 0;
        for (std::size_t i = 0; i < width; ++i) expected += static_cast<double>(x[i]) * static_cast<double>(w[o * width + i]);
        squares += std::pow(expected - static_cast<double>(sums.values[t * outputs + o]), 2);
        power += expected * expected;
      }
    }
    CAPTURE(static_cast<int>(kind));
    CAPTURE(turn);
    CAPTURE(group);
    CHECK(std::sqrt(squares / power) < (turn ? 1e-3 : 1e-6));  // a rotated number at a tie may go either way
  }
}

TEST_CASE("engine: quantised copies stay near the target, the rotation brings int8 nearer") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
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
  REQUIRE(write_model(folder / "model"));
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

namespace {

/// Attention in double precision over every token so far.
class plain_token_cache final : public token_cache {
 public:
  explicit plain_token_cache(const model_shape& shape) : shape_(shape), keys_(shape.layers), values_(shape.layers) {}

  status append(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) override {
    if (refuse) return failure{error_code::out_of_memory, "refused"};
    keys_[layer].insert(keys_[layer].end(), keys.begin(), keys.end());
    values_[layer].insert(values_[layer].end(), values.begin(), values.end());
    return done;
  }
  status attend(std::size_t layer, std::span<const float> queries, std::span<float> out) override {
    const std::size_t dim = shape_.head_dim, row = shape_.kv_width(), tokens = keys_[layer].size() / row;
    for (std::size_t head = 0; head < shape_.heads; ++head) {
      const std::size_t own = head / (shape_.heads / shape_.kv_heads) * dim;
      std::vector<double> weights(tokens), sums(dim);
      double mass = 0;
      for (std::size_t t = 0; t < tokens; ++t) {
        double score = 0;
        for (std::size_t d = 0; d < dim; ++d)
          score += static_cast<double>(queries[head * dim + d]) * static_cast<double>(keys_[layer][t * row + own + d].to_float());
        weights[t] = std::exp(score / std::sqrt(static_cast<double>(dim)));
        mass += weights[t];
      }
      for (std::size_t t = 0; t < tokens; ++t)
        for (std::size_t d = 0; d < dim; ++d) sums[d] += weights[t] / mass * static_cast<double>(values_[layer][t * row + own + d].to_float());
      for (std::size_t d = 0; d < dim; ++d) out[head * dim + d] = static_cast<float>(sums[d]);
    }
    return done;
  }
  [[nodiscard]] const std::vector<bf16>& keys(std::size_t layer) const { return keys_[layer]; }

  bool refuse = false;

 private:
  model_shape shape_;
  std::vector<std::vector<bf16>> keys_, values_;
};

}  // namespace

TEST_CASE("engine: a token at a time with the cache outside is the forward pass but for rounding") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
  engine model = load_model(folder / "model", {});
  const auto ids = some_tokens(30);
  auto cache = model.make_cache(30);
  REQUIRE(cache);
  const auto expected = model.forward(ids, 0, *cache);
  REQUIRE(expected);
  plain_token_cache outside(model.shape());
  double error = 0, squares = 0;
  for (std::size_t t = 0; t < ids.size(); ++t) {
    const auto hidden = model.step(ids[t], t, cache->rotary(), outside);
    REQUIRE(hidden);
    for (std::size_t c = 0; c < width; ++c) {
      const double value = (*expected)[t * width + c].to_float();
      error += std::pow((*hidden)[c].to_float() - value, 2);
      squares += value * value;
    }
  }
  CHECK(error < 1e-3 * squares);
  // The first layer's keys do not depend on attention.
  CHECK(same_bits(std::span<const bf16>(outside.keys(0)), cache->keys(0, 30)));

  outside.refuse = true;
  CHECK(model.step(ids[0], 0, cache->rotary(), outside).error().text == "refused");
  CHECK(model.step(vocabulary, 0, cache->rotary(), outside).error().code == error_code::out_of_range);
  CHECK(model.step(ids[0], 30, cache->rotary(), outside).error().code == error_code::out_of_range);
}

TEST_CASE("engine: parts of a pass have the bits of passes of their own, whatever becomes of the others") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
  engine model = load_model(folder / "model", {.threads = 2});
  const auto ids = some_tokens(90);
  const auto tokens = [&](std::size_t first, std::size_t count) { return std::span(ids).subspan(first, count); };
  struct caches {
    examples::kv_cache alone, together;
  };
  std::vector<caches> own;
  for (int i = 0; i < 2; ++i) own.push_back({*model.make_cache(90), *model.make_cache(90)});
  for (examples::kv_cache* each : {&own[1].alone, &own[1].together}) REQUIRE(model.forward(tokens(0, 5), 0, *each));
  plain_token_cache outside_alone(model.shape()), outside_together(model.shape()), refusing(model.shape());
  refusing.refuse = true;
  const rotary_table& rotary = own[0].alone.rotary();

  const std::vector<std::uint32_t> unknown{1, vocabulary};
  sequence_pass parts[] = {{tokens(0, 61), 0, &own[0].together},                      // a block of the engine ends inside the second
                           {tokens(5, 20), 5, &own[1].together},
                           {unknown, 0, &own[0].together},
                           {tokens(3, 1), 0, nullptr, &refusing, &rotary},
                           {{}, 90, &own[0].together},
                           {tokens(7, 1), 0, nullptr, &outside_together, &rotary}};
  model.forward(parts);
  CHECK(same_bits(parts[0].hidden, *model.forward(tokens(0, 61), 0, own[0].alone)));
  CHECK(same_bits(parts[1].hidden, *model.forward(tokens(5, 20), 5, own[1].alone)));
  CHECK(same_bits(parts[5].hidden, *model.step(ids[7], 0, rotary, outside_alone)));
  for (std::size_t l = 0; l < layers; ++l) {
    CHECK(same_bits(own[0].together.keys(l, 61), own[0].alone.keys(l, 61)));
    CHECK(same_bits(own[1].together.values(l, 25), own[1].alone.values(l, 25)));
    CHECK(same_bits(std::span<const bf16>(outside_together.keys(l)), std::span<const bf16>(outside_alone.keys(l))));
  }
  CHECK(parts[2].outcome.error().text.find("token 1 has id 48") != std::string::npos);
  CHECK(parts[3].outcome.error().text == "refused");
  CHECK((parts[4].outcome && parts[4].hidden.empty()));
}

TEST_CASE("engine: no tokens, unknown tokens, a full cache") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
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

TEST_CASE("engine: unusable options") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model"));
  for (const std::size_t group : {0U, 16U, 48U, 128U}) {
    const auto loaded = engine::load(folder / "model", {.precision = precision::int8, .group = group});
    REQUIRE_FALSE(loaded);
    CHECK(loaded.error().code == error_code::invalid_argument);
  }
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
    REQUIRE(write_model(folder / "model", model_tensors(), metadata));
    refused(std::string("'") + key + "'");
    metadata.erase(key);
    REQUIRE(write_model(folder / "model", model_tensors(), metadata));
    refused(std::string("'") + key + "'");
  }
  auto three_heads = model_metadata();
  three_heads["heads"] = "3";
  REQUIRE(write_model(folder / "model", model_tensors(), three_heads));
  refused("sizes that this engine does not handle");
  auto more_layers = model_metadata();
  more_layers["layers"] = std::to_string(layers + 1);
  REQUIRE(write_model(folder / "model", model_tensors(), more_layers));
  refused("blk.3.attn_norm.weight is missing");
  for (const auto& spec : model_tensors()) {
    auto specs = model_tensors();
    std::erase_if(specs, [&](const auto& other) { return other.name == spec.name; });
    REQUIRE(write_model(folder / "model", specs, model_metadata()));
    refused(spec.name);
    if (spec.name == "blk.0.ffn_gate.weight" || spec.name == "token_embd.weight") continue;  // these define the sizes
    specs.push_back({spec.name, {7}});
    REQUIRE(write_model(folder / "model", specs, model_metadata()));
    refused(spec.name + " is BF16 [7], not");
  }
  auto untied = model_tensors();
  untied.push_back({"output.weight", {vocabulary, width}});
  REQUIRE(write_model(folder / "model", untied, model_metadata()));
  refused("tied");
}

TEST_CASE("cache files: what each format stores") {
  const temporary_folder folder;
  REQUIRE(write_model(folder / "model", model_tensors(), model_metadata(), {"blk.1.attn_v.weight"}));
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

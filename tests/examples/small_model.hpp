// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <common/outcome.hpp>
#include <common/safetensors.hpp>
#include <kvexact/numeric/bf16.hpp>

/// A model small enough for a test that still has what can go wrong: grouped heads, fp8 blocks cut off at the edge, several tiles. It is
/// made of integers and single roundings, so it has the same bits wherever it is made.
namespace kvexact::examples::small_model {

inline constexpr std::size_t layers = 3, heads = 4, kv_heads = 2, head_dim = 32, width = heads * head_dim, kv_width = kv_heads * head_dim,
                             hidden_width = 192, vocabulary = 48;
inline constexpr float rope_base = 10000, epsilon = 1e-5F;

/// Nearly normal numbers: sums of twelve uniform ones.
inline std::vector<float> normal_floats(std::size_t n, unsigned seed, float sigma = 1) {
  std::mt19937 random(seed);
  std::vector<float> values(n);
  for (float& value : values) {
    std::uint64_t sum = 0;
    for (int i = 0; i < 12; ++i) sum += random();
    value = static_cast<float>(static_cast<double>(sum) / 4294967296.0 - 6) * sigma;
  }
  return values;
}

struct tensor_spec {
  std::string name;
  std::vector<std::uint64_t> shape;
};

inline std::vector<tensor_spec> model_tensors() {
  std::vector<tensor_spec> specs{{"token_embd.weight", {vocabulary, width}}, {"output_norm.weight", {width}}};
  for (std::size_t l = 0; l < layers; ++l) {
    const std::string block = "blk." + std::to_string(l) + ".";
    specs.insert(specs.end(), {{block + "attn_norm.weight", {width}},
                               {block + "ffn_norm.weight", {width}},
                               {block + "attn_q.weight", {width, width}},
                               {block + "attn_k.weight", {kv_width, width}},
                               {block + "attn_v.weight", {kv_width, width}},
                               {block + "attn_output.weight", {width, width}},
                               {block + "ffn_gate.weight", {hidden_width, width}},
                               {block + "ffn_up.weight", {hidden_width, width}},
                               {block + "ffn_down.weight", {width, hidden_width}}});
  }
  return specs;
}

inline std::map<std::string, std::string> model_metadata() {
  return {{"layers", std::to_string(layers)}, {"heads", "4"}, {"kv_heads", "2"}, {"rope_base", "10000"}, {"norm_epsilon", "1e-05"}};
}

/// Weights by name, bf16; a few input channels are outliers, as in real models.
inline std::vector<bf16> model_weights(const tensor_spec& spec) {
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

/// Writes the model, or one with other tensors; those named by `zeroed` hold zeros.
inline status write_model(const std::string& path, const std::vector<tensor_spec>& specs = model_tensors(),
                          const std::map<std::string, std::string>& metadata = model_metadata(),
                          const std::vector<std::string>& zeroed = {}) {
  std::vector<tensor_info> infos;
  for (const auto& spec : specs) infos.push_back({spec.name, dtype::bf16, spec.shape});
  auto writer = safetensors_writer::create(path, infos, metadata);
  if (!writer) return writer.error();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto weights = model_weights(specs[i]);
    if (std::count(zeroed.begin(), zeroed.end(), specs[i].name) == 0)
      std::copy(weights.begin(), weights.end(), writer->as<bf16>(i).begin());
  }
  return writer->commit();
}

inline std::vector<std::uint32_t> some_tokens(std::size_t n) {
  std::mt19937 random(5);
  std::vector<std::uint32_t> ids(n);
  for (auto& id : ids) id = static_cast<std::uint32_t>(random() % vocabulary);
  return ids;
}

}  // namespace kvexact::examples::small_model

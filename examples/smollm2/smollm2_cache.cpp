// SPDX-License-Identifier: Apache-2.0
// Runs SmolLM2-135M over token sequences and writes their KV caches, see --help.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <span>
#include <string>
#include <unistd.h>
#include <vector>

#include <CLI/CLI.hpp>

#include "cache_writer.hpp"
#include "engine.hpp"
#include "token_file.hpp"
#include "tool_options.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

/// One pass over a sequence; `out` holds one file for each format.
status write_caches(engine& model, const std::string& tokens, std::span<const std::string> out, std::span<const dtype> formats) {
  const auto ids = read_tokens(tokens);
  if (!ids) return ids.error();
  auto hidden = model.embed(*ids);
  if (!hidden) return failure{hidden.error().code, tokens + ": " + hidden.error().text};
  auto cache = model.make_cache(ids->size());
  if (!cache) return cache.error();
  std::vector<cache_writer> files;
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto file = cache_writer::create(out[i], model.shape(), ids->size(), formats[i]);
    if (!file) return file.error();
    files.push_back(std::move(*file));
  }
  key_value_sums sums;
  for (std::size_t layer = 0; layer < model.shape().layers; ++layer) {
    model.keys_values(layer, *hidden, sums);
    cache->write(layer, 0, sums);
    for (cache_writer& file : files) file.write(layer, sums, *cache);
    if (layer + 1 < model.shape().layers) model.rest(layer, *hidden, 0, *cache);
  }
  for (cache_writer& file : files) {
    if (auto committed = file.commit(); !committed) return committed;
  }
  return done;
}

int fail(const failure& why) {
  std::fprintf(stderr, "smollm2_cache: %s\n", why.text.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Runs SmolLM2-135M over token sequences and writes the KV cache of each as safetensors:\n"
      "tensors layers.N.k (after the rotary embedding) and layers.N.v, shape [tokens, heads, head_dim], positions from 0.\n"
      "Results do not depend on the machine or the number of threads.\n\n"
      "The engine bf16 makes the cache to be compressed; fp8 and int8 are copies of the model with quantised linear layers,\n"
      "whose caches predict it.\n\n"
      "Get the model first: examples/smollm2/fetch.sh; token files: make_tokens.py or text_to_tokens.py beside it.");
  app.footer(
      "Examples:\n"
      "  smollm2_cache --tokens text.txt --engine bf16 --out target.safetensors\n"
      "  smollm2_cache --tokens a.txt b.txt --engine int8 --out a.safetensors b.safetensors\n"
      "  smollm2_cache --tokens a.txt b.txt --dtype bf16 f8_e4m3 --out a.bf16.st a.fp8.st b.bf16.st b.fp8.st\n\n"
      "Exit codes: 0 all files written, 1 a file or the model could not be read or written (the message says which; files\n"
      "written before stay, nothing half-written does), 100 and above: wrong command line.");
  const std::map<std::string, dtype> formats{
      {"bf16", dtype::bf16}, {"fp16", dtype::f16}, {"f8_e4m3", dtype::f8_e4m3}, {"f8_e5m2", dtype::f8_e5m2}};
  std::vector<std::string> tokens, out, chosen{"bf16"};
  engine_choice choice;
  app.add_option("--tokens", tokens, "Token ids as decimal text, one sequence a file")->required()->type_name("FILE");
  app.add_option("--out", out,
                 "The caches, in the order of --tokens; with several formats all those of the first sequence, then all of the second, ...")
      ->required()
      ->type_name("FILE");
  choice.add_to(app);
  app.add_option("--dtype", chosen,
                 "Number formats to write, from one run of the engine (bf16 engine only; predictions are bf16). The engine itself always "
                 "attends to bf16. fp16: rounded once from float sums. f8_*: bf16 values by a scale, amax / largest value, in F32 "
                 "tensors layers.N.k_scale and layers.N.v_scale")
      ->check(CLI::IsMember(formats))
      ->capture_default_str()
      ->type_name("NAME");
  CLI11_PARSE(app, argc, argv);
  std::vector<dtype> types;
  for (const std::string& name : chosen) types.push_back(formats.at(name));
  if (out.size() != tokens.size() * types.size()) {
    return app.exit(CLI::ValidationError(
        "--out", "needs one file for each of --tokens and each of --dtype, " + std::to_string(tokens.size() * types.size()) + " in all"));
  }
  const bool only_bf16 = std::all_of(types.begin(), types.end(), [](dtype type) { return type == dtype::bf16; });
  if (choice.name != "bf16" && !only_bf16) return app.exit(CLI::ValidationError("--dtype", "predictions are always bf16"));
  if (choice.name != "int8" && choice.unrotated) return app.exit(CLI::ValidationError("--unrotated", "needs --engine int8"));

  auto model = choice.load();
  if (!model) return fail(model.error());
  const bool show = ::isatty(STDERR_FILENO) != 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto start = std::chrono::steady_clock::now();
    const auto files = std::span<const std::string>(out).subspan(i * types.size(), types.size());
    if (auto written = write_caches(*model, tokens[i], files, types); !written) return fail(written.error());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (show) std::fprintf(stderr, "[%zu/%zu] %s (%.1f s)\n", i + 1, tokens.size(), tokens[i].c_str(), seconds.count());
  }
  return 0;
}

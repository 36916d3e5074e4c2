// SPDX-License-Identifier: Apache-2.0
// Perplexity of SmolLM2-135M on a token sequence, see --help.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "engine.hpp"
#include "token_file.hpp"
#include "tool_options.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

/// Sum of -ln p(next token) over a sequence that starts without context.
outcome<double> negative_log_likelihood(engine& model, std::span<const std::uint32_t> ids) {
  auto cache = model.make_cache(ids.size());
  if (!cache) return cache.error();
  const auto hidden = model.forward(ids, 0, *cache);
  if (!hidden) return hidden.error();
  constexpr std::size_t rows_at_once = 64;
  const std::size_t width = model.shape().width, vocabulary = model.shape().vocabulary;
  std::vector<float> logits(rows_at_once * vocabulary);
  double sum = 0;
  for (std::size_t first = 0; first + 1 < ids.size(); first += rows_at_once) {
    const std::size_t rows = std::min(rows_at_once, ids.size() - 1 - first);
    model.logits(std::span(*hidden).subspan(first * width, rows * width), logits);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::span<const float> all = std::span(logits).subspan(row * vocabulary, vocabulary);
      const double largest = *std::max_element(all.begin(), all.end());
      double total = 0;
      for (const float logit : all) total += std::exp(logit - largest);
      sum += std::log(total) + largest - static_cast<double>(all[ids[first + row + 1]]);
    }
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Mean negative log likelihood (nats a token) and perplexity of SmolLM2-135M on token sequences, each of which starts\n"
      "without context; the first token of a sequence is not predicted. The last line sums all files up.");
  std::vector<std::string> tokens;
  engine_choice choice;
  app.add_option("--tokens", tokens, "Token ids as decimal text, one sequence a file")->required()->type_name("FILE");
  choice.add_to(app);
  CLI11_PARSE(app, argc, argv);

  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "smollm2_perplexity: %s\n", why.text.c_str());
    return 1;
  };
  auto model = choice.load();
  if (!model) return fail(model.error());
  double sum = 0;
  std::size_t count = 0;
  const auto print = [](const std::string& name, double nats, std::size_t predicted) {
    const double mean = nats / static_cast<double>(predicted);
    std::printf("%-40s %zu tokens predicted, mean NLL %.5f, perplexity %.4f\n", name.c_str(), predicted, mean, std::exp(mean));
  };
  for (const std::string& path : tokens) {
    const auto ids = read_tokens(path);
    if (!ids) return fail(ids.error());
    if (ids->size() < 2) return fail({error_code::invalid_argument, path + ": holds fewer than two tokens"});
    const auto nats = negative_log_likelihood(*model, *ids);
    if (!nats) return fail({nats.error().code, path + ": " + nats.error().text});
    print(path, *nats, ids->size() - 1);
    sum += *nats;
    count += ids->size() - 1;
  }
  if (tokens.size() > 1) print("all", sum, count);
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// Exact speculative decoding of SmolLM2-135M, see --help.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "any_draft_cache.hpp"
#include "draft_calibration.hpp"
#include "draft_methods.hpp"
#include "engine.hpp"
#include "generation.hpp"
#include "sequence_engine.hpp"
#include "token_file.hpp"
#include "tool_options.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

/// Seconds of a draft step and of passes of several widths, at the end of the prompt.
outcome<measured_cost> measure(sequence_engine& engine, compressed_model<sequence_engine, any_draft_cache>& model, const request& wanted) {
  constexpr int repetitions = 3;
  measured_cost cost;
  std::vector<float> logits(std::size_t{8} * engine.vocabulary());
  const std::vector<std::uint32_t> block(8, wanted.prompt.back());
  const auto timed = [&](std::size_t rows) -> outcome<double> {
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < repetitions; ++i) {
      const auto start = std::chrono::steady_clock::now();
      const auto done = engine.forward(std::span(block).first(rows), std::span(logits).first(rows * engine.vocabulary()));
      if (!done) return as_failure(done.error());
      best = std::min(best, since(start));
      const auto back = engine.truncate(engine.length() - rows);
      if (!back) return as_failure(back.error());
    }
    return best;
  };
  const auto one = timed(1), eight = timed(8);
  if (!one || !eight) return one ? eight.error() : one.error();
  cost.plain = cost.verify = *one;
  cost.verify_row = std::max(0.0, (*eight - *one) / 7);
  cost.draft = std::numeric_limits<double>::infinity();
  for (int i = 0; i < repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const auto done = model.logits(wanted.prompt, {}, std::span(logits).first(engine.vocabulary()));
    if (!done) return as_failure(done.error());
    cost.draft = std::min(cost.draft, since(start));
  }
  return cost;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Continues a prompt with SmolLM2-135M: drafts on a compressed cache, verifies on the full one, prints the token ids that decoding on the\n"
      "full cache alone gives. Statistics go to standard error.");
  std::string prompt, calibration_text, compressor = "int8", draft_length = "auto";
  bool compare = false, list = false;
  request wanted;
  wanted.sampling.temperature = 0;
  engine_choice choice;
  app.add_option("--tokens", prompt, "Token ids of the prompt as decimal text")->type_name("FILE");
  app.add_option("--max-tokens", wanted.max_tokens, "Tokens to generate")->check(CLI::Range(1, 65536))->capture_default_str();
  app.add_option("--end", wanted.ends, "Token ids that end the answer before that")->type_name("ID");
  app.add_option("--compressor", compressor, "The first method whose name begins with this text; see --list")->capture_default_str()->type_name("TEXT");
  app.add_flag("--list", list, "Prints the names of all methods, and ends");
  app.add_option("--calibration", calibration_text, "Token ids of other text, for methods that are calibrated; else the prompt's")->type_name("FILE");
  app.add_option("--draft-length", draft_length, "auto, or a number of tokens; 0 decodes plainly")->capture_default_str()->type_name("auto|N");
  app.add_option("--longest-draft", wanted.longest_draft, "The most that auto takes")->check(CLI::Range(1, 32))->capture_default_str();
  app.add_option("--temperature", wanted.sampling.temperature, "0: greedy; else each position has a random number of its own, so the path is that of plain sampling")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  app.add_option("--top-k", wanted.sampling.top_k)->capture_default_str();
  app.add_option("--top-p", wanted.sampling.top_p)->capture_default_str();
  app.add_option("--min-p", wanted.sampling.min_p)->capture_default_str();
  app.add_option("--repetition-penalty", wanted.sampling.repetition_penalty)->capture_default_str();
  app.add_option("--seed", wanted.seed)->capture_default_str();
  app.add_flag("--compare", compare, "Decodes on the full cache alone, too, and compares tokens and K/V rows; exit status 1 if they differ");
  choice.add_to(app);
  CLI11_PARSE(app, argc, argv);

  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "smollm2_generate: %s\n", why.text.c_str());
    return 2;
  };
  const auto methods = all_draft_methods();
  if (list) {
    for (const draft_method& each : methods) std::printf("%s\n", each.name.c_str());
    return 0;
  }
  const auto method = std::find_if(methods.begin(), methods.end(), [&](const draft_method& each) { return each.name.starts_with(compressor); });
  if (method == methods.end()) return fail({error_code::invalid_argument, "no method is called " + in_quotes(compressor) + "; --list names them"});
  std::optional<std::uint32_t> fixed;
  if (draft_length != "auto") {
    std::uint32_t number = 0;
    const auto [end, code] = std::from_chars(draft_length.data(), draft_length.data() + draft_length.size(), number);
    if (code != std::errc() || end != draft_length.data() + draft_length.size() || number > 32)
      return fail({error_code::invalid_argument, "--draft-length is auto or a number up to 32"});
    fixed = number;
    wanted.longest_draft = std::max(number, 1U);
  }
  if (prompt.empty()) return fail({error_code::invalid_argument, "--tokens names the prompt"});
  auto model = choice.load();
  if (!model) return fail(model.error());
  auto ids = read_tokens(prompt);
  if (!ids) return fail(ids.error());
  if (ids->empty()) return fail({error_code::invalid_argument, prompt + ": holds no tokens"});
  wanted.prompt = *std::move(ids);
  const auto text = calibration_text.empty() ? outcome<std::vector<std::uint32_t>>(wanted.prompt) : read_tokens(calibration_text);
  if (!text) return fail(text.error());
  const auto calibration = method->is_calibrated ? calibrate(*model, choice.folder, *text) : outcome<draft_calibration>(draft_calibration{});
  if (!calibration) return fail(calibration.error());

  const std::size_t capacity = wanted.prompt.size() + wanted.max_tokens + 2 * wanted.longest_draft + 8;
  auto engine = sequence_engine::make(*model, capacity);
  if (!engine) return fail(engine.error());
  const draft_setting setting{&*calibration, static_cast<std::uint32_t>(model->shape().heads / model->shape().kv_heads), wanted.prompt.size()};
  auto cache = method->make(engine->shape(), setting);
  if (!cache) return fail({cache.error().code, method->name + ": " + cache.error().message()});
  compressed_model<sequence_engine, any_draft_cache> drafting(*engine, *std::move(cache));

  const auto run = [&](const auto& rule) -> outcome<generated> {
    if (fixed) return decode(*engine, model_drafter(std::move(drafting)), rule, fixed_draft_length(*fixed), wanted, true);
    // The prompt is run here already, so that costs can be measured where decoding begins.
    const auto all_but_last = std::span(wanted.prompt).first(wanted.prompt.size() - 1);
    const auto read = engine->forward(all_but_last, {});
    if (!read) return as_failure(read.error());
    const auto synchronised = drafting.synchronise(wanted.prompt);
    if (!synchronised) return as_failure(synchronised.error());
    const auto cost = measure(*engine, drafting, wanted);
    if (!cost) return cost.error();
    return decode(*engine, model_drafter(std::move(drafting)), rule, adaptive_draft_length(*cost, {.longest = wanted.longest_draft}), wanted, true);
  };
  const bool is_greedy = wanted.sampling.temperature == 0;
  const auto found = is_greedy ? run(greedy()) : run(sample_and_match(wanted.seed));
  if (!found) return fail(found.error());
  for (const std::uint32_t id : found->tokens) std::printf("%u ", id);
  std::printf("\n");
  std::fprintf(stderr, "%zu tokens in %zu rounds: %.2f a round; %zu of %zu drafts accepted (%.3f); %s; smallest gap of two logits %.3g; %.1f tokens/s\n",
               found->tokens.size(), found->rounds, static_cast<double>(found->tokens.size()) / static_cast<double>(found->rounds), found->accepted,
               found->proposed, found->proposed == 0 ? 0.0 : static_cast<double>(found->accepted) / static_cast<double>(found->proposed), found->level,
               static_cast<double>(found->smallest_gap), static_cast<double>(found->tokens.size()) / found->seconds);
  if (!compare) return 0;

  auto other = sequence_engine::make(*model, capacity);
  if (!other) return fail(other.error());
  const auto plainly = [&](const auto& rule) { return decode(*other, no_drafter(), rule, fixed_draft_length(0), wanted, false); };
  const auto expected = is_greedy ? plainly(greedy()) : plainly(sample_and_match(wanted.seed));
  if (!expected) return fail(expected.error());
  const auto parts = std::mismatch(found->tokens.begin(), found->tokens.end(), expected->tokens.begin(), expected->tokens.end()).first - found->tokens.begin();
  const bool same_tokens = found->tokens == expected->tokens, same_rows = equal_rows(*engine, *other);
  if (same_tokens && same_rows) {
    std::fprintf(stderr, "identical: yes, %zu tokens and the K/V rows of %llu; plain decoding %.1f tokens/s\n", found->tokens.size(),
                 static_cast<unsigned long long>(engine->length()), static_cast<double>(expected->tokens.size()) / expected->seconds);
    return 0;
  }
  std::fprintf(stderr, same_tokens ? "identical: no, the K/V rows differ\n" : "identical: no, the tokens part at %td\n", parts);
  return 1;
}

// SPDX-License-Identifier: Apache-2.0
// SmolLM2-135M's greedy answers to prompts on lossy caches, see --help.
#include <algorithm>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "draft_method_choice.hpp"
#include "engine.hpp"
#include "token_file.hpp"
#include "tool_options.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

outcome<std::vector<std::uint32_t>> answer(engine& model, const draft_method& method, const draft_calibration& calibration,
                                           std::span<const std::uint32_t> prompt, const examples::kv_cache& exact, std::size_t steps,
                                           std::span<const std::uint32_t> ends) {
  auto cache = cache_of_prompt(model, method, calibration, prompt, exact);
  if (!cache) return cache.error();
  std::vector<float> logits(model.shape().vocabulary);
  std::vector<std::uint32_t> ids{prompt.back()};
  const auto has_ended = [&] { return ids.size() > 1 && std::find(ends.begin(), ends.end(), ids.back()) != ends.end(); };
  for (std::size_t i = 0; i < steps && !has_ended(); ++i) {
    const auto hidden = model.step(ids.back(), prompt.size() - 1 + i, exact.rotary(), *cache);
    if (!hidden) return hidden.error();
    model.logits(*hidden, logits);
    ids.push_back(static_cast<std::uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  ids.erase(ids.begin());
  return ids;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Greedy answers of SmolLM2-135M on lossy caches of its own: the prompt's keys and values are compressed, then the model decodes on\n"
      "them. Prints a line for every prompt and method: file of the prompt, method, token ids, with tabs between.");
  std::vector<std::string> prompts;
  std::string calibration_text;
  std::size_t steps = 256;
  std::vector<std::uint32_t> ends;
  draft_method_choice methods;
  engine_choice choice;
  app.add_option("--prompts", prompts, "Token ids as decimal text, a file for each prompt")->required()->type_name("FILE");
  app.add_option("--calibration", calibration_text, "Token ids of other text, for means of channels")->required()->type_name("FILE");
  app.add_option("--steps", steps, "Tokens of an answer")->check(CLI::Range(1, 65536))->capture_default_str();
  app.add_option("--end", ends, "Token ids that end an answer before that")->type_name("ID");
  methods.add_to(app);
  choice.add_to(app);
  CLI11_PARSE(app, argc, argv);

  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "smollm2_answers: %s\n", why.text.c_str());
    return 1;
  };
  auto model = choice.load();
  if (!model) return fail(model.error());
  const auto text = read_tokens(calibration_text);
  if (!text) return fail(text.error());
  const auto calibration = calibrate(*model, choice.folder, *text);
  if (!calibration) return fail(calibration.error());

  for (const std::string& path : prompts) {
    const auto prompt = read_tokens(path);
    if (!prompt) return fail(prompt.error());
    if (prompt->empty()) return fail({error_code::invalid_argument, path + ": holds no tokens"});
    auto exact = model->make_cache(prompt->size() + steps);
    if (!exact) return fail(exact.error());
    const auto hidden = model->forward(*prompt, 0, *exact);
    if (!hidden) return fail(hidden.error());
    for (const draft_method& method : methods.methods()) {
      const auto ids = answer(*model, method, *calibration, *prompt, *exact, steps, ends);
      if (!ids) return fail(ids.error());
      std::printf("%s\t%s\t", path.c_str(), method.name.c_str());
      for (const std::uint32_t id : *ids) std::printf("%u ", id);
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  return 0;
}

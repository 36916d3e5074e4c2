// SPDX-License-Identifier: Apache-2.0
// How well SmolLM2-135M works on lossy caches, see --help.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
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

using seconds = std::chrono::duration<double>;
double since(std::chrono::steady_clock::time_point start) { return seconds(std::chrono::steady_clock::now() - start).count(); }

std::uint32_t best_of(std::span<const float> logits) {
  return static_cast<std::uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}
std::vector<double> log_softmax(std::span<const float> logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float each : logits) sum += std::exp(each - most);
  std::vector<double> out(logits.size());
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = logits[i] - most - std::log(sum);
  return out;
}

/// Queries of some steps, for the share of attention's first choices that a cache keeps.
class recording_cache final : public token_cache {
 public:
  explicit recording_cache(draft_token_cache& cache) : cache_(&cache) {}
  status append(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) override { return cache_->append(layer, keys, values); }
  status attend(std::size_t layer, std::span<const float> queries, std::span<float> out) override {
    queries_.emplace_back(queries.begin(), queries.end());
    return cache_->attend(layer, queries, out);
  }
  /// [steps * layers][heads, head_dim]
  [[nodiscard]] const std::vector<std::vector<float>>& queries() const { return queries_; }

 private:
  draft_token_cache* cache_;
  std::vector<std::vector<float>> queries_;
};

/// What the full cache gives for one text, decoded step by step as the others are, and the prompt's exact keys and values.
struct reference {
  std::vector<std::uint32_t> ids;                  // context + steps
  std::size_t context = 0, steps = 0;
  examples::kv_cache cache;                        // of the prompt
  std::vector<std::vector<double>> distributions;  // log probabilities after ids[context - 1 + i]
  std::vector<std::uint32_t> greedy;               // what the model itself continues the prompt with
  std::vector<std::vector<float>> queries;         // of the first steps

  [[nodiscard]] std::span<const std::uint32_t> prompt() const { return std::span(ids).first(context); }
};

/// Of one method on one text, or means over texts.
struct measured {
  double bits = 0, key_error = 0, value_error = 0, first_choices = 0, divergence = 0, agreement = 0, same_tokens = 0, tokens_per_second = 0, fill_seconds = 0;
};

constexpr std::size_t recorded_steps = 4;

class comparison {
 public:
  comparison(engine& model, draft_calibration calibration) : model_(&model), calibration_(std::move(calibration)) {}

  outcome<reference> refer(std::span<const std::uint32_t> ids, std::size_t context, std::size_t steps) {
    auto cache = model_->make_cache(context + steps);
    if (!cache) return cache.error();
    reference made{{ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(context + steps)}, context, steps, *std::move(cache), {}, {}, {}};
    const auto hidden = model_->forward(made.prompt(), 0, made.cache);
    if (!hidden) return hidden.error();
    const draft_method full = all_draft_methods().front();
    auto on_text = fill(full, made);
    if (!on_text) return on_text.error();
    recording_cache recorder(*on_text);
    for (std::size_t i = 0; i < steps; ++i) {
      const auto logits = step(made, i, made.ids[context - 1 + i], i < recorded_steps ? static_cast<token_cache&>(recorder) : *on_text);
      if (!logits) return logits.error();
      made.distributions.push_back(log_softmax(*logits));
    }
    made.queries = recorder.queries();
    auto alone = fill(full, made);
    if (!alone) return alone.error();
    std::uint32_t token = made.prompt().back();
    for (std::size_t i = 0; i < steps; ++i) {
      const auto logits = step(made, i, token, *alone);
      if (!logits) return logits.error();
      token = best_of(*logits);
      made.greedy.push_back(token);
    }
    return made;
  }

  outcome<measured> measure(const draft_method& method, const reference& of) {
    measured found;
    const auto begin = std::chrono::steady_clock::now();
    auto cache = fill(method, of);
    if (!cache) return cache.error();
    found.fill_seconds = since(begin);
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < of.steps; ++i) {
      const auto logits = step(of, i, of.ids[of.context - 1 + i], *cache);
      if (!logits) return logits.error();
      const std::vector<double> own = log_softmax(*logits);
      const std::vector<double>& full = of.distributions[i];
      double divergence = 0;
      for (std::size_t v = 0; v < own.size(); ++v) divergence += std::exp(full[v]) * (full[v] - own[v]);
      found.divergence += divergence / static_cast<double>(of.steps);
      const bool agree = std::max_element(own.begin(), own.end()) - own.begin() == std::max_element(full.begin(), full.end()) - full.begin();
      found.agreement += (agree ? 1.0 : 0.0) / static_cast<double>(of.steps);
    }
    found.tokens_per_second = static_cast<double>(of.steps) / since(start);
    weigh(*cache, of, found);

    auto again = fill(method, of);
    if (!again) return again.error();
    std::uint32_t token = of.prompt().back();
    for (std::size_t i = 0; i < of.steps; ++i) {
      const auto logits = step(of, i, token, *again);
      if (!logits) return logits.error();
      token = best_of(*logits);
      if (token != of.greedy[i]) break;
      ++found.same_tokens;
    }
    return found;
  }

 private:
  outcome<draft_token_cache> fill(const draft_method& method, const reference& of) {
    return cache_of_prompt(*model_, method, calibration_, of.prompt(), of.cache);
  }

  /// Logits after the `i`th token from the prompt's last one on.
  outcome<std::vector<float>> step(const reference& of, std::size_t i, std::uint32_t token, token_cache& cache) {
    const auto hidden = model_->step(token, of.context - 1 + i, of.cache.rotary(), cache);
    if (!hidden) return hidden.error();
    std::vector<float> logits(model_->shape().vocabulary);
    model_->logits(*hidden, logits);
    return logits;
  }

  /// Size at the end, and errors of what is left of the prompt.
  void weigh(draft_token_cache& cache, const reference& of, measured& found) const {
    const model_shape& shape = model_->shape();
    const std::size_t dim = shape.head_dim, kv_width = shape.kv_width(), shared = shape.heads / shape.kv_heads;
    found.bits = 8.0 * static_cast<double>(cache.cache().bytes()) / static_cast<double>(2 * kv_width * shape.layers * (of.context + of.steps - 1));
    double key_error = 0, keys_squared = 0, value_error = 0, values_squared = 0;
    std::size_t kept = 0, all = 0;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const std::span<const bf16> exact_keys = of.cache.keys(l, of.context), exact_values = of.cache.values(l, of.context);
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        std::size_t entries = cache.cache().entries(static_cast<std::uint32_t>(l), static_cast<std::uint32_t>(head));
        std::vector<std::uint64_t> positions(entries);
        std::vector<float> keys(entries * dim), values(entries * dim);
        if (!cache.cache().materialise(static_cast<std::uint32_t>(l), static_cast<std::uint32_t>(head), {positions, keys, values})) continue;
        // What was decoded since has no exact counterpart: the model computed it from the draft cache.
        entries = static_cast<std::size_t>(std::lower_bound(positions.begin(), positions.end(), of.context - 1) - positions.begin());
        const auto add = [&](std::span<const float> got, std::span<const bf16> exact, double& error, double& squared) {
          for (std::size_t i = 0; i < entries; ++i) {
            for (std::size_t c = 0; c < dim; ++c) {
              const double value = exact[positions[i] * kv_width + head * dim + c].to_float();
              error += (value - got[i * dim + c]) * (value - got[i * dim + c]);
              squared += value * value;
            }
          }
        };
        add(keys, exact_keys, key_error, keys_squared);
        add(values, exact_values, value_error, values_squared);
        for (std::size_t step = 0; step * shape.layers < of.queries.size(); ++step) {
          for (std::size_t q = 0; q < shared; ++q) {
            const std::span<const float> query = std::span(of.queries[step * shape.layers + l]).subspan((head * shared + q) * dim, dim);
            const auto best = [&](std::size_t count, const auto& value_at, const auto& position_at) {
              double most = -std::numeric_limits<double>::infinity();
              std::uint64_t where = 0;
              for (std::size_t i = 0; i < count; ++i) {
                double score = 0;
                for (std::size_t c = 0; c < dim; ++c) score += static_cast<double>(query[c]) * static_cast<double>(value_at(i, c));
                if (score > most) {
                  most = score;
                  where = position_at(i);
                }
              }
              return where;
            };
            const std::uint64_t first = best(
                of.context - 1, [&](std::size_t i, std::size_t c) { return exact_keys[i * kv_width + head * dim + c].to_float(); },
                [](std::size_t i) { return std::uint64_t{i}; });
            kept += first == best(entries, [&](std::size_t i, std::size_t c) { return keys[i * dim + c]; }, [&](std::size_t i) { return positions[i]; });
            ++all;
          }
        }
      }
    }
    found.key_error = key_error / keys_squared;
    found.value_error = value_error / values_squared;
    found.first_choices = static_cast<double>(kept) / static_cast<double>(std::max<std::size_t>(all, 1));
  }

  engine* model_;
  draft_calibration calibration_;
};

/// What a method did on the texts of one context.
struct on_texts {
  measured mean;
  double least_divergence = std::numeric_limits<double>::infinity(), most_divergence = 0;
};

outcome<on_texts> measure(comparison& compare, const draft_method& method, std::span<const reference> texts) {
  on_texts all;
  for (const reference& text : texts) {
    const auto found = compare.measure(method, text);
    if (!found) return found.error();
    for (double measured::*const each :
         {&measured::bits, &measured::key_error, &measured::value_error, &measured::first_choices, &measured::divergence, &measured::agreement,
          &measured::same_tokens, &measured::tokens_per_second, &measured::fill_seconds})
      all.mean.*each += (*found).*each / static_cast<double>(texts.size());
    all.least_divergence = std::min(all.least_divergence, found->divergence);
    all.most_divergence = std::max(all.most_divergence, found->divergence);
  }
  return all;
}

/// "a / b / c", one for each context.
template <class Print>
void print_cell(std::span<const on_texts> contexts, const Print& print) {
  std::printf("| ");
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    if (i > 0) std::printf(" / ");
    print(contexts[i]);
  }
  std::printf(" ");
}

void print_row(const draft_method& method, std::span<const on_texts> contexts) {
  std::printf("| %s ", method.name.c_str());
  print_cell(contexts, [](const on_texts& at) { std::printf("%.2f", at.mean.bits); });
  print_cell(contexts.last(1), [](const on_texts& at) { std::printf("%.2g", at.mean.key_error); });
  print_cell(contexts.last(1), [](const on_texts& at) { std::printf("%.2g", at.mean.value_error); });
  print_cell(contexts, [](const on_texts& at) { std::printf("%.3f", at.mean.first_choices); });
  print_cell(contexts, [](const on_texts& at) { std::printf("%.4f (%.4f..%.4f)", at.mean.divergence, at.least_divergence, at.most_divergence); });
  print_cell(contexts, [](const on_texts& at) { std::printf("%.3f", at.mean.agreement); });
  print_cell(contexts, [](const on_texts& at) { std::printf("%.0f", at.mean.same_tokens); });
  print_cell(contexts, [](const on_texts& at) { std::printf("%.1f", at.mean.tokens_per_second); });
  print_cell(contexts, [](const on_texts& at) { std::printf("%.2f", at.mean.fill_seconds); });
  std::printf("| %s |\n", method.needs.c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Compares lossy caches of SmolLM2-135M: the model reads the compressed cache itself and writes its own keys and values into it.\n"
      "Prints a table in Markdown: bits a value (all memory counted), relative squared errors of K and V at the last context, how often the\n"
      "largest attention weight stays where it was, KL divergence (least and most of the texts) and agreement of the next token on the text,\n"
      "tokens until greedy decoding first differs. Means over the texts; all against the full cache, decoded the same way.");
  std::vector<std::string> tokens;
  std::string calibration_text;
  std::vector<std::size_t> contexts{512}, texts;
  std::size_t steps = 32;
  draft_method_choice methods;
  engine_choice choice;
  app.add_option("--tokens", tokens, "Token ids as decimal text; each file is a text")->required()->type_name("FILE");
  app.add_option("--calibration", calibration_text, "Token ids of other text, for means of channels")->required()->type_name("FILE");
  app.add_option("--context", contexts, "Tokens of the prompt; several for several columns")->check(CLI::Range(64, 65536));
  app.add_option("--texts", texts, "How many of the files are used at each context; by default all")->check(CLI::Range(1, 1024))->type_name("N");
  app.add_option("--steps", steps, "Tokens decoded after the prompt")->check(CLI::Range(1, 4096));
  methods.add_to(app);
  choice.add_to(app);
  CLI11_PARSE(app, argc, argv);

  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "smollm2_compressors: %s\n", why.text.c_str());
    return 1;
  };
  if (!texts.empty() && texts.size() != contexts.size())
    return fail({error_code::invalid_argument, "--texts needs a number for each context"});
  auto model = choice.load();
  if (!model) return fail(model.error());
  const auto other = read_tokens(calibration_text);
  if (!other) return fail(other.error());
  auto calibration = calibrate(*model, choice.folder, *other);
  if (!calibration) return fail(calibration.error());
  comparison compare(*model, *std::move(calibration));

  std::vector<std::vector<reference>> references(contexts.size());
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    const std::size_t count = texts.empty() ? tokens.size() : std::min(texts[i], tokens.size());
    for (const std::string& path : std::span(tokens).first(count)) {
      const auto ids = read_tokens(path);
      if (!ids) return fail(ids.error());
      if (ids->size() < contexts[i] + steps)
        return fail({error_code::invalid_argument, path + ": a context of " + std::to_string(contexts[i]) + " and " + std::to_string(steps) +
                                                       " steps need more tokens than the file holds"});
      auto full = compare.refer(*ids, contexts[i], steps);
      if (!full) return fail(full.error());
      references[i].push_back(*std::move(full));
    }
    std::printf("context %zu: %zu texts, %zu steps\n", contexts[i], count, steps);
    std::fflush(stdout);
  }
  std::printf("\n| method | bits | K error | V error | first choices kept | KL, nats | top-1 agreement | same greedy tokens | tokens/s | prompt, s | needs |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const draft_method& method : methods.methods()) {
    std::vector<on_texts> row;
    for (const std::vector<reference>& of : references) {
      const auto found = measure(compare, method, of);
      if (!found) return fail(found.error());
      row.push_back(*found);
    }
    print_row(method, row);
  }
  return 0;
}

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

#include "draft_methods.hpp"
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

/// What the full cache gives for one text, and the prompt's exact keys and values.
struct reference {
  std::vector<std::uint32_t> ids;                  // context + steps
  std::size_t context = 0, steps = 0;
  examples::kv_cache cache;                                  // of all ids
  std::vector<std::vector<double>> distributions;  // log probabilities after ids[context - 1 + i]
  std::vector<std::uint32_t> greedy;               // what the model itself continues the prompt with
  std::vector<std::vector<float>> queries;         // of the first steps
};

struct measured {
  double bits = 0, key_error = 0, value_error = 0, first_choices = 0, divergence = 0, agreement = 0, tokens_per_second = 0, fill_seconds = 0;
  std::size_t same_tokens = 0;
};

constexpr std::size_t recorded_steps = 4;

class comparison {
 public:
  comparison(engine& model, std::vector<std::vector<float>> key_means, std::vector<std::vector<float>> value_means)
      : model_(&model), key_means_(std::move(key_means)), value_means_(std::move(value_means)) {}

  outcome<reference> refer(std::span<const std::uint32_t> ids, std::size_t context, std::size_t steps) {
    auto cache = model_->make_cache(context + steps);
    if (!cache) return cache.error();
    reference made{{ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(context + steps)}, context, steps, *std::move(cache), {}, {}, {}};
    const auto hidden = model_->forward(std::span(made.ids).first(context), 0, made.cache);
    if (!hidden) return hidden.error();
    const std::size_t width = model_->shape().width;
    std::vector<float> logits(model_->shape().vocabulary);
    std::vector<bf16> last(hidden->end() - static_cast<std::ptrdiff_t>(width), hidden->end());
    // Greedy first, then the text over it.
    std::vector<bf16> state = last;
    for (std::size_t i = 0; i < steps; ++i) {
      model_->logits(state, logits);
      made.greedy.push_back(best_of(logits));
      const auto next = model_->forward(std::span(&made.greedy.back(), 1), context + i, made.cache);
      if (!next) return next.error();
      state = *next;
    }
    state = last;
    for (std::size_t i = 0; i < steps; ++i) {
      model_->logits(state, logits);
      made.distributions.push_back(log_softmax(logits));
      const auto next = model_->forward(std::span(made.ids).subspan(context + i, 1), context + i, made.cache);
      if (!next) return next.error();
      state = *next;
    }
    auto exact = fill(all_draft_methods().front(), made);
    if (!exact) return exact.error();
    recording_cache recorder(*exact);
    for (std::size_t i = 0; i < std::min(recorded_steps, steps); ++i) {
      const auto step = model_->step(made.ids[context - 1 + i], context - 1 + i, made.cache.rotary(), recorder);
      if (!step) return step.error();
    }
    made.queries = recorder.queries();
    return made;
  }

  outcome<measured> measure(const draft_method& method, const reference& of) {
    const std::size_t context = of.context;
    measured found;
    const auto begin = std::chrono::steady_clock::now();
    auto cache = fill(method, of);
    if (!cache) return cache.error();
    found.fill_seconds = since(begin);
    std::vector<float> logits(model_->shape().vocabulary);
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < of.steps; ++i) {
      const auto hidden = model_->step(of.ids[context - 1 + i], context - 1 + i, of.cache.rotary(), *cache);
      if (!hidden) return hidden.error();
      model_->logits(*hidden, logits);
      const std::vector<double> own = log_softmax(logits);
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
    std::uint32_t token = of.ids[context - 1];
    for (std::size_t i = 0; i < of.steps; ++i) {
      const auto hidden = model_->step(token, context - 1 + i, of.cache.rotary(), *again);
      if (!hidden) return hidden.error();
      model_->logits(*hidden, logits);
      token = best_of(logits);
      if (token != of.greedy[i]) break;
      ++found.same_tokens;
    }
    return found;
  }

 private:
  /// The prompt but for its last token, which is the first step. Where attention is observed, tokens go one by one through the model.
  outcome<draft_token_cache> fill(const draft_method& method, const reference& of) {
    const model_shape& shape = model_->shape();
    const draft_setting setting{key_means_.data(), value_means_.data(), static_cast<std::uint32_t>(shape.heads / shape.kv_heads), of.context};
    const auto heads = static_cast<std::uint32_t>(shape.kv_heads), dim = static_cast<std::uint32_t>(shape.head_dim);
    std::vector<std::unique_ptr<draft_layer>> layers;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      auto made = method.make({heads, dim, dim}, l, setting);
      if (!made) return failure{made.error().code, method.name + ": " + made.error().message()};
      layers.push_back(*std::move(made));
    }
    draft_token_cache cache(shape, std::move(layers));
    std::size_t unobserved = 0;
    while (unobserved + 1 < of.context && !cache.observes(unobserved)) ++unobserved;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const status filled = cache.fill(l, of.cache.keys(l, unobserved), of.cache.values(l, unobserved));
      if (!filled) return filled.error();
    }
    for (std::size_t t = unobserved; t + 1 < of.context; ++t) {
      const auto hidden = model_->step(of.ids[t], t, of.cache.rotary(), cache);
      if (!hidden) return hidden.error();
    }
    return cache;
  }

  /// Size at the end, and errors of what is left of the prompt.
  void weigh(draft_token_cache& cache, const reference& of, measured& found) const {
    const model_shape& shape = model_->shape();
    const std::size_t dim = shape.head_dim, kv_width = shape.kv_width(), shared = shape.heads / shape.kv_heads;
    found.bits = 8.0 * static_cast<double>(cache.bytes()) / static_cast<double>(2 * kv_width * shape.layers * (of.context + of.steps - 1));
    double key_error = 0, keys_squared = 0, value_error = 0, values_squared = 0;
    std::size_t kept = 0, all = 0;
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const std::span<const bf16> exact_keys = of.cache.keys(l, of.context), exact_values = of.cache.values(l, of.context);
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        std::size_t entries = cache.layer(l).entries(static_cast<std::uint32_t>(head));
        std::vector<std::uint64_t> positions(entries);
        std::vector<float> keys(entries * dim), values(entries * dim);
        if (!cache.layer(l).materialise(static_cast<std::uint32_t>(head), {positions, keys, values})) continue;
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
  std::vector<std::vector<float>> key_means_, value_means_;
};

/// Means of every channel over some text, of each layer.
status means_of(engine& model, std::span<const std::uint32_t> ids, std::vector<std::vector<float>>& keys, std::vector<std::vector<float>>& values) {
  auto cache = model.make_cache(ids.size());
  if (!cache) return cache.error();
  const auto hidden = model.forward(ids, 0, *cache);
  if (!hidden) return hidden.error();
  const std::size_t width = model.shape().kv_width();
  for (std::size_t l = 0; l < model.shape().layers; ++l) {
    const auto mean = [&](std::span<const bf16> rows) {
      std::vector<double> sums(width);
      for (std::size_t i = 0; i < rows.size(); ++i) sums[i % width] += static_cast<double>(rows[i].to_float());
      std::vector<float> means(width);
      for (std::size_t c = 0; c < width; ++c) means[c] = static_cast<float>(sums[c] / static_cast<double>(ids.size()));
      return means;
    };
    keys.push_back(mean(cache->keys(l, ids.size())));
    values.push_back(mean(cache->values(l, ids.size())));
  }
  return done;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Compares lossy caches of SmolLM2-135M: the model reads the compressed cache itself and writes its own keys and values into it.\n"
      "Prints a table in Markdown: bits a value (all memory counted), relative squared errors of K and V, how often the largest attention\n"
      "weight stays where it was, KL divergence and agreement of the next token on the text, tokens until greedy decoding first differs.");
  std::vector<std::string> tokens;
  std::vector<std::string> only;
  std::string calibration;
  std::vector<std::size_t> contexts{512};
  std::size_t steps = 32;
  engine_choice choice;
  app.add_option("--tokens", tokens, "Token ids as decimal text; files are joined")->required()->type_name("FILE");
  app.add_option("--calibration", calibration, "Token ids of other text, for means of channels")->required()->type_name("FILE");
  app.add_option("--context", contexts, "Tokens of the prompt; several for several tables")->check(CLI::Range(64, 65536));
  app.add_option("--steps", steps, "Tokens decoded after the prompt")->check(CLI::Range(1, 4096));
  app.add_option("--only", only, "Only methods whose names hold one of these texts")->type_name("TEXT");
  choice.add_to(app);
  CLI11_PARSE(app, argc, argv);

  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "smollm2_compressors: %s\n", why.text.c_str());
    return 1;
  };
  auto model = choice.load();
  if (!model) return fail(model.error());
  std::vector<std::uint32_t> ids;
  for (const std::string& path : tokens) {
    const auto more = read_tokens(path);
    if (!more) return fail(more.error());
    ids.insert(ids.end(), more->begin(), more->end());
  }
  const auto other = read_tokens(calibration);
  if (!other) return fail(other.error());
  if (other->empty()) return fail({error_code::invalid_argument, calibration + ": holds no tokens"});
  std::vector<std::vector<float>> key_means, value_means;
  const status calibrated = means_of(*model, *other, key_means, value_means);
  if (!calibrated) return fail(calibrated.error());
  comparison compare(*model, std::move(key_means), std::move(value_means));

  for (const std::size_t context : contexts) {
    if (ids.size() < context + steps)
      return fail({error_code::invalid_argument, "a context of " + std::to_string(context) + " and " + std::to_string(steps) + " steps need more tokens than the files hold"});
    const auto full = compare.refer(ids, context, steps);
    if (!full) return fail(full.error());
    std::printf("context %zu, %zu steps\n\n", context, steps);
    std::printf("| method | bits | K error | V error | first choices kept | KL, nats | top-1 agreement | same greedy tokens | tokens/s | prompt, s | needs |\n");
    std::printf("|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (const draft_method& method : all_draft_methods()) {
      const auto is_meant = [&](const std::string& text) { return method.name.find(text) != std::string::npos; };
      if (!only.empty() && std::none_of(only.begin(), only.end(), is_meant)) continue;
      const auto found = compare.measure(method, *full);
      if (!found) return fail(found.error());
      std::printf("| %s | %.2f | %.2g | %.2g | %.3f | %.4f | %.3f | %zu of %zu | %.1f | %.2f | %s |\n", method.name.c_str(), found->bits,
                  found->key_error, found->value_error, found->first_choices, found->divergence, found->agreement, found->same_tokens, steps,
                  found->tokens_per_second, found->fill_seconds, method.needs.c_str());
      std::fflush(stdout);
    }
    std::printf("\n");
  }
  return 0;
}

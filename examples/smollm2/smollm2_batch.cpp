// SPDX-License-Identifier: Apache-2.0
// Exact speculative decoding of many prompts with SmolLM2-135M, see --help.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "any_draft_cache.hpp"
#include "draft_calibration.hpp"
#include "draft_method_choice.hpp"
#include "engine.hpp"
#include "generation.hpp"
#include "sequence_batch.hpp"
#include "sequence_engine.hpp"
#include "token_file.hpp"
#include "tool_options.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

/// A prompt with its plain continuation, and the engine that holds the rows of both.
struct reference {
  request wanted;
  std::optional<sequence_engine> engine;
  generated plain;
};

/// Runs body(job) for every job below `jobs`, at most `members` at a time, in one batch. The first failure ends the run.
template <class Body>
status run_batch(sequence_batch& batch, std::size_t jobs, std::size_t members, Body&& body) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  status all = done;
  std::vector<std::thread> threads;
  batch.expect(std::min(members, jobs));
  for (std::size_t member = 0; member < std::min(members, jobs); ++member) {
    threads.emplace_back([&] {
      for (std::size_t job = next++; job < jobs; job = next++) {
        if (status ran = body(job); !ran) {
          const std::lock_guard lock(mutex);
          all = std::move(ran);
          next = jobs;
        }
      }
      batch.leave();
    });
  }
  for (std::thread& each : threads) each.join();
  return all;
}

template <class Drafter>
outcome<generated> decode(sequence_engine& engine, Drafter drafts, std::uint32_t length, const request& wanted) {
  if (wanted.sampling.temperature == 0) return decode(engine, std::move(drafts), greedy(), fixed_draft_length(length), wanted, false);
  return decode(engine, std::move(drafts), sample_and_match(wanted.seed), fixed_draft_length(length), wanted, false);
}

/// Sums over prompts.
struct totals {
  std::size_t tokens = 0, rounds = 0, proposed = 0, accepted = 0, parted = 0, other_rows = 0;
  double bytes = 0;
  float smallest_gap = std::numeric_limits<float>::infinity();

  void add(const generated& found, const reference& expected, bool same_rows, double full_bytes) {
    tokens += found.tokens.size();
    rounds += found.rounds;
    proposed += found.proposed;
    accepted += found.accepted;
    parted += found.tokens != expected.plain.tokens;
    other_rows += !same_rows;
    bytes += static_cast<double>(found.draft_bytes) / full_bytes;
    smallest_gap = std::min(smallest_gap, found.smallest_gap);
  }
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Continues many prompts with SmolLM2-135M in batches: plainly on the full cache, then by drafting on compressed caches and verifying on the\n"
      "full one, and compares tokens and K/V rows bit by bit. Exit status 1 if any differ.");
  std::vector<std::string> prompts;
  std::string calibration_text;
  std::size_t context = 0, members = 32;
  std::vector<std::uint32_t> lengths = {8};
  request wanted;
  wanted.sampling.temperature = 0;
  engine_choice choice;
  draft_method_choice methods;
  app.add_option("--tokens", prompts, "Token ids of the prompts as decimal text, one a file")->required()->type_name("FILE...");
  app.add_option("--context", context, "Takes so many tokens of each; 0: all")->capture_default_str();
  app.add_option("--max-tokens", wanted.max_tokens, "Tokens to generate")->check(CLI::Range(1, 65536))->capture_default_str();
  app.add_option("--draft-length", lengths, "Tokens drafted a round; several give a row each")->check(CLI::Range(0, 32))->capture_default_str()->type_name("N...");
  app.add_option("--batch", members, "Sequences that are decoded together")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--calibration", calibration_text, "Token ids of other text, for methods that are calibrated; else those are left out")->type_name("FILE");
  app.add_option("--temperature", wanted.sampling.temperature, "0: greedy; else sample and match")->check(CLI::Range(0.0, 100.0))->capture_default_str();
  app.add_option("--seed", wanted.seed)->capture_default_str();
  methods.add_to(app);
  choice.add_to(app);
  CLI11_PARSE(app, argc, argv);

  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "smollm2_batch: %s\n", why.text.c_str());
    return 2;
  };
  auto model = choice.load();
  if (!model) return fail(model.error());
  sequence_batch batch(*model);
  wanted.longest_draft = std::max(1U, *std::max_element(lengths.begin(), lengths.end()));
  std::vector<reference> references;
  for (const std::string& path : prompts) {
    auto ids = read_tokens(path);
    if (!ids) return fail(ids.error());
    if (ids->empty() || ids->size() < context) return fail({error_code::invalid_argument, path + ": holds fewer tokens than are asked for"});
    if (const status known = expect_known(path, *ids, model->shape().vocabulary); !known) return fail(known.error());
    if (context > 0) ids->resize(context);
    reference& added = references.emplace_back(reference{wanted, {}, {}});
    added.wanted.prompt = *std::move(ids);
    ++wanted.seed;
    auto engine = sequence_engine::make(*model, added.wanted.prompt.size() + wanted.max_tokens + wanted.longest_draft + 1, &batch);
    if (!engine) return fail(engine.error());
    added.engine = *std::move(engine);
  }
  draft_calibration calibration;
  if (!calibration_text.empty()) {
    const auto text = read_tokens(calibration_text);
    if (!text) return fail(text.error());
    auto made = calibrate(*model, choice.folder, *text);
    if (!made) return fail(made.error());
    calibration = *std::move(made);
  }

  auto start = std::chrono::steady_clock::now();
  std::size_t tokens = 0;
  const status plain = run_batch(batch, references.size(), members, [&](std::size_t i) -> status {
    auto made = decode(*references[i].engine, no_drafter(), 0, references[i].wanted);
    if (!made) return made.error();
    references[i].plain = *std::move(made);
    return done;
  });
  if (!plain) return fail(plain.error());
  for (const reference& each : references) tokens += each.plain.tokens.size();
  std::printf("%zu prompts, %zu tokens; plain decoding, %zu together: %.1f tokens/s\n", references.size(), tokens, members, static_cast<double>(tokens) / since(start));
  std::printf("%-52s %6s %6s %9s %9s %8s %8s %8s %9s\n", "method", "bytes", "length", "a round", "accepted", "parted", "rows", "gap", "tokens/s");
  std::fflush(stdout);

  const model_shape& shape = model->shape();
  bool identical = true;
  for (const draft_method& method : methods.methods()) {
    if (method.is_calibrated && calibration_text.empty()) continue;
    start = std::chrono::steady_clock::now();
    std::vector<totals> sums(lengths.size());
    std::mutex mutex;
    // All lengths of a prompt one after the other: sequences that run together are then of several lengths.
    const status ran = run_batch(batch, references.size() * lengths.size(), members, [&](std::size_t job) -> status {
      const reference& expected = references[job / lengths.size()];
      const std::size_t l = job % lengths.size(), prompt = expected.wanted.prompt.size();
      sequence_engine engine = *expected.engine;  // a prefix cache that holds the prompt
      if (auto cut = engine.truncate(prompt - 1); !cut) return as_failure(cut.error());
      const draft_setting setting{&calibration, static_cast<std::uint32_t>(shape.heads / shape.kv_heads), prompt};
      auto cache = method.make(engine.shape(), setting);
      if (!cache) return failure{cache.error().code, method.name + ": " + cache.error().message()};
      compressed_model<sequence_engine, any_draft_cache> drafting(engine, *std::move(cache));
      const auto found = decode(engine, model_drafter(std::move(drafting)), lengths[l], expected.wanted);
      if (!found) return failure{found.error().code, method.name + ": " + found.error().text};
      const bool same_rows = equal_rows(engine, *expected.engine);
      const double full = static_cast<double>(engine.length() * shape.layers * 2 * shape.kv_width() * sizeof(bf16));
      const std::lock_guard lock(mutex);
      sums[l].add(*found, expected, same_rows, full);
      return done;
    });
    if (!ran) return fail(ran.error());
    std::size_t all = 0;
    for (const totals& each : sums) all += each.tokens;
    for (std::size_t l = 0; l < lengths.size(); ++l) {
      const totals& sum = sums[l];
      std::printf("%-52s %6.3f %6u %9.2f %9.3f %8zu %8zu %8.3g %9.1f\n", method.name.c_str(), sum.bytes / static_cast<double>(references.size()), lengths[l],
                  static_cast<double>(sum.tokens) / static_cast<double>(sum.rounds),
                  sum.proposed == 0 ? 0.0 : static_cast<double>(sum.accepted) / static_cast<double>(sum.proposed), sum.parted, sum.other_rows,
                  static_cast<double>(sum.smallest_gap), static_cast<double>(all) / since(start));
      identical &= sum.parted == 0 && sum.other_rows == 0;
    }
    std::fflush(stdout);
  }
  std::printf("identical: %s\n", identical ? "yes" : "no");
  return identical ? 0 : 1;
}

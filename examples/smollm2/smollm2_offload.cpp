// SPDX-License-Identifier: Apache-2.0
// Speculative decoding of several sequences whose full caches live elsewhere, see --help.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <common/throttled_link.hpp>
#include <kvexact/speculative/offloaded_batch.hpp>
#include <kvexact/speculative/speculative_decoder.hpp>

#include "any_draft_cache.hpp"
#include "draft_methods.hpp"
#include "engine.hpp"
#include "generation.hpp"
#include "offloaded_engine.hpp"
#include "sequence_engine.hpp"
#include "token_file.hpp"
#include "tool_options.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

using decoder = self_speculative_decoder<offloaded_engine, any_draft_cache>;

struct workload {
  std::vector<request> requests;
  std::uint32_t draft_length = 8;
  double link = 0;  // bytes a second
  std::size_t capacity = 0;
  draft_method method;
};

/// One sequence of a batch.
struct offloaded_sequence {
  std::unique_ptr<offloaded_engine> engine;
  std::unique_ptr<decoder> decoding;
};

struct report {
  double seconds = 0;
  double waited = 0;  // of that, for the link: in verification, or with nothing else to do
  throttled_link::traffic moved;
  std::size_t iterations = 0, rounds = 0, tokens = 0, proposed = 0, accepted = 0, failures = 0, most_verified = 0;
};

/// Decodes all requests with so many full caches on the device at a time. In lock-step all are loaded and verified in the same iteration.
outcome<report> decode_offloaded(engine& model, const workload& work, std::size_t caches, bool lock_step,
                                 std::vector<offloaded_sequence>& sequences, device_memory& device, throttled_link& link) {
  const std::uint64_t full = work.capacity * model.shape().layers * model.shape().kv_width() * 2 * sizeof(bf16);
  for (std::size_t i = 0; i < work.requests.size(); ++i) {
    const request& wanted = work.requests[i];
    auto engine = std::make_unique<offloaded_engine>(model, work.capacity, device, link, i, std::chrono::seconds(60));
    const draft_setting setting{nullptr, static_cast<std::uint32_t>(model.shape().heads / model.shape().kv_heads), wanted.prompt.size()};
    auto cache = work.method.make(engine->shape(), setting);
    if (!cache) return as_failure(cache.error());
    const auto sampler = standard_sampler::make({.temperature = 0});
    if (!sampler) return as_failure(sampler.error());
    auto made =
        decoder::make(*engine, model_drafter(compressed_model<offloaded_engine, any_draft_cache>(*engine, *std::move(cache))), {},
                      fixed_draft_length(work.draft_length),
                      {.sampler = *sampler, .stops = {.max_new_tokens = wanted.max_tokens}, .longest_draft = 2 * work.draft_length});
    if (!made) return as_failure(made.error());
    const auto begun = made->begin(wanted.prompt);
    if (!begun) return as_failure(begun.error());
    link.release(i);
    sequences.push_back({std::move(engine), std::make_unique<decoder>(*std::move(made))});
  }

  // What the link moves while all draft a token.
  const auto before_draft = std::chrono::steady_clock::now();
  for (const offloaded_sequence& each : sequences) {
    if (const auto drafted = each.decoding->draft(1); !drafted) return as_failure(drafted.error());
    each.decoding->discard();
  }
  const double iteration_seconds = since(before_draft);
  const auto an_iteration = static_cast<std::uint64_t>(work.link * iteration_seconds);
  auto batch =
      offloaded_batch<decoder, throttled_link>::make(link, {.link = lock_step ? full * caches : std::max<std::uint64_t>(an_iteration, 1),
                                                            .transient = full * caches,
                                                            .resident = full * sequences.size(),
                                                            .max_requests = static_cast<std::uint32_t>(sequences.size())});
  if (!batch) return as_failure(batch.error());

  report all;
  const auto start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto submitted =
        batch->submit(*sequences[i].decoding,
                      {.id = i, .full = full, .draft = sequences[i].decoding->drafts().model().cache().bytes(), .transfer = full});
    if (!submitted) return as_failure(submitted.error());
  }
  while (batch->size() > 0) {
    std::size_t verified = 0;
    for (const batch_event& each : batch->iterate()) {
      if (each.failure) {
        ++all.failures;
        std::fprintf(stderr, "request %llu: %s\n", static_cast<unsigned long long>(each.id), each.failure->message().c_str());
      }
      if (!each.round) continue;
      ++verified;
      all.tokens += each.round->committed.size();
      all.proposed += each.round->proposed;
      all.accepted += each.round->accepted;
    }
    ++all.iterations;
    all.rounds += verified;
    all.most_verified = std::max(all.most_verified, verified);
    if (batch->is_idle()) {
      std::this_thread::sleep_for(seconds(iteration_seconds));
      all.waited += iteration_seconds;
    }
  }
  all.seconds = since(start);
  for (const offloaded_sequence& each : sequences) all.waited += each.engine->seconds_waited();
  all.moved = link.moved();
  return all;
}

/// Requests that take turns at the files, each a piece that no other one has.
outcome<std::vector<request>> read_requests(const std::vector<std::string>& files, std::size_t count, std::size_t prompt_tokens,
                                            std::uint64_t max_tokens) {
  std::vector<std::vector<std::uint32_t>> texts;
  for (const std::string& file : files) {
    auto ids = read_tokens(file);
    if (!ids) return ids.error();
    texts.push_back(*std::move(ids));
  }
  std::vector<request> requests;
  for (std::size_t i = 0; i < count; ++i) {
    const auto& text = texts[i % texts.size()];
    const std::size_t first = i / texts.size() * prompt_tokens;
    if (first + prompt_tokens > text.size())
      return failure{error_code::invalid_argument, files[i % texts.size()] + ": too short for " +
                                                       std::to_string(first / prompt_tokens + 1) + " prompts of " +
                                                       std::to_string(prompt_tokens) + " tokens"};
    request& added = requests.emplace_back();
    added.prompt.assign(text.begin() + static_cast<std::ptrdiff_t>(first),
                        text.begin() + static_cast<std::ptrdiff_t>(first + prompt_tokens));
    added.max_tokens = max_tokens;
  }
  return requests;
}

/// The tokens and the rows, where the full caches live, of plain decoding.
bool is_same(const offloaded_sequence& found, const std::vector<std::uint32_t>& expected, const sequence_engine& reference) {
  const auto tokens = found.decoding->tokens();
  if (tokens.size() < expected.size() || !std::ranges::equal(tokens.last(expected.size()), expected) ||
      found.engine->length() != reference.length())
    return false;
  for (std::uint32_t layer = 0; layer < reference.shape().layers(); ++layer) {
    const std::size_t size = reference.length() * reference.shape().layer(layer).kv_heads * reference.shape().layer(layer).key_dim;
    const auto a = found.engine->home_rows(layer, 0), b = reference.rows(layer, 0);
    for (const auto& [x, y] : {std::pair{a.key.data, b.key.data}, std::pair{a.value.data, b.value.data}}) {
      if (!std::equal(x, x + size, y, [](bf16 left, bf16 right) { return left.bits == right.bits; })) return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Decodes several prompts with SmolLM2-135M whose full caches live in a memory of their own: they are drafted on compressed caches, "
      "and each\n"
      "full cache comes over a link of limited speed (a thread) when it is verified. Once staggered, so that loads hide behind the "
      "drafting of\n"
      "others, once in lock-step; tokens and K/V rows are compared with plain decoding; exit status 1 if they differ.");
  std::vector<std::string> files;
  std::string compressor = "int8";
  std::size_t count = 6, prompt_tokens = 256, caches = 2;
  std::uint64_t max_tokens = 48;
  double megabytes = 50;
  workload work;
  engine_choice choice;
  app.add_option("--tokens", files, "Token ids as decimal text; prompts are pieces of them")->required()->type_name("FILE");
  app.add_option("--requests", count)->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--prompt-tokens", prompt_tokens)->check(CLI::Range(2, 8192))->capture_default_str();
  app.add_option("--max-tokens", max_tokens, "Tokens to generate for each")->check(CLI::Range(1, 65536))->capture_default_str();
  app.add_option("--compressor", compressor, "The first method whose name begins with this text; see smollm2_generate --list")
      ->capture_default_str()
      ->type_name("TEXT");
  app.add_option("--draft-length", work.draft_length)->check(CLI::Range(1, 16))->capture_default_str();
  app.add_option("--link", megabytes, "Speed of the link")->check(CLI::Range(0.001, 1e6))->capture_default_str()->type_name("MB/s");
  app.add_option("--caches", caches, "Full caches that the device has memory for when staggered; in lock-step it has it for all")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  choice.add_to(app);
  CLI11_PARSE(app, argc, argv);

  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "smollm2_offload: %s\n", why.text.c_str());
    return 2;
  };
  for (draft_method& each : all_draft_methods()) {
    if (!work.method.make && !each.is_calibrated && each.name.starts_with(compressor)) work.method = std::move(each);
  }
  if (!work.method.make) return fail({error_code::invalid_argument, "no method without calibration is called " + in_quotes(compressor)});
  work.link = megabytes * 1e6;
  work.capacity = prompt_tokens + max_tokens + 2 * work.draft_length + 1;
  auto requests = read_requests(files, count, prompt_tokens, max_tokens);
  if (!requests) return fail(requests.error());
  work.requests = *std::move(requests);
  auto model = choice.load();
  if (!model) return fail(model.error());

  std::vector<sequence_engine> references;
  std::vector<std::vector<std::uint32_t>> expected;
  double plain_seconds = 0;
  for (const request& each : work.requests) {
    auto engine = sequence_engine::make(*model, work.capacity);
    if (!engine) return fail(engine.error());
    references.push_back(*std::move(engine));
    auto plain = decode(references.back(), no_drafter(), greedy(), fixed_draft_length(0), each, false);
    if (!plain) return fail(plain.error());
    plain_seconds += plain->seconds;
    expected.push_back(std::move(plain->tokens));
  }
  std::printf("%zu prompts of %zu tokens, %llu tokens each; draft length %u on %s; a link of %.0f MB/s\n", count, prompt_tokens,
              static_cast<unsigned long long>(max_tokens), work.draft_length, work.method.name.c_str(), megabytes);
  std::printf(
      "| schedule | caches on the device | verified at once | tokens a round | accepted | MB over the link | link busy s | waited for it s "
      "| hidden | s | tokens/s |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|---|---|\n");
  bool same = true;
  for (const bool lock_step : {false, true}) {
    const std::size_t on_device = lock_step ? count : std::min(caches, count);
    auto device = device_memory::make(*model, on_device, work.capacity);
    if (!device) return fail(device.error());
    throttled_link link(work.link);
    std::vector<offloaded_sequence> sequences;
    const auto found = decode_offloaded(*model, work, on_device, lock_step, sequences, *device, link);
    if (!found) return fail(found.error());
    for (std::size_t i = 0; i < count; ++i) same = same && is_same(sequences[i], expected[i], references[i]);
    const auto part = [](double some, double all) { return all > 0 ? some / all : 0.0; };
    std::printf("| %s | %zu | %zu | %.2f | %.2f | %.1f | %.2f | %.2f | %.0f %% | %.2f | %.1f |\n", lock_step ? "lock-step" : "staggered",
                on_device, found->most_verified, part(static_cast<double>(found->tokens), static_cast<double>(found->rounds)),
                part(static_cast<double>(found->accepted), static_cast<double>(found->proposed)),
                static_cast<double>(found->moved.bytes) / 1e6, found->moved.seconds, found->waited,
                100 * std::max(0.0, 1 - part(found->waited, found->moved.seconds)), found->seconds,
                part(static_cast<double>(found->tokens), found->seconds));
    std::fflush(stdout);
  }
  std::printf("plain decoding, with all full caches on the device: %.2f s\n", plain_seconds);
  std::printf("identical: %s\n", same ? "yes, tokens and K/V rows" : "no");
  return same ? 0 : 1;
}

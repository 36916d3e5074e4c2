// SPDX-License-Identifier: Apache-2.0
// Exact speculative decoding of SmolLM2-135M with drafts from another machine, see --help.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <common/mapped_file.hpp>
#include <common/tcp_channel.hpp>
#include <kvexact/codec/codec.hpp>
#include <kvexact/remote/draft_server.hpp>
#include <kvexact/remote/remote_drafter.hpp>
#include <kvexact/speculative/speculative_decoder.hpp>

#include "any_draft_cache.hpp"
#include "draft_calibration.hpp"
#include "draft_methods.hpp"
#include "engine.hpp"
#include "generation.hpp"
#include "rotary.hpp"
#include "sequence_engine.hpp"
#include "token_file.hpp"
#include "tool_options.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

using row_codec = codec_without_model<bf16>;

struct arguments {
  std::string tokens, profile_path, compressor = "int4", connect_to;
  std::uint16_t listen_on = 0;
  std::uint32_t draft_length = 8;
  std::uint64_t context = 4096;
  request wanted;
  engine_choice choice;
};

/// The far node's model, without a cache of its own.
class far_engine {
 public:
  far_engine(engine& model, std::size_t positions) : model_(&model), rotary_(model.shape().rope_base, model.shape().head_dim, positions) {}

  [[nodiscard]] std::uint32_t vocabulary() const noexcept { return static_cast<std::uint32_t>(model_->shape().vocabulary); }
  template <class Cache>
  result<void> step(std::uint32_t token, std::uint64_t position, Cache& cache, std::span<float> logits) noexcept {
    return examples::detail::step_outside(*model_, rotary_, token, position, cache, logits);
  }

 private:
  engine* model_;
  rotary_table rotary_;
};

outcome<profile<row_codec>> read_profile(const std::string& path) {
  const auto file = mapped_file::open(path);
  if (!file) return file.error();
  auto parsed = profile<row_codec>::parse(file->bytes());
  if (!parsed) return failure{parsed.error().code, path + ": " + parsed.error().message()};
  return *std::move(parsed);
}

/// Accepts connections one after the other: so many, or for ever.
struct far_node {
  std::optional<engine> model;
  std::optional<profile<row_codec>> parameters;
  std::optional<far_engine> stepping;
  std::optional<tcp_listener> listener;
  draft_method method;

  status load(const arguments& args) {
    const auto methods = all_draft_methods();
    const auto is_meant = [&](const draft_method& each) { return each.name.starts_with(args.compressor); };
    const auto found = std::find_if(methods.begin(), methods.end(), is_meant);
    if (found == methods.end()) return failure{error_code::invalid_argument, "no method is called " + in_quotes(args.compressor)};
    if (found->is_calibrated) return failure{error_code::unsupported, found->name + ": this tool calibrates no method"};
    method = *found;
    auto loaded = args.choice.load();
    if (!loaded) return loaded.error();
    model = std::move(*loaded);
    auto read = read_profile(args.profile_path);
    if (!read) return read.error();
    parameters = std::move(*read);
    stepping.emplace(*model, args.context);
    auto listening = tcp_listener::make(args.listen_on, args.listen_on != 0);
    if (!listening) return as_failure(listening.error());
    listener = *std::move(listening);
    return done;
  }
  /// Says what became of each connection. `prompt`: tokens of it, for methods that keep a share of them.
  void serve(std::size_t connections, std::size_t prompt) {
    const draft_calibration none;
    const draft_setting setting{&none, static_cast<std::uint32_t>(model->shape().heads / model->shape().kv_heads), prompt};
    auto make_cache = [&]() noexcept { return method.make(parameters->shape(), setting); };
    draft_server<row_codec, far_engine, decltype(make_cache)> server(*stepping, *parameters, make_cache);
    for (std::size_t i = 0; i < connections; ++i) {
      auto accepted = listener->accept(std::chrono::steady_clock::now() + std::chrono::hours(1));
      if (!accepted) continue;
      const auto served = server.serve(*std::move(accepted));
      const std::size_t bytes = server.cache() == nullptr ? 0 : server.cache()->bytes();
      std::printf("far node: %s cache of %.2f MB; %s\n", method.name.c_str(), static_cast<double>(bytes) / 1e6,
                  served ? "done" : served.error().message().c_str());
    }
  }
};

struct traffic {
  std::uint64_t sent = 0, received = 0;
};

class counted_channel {
 public:
  counted_channel(tcp_channel inner, traffic& moved) noexcept : inner_(std::move(inner)), moved_(&moved) {}
  result<std::size_t> send(std::span<const std::byte> bytes, channel_deadline deadline) noexcept {
    return count(inner_.send(bytes, deadline), moved_->sent);
  }
  result<std::size_t> receive(std::span<std::byte> bytes, channel_deadline deadline) noexcept {
    return count(inner_.receive(bytes, deadline), moved_->received);
  }

 private:
  static result<std::size_t> count(result<std::size_t> moved, std::uint64_t& counter) noexcept {
    if (moved) counter += *moved;
    return moved;
  }
  tcp_channel inner_;
  traffic* moved_;
};

/// Where the far node listens.
struct far_address {
  std::string host;
  std::uint16_t port;
  traffic* moved;

  result<counted_channel> operator()(channel_deadline deadline) noexcept {
    auto connected = tcp_channel::connect(host, port, deadline);
    if (!connected) return connected.error();
    return counted_channel(*std::move(connected), *moved);
  }
};

/// Decodes with the far node's drafts, and plainly; prints what crossed the link. Whether tokens and rows are the same.
template <class Rule>
outcome<bool> decode_remotely(const arguments& args, const std::string& host, std::uint16_t port, const Rule& rule) {
  auto model = args.choice.load();
  if (!model) return model.error();
  const auto parameters = read_profile(args.profile_path);
  if (!parameters) return parameters.error();
  const std::size_t prompt = args.wanted.prompt.size(), capacity = prompt + args.wanted.max_tokens + 2 * args.draft_length + 8;
  auto near = sequence_engine::make(*model, capacity), other = sequence_engine::make(*model, capacity);
  if (!near || !other) return near ? other.error() : near.error();

  traffic moved;
  using drafter = remote_drafter<row_codec, sequence_engine, far_address>;
  auto drafts = drafter::make(*near, *parameters, {host, port, &moved},
                              {.sampling = args.wanted.sampling, .seed = args.wanted.seed, .patience = std::chrono::minutes(2)});
  const auto sampler = standard_sampler::make(args.wanted.sampling);
  if (!drafts || !sampler) return as_failure(drafts ? sampler.error() : drafts.error());
  auto made = speculative_decoder<sequence_engine, drafter, Rule>::make(
      *near, *std::move(drafts), rule, fixed_draft_length(args.draft_length),
      {.sampler = *sampler, .stops = {.max_new_tokens = args.wanted.max_tokens}, .longest_draft = std::max(args.draft_length, 1U)});
  if (!made) return as_failure(made.error());
  const auto read = near->forward(std::span(args.wanted.prompt).first(prompt - 1), {});
  if (!read) return as_failure(read.error());
  auto start = std::chrono::steady_clock::now();
  const auto begun = made->begin(args.wanted.prompt);
  if (!begun) return as_failure(begun.error());
  const traffic prefix = moved;
  const double row_bytes = static_cast<double>(near->shape().channels() * sizeof(bf16));
  const auto print_rows = [&](const char* what, double rows, double bytes) {
    if (bytes == 0) return;
    std::printf("%s: %.0f rows, %.2f MB raw, %.2f MB over the link, ratio %.3f\n", what, rows, rows * row_bytes / 1e6, bytes / 1e6,
                rows * row_bytes / bytes);
  };
  print_rows("prefix", static_cast<double>(prompt - 1), static_cast<double>(prefix.sent));
  std::printf("prefix: sent in %.2f s\n", since(start));

  start = std::chrono::steady_clock::now();
  double rounds = 0, proposed = 0, accepted = 0, drafted = 0;
  std::optional<error> draft_error;
  while (!made->stop()) {
    const auto report = made->round();
    if (!report) return as_failure(report.error());
    rounds += 1;
    drafted += report->proposed > 0 ? 1 : 0;
    proposed += static_cast<double>(report->proposed);
    accepted += static_cast<double>(report->accepted);
    if (report->draft_error) draft_error = report->draft_error;
  }
  const double tokens = static_cast<double>(made->tokens().size() - prompt), seconds = since(start);
  const double rows = static_cast<double>(made->drafts().rows()) - static_cast<double>(prompt - 1);
  std::printf("%.0f tokens in %.0f rounds, %.2f a round; %.0f of %.0f drafts accepted (%.3f); %.1f tokens/s\n", tokens, rounds,
              tokens / rounds, accepted, proposed, proposed == 0 ? 0 : accepted / proposed, tokens / seconds);
  print_rows("rounds", rows, static_cast<double>(moved.sent - prefix.sent));
  if (drafted > 0)
    std::printf("a round with drafts: %.0f bytes there, %.0f back\n", static_cast<double>(moved.sent - prefix.sent) / drafted,
                static_cast<double>(moved.received - prefix.received) / drafted);
  if (draft_error) {
    std::printf("rounds without drafts: %.0f, the last because of %s; the far node: %s\n", rounds - drafted, draft_error->message().c_str(),
                in_quotes(made->drafts().far_failure()).c_str());
  }

  const auto expected = decode(*other, no_drafter(), rule, fixed_draft_length(0), args.wanted, false);
  if (!expected) return expected.error();
  const bool same = std::ranges::equal(made->tokens().subspan(prompt), expected->tokens) && equal_rows(*near, *other);
  std::printf("identical: %s; plain decoding %.1f tokens/s\n", same ? "yes" : "no",
              static_cast<double>(expected->tokens.size()) / expected->seconds);
  return same;
}

/// "HOST:PORT"
std::optional<std::pair<std::string, std::uint16_t>> parse_address(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  std::uint16_t port = 0;
  if (colon == std::string::npos) return {};
  const char* const end = text.data() + text.size();
  const auto [stop, problem] = std::from_chars(text.data() + colon + 1, end, port);
  if (problem != std::errc{} || stop != end) return {};
  return std::pair(text.substr(0, colon), port);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Continues a prompt with SmolLM2-135M on two nodes: the near one has the full cache and verifies, the far one drafts on a\n"
      "compressed cache, to which rows come over a TCP connection, without loss. Both are in this process, unless --listen or --connect\n"
      "is given. Then compares with decoding on the full cache alone; exit status 1 if tokens or K/V rows differ.");
  arguments args;
  args.wanted.sampling.temperature = 0;
  args.wanted.max_tokens = 128;
  args.choice.threads = 1;
  const auto* const near_only =
      app.add_option("--connect", args.connect_to, "Only the near node, for a far one that listens there")->type_name("HOST:PORT");
  const auto* const far_only =
      app.add_option("--listen", args.listen_on, "Only the far node, one connection after the other")
          ->check(CLI::Range(1, 65535))
          ->type_name("PORT");
  app.add_option("--profile", args.profile_path, "Made by kvexact calibrate from caches of this model; both nodes need the same")
      ->required()
      ->type_name("FILE");
  app.add_option("--tokens", args.tokens, "Token ids of the prompt as decimal text; the near node's")->type_name("FILE");
  app.add_option("--max-tokens", args.wanted.max_tokens, "Tokens to generate")->check(CLI::Range(1, 65536))->capture_default_str();
  app.add_option("--compressor", args.compressor,
                 "The far node's: the first method whose name begins with this text; smollm2_generate --list names them")
      ->capture_default_str()
      ->type_name("TEXT");
  app.add_option("--context", args.context,
                 "Most tokens of a sequence on the far node; with --listen also what methods that keep a share go by")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--draft-length", args.draft_length)->check(CLI::Range(0, 32))->capture_default_str();
  app.add_option("--temperature", args.wanted.sampling.temperature, "0: greedy")->check(CLI::Range(0.0, 100.0))->capture_default_str();
  app.add_option("--top-p", args.wanted.sampling.top_p)->capture_default_str();
  app.add_option("--repetition-penalty", args.wanted.sampling.repetition_penalty)->capture_default_str();
  app.add_option("--seed", args.wanted.seed)->capture_default_str();
  args.choice.add_to(app);
  CLI11_PARSE(app, argc, argv);

  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "smollm2_remote: %s\n", why.text.c_str());
    return 2;
  };
  if (near_only->count() != 0 && far_only->count() != 0)
    return fail({error_code::invalid_argument, "--listen and --connect are for two processes"});
  std::pair<std::string, std::uint16_t> address{"127.0.0.1", 0};
  far_node far;
  if (near_only->count() == 0) {
    if (auto loaded = far.load(args); !loaded) return fail(loaded.error());
    address.second = far.listener->port();
    if (far_only->count() != 0) far.serve(std::numeric_limits<std::size_t>::max(), args.context);
  } else {
    const auto given = parse_address(args.connect_to);
    if (!given) return fail({error_code::invalid_argument, "--connect is HOST:PORT"});
    address = *given;
  }
  auto ids = read_tokens(args.tokens);
  if (!ids) return fail(ids.error());
  if (ids->empty()) return fail({error_code::invalid_argument, args.tokens + ": holds no tokens"});
  args.wanted.prompt = *std::move(ids);

  std::optional<std::thread> thread;
  if (near_only->count() == 0) thread.emplace([&] { far.serve(1, args.wanted.prompt.size()); });
  const bool is_greedy = args.wanted.sampling.temperature == 0;
  const auto same = is_greedy ? decode_remotely(args, address.first, address.second, greedy())
                              : decode_remotely(args, address.first, address.second, sample_and_match(args.wanted.seed));
  if (thread) {
    // Where it never came to a connection, the thread still waits for one.
    (void)tcp_channel::connect(address.first, address.second, std::chrono::steady_clock::now() + std::chrono::seconds(1));
    thread->join();
  }
  if (!same) return fail(same.error());
  return *same ? 0 : 1;
}

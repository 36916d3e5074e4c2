// SPDX-License-Identifier: Apache-2.0
#include <kvexact/remote/remote_drafter.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/compression/snap_kv.hpp>
#include <kvexact/remote/draft_server.hpp>
#include <kvexact/speculative/speculative_decoder.hpp>

#include "../../examples/common/tcp_channel.hpp"  // also where the examples are not built
#include "faulty_channel.hpp"
#include "speculative/any_drafter.hpp"
#include "speculative/toy_engine.hpp"
#include "toy_profile.hpp"

using namespace kvexact;
using namespace kvexact::test;
using examples::tcp_channel;
using examples::tcp_listener;
using namespace std::chrono_literals;

namespace {

/// It observes attention, so rows are not all that it must be given.
using cache_type = draft_cache<snap_kv<bf16>>;

result<cache_type> make_cache() noexcept {
  const auto shape = *cache_shape::uniform(toy_engine::layer_count, {toy_engine::heads, toy_engine::dim, toy_engine::dim});
  constexpr dropper_options small{
      .sinks = 1, .budget = 6, .window = 4, .interval = 8, .max_rollback = 16, .query_heads = toy_engine::shared};
  return cache_type::make(shape, {{.eviction = small}});
}

const profile<toy_codec>& toy_profile() {
  static const auto parsed = *profile<toy_codec>::parse(toy_profile_file(1));
  return parsed;
}

using make_cache_type = result<cache_type> (*)() noexcept;
using server_type = draft_server<toy_codec, toy_engine, make_cache_type>;

/// Accepts connections on a thread of its own, one after the other, until it is destroyed.
class far_thread {
 public:
  explicit far_thread(std::function<void(tcp_channel)> serve) : listener_(*tcp_listener::make(0)) {
    thread_ = std::thread([this, serve = std::move(serve)] {
      while (!is_stopping_) {
        if (auto accepted = listener_.accept(std::chrono::steady_clock::now() + 5ms)) serve(*std::move(accepted));
      }
    });
  }
  far_thread(const far_thread&) = delete;
  ~far_thread() {
    is_stopping_ = true;
    thread_.join();
  }

  [[nodiscard]] result<tcp_channel> connect(channel_deadline deadline) const noexcept {
    return tcp_channel::connect("127.0.0.1", listener_.port(), deadline);
  }

 private:
  tcp_listener listener_;
  std::atomic<bool> is_stopping_ = false;
  std::thread thread_;
};

/// A far node with the model of the near one.
struct far_node {
  explicit far_node(const toy_engine::options& options = {}, const profile<toy_codec>& parameters = toy_profile())
      : engine(options), server(engine, parameters, make_cache, {.idle = 20s, .patience = 20s, .longest_draft = 16}) {
    thread.emplace([this](tcp_channel channel) { last = server.serve(std::move(channel)); });
  }
  /// To look at the server: there must be no connection any more.
  void stop() { thread.reset(); }

  toy_engine engine;
  server_type server;
  result<void> last;  // outcome of the last connection
  std::optional<far_thread> thread;
};

struct connect_to {
  const far_thread* far;
  line_fault* fault;

  result<faulty_channel> operator()(channel_deadline deadline) noexcept {
    ++fault->connections;
    auto connected = far->connect(deadline);
    if (!connected) return connected.error();
    return faulty_channel(*std::move(connected), *fault);
  }
};
using near_type = remote_drafter<toy_codec, toy_engine, connect_to>;

remote_options patient(const sampling_parameters& sampling, std::uint64_t seed = 0) {
  return {.sampling = sampling, .seed = seed, .patience = 20s, .retry_after = 0s, .rows_per_message = 7};
}
near_type made_near(const toy_engine& engine, const far_thread& far, line_fault& fault, const remote_options& options) {
  return *near_type::make(engine, toy_profile(), {&far, &fault}, options);
}
auto made_local(toy_engine& engine) { return model_drafter(compressed_model<toy_engine, cache_type>(engine, *make_cache())); }

std::vector<token_id> some_tokens(std::size_t count) {
  std::vector<token_id> tokens;
  for (std::size_t i = 0; i < count; ++i) tokens.push_back(static_cast<token_id>(i * i % 11));
  return tokens;
}

constexpr std::uint64_t new_tokens = 40;

template <class Rule>
using decoder_of = speculative_decoder<toy_engine, any_drafter<Rule>, Rule>;

struct decoded {
  std::vector<token_id> tokens;
  std::vector<std::byte> rows;
  std::vector<std::size_t> proposed, accepted;  // by round
  std::vector<error_code> errors;
};

/// All of a sequence, `drafts` by drafter.
template <class Rule>
decoded decode(toy_engine& engine, any_drafter<Rule> drafts, const Rule& rule, const sampling_parameters& sampling,
               std::span<const token_id> prompt, std::uint32_t length) {
  auto decoder = decoder_of<Rule>::make(
      engine, std::move(drafts), rule, fixed_draft_length(length),
      {.sampler = *standard_sampler::make(sampling), .stops = {.max_new_tokens = new_tokens}, .longest_draft = 8});
  REQUIRE(decoder);
  REQUIRE(decoder->begin(prompt));
  decoded all;
  while (!decoder->stop()) {
    const auto report = decoder->round();
    REQUIRE(report);
    all.proposed.push_back(report->proposed);
    all.accepted.push_back(report->accepted);
    if (report->draft_error) all.errors.push_back(report->draft_error->code);
  }
  all.tokens.assign(decoder->tokens().begin(), decoder->tokens().end());
  std::vector<std::byte> row;
  for (std::uint64_t t = 0; t < engine.length(); ++t) {
    detail::read_rows(engine, t, row);
    all.rows.insert(all.rows.end(), row.begin(), row.end());
  }
  (void)decoder->synchronise();
  return all;
}
struct no_drafts {
  [[nodiscard]] std::uint64_t max_draft() const noexcept { return 0; }
  result<void> synchronise(std::span<const token_id>) noexcept { return {}; }
  template <class Rule, class Sampler>
  result<void> propose(const draft_request<Rule, Sampler>&, draft_block&) noexcept {
    return {};
  }
};
template <class Rule>
decoded decode_plainly(const Rule& rule, const sampling_parameters& sampling, std::span<const token_id> prompt) {
  toy_engine engine({});
  return decode<Rule>(engine, no_drafts(), rule, sampling, prompt, 0);
}

bool are_same(const cache_type& a, const cache_type& b) {
  for (std::uint32_t l = 0; l < toy_engine::layer_count; ++l) {
    for (std::uint32_t h = 0; h < toy_engine::heads; ++h) {
      const std::size_t count = a.entries(l, h);
      if (a.length(l) != b.length(l) || b.entries(l, h) != count) return false;
      std::vector<std::uint64_t> p(count), q(count);
      std::vector<float> k(count * toy_engine::dim), v(k), x(k), y(k);
      REQUIRE(a.materialise(l, h, {p, k, v}));
      REQUIRE(b.materialise(l, h, {q, x, y}));
      if (p != q || k != x || v != y) return false;
    }
  }
  return true;
}

constexpr sampling_parameters greedily{.temperature = 0};
constexpr sampling_parameters lively{
    .temperature = 0.8F, .top_p = 0.9F, .repetition_penalty = 1.2F, .presence_penalty = 0.5F, .penalty_window = 30};

}  // namespace

TEST_CASE("remote_drafter: the tokens of plain decoding and the drafts of a local drafter, over a socket") {
  const auto compare = [](const auto& rule, const sampling_parameters& sampling, std::uint64_t seed, std::size_t prompt_length) {
    using rule_type = std::remove_cvref_t<decltype(rule)>;
    const auto prompt = some_tokens(prompt_length);
    const decoded plain = decode_plainly(rule, sampling, prompt);
    toy_engine engine({}), other({});
    const decoded local = decode<rule_type>(other, made_local(other), rule, sampling, prompt, 5);
    auto expected = made_local(other);
    REQUIRE(expected.synchronise(plain.tokens));

    far_node far;
    line_fault line;
    auto drafts = made_near(engine, *far.thread, line, patient(sampling, seed));
    const decoded remote = decode<rule_type>(engine, std::move(drafts), rule, sampling, prompt, 5);
    far.stop();
    CHECK(remote.tokens == plain.tokens);
    CHECK(remote.rows == plain.rows);
    CHECK(remote.errors.empty());
    CHECK(remote.proposed == local.proposed);
    CHECK(remote.accepted == local.accepted);
    CHECK(line.connections == 1);
    CHECK(far.last);
    REQUIRE(far.server.cache() != nullptr);
    CHECK(are_same(*far.server.cache(), expected.model().cache()));
    CHECK(far.engine.rows_run() == 0);  // it never had the full cache
  };
  compare(greedy(), greedily, 0, 20);
  compare(greedy(), greedily, 0, 1);
  compare(sample_and_match(5), lively, 5, 20);
  compare(sample_and_match(6), lively, 6, 300);  // a prompt of more rows than a message can have
}

TEST_CASE("remote_drafter: proposals with pending tokens, behind drafts, with probabilities, and over a second connection") {
  const auto tokens = some_tokens(60);
  toy_engine engine({});
  far_node far;
  line_fault line{.what = line_fault::kind::close, .at = 3000};  // rows are on their way then
  auto remote = made_near(engine, *far.thread, line, patient(lively, 3));
  auto local = made_local(engine);
  const sample_and_match rule(3);
  auto sampler = *standard_sampler::make(lively);
  REQUIRE(sampler.read_prompt(std::span(tokens).first(10)));
  auto at = *draft_block::make(16, engine.vocabulary()), here = *draft_block::make(16, engine.vocabulary());
  for (std::size_t length = 10; length < 60; length += 7) {
    const auto committed = std::span(tokens).first(length);
    REQUIRE(engine.forward(committed.subspan(engine.length(), length - 1 - engine.length()), {}));
    if (!remote.synchronise(committed)) REQUIRE(remote.synchronise(committed));
    REQUIRE(local.synchronise(committed));
    CHECK(remote.rows() == length - 1);
    const std::vector<token_id> pending{4, 5};
    auto ahead = sampler;
    for (const token_id token : pending) REQUIRE(ahead.commit(token));
    std::vector<double> probabilities;
    const auto ask = [&](auto& drafts, draft_block& block, std::size_t wanted, double least) {
      draft_request<sample_and_match, standard_sampler> request{committed, pending, wanted, rule, ahead};
      std::pair context(&probabilities, least);
      request.context = &context;
      request.more = [](void* of, double top) {
        auto& [all, limit] = *static_cast<std::pair<std::vector<double>*, double>*>(of);
        all->push_back(top);
        return top >= limit;
      };
      probabilities.clear();
      REQUIRE(drafts.propose(request, block));
      return probabilities;
    };
    for (const auto& [wanted, least] : {std::pair<std::size_t, double>{3, 0}, {2, 0}, {3, 0.3}}) {
      const auto there = ask(remote, at, wanted, least);
      const auto expected = ask(local, here, wanted, least);
      REQUIRE(there.size() == expected.size());
      for (std::size_t i = 0; i < there.size(); ++i) CHECK(there[i] == doctest::Approx(expected[i]));
      CHECK(std::ranges::equal(at.view().tokens, here.view().tokens));
    }
    at.clear();
    here.clear();
    if (length + 7 < 60) {
      for (const token_id token : std::span(tokens).subspan(length, 7)) REQUIRE(sampler.commit(token));
    }
  }
  CHECK(line.connections == 2);
  // No more than the far node can take back: 16.
  draft_request<sample_and_match, standard_sampler> request{std::span(tokens).first(59), tokens, 5, rule, sampler};
  REQUIRE(remote.propose(request, at));
  CHECK(at.size() == 0);
}

TEST_CASE("remote_drafter: a line that ends, stalls or lies at any byte costs drafts, not tokens") {
  const auto prompt = some_tokens(20);
  const decoded plain = decode_plainly(greedy(), greedily, prompt);
  line_fault good;
  {
    far_node far;
    toy_engine engine({});
    CHECK(decode<greedy>(engine, made_near(engine, *far.thread, good, patient(greedily)), {}, greedily, prompt, 4).tokens == plain.tokens);
  }
  // Some bytes of every message, sent and received.
  for (const bool of_received : {false, true}) {
    const std::uint64_t bytes = of_received ? good.received : good.sent;
    for (const auto kind : {line_fault::kind::close, line_fault::kind::flip, line_fault::kind::stall}) {
      for (std::uint64_t at = 0; at < bytes; at += bytes / 6 + 1) {
        CAPTURE(of_received);
        CAPTURE(static_cast<int>(kind));
        CAPTURE(at);
        far_node far;
        line_fault line{.what = kind, .of_received = of_received, .at = at};
        toy_engine engine({});
        remote_options options = patient(greedily);
        if (kind == line_fault::kind::stall) options.patience = 2ms;
        const decoded remote = decode<greedy>(engine, made_near(engine, *far.thread, line, options), {}, greedily, prompt, 4);
        CHECK(remote.tokens == plain.tokens);
        CHECK(remote.rows == plain.rows);
        // After the fault another connection goes on.
        if (kind != line_fault::kind::stall) CHECK(line.connections == 2);
        if (kind != line_fault::kind::stall) CHECK(remote.errors.size() <= 1);
      }
    }
  }
}

TEST_CASE("remote_drafter: who connects again finds the rows that crossed the link before") {
  const auto tokens = some_tokens(60);
  toy_engine engine({});
  REQUIRE(engine.forward(std::span(tokens).first(59), {}));
  far_node far;
  const auto rows_of = [&](std::span<const token_id> committed) {
    line_fault line;
    auto remote = made_near(engine, *far.thread, line, patient(greedily));
    REQUIRE(remote.synchronise(committed));
    auto block = *draft_block::make(4, 0);
    REQUIRE(remote.propose(draft_request<greedy, standard_sampler>{committed, {}, 4, {}, *standard_sampler::make(greedily)}, block));
    CHECK(block.size() == 4);
    return line.sent;
  };
  const auto first = rows_of(std::span(tokens).first(50));
  CHECK(rows_of(std::span(tokens).first(50)) < first / 4);  // no rows
  CHECK(rows_of(tokens) < first / 2);                       // 10 rows
  CHECK(rows_of(std::span(tokens).first(50)) > first / 2);  // it cannot go back so far
  auto other = tokens;
  other[3] ^= 1;
  CHECK(rows_of(std::span(other).first(50)) > first / 2);  // the rows of another beginning
}

TEST_CASE("remote_drafter: nodes that do not fit together say so") {
  const auto prompt = some_tokens(20);
  const decoded plain = decode_plainly(greedy(), greedily, prompt);
  const auto other_profile = *profile<toy_codec>::parse(toy_profile_file(2));
  const auto errors_with = [&](const toy_engine::options& far_options, const profile<toy_codec>& far_profile,
                               const sampling_parameters& sampling, std::string& sentence) {
    far_node far(far_options, far_profile);
    line_fault line;
    toy_engine engine({});
    remote_options options = patient(sampling);
    options.retry_after = 1h;
    any_drafter<greedy> drafts = made_near(engine, *far.thread, line, options);
    REQUIRE(engine.forward(std::span(prompt).first(19), {}));
    const auto refused = drafts.synchronise(prompt);
    REQUIRE(!refused);
    sentence = drafts.as<near_type>().far_failure();
    // Until it connects again it says the same.
    CHECK(drafts.synchronise(prompt).error().code == refused.error().code);
    CHECK(drafts.max_draft() == 0);
    CHECK(line.connections == 1);
    toy_engine own({});
    const decoded remote = decode<greedy>(own, std::move(drafts), {}, greedily, prompt, 4);
    CHECK(remote.tokens == plain.tokens);
    CHECK(remote.errors.size() == new_tokens);
    return refused.error().code;
  };
  std::string sentence;
  CHECK(errors_with({}, other_profile, greedily, sentence) == error_code::profile_mismatch);
  CHECK(sentence == "the nodes have different profiles");
  CHECK(errors_with({.vocabulary = 13}, toy_profile(), greedily, sentence) == error_code::shape_mismatch);
  CHECK(sentence == "the nodes have different vocabularies");
  CHECK(errors_with({}, toy_profile(), {.temperature = -1}, sentence) == error_code::invalid_argument);

  toy_engine engine({});
  const auto decoding_only = *profile<toy_codec>::parse(toy_profile_file(1), build_for::decode);
  const far_thread nobody([](tcp_channel) {});
  line_fault line;
  CHECK(near_type::make(engine, decoding_only, {&nobody, &line}, {}).error().code == error_code::invalid_argument);
  CHECK(near_type::make(engine, toy_profile(), {&nobody, &line}, {.rows_per_message = 0}).error().code == error_code::invalid_argument);
  CHECK(near_type::make(engine, toy_profile(), {&nobody, &line}, {.rows_per_message = 257}).error().code == error_code::invalid_argument);
}

TEST_CASE("remote_drafter: it connects again after a while, however often it is called meanwhile") {
  const auto tokens = some_tokens(5);
  const far_thread nobody([](tcp_channel) {});
  line_fault line;
  toy_engine engine({});
  REQUIRE(engine.forward(std::span(tokens).first(4), {}));
  remote_options options = patient(greedily);
  options.retry_after = 20ms;
  auto remote = made_near(engine, nobody, line, options);
  std::uint64_t calls = 0;
  for (; calls < 10'000 && line.connections < 3; ++calls) {
    CHECK(!remote.synchronise(tokens));
    std::this_thread::sleep_for(1ms);
  }
  CHECK(line.connections == 3);
  CHECK(calls > 3);
}

TEST_CASE("remote_drafter: a far node that lies is not believed") {
  const auto prompt = some_tokens(20);
  const decoded plain = decode_plainly(greedy(), greedily, prompt);
  enum class lie { none, round, token, many, nonsense, type, rows };
  for (const lie what : {lie::none, lie::round, lie::token, lie::many, lie::nonsense, lie::type, lie::rows}) {
    CAPTURE(static_cast<int>(what));
    const far_thread far([what](tcp_channel channel) {
      message_link<tcp_channel> link(std::move(channel));
      for (;;) {
        const auto received = link.receive(std::chrono::steady_clock::now() + 20s, 1 << 20);
        if (!received) return;
        if (received->type == message_type::rows) continue;
        const auto asked = detail::read_propose(received->body);
        const bool is_hello = received->type == message_type::hello;
        const auto answer = is_hello ? message_type::accept : what == lie::type ? message_type::hello : message_type::drafts;
        const auto posted = link.post(answer, [&](std::vector<std::byte>& body) -> result<void> {
          if (is_hello) {
            detail::write_accept(body, {what == lie::rows ? 20U : 0U, 8});
            return {};
          }
          std::vector<token_id> tokens(asked->wanted, what == lie::token ? 12 : 3);
          if (what == lie::many) tokens.push_back(3);
          detail::write_drafts(body, asked->round + (what == lie::round ? 1 : 0), tokens, {});
          if (what == lie::nonsense) body.pop_back();
          return {};
        });
        if (!posted || !link.flush(std::chrono::steady_clock::now() + 20s)) return;
      }
    });
    line_fault line;
    toy_engine engine({});
    const decoded remote = decode<greedy>(engine, made_near(engine, far, line, patient(greedily)), {}, greedily, prompt, 4);
    CHECK(remote.tokens == plain.tokens);
    CHECK(remote.rows == plain.rows);
    CHECK(remote.errors.empty() == (what == lie::none));
    const auto expected = what == lie::nonsense ? error_code::truncated : error_code::corrupt;
    CHECK(std::ranges::all_of(remote.errors, [&](error_code code) { return code == expected; }));
  }
}

TEST_CASE("remote_drafter: a far node that is late is not waited for twice, and used when it is there") {
  constexpr auto pause = 500ms;
  const auto tokens = some_tokens(40);
  std::atomic<bool> may_answer = false;
  const far_thread far([&](tcp_channel channel) {
    message_link<tcp_channel> link(std::move(channel));
    for (;;) {
      const auto received = link.receive(std::chrono::steady_clock::now() + 20s, 1 << 20);
      if (!received) return;
      if (received->type == message_type::rows) continue;
      const auto asked = detail::read_propose(received->body);
      const bool is_hello = received->type == message_type::hello;
      for (int i = 0; i < 20000 && !is_hello && !may_answer; ++i) std::this_thread::sleep_for(1ms);
      const auto answer = is_hello ? message_type::accept : message_type::drafts;
      const auto posted = link.post(answer, [&](std::vector<std::byte>& body) -> result<void> {
        if (is_hello) {
          detail::write_accept(body, {0, 8});
        } else {
          detail::write_drafts(body, asked->round, std::vector<token_id>{static_cast<token_id>(asked->length % 12)}, {});
        }
        return {};
      });
      if (!posted || !link.flush(std::chrono::steady_clock::now() + 20s)) return;
    }
  });
  line_fault line;
  toy_engine engine({});
  remote_options options = patient(greedily);
  options.patience = 20ms;
  options.retry_after = pause;
  auto remote = made_near(engine, far, line, options);
  REQUIRE(engine.forward(std::span(tokens).first(39), {}));
  auto block = *draft_block::make(4, 0);
  const auto sampler = *standard_sampler::make(greedily);
  const auto ask = [&](std::size_t length) {
    const draft_request<greedy, standard_sampler> request{std::span(tokens).first(length), {}, 4, {}, sampler};
    block.clear();
    return remote.propose(request, block);
  };
  // Connecting may take longer than a busy machine has patience for.
  for (int i = 0; i < 1000 && !remote.synchronise(std::span(tokens).first(30)); ++i) std::this_thread::sleep_for(1ms);
  REQUIRE(remote.max_draft() == 8);
  CHECK(ask(30).error().code == error_code::timed_out);
  for (std::size_t length = 31; length < 36; ++length) {
    REQUIRE(remote.synchronise(std::span(tokens).first(length)));
    CHECK(ask(length).error().code == error_code::timed_out);
  }
  may_answer = true;
  for (int i = 0; i < 10000 && !ask(35); ++i) std::this_thread::sleep_for(1ms);
  REQUIRE(block.size() == 1);
  CHECK(block.view().tokens[0] == 35 % 12);  // not the answer to the first question
  CHECK(line.connections == 1);
}

TEST_CASE("remote_drafter: a far node that does not answer, or fails for a time-out of its own, is left") {
  for (const bool says_so : {false, true}) {
    CAPTURE(says_so);
    const auto tokens = some_tokens(10);
    const far_thread far([&](tcp_channel channel) {
      message_link<tcp_channel> link(std::move(channel));
      for (;;) {
        const auto received = link.receive(deadline_after(20s), 1 << 20);
        if (!received) return;
        const bool is_hello = received->type == message_type::hello;
        if (!is_hello && (!says_so || received->type != message_type::propose)) continue;
        const auto posted = link.post(is_hello ? message_type::accept : message_type::failed, [&](std::vector<std::byte>& body) -> result<void> {
          if (is_hello) {
            detail::write_accept(body, {0, 8});
          } else {
            detail::write_failed(body, error{error_code::timed_out, "its own engine"});
          }
          return {};
        });
        if (!posted || !link.flush(deadline_after(20s))) return;
      }
    });
    line_fault line;
    toy_engine engine({});
    remote_options options = patient(greedily);
    options.patience = says_so ? 20s : 100ms;
    options.retry_after = 1ms;
    auto remote = made_near(engine, far, line, options);
    REQUIRE(engine.forward(std::span(tokens).first(9), {}));
    auto block = *draft_block::make(4, 0);
    const auto sampler = *standard_sampler::make(greedily);
    bool was_left = false;
    for (int i = 0; i < 1000 && !was_left; ++i) {
      if (remote.synchronise(tokens)) {
        const draft_request<greedy, standard_sampler> request{tokens, {}, 4, {}, sampler};
        const auto asked = remote.propose(request, block);
        REQUIRE_FALSE(asked);
        was_left = asked.error().code == error_code::output_failed;
        CHECK((was_left || !says_so));
      }
      std::this_thread::sleep_for(1ms);
    }
    CHECK(was_left);
    CHECK(remote.max_draft() == 0);
    CHECK(remote.far_failure() == (says_so ? "its own engine" : ""));
  }
}

TEST_CASE("remote: deadlines that never come") {
  CHECK(deadline_after(std::chrono::nanoseconds::max()) == channel_deadline::max());
  const channel_deadline at_once = deadline_after(std::chrono::nanoseconds::min());
  CHECK(at_once <= std::chrono::steady_clock::now());
}

TEST_CASE("draft_server: messages that make no sense end the connection with a reason") {
  using bytes = std::vector<std::byte>;
  using message_list = std::vector<std::pair<message_type, std::function<void(bytes&)>>>;
  far_node far;
  // How the last message is answered, after a hello for one token.
  const auto answer_to = [&](message_list messages, bool with_hello = true) -> std::pair<message_type, error_code> {
    const auto write_hello = [](bytes& body) {
      detail::write_hello(body, greedily, 0, 12, 1, std::vector<token_id>{3}, detail::stream_header_of(toy_profile()));
    };
    if (with_hello) messages.insert(messages.begin(), {message_type::hello, write_hello});
    auto connected = far.thread->connect(std::chrono::steady_clock::now() + 20s);
    REQUIRE(connected);
    message_link<tcp_channel> link(*std::move(connected));
    for (const auto& [type, write] : messages) {
      const auto& write_body = write;
      REQUIRE(link.post(type, [&](bytes& body) -> result<void> {
        write_body(body);
        return {};
      }));
    }
    REQUIRE(link.flush(std::chrono::steady_clock::now() + 20s));
    for (;;) {
      const auto received = link.receive(std::chrono::steady_clock::now() + 20s, 1000);
      REQUIRE(received);
      if (received->type == message_type::drafts) return {received->type, error_code{}};
      if (received->type == message_type::failed) return {received->type, detail::read_failed(received->body)->code};
    }
  };
  const auto proposal = [](const detail::propose_body& asked) {
    return message_list{{message_type::propose, [asked](bytes& body) { detail::write_propose(body, asked); }}};
  };
  const auto rows = [](index_range range, const std::vector<token_id>& tokens) {
    return message_list{{message_type::rows, [=](bytes& body) { detail::write_rows(body, range, tokens); }}};
  };
  const auto fails_with = [](error_code code) { return std::pair(message_type::failed, code); };
  const auto nothing = [](bytes&) {};

  CHECK(answer_to(proposal({.length = 1, .wanted = 4, .pending = {}})).first == message_type::drafts);
  CHECK(answer_to(proposal({.length = 1, .wanted = 4, .pending = {}}), false) == fails_with(error_code::corrupt));
  CHECK(answer_to(rows({0, 1}, {3}), false) == fails_with(error_code::corrupt));
  CHECK(answer_to({{message_type::hello, nothing}}) == fails_with(error_code::corrupt));
  CHECK(answer_to({{message_type::drafts, nothing}}) == fails_with(error_code::corrupt));
  CHECK(answer_to({{message_type::propose, nothing}}) == fails_with(error_code::truncated));

  CHECK(answer_to(rows({1, 2}, {3, 4})) == fails_with(error_code::corrupt));
  CHECK(answer_to(rows({0, 1}, {})) == fails_with(error_code::corrupt));
  CHECK(answer_to(rows({0, 1}, {12})) == fails_with(error_code::corrupt));
  CHECK(answer_to(rows({0, 1}, {3})) == fails_with(error_code::truncated));

  CHECK(answer_to(proposal({.length = 2, .wanted = 4, .pending = {}})) == fails_with(error_code::corrupt));
  CHECK(answer_to(proposal({.length = 1, .wanted = 4, .pending = {12}})) == fails_with(error_code::corrupt));
  CHECK(answer_to(proposal({.length = 1, .wanted = 0, .pending = {}})) == fails_with(error_code::out_of_range));
  CHECK(answer_to(proposal({.length = 1, .wanted = 17, .pending = {}})) == fails_with(error_code::out_of_range));
  CHECK(answer_to(proposal({.length = 1, .wanted = 15, .pending = {1, 2}})) == fails_with(error_code::out_of_range));
}

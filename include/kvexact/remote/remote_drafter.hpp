// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvexact/codec/profile.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/remote/band_coder.hpp>
#include <kvexact/remote/byte_channel.hpp>
#include <kvexact/remote/message_link.hpp>
#include <kvexact/remote/remote_protocol.hpp>
#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/drafter.hpp>
#include <kvexact/speculative/probabilities.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/token.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// How to get a connection to the far node: connect(deadline) -> result of some `byte_channel`.
template <class F>
concept channel_source = std::movable<F> && requires(F& connect, channel_deadline deadline) {
  { *connect(deadline) };
  requires byte_channel<std::remove_cvref_t<decltype(*connect(deadline))>>;
  requires noexcept(connect(deadline));
};

struct remote_options {
  sampling_parameters sampling = {};  ///< those of the decoder's standard_sampler
  std::uint64_t seed = 0;             ///< that of its rule, for sample_and_match
  /// How long a call may wait for the link and for the far node.
  std::chrono::nanoseconds patience = std::chrono::seconds(2);
  /// How long nothing is asked for after an answer was late, and no connection is made after a failure; twice as long after each that
  /// follows without drafts between, up to 64 times.
  std::chrono::nanoseconds retry_after = std::chrono::seconds(10);
  std::uint32_t rows_per_message = most_remote_rows;                ///< 1 to most_remote_rows; bounds memory, of both nodes
};

/// The near node of the remote prefix mode: a `drafter` whose drafts come from another machine, which has the model but not the full cache
/// (`draft_server`). Rows of the committed tokens go there losslessly, by the codec, each once; drafts come back. Docs: docs/remote.md.
///
/// `Engine` is what verifies, and outlives this object and stays where it is; so does the profile, which the far node has as well. The rule
/// is `greedy` or `sample_and_match`, the sampler a `standard_sampler`: the far node makes the same ones and reads the same tokens, so that
/// no distributions cross the link.
///
/// Nothing that the far node does can change which tokens are committed, or stop decoding. What it does wrong ends the connection; then
/// every call gives that error, until `retry_after` is over and a new connection begins, with the rows that the far node has kept.
template <class Codec, readable_cache Engine, channel_source Connect>
  requires positional_decoder<Engine>
class remote_drafter {
  static_assert(std::same_as<typename Engine::scalar, typename Codec::scalar>,
                "kvexact: the engine's rows must have the codec's number format");
  using channel = std::remove_cvref_t<decltype(*std::declval<Connect&>()(channel_deadline()))>;

 public:
  /// Connects when it is used first. Errors: invalid_argument (a profile built for decoding only, options out of range), shape_mismatch.
  [[nodiscard]] static result<remote_drafter> make(const Engine& engine, const profile<Codec>& parameters, Connect connect,
                                                   const remote_options& options) noexcept {
    if (!parameters.can_encode()) return error{error_code::invalid_argument, "the profile was built for decoding only"};
    if (options.rows_per_message == 0 || options.rows_per_message > most_remote_rows)
      return error{error_code::invalid_argument, "a message has 1 to 256 rows"};
    if (const auto fits = expect_shape(engine.shape(), parameters.shape()); !fits) return fits.error();
    return remote_drafter(engine, parameters, std::move(connect), options);
  }
  /// A profile that would not live on.
  static result<remote_drafter> make(const Engine& engine, const profile<Codec>&& parameters, Connect connect,
                                     const remote_options& options) = delete;

  /// 0 without a connection.
  [[nodiscard]] std::uint64_t max_draft() const noexcept { return is_open_ ? max_draft_ : 0; }
  /// Rows that the far node has been sent, or had already.
  [[nodiscard]] std::uint64_t rows() const noexcept { return rows_; }
  /// What the far node has said of its last failure: any bytes.
  [[nodiscard]] const std::string& far_failure() const noexcept { return far_failure_; }

  /// Sends the rows that the far node does not have yet. The tokens of the first call are the prompt. Errors: timed_out (not all rows could
  /// be sent; the next call goes on), those of connecting and of the connection, of the far node, out_of_memory.
  [[nodiscard]] result<void> synchronise(std::span<const token_id> committed) noexcept {
    if (committed.empty()) return {};
    if (prompt_ == 0) prompt_ = committed.size();
    if (!failure_ && clock::now() < retry_at_) return failure_;
    const channel_deadline until = deadline();
    result<void> done = open(committed, until);
    if (done) done = send_rows(committed, until);
    return settled(done);
  }

  /// Errors: timed_out (rows or an answer are on their way), invalid_argument (a full block), those of the connection and of the far node,
  /// out_of_memory.
  template <acceptance_rule Rule, token_sampler Sampler>
  [[nodiscard]] result<void> propose(const draft_request<Rule, Sampler>& request, draft_block& block) noexcept {
    static_assert(!Rule::reads_draft,
                  "kvexact: remote_drafter cannot serve rules that read the drafts' distributions, which do not cross the link");
    static_assert(std::same_as<Rule, greedy> || std::same_as<Rule, sample_and_match>,
                  "kvexact: remote_drafter can serve the rules greedy and sample_and_match, which the far node has, too");
    static_assert(std::same_as<Sampler, standard_sampler>,
                  "kvexact: remote_drafter needs a standard_sampler, which the far node can make, too");
    if (!is_open_) return failure_ ? result<void>(on_their_way) : failure_;
    if (rows_ + 1 != request.committed.size() || !link_->is_flushed() || clock::now() < ask_at_) return on_their_way;
    try {
      detail::propose_body asked;
      asked.length = request.committed.size();
      asked.rule = std::same_as<Rule, greedy> ? detail::remote_rule::greedy : detail::remote_rule::sample_and_match;
      asked.wants_probabilities = request.more != nullptr;
      asked.pending.assign(request.pending.begin(), request.pending.end());
      const std::span<const token_id> held = block.view().tokens;
      asked.pending.insert(asked.pending.end(), held.begin(), held.end());
      const std::uint64_t most = max_draft_ - std::min<std::uint64_t>(max_draft_, asked.pending.size());
      asked.wanted = static_cast<std::uint32_t>(std::min<std::uint64_t>(request.wanted, most));
      if (asked.wanted == 0) return {};

      detail::drafts_body drafts;
      const result<void> done = settled(exchange(std::move(asked), drafts));
      if (!done) return done;
      for (std::size_t i = 0; i < drafts.tokens.size(); ++i) {
        if (auto pushed = block.push(drafts.tokens[i], distribution::point(drafts.tokens[i])); !pushed) return pushed;
        if (request.more != nullptr && !request.more(request.context, static_cast<double>(drafts.probabilities[i]))) break;
      }
      return {};
    } catch (...) {
      return settled(error{error_code::out_of_memory, "drafts from another machine"});
    }
  }

 private:
  using clock = std::chrono::steady_clock;
  static constexpr error on_their_way{error_code::timed_out, "rows or drafts are still on their way"};

  remote_drafter(const Engine& engine, const profile<Codec>& parameters, Connect connect, const remote_options& options) noexcept
      : engine_(&engine), profile_(&parameters), connect_(std::move(connect)), options_(options), coder_(parameters) {}

  /// No waiting where something is late already.
  [[nodiscard]] channel_deadline deadline() const noexcept {
    const bool is_late = link_ && (!is_open_ || !link_->is_flushed() || asked_);
    return is_late ? clock::now() : deadline_after(options_.patience);
  }
  /// When to try again.
  [[nodiscard]] channel_deadline after_pause() noexcept {
    const int doublings = std::min(pauses_++, 6);
    const auto longest = std::chrono::nanoseconds::max() / 64;
    return deadline_after(std::min(options_.retry_after, longest) * (1 << doublings));
  }

  /// Ends the connection after an error that it cannot go on from.
  [[nodiscard]] result<void> settled(const result<void>& outcome) noexcept {
    if (outcome || (outcome.error().code == error_code::timed_out && link_)) return outcome;
    link_.reset();
    asked_.reset();
    is_open_ = false;
    failure_ = outcome;
    retry_at_ = after_pause();
    return outcome;
  }

  /// A message of this type, or why there will be none.
  [[nodiscard]] result<std::span<const std::byte>> receive(message_type type, std::uint64_t most_bytes, channel_deadline until) noexcept {
    const auto received = link_->receive(until, std::max<std::uint64_t>(most_bytes, detail::most_failed_bytes));
    if (!received) return received.error();
    if (received->type == type) return received->body;
    if (received->type != message_type::failed) return error{error_code::corrupt, "not the message that was to come"};
    const auto failed = detail::read_failed(received->body);
    if (!failed) return failed.error();
    try {
      far_failure_ = failed->sentence;
    } catch (...) {
      far_failure_.clear();
    }
    // A time-out of its own is no time-out here.
    return error{failed->code == error_code::timed_out ? error_code::output_failed : failed->code, "the far node failed"};
  }

  [[nodiscard]] result<void> flush(channel_deadline until) noexcept {
    const auto flushed = link_->flush(until);
    if (flushed || flushed.error().code == error_code::timed_out) return flushed;
    // It may have said why before it closed.
    const auto said = receive(message_type::accept, 0, clock::now());
    return far_failure_.empty() || said ? flushed : said.error();
  }
  [[nodiscard]] result<void> open(std::span<const token_id> committed, channel_deadline until) noexcept {
    if (is_open_) return {};
    if (!link_) {
      auto connected = connect_(until);
      if (!connected) return connected.error();
      link_.emplace(*std::move(connected));
      far_failure_.clear();
      told_ = committed.size();
      const auto posted = link_->post(message_type::hello, [&](std::vector<std::byte>& body) -> result<void> {
        detail::write_hello(body, options_.sampling, options_.seed, engine_->vocabulary(), prompt_, committed,
                            detail::stream_header_of(*profile_));
        return {};
      });
      if (!posted) return posted;
    }
    if (const auto flushed = flush(until); !flushed) return flushed;
    const auto body = receive(message_type::accept, detail::accept_bytes, until);
    if (!body) return body.error();
    const auto accept = detail::read_accept(*body);
    if (!accept) return accept.error();
    if (accept->rows >= told_) return error{error_code::corrupt, "the far node claims more rows than there are"};
    rows_ = accept->rows;
    max_draft_ = accept->max_draft;
    is_open_ = true;
    failure_ = {};
    return {};
  }

  [[nodiscard]] result<void> send_rows(std::span<const token_id> committed, channel_deadline until) noexcept {
    if (const auto flushed = flush(until); !flushed) return flushed;
    while (rows_ + 1 < committed.size()) {
      const index_range rows{rows_, std::min<std::uint64_t>(rows_ + options_.rows_per_message, committed.size() - 1)};
      const std::uint64_t told = std::max(told_, rows.end + 1);
      const auto posted = link_->post(message_type::rows, [&](std::vector<std::byte>& body) -> result<void> {
        layers_.clear();
        for (std::uint32_t l = 0; l < engine_->shape().layers(); ++l) layers_.push_back(engine_->rows(l, rows.begin));
        const auto view = kv_cache_view<const typename Engine::scalar>::make(engine_->shape(), layers_, rows);
        if (!view) return view.error();
        detail::write_rows(body, rows, committed.subspan(static_cast<std::size_t>(told_), static_cast<std::size_t>(told - told_)));
        return coder_.encode(*view, rows, body);
      });
      if (!posted) return posted;
      rows_ = rows.end;
      told_ = told;
      // One message at a time, so that no more than that waits here.
      if (const auto flushed = flush(until); !flushed) return flushed;
      if (rows_ + 1 < committed.size() && clock::now() >= until) return on_their_way;
    }
    return {};
  }

  [[nodiscard]] result<void> exchange(detail::propose_body asked, detail::drafts_body& drafts) {
    if (asked_) {
      // An answer that came too late is of no use, but another question must wait for it; not for more than a pause, though.
      const auto late = answer(drafts, clock::now());
      if (!late && late.error().code == error_code::timed_out) return error{error_code::output_failed, "the far node does not answer"};
      if (!late) return late;
      drafts = {};
    }
    asked.round = ++round_;
    const channel_deadline until = deadline_after(options_.patience);
    const auto posted = link_->post(message_type::propose, [&](std::vector<std::byte>& body) -> result<void> {
      detail::write_propose(body, asked);
      return {};
    });
    if (!posted) return posted;
    asked_ = std::move(asked);
    auto answered = flush(until);
    if (answered) answered = answer(drafts, until);
    if (answered) pauses_ = 0;
    if (!answered && answered.error().code == error_code::timed_out) ask_at_ = after_pause();
    return answered;
  }
  /// To `asked_`.
  [[nodiscard]] result<void> answer(detail::drafts_body& drafts, channel_deadline until) {
    const auto body = receive(message_type::drafts, detail::most_drafts_bytes(asked_->wanted), until);
    if (!body) return body.error();
    auto read = detail::read_drafts(*body, *asked_, engine_->vocabulary());
    if (!read) return read.error();
    drafts = *std::move(read);
    asked_.reset();
    return {};
  }

  const Engine* engine_;
  const profile<Codec>* profile_;
  Connect connect_;
  remote_options options_;
  band_coder<Codec> coder_;
  std::vector<layer_tensors<const typename Engine::scalar>> layers_;
  std::uint64_t prompt_ = 0;  // tokens of it

  std::optional<message_link<channel>> link_;
  bool is_open_ = false;         // the far node has accepted
  result<void> failure_;         // why there is no connection
  clock::time_point retry_at_, ask_at_;
  int pauses_ = 0;               // since there were drafts
  std::string far_failure_;
  std::uint64_t told_ = 0;       // tokens that the far node has
  std::uint64_t rows_ = 0;       // rows that it has
  std::uint64_t max_draft_ = 0;
  std::uint64_t round_ = 0;
  std::optional<detail::propose_body> asked_;  // what it has not answered
};

}  // namespace kvexact

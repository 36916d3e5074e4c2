// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvexact/codec/profile.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/remote/band_coder.hpp>
#include <kvexact/remote/byte_channel.hpp>
#include <kvexact/remote/message_link.hpp>
#include <kvexact/remote/received_rows.hpp>
#include <kvexact/remote/remote_protocol.hpp>
#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/compressed_model.hpp>
#include <kvexact/speculative/draft_block.hpp>
#include <kvexact/speculative/drafter.hpp>
#include <kvexact/speculative/model_drafter.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

struct draft_server_options {
  /// How long the near node may say nothing; then another one, or the same again, is served.
  std::chrono::nanoseconds idle = std::chrono::minutes(1);
  std::chrono::nanoseconds patience = std::chrono::seconds(10);  ///< how long an answer may take to leave
  std::uint32_t longest_draft = 32;                              ///< tokens of a draft; a block of logits for them is kept
  std::uint32_t longest_sequence = 1U << 20;                     ///< tokens
};

/// The far node of the remote prefix mode: drafts for a `remote_drafter`, with the same model on a draft cache. The full cache passes by in
/// pieces and is never kept. One sequence at a time; it outlives its connection, so that a near node that connects again need not send its
/// rows anew.
///
/// `Engine` has `vocabulary()` and is a `token_stepper`; it and the profile, which the near node has as well, outlive this object.
/// `MakeCache`: make_cache() -> result<Cache>, an empty `draft_cache` for each sequence.
template <class Codec, class Engine, class MakeCache>
class draft_server {
 public:
  using cache_type = std::remove_cvref_t<decltype(*std::declval<MakeCache&>()())>;

  draft_server(Engine& engine, const profile<Codec>& parameters, MakeCache make_cache, const draft_server_options& options = {}) noexcept
      : engine_(&engine), profile_(&parameters), make_cache_(std::move(make_cache)), options_(options), coder_(parameters) {}
  draft_server(Engine& engine, const profile<Codec>&& parameters, MakeCache make_cache, const draft_server_options& options = {}) = delete;
  draft_server(const draft_server&) = delete;
  draft_server& operator=(const draft_server&) = delete;

  /// The draft cache of the sequence, or null.
  [[nodiscard]] const cache_type* cache() const noexcept { return sequence_ ? &sequence_->drafts.model().cache() : nullptr; }

  /// Until the near node closes the connection. What it does wrong, or cannot be done for it, ends the connection; it is told why, if it
  /// still listens. Errors: those of `message_link` and of the channel, of the codec, of draft cache, model and sampler; dtype_mismatch,
  /// shape_mismatch, profile_mismatch, unsupported (nodes that do not fit together), corrupt (messages that make no sense), out_of_memory.
  template <byte_channel Channel>
  result<void> serve(Channel channel) noexcept {
    message_link<Channel> link(std::move(channel));
    const result<void> outcome = talk(link);
    if (!outcome) {
      const auto posted = link.post(message_type::failed, [&](std::vector<std::byte>& body) -> result<void> {
        detail::write_failed(body, outcome.error());
        return {};
      });
      if (posted) (void)link.flush(deadline_after(options_.patience));
    }
    return outcome;
  }

 private:
  static constexpr error too_long{error_code::out_of_range, "a sequence is longer than the far node takes"};
  using rows_type = received_rows<Engine, typename Codec::scalar>;
  using drafter_type = model_drafter<compressed_model<rows_type, cache_type>>;

  struct sequence {
    drafter_type drafts;
    draft_block block;
    std::uint64_t rows = 0;
    std::uint64_t max_draft = 0;
    std::vector<token_id> tokens = {};  // one more than rows, or all of the prompt
    std::optional<standard_sampler> sampler = {};  // has read them
    std::optional<sample_and_match> rule = {};
    std::vector<float> probabilities = {};
  };

  template <class Channel>
  result<void> talk(message_link<Channel>& link) noexcept {
    bool is_begun = false;
    for (;;) {
      const auto received = link.receive(deadline_after(options_.idle), is_begun ? most_bytes() : most_hello_bytes());
      if (!received) {
        const bool has_ended = received.error().code == error_code::truncated && link.is_between_messages();
        return has_ended ? result<void>() : received.error();
      }
      result<void> done;
      try {
        if (received->type == (is_begun ? message_type::rows : message_type::hello)) {
          done = is_begun ? take_rows(received->body) : begin(link, received->body);
        } else if (is_begun && received->type == message_type::propose) {
          done = draft(link, received->body);
        } else {
          return error{error_code::corrupt, "a message out of turn"};
        }
      } catch (...) {
        done = error{error_code::out_of_memory, "drafts for another machine"};
      }
      if (!done) {
        if (received->type == message_type::rows) sequence_.reset();  // it may have taken half of them
        return done;
      }
      is_begun = true;
      const auto flushed = link.flush(deadline_after(options_.patience));
      if (!flushed) return flushed;
    }
  }

  [[nodiscard]] std::uint64_t most_hello_bytes() const noexcept {
    return std::min<std::uint64_t>(detail::most_hello_bytes, (1U << 20) + std::uint64_t{4} * options_.longest_sequence);
  }
  /// Of a message in the course of a sequence.
  [[nodiscard]] std::uint64_t most_bytes() const noexcept {
    constexpr std::uint64_t fields = 64;
    const std::uint64_t first = sequence_->rows;
    const std::uint64_t tokens = std::max(most_remote_rows, options_.longest_draft);
    return fields + 4 * tokens + coder_.most_bytes({first, first + most_remote_rows});
  }

  template <class Channel>
  result<void> begin(message_link<Channel>& link, std::span<const std::byte> body) {
    auto hello = detail::read_hello(body);
    if (!hello) return hello.error();
    if (!profile_->can_decode()) return error{error_code::invalid_argument, "the far node's profile was built for encoding only"};
    if (const auto same = detail::expect_same_rows(hello->stream, detail::stream_header_of(*profile_)); !same) return same;
    if (hello->vocabulary != engine_->vocabulary()) return error{error_code::shape_mismatch, "the nodes have different vocabularies"};
    auto sampler = standard_sampler::make(hello->sampling);
    if (!sampler) return sampler.error();
    const std::span<const token_id> tokens = hello->tokens;
    if (tokens.size() > options_.longest_sequence) return too_long;
    if (const auto known = expect_known(tokens); !known) return known;
    if (const auto read = sampler->read_prompt(tokens.first(static_cast<std::size_t>(hello->prompt))); !read) return read;
    for (const token_id token : tokens.subspan(static_cast<std::size_t>(hello->prompt))) {
      if (const auto read = sampler->commit(token); !read) return read;
    }
    if (!has_beginning_of(tokens)) {
      if (const auto made = make_sequence(); !made) return made;
    }
    sequence_->sampler = *std::move(sampler);
    sequence_->rule.emplace(hello->seed);
    sequence_->tokens = std::move(hello->tokens);
    return link.post(message_type::accept, [&](std::vector<std::byte>& answer) -> result<void> {
      detail::write_accept(answer, {sequence_->rows, sequence_->max_draft});
      return {};
    });
  }
  /// Whether the sequence that is kept can be gone on with.
  [[nodiscard]] bool has_beginning_of(std::span<const token_id> tokens) const noexcept {
    if (!sequence_ || sequence_->rows >= tokens.size()) return false;
    const auto kept = std::span(sequence_->tokens).first(static_cast<std::size_t>(sequence_->rows));
    return std::ranges::equal(kept, tokens.first(kept.size()));
  }
  result<void> make_sequence() {
    sequence_.reset();
    auto cache = make_cache_();
    if (!cache) return cache.error();
    if (!received_) {
      auto rows = rows_type::make(*engine_, profile_->shape(), most_remote_rows);
      if (!rows) return rows.error();
      received_ = *std::move(rows);
    }
    if (const auto fits = expect_shape(cache->shape(), profile_->shape()); !fits) return fits;
    auto block = draft_block::make(options_.longest_draft, engine_->vocabulary());
    if (!block) return block.error();
    const std::uint64_t most = std::min<std::uint64_t>(cache->max_rollback(), options_.longest_draft);
    sequence_.emplace(sequence{drafter_type({*received_, *std::move(cache)}), *std::move(block), 0, most});
    sequence_->probabilities.reserve(options_.longest_draft);
    return {};
  }

  result<void> take_rows(std::span<const std::byte> body) {
    const auto message = detail::read_rows_message(body);
    if (!message) return message.error();
    if (message->first != sequence_->rows) return error{error_code::corrupt, "rows that do not follow those before"};
    if (const auto known = expect_known(message->tokens); !known) return known;
    for (const token_id token : message->tokens) {
      sequence_->tokens.push_back(token);
      if (const auto read = sequence_->sampler->commit(token); !read) return read;
    }
    if (sequence_->tokens.size() > options_.longest_sequence) return too_long;
    const index_range rows{message->first, message->first + message->count};
    if (sequence_->tokens.size() <= rows.end) return error{error_code::corrupt, "rows without their tokens"};
    const auto view = received_->replace(rows);
    if (!view) return view.error();
    if (const auto decoded = coder_.decode(message->chunks, rows, *view); !decoded) return decoded;
    const std::span<const token_id> tokens = sequence_->tokens;
    const auto taken = sequence_->drafts.synchronise(tokens.first(static_cast<std::size_t>(rows.end) + 1));
    if (taken) sequence_->rows = rows.end;
    return taken;
  }

  template <class Channel>
  result<void> draft(message_link<Channel>& link, std::span<const std::byte> body) {
    const auto asked = detail::read_propose(body);
    if (!asked) return asked.error();
    if (asked->length != sequence_->tokens.size() || asked->length != sequence_->rows + 1)
      return error{error_code::corrupt, "a proposal for other tokens than there are"};
    if (asked->wanted == 0 || asked->pending.size() + asked->wanted > sequence_->max_draft)
      return error{error_code::out_of_range, "more drafts than the far node can make"};
    if (const auto known = expect_known(asked->pending); !known) return known;
    standard_sampler ahead = *sequence_->sampler;
    for (const token_id token : asked->pending) {
      if (const auto read = ahead.commit(token); !read) return read;
    }
    sequence_->block.clear();
    sequence_->probabilities.clear();
    const auto propose = [&](const auto& rule) {
      using rule_type = std::remove_cvref_t<decltype(rule)>;
      draft_request<rule_type, standard_sampler> request{sequence_->tokens, asked->pending, asked->wanted, rule, ahead};
      if (asked->wants_probabilities) {
        request.context = &sequence_->probabilities;
        request.more = [](void* probabilities, double top_probability) {
          static_cast<std::vector<float>*>(probabilities)->push_back(static_cast<float>(top_probability));  // has room
          return true;
        };
      }
      return sequence_->drafts.propose(request, sequence_->block);
    };
    const auto proposed = asked->rule == detail::remote_rule::greedy ? propose(greedy()) : propose(*sequence_->rule);
    if (!proposed) return proposed;
    return link.post(message_type::drafts, [&](std::vector<std::byte>& answer) -> result<void> {
      detail::write_drafts(answer, asked->round, sequence_->block.view().tokens, sequence_->probabilities);
      return {};
    });
  }

  [[nodiscard]] result<void> expect_known(std::span<const token_id> tokens) const noexcept {
    if (std::ranges::all_of(tokens, [&](token_id token) { return token < engine_->vocabulary(); })) return {};
    return error{error_code::corrupt, "a token that is not in the vocabulary"};
  }

  Engine* engine_;
  const profile<Codec>* profile_;
  MakeCache make_cache_;
  draft_server_options options_;
  band_coder<Codec> coder_;
  std::optional<rows_type> received_;  // made once, stays where it is
  std::optional<sequence> sequence_;
};

}  // namespace kvexact

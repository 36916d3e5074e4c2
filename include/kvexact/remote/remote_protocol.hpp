// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/codec/stream_format.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/speculative/acceptance.hpp>
#include <kvexact/speculative/sampler.hpp>
#include <kvexact/speculative/token.hpp>

namespace kvexact {

/// Most rows of one message.
inline constexpr std::uint32_t most_remote_rows = 256;

namespace detail {

/// Bodies of messages, see docs/remote.md. Writers throw what a vector throws, readers as well. Errors of readers: truncated, corrupt, and
/// what is said beside them.

inline constexpr std::size_t most_hello_bytes = std::size_t{1} << 27;
inline constexpr std::size_t most_sentence_bytes = 256;
inline constexpr std::size_t most_failed_bytes = 8 + most_sentence_bytes;
inline constexpr std::size_t accept_bytes = 16;

[[nodiscard]] inline result<void> expect_end(const byte_reader& in) noexcept {
  if (!in.ok()) return error{error_code::truncated, "body of a message"};
  if (in.remaining() != 0) return error{error_code::corrupt, "size of a message's body"};
  return {};
}

inline void put_tokens(byte_writer& out, std::span<const token_id> tokens) {
  out.put(static_cast<std::uint32_t>(tokens.size()));
  for (const token_id token : tokens) out.put(token);
}
[[nodiscard]] inline std::vector<token_id> get_tokens(byte_reader& in) {
  const auto count = in.get<std::uint32_t>();
  byte_reader ids(in.get_bytes(std::uint64_t{4} * count));
  std::vector<token_id> tokens(ids.remaining() / 4);
  for (token_id& token : tokens) token = ids.get<token_id>();
  return tokens;
}

/// What the far node must know of a sequence, beside its rows.
struct hello_body {
  sampling_parameters sampling;
  std::uint64_t seed = 0;  ///< of sample_and_match
  std::uint32_t vocabulary = 0;
  std::uint64_t prompt = 0;          ///< tokens of it
  std::vector<token_id> tokens;  ///< all so far, the prompt first
  stream_header stream;          ///< that of a stream of the rows
};

inline void put_float(byte_writer& out, float value) { out.put(std::bit_cast<std::uint32_t>(value)); }
[[nodiscard]] inline float get_float(byte_reader& in) noexcept { return std::bit_cast<float>(in.get<std::uint32_t>()); }

inline void write_hello(std::vector<std::byte>& to, const sampling_parameters& sampling, std::uint64_t seed, std::uint32_t vocabulary,
                        std::uint64_t prompt, std::span<const token_id> tokens, const stream_header& stream) {
  byte_writer out(to);
  put_float(out, sampling.temperature);
  put_float(out, sampling.min_p);
  out.put(sampling.top_k);
  put_float(out, sampling.top_p);
  put_float(out, sampling.repetition_penalty);
  put_float(out, sampling.presence_penalty);
  put_float(out, sampling.frequency_penalty);
  out.put(std::uint64_t{sampling.penalty_window});
  out.put(seed);
  out.put(vocabulary);
  out.put(prompt);
  put_tokens(out, tokens);
  const std::vector<std::byte> header = write_stream_header(stream);
  to.insert(to.end(), header.begin(), header.end());
}
/// Also those of `read_stream_header`.
[[nodiscard]] inline result<hello_body> read_hello(std::span<const std::byte> body) {
  byte_reader in(body);
  hello_body hello;
  hello.sampling.temperature = get_float(in);
  hello.sampling.min_p = get_float(in);
  hello.sampling.top_k = in.get<std::uint32_t>();
  hello.sampling.top_p = get_float(in);
  hello.sampling.repetition_penalty = get_float(in);
  hello.sampling.presence_penalty = get_float(in);
  hello.sampling.frequency_penalty = get_float(in);
  hello.sampling.penalty_window = static_cast<std::size_t>(in.get<std::uint64_t>());
  hello.seed = in.get<std::uint64_t>();
  hello.vocabulary = in.get<std::uint32_t>();
  hello.prompt = in.get<std::uint64_t>();
  hello.tokens = get_tokens(in);
  if (!in.ok()) return error{error_code::truncated, "body of a message"};
  if (hello.prompt == 0 || hello.prompt > hello.tokens.size()) return error{error_code::corrupt, "tokens of a prompt"};
  auto stream = read_stream_header(in.get_bytes(in.remaining()));
  if (!stream) return stream.error();
  hello.stream = *std::move(stream);
  return hello;
}

struct accept_body {
  std::uint64_t rows = 0;       ///< of the sequence's first tokens that need not be sent
  std::uint64_t max_draft = 0;  ///< pending and wanted tokens of a proposal together
};

inline void write_accept(std::vector<std::byte>& to, const accept_body& accept) {
  byte_writer out(to);
  out.put(accept.rows);
  out.put(accept.max_draft);
}
[[nodiscard]] inline result<accept_body> read_accept(std::span<const std::byte> body) noexcept {
  byte_reader in(body);
  const auto rows = in.get<std::uint64_t>();
  const auto max_draft = in.get<std::uint64_t>();
  if (const auto end = expect_end(in); !end) return end.error();
  return accept_body{rows, max_draft};
}

/// Rows, and the tokens that have been added so that there is one token more than rows.
struct rows_body {
  std::uint64_t first = 0;
  std::uint32_t count = 0;  ///< 1 to most_remote_rows
  std::vector<token_id> tokens;
  std::span<const std::byte> chunks;  ///< see band_coder
};

/// The chunks are to follow.
inline void write_rows(std::vector<std::byte>& to, index_range rows, std::span<const token_id> tokens) {
  byte_writer out(to);
  out.put(rows.begin);
  out.put(static_cast<std::uint32_t>(rows.size()));
  put_tokens(out, tokens);
}
[[nodiscard]] inline result<rows_body> read_rows_message(std::span<const std::byte> body) {
  byte_reader in(body);
  rows_body rows;
  rows.first = in.get<std::uint64_t>();
  rows.count = in.get<std::uint32_t>();
  rows.tokens = get_tokens(in);
  rows.chunks = in.get_bytes(in.remaining());
  if (!in.ok()) return error{error_code::truncated, "body of a message"};
  if (rows.count == 0 || rows.count > most_remote_rows) return error{error_code::corrupt, "number of rows in a message"};
  if (rows.tokens.size() > rows.count) return error{error_code::corrupt, "number of tokens beside rows"};
  return rows;
}

enum class remote_rule : std::uint32_t { greedy = 1, sample_and_match = 2 };

struct propose_body {
  std::uint64_t round = 0;   ///< of the connection; the answer repeats it
  std::uint64_t length = 0;  ///< committed tokens
  remote_rule rule = remote_rule::greedy;
  bool wants_probabilities = false;
  std::uint32_t wanted = 0;
  std::vector<token_id> pending;
};

inline void write_propose(std::vector<std::byte>& to, const propose_body& propose) {
  byte_writer out(to);
  out.put(propose.round);
  out.put(propose.length);
  out.put(static_cast<std::uint32_t>(propose.rule));
  out.put(std::uint32_t{propose.wants_probabilities ? 1U : 0U});
  out.put(propose.wanted);
  put_tokens(out, propose.pending);
}
/// Also unsupported (an unknown rule or flag).
[[nodiscard]] inline result<propose_body> read_propose(std::span<const std::byte> body) {
  byte_reader in(body);
  propose_body propose;
  propose.round = in.get<std::uint64_t>();
  propose.length = in.get<std::uint64_t>();
  propose.rule = static_cast<remote_rule>(in.get<std::uint32_t>());
  const auto flags = in.get<std::uint32_t>();
  propose.wants_probabilities = flags == 1;
  propose.wanted = in.get<std::uint32_t>();
  propose.pending = get_tokens(in);
  if (const auto end = expect_end(in); !end) return end.error();
  if (propose.rule != remote_rule::greedy && propose.rule != remote_rule::sample_and_match)
    return error{error_code::unsupported, "unknown rule of a proposal"};
  if (flags > 1) return error{error_code::unsupported, "unknown flag of a proposal"};
  return propose;
}

[[nodiscard]] constexpr std::uint64_t most_drafts_bytes(std::uint64_t wanted) noexcept { return 12 + 8 * wanted; }

/// `probabilities`: one for each token, or none.
inline void write_drafts(std::vector<std::byte>& to, std::uint64_t round, std::span<const token_id> tokens,
                         std::span<const float> probabilities) {
  byte_writer out(to);
  out.put(round);
  put_tokens(out, tokens);
  for (const float each : probabilities) put_float(out, each);
}

struct drafts_body {
  std::vector<token_id> tokens;
  std::vector<float> probabilities;
};

/// The answer to a proposal. Anything else that arrives in its place is corrupt: another round's, more tokens than wanted, a token outside
/// the vocabulary, a probability that is none.
[[nodiscard]] inline result<drafts_body> read_drafts(std::span<const std::byte> body, const propose_body& asked, std::uint32_t vocabulary) {
  byte_reader in(body);
  if (in.get<std::uint64_t>() != asked.round && in.ok()) return error{error_code::corrupt, "drafts of another round"};
  drafts_body drafts;
  drafts.tokens = get_tokens(in);
  if (in.ok() && asked.wants_probabilities) drafts.probabilities.resize(drafts.tokens.size());
  for (float& each : drafts.probabilities) each = get_float(in);
  if (const auto end = expect_end(in); !end) return end.error();
  if (drafts.tokens.size() > asked.wanted) return error{error_code::corrupt, "more drafts than were asked for"};
  if (std::ranges::any_of(drafts.tokens, [&](token_id token) { return token >= vocabulary; }))
    return error{error_code::corrupt, "a draft that is not in the vocabulary"};
  if (!std::ranges::all_of(drafts.probabilities, [](float each) { return each >= 0 && each <= 1; }))
    return error{error_code::corrupt, "a probability of a draft"};
  return drafts;
}

inline void write_failed(std::vector<std::byte>& to, const error& why) {
  const std::string_view sentence = std::string_view(why.what).substr(0, most_sentence_bytes);
  byte_writer out(to);
  out.put(static_cast<std::uint32_t>(why.code));
  for (const char each : sentence) out.put(static_cast<std::uint8_t>(each));
}
struct failed_body {
  error_code code;
  std::string_view sentence;  ///< any bytes, in the body
};
/// Also unsupported (an unknown code).
[[nodiscard]] inline result<failed_body> read_failed(std::span<const std::byte> body) noexcept {
  byte_reader in(body);
  const auto code = in.get<std::uint32_t>();
  const std::span<const std::byte> sentence = in.get_bytes(in.remaining());
  if (const auto end = expect_end(in); !end) return end.error();
  if (code < static_cast<std::uint32_t>(error_code::invalid_argument) || code > static_cast<std::uint32_t>(error_code::timed_out))
    return error{error_code::unsupported, "the far node failed for an unknown reason"};
  return failed_body{static_cast<error_code>(code), {reinterpret_cast<const char*>(sentence.data()), sentence.size()}};
}

/// Errors: dtype_mismatch, shape_mismatch, profile_mismatch, unsupported (another codec, storage scales).
[[nodiscard]] inline result<void> expect_same_rows(const stream_header& theirs, const stream_header& ours) {
  if (theirs.format != ours.format) return error{error_code::dtype_mismatch, "the nodes hold rows of different number formats"};
  if (const auto fits = expect_shape(theirs.shape, ours.shape); !fits) return fits;
  if (theirs.profile_hash != ours.profile_hash) return error{error_code::profile_mismatch, "the nodes have different profiles"};
  if (write_stream_header(theirs) != write_stream_header(ours)) return error{error_code::unsupported, "the nodes have different codecs"};
  return {};
}

}  // namespace detail
}  // namespace kvexact

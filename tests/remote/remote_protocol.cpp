// SPDX-License-Identifier: Apache-2.0
#include <kvexact/remote/remote_protocol.hpp>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace kvexact;
using namespace kvexact::detail;

namespace {

using bytes = std::vector<std::byte>;

stream_header some_header() {
  stream_header header;
  header.profile_hash = 0x1234;
  header.shape = *cache_shape::make(std::vector<layer_shape>{{2, 4, 4}, {2, 4, 4}, {1, 6, 0}});
  return header;
}
bytes some_hello() {
  bytes body;
  const std::vector<token_id> tokens{3, 1, 4};
  const sampling_parameters sampling{.temperature = 0.5F, .min_p = 0.25F, .top_k = 7, .top_p = 0.75F, .repetition_penalty = 1.5F,
                                     .presence_penalty = 2, .frequency_penalty = 3, .penalty_window = 9};
  write_hello(body, sampling, 11, 12, 2, tokens, some_header());
  return body;
}

/// Every cut and every flipped bit is read as something else or refused, by a documented code; no cut is taken for the whole.
template <class Read>
void survives_damage(const bytes& good, Read&& read) {
  const auto is_named = [](const auto& outcome) {
    if (outcome) return true;
    const error_code code = outcome.error().code;
    return code == error_code::truncated || code == error_code::corrupt || code == error_code::unsupported;
  };
  REQUIRE(read(good));
  for (std::size_t size = 0; size < good.size(); ++size) CHECK(is_named(read(std::span(good).first(size))));
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    bytes bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    CHECK(is_named(read(std::span<const std::byte>(bad))));
  }
}

}  // namespace

TEST_CASE("remote_protocol: hello") {
  const bytes good = some_hello();
  const auto hello = read_hello(good);
  REQUIRE(hello);
  CHECK(hello->sampling.temperature == 0.5F);
  CHECK(hello->sampling.min_p == 0.25F);
  CHECK(hello->sampling.top_k == 7);
  CHECK(hello->sampling.top_p == 0.75F);
  CHECK(hello->sampling.repetition_penalty == 1.5F);
  CHECK(hello->sampling.presence_penalty == 2);
  CHECK(hello->sampling.frequency_penalty == 3);
  CHECK(hello->sampling.penalty_window == 9);
  CHECK(hello->seed == 11);
  CHECK(hello->vocabulary == 12);
  CHECK(hello->prompt == 2);
  CHECK(hello->tokens == std::vector<token_id>{3, 1, 4});
  CHECK(expect_same_rows(hello->stream, some_header()));
  survives_damage(good, [](std::span<const std::byte> body) { return read_hello(body); });
  for (std::size_t size = 0; size < good.size(); ++size) CHECK(!read_hello(std::span(good).first(size)));

  const auto differs = [&](auto change) {
    stream_header other = some_header();
    change(other);
    return expect_same_rows(other, some_header()).error().code;
  };
  CHECK(differs([](stream_header& other) { other.format = number_format::float16; }) == error_code::dtype_mismatch);
  CHECK(differs([](stream_header& other) { other.shape = *cache_shape::uniform(3, {2, 4, 4}); }) == error_code::shape_mismatch);
  CHECK(differs([](stream_header& other) { ++other.profile_hash; }) == error_code::profile_mismatch);
  CHECK(differs([](stream_header& other) { ++other.predictor; }) == error_code::unsupported);
  CHECK(differs([](stream_header& other) { other.storage_scales.resize(5); }) == error_code::unsupported);
}

TEST_CASE("remote_protocol: prompts of no tokens, or of more than there are") {
  for (const std::uint64_t prompt : {0U, 4U}) {
    bytes body;
    write_hello(body, {}, 0, 12, prompt, std::vector<token_id>{3, 1, 4}, some_header());
    CHECK(read_hello(body).error().code == error_code::corrupt);
  }
}

TEST_CASE("remote_protocol: rows, accept, propose") {
  bytes body;
  write_rows(body, {70, 73}, std::vector<token_id>{8, 9});
  body.push_back(std::byte{5});
  const auto rows = read_rows_message(body);
  REQUIRE(rows);
  CHECK(rows->first == 70);
  CHECK(rows->count == 3);
  CHECK(rows->tokens == std::vector<token_id>{8, 9});
  CHECK(rows->chunks.size() == 1);
  survives_damage(body, [](std::span<const std::byte> from) { return read_rows_message(from); });
  for (const std::uint64_t count : {0U, most_remote_rows + 1}) {
    bytes bad;
    write_rows(bad, {0, count}, {});
    CHECK(read_rows_message(bad).error().code == error_code::corrupt);
  }

  body.clear();
  write_accept(body, {3, 4});
  CHECK(body.size() == accept_bytes);
  CHECK(read_accept(body)->rows == 3);
  CHECK(read_accept(body)->max_draft == 4);
  survives_damage(body, [](std::span<const std::byte> from) { return read_accept(from); });

  body.clear();
  write_propose(body, {.round = 5, .length = 6, .rule = remote_rule::sample_and_match, .wants_probabilities = true, .wanted = 7,
                       .pending = {1, 2}});
  const auto propose = read_propose(body);
  REQUIRE(propose);
  CHECK(propose->round == 5);
  CHECK(propose->length == 6);
  CHECK(propose->rule == remote_rule::sample_and_match);
  CHECK(propose->wants_probabilities);
  CHECK(propose->wanted == 7);
  CHECK(propose->pending == std::vector<token_id>{1, 2});
  survives_damage(body, [](std::span<const std::byte> from) { return read_propose(from); });
  body[16] = std::byte{3};
  CHECK(read_propose(body).error().code == error_code::unsupported);
  body[16] = std::byte{1};
  body[20] = std::byte{2};
  CHECK(read_propose(body).error().code == error_code::unsupported);
}

TEST_CASE("remote_protocol: an answer is believed where it is one") {
  const propose_body asked{.round = 5, .length = 6, .wants_probabilities = true, .wanted = 3, .pending = {}};
  const std::vector<token_id> tokens{1, 11};
  const std::vector<float> probabilities{0.5F, 1};
  bytes body;
  write_drafts(body, 5, tokens, probabilities);
  const auto read = [&](std::span<const std::byte> from) { return read_drafts(from, asked, 12); };
  REQUIRE(read(body));
  CHECK(read(body)->tokens == tokens);
  CHECK(read(body)->probabilities == probabilities);
  survives_damage(body, read);

  const auto refused = [&](std::uint64_t round, const std::vector<token_id>& drafts, const std::vector<float>& each) {
    bytes bad;
    write_drafts(bad, round, drafts, each);
    return read(bad).error().code == error_code::corrupt;
  };
  CHECK(refused(4, tokens, probabilities));
  CHECK(refused(5, {1, 12}, probabilities));
  CHECK(refused(5, {1, 2, 3, 4}, {0, 0, 0, 0}));
  CHECK(refused(5, tokens, {0.5F, 1.5F}));
  CHECK(refused(5, tokens, {std::numeric_limits<float>::quiet_NaN(), 1}));
  CHECK(!read_drafts(body, {.round = 5, .length = 6, .wanted = 3, .pending = {}}, 12));  // probabilities that nobody asked for
}

TEST_CASE("remote_protocol: failures keep their code, and a sentence of some length") {
  bytes body;
  write_failed(body, {error_code::profile_mismatch, "a sentence"});
  CHECK(read_failed(body)->code == error_code::profile_mismatch);
  CHECK(read_failed(body)->sentence == "a sentence");
  survives_damage(body, [](std::span<const std::byte> from) { return read_failed(from); });
  body[0] = std::byte{0};
  CHECK(read_failed(body).error().code == error_code::unsupported);
  body[0] = std::byte{200};
  CHECK(read_failed(body).error().code == error_code::unsupported);
  const std::string endless(1000, 'a');
  body.clear();
  write_failed(body, {error_code::corrupt, endless.c_str()});
  CHECK(body.size() <= most_failed_bytes);
}

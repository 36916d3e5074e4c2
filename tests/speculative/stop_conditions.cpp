// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/speculative/counter_random.hpp>
#include <kvexact/speculative/stop_conditions.hpp>

using namespace kvexact;

namespace {

/// Tokens of several bytes each.
struct pieces {
  std::vector<std::string> texts;
  [[nodiscard]] std::string_view operator()(token_id token) const noexcept { return texts[token]; }
};

stop_strings strings_of(const std::vector<std::string_view>& texts) {
  auto made = stop_strings::make(texts);
  REQUIRE(made);
  return *made;
}

stop_conditions<pieces> on(const std::vector<std::string_view>& strings, std::vector<std::string> texts) {
  stop_conditions<pieces> made;
  made.strings = strings_of(strings);
  made.bytes.texts = std::move(texts);
  return made;
}

}  // namespace

TEST_CASE("stop_strings: against a search of the whole text") {
  const std::vector<std::vector<std::string_view>> sets{
      {"ab"}, {"aab", "b"}, {"abab", "bb", "abb"}, {"aaaa", "aaa"}, {"abcab", "bca", "cabca"}, {"b", "ab", "aab"}, {"cc", "cbc", "bcbcb"}};
  for (const auto& texts : sets) {
    const stop_strings strings = strings_of(texts);
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
      std::string text;
      stop_strings::state state = 0;
      for (std::uint64_t i = 0; i < 30; ++i) {
        text += static_cast<char>('a' + static_cast<int>(3 * counter_random(seed).uniform(i, {})));
        state = strings.next(state, text.back());
        std::size_t longest = 0;
        std::size_t undecided = 0;
        for (const std::string_view stop : texts) {
          if (text.ends_with(stop)) longest = std::max(longest, stop.size());
          for (std::size_t n = 1; n <= stop.size(); ++n)
            if (text.ends_with(stop.substr(0, n))) undecided = std::max(undecided, n);
        }
        REQUIRE(strings.matched(state) == longest);
        REQUIRE(strings.undecided(state) == undecided);
      }
    }
  }
}

TEST_CASE("stop_strings: all bytes, none, and an empty one") {
  const stop_strings high = strings_of({std::string_view("\xff\x00\x80", 3)});
  CHECK(high.matched(high.next(high.next(high.next(0, '\xff'), '\0'), '\x80')) == 3);
  const stop_strings nothing = strings_of({});
  CHECK(nothing.next(0, 'a') == 0);
  CHECK(nothing.matched(0) == 0);
  CHECK(nothing.undecided(0) == 0);
  const std::vector<std::string_view> with_empty{"a", ""};
  const auto refused = stop_strings::make(with_empty);
  REQUIRE_FALSE(refused);
  CHECK(refused.error().code == error_code::invalid_argument);
}

TEST_CASE("stop_conditions: a stop string over several tokens, and what it leaves of the last") {
  const auto stops = on({"END", "stop"}, {"xE", "N", "D!!", "stoq", "E"});
  stop_state state;
  CHECK_FALSE(stops.feed(state, 3));
  CHECK_FALSE(stops.feed(state, 0));
  CHECK_FALSE(stops.feed(state, 1));
  const stop_event event = stops.feed(state, 2);
  CHECK(event.reason == stop_reason::stop_string);
  CHECK(event.matched_bytes == 3);
  CHECK(event.trailing_bytes == 2);
  CHECK(stops.remaining(state) == 0);
}

TEST_CASE("stop_conditions: a copy that looks ahead changes nothing") {
  const auto stops = on({"ab"}, {"a", "b", "c"});
  stop_state state;
  CHECK_FALSE(stops.feed(state, 0));
  stop_state ahead = state;
  CHECK_FALSE(stops.feed(ahead, 2));
  CHECK_FALSE(stops.feed(ahead, 1));
  CHECK(stops.feed(state, 1).reason == stop_reason::stop_string);
}

TEST_CASE("stop_conditions: budgets count tokens") {
  stop_conditions<> stops;
  stops.max_new_tokens = 3;
  stops.context_length = 10;
  stop_state state{.length = 5};
  CHECK(stops.remaining(state) == 3);
  CHECK_FALSE(stops.feed(state, 0));
  CHECK_FALSE(stops.feed(state, 0));
  CHECK(stops.remaining(state) == 1);
  CHECK(stops.feed(state, 0).reason == stop_reason::max_new_tokens);
  CHECK(stops.remaining(state) == 0);

  stop_state late{.length = 8};
  CHECK(stops.remaining(late) == 2);
  CHECK_FALSE(stops.feed(late, 0));
  CHECK(stops.feed(late, 0).reason == stop_reason::context_full);
  CHECK(stops.remaining(late) == 0);
  CHECK(stops.remaining(stop_state{.length = 11}) == 0);
}

TEST_CASE("stop_conditions: the first reason counts") {
  auto stops = on({"x"}, {"x", "y"});
  stops.end_tokens = {7, 0};
  stops.max_new_tokens = 1;
  stops.context_length = 1;
  stop_state state;
  CHECK(stops.feed(state, 0).reason == stop_reason::end_token);
  CHECK(stops.remaining(state) == 0);
  stops.end_tokens = {7};
  state = {};
  CHECK(stops.feed(state, 0).reason == stop_reason::stop_string);
  state = {};
  CHECK(stops.feed(state, 1).reason == stop_reason::max_new_tokens);
}

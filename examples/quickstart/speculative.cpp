// SPDX-License-Identifier: Apache-2.0
// A made-up model of characters decodes with drafts by n-grams, and without: the same text in fewer passes.
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <kvexact/speculative/ngram_drafter.hpp>
#include <kvexact/speculative/speculative_decoder.hpp>

// All that the model has learnt.
constexpr std::string_view text = "the cat sat on the mat and the cat ate the rat that sat on the hat and the bat sat on the rat ";

// A real engine keeps K and V rows of each token; this one the token.
class my_engine {
 public:
  my_engine() { cache_.reserve(capacity()); }
  int passes = 0;
  std::uint32_t vocabulary() const noexcept { return 128; }
  std::uint64_t length() const noexcept { return cache_.size(); }
  std::uint64_t capacity() const noexcept { return 1024; }
  std::uint64_t max_rollback() const noexcept { return capacity(); }

  // Appends the tokens, and gives the logits after the last so many of them as there is room for.
  kvexact::result<void> forward(std::span<const std::uint32_t> tokens, std::span<float> logits) noexcept {
    const std::size_t rows = logits.size() / vocabulary();
    if (logits.size() != rows * vocabulary() || rows > tokens.size())
      return kvexact::error{kvexact::error_code::invalid_argument, "rows of logits"};
    if (tokens.size() > capacity() - length()) return kvexact::error{kvexact::error_code::out_of_range, "tokens beyond the cache"};
    for (const std::uint32_t token : tokens) {
      if (token >= vocabulary()) return kvexact::error{kvexact::error_code::invalid_argument, "an unknown token"};
    }
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      cache_ += static_cast<char>(tokens[i]);
      if (i + rows >= tokens.size()) predict(logits.subspan((i + rows - tokens.size()) * vocabulary(), vocabulary()));
    }
    ++passes;
    return {};
  }
  kvexact::result<void> truncate(std::uint64_t length) noexcept {
    if (length > cache_.size()) return kvexact::error{kvexact::error_code::out_of_range, "more than the cache holds"};
    cache_.resize(static_cast<std::size_t>(length));
    return {};
  }

 private:
  // What follows in the text wherever the newest characters stand there, of places with more of them in common first.
  void predict(std::span<float> logits) const noexcept {
    for (float& each : logits) each = 0;
    for (std::size_t end = 1; end < text.size(); ++end) {
      std::size_t same = 0;
      while (same < 8 && same < end && same < cache_.size() && text[end - 1 - same] == cache_[cache_.size() - 1 - same]) ++same;
      logits[static_cast<unsigned char>(text[end])] += static_cast<float>(same * same * same);
    }
  }

  std::string cache_;
};
static_assert(kvexact::positional_decoder<my_engine>);

kvexact::result<std::vector<std::uint32_t>> decode(my_engine& engine, const std::vector<std::uint32_t>& prompt, std::uint32_t length) {
  // What drafts: here what followed last time. A draft cache of the same model or a small model are drafters, too.
  const auto drafts = kvexact::ngram_drafter::make({.longest = 3});
  if (!drafts) return drafts.error();
  const auto sampler = kvexact::standard_sampler::make({.temperature = 0});
  if (!sampler) return sampler.error();
  auto decoder = kvexact::speculative_decoder<my_engine, kvexact::ngram_drafter>::make(
      engine, *drafts, kvexact::greedy(), kvexact::fixed_draft_length(length), {.sampler = *sampler, .stops = {.max_new_tokens = 64}});
  if (!decoder) return decoder.error();
  if (const auto begun = decoder->begin(prompt); !begun) return begun.error();
  while (!decoder->stop()) {
    const auto round = decoder->round();  // drafts, verifies all drafts in one pass of the engine, commits at least one token
    if (!round) return round.error();
    if (round->draft_error) std::printf("no drafts: %s\n", round->draft_error->message().c_str());  // costs speed, no token
  }
  return std::vector<std::uint32_t>(decoder->tokens().begin(), decoder->tokens().end());
}

int main() {
  const std::vector<std::uint32_t> prompt{'t', 'h', 'e', ' ', 'c', 'a', 't', ' '};
  my_engine plain_engine, engine;
  const auto plain = decode(plain_engine, prompt, 0), drafted = decode(engine, prompt, 8);
  if (!plain || !drafted) {
    std::printf("%s\n", (plain ? drafted : plain).error().message().c_str());
    return 1;
  }
  std::printf("%s\n%d passes instead of %d\n", std::string(drafted->begin(), drafted->end()).c_str(), engine.passes, plain_engine.passes);
  return *drafted == *plain && engine.passes < plain_engine.passes ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include <common/outcome.hpp>
#include <common/text_file.hpp>

namespace kvexact::examples {

/// Reads token ids written as decimal text, separated by white space, at most 64 MiB of it. An empty file is a sequence of no tokens.
[[nodiscard]] inline outcome<std::vector<std::uint32_t>> read_tokens(const std::string& path) noexcept {
  try {
    auto text = read_text(path, std::size_t{64} << 20);
    if (!text) return text.error();
    std::istringstream file(*std::move(text));
    std::vector<std::uint32_t> ids;
    std::string word;
    while (file >> word) {
      std::uint32_t id = 0;
      const auto [stop, problem] = std::from_chars(word.data(), word.data() + word.size(), id);
      if (problem != std::errc{} || stop != word.data() + word.size()) {
        return failure{error_code::corrupt,
                       path + ": word " + std::to_string(ids.size() + 1) + ", " + in_quotes(word) + ", is not a token id"};
      }
      ids.push_back(id);
    }
    return ids;
  } catch (const std::exception& caught) {
    return failure{error_code::out_of_memory, path + ": " + caught.what()};
  }
}

/// Token ids of a model that has `vocabulary` of them; `path`: where they are from.
[[nodiscard]] inline status expect_known(const std::string& path, const std::vector<std::uint32_t>& ids, std::size_t vocabulary) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= vocabulary)
      return failure{error_code::out_of_range, path + ": token " + std::to_string(i) + ", the id " + std::to_string(ids[i]) +
                                                   ": the model's vocabulary has " + std::to_string(vocabulary) + " ids"};
  }
  return done;
}

}  // namespace kvexact::examples

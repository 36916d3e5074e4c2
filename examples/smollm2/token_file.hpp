// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cstdint>
#include <exception>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include <common/outcome.hpp>

namespace kvexact::examples {

/// Reads token ids written as decimal text, separated by white space. An empty file is a sequence of no tokens.
[[nodiscard]] inline outcome<std::vector<std::uint32_t>> read_tokens(const std::string& path) noexcept {
  try {
    std::ifstream file(path);
    if (!file) return failure{error_code::invalid_argument, path + ": cannot open"};
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
    if (file.bad()) return failure{error_code::invalid_argument, path + ": cannot read"};
    return ids;
  } catch (const std::exception& caught) {
    return failure{error_code::out_of_memory, path + ": " + caught.what()};
  }
}

}  // namespace kvexact::examples

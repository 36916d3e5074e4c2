// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <fstream>
#include <string>

#include <common/outcome.hpp>

namespace kvexact::examples {

/// All of a text, from a file or a pipe, that has at most `most` bytes: some never end.
[[nodiscard]] inline outcome<std::string> read_text(const std::string& path, std::size_t most) noexcept {
  try {
    std::ifstream file(path, std::ios::binary);
    if (!file) return failure{error_code::invalid_argument, path + ": cannot open"};
    std::string text;
    std::array<char, 65536> piece;
    while (text.size() <= most) {
      file.read(piece.data(), piece.size());
      if (file.gcount() == 0) break;
      text.append(piece.data(), static_cast<std::size_t>(file.gcount()));
    }
    if (file.bad()) return failure{error_code::invalid_argument, path + ": cannot read"};
    if (text.size() > most) {
      return failure{error_code::out_of_range, path + ": too large, more than " + std::to_string(most >> 20) + " MiB of text"};
    }
    return text;
  } catch (const std::exception& caught) {
    return failure{error_code::out_of_memory, path + ": " + caught.what()};
  }
}

}  // namespace kvexact::examples

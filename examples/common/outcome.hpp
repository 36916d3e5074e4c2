// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cassert>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include <kvexact/core/result.hpp>

namespace kvexact::examples {

/// What went wrong in a tool: the library's code and a whole sentence that names the file, the tensor or the option.
/// The library's own `error` holds only static text, which is not enough for a person in front of a terminal.
struct failure {
  error_code code = error_code::invalid_argument;
  std::string text;
};

/// A value or a failure; the tools' counterpart of `kvexact::result`. `T` may be `std::monostate` where there is nothing to return.
template <class T>
class [[nodiscard]] outcome {
 public:
  outcome(T value) noexcept : state_(std::in_place_index<0>, std::move(value)) {}
  outcome(failure why) noexcept : state_(std::in_place_index<1>, std::move(why)) {}

  [[nodiscard]] explicit operator bool() const noexcept { return state_.index() == 0; }
  [[nodiscard]] T& operator*() & noexcept {
    assert(state_.index() == 0);
    return *std::get_if<0>(&state_);
  }
  [[nodiscard]] const T& operator*() const& noexcept { return *const_cast<outcome&>(*this); }
  [[nodiscard]] T&& operator*() && noexcept { return std::move(**this); }
  [[nodiscard]] T* operator->() noexcept { return &**this; }
  [[nodiscard]] const T* operator->() const noexcept { return &**this; }
  [[nodiscard]] const failure& error() const noexcept {
    assert(state_.index() == 1);
    return *std::get_if<1>(&state_);
  }

 private:
  std::variant<T, failure> state_;
};

/// An outcome without a value; success is written `done`.
using status = outcome<std::monostate>;
inline constexpr std::monostate done{};

/// A name from a file as it may be shown on a terminal: in single quotes, control characters as `\xNN`, cut after 120 bytes.
[[nodiscard]] inline std::string in_quotes(std::string_view name) {
  constexpr std::size_t longest = 120;
  std::string text = "'";
  for (const char c : name.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      text += c;
    } else {
      constexpr char digits[] = "0123456789abcdef";
      text += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
    }
  }
  if (name.size() > longest) text += "...";
  return text + "'";
}

}  // namespace kvexact::examples

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cassert>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace kvexact {

/// What went wrong. The values are stable; new ones are added at the end.
enum class error_code : std::uint8_t {
  invalid_argument = 1,      ///< a call that no input could make valid (empty range, zero lanes, null data)
  shape_mismatch = 2,        ///< layers, heads or dimensions differ from what the profile or the stream says
  dtype_mismatch = 3,        ///< the number format differs from what the profile or the stream says
  profile_mismatch = 4,      ///< the stream was written with another profile
  prediction_missing = 5,    ///< the chunk was coded against an external prediction and none was given
  prediction_mismatch = 6,   ///< the external prediction differs from the one used for encoding
  truncated = 7,             ///< the input ends early
  corrupt = 8,               ///< the input contradicts itself or the format
  checksum_mismatch = 9,     ///< stored and computed checksums differ
  unsupported = 10,          ///< a valid input of a version or kind this library does not handle
  out_of_range = 11,         ///< layers or tokens that the stream does not hold
  out_of_memory = 12,        ///< an allocation failed
  workspace_too_small = 13,  ///< the caller's workspace is smaller than the call says it needs
  not_calibrated = 14,       ///< the calibrator has seen nothing that it could fit
  output_failed = 15,        ///< the caller's sink refused bytes
  device_error = 16,         ///< an accelerator refused work; `what` is its runtime's sentence
  timed_out = 17,            ///< what was waited for has not come in the time that was given
};

/// Short lower-case name of a code, for logs ("checksum_mismatch").
[[nodiscard]] constexpr const char* to_string(error_code code) noexcept {
  switch (code) {
    case error_code::invalid_argument: return "invalid_argument";
    case error_code::shape_mismatch: return "shape_mismatch";
    case error_code::dtype_mismatch: return "dtype_mismatch";
    case error_code::profile_mismatch: return "profile_mismatch";
    case error_code::prediction_missing: return "prediction_missing";
    case error_code::prediction_mismatch: return "prediction_mismatch";
    case error_code::truncated: return "truncated";
    case error_code::corrupt: return "corrupt";
    case error_code::checksum_mismatch: return "checksum_mismatch";
    case error_code::unsupported: return "unsupported";
    case error_code::out_of_range: return "out_of_range";
    case error_code::out_of_memory: return "out_of_memory";
    case error_code::workspace_too_small: return "workspace_too_small";
    case error_code::not_calibrated: return "not_calibrated";
    case error_code::output_failed: return "output_failed";
    case error_code::device_error: return "device_error";
    case error_code::timed_out: return "timed_out";
  }
  return "unknown";
}

/// An error: a code, a sentence in static storage, and where it happened (each coordinate is -1 where it does not apply).
struct error {
  error_code code = error_code::invalid_argument;
  const char* what = "";
  std::int64_t layer = -1;
  std::int64_t token = -1;
  std::int64_t byte = -1;

  [[nodiscard]] constexpr error at_layer(std::int64_t value) const noexcept {
    error copy = *this;
    copy.layer = value;
    return copy;
  }
  [[nodiscard]] constexpr error at_token(std::int64_t value) const noexcept {
    error copy = *this;
    copy.token = value;
    return copy;
  }
  [[nodiscard]] constexpr error at_byte(std::int64_t value) const noexcept {
    error copy = *this;
    copy.byte = value;
    return copy;
  }

  /// "checksum_mismatch: chunk payload (layer 4, token 256, byte 1064)"
  [[nodiscard]] std::string message() const {
    std::string text = std::string(to_string(code)) + ": " + what;
    const char* separator = " (";
    for (const auto& [name, value] : {std::pair{"layer ", layer}, std::pair{"token ", token}, std::pair{"byte ", byte}}) {
      if (value < 0) continue;
      text += separator;
      text += name + std::to_string(value);
      separator = ", ";
    }
    if (*separator == ',') text += ')';
    return text;
  }
};

/// A value or an error. Reading the wrong one is a programming error, caught by `assert`.
template <class T>
class [[nodiscard]] result {
 public:
  result(T value) noexcept : state_(std::in_place_index<0>, std::move(value)) {}
  result(kvexact::error failure) noexcept : state_(std::in_place_index<1>, failure) {}

  [[nodiscard]] explicit operator bool() const noexcept { return state_.index() == 0; }
  [[nodiscard]] T& operator*() & noexcept { return value(); }
  [[nodiscard]] const T& operator*() const& noexcept { return const_cast<result*>(this)->value(); }
  [[nodiscard]] T&& operator*() && noexcept { return std::move(value()); }
  [[nodiscard]] T* operator->() noexcept { return &value(); }
  [[nodiscard]] const T* operator->() const noexcept { return &const_cast<result*>(this)->value(); }
  [[nodiscard]] const kvexact::error& error() const noexcept {
    assert(state_.index() == 1);
    return *std::get_if<1>(&state_);
  }

 private:
  T& value() noexcept {
    assert(state_.index() == 0);
    return *std::get_if<0>(&state_);
  }
  std::variant<T, kvexact::error> state_;
};

/// Success or an error.
template <>
class [[nodiscard]] result<void> {
 public:
  constexpr result() noexcept = default;
  constexpr result(kvexact::error failure) noexcept : failed_(true), error_(failure) {}

  [[nodiscard]] constexpr explicit operator bool() const noexcept { return !failed_; }
  [[nodiscard]] constexpr const kvexact::error& error() const noexcept {
    assert(failed_);
    return error_;
  }

 private:
  bool failed_ = false;
  kvexact::error error_{};
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include <doctest/doctest.h>

#include <kvexact/core/result.hpp>

using namespace kvexact;

namespace {

constexpr error_code all_codes[] = {
    error_code::invalid_argument,    error_code::shape_mismatch,      error_code::dtype_mismatch, error_code::profile_mismatch,
    error_code::prediction_missing,  error_code::prediction_mismatch, error_code::truncated,      error_code::corrupt,
    error_code::checksum_mismatch,   error_code::unsupported,         error_code::out_of_range,   error_code::out_of_memory,
    error_code::workspace_too_small, error_code::not_calibrated,      error_code::output_failed,  error_code::device_error,
    error_code::timed_out,
};

struct counted {
  explicit counted(int* destroyed) : destroyed_(destroyed) {}
  counted(counted&& other) noexcept : destroyed_(std::exchange(other.destroyed_, nullptr)) {}
  counted& operator=(counted&&) = delete;
  ~counted() {
    if (destroyed_ != nullptr) ++*destroyed_;
  }

 private:
  int* destroyed_;
};

result<int> half(int value) {
  if (value % 2 != 0) return error{error_code::invalid_argument, "odd"};
  return value / 2;
}

}  // namespace

TEST_CASE("error_code: values are stable") {
  int value = 0;
  for (const error_code code : all_codes) CHECK(static_cast<int>(code) == ++value);
}

TEST_CASE("error_code: every code has a name of its own") {
  std::set<std::string> names;
  for (const error_code code : all_codes) names.insert(to_string(code));
  CHECK(names.size() == std::size(all_codes));
  CHECK(names.count("unknown") == 0);
  CHECK(std::string(to_string(error_code::checksum_mismatch)) == "checksum_mismatch");
  CHECK(std::string(to_string(static_cast<error_code>(0))) == "unknown");
  CHECK(std::string(to_string(static_cast<error_code>(255))) == "unknown");
}

TEST_CASE("error: the message names the places that apply") {
  const error plain{error_code::checksum_mismatch, "chunk payload"};
  CHECK(plain.message() == "checksum_mismatch: chunk payload");
  CHECK(plain.at_layer(4).message() == "checksum_mismatch: chunk payload (layer 4)");
  CHECK(plain.at_token(0).message() == "checksum_mismatch: chunk payload (token 0)");
  CHECK(plain.at_byte(5'000'000'000).message() == "checksum_mismatch: chunk payload (byte 5000000000)");
  CHECK(plain.at_byte(1064).at_layer(4).message() == "checksum_mismatch: chunk payload (layer 4, byte 1064)");
  CHECK(plain.at_byte(1064).at_token(256).at_layer(4).message() == "checksum_mismatch: chunk payload (layer 4, token 256, byte 1064)");
}

TEST_CASE("error: a place is added to a copy") {
  constexpr error plain{error_code::corrupt, "index"};
  constexpr error placed = plain.at_layer(1).at_token(2).at_byte(3);
  static_assert(plain.layer == -1 && plain.token == -1 && plain.byte == -1);
  static_assert(placed.layer == 1 && placed.token == 2 && placed.byte == 3);
  static_assert(placed.code == error_code::corrupt && placed.what == plain.what);
}

TEST_CASE("result: holds a value or an error") {
  result<int> good = half(6);
  REQUIRE(good);
  CHECK(*good == 3);
  *good = 5;
  CHECK(*std::as_const(good) == 5);

  const result<int> bad = half(7);
  REQUIRE_FALSE(bad);
  CHECK(bad.error().code == error_code::invalid_argument);
  CHECK(std::string(bad.error().what) == "odd");
}

TEST_CASE("result: reaches members") {
  result<std::string> text = std::string("abc");
  text->push_back('d');
  CHECK(text->size() == 4);
  CHECK(std::as_const(text)->back() == 'd');
}

TEST_CASE("result: moves what cannot be copied") {
  result<std::unique_ptr<int>> pointer = std::make_unique<int>(9);
  REQUIRE(pointer);
  const std::unique_ptr<int> taken = *std::move(pointer);
  CHECK(*taken == 9);
  static_assert(!std::is_copy_constructible_v<result<std::unique_ptr<int>>>);
}

TEST_CASE("result: destroys its value once") {
  int destroyed = 0;
  {
    result<counted> first = counted(&destroyed);
    const result<counted> second = std::move(first);
    CHECK(second);
    CHECK(destroyed == 0);
  }
  CHECK(destroyed == 1);
}

TEST_CASE("result: may hold a bool without being taken for one") {
  const result<bool> no = false;
  REQUIRE(no);
  CHECK(*no == false);
  static_assert(!std::is_convertible_v<result<bool>, bool>);
}

TEST_CASE("result<void>: success or an error") {
  constexpr result<void> success;
  static_assert(static_cast<bool>(success));
  constexpr result<void> failure = error{error_code::truncated, "header"};
  static_assert(!failure && failure.error().code == error_code::truncated);
  CHECK(failure.error().message() == "truncated: header");
}

TEST_CASE("result: constructing and reading never throws") {
  static_assert(std::is_nothrow_constructible_v<result<std::string>, std::string>);
  static_assert(std::is_nothrow_constructible_v<result<std::string>, error>);
  static_assert(std::is_nothrow_move_constructible_v<result<std::string>>);
  static_assert(noexcept(*std::declval<result<int>&>())&& noexcept(std::declval<const result<int>&>().error()));
  static_assert(noexcept(static_cast<bool>(std::declval<const result<int>&>())));
}

// SPDX-License-Identifier: Apache-2.0
#include <kvexact/remote/message_link.hpp>

#include <algorithm>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "memory_channel.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

using link_type = message_link<memory_channel>;

constexpr channel_deadline now{};

auto writes(const std::vector<std::byte>& body) {
  return [&body](std::vector<std::byte>& out) -> result<void> {
    out.insert(out.end(), body.begin(), body.end());
    return {};
  };
}
std::vector<std::byte> some_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 % 251);
  return bytes;
}
std::vector<std::byte> sent_as(message_type type, const std::vector<std::byte>& body) {
  memory_line line;
  link_type link{memory_channel(line)};
  REQUIRE(link.post(type, writes(body)));
  REQUIRE(link.flush(now));
  return line.sent;
}
/// What is received of these bytes, then the connection ends.
result<std::vector<std::byte>> received(std::vector<std::byte> bytes, std::uint64_t most = 1000) {
  memory_line line;
  line.arriving = std::move(bytes);
  line.is_closed = true;
  link_type link{memory_channel(line)};
  const auto message = link.receive(now, most);
  if (!message) return message.error();
  return std::vector<std::byte>(message->body.begin(), message->body.end());
}

}  // namespace

TEST_CASE("message_link: messages arrive whole, however the line cuts them") {
  const auto first = some_bytes(0), second = some_bytes(200'000), third = some_bytes(5);
  for (const std::size_t at_once : {std::size_t{7}, std::size_t{1} << 20}) {
    memory_line line;
    line.at_once = at_once;
    line.room = 100;
    link_type link{memory_channel(line)};
    REQUIRE(link.post(message_type::hello, writes(first)));
    REQUIRE(link.post(message_type::rows, writes(second)));
    CHECK(link.flush(now).error().code == error_code::timed_out);
    CHECK(!link.is_flushed());
    REQUIRE(link.post(message_type::failed, writes(third)));
    line.room = ~std::size_t{0};
    REQUIRE(link.flush(now));
    CHECK(link.is_flushed());

    const std::vector<std::byte> all = line.sent;
    const auto show = [&](std::size_t bytes) { line.arriving.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(bytes)); };
    const auto expect = [&](message_type type, const std::vector<std::byte>& body) {
      const auto message = link.receive(now, 1'000'000);
      REQUIRE(message);
      CHECK(message->type == type);
      CHECK(std::ranges::equal(message->body, body));
      CHECK(link.is_between_messages());
    };
    CHECK(link.is_between_messages());
    CHECK(link.receive(now, 0).error().code == error_code::timed_out);
    show(10);  // half a header
    CHECK(link.receive(now, 0).error().code == error_code::timed_out);
    CHECK(!link.is_between_messages());
    show(20'000);
    expect(message_type::hello, first);
    CHECK(link.receive(now, 1'000'000).error().code == error_code::timed_out);  // half a body
    CHECK(!link.is_between_messages());
    show(all.size());
    expect(message_type::rows, second);
    expect(message_type::failed, third);
  }
}

TEST_CASE("message_link: a message that could not be written leaves nothing behind") {
  memory_line line;
  link_type link{memory_channel(line)};
  const auto failing = [](std::vector<std::byte>& out) -> result<void> {
    out.resize(out.size() + 3);
    return error{error_code::shape_mismatch, "a reason"};
  };
  REQUIRE(link.post(message_type::rows, writes(some_bytes(3))));
  CHECK(link.post(message_type::rows, failing).error().code == error_code::shape_mismatch);
  REQUIRE(link.flush(now));
  CHECK(line.sent == sent_as(message_type::rows, some_bytes(3)));
}

TEST_CASE("message_link: damage has a name, and a limit") {
  const auto good = sent_as(message_type::drafts, some_bytes(20));
  REQUIRE(received(good));
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK(received({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)}).error().code == error_code::truncated);
  }
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    CAPTURE(bit);
    auto bad = good;
    bad[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    const auto expected = bit < 32 ? error_code::corrupt : bit < 48 ? error_code::unsupported : error_code::checksum_mismatch;
    CHECK(received(bad).error().code == expected);
  }
  for (const std::uint16_t type : {std::uint16_t{0}, std::uint16_t{7}, std::uint16_t{0xffff}})
    CHECK(received(sent_as(static_cast<message_type>(type), {})).error().code == error_code::unsupported);
  CHECK(received(good, 20));
  CHECK(received(good, 19).error().code == error_code::out_of_range);

  // What a header announces takes no memory until it comes.
  std::vector<std::byte> header(detail::message_header_bytes);
  detail::write_message_header(header.data(), message_type::rows, {});
  store_little_endian(header.data() + 8, ~std::uint64_t{0} - 100);
  store_little_endian(header.data() + 16, checksum(std::span(header).first(16)));
  CHECK(received(header, ~std::uint64_t{0}).error().code == error_code::truncated);
}

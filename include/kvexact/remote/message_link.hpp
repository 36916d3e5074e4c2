// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/remote/byte_channel.hpp>

namespace kvexact {

/// What a message says; see docs/remote.md.
enum class message_type : std::uint16_t {
  hello = 1,    ///< near to far: a sequence, and how it is sampled
  accept = 2,   ///< far to near: what it has of it already
  rows = 3,     ///< near to far: K and V of committed tokens
  propose = 4,  ///< near to far: asks for drafts
  drafts = 5,   ///< far to near: the answer
  failed = 6,   ///< far to near: why there is none, and the last message
};

/// `body` is valid until the next call of `message_link::receive`.
struct message {
  message_type type;
  std::span<const std::byte> body;
};

namespace detail {

inline constexpr std::uint32_t message_magic = 0x5258564bU;  // "KVXR"
inline constexpr std::uint16_t message_version = 1;
inline constexpr std::size_t message_header_bytes = 32;

/// u32 magic, u16 version, u16 type, u64 bytes of the body, u64 checksum of these 16 bytes, u64 checksum of the body.
inline void write_message_header(std::byte* to, message_type type, std::span<const std::byte> body) noexcept {
  store_little_endian(to, message_magic);
  store_little_endian(to + 4, message_version);
  store_little_endian(to + 6, static_cast<std::uint16_t>(type));
  store_little_endian(to + 8, std::uint64_t{body.size()});
  store_little_endian(to + 16, checksum({to, 16}));
  store_little_endian(to + 24, checksum(body));
}

struct message_header {
  message_type type;
  std::uint64_t bytes;
  std::uint64_t checksum;
};

[[nodiscard]] inline result<message_header> read_message_header(std::span<const std::byte, message_header_bytes> bytes) noexcept {
  const std::byte* const from = bytes.data();
  if (load_little_endian<std::uint32_t>(from) != message_magic) return error{error_code::corrupt, "not a message: wrong magic number"};
  if (load_little_endian<std::uint16_t>(from + 4) != message_version)
    return error{error_code::unsupported, "a message of another protocol version"};
  if (load_little_endian<std::uint64_t>(from + 16) != checksum(bytes.first(16)))
    return error{error_code::checksum_mismatch, "header of a message"};
  const auto type = load_little_endian<std::uint16_t>(from + 6);
  if (type < static_cast<std::uint16_t>(message_type::hello) || type > static_cast<std::uint16_t>(message_type::failed))
    return error{error_code::unsupported, "unknown type of a message"};
  return message_header{static_cast<message_type>(type), load_little_endian<std::uint64_t>(from + 8),
                        load_little_endian<std::uint64_t>(from + 24)};
}

}  // namespace detail

/// Messages over a channel. Time-outs lose nothing: what was half sent or half received is gone on with by the next call. After any other
/// error of `flush` and `receive` the connection is of no more use.
template <byte_channel Channel>
class message_link {
 public:
  explicit message_link(Channel channel) noexcept : channel_(std::move(channel)) {}

  /// Puts a message behind those that wait to be sent; write(body) -> result<void> appends to a std::vector<std::byte>, and may throw what
  /// that throws. Errors: those of `write`, out_of_memory; then there is no message.
  template <class Write>
  [[nodiscard]] result<void> post(message_type type, Write&& write) noexcept {
    const std::size_t begin = out_.size();
    result<void> outcome;
    try {
      out_.resize(begin + detail::message_header_bytes);
      outcome = write(out_);
    } catch (...) {
      outcome = error{error_code::out_of_memory, "a message"};
    }
    if (outcome) {
      const auto body = std::span<const std::byte>(out_).subspan(begin + detail::message_header_bytes);
      detail::write_message_header(out_.data() + begin, type, body);
    } else {
      out_.resize(std::min(out_.size(), begin));
    }
    return outcome;
  }

  /// Whether nothing waits to be sent.
  [[nodiscard]] bool is_flushed() const noexcept { return out_.empty(); }
  /// Sends all that waits. Errors: those of the channel.
  [[nodiscard]] result<void> flush(channel_deadline deadline) noexcept {
    while (sent_ < out_.size()) {
      const auto sent = channel_.send(std::span<const std::byte>(out_).subspan(sent_), deadline);
      if (!sent) return sent.error();
      sent_ += *sent;
    }
    out_.clear();
    sent_ = 0;
    return {};
  }

  /// Whether no message has begun to arrive, so that a connection that ends here ends in order.
  [[nodiscard]] bool is_between_messages() const noexcept { return is_complete_ || arrived_ == 0; }
  /// The next message, with a body of at most `most_bytes`. Memory grows with what has arrived, whatever a header announces. Errors: those
  /// of the channel; corrupt, unsupported, checksum_mismatch (what arrives is no message), out_of_range (a longer one), out_of_memory.
  [[nodiscard]] result<message> receive(channel_deadline deadline, std::uint64_t most_bytes) noexcept {
    if (is_complete_) {
      in_.clear();
      arrived_ = 0;
      header_.reset();
      is_complete_ = false;
    }
    if (!header_) {
      const auto begun = fill(detail::message_header_bytes, deadline);
      if (!begun) return begun.error();
      const auto header = detail::read_message_header(std::span<const std::byte>(in_).first<detail::message_header_bytes>());
      if (!header) return header.error();
      header_ = *header;
    }
    if (header_->bytes > most_bytes) return error{error_code::out_of_range, "a message is longer than it can be"};
    const auto arrived = fill(detail::message_header_bytes + header_->bytes, deadline);
    if (!arrived) return arrived.error();
    const auto body = std::span<const std::byte>(in_).subspan(detail::message_header_bytes);
    if (checksum(body) != header_->checksum) return error{error_code::checksum_mismatch, "body of a message"};
    is_complete_ = true;
    return message{header_->type, body};
  }

 private:
  /// Until so many bytes of the message have arrived.
  [[nodiscard]] result<void> fill(std::uint64_t bytes, channel_deadline deadline) noexcept {
    constexpr std::uint64_t most_at_once = 1U << 16;
    while (arrived_ < bytes) {
      try {
        if (in_.size() == arrived_) in_.resize(arrived_ + static_cast<std::size_t>(std::min(bytes - arrived_, most_at_once)));
      } catch (...) {
        return error{error_code::out_of_memory, "a message"};
      }
      const auto arrived = channel_.receive(std::span(in_).subspan(arrived_), deadline);
      if (!arrived) return arrived.error();
      arrived_ += *arrived;
    }
    return {};
  }

  Channel channel_;
  std::vector<std::byte> out_;
  std::size_t sent_ = 0;       // of `out_`
  std::vector<std::byte> in_;  // the message that arrives or has arrived
  std::size_t arrived_ = 0;    // of it
  std::optional<detail::message_header> header_;
  bool is_complete_ = false;
};

}  // namespace kvexact

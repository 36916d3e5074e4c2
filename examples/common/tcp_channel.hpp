// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fcntl.h>
#include <limits>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <span>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include <kvexact/core/result.hpp>
#include <kvexact/remote/byte_channel.hpp>

namespace kvexact::examples {

/// A descriptor that closes itself.
class unique_socket {
 public:
  explicit unique_socket(int descriptor = -1) noexcept : descriptor_(descriptor) {}
  unique_socket(unique_socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  unique_socket& operator=(unique_socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~unique_socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  [[nodiscard]] int get() const noexcept { return descriptor_; }
  /// Until the socket is ready for `events` (POLLIN, POLLOUT) or has failed. Errors: timed_out.
  [[nodiscard]] result<void> wait(short events, channel_deadline deadline) const noexcept {
    for (;;) {
      using namespace std::chrono;
      const auto left = ceil<milliseconds>(deadline - steady_clock::now()).count();
      pollfd polled{descriptor_, events, 0};
      const int ready = ::poll(&polled, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max())));
      if (ready > 0 || (ready < 0 && errno != EINTR)) return {};
      if (ready == 0 && left <= std::numeric_limits<int>::max()) return error{error_code::timed_out, "a socket"};
    }
  }

 private:
  int descriptor_;
};

/// A `byte_channel` over TCP (POSIX).
class tcp_channel {
 public:
  /// Errors: invalid_argument (an unknown host), output_failed (no connection), timed_out.
  [[nodiscard]] static result<tcp_channel> connect(const std::string& host, std::uint16_t port, channel_deadline deadline) noexcept {
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0)
      return error{error_code::invalid_argument, "unknown host"};
    result<tcp_channel> outcome = error{error_code::output_failed, "no connection"};
    for (const addrinfo* each = found; each != nullptr && !outcome; each = each->ai_next) outcome = connect(*each, deadline);
    ::freeaddrinfo(found);
    return outcome;
  }
  /// A connected socket.
  explicit tcp_channel(unique_socket socket) noexcept : socket_(std::move(socket)) {
    const int yes = 1;
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    ::fcntl(socket_.get(), F_SETFL, O_NONBLOCK);
  }

  result<std::size_t> send(std::span<const std::byte> bytes, channel_deadline deadline) noexcept {
    return move(POLLOUT, deadline, {error_code::output_failed, "the connection has ended"},
                [&] { return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL); });
  }
  result<std::size_t> receive(std::span<std::byte> bytes, channel_deadline deadline) noexcept {
    return move(POLLIN, deadline, {error_code::truncated, "the connection has ended"},
                [&] { return ::recv(socket_.get(), bytes.data(), bytes.size(), 0); });
  }

 private:
  static result<tcp_channel> connect(const addrinfo& to, channel_deadline deadline) noexcept {
    unique_socket socket(::socket(to.ai_family, to.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, to.ai_protocol));
    const error failed{error_code::output_failed, "no connection"};
    if (socket.get() < 0) return failed;
    if (::connect(socket.get(), to.ai_addr, to.ai_addrlen) != 0) {
      if (errno != EINPROGRESS) return failed;
      if (const auto ready = socket.wait(POLLOUT, deadline); !ready) return ready.error();
      int number = 0;
      socklen_t size = sizeof number;
      if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &number, &size) != 0 || number != 0) return failed;
    }
    return tcp_channel(std::move(socket));
  }

  /// `step` moves some bytes if it can do so at once.
  template <class Step>
  result<std::size_t> move(short events, channel_deadline deadline, const error& ended, Step step) noexcept {
    for (;;) {
      const ssize_t moved = step();
      if (moved > 0) return static_cast<std::size_t>(moved);
      if (moved == 0 || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)) return ended;
      if (errno == EINTR) continue;
      if (const auto ready = socket_.wait(events, deadline); !ready) return ready.error();
    }
  }

  unique_socket socket_;
};

static_assert(byte_channel<tcp_channel>);

/// Takes connections from this machine, or with `everywhere` from any.
class tcp_listener {
 public:
  /// Port 0: any that is free. Errors: output_failed.
  [[nodiscard]] static result<tcp_listener> make(std::uint16_t port, bool everywhere = false) noexcept {
    tcp_listener made(unique_socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(everywhere ? INADDR_ANY : INADDR_LOOPBACK);
    const int yes = 1;
    ::setsockopt(made.socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    socklen_t size = sizeof address;
    if (::bind(made.socket_.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 || ::listen(made.socket_.get(), 8) != 0 ||
        ::getsockname(made.socket_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
      return error{error_code::output_failed, "cannot listen"};
    made.port_ = ntohs(address.sin_port);
    return made;
  }
  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }

  /// Errors: timed_out, output_failed.
  [[nodiscard]] result<tcp_channel> accept(channel_deadline deadline) noexcept {
    if (const auto ready = socket_.wait(POLLIN, deadline); !ready) return ready.error();
    const int descriptor = ::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    if (descriptor < 0) return error{error_code::output_failed, "cannot accept a connection"};
    return tcp_channel(unique_socket(descriptor));
  }

 private:
  explicit tcp_listener(unique_socket socket) noexcept : socket_(std::move(socket)) {}

  unique_socket socket_;
  std::uint16_t port_ = 0;
};

}  // namespace kvexact::examples

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>

#include <common/outcome.hpp>

namespace kvexact::examples {

namespace detail {
inline volatile std::sig_atomic_t caught_signal = 0;
}

/// From now on the first SIGINT, SIGTERM or SIGHUP only makes `expect_no_interruption` fail, so that destructors remove what is half
/// written; a second one ends the program at once. Ignored signals (nohup) stay ignored.
inline void catch_interruptions() noexcept {
  struct sigaction action {};
  action.sa_handler = [](int number) { detail::caught_signal = number; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before {};
    if (::sigaction(number, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) ::sigaction(number, &action, nullptr);
  }
}

[[nodiscard]] inline status expect_no_interruption() {
  if (detail::caught_signal == 0) return done;
  return failure{error_code::output_failed, "interrupted"};
}

/// Ends the program by the signal that was caught, if any, as whoever waits for it expects.
inline void pass_on_interruption() noexcept {
  if (detail::caught_signal != 0) std::raise(detail::caught_signal);
}

}  // namespace kvexact::examples

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <xxhash.h>

namespace kvexact {

/// XXH64, seed 0: the checksum, fingerprint and profile hash of all formats here. Not a defence against forgery.
[[nodiscard]] inline std::uint64_t checksum(std::span<const std::byte> bytes) noexcept { return XXH64(bytes.data(), bytes.size(), 0); }

/// XXH64 over several pieces: each is hashed with the digest so far as its seed, starting at 0. One piece gives `checksum`. Where pieces
/// begin and end is part of a format; empty ones count too.
class chained_checksum {
 public:
  void update(std::span<const std::byte> piece) noexcept { digest_ = XXH64(piece.data(), piece.size(), digest_); }
  [[nodiscard]] std::uint64_t digest() const noexcept { return digest_; }

 private:
  std::uint64_t digest_ = 0;
};

}  // namespace kvexact

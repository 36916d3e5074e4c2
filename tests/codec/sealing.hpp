// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/bitstream/container.hpp>

namespace kvexact::test {

/// Makes the checksums of a damaged file right again, as far as its places can still be found, so that what lies behind them is reached:
/// of sections and of the table, and those of a stream's chunks but for the one of the decoded values, which only the right ones have.
/// Written against docs/format.md and not with the library's writers, as far as places go.
inline void seal(std::vector<std::byte>& file) {
  constexpr std::size_t header = 16;
  constexpr std::size_t footer = 32;
  constexpr std::size_t entry = 32;
  if (file.size() < header + footer) return;
  std::byte* const data = file.data();
  const auto u64 = [&](std::size_t at) { return load_little_endian<std::uint64_t>(data + at); };
  const auto u32 = [&](std::size_t at) { return load_little_endian<std::uint32_t>(data + at); };
  const std::size_t footer_at = file.size() - footer;
  const std::uint64_t table_at = u64(footer_at);
  const std::uint64_t count = u64(footer_at + 8);
  if (table_at < header || table_at > footer_at || count > (footer_at - table_at) / entry) return;
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(table_at + i * entry);
    const std::uint32_t id = u32(at);
    const std::uint64_t offset = u64(at + 8);
    const std::uint64_t size = u64(at + 16);
    if (offset > footer_at || size > footer_at - offset) continue;
    if ((u32(at + 4) & 1U) == 0) {
      store_little_endian(data + at + 24,
                          checksum(std::span(file).subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size))));
      continue;
    }
    if (id != 2) continue;
    // Chunks, one after the other; a header is 64 bytes with the chunk's size at 32 and the checksum at 56.
    for (std::uint64_t chunk = offset; chunk + 64 <= offset + size;) {
      const auto begin = static_cast<std::size_t>(chunk);
      const std::uint64_t bytes = u64(begin + 32);
      if (bytes < 64 || bytes > offset + size - chunk) break;
      chained_checksum sum;
      sum.update(std::span(file).subspan(begin, 56));
      sum.update(std::span(file).subspan(begin + 64, static_cast<std::size_t>(bytes) - 64));
      store_little_endian(data + begin + 56, sum.digest());
      chunk += bytes;
    }
  }
  chained_checksum sum;
  sum.update(std::span(file).first(header));
  sum.update(std::span(file).subspan(static_cast<std::size_t>(table_at), footer_at + 16 - static_cast<std::size_t>(table_at)));
  store_little_endian(data + footer_at + 16, sum.digest());
}

}  // namespace kvexact::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/core/result.hpp>

namespace kvexact {

/// What a file holds.
enum class container_kind : std::uint32_t { profile = 1, stream = 2 };

/// One contiguous run of bytes in a container. The whole file is: header, sections in order and without gaps, section table, footer.
/// The table comes last so that a file can be written to a pipe and continued later. See docs/format.md.
struct section_entry {
  std::uint32_t id = 0;
  std::uint32_t flags = 0;
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
  std::uint64_t checksum = 0;

  /// The section's content carries its own checksums, so that it can be read in parts; `checksum` is 0.
  static constexpr std::uint32_t self_checked = 1;
};

inline constexpr std::uint32_t container_version = 1;

namespace detail {

inline constexpr std::array<std::uint8_t, 8> container_magic{'K', 'V', 'E', 'X', 'A', 'C', 'T', 0};
inline constexpr std::array<std::uint8_t, 8> footer_magic{'K', 'V', 'X', 'F', 'O', 'O', 'T', 0};
inline constexpr std::size_t container_header_bytes = 16;
inline constexpr std::size_t section_entry_bytes = 32;
inline constexpr std::size_t container_footer_bytes = 32;

[[nodiscard]] inline std::uint64_t magic_number(const std::array<std::uint8_t, 8>& magic) noexcept {
  return load_little_endian<std::uint64_t>(reinterpret_cast<const std::byte*>(magic.data()));
}

[[nodiscard]] inline std::array<std::byte, container_header_bytes> container_header(container_kind kind) noexcept {
  std::array<std::byte, container_header_bytes> bytes{};
  store_little_endian(bytes.data(), magic_number(container_magic));
  store_little_endian(bytes.data() + 8, static_cast<std::uint32_t>(kind));
  store_little_endian(bytes.data() + 12, container_version);
  return bytes;
}

/// Checks magic, kind and version.
[[nodiscard]] inline result<void> check_container_header(std::span<const std::byte> bytes, container_kind kind) noexcept {
  if (bytes.size() < container_header_bytes) return error{error_code::truncated, "file header"}.at_byte(0);
  if (load_little_endian<std::uint64_t>(bytes.data()) != magic_number(container_magic))
    return error{error_code::corrupt, "not a kvexact file: wrong magic number"}.at_byte(0);
  if (load_little_endian<std::uint32_t>(bytes.data() + 12) != container_version)
    return error{error_code::unsupported, "file of another format version"}.at_byte(12);
  const auto actual = load_little_endian<std::uint32_t>(bytes.data() + 8);
  if (actual == static_cast<std::uint32_t>(kind)) return {};
  switch (static_cast<container_kind>(actual)) {
    case container_kind::profile: return error{error_code::corrupt, "this is a profile, not a stream"}.at_byte(8);
    case container_kind::stream: return error{error_code::corrupt, "this is a stream, not a profile"}.at_byte(8);
  }
  return error{error_code::unsupported, "unknown kind of file"}.at_byte(8);
}

}  // namespace detail

/// Writes a container section by section into a sink. After the sink has refused bytes, everything fails.
template <byte_sink Sink>
class container_writer {
 public:
  container_writer(Sink& sink, container_kind kind) noexcept : sink_(&sink), kind_(kind) {
    write(detail::container_header(kind));
  }
  /// Continues a container whose sections so far are `sections`; the sink's first byte belongs at `offset()`.
  container_writer(Sink& sink, container_kind kind, std::vector<section_entry> sections) noexcept
      : sink_(&sink), kind_(kind), sections_(std::move(sections)) {
    offset_ = sections_.empty() ? detail::container_header_bytes : sections_.back().offset + sections_.back().size;
  }

  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }

  /// A whole section with its checksum.
  [[nodiscard]] result<void> add_section(std::uint32_t id, std::span<const std::byte> bytes) noexcept {
    const section_entry entry{id, 0, offset_, bytes.size(), checksum(bytes)};
    write(bytes);
    return push(entry);
  }
  /// Starts a self-checked section, or continues it when it is the last one.
  [[nodiscard]] result<void> open_section(std::uint32_t id) noexcept {
    if (!sections_.empty() && sections_.back().id == id && sections_.back().flags == section_entry::self_checked) return {};
    return push({id, section_entry::self_checked, offset_, 0, 0});
  }
  /// Bytes of the section opened last; only after `open_section`.
  [[nodiscard]] result<void> append(std::span<const std::byte> bytes) noexcept {
    write(bytes);
    sections_.back().size += bytes.size();
    return status();
  }
  /// Table and footer.
  [[nodiscard]] result<void> finish() noexcept {
    try {
      std::vector<std::byte> tail;
      byte_writer out(tail);
      for (const section_entry& entry : sections_) {
        out.put(entry.id);
        out.put(entry.flags);
        out.put(entry.offset);
        out.put(entry.size);
        out.put(entry.checksum);
      }
      out.put(offset_);
      out.put(static_cast<std::uint64_t>(sections_.size()));
      chained_checksum sum;
      sum.update(detail::container_header(kind_));
      sum.update(tail);
      out.put(sum.digest());
      out.put(detail::magic_number(detail::footer_magic));
      write(tail);
    } catch (...) {
      return error{error_code::out_of_memory, "section table"};
    }
    return status();
  }

 private:
  void write(std::span<const std::byte> bytes) noexcept {
    failed_ = failed_ || (!bytes.empty() && !(*sink_)(bytes));
    offset_ += bytes.size();
  }
  [[nodiscard]] result<void> push(const section_entry& entry) noexcept {
    try {
      sections_.push_back(entry);
    } catch (...) {
      return error{error_code::out_of_memory, "section table"};
    }
    return status();
  }
  [[nodiscard]] result<void> status() const noexcept {
    if (failed_) return error{error_code::output_failed, "the sink refused bytes"}.at_byte(static_cast<std::int64_t>(offset_));
    return {};
  }

  Sink* sink_;
  container_kind kind_;
  std::vector<section_entry> sections_;
  std::uint64_t offset_ = 0;
  bool failed_ = false;
};

/// Read access to a container in memory. Opening checks everything but the sections' contents: every byte of the file belongs to the
/// header, one section, the table or the footer.
class container_reader {
 public:
  /// Errors: truncated, corrupt, unsupported, checksum_mismatch (section table), out_of_memory.
  [[nodiscard]] static result<container_reader> open(std::span<const std::byte> bytes, container_kind kind) noexcept {
    using namespace detail;
    if (const auto header = check_container_header(bytes, kind); !header) return header.error();
    if (bytes.size() < container_header_bytes + container_footer_bytes)
      return error{error_code::truncated, "the footer is missing"}.at_byte(static_cast<std::int64_t>(bytes.size()));
    const std::size_t footer_at = bytes.size() - container_footer_bytes;
    const std::byte* const footer = bytes.data() + footer_at;
    const auto where = static_cast<std::int64_t>(footer_at);
    if (load_little_endian<std::uint64_t>(footer + 24) != magic_number(footer_magic))
      return error{error_code::truncated, "the footer is missing: the file was cut or not finished"}.at_byte(where);
    const auto table_at = load_little_endian<std::uint64_t>(footer);
    const auto count = load_little_endian<std::uint64_t>(footer + 8);
    if (table_at < container_header_bytes || table_at > footer_at || (footer_at - table_at) % section_entry_bytes != 0 ||
        count != (footer_at - table_at) / section_entry_bytes)
      return error{error_code::corrupt, "section table does not fit the file"}.at_byte(where);
    chained_checksum sum;
    sum.update(bytes.first(container_header_bytes));
    sum.update(bytes.subspan(static_cast<std::size_t>(table_at), footer_at + 16 - static_cast<std::size_t>(table_at)));
    if (sum.digest() != load_little_endian<std::uint64_t>(footer + 16))
      return error{error_code::checksum_mismatch, "section table"}.at_byte(static_cast<std::int64_t>(table_at));
    container_reader reader(bytes);
    try {
      reader.sections_.reserve(static_cast<std::size_t>(count));
    } catch (...) {
      return error{error_code::out_of_memory, "section table"};
    }
    byte_reader table(bytes.subspan(static_cast<std::size_t>(table_at), static_cast<std::size_t>(count) * section_entry_bytes));
    std::uint64_t expected = container_header_bytes;
    for (std::uint64_t i = 0; i < count; ++i) {
      section_entry entry;
      entry.id = table.get<std::uint32_t>();
      entry.flags = table.get<std::uint32_t>();
      entry.offset = table.get<std::uint64_t>();
      entry.size = table.get<std::uint64_t>();
      entry.checksum = table.get<std::uint64_t>();
      if (entry.offset != expected || entry.size > table_at - expected)
        return error{error_code::corrupt, "section does not fit the file"}.at_byte(static_cast<std::int64_t>(table_at + i * section_entry_bytes));
      expected += entry.size;
      reader.sections_.push_back(entry);
    }
    if (expected != table_at) return error{error_code::corrupt, "bytes outside every section"}.at_byte(static_cast<std::int64_t>(expected));
    return reader;
  }

  [[nodiscard]] const std::vector<section_entry>& sections() const noexcept { return sections_; }

  /// Bytes of a section, after its checksum where it has one. Errors: corrupt (no such section), checksum_mismatch.
  [[nodiscard]] result<std::span<const std::byte>> section(std::uint32_t id) const noexcept {
    for (const section_entry& entry : sections_) {
      if (entry.id != id) continue;
      const auto bytes = bytes_.subspan(static_cast<std::size_t>(entry.offset), static_cast<std::size_t>(entry.size));
      if ((entry.flags & section_entry::self_checked) == 0 && checksum(bytes) != entry.checksum)
        return error{error_code::checksum_mismatch, "section content"}.at_byte(static_cast<std::int64_t>(entry.offset));
      return bytes;
    }
    return error{error_code::corrupt, "a required section is missing"};
  }

 private:
  explicit container_reader(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  std::span<const std::byte> bytes_;
  std::vector<section_entry> sections_;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/bitstream/container.hpp>

using namespace kvexact;

namespace {

using bytes = std::vector<std::byte>;

bytes random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  bytes data(size);
  for (std::byte& each : data) each = static_cast<std::byte>(random());
  return data;
}

const bytes first = random_bytes(13, 1);
const bytes second = random_bytes(5, 2);
const bytes third = random_bytes(20, 3);

/// Sections 7 (checked), 9 (self-checked, in two pieces), 4 (empty), 8 (checked).
bytes small_container(container_kind kind = container_kind::stream) {
  bytes file;
  vector_sink sink(file);
  container_writer writer(sink, kind);
  CHECK(writer.offset() == 16);
  CHECK(writer.add_section(7, first));
  CHECK(writer.open_section(9));
  CHECK(writer.append(second));
  CHECK(writer.append(third));
  CHECK(writer.offset() == 16 + 13 + 25);
  CHECK(writer.add_section(4, {}));
  CHECK(writer.add_section(8, second));
  CHECK(writer.finish());
  return file;
}

void put_at(bytes& file, std::size_t at, std::uint64_t value) { store_little_endian(file.data() + at, value); }
void put32_at(bytes& file, std::size_t at, std::uint32_t value) { store_little_endian(file.data() + at, value); }

/// A file with a hostile table whose checksum is right.
bytes with_table(const std::vector<section_entry>& entries, std::size_t content, std::uint64_t table_at, std::uint64_t count) {
  bytes file(16 + content);
  const auto header = detail::container_header(container_kind::stream);
  std::copy(header.begin(), header.end(), file.begin());
  bytes tail;
  byte_writer out(tail);
  for (const section_entry& entry : entries) {
    out.put(entry.id);
    out.put(entry.flags);
    out.put(entry.offset);
    out.put(entry.size);
    out.put(entry.checksum);
  }
  out.put(table_at);
  out.put(count);
  chained_checksum sum;
  sum.update(header);
  sum.update(tail);
  out.put(sum.digest());
  out.put(detail::magic_number(detail::footer_magic));
  (void)vector_sink(file)(tail);
  return file;
}

void check_refused(const bytes& file, error_code code) {
  const auto opened = container_reader::open(file, container_kind::stream);
  REQUIRE_FALSE(opened);
  CHECK(opened.error().code == code);
}

bool same(std::span<const std::byte> a, const bytes& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

}  // namespace

TEST_CASE("container: round trip") {
  const bytes file = small_container();
  const auto opened = container_reader::open(file, container_kind::stream);
  REQUIRE(opened);
  REQUIRE(opened->sections().size() == 4);
  const std::array<std::pair<std::uint32_t, bytes>, 3> checked{{{7, first}, {4, {}}, {8, second}}};
  for (const auto& [id, content] : checked) {
    const auto section = opened->section(id);
    REQUIRE(section);
    CHECK(same(*section, content));
  }
  bytes joined = second;
  (void)vector_sink(joined)(third);
  REQUIRE(opened->section(9));
  CHECK(same(*opened->section(9), joined));
  CHECK(opened->sections()[1].flags == section_entry::self_checked);
  CHECK(opened->sections()[1].checksum == 0);
  CHECK(opened->sections()[0].flags == 0);
  CHECK(opened->sections()[0].checksum == checksum(first));

  const auto missing = opened->section(5);
  REQUIRE_FALSE(missing);
  CHECK(missing.error().code == error_code::corrupt);
}

TEST_CASE("container: bytes as the format lays them out") {
  const bytes file = small_container();
  const auto u64 = [&](std::size_t at) { return load_little_endian<std::uint64_t>(file.data() + at); };
  const auto u32 = [&](std::size_t at) { return load_little_endian<std::uint32_t>(file.data() + at); };
  const std::string magic("KVEXACT\0", 8);
  const std::string footer("KVXFOOT\0", 8);
  const std::size_t table = 16 + 13 + 25 + 5;
  REQUIRE(file.size() == table + 4 * 32 + 32);
  CHECK(std::equal(magic.begin(), magic.end(), reinterpret_cast<const char*>(file.data())));
  CHECK(u32(8) == 2);   // stream
  CHECK(u32(12) == 1);  // version
  CHECK(u32(table) == 7);
  CHECK(u32(table + 4) == 0);
  CHECK(u64(table + 8) == 16);
  CHECK(u64(table + 16) == 13);
  CHECK(u64(table + 24) == checksum(first));
  CHECK(u32(table + 32) == 9);
  CHECK(u32(table + 36) == 1);
  CHECK(u64(table + 40) == 29);
  CHECK(u64(table + 48) == 25);
  CHECK(u64(table + 56) == 0);
  CHECK(u64(table + 64 + 8) == 54);
  CHECK(u64(table + 64 + 16) == 0);
  CHECK(u64(table + 96 + 8) == 54);
  CHECK(u64(table + 128) == table);
  CHECK(u64(table + 136) == 4);
  const std::uint64_t of_header = checksum(std::span(file).first(16));
  CHECK(u64(table + 144) == XXH64(file.data() + table, 4 * 32 + 16, of_header));
  CHECK(std::equal(footer.begin(), footer.end(), reinterpret_cast<const char*>(file.data() + table + 152)));
}

TEST_CASE("container: nothing inside is a container too") {
  bytes file;
  vector_sink sink(file);
  container_writer writer(sink, container_kind::profile);
  CHECK(writer.finish());
  CHECK(file.size() == 48);
  const auto opened = container_reader::open(file, container_kind::profile);
  REQUIRE(opened);
  CHECK(opened->sections().empty());
}

TEST_CASE("container: every truncation is refused") {
  const bytes file = small_container();
  for (std::size_t size = 0; size < file.size(); ++size) {
    const bytes cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size));
    check_refused(cut, error_code::truncated);
  }
  bytes longer = file;
  longer.push_back(std::byte{0});
  check_refused(longer, error_code::truncated);
}

TEST_CASE("container: every flipped bit is seen, but in self-checked content") {
  const bytes file = small_container();
  for (std::size_t bit = 0; bit < 8 * file.size(); ++bit) {
    bytes broken = file;
    broken[bit / 8] ^= std::byte{1} << (bit % 8);
    const std::size_t at = bit / 8;
    const auto opened = container_reader::open(broken, container_kind::stream);
    const bool in_content = at >= 16 && at < 16 + 13 + 25 + 5;
    REQUIRE(static_cast<bool>(opened) == in_content);
    if (!opened) continue;
    const bool self_checked = at >= 29 && at < 54;
    REQUIRE(static_cast<bool>(opened->section(7)) == (at >= 29));
    REQUIRE(static_cast<bool>(opened->section(8)) == (at < 54));
    REQUIRE(opened->section(9));
    bytes joined = second;
    (void)vector_sink(joined)(third);
    REQUIRE(same(*opened->section(9), joined) == !self_checked);
    if (at < 29) {
      const auto failed = opened->section(7);
      REQUIRE(failed.error().code == error_code::checksum_mismatch);
      REQUIRE(failed.error().byte == 16);
    }
  }
}

TEST_CASE("container: a damaged table is a checksum mismatch") {
  bytes file = small_container();
  file[16 + 13 + 25 + 5 + 3] ^= std::byte{4};
  check_refused(file, error_code::checksum_mismatch);
}

TEST_CASE("container: kinds, versions and foreign files are named") {
  const auto error_of = [](const bytes& file, container_kind kind) {
    const auto opened = container_reader::open(file, kind);
    REQUIRE_FALSE(opened);
    return opened.error();
  };
  const auto profile_for_stream = error_of(small_container(container_kind::profile), container_kind::stream);
  CHECK(profile_for_stream.code == error_code::corrupt);
  CHECK(std::string(profile_for_stream.what) == "this is a profile, not a stream");
  const auto stream_for_profile = error_of(small_container(), container_kind::profile);
  CHECK(stream_for_profile.code == error_code::corrupt);
  CHECK(std::string(stream_for_profile.what) == "this is a stream, not a profile");

  bytes file = small_container();
  put32_at(file, 8, 77);
  CHECK(error_of(file, container_kind::stream).code == error_code::unsupported);
  CHECK(error_of(file, container_kind::stream).byte == 8);

  file = small_container();
  put32_at(file, 12, 2);
  CHECK(error_of(file, container_kind::stream).code == error_code::unsupported);
  CHECK(error_of(file, container_kind::stream).byte == 12);

  file = random_bytes(200, 8);
  CHECK(error_of(file, container_kind::stream).code == error_code::corrupt);
  CHECK(error_of(file, container_kind::stream).message() == "corrupt: not a kvexact file: wrong magic number (byte 0)");
}

TEST_CASE("container: sizes that do not fit or overflow") {
  constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  REQUIRE(container_reader::open(with_table({{1, 1, 16, 8, 0}}, 8, 24, 1), container_kind::stream));

  SUBCASE("table") {
    const std::vector<section_entry> one{{1, 1, 16, 8, 0}};
    for (const std::uint64_t table_at : {std::uint64_t{0}, std::uint64_t{15}, std::uint64_t{23}, std::uint64_t{25}, std::uint64_t{56},
                                         std::uint64_t{57}, most, most - 31, most - 7, std::uint64_t{1} << 63})
      check_refused(with_table(one, 8, table_at, 1), error_code::corrupt);
    for (const std::uint64_t count : {std::uint64_t{0}, std::uint64_t{2}, std::uint64_t{1} << 40, (std::uint64_t{1} << 59) + 1, most})
      check_refused(with_table(one, 8, 24, count), error_code::corrupt);
    check_refused(with_table({}, 8, 24, 0), error_code::corrupt);  // 8 bytes in no section
  }
  SUBCASE("sections") {
    for (const std::uint64_t size :
         {std::uint64_t{0}, std::uint64_t{7}, std::uint64_t{9}, std::uint64_t{1} << 40, most, most - 15, most - 7})
      check_refused(with_table({{1, 1, 16, size, 0}}, 8, 24, 1), error_code::corrupt);
    for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{15}, std::uint64_t{17}, std::uint64_t{24}, most})
      check_refused(with_table({{1, 1, offset, 8, 0}}, 8, 24, 1), error_code::corrupt);
    check_refused(with_table({{1, 1, 16, 4, 0}, {2, 1, 16, 4, 0}}, 8, 24, 2), error_code::corrupt);  // overlap
    check_refused(with_table({{1, 1, 16, 3, 0}, {2, 1, 20, 4, 0}}, 8, 24, 2), error_code::corrupt);  // gap
    check_refused(with_table({{1, 1, 16, 4, 0}, {2, 1, 20, most - 19, 0}}, 8, 24, 2), error_code::corrupt);
    check_refused(with_table({{1, 1, 16, most, 0}, {2, 1, 15, 9, 0}}, 8, 24, 2), error_code::corrupt);  // wraps and comes back
    CHECK(container_reader::open(with_table({{1, 1, 16, 4, 0}, {2, 1, 20, 4, 0}}, 8, 24, 2), container_kind::stream));
  }
}

TEST_CASE("container: random damage never opens as something else") {
  const bytes file = small_container();
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 3000; ++trial) {
    bytes broken = file;
    const std::size_t size = 8U << (random() % 2);
    const std::size_t at = random() % (broken.size() - size);
    if (trial % 2 == 0) {
      for (std::size_t i = 0; i < size; ++i) broken[at + i] = static_cast<std::byte>(random());
    } else {
      put_at(broken, at, std::uint64_t{0} - random() % 100);
    }
    if (broken == file) continue;
    const auto opened = container_reader::open(broken, container_kind::stream);
    if (!opened) continue;
    REQUIRE(opened->sections().size() == 4);
    for (const section_entry& entry : opened->sections()) static_cast<void>(opened->section(entry.id));
  }
}

TEST_CASE("container: continued files equal files written at once") {
  const auto at_once = [](int pieces) {
    bytes file;
    vector_sink sink(file);
    container_writer writer(sink, container_kind::stream);
    CHECK(writer.add_section(7, first));
    CHECK(writer.open_section(9));
    for (int i = 0; i < pieces; ++i) CHECK(writer.append(random_bytes(10 + static_cast<std::size_t>(i), 50)));
    CHECK(writer.finish());
    return file;
  };
  for (const int before : {0, 1, 3}) {
    bytes file = at_once(before);
    const auto opened = container_reader::open(file, container_kind::stream);
    REQUIRE(opened);
    bytes more;
    vector_sink sink(more);
    container_writer writer(sink, container_kind::stream, opened->sections());
    const std::uint64_t from = writer.offset();
    CHECK(from == file.size() - 32 - 2 * 32);
    CHECK(writer.open_section(9));
    for (int i = before; i < 5; ++i) CHECK(writer.append(random_bytes(10 + static_cast<std::size_t>(i), 50)));
    CHECK(writer.finish());
    file.resize(static_cast<std::size_t>(from));
    (void)vector_sink(file)(more);
    CHECK(file == at_once(5));
  }

  bytes more;
  vector_sink sink(more);
  container_writer empty(sink, container_kind::stream, {});
  CHECK(empty.offset() == 16);
  CHECK(more.empty());
}

TEST_CASE("container: a sink that refuses bytes fails everything after it") {
  const bytes whole = small_container();
  for (std::size_t room = 0; room <= whole.size(); ++room) {
    bytes taken;
    int refused = 0;
    const auto sink_function = [&](std::span<const std::byte> piece) -> bool {
      if (taken.size() + piece.size() > room) {
        ++refused;
        return false;
      }
      (void)vector_sink(taken)(piece);
      return true;
    };
    container_writer writer(sink_function, container_kind::stream);
    // Sizes of the file after each step.
    const std::array<std::pair<std::size_t, std::function<result<void>()>>, 7> steps{{
        {29, [&] { return writer.add_section(7, first); }},
        {29, [&] { return writer.open_section(9); }},
        {34, [&] { return writer.append(second); }},
        {54, [&] { return writer.append(third); }},
        {54, [&] { return writer.add_section(4, {}); }},
        {59, [&] { return writer.add_section(8, second); }},
        {whole.size(), [&] { return writer.finish(); }},
    }};
    for (const auto& [size, step] : steps) {
      const result<void> done = step();
      REQUIRE(static_cast<bool>(done) == (size <= room));
      if (!done) REQUIRE(done.error().code == error_code::output_failed);
    }
    REQUIRE(refused == (room < whole.size() ? 1 : 0));  // it is not asked again
    REQUIRE(std::equal(taken.begin(), taken.end(), whole.begin()));
  }
}

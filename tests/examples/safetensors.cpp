// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include <common/safetensors.hpp>

#include "temporary_folder.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

std::string with_length(std::string header, const std::string& data = {}) {
  const std::uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + data;
}

void write_file(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string sample(const std::string& path) {
  const std::vector<tensor_info> infos{{"bytes", dtype::u8, {3}}, {"numbers", dtype::f32, {2, 2}}, {"none", dtype::bf16, {0, 3, 64}}};
  auto writer = safetensors_writer::create(path, infos, {{"made by", "a test"}});
  REQUIRE(writer);
  for (std::size_t i = 0; i < 3; ++i) writer->as<std::uint8_t>(0)[i] = static_cast<std::uint8_t>(7 + i);
  for (std::size_t i = 0; i < 4; ++i) writer->as<float>(1)[i] = 0.5F * static_cast<float>(i);
  REQUIRE(writer->commit());
  return read_file(path);
}

/// Whatever a file claims, an opened one must be consistent with itself.
void check_consistent(const safetensors_file& file) {
  for (const tensor& t : file.tensors()) {
    CHECK(t.byte_size() == t.data.size());
    CHECK(reinterpret_cast<std::uintptr_t>(t.data.data()) % dtype_size(t.type) == 0);
    unsigned sum = 0;
    for (const std::byte b : t.data) sum += std::to_integer<unsigned>(b);
    CHECK(sum <= 255 * t.data.size());
    CHECK(file.find(t.name) == &t);
  }
}

}  // namespace

TEST_CASE("safetensors: what is written is read") {
  const temporary_folder folder;
  sample(folder / "a");
  const auto file = safetensors_file::open(folder / "a");
  REQUIRE(file);
  CHECK(file->tensors().size() == 3);
  CHECK(file->metadata().at("made by") == "a test");
  const tensor* const numbers = file->find("numbers");
  REQUIRE(numbers != nullptr);
  CHECK(numbers->description() == "F32 [2, 2]");
  CHECK(numbers->as<float>()[3] == 1.5F);
  REQUIRE(file->find("bytes") != nullptr);
  CHECK(file->find("bytes")->as<std::uint8_t>()[2] == 9);
  REQUIRE(file->find("none") != nullptr);
  CHECK(file->find("none")->data.empty());
  CHECK(file->find("other") == nullptr);
  check_consistent(*file);
  CHECK(folder.entries() == 1);
}

TEST_CASE("safetensors: every element type keeps its name, size and place") {
  const temporary_folder folder;
  std::vector<tensor_info> infos;
  for (const auto& row : examples::detail::dtype_rows) {
    CHECK(parse_dtype(row.name) == row.type);
    CHECK(dtype_name(row.type) == row.name);
    infos.push_back({std::string(row.name), row.type, {3, 1}});
  }
  infos.push_back({"scalar", dtype::f64, {}});
  auto writer = safetensors_writer::create(folder / "a", infos);
  REQUIRE(writer);
  for (std::size_t i = 0; i < infos.size(); ++i) std::memset(writer->data(i).data(), static_cast<int>(i + 1), writer->data(i).size());
  REQUIRE(writer->commit());
  const auto file = safetensors_file::open(folder / "a");
  REQUIRE(file);
  check_consistent(*file);
  for (std::size_t i = 0; i < infos.size(); ++i) {
    const tensor* const t = file->find(infos[i].name);
    REQUIRE(t != nullptr);
    CHECK(t->shape == infos[i].shape);
    for (const std::byte b : t->data) CHECK(std::to_integer<std::size_t>(b) == i + 1);
  }
}

TEST_CASE("safetensors: no tensors at all") {
  const temporary_folder folder;
  auto writer = safetensors_writer::create(folder / "a", {});
  REQUIRE(writer);
  REQUIRE(writer->commit());
  const auto file = safetensors_file::open(folder / "a");
  REQUIRE(file);
  CHECK(file->tensors().empty());
}

TEST_CASE("safetensors: without commit nothing is left and an older file survives") {
  const temporary_folder folder;
  write_file(folder / "a", "older");
  {
    auto writer = safetensors_writer::create(folder / "a", std::vector<tensor_info>{{"x", dtype::u8, {100}}});
    REQUIRE(writer);
    CHECK(folder.entries() == 2);
    auto moved = std::move(writer);
    CHECK(folder.entries() == 2);
  }
  CHECK(folder.entries() == 1);
  CHECK(read_file(folder / "a") == "older");
}

TEST_CASE("safetensors: places that cannot be written to") {
  const temporary_folder folder;
  const std::vector<tensor_info> infos{{"x", dtype::u8, {100}}};
  CHECK_FALSE(safetensors_writer::create(folder / "missing/a", infos));
  const auto onto_folder = safetensors_writer::create(folder / ".", infos);
  REQUIRE_FALSE(onto_folder);
  CHECK(onto_folder.error().code == error_code::output_failed);
  CHECK(folder.entries() == 0);
}

TEST_CASE("safetensors: headers that the writer refuses") {
  const temporary_folder folder;
  const auto refused = [&](const std::vector<tensor_info>& infos, const std::string& part) {
    const auto writer = safetensors_writer::create(folder / "a", infos);
    REQUIRE_FALSE(writer);
    CHECK_MESSAGE(writer.error().text.find(part) != std::string::npos, writer.error().text);
    CHECK(folder.entries() == 0);
  };
  refused({{"x", dtype::u8, {1}}, {"x", dtype::u8, {2}}}, "tensor name 'x'");
  refused({{"__metadata__", dtype::u8, {1}}}, "reserved");
  refused({{"x", dtype::u8, {std::uint64_t{1} << 40, std::uint64_t{1} << 40}}}, "too large");
  refused({{"x", dtype::u8, {std::uint64_t{1} << 62}}, {"y", dtype::u8, {std::uint64_t{1} << 62}}}, "'y'");
  refused({{"\xff", dtype::u8, {1}}}, "UTF-8");
}

TEST_CASE("safetensors: headers that contradict themselves are named failures") {
  const temporary_folder folder;
  struct bad {
    std::string bytes, part;
  };
  const auto one = [](const std::string& fields, std::size_t data = 4) {
    return with_length("{\"x\":{" + fields + "}}", std::string(data, 'd'));
  };
  const std::vector<bad> cases{
      {"", "shorter than"},
      {"1234567", "shorter than"},
      {std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8), "claims a header"},
      {std::string("\x40\0\0\0\0\0\0\0", 8), "the header needs 64 bytes, the file holds 0"},
      {with_length(""), "not valid JSON"},
      {with_length("{"), "not valid JSON"},
      {with_length("{}}"), "not valid JSON"},
      {with_length("{\"\xff\":1}"), "not valid JSON"},
      {with_length("[]"), "holds an array"},
      {with_length("7"), "holds a number"},
      {with_length(std::string(100000, '[')), "holds an array"},
      {with_length("{\"x\":" + std::string(100000, '[')), "holds an array"},
      {with_length("{\"x\":{\"shape\":" + std::string(100000, '[')), "holds an array"},
      {with_length("{\"x\":null}"), "holds null"},
      {with_length("{\"__metadata__\":{\"a\":1}}"), "holds a number"},
      {with_length("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}"), "the key 'a' occurs twice"},
      {with_length("{\"__metadata__\":{},\"__metadata__\":{}}"), "'__metadata__' occurs twice"},
      {one("\"dtype\":\"U8\",\"shape\":[4]"), "tensor 'x' lacks data_offsets"},
      {one("\"shape\":[4],\"data_offsets\":[0,4]"), "tensor 'x' lacks dtype"},
      {one("\"dtype\":\"U8\",\"data_offsets\":[0,4]"), "tensor 'x' lacks shape"},
      {one("\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]"), "gives dtype twice"},
      {one("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4],\"more\":1"), "unknown field 'more'"},
      {one("\"dtype\":\"U7\",\"shape\":[4],\"data_offsets\":[0,4]"), "dtype 'U7' is not supported"},
      {one("\"dtype\":8,\"shape\":[4],\"data_offsets\":[0,4]"), "holds a number"},
      {one("\"dtype\":\"U8\",\"shape\":4,\"data_offsets\":[0,4]"), "holds a number"},
      {one("\"dtype\":\"U8\",\"shape\":[-4],\"data_offsets\":[0,4]"), "a negative number"},
      {one("\"dtype\":\"U8\",\"shape\":[4.0],\"data_offsets\":[0,4]"), "fractional"},
      {one("\"dtype\":\"U8\",\"shape\":[18446744073709551616],\"data_offsets\":[0,4]"), "beyond 64 bits"},
      {one("\"dtype\":\"U8\",\"shape\":[\"4\"],\"data_offsets\":[0,4]"), "holds a string"},
      {one("\"dtype\":\"U8\",\"shape\":[{}],\"data_offsets\":[0,4]"), "holds an object"},
      {one("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0]"), "must be two numbers"},
      {one("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,4]"), "must be two numbers"},
      {one("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]"), "run backwards"},
      {one("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]", 3), "reach beyond the 3 bytes"},
      {one("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[1,5]", 5), "leave a gap after byte 0"},
      {one("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]", 5), "1 bytes after the last tensor"},
      {one("\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,4]"), "U8 [3] is 3 bytes, but data_offsets [0, 4] are 4"},
      {one("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]"), "F32 [2] is 8 bytes"},
      {one("\"dtype\":\"U8\",\"shape\":[4294967296,4294967296,4],\"data_offsets\":[0,4]"), "overflows 64 bits"},
      {with_length(
           "{\"x\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},\"y\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[2,4]}}",
           "dddd"),
       "tensor 'y': data_offsets [2, 4] overlap those of tensor 'x'"},
      {with_length(
           "{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
           "dddd"),
       "the name 'x' occurs twice"},
      {with_length("{\"a\\nb\":{}}"), "'a\\x0ab'"},
  };
  for (const bad& c : cases) {
    write_file(folder / "bad", c.bytes);
    const auto file = safetensors_file::open(folder / "bad");
    CAPTURE(c.part);
    REQUIRE_FALSE(file);
    CHECK_MESSAGE(file.error().text.find(c.part) != std::string::npos, file.error().text);
    CHECK(file.error().text.find(folder / "bad") == 0);
  }
}

TEST_CASE("safetensors: things that are no file") {
  const temporary_folder folder;
  CHECK_FALSE(safetensors_file::open(folder / "missing"));
  const auto directory = safetensors_file::open(folder / ".");
  REQUIRE_FALSE(directory);
  CHECK(directory.error().text.find("not a regular file") != std::string::npos);
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK_FALSE(safetensors_file::open(folder / "pipe"));  // must not wait for a writer
}

TEST_CASE("safetensors: every truncation fails") {
  const temporary_folder folder;
  const std::string whole = sample(folder / "a");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    write_file(folder / "b", whole.substr(0, length));
    CHECK_FALSE(safetensors_file::open(folder / "b"));
  }
}

TEST_CASE("safetensors: every flipped bit gives a failure or a consistent file") {
  const temporary_folder folder;
  const std::string whole = sample(folder / "a");
  for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    write_file(folder / "b", flipped);
    const auto file = safetensors_file::open(folder / "b");
    if (file) check_consistent(*file);
  }
}

TEST_CASE("safetensors: data at odd addresses is aligned for its type") {
  const temporary_folder folder;
  std::string header = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"y":{"dtype":"U8","shape":[1],"data_offsets":[8,9]}})";
  const float values[2] = {1.25F, -3};
  for (int padding = 0; padding < 8; ++padding, header += ' ') {
    std::string data(9, 'y');
    std::memcpy(data.data(), values, 8);
    write_file(folder / "a", with_length(header, data));
    auto opened = safetensors_file::open(folder / "a");
    REQUIRE(opened);
    const safetensors_file file = std::move(*opened);
    check_consistent(file);
    CHECK(file.find("x")->as<float>()[0] == 1.25F);
    CHECK(file.find("x")->as<float>()[1] == -3.0F);
  }
}

TEST_CASE("output_file: appended bytes appear at commit only") {
  const temporary_folder folder;
  const std::string text = "some bytes";
  auto file = output_file::create(folder / "a");
  REQUIRE(file);
  REQUIRE(file->append(std::as_bytes(std::span(text))));
  REQUIRE(file->append(std::as_bytes(std::span(text))));
  CHECK_FALSE(std::filesystem::exists(folder / "a"));
  REQUIRE(file->commit());
  CHECK(read_file(folder / "a") == text + text);
  CHECK(folder.entries() == 1);
}

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <common/mapped_file.hpp>
#include <common/outcome.hpp>
#include <common/output_file.hpp>

// The safetensors container: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}} with an optional
// "__metadata__" of strings, then the tensors' bytes, little-endian, without gaps.

namespace kvexact::examples {

static_assert(std::endian::native == std::endian::little, "kvexact: safetensors files are mapped, which needs a little-endian machine");

/// Element types of a safetensors file.
enum class dtype : std::uint8_t { boolean, u8, i8, f8_e4m3, f8_e5m2, i16, u16, f16, bf16, i32, u32, f32, i64, u64, f64 };

namespace detail {

struct dtype_row {
  dtype type;
  std::string_view name;
  std::uint64_t size;
};
inline constexpr std::array<dtype_row, 15> dtype_rows{{{dtype::boolean, "BOOL", 1},
                                                       {dtype::u8, "U8", 1},
                                                       {dtype::i8, "I8", 1},
                                                       {dtype::f8_e4m3, "F8_E4M3", 1},
                                                       {dtype::f8_e5m2, "F8_E5M2", 1},
                                                       {dtype::i16, "I16", 2},
                                                       {dtype::u16, "U16", 2},
                                                       {dtype::f16, "F16", 2},
                                                       {dtype::bf16, "BF16", 2},
                                                       {dtype::i32, "I32", 4},
                                                       {dtype::u32, "U32", 4},
                                                       {dtype::f32, "F32", 4},
                                                       {dtype::i64, "I64", 8},
                                                       {dtype::u64, "U64", 8},
                                                       {dtype::f64, "F64", 8}}};

}  // namespace detail

/// Name as it stands in the file ("BF16", "F8_E4M3").
[[nodiscard]] constexpr std::string_view dtype_name(dtype type) noexcept { return detail::dtype_rows[static_cast<std::size_t>(type)].name; }
/// Bytes of one element.
[[nodiscard]] constexpr std::uint64_t dtype_size(dtype type) noexcept { return detail::dtype_rows[static_cast<std::size_t>(type)].size; }
[[nodiscard]] constexpr std::optional<dtype> parse_dtype(std::string_view name) noexcept {
  for (const auto& row : detail::dtype_rows) {
    if (row.name == name) return row.type;
  }
  return std::nullopt;
}

/// What a header says of a tensor: row-major, the last dimension contiguous; no dimensions means one element.
struct tensor_info {
  std::string name;
  dtype type = dtype::u8;
  std::vector<std::uint64_t> shape;

  /// Bytes of the data, or nothing where the product does not fit 64 bits.
  [[nodiscard]] std::optional<std::uint64_t> byte_size() const noexcept {
    std::uint64_t size = dtype_size(type);
    for (const std::uint64_t extent : shape) {
      if (extent != 0 && size > UINT64_MAX / extent) return std::nullopt;
      size *= extent;
    }
    return size;
  }
  /// "BF16 [1024, 3, 64]"
  [[nodiscard]] std::string description() const {
    std::string text(dtype_name(type));
    text += " [";
    for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
  }
};

/// A tensor of an open file. `data` is aligned to the element size and lives as long as the file object.
struct tensor : tensor_info {
  std::span<const std::byte> data;

  /// The elements as `T` (for example `kvexact::bf16` for BF16). `sizeof(T)` must be the size of an element.
  template <class T>
  [[nodiscard]] std::span<const T> as() const noexcept {
    assert(sizeof(T) == dtype_size(type));
    return {reinterpret_cast<const T*>(data.data()), data.size() / sizeof(T)};
  }
};

namespace detail {

constexpr std::uint64_t longest_safetensors_header = 100'000'000;  // the limit of the format's own implementation

/// Reads the header event by event, so that depth and memory stay bounded and duplicate names are seen.
class safetensors_header : public nlohmann::json_sax<nlohmann::json> {
 public:
  struct entry {
    tensor_info info;
    std::array<std::uint64_t, 2> offsets{};
  };

  std::vector<entry> entries;
  std::map<std::string, std::string> metadata;
  std::string problem;

  bool start_object(std::size_t) override {
    switch (place_) {
      case place::outside: place_ = place::top; return true;
      case place::metadata_value: place_ = place::metadata; return true;
      case place::tensor_value:
        place_ = place::tensor;
        seen_dtype_ = seen_shape_ = seen_offsets_ = false;
        return true;
      default: return unexpected("an object");
    }
  }
  bool end_object() override {
    if (place_ == place::tensor) {
      if (!seen_dtype_ || !seen_shape_ || !seen_offsets_) {
        return stop(here() + "lacks " + (!seen_dtype_ ? "dtype" : !seen_shape_ ? "shape" : "data_offsets"));
      }
      place_ = place::top;
    } else if (place_ == place::metadata) {
      place_ = place::top;
    } else {
      place_ = place::outside;
    }
    return true;
  }
  bool key(std::string& name) override {
    if (place_ == place::top) {
      if (!names_.emplace(name, true).second) return stop("the name " + in_quotes(name) + " occurs twice");
      if (name == "__metadata__") {
        place_ = place::metadata_value;
      } else {
        place_ = place::tensor_value;
        entries.emplace_back().info.name = name;
      }
      return true;
    }
    if (place_ == place::metadata) {
      metadata_key_ = name;
      return !metadata.contains(name) || stop("__metadata__: the key " + in_quotes(name) + " occurs twice");
    }
    for (const auto& [field, where, seen] :
         {std::tuple{"dtype", place::dtype_value, &seen_dtype_}, std::tuple{"shape", place::shape_value, &seen_shape_},
          std::tuple{"data_offsets", place::offsets_value, &seen_offsets_}}) {
      if (name != field) continue;
      if (*seen) return stop(here() + "gives " + field + " twice");
      *seen = true;
      place_ = where;
      return true;
    }
    return stop(here() + "has an unknown field " + in_quotes(name));
  }
  bool start_array(std::size_t) override {
    if (place_ == place::shape_value) {
      place_ = place::shape;
    } else if (place_ == place::offsets_value) {
      place_ = place::offsets;
      offset_count_ = 0;
    } else {
      return unexpected("an array");
    }
    return true;
  }
  bool end_array() override {
    if (place_ == place::offsets && offset_count_ != 2) return stop(here() + "data_offsets must be two numbers");
    place_ = place::tensor;
    return true;
  }
  bool string(std::string& value) override {
    if (place_ == place::dtype_value) {
      const auto type = parse_dtype(value);
      if (!type) return stop(here() + "dtype " + in_quotes(value) + " is not supported");
      entries.back().info.type = *type;
      place_ = place::tensor;
      return true;
    }
    if (place_ == place::metadata) {
      metadata.emplace(metadata_key_, value);
      return true;
    }
    return unexpected("a string");
  }
  bool number_unsigned(std::uint64_t value) override {
    if (place_ == place::shape) {
      entries.back().info.shape.push_back(value);
      return true;
    }
    if (place_ == place::offsets) {
      if (offset_count_ == 2) return stop(here() + "data_offsets must be two numbers");
      entries.back().offsets[offset_count_++] = value;
      return true;
    }
    return unexpected("a number");
  }
  bool number_integer(std::int64_t) override { return unexpected("a negative number"); }
  bool number_float(double, const std::string&) override { return unexpected("a number that is fractional or beyond 64 bits"); }
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a truth value"); }
  bool binary(nlohmann::json::binary_t&) override { return unexpected("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    return stop("the header is not valid JSON at byte " + std::to_string(7 + position));
  }

 private:
  enum class place {
    outside,
    top,
    metadata_value,
    metadata,
    tensor_value,
    tensor,
    dtype_value,
    shape_value,
    shape,
    offsets_value,
    offsets
  };

  bool stop(std::string text) {
    problem = std::move(text);
    return false;
  }
  bool unexpected(const char* what) { return stop(here() + "holds " + what + " where it may not"); }
  std::string here() const {
    const bool inside = place_ != place::outside && place_ != place::top && place_ != place::metadata_value && place_ != place::metadata;
    return inside ? "tensor " + in_quotes(entries.back().info.name) + " " : "the header ";
  }

  place place_ = place::outside;
  std::map<std::string, bool, std::less<>> names_;
  std::string metadata_key_;
  std::size_t offset_count_ = 0;
  bool seen_dtype_ = false, seen_shape_ = false, seen_offsets_ = false;
};

}  // namespace detail

/// A safetensors file opened for reading by mapping it. Anything may be in the file: every way in which it contradicts itself is
/// a failure that names the file, the tensor and what is wrong. The tensors must fill the data without gaps, as the format demands.
class safetensors_file {
 public:
  [[nodiscard]] static outcome<safetensors_file> open(const std::string& path) noexcept {
    try {
      safetensors_file file;
      file.path_ = path;
      if (auto opened = file.load(); !opened) return opened.error();
      return file;
    } catch (const std::exception& caught) {
      return failure{error_code::out_of_memory, caught.what()};
    }
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// In the order of their data.
  [[nodiscard]] const std::vector<tensor>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }

  /// The tensor of that name, or null.
  [[nodiscard]] const tensor* find(std::string_view name) const noexcept {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &tensors_[found->second];
  }

 private:
  safetensors_file() = default;

  failure bad(error_code code, const std::string& text) const { return {code, path_ + ": " + text}; }

  status load() {
    auto opened = mapped_file::open(path_);
    if (!opened) return opened.error();
    map_ = *std::move(opened);
    const std::byte* const bytes = map_.bytes().data();
    const std::size_t size = map_.bytes().size();
    if (size < 8) return bad(error_code::truncated, "shorter than the 8 bytes of a safetensors header length");

    std::uint64_t length = 0;
    std::memcpy(&length, bytes, sizeof length);
    if (length > detail::longest_safetensors_header) {
      return bad(error_code::corrupt, "claims a header of " + std::to_string(length) + " bytes (not a safetensors file?)");
    }
    if (length > size - 8) {
      return bad(error_code::truncated,
                 "the header needs " + std::to_string(length) + " bytes, the file holds " + std::to_string(size - 8));
    }
    const char* const text = reinterpret_cast<const char*>(bytes) + 8;
    detail::safetensors_header header;
    if (!nlohmann::json::sax_parse(text, text + length, &header)) return bad(error_code::corrupt, header.problem);
    metadata_ = std::move(header.metadata);
    return place(std::move(header.entries), {bytes + 8 + length, size - 8 - static_cast<std::size_t>(length)});
  }

  status place(std::vector<detail::safetensors_header::entry> entries, std::span<const std::byte> data) {
    std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.offsets < b.offsets; });
    std::uint64_t filled = 0;
    const std::string* previous = nullptr;
    for (auto& [info, offsets] : entries) {
      const auto [begin, end] = offsets;
      const std::string who = "tensor " + in_quotes(info.name) + ": ";
      const std::string span = "data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) + "]";
      if (begin > end) return bad(error_code::corrupt, who + span + " run backwards");
      if (end > data.size()) {
        return bad(error_code::truncated, who + span + " reach beyond the " + std::to_string(data.size()) + " bytes of data");
      }
      const auto expected = info.byte_size();
      if (!expected) return bad(error_code::corrupt, who + info.description() + " overflows 64 bits");
      if (*expected != end - begin) {
        return bad(error_code::corrupt, who + info.description() + " is " + std::to_string(*expected) + " bytes, but " + span + " are " +
                                            std::to_string(end - begin));
      }
      if (begin < filled) return bad(error_code::corrupt, who + span + " overlap those of tensor " + in_quotes(*previous));
      if (begin > filled) return bad(error_code::corrupt, who + span + " leave a gap after byte " + std::to_string(filled));
      filled = end;
      previous = &info.name;
    }
    if (filled != data.size()) {
      return bad(error_code::corrupt, std::to_string(data.size() - filled) + " bytes after the last tensor belong to no tensor");
    }
    tensors_.reserve(entries.size());
    for (auto& [info, offsets] : entries) {
      index_.emplace(info.name, tensors_.size());
      const std::uint64_t alignment = dtype_size(info.type);
      std::span<const std::byte> bytes = data.subspan(offsets[0], offsets[1] - offsets[0]);
      if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment != 0 && !bytes.empty()) {
        copies_.push_back(std::make_unique<std::byte[]>(bytes.size()));  // operator new aligns for every element type
        std::memcpy(copies_.back().get(), bytes.data(), bytes.size());
        bytes = {copies_.back().get(), bytes.size()};
      }
      tensors_.push_back({std::move(info), bytes});
    }
    return done;
  }

  std::string path_;
  mapped_file map_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
  std::vector<tensor> tensors_;
  std::map<std::string, std::size_t, std::less<>> index_;
  std::map<std::string, std::string> metadata_;
};

/// Writes a safetensors file in place: the header first, then every tensor is a mutable span of the mapped file. The file appears under
/// its name at `commit`; without it nothing is left behind (see `output_file`).
class safetensors_writer {
 public:
  /// Tensors keep their order in the file but for their element size: larger elements come first, so that all are aligned.
  [[nodiscard]] static outcome<safetensors_writer> create(const std::string& path, std::span<const tensor_info> infos,
                                                          const std::map<std::string, std::string>& metadata = {}) noexcept {
    try {
      std::vector<std::size_t> order(infos.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return dtype_size(infos[a].type) > dtype_size(infos[b].type); });

      nlohmann::ordered_json header = nlohmann::ordered_json::object();
      if (!metadata.empty()) header["__metadata__"] = metadata;
      std::vector<std::pair<std::uint64_t, std::uint64_t>> places(infos.size());
      std::map<std::string_view, bool> names;
      std::uint64_t total = 0;
      for (const std::size_t i : order) {
        const tensor_info& info = infos[i];
        const auto size = info.byte_size();
        if (info.name == "__metadata__" || !names.emplace(info.name, true).second) {
          return failure{error_code::invalid_argument, path + ": tensor name " + in_quotes(info.name) + " is reserved or occurs twice"};
        }
        if (!size || *size > INT64_MAX - total) {
          return failure{error_code::invalid_argument,
                         path + ": tensor " + in_quotes(info.name) + ": " + info.description() + " is too large"};
        }
        places[i] = {total, *size};
        total += *size;
        nlohmann::ordered_json entry = nlohmann::ordered_json::object();
        entry["dtype"] = dtype_name(info.type);
        entry["shape"] = info.shape;
        entry["data_offsets"] = {places[i].first, total};
        header.push_back({info.name, std::move(entry)});
      }
      std::string text = header.dump();
      text.resize((text.size() + 7) / 8 * 8, ' ');
      if (text.size() > detail::longest_safetensors_header) {
        return failure{error_code::invalid_argument, path + ": the header would be too large"};
      }

      auto file = output_file::create(path);
      if (!file) return file.error();
      auto bytes = file->map(8 + text.size() + total);
      if (!bytes) return bytes.error();
      const std::uint64_t length = text.size();
      std::memcpy(bytes->data(), &length, sizeof length);
      std::memcpy(bytes->data() + 8, text.data(), text.size());
      safetensors_writer writer(std::move(*file));
      for (const auto& [begin, size] : places) writer.data_.push_back(bytes->subspan(8 + text.size() + begin, size));
      return writer;
    } catch (const nlohmann::json::exception&) {  // only text that is not UTF-8 gets here
      return failure{error_code::invalid_argument, path + ": a tensor name or metadata is not valid UTF-8"};
    } catch (const std::exception& caught) {
      return failure{error_code::out_of_memory, caught.what()};
    }
  }

  /// The bytes of the `index`-th tensor as given to `create`; zero until written; valid until `commit`.
  [[nodiscard]] std::span<std::byte> data(std::size_t index) const noexcept { return data_[index]; }

  /// The same as elements. `sizeof(T)` must be the size of an element.
  template <class T>
  [[nodiscard]] std::span<T> as(std::size_t index) const noexcept {
    return {reinterpret_cast<T*>(data_[index].data()), data_[index].size() / sizeof(T)};
  }

  /// Gives the file its name. The spans end here.
  [[nodiscard]] status commit() noexcept {
    data_.clear();
    return file_.commit();
  }

 private:
  explicit safetensors_writer(output_file file) noexcept : file_(std::move(file)) {}

  output_file file_;
  std::vector<std::span<std::byte>> data_;
};

}  // namespace kvexact::examples

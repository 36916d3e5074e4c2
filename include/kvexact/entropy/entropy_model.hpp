// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <type_traits>

#include <kvexact/core/config.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/entropy/frequency_table.hpp>

namespace kvexact {

/// The range of a symbol in one context, for encoding. (Reciprocals that spare the division measure no faster: lanes hide it.)
struct encode_entry {
  std::uint32_t frequency = 0;  ///< 0 to 2^precision; 0: the symbol cannot be coded
  std::uint32_t start = 0;      ///< sum of the frequencies below
};

/// One of the 2^Precision decoding slots of a table: the symbol whose range covers the slot, its frequency and the distance of the
/// slot from the symbol's start. 4 bytes up to 12 bits of precision (symbol 8 | frequency - 1 12 | offset 12, from the top), else 8.
template <int Precision>
struct decode_slot {
  static_assert(Precision >= frequency_table::min_precision && Precision <= frequency_table::max_precision);
  using bits_type = std::conditional_t<(Precision <= 12), std::uint32_t, std::uint64_t>;
  static constexpr int field_bits = Precision <= 12 ? 12 : 16;
  static constexpr std::uint32_t field_mask = (std::uint32_t{1} << field_bits) - 1;

  bits_type bits = 0;

  [[nodiscard]] static constexpr decode_slot make(std::uint8_t symbol, std::uint32_t frequency, std::uint32_t offset) noexcept {
    return {static_cast<bits_type>((static_cast<bits_type>(symbol) << (2 * field_bits)) |
                                   (static_cast<bits_type>(frequency - 1) << field_bits) | offset)};
  }
  [[nodiscard]] constexpr std::uint8_t symbol() const noexcept { return static_cast<std::uint8_t>(bits >> (2 * field_bits)); }
  [[nodiscard]] constexpr std::uint32_t frequency() const noexcept {
    return (static_cast<std::uint32_t>(bits >> field_bits) & field_mask) + 1;
  }
  [[nodiscard]] constexpr std::uint32_t offset() const noexcept { return static_cast<std::uint32_t>(bits) & field_mask; }
};

/// A set of symbol distributions, one per context 0 .. size() - 1, of one precision, prepared for coding.
///
/// - `entries()`: 256 `encode_entry` per context, entry of (c, s) at c * 256 + s. Null if built for decoding only.
/// - `slots()`: 2^precision `decode_slot` per context, slot v of c at (c << precision) + v. Null if built for encoding only.
///
/// Every slot names a symbol of frequency at least 1 whose range covers it, and agrees with the entries. Reading is thread-safe.
template <class M>
concept entropy_model = requires(const M& model) {
  { M::precision } -> std::convertible_to<int>;
  { model.size() } -> std::same_as<std::size_t>;
  { model.entries() } -> std::same_as<const encode_entry*>;
  { model.slots() } -> std::same_as<const decode_slot<M::precision>*>;
};

/// Which half of a model to prepare; the other half costs no memory.
enum class build_for : std::uint8_t { encode = 1, decode = 2, both = 3 };

/// The entropy model made of frequency tables; the context is the index of the table.
///
///     auto set = kvexact::table_set<12>::build(tables);
///     if (!set) return set.error();
template <int Precision>
class table_set {
 public:
  static constexpr int precision = Precision;
  static constexpr std::size_t max_tables = 65536;
  using slot_type = decode_slot<Precision>;

  /// Bytes that a set of `tables` tables takes: 2 KiB a table to encode and slots of 4 or 8 bytes to decode (16 KiB at 12 bits).
  [[nodiscard]] static constexpr std::uint64_t memory_bytes(std::uint64_t tables, build_for use) noexcept {
    const std::uint64_t encode = wants(use, build_for::encode) ? 256 * sizeof(encode_entry) : 0;
    const std::uint64_t decode = wants(use, build_for::decode) ? (std::uint64_t{1} << Precision) * sizeof(slot_type) : 0;
    return tables * (encode + decode);
  }

  /// Errors: invalid_argument (no table, more than 65536 tables, a table of another precision), out_of_memory.
  [[nodiscard]] static result<table_set> build(std::span<const frequency_table> tables, build_for use = build_for::both) noexcept {
    if (tables.empty() || tables.size() > max_tables) return error{error_code::invalid_argument, "a table set holds 1 to 65536 tables"};
    for (const frequency_table& table : tables) {
      if (table.precision() != Precision) return error{error_code::invalid_argument, "a table's precision differs from that of its set"};
    }
    if (memory_bytes(tables.size(), use) > static_cast<std::uint64_t>(std::numeric_limits<std::ptrdiff_t>::max())) {
      return error{error_code::out_of_memory, "coding tables"};  // only where addresses have 32 bits
    }
    table_set set;
    set.size_ = tables.size();
    if (wants(use, build_for::encode)) {
      set.entries_.reset(new (std::nothrow) encode_entry[tables.size() << 8]);
      if (!set.entries_) return error{error_code::out_of_memory, "encoding tables"};
      encode_entry* out = set.entries_.get();
      for (const frequency_table& table : tables) {
        for (int s = 0; s < table.symbol_count(); ++s) out[s] = {table.frequency(s), table.start(s)};
        out += 256;
      }
    }
    if (wants(use, build_for::decode)) {
      set.slots_.reset(new (std::nothrow) slot_type[tables.size() << Precision]);
      if (!set.slots_) return error{error_code::out_of_memory, "decoding tables"};
      slot_type* out = set.slots_.get();
      for (const frequency_table& table : tables) {
        for (int s = 0; s < table.symbol_count(); ++s) {
          const std::uint32_t frequency = table.frequency(s);
          for (std::uint32_t i = 0; i < frequency; ++i) *out++ = slot_type::make(static_cast<std::uint8_t>(s), frequency, i);
        }
      }
    }
    return set;
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] const encode_entry* entries() const noexcept { return entries_.get(); }
  [[nodiscard]] const slot_type* slots() const noexcept { return slots_.get(); }

 private:
  table_set() noexcept = default;

  [[nodiscard]] static constexpr bool wants(build_for use, build_for half) noexcept {
    return (static_cast<unsigned>(use) & static_cast<unsigned>(half)) != 0;
  }

  std::size_t size_ = 0;
  std::unique_ptr<encode_entry[]> entries_;
  std::unique_ptr<slot_type[]> slots_;
};

static_assert(entropy_model<table_set<12>>);

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/core/result.hpp>
#include <kvexact/entropy/entropy_coder.hpp>
#include <kvexact/entropy/entropy_model.hpp>

namespace kvexact {

/// Range coder (G. N. N. Martin, 1979) with 64-bit low and range, one byte at a time: slow, within 2^-39 bits a symbol of the code
/// length of its tables, and sharing no code with the rANS coders that it cross-checks. Rows only group symbols.
///
/// Coded bytes: the bytes of `low` as they leave at the top, most significant first, then its last 8 bytes. low starts at 0, range at
/// 2^64 - 1. A symbol: r = range >> Precision, low += r * start (a carry runs into the bytes already written), range = r * frequency;
/// then while range < 2^56 a byte leaves.
template <int Lanes = 32, int Precision = 12>
struct range_coder {
  static_assert(Lanes >= 1 && Lanes <= 256, "kvexact: range_coder must have 1 to 256 lanes");
  static_assert(Precision >= frequency_table::min_precision && Precision <= frequency_table::max_precision,
                "kvexact: range_coder must have a precision of 1 to 16 bits");

  static constexpr int lanes = Lanes;
  static constexpr int precision = Precision;
  static constexpr std::uint32_t id = 2;
  static constexpr row_order encode_order = row_order::forward;

  /// At most 16 bits and 2^-39 more a symbol, and the last 8 bytes.
  [[nodiscard]] static constexpr std::size_t max_coded_bytes(std::size_t symbols) noexcept { return 10 + 2 * symbols + (symbols >> 40); }

  class encoder {
   public:
    explicit encoder(std::span<std::byte> buffer) noexcept : buffer_(buffer) {}

    /// See `entropy_encoder`; rows first to last.
    template <entropy_model Model>
    bool put_row(const Model& model, const std::uint16_t* contexts, const std::uint8_t* symbols, int n) noexcept {
      static_assert(Model::precision == Precision, "kvexact: the model must have the precision of the entropy coder");
      for (int i = 0; i < n && codable_ && !full_; ++i) {
        const encode_entry& e = model.entries()[(std::size_t{contexts[i]} << 8) + symbols[i]];
        if (e.frequency == 0) {
          codable_ = false;
          break;
        }
        const std::uint64_t step = range_ >> Precision;
        add(step * e.start);
        range_ = step * e.frequency;
        while (range_ < smallest_range) {
          put_byte();
          range_ <<= 8;
        }
      }
      return codable_ && !full_;
    }

    /// See `entropy_encoder`. The coded bytes lie at the begin of the buffer.
    [[nodiscard]] result<std::span<const std::byte>> finish() noexcept {
      if (!codable_) return error{error_code::invalid_argument, "a symbol has frequency 0 in its context"};
      for (int i = 0; i < 8; ++i) put_byte();
      if (full_) return error{error_code::workspace_too_small, "the buffer of the entropy coder is full"};
      return std::span<const std::byte>(buffer_.data(), written_);
    }

   private:
    void add(std::uint64_t value) noexcept {
      low_ += value;
      if (low_ >= value) return;
      // The coded number stays below 1, so a carry always ends at a byte that is not 0xff.
      for (std::size_t i = written_; i-- > 0;) {
        buffer_[i] = static_cast<std::byte>(std::to_integer<unsigned>(buffer_[i]) + 1U);
        if (buffer_[i] != std::byte{0}) break;
      }
    }

    void put_byte() noexcept {
      if (written_ == buffer_.size()) {
        full_ = true;
      } else {
        buffer_[written_++] = static_cast<std::byte>(low_ >> 56);
      }
      low_ <<= 8;
    }

    std::span<std::byte> buffer_;
    std::size_t written_ = 0;
    std::uint64_t low_ = 0;
    std::uint64_t range_ = ~std::uint64_t{0};
    bool full_ = false;
    bool codable_ = true;
  };

  class decoder {
   public:
    /// See `entropy_decoder`. Errors: truncated (fewer than 8 bytes).
    [[nodiscard]] static result<decoder> open(std::span<const std::byte> coded) noexcept {
      if (coded.size() < 8) return error{error_code::truncated, "first bytes of the range coder"};
      decoder opened(coded);
      for (int i = 0; i < 8; ++i) opened.take_byte();
      return opened;
    }

    /// See `entropy_decoder`.
    template <entropy_model Model>
    void get_row(const Model& model, const std::uint16_t* contexts, std::uint8_t* symbols, int n) noexcept {
      static_assert(Model::precision == Precision, "kvexact: the model must have the precision of the entropy coder");
      for (int i = 0; i < n; ++i) {
        const std::uint64_t step = range_ >> Precision;
        // Only bad input can point above the last symbol.
        const std::uint64_t value = std::min(code_ / step, (std::uint64_t{1} << Precision) - 1);
        const decode_slot<Precision> e = model.slots()[(std::size_t{contexts[i]} << Precision) + value];
        symbols[i] = e.symbol();
        code_ -= step * (value - e.offset());
        range_ = step * e.frequency();
        while (range_ < smallest_range) {
          take_byte();
          range_ <<= 8;
        }
      }
    }

    /// See `entropy_decoder`. What is left of the code is its distance from the encoder's low, which is written in full.
    [[nodiscard]] result<void> finish() const noexcept {
      if (exhausted_) return error{error_code::truncated, "the range coder ran out of bytes"};
      if (read_ != coded_.size()) return error{error_code::corrupt, "bytes of the range coder are left over"};
      if (code_ != 0) return error{error_code::corrupt, "final state of the range coder"};
      return {};
    }

   private:
    explicit decoder(std::span<const std::byte> coded) noexcept : coded_(coded) {}

    void take_byte() noexcept {
      code_ <<= 8;
      if (read_ < coded_.size()) {
        code_ |= std::to_integer<std::uint64_t>(coded_[read_++]);
      } else {
        exhausted_ = true;
      }
    }

    std::span<const std::byte> coded_;
    std::size_t read_ = 0;
    std::uint64_t code_ = 0;
    std::uint64_t range_ = ~std::uint64_t{0};
    bool exhausted_ = false;
  };

 private:
  static constexpr std::uint64_t smallest_range = std::uint64_t{1} << 56;
};

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include <kvexact/bitstream/byte_io.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/entropy/entropy_coder.hpp>
#include <kvexact/entropy/entropy_model.hpp>
#include <kvexact/entropy/lane_vector.hpp>
#include <kvexact/entropy/lanes_avx512.hpp>

namespace kvexact {

/// Interleaved rANS (J. Duda, arXiv 1311.2540; interleaving after F. Giesen, arXiv 1402.3392): `Lanes` states of 32 bits that share
/// one sequence of 16-bit words. Symbol i of a row is coded with state i.
///
/// Coded bytes: Lanes x u32 final encoder states, lane 0 first, then the words in the order in which the decoder takes them; all
/// little endian, no alignment. States are in [2^16, 2^32) between symbols and 2^16 before the first encoded symbol. Decoding a
/// symbol takes at most one word, because a state is at least 2^(16 - Precision) >= 1 after the update; lanes of a row take
/// theirs in lane order after all states of the row are updated. `LaneVector` changes speed, never bytes.
template <int Lanes = 32, int Precision = 12, class LaneVector = scalar_lanes<Lanes>>
struct interleaved_rans {
  static_assert(Lanes >= 1 && Lanes <= 256, "kvexact: interleaved_rans must have 1 to 256 lanes");
  static_assert(Precision >= frequency_table::min_precision && Precision <= frequency_table::max_precision,
                "kvexact: interleaved_rans must have a precision of 1 to 16 bits");
  static_assert(lane_vector<LaneVector>, "kvexact: the LaneVector of interleaved_rans must provide the operations of lane_vector");
  static_assert(LaneVector::count == Lanes, "kvexact: the LaneVector of interleaved_rans must have exactly Lanes lanes");

  static constexpr int lanes = Lanes;
  static constexpr int precision = Precision;
  static constexpr std::uint32_t id = 1;
  static constexpr row_order encode_order = row_order::reverse;

  /// All lane states and at most one word a symbol.
  [[nodiscard]] static constexpr std::size_t max_coded_bytes(std::size_t symbols) noexcept { return state_bytes + 2 * symbols; }

  class encoder {
   public:
    /// Coded bytes grow from the end of `buffer` towards its begin.
    explicit encoder(std::span<std::byte> buffer) noexcept
        : begin_(buffer.data()), write_(buffer.data() + buffer.size()), end_(buffer.data() + buffer.size()) {
      for (int i = 0; i < Lanes; ++i) states_.set_lane(i, initial_state);
    }

    /// See `entropy_encoder`; rows last to first.
    template <entropy_model Model>
    KVEXACT_ALWAYS_INLINE bool put_row(const Model& model, const std::uint16_t* contexts, const std::uint8_t* symbols, int n) noexcept {
      static_assert(Model::precision == Precision, "kvexact: the model must have the precision of the entropy coder");
      if (n == Lanes && write_ - begin_ >= 2 * Lanes) {
        write_ = states_.template retreat<Precision>(model.entries(), contexts, symbols, write_, codable_);
      } else {
        put_carefully(model.entries(), contexts, symbols, n);
      }
      return codable_ && !full_;
    }

    /// See `entropy_encoder`. The coded bytes lie at the end of the buffer.
    [[nodiscard]] result<std::span<const std::byte>> finish() noexcept {
      if (!codable_) return error{error_code::invalid_argument, "a symbol has frequency 0 in its context"};
      if (full_ || write_ - begin_ < static_cast<std::ptrdiff_t>(state_bytes)) {
        return error{error_code::workspace_too_small, "the buffer of the entropy coder is full"};
      }
      write_ -= state_bytes;
      for (int i = 0; i < Lanes; ++i) store_little_endian(write_ + 4 * i, states_.lane(i));
      return std::span<const std::byte>(write_, end_);
    }

   private:
    void put_carefully(const encode_entry* entries, const std::uint16_t* contexts, const std::uint8_t* symbols, int n) noexcept {
      for (int i = n; i-- > 0;) {
        const encode_entry e = entries[(std::size_t{contexts[i]} << 8) + symbols[i]];
        codable_ = codable_ && e.frequency != 0;
        if (!codable_) return;
        std::uint32_t x = states_.lane(i);
        if ((x >> (32 - Precision)) >= e.frequency) {
          full_ = full_ || write_ - begin_ < 2;
          if (full_) return;
          write_ -= 2;
          store_little_endian(write_, static_cast<std::uint16_t>(x));
          x >>= 16;
        }
        states_.set_lane(i, x + e.start + x / e.frequency * ((std::uint32_t{1} << Precision) - e.frequency));
      }
    }

    LaneVector states_{};
    std::byte* begin_;
    std::byte* write_;
    std::byte* end_;
    bool full_ = false;
    bool codable_ = true;
  };

  class decoder {
   public:
    /// See `entropy_decoder`. Errors: truncated (shorter than the lane states), corrupt (half a word, or a state below 2^16).
    [[nodiscard]] static result<decoder> open(std::span<const std::byte> coded) noexcept {
      if (coded.size() < state_bytes) return error{error_code::truncated, "lane states of the entropy coder"};
      if ((coded.size() - state_bytes) % 2 != 0) return error{error_code::corrupt, "half a word at the end of the entropy coder"};
      decoder opened(coded);
      for (int i = 0; i < Lanes; ++i) {
        const std::uint32_t x = load_little_endian<std::uint32_t>(coded.data() + 4 * i);
        if (x < initial_state) return error{error_code::corrupt, "lane state of the entropy coder out of range"};
        opened.states_.set_lane(i, x);
      }
      return opened;
    }

    /// See `entropy_decoder`.
    template <entropy_model Model>
    KVEXACT_ALWAYS_INLINE void get_row(const Model& model, const std::uint16_t* contexts, std::uint8_t* symbols, int n) noexcept {
      static_assert(Model::precision == Precision, "kvexact: the model must have the precision of the entropy coder");
      if (n == Lanes && end_ - read_ >= 2 * Lanes) {
        states_.template advance<Precision>(model.slots(), contexts, symbols);
        read_ += 2 * states_.refill(read_);
      } else {
        get_carefully(model.slots(), contexts, symbols, n);
      }
    }

    /// See `entropy_decoder`.
    [[nodiscard]] result<void> finish() const noexcept {
      if (exhausted_) return error{error_code::truncated, "the entropy coder ran out of words"};
      if (read_ != end_) return error{error_code::corrupt, "words of the entropy coder are left over"};
      for (int i = 0; i < Lanes; ++i) {
        if (states_.lane(i) != initial_state) return error{error_code::corrupt, "final lane state of the entropy coder"};
      }
      return {};
    }

#ifdef KVEXACT_TARGET_AVX512
    /// Full rows by AVX-512. Holds the decoder's states in registers: between construction and `stop` nothing else may use the decoder.
    class avx512 {
     public:
      KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE explicit avx512(decoder& from) noexcept
          : from_(&from), lanes_(detail::lanes_avx512::load(from.states_)), read_(from.read_) {}
      KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE void stop() noexcept {
        lanes_.store(from_->states_);
        from_->read_ = read_;
      }

      /// As the decoder's for a full row; contexts and symbols are 16-bit lanes.
      template <entropy_model Model>
      KVEXACT_TARGET_AVX512 KVEXACT_ALWAYS_INLINE __m512i get_row(const Model& model, __m512i contexts) noexcept
        requires(Lanes == detail::lanes_avx512::count && sizeof(decode_slot<Precision>) == 4)
      {
        if (from_->end_ - read_ >= 2 * Lanes) {
          const __m512i symbols = lanes_.advance(model.slots(), contexts);
          read_ += 2 * lanes_.refill(read_);
          return symbols;
        }
        alignas(64) std::array<std::uint16_t, Lanes> context;
        std::array<std::uint8_t, Lanes> symbol;
        _mm512_store_si512(context.data(), contexts);
        stop();
        from_->get_carefully(model.slots(), context.data(), symbol.data(), Lanes);
        *this = avx512(*from_);
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(symbol.data())));
      }

     private:
      decoder* from_;
      detail::lanes_avx512 lanes_;
      const std::byte* read_;
    };
#endif

   private:
    explicit decoder(std::span<const std::byte> coded) noexcept : read_(coded.data() + state_bytes), end_(coded.data() + coded.size()) {}

    void get_carefully(const decode_slot<Precision>* slots, const std::uint16_t* contexts, std::uint8_t* symbols, int n) noexcept {
      for (int i = 0; i < n; ++i) {
        std::uint32_t x = states_.lane(i);
        const decode_slot<Precision> e = slots[(std::size_t{contexts[i]} << Precision) + (x & ((std::uint32_t{1} << Precision) - 1))];
        symbols[i] = e.symbol();
        x = e.frequency() * (x >> Precision) + e.offset();
        if (x < initial_state) {
          x <<= 16;
          if (read_ != end_) {
            x |= load_little_endian<std::uint16_t>(read_);
            read_ += 2;
          } else {
            exhausted_ = true;
          }
        }
        states_.set_lane(i, x);
      }
    }

    LaneVector states_{};
    const std::byte* read_;
    const std::byte* end_;
    bool exhausted_ = false;
  };

 private:
  static constexpr std::uint32_t initial_state = 0x10000;
  static constexpr std::size_t state_bytes = 4 * static_cast<std::size_t>(Lanes);
};

}  // namespace kvexact

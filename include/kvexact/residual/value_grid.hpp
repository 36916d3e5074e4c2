// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include <kvexact/bitstream/bit_io.hpp>
#include <kvexact/core/config.hpp>
#include <kvexact/numeric/small_float.hpp>
#include <kvexact/residual/residual_model.hpp>
#include <kvexact/residual/value_grid_avx512.hpp>

namespace kvexact {

/// Residual model on an aligned power-of-two grid, one for all formats.
///
/// For a spread sigma the grid step is D = 2^d, d = floor(log2 sigma) - `step_log2`, not finer than the format's smallest subnormal.
/// Where the format is finer than D, a cell is [c D, (c+1) D) and holds 2^k values, told apart by k raw bits; where it is coarser,
/// every value is a cell. Counting cells upwards from zero gives each magnitude a cell number c and each negative value -1 - c, so
/// numbers grow with the value and no cell is empty. The symbol is cell(x) - cell(mean), with both negated if the mean is negative.
/// The cell at zero spans many binades: it codes the number of halvings below D in unary and then the mantissa.
/// Infinities and NaNs are cells beyond the largest finite number. A value outside the alphabet is escaped and stored as it is.
///
/// Contexts choose the frequency table. Mean in the fine part ("linear"): sigma/D in quarter octaves and the distance to the binade from
/// which the format is coarser than D. Mean in the coarse part ("value"): sigma over the mean's ulp in quarter octaves, the place of the
/// mean in its binade, and the position of the mean between two neighbouring values in eighths.
template <class Format>
struct value_grid {
  using format = Format;
  using bits_type = typename Format::bits_type;

  static constexpr std::uint32_t id = 1;
  static constexpr int step_log2 = 2;
  static constexpr int alphabet = 128;
  static constexpr int zero_symbol = 64;
  static constexpr int escape_symbol = alphabet - 1;

  static constexpr int value_classes = 24;
  static constexpr int value_class_of_one = 16;  ///< class of sigma in [ulp, 2^(1/4) ulp)
  static constexpr int places = 8;
  static constexpr int offsets = 8;
  static constexpr int linear_classes = 12;
  static constexpr int distances = 12;
  static constexpr int shared_contexts = value_classes * places * offsets;
  static constexpr int contexts = shared_contexts + linear_classes * distances;

  /// State of one row between `prepare` and `encode` or `decode`.
  struct row {
    alignas(64) std::array<std::int32_t, row_lanes> context;
    alignas(64) std::array<std::int32_t, row_lanes> cell;   // of |mean|
    alignas(64) std::array<std::int32_t, row_lanes> step;   // d
    alignas(64) std::array<std::uint32_t, row_lanes> sign;  // sign bit of the mean, at the format's place
  };

  /// Range of sigma that makes a difference, in 1/256 octave; values outside act like the nearest end.
  static constexpr std::int32_t min_sigma = (Format::min_exponent - Format::mantissa_bits - 8) * 256;
  static constexpr std::int32_t max_sigma = (Format::bias + 2) * 256;

  KVEXACT_ALWAYS_INLINE static void prepare(const std::uint32_t* means, const std::int32_t* sigmas, row& out) noexcept {
    for (int i = 0; i < row_lanes; ++i) {
      const auto lane = static_cast<std::size_t>(i);
      const std::uint32_t bits = means[i];
      std::uint32_t magnitude = bits & 0x7fffffffU;
      magnitude &= magnitude < 0x7f800000U ? ~0U : 0U;  // NaN and infinity say nothing about the value
      out.sign[lane] = ((bits >> 31) << (Format::bit_count - 1)) & (magnitude != 0 ? ~0U : 0U);
      magnitude = std::min(magnitude, largest_mean);
      const std::int32_t sigma = std::clamp(sigmas[i], min_sigma, max_sigma);
      const std::int32_t step = std::max((sigma >> 8) - step_log2, smallest_step);

      // The mean as significand * 2^(exponent - 23).
      const auto biased = static_cast<std::int32_t>(magnitude >> 23);
      const std::int32_t exponent = std::max(biased, 1) - 127;
      const std::uint32_t significand = (magnitude & 0x7fffffU) | (biased > 0 ? 0x800000U : 0U);

      // The format's value at or below it, and what is left in eighths of an ulp.
      const std::int32_t binade = std::max(exponent, Format::min_exponent);
      const std::int32_t drop = std::min(23 - mantissa_bits + binade - exponent, 30);
      const std::uint32_t kept = significand >> drop;
      const auto code = static_cast<std::int32_t>(kept) + (binade - Format::min_exponent) * (1 << mantissa_bits);
      const auto offset = static_cast<std::int32_t>(((significand << 3) >> drop) & 7U);

      const bool linear = binade - mantissa_bits <= step;
      const std::int32_t linear_drop = std::min(step - exponent + 23, 30);
      const auto linear_cell = static_cast<std::int32_t>(significand >> std::max(linear_drop, 0));
      const std::int32_t linear_class = std::clamp((sigma - step * 256) >> 6, 0, linear_classes - 1);
      const std::int32_t distance = distance_class(first_coarse_cell - linear_cell);

      const std::int32_t value_class =
          std::clamp(((sigma - (binade - mantissa_bits) * 256) >> 6) + value_class_of_one, 0, value_classes - 1);
      const std::int32_t place = place_class(static_cast<std::int32_t>(kept) & ((1 << mantissa_bits) - 1));

      out.step[lane] = step;
      out.cell[lane] = select(linear, linear_cell, coarse_cell(code, step));
      out.context[lane] = select(linear, shared_contexts + linear_class * distances + distance, (value_class * places + place) * offsets + offset);
    }
  }

  KVEXACT_ALWAYS_INLINE static void to_symbols(const bits_type* values, const row& in, std::uint8_t* symbols, int n) noexcept {
    for (int i = 0; i < n; ++i) {
      const auto lane = static_cast<std::size_t>(i);
      const std::uint32_t bits = values[i] ^ in.sign[lane];
      const std::int32_t cell = split(bits, in.step[lane]).cell;
      const std::int32_t signed_cell = (bits & Format::sign_mask) != 0 ? -1 - cell : cell;
      const std::int32_t symbol = signed_cell - in.cell[lane] + zero_symbol;
      symbols[i] = static_cast<std::uint8_t>(select(static_cast<std::uint32_t>(symbol) >= static_cast<std::uint32_t>(escape_symbol), escape_symbol, symbol));
    }
  }

  KVEXACT_ALWAYS_INLINE static void put_raw(const bits_type* values, const row& in, const std::uint8_t* symbols, bit_writer& writer,
                                            int n) noexcept {
    alignas(64) std::array<std::int32_t, row_lanes> raw_count;
    alignas(64) std::array<std::uint32_t, row_lanes> raw;
    alignas(64) std::array<std::uint32_t, row_lanes> is_special;
    for (int i = 0; i < n; ++i) {
      const auto lane = static_cast<std::size_t>(i);
      const auto [cell, shift, rest] = split(values[i], in.step[lane]);
      const bool apart = (symbols[i] == escape_symbol) | (cell == 0);
      is_special[lane] = apart ? 1U : 0U;
      raw_count[lane] = select(apart, 0, shift);
      raw[lane] = rest & (apart ? 0U : ~0U);
    }
    std::uint32_t any = 0;
    for (int i = 0; i < n; ++i) {
      const auto lane = static_cast<std::size_t>(i);
      writer.put(raw[lane], raw_count[lane]);
      any |= is_special[lane];
    }
    if (any == 0) return;
    for (int i = 0; i < n; ++i) {
      const auto lane = static_cast<std::size_t>(i);
      if (is_special[lane] == 0) continue;
      if (symbols[i] == escape_symbol) {
        writer.put(values[i], Format::bit_count);
      } else {
        put_near_zero(writer, static_cast<std::uint32_t>(values[i] & Format::magnitude_mask), in.step[lane]);
      }
    }
  }

  KVEXACT_ALWAYS_INLINE static void decode(const std::uint8_t* symbols, const row& in, bit_reader& reader, bits_type* values, int n) noexcept {
    alignas(64) std::array<std::int32_t, row_lanes> raw_count{};
    alignas(64) std::array<std::uint32_t, row_lanes> raw{};
    alignas(64) std::array<std::uint32_t, row_lanes> base{};
    alignas(64) std::array<std::uint32_t, row_lanes> is_special{};
    for (int i = 0; i < n; ++i) {
      const auto lane = static_cast<std::size_t>(i);
      const std::int32_t step = in.step[lane];
      const std::int32_t signed_cell = static_cast<std::int32_t>(symbols[i]) - zero_symbol + in.cell[lane];
      const std::int32_t cell = signed_cell ^ (signed_cell >> 31);
      const std::uint32_t sign = (static_cast<std::uint32_t>(signed_cell) >> 31) << (Format::bit_count - 1);
      const bool linear = cell < first_coarse_cell;
      const std::int32_t octave = octave_of(cell);
      const std::int32_t count = select(linear, std::min(mantissa_bits - octave, step - smallest_step), 0);
      const std::int32_t binades_up = std::max(step + octave - Format::min_exponent, 0);
      const std::int32_t code = select(linear, (cell << count) + (binades_up << mantissa_bits), cell - coarse_cell(0, step));
      const bool apart = (symbols[i] == escape_symbol) | (cell == 0);
      is_special[lane] = apart ? 1U : 0U;
      raw_count[lane] = select(apart, 0, count);
      base[lane] = (static_cast<std::uint32_t>(code) & Format::magnitude_mask) | (sign ^ in.sign[lane]);
    }
    reader.template get_row<row_lanes>(raw_count.data(), raw.data());
    std::uint32_t any = 0;
    for (int i = 0; i < n; ++i) {
      const auto lane = static_cast<std::size_t>(i);
      values[i] = static_cast<bits_type>(base[lane] | raw[lane]);
      any |= is_special[lane];
    }
    if (any == 0) return;
    for (int i = 0; i < n; ++i) {
      const auto lane = static_cast<std::size_t>(i);
      if (is_special[lane] == 0) continue;
      if (symbols[i] == escape_symbol) {
        values[i] = static_cast<bits_type>(reader.get(Format::bit_count));
      } else {
        values[i] = static_cast<bits_type>((base[lane] & Format::sign_mask) | get_near_zero(reader, in.step[lane]));
      }
    }
  }

  /// Smallest real number, in units of D, that rounds into `cell` (0 or above); for builders that integrate a density. Ignores that the
  /// format's subnormal numbers are evenly spaced.
  [[nodiscard]] static double lower_edge(std::int32_t cell) noexcept {
    if (cell == 0) return 0;
    if (cell == 1) return 1 - 0.25 / static_cast<double>(1U << mantissa_bits);
    if (cell <= first_coarse_cell) {
      const int octave = octave_of(cell - 1);
      return cell - 0.5 / static_cast<double>(1U << (mantissa_bits - octave));
    }
    const std::int32_t beyond = cell - first_coarse_cell;
    const int octave = std::min(beyond >> mantissa_bits, 60);
    const int octave_below = std::min((beyond - 1) >> mantissa_bits, 60);
    const double ulp = static_cast<double>(std::uint64_t{2} << octave);
    const double ulp_below = static_cast<double>(std::uint64_t{2} << octave_below);
    return ulp * ((beyond & ((1 << mantissa_bits) - 1)) + (1 << mantissa_bits)) - 0.5 * ulp_below;
  }

  /// A mean and a sigma in the middle of a context, for builders that integrate a density; the unit is D.
  struct typical_row {
    double mean = 0;
    std::int32_t mean_cell = 0;
    double sigma = 0;
  };
  [[nodiscard]] static typical_row typical(std::int32_t context) noexcept {
    if (context >= shared_contexts) {
      const std::int32_t linear_class = (context - shared_contexts) / distances;
      const std::int32_t distance = (context - shared_contexts) % distances;
      const double cells = std::exp2(0.5 * (distances - 1 - distance) + 0.25);
      const std::int32_t cell = std::max(first_coarse_cell - static_cast<std::int32_t>(cells), 0);
      return {cell + 0.5, cell, std::exp2((linear_class + 0.5) / 4)};
    }
    const std::int32_t value_class = context / (places * offsets);
    const double sigma_in_ulps = std::exp2((value_class - value_class_of_one + 0.5) / 4);
    const auto octaves = static_cast<std::int32_t>(step_log2 - std::floor(std::log2(sigma_in_ulps)));  // from D to the ulp
    const double offset = (context % offsets + 0.5) / offsets;
    const std::int32_t mantissa = typical_mantissa(context / offsets % places);
    return {std::ldexp((1 << mantissa_bits) + mantissa + offset, octaves), first_coarse_cell + ((octaves - 1) << mantissa_bits) + mantissa,
            std::ldexp(sigma_in_ulps, octaves)};
  }

  /// Cell from which the format is coarser than D.
  static constexpr std::int32_t first_coarse_cell = 2 << Format::mantissa_bits;

#ifdef KVEXACT_TARGET_AVX512
  using avx512 = detail::value_grid_avx512<value_grid>;
#endif

 private:
#ifdef KVEXACT_TARGET_AVX512
  friend avx512;
#endif

  static constexpr int mantissa_bits = Format::mantissa_bits;
  static constexpr std::int32_t smallest_step = Format::min_exponent - mantissa_bits;
  static constexpr int most_halvings = 8;
  /// Bits of the largest finite value as binary32: larger means act like it.
  static constexpr std::uint32_t largest_mean = std::bit_cast<std::uint32_t>(Format::from_bits(Format::max_finite).to_float());

  /// `first` if `condition`, without a branch: what feeds the arms may not be moved into them, or the loops would stay scalar.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE static constexpr std::int32_t select(bool condition, std::int32_t first, std::int32_t second) noexcept {
    return second ^ ((first ^ second) & -static_cast<std::int32_t>(condition));
  }

  /// Cell of a magnitude, the number of raw bits that finish it, and these bits.
  struct split_value {
    std::int32_t cell;
    std::int32_t raw_count;
    std::uint32_t raw;
  };
  [[nodiscard]] KVEXACT_ALWAYS_INLINE static split_value split(std::uint32_t bits, std::int32_t step) noexcept {
    const auto code = static_cast<std::int32_t>(bits & Format::magnitude_mask);
    const std::int32_t biased = code >> mantissa_bits;
    const std::int32_t ulp = std::max(biased, 1) - 1 + smallest_step;
    const std::int32_t significand = (code & ((1 << mantissa_bits) - 1)) | (biased > 0 ? 1 << mantissa_bits : 0);
    const std::int32_t shift = std::clamp(step - ulp, 0, 31);
    return {select(ulp <= step, significand >> shift, coarse_cell(code, step)), shift, static_cast<std::uint32_t>(significand) & ((1U << shift) - 1U)};
  }

  /// Cell of a magnitude code whose ulp exceeds 2^step.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE static std::int32_t coarse_cell(std::int32_t code, std::int32_t step) noexcept {
    return first_coarse_cell + code - (step - smallest_step + 2) * (1 << mantissa_bits);
  }

  /// floor(log2 cell) for 1 <= cell < first_coarse_cell, 0 for cell 0; by way of the float exponent, which vectorises.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE static constexpr std::int32_t octave_of(std::int32_t cell) noexcept {
    return static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(static_cast<float>(cell | 1)) >> 23) - 127;
  }

  /// 0 where the coarse part is out of reach, else classes of the number of cells up to it (half octaves, 1 cell to 45).
  [[nodiscard]] KVEXACT_ALWAYS_INLINE static constexpr std::int32_t distance_class(std::int32_t cells) noexcept {
    const auto square = static_cast<float>(std::clamp(cells, 1, 46) * std::clamp(cells, 1, 46));
    const std::int32_t half_octaves = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(square) >> 23) - 127;
    return std::clamp(distances - 1 - half_octaves, 0, distances - 1);
  }

  /// Place of the mean in its binade: the mantissa itself if it is short, else the distance to the nearer end in octaves.
  [[nodiscard]] KVEXACT_ALWAYS_INLINE static constexpr std::int32_t place_class(std::int32_t mantissa) noexcept {
    if constexpr ((1 << mantissa_bits) <= places) {
      return mantissa;
    } else {
      const std::int32_t up = (1 << mantissa_bits) - mantissa;
      const std::int32_t below = mantissa + 1;
      const std::int32_t from_top = 4 - std::min(octave_of(up), 4);
      const std::int32_t from_bottom = 3 - std::min(octave_of(below), 3);
      return select(from_top > 0, from_top, select(from_bottom > 0, 4 + from_bottom, 0));
    }
  }

  /// A mantissa in the middle of a place.
  [[nodiscard]] static constexpr std::int32_t typical_mantissa(std::int32_t place) noexcept {
    constexpr std::int32_t size = 1 << mantissa_bits;
    if constexpr (size <= places) {
      return std::min(place, size - 1);
    } else {
      if (place == 0) return size / 2;
      if (place <= 4) return size - (1 << (4 - place)) - (1 << (4 - place)) / 2;
      return (1 << (7 - place)) + (1 << (7 - place)) / 2 - 1;
    }
  }

  /// Halvings of D after which a magnitude is stored as it is, or runs into the subnormal numbers.
  [[nodiscard]] static std::int32_t halvings(std::int32_t step) noexcept {
    return std::min(most_halvings, step - Format::min_exponent + 1);
  }

  /// A magnitude in [0, 2^step).
  static void put_near_zero(bit_writer& writer, std::uint32_t magnitude, std::int32_t step) noexcept {
    const std::int32_t limit = halvings(step);
    if (limit < 1) {  // D is inside the subnormal numbers, which are evenly spaced
      writer.put(magnitude, step - smallest_step);
      return;
    }
    const std::int32_t binade = static_cast<std::int32_t>(magnitude >> mantissa_bits) - 1 + Format::min_exponent;
    const std::int32_t count = std::min(step - binade, limit);
    if (count < limit) {
      writer.put(1U << (count - 1), count);
      writer.put(magnitude & ((1U << mantissa_bits) - 1U), mantissa_bits);
    } else {
      writer.put(0, limit - 1);
      writer.put(magnitude, last_bits(step, limit));
    }
  }

  [[nodiscard]] static std::uint32_t get_near_zero(bit_reader& reader, std::int32_t step) noexcept {
    const std::int32_t limit = halvings(step);
    if (limit < 1) return reader.get(step - smallest_step);
    std::int32_t count = 1;
    while (count < limit && reader.get(1) == 0) ++count;
    if (count == limit) return reader.get(last_bits(step, limit));
    const auto biased = static_cast<std::uint32_t>(step - count - Format::min_exponent + 1);
    return (biased << mantissa_bits) | reader.get(mantissa_bits);
  }

  /// Bits of the magnitudes that remain after `limit - 1` halvings: the subnormal numbers only, or everything.
  [[nodiscard]] static std::int32_t last_bits(std::int32_t step, std::int32_t limit) noexcept {
    return limit == step - Format::min_exponent + 1 ? mantissa_bits : Format::bit_count - 1;
  }
};

}  // namespace kvexact

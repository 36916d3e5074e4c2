// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include <kvexact/compression/quantiser.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/number_format.hpp>

namespace kvexact {

/// How a row of a head, the key or the value of one token, is stored: in `units()` elements of type `unit`.
///
/// - `make(heads, dim, options)`: errors: invalid_argument, shape_mismatch (options that do not fit the sizes), out_of_memory.
/// - `write(head, row, stored, scratch)`: `row` [dim] must be finite. Returns how much was too large and became the nearest that there is.
/// - `read(head, stored, row, scratch)`: the row back, exactly or approximately, as floats [dim].
/// - `scratch_floats()`: size of the scratch memory that both need; what it holds means nothing.
template <class F>
concept row_format = std::copy_constructible<F> && std::movable<F> &&
    requires(const F& format, std::uint32_t number, const typename F::options& options, std::span<const typename F::scalar> row,
             std::span<typename F::unit> stored, std::span<const typename F::unit> kept, std::span<float> out) {
  { F::make(number, number, options) } noexcept -> std::same_as<result<F>>;
  { format.units() } noexcept -> std::same_as<std::size_t>;
  { format.scratch_floats() } noexcept -> std::same_as<std::size_t>;
  { format.write(number, row, stored, out) } noexcept -> std::same_as<std::uint64_t>;
  { format.read(number, kept, out, out) } noexcept;
};

/// Rows as they are.
template <cache_scalar Scalar>
class exact_rows {
 public:
  using scalar = Scalar;
  using unit = Scalar;
  struct options {};

  [[nodiscard]] static result<exact_rows> make(std::uint32_t, std::uint32_t dim, const options&) noexcept { return exact_rows(dim); }

  [[nodiscard]] std::size_t units() const noexcept { return dim_; }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return 0; }

  std::uint64_t write(std::uint32_t, std::span<const Scalar> row, std::span<Scalar> stored, std::span<float>) const noexcept {
    std::ranges::copy(row, stored.begin());
    return 0;
  }
  void read(std::uint32_t, std::span<const Scalar> stored, std::span<float> row, std::span<float>) const noexcept {
    std::ranges::transform(stored, row.begin(), [](Scalar value) { return value.to_float(); });
  }

 private:
  explicit exact_rows(std::uint32_t dim) noexcept : dim_(dim) {}

  std::uint32_t dim_;
};

/// Rows in few bits, by a quantiser whose groups are single tokens. Values beyond `largest_value` are clipped first and count as too large.
template <cache_scalar Scalar, quantiser Quantiser>
class packed_rows {
 public:
  using scalar = Scalar;
  using unit = std::byte;
  using options = typename Quantiser::options;

  static constexpr float largest_value = 1e30F;

  /// Errors: invalid_argument (groups of several tokens), and what the quantiser's `make` gives.
  [[nodiscard]] static result<packed_rows> make(std::uint32_t heads, std::uint32_t dim, const options& chosen) noexcept {
    auto made = Quantiser::make(heads, dim, chosen);
    if (!made) return made.error();
    if (made->group_tokens() != 1)
      return error{error_code::invalid_argument, "rows are packed one by one: the quantiser must not take tokens in groups"};
    return packed_rows(*std::move(made));
  }

  [[nodiscard]] std::size_t units() const noexcept { return quantiser_.packed_bytes(); }
  [[nodiscard]] std::size_t scratch_floats() const noexcept { return quantiser_.dim() + quantiser_.scratch_floats(); }

  std::uint64_t write(std::uint32_t head, std::span<const Scalar> row, std::span<std::byte> stored,
                      std::span<float> scratch) const noexcept {
    const auto values = scratch.first(row.size());
    std::uint64_t clipped = 0;
    for (std::size_t c = 0; c < row.size(); ++c) {
      const float value = row[c].to_float();
      values[c] = std::clamp(value, -largest_value, largest_value);
      clipped += values[c] != value ? 1 : 0;
    }
    return clipped + quantiser_.pack(head, values, stored, scratch.subspan(row.size()));
  }
  void read(std::uint32_t head, std::span<const std::byte> stored, std::span<float> row, std::span<float> scratch) const noexcept {
    quantiser_.unpack(head, stored, row, scratch.subspan(row.size()));
  }

 private:
  explicit packed_rows(Quantiser made) noexcept : quantiser_(std::move(made)) {}

  Quantiser quantiser_;
};

static_assert(row_format<exact_rows<bf16>>);

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvexact/compression/rows.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// In which sense speculative decoding gives what decoding on the full cache gives. "The same" is always on the same engine.
enum class guarantee : std::uint8_t {
  logic = 0,          ///< D0: the acceptance rule is exact for the logits that verification saw
  distribution = 1,   ///< D1: tokens have the distribution of plain sampling, if a row's logits are those of one-token decoding
  path = 2,           ///< D2: the same seed gives the tokens of plain sampling, under the same condition
  row_invariant = 3,  ///< D3: that condition was probed: logits, and K/V rows that can be read, have the same bits for any number of rows
  replay = 4,         ///< D4: not for any number of rows, but for one fixed width, to which all passes are padded, plain decoding too
};

[[nodiscard]] constexpr const char* to_string(guarantee level) noexcept {
  switch (level) {
    case guarantee::logic: return "D0, accept logic";
    case guarantee::distribution: return "D1, distribution";
    case guarantee::path: return "D2, path";
    case guarantee::row_invariant: return "D3, row-invariant";
    case guarantee::replay: return "D4, replay at a fixed width";
  }
  return "unknown";
}

/// What a probe found: whether the bits of a row depend on the other rows of its pass.
struct row_probe {
  bool logits_equal = true;
  bool rows_equal = true;  ///< K and V; of engines with a `readable_cache` only
  [[nodiscard]] bool invariant() const noexcept { return logits_equal && rows_equal; }
};

namespace detail {

/// The bits of a token's K and V in all layers.
template <class E>
void read_rows(const E& engine, std::uint64_t position, std::vector<std::byte>& bits) {
  bits.clear();
  if constexpr (readable_cache<E>) {
    for (std::uint32_t l = 0; l < engine.shape().layers(); ++l) {
      const auto rows = engine.rows(l, position);
      for (const cache_part part : cache_parts) {
        for (std::uint32_t h = 0; h < engine.shape().layer(l).kv_heads && engine.shape().layer(l).dim(part) > 0; ++h) {
          const auto* const row = row_of(rows.part(part), 0, h);
          const auto bytes = std::as_bytes(std::span(row, engine.shape().layer(l).dim(part)));
          bits.insert(bits.end(), bytes.begin(), bytes.end());
        }
      }
    }
  }
}

/// How a probe cuts tokens into passes: so many tokens at a time, filled up to `rows` rows with `pad`, which is forgotten again.
struct probe_passes {
  std::size_t tokens;
  std::size_t rows = 0;  ///< 0: not filled up
  std::uint32_t pad = 0;
};

/// What each token gave in the first passes, to compare others with.
class row_comparison {
 public:
  row_comparison(std::span<const std::uint32_t> tokens) noexcept : tokens_(tokens) {}

  /// The engine is left where it was, also where memory ends.
  template <positional_decoder E>
  [[nodiscard]] result<void> run(E& engine, const probe_passes& by) noexcept {
    const std::uint64_t begin = engine.length();
    const std::size_t most = std::max(by.tokens, by.rows);
    if (tokens_.size() + most - by.tokens > engine.max_rollback()) return error{error_code::out_of_range, "a probe that the engine could not take back"};
    result<void> outcome;
    try {
      outcome = compare(engine, by, std::vector<std::uint32_t>(most), std::vector<float>(most * engine.vocabulary()));
    } catch (...) {
      outcome = error{error_code::out_of_memory, "a probe of the engine"};
    }
    const result<void> restored = engine.truncate(std::min(begin, engine.length()));
    return outcome ? restored : outcome;
  }
  [[nodiscard]] const row_probe& found() const noexcept { return found_; }

 private:
  template <class E>
  result<void> compare(E& engine, const probe_passes& by, std::vector<std::uint32_t> block, std::vector<float> out) {
    const std::uint64_t begin = engine.length();
    const bool is_first = logits_.empty();
    std::vector<std::byte> bits;
    for (std::size_t first = 0; first < tokens_.size(); first += by.tokens) {
      const std::size_t count = std::min(by.tokens, tokens_.size() - first), run = by.rows == 0 ? count : by.rows;
      std::fill(block.begin(), block.end(), by.pad);
      std::copy_n(tokens_.begin() + static_cast<std::ptrdiff_t>(first), count, block.begin());
      const auto passed = engine.forward(std::span<const std::uint32_t>(block).first(run), std::span(out).first(run * engine.vocabulary()));
      if (!passed) return passed;
      const auto forgotten = engine.truncate(begin + first + count);
      if (!forgotten) return forgotten;
      for (std::size_t i = 0; i < count; ++i) {
        const auto row = std::span(out).subspan(i * engine.vocabulary(), engine.vocabulary());
        read_rows(engine, begin + first + i, bits);
        if (is_first) {
          logits_.emplace_back(row.begin(), row.end());
          rows_.push_back(bits);
          continue;
        }
        found_.logits_equal &= std::memcmp(row.data(), logits_[first + i].data(), row.size_bytes()) == 0;
        found_.rows_equal &= bits == rows_[first + i];
      }
    }
    return {};
  }

  std::span<const std::uint32_t> tokens_;
  std::vector<std::vector<float>> logits_;     // [tokens][vocabulary]
  std::vector<std::vector<std::byte>> rows_;  // [tokens], K and V of all layers
  row_probe found_;
};

}  // namespace detail

/// Whether the engine gives the tokens' logits and rows the same bits one by one and in passes of each of the `widths`, from where it
/// stands; it is left there. It needs room for the tokens and must be able to take them back. A probe finds differences, it cannot exclude
/// them: take at least as many tokens as the largest width, and widths of the size that will be used.
/// Errors: invalid_argument (no tokens, a width of 0), out_of_range (more than can be taken back), out_of_memory, the engine's.
template <positional_decoder E>
[[nodiscard]] result<row_probe> probe_row_invariance(E& engine, std::span<const std::uint32_t> tokens, std::span<const std::uint32_t> widths) noexcept {
  if (tokens.empty() || std::find(widths.begin(), widths.end(), 0U) != widths.end())
    return error{error_code::invalid_argument, "a probe needs tokens, and passes of at least one row"};
  detail::row_comparison comparison(tokens);
  const auto alone = comparison.run(engine, {.tokens = 1});
  if (!alone) return alone.error();
  for (const std::uint32_t width : widths) {
    const auto compared = comparison.run(engine, {.tokens = width});
    if (!compared) return compared.error();
  }
  return comparison.found();
}

/// The same for passes that always have `width` rows: whether a row's bits depend on its place and on what the others hold, which are further
/// tokens, or copies of `pad` or of the first token. Needs room for `width - 1` tokens more.
template <positional_decoder E>
[[nodiscard]] result<row_probe> probe_fixed_width(E& engine, std::span<const std::uint32_t> tokens, std::uint32_t width, std::uint32_t pad) noexcept {
  if (tokens.empty() || width < 2) return error{error_code::invalid_argument, "a probe needs tokens, and a width of at least two"};
  detail::row_comparison comparison(tokens);
  const auto alone = comparison.run(engine, {.tokens = 1, .rows = width, .pad = pad});
  if (!alone) return alone.error();
  for (std::uint32_t count = 1; count <= width; ++count) {
    const auto compared = comparison.run(engine, {.tokens = count, .rows = width, .pad = tokens[0]});
    if (!compared) return compared.error();
  }
  return comparison.found();
}

}  // namespace kvexact

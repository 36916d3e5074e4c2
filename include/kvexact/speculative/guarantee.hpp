// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <kvexact/core/result.hpp>
#include <kvexact/engine/positional_decoder.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// In which sense speculative decoding gives what decoding on the full cache gives. "The same" is always on the same engine.
enum class guarantee : std::uint8_t {
  logic = 0,          ///< D0: the acceptance rule is exact for the logits that verification saw
  distribution = 1,   ///< D1: tokens have the distribution of plain sampling, if a row's logits are those of one-token decoding
  path = 2,           ///< D2: the same seed gives the tokens of plain sampling, under the same condition
  row_invariant = 3,  ///< D3: that condition was probed: logits and K/V rows have the same bits for any number of rows
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
        for (std::uint32_t h = 0; h < engine.shape().layer(l).kv_heads; ++h) {
          const auto* const row = rows.part(part).data + static_cast<std::ptrdiff_t>(h) * rows.part(part).head_stride;
          const auto bytes = std::as_bytes(std::span(row, engine.shape().layer(l).dim(part)));
          bits.insert(bits.end(), bytes.begin(), bytes.end());
        }
      }
    }
  }
}

/// Runs tokens in passes of `width`, of which the last `pads` are `pad` and forgotten again, and compares what each token gives with
/// `logits` [tokens, vocabulary] and `rows` [tokens]; fills these first where they are empty. The engine is left where it was.
template <positional_decoder E>
[[nodiscard]] result<void> compare_passes(E& engine, std::span<const std::uint32_t> tokens, std::size_t width, std::size_t pads, std::uint32_t pad,
                                          std::vector<std::vector<float>>& logits, std::vector<std::vector<std::byte>>& rows, row_probe& found) {
  const std::uint64_t begin = engine.length();
  const bool is_first = logits.empty();
  std::vector<std::uint32_t> block(width);
  std::vector<float> out(width * engine.vocabulary());
  std::vector<std::byte> bits;
  result<void> outcome;
  for (std::size_t first = 0; first < tokens.size() && outcome; first += width - pads) {
    const std::size_t count = std::min(width - pads, tokens.size() - first);
    std::fill(block.begin(), block.end(), pad);
    std::copy_n(tokens.begin() + static_cast<std::ptrdiff_t>(first), count, block.begin());
    const std::size_t run = pads == 0 ? count : width;
    outcome = engine.forward(std::span(block).first(run), std::span(out).first(run * engine.vocabulary()));
    if (outcome) outcome = engine.truncate(begin + first + count);
    for (std::size_t i = 0; i < count && outcome; ++i) {
      const auto row = std::span(out).subspan(i * engine.vocabulary(), engine.vocabulary());
      read_rows(engine, begin + first + i, bits);
      if (is_first) {
        logits.emplace_back(row.begin(), row.end());
        rows.push_back(bits);
        continue;
      }
      found.logits_equal &= std::memcmp(row.data(), logits[first + i].data(), row.size_bytes()) == 0;
      found.rows_equal &= bits == rows[first + i];
    }
  }
  const result<void> restored = engine.truncate(std::min(begin, engine.length()));
  return outcome ? restored : outcome;
}

}  // namespace detail

/// Whether the engine gives the tokens' logits and rows the same bits one by one and in passes of each of the `widths`, from where it
/// stands; it is left there. It needs room for the tokens and must be able to take them back. A probe finds differences, it cannot exclude
/// them: take tokens and widths of the size that will be used. Errors: invalid_argument (no tokens, a width of 0), out_of_memory, the engine's.
template <positional_decoder E>
[[nodiscard]] result<row_probe> probe_row_invariance(E& engine, std::span<const std::uint32_t> tokens, std::span<const std::uint32_t> widths) noexcept {
  if (tokens.empty() || std::find(widths.begin(), widths.end(), 0U) != widths.end())
    return error{error_code::invalid_argument, "a probe needs tokens, and passes of at least one row"};
  try {
    row_probe found;
    std::vector<std::vector<float>> logits;
    std::vector<std::vector<std::byte>> rows;
    const auto alone = detail::compare_passes(engine, tokens, 1, 0, 0, logits, rows, found);
    if (!alone) return alone.error();
    for (const std::uint32_t width : widths) {
      const auto compared = detail::compare_passes(engine, tokens, width, 0, 0, logits, rows, found);
      if (!compared) return compared.error();
    }
    return found;
  } catch (...) {
    return error{error_code::out_of_memory, "a probe of the engine"};
  }
}

/// The same for passes that always have `width` rows: whether a row's bits depend on its place and on what the others hold, which are copies
/// of `pad` or further tokens. Needs room for `width` tokens more.
template <positional_decoder E>
[[nodiscard]] result<row_probe> probe_fixed_width(E& engine, std::span<const std::uint32_t> tokens, std::uint32_t width, std::uint32_t pad) noexcept {
  if (tokens.empty() || width < 2) return error{error_code::invalid_argument, "a probe needs tokens, and a width of at least two"};
  try {
    row_probe found;
    std::vector<std::vector<float>> logits;
    std::vector<std::vector<std::byte>> rows;
    for (std::size_t pads = width - 1; pads > 0; --pads) {
      const auto compared = detail::compare_passes(engine, tokens, width, pads, pads % 2 == 0 ? pad : tokens[0], logits, rows, found);
      if (!compared) return compared.error();
    }
    return found;
  } catch (...) {
    return error{error_code::out_of_memory, "a probe of the engine"};
  }
}

}  // namespace kvexact

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/compression/attention.hpp>
#include <kvexact/compression/buffer.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/rows.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/tensor/cache_shape.hpp>
#include <kvexact/tensor/kv_cache_view.hpp>

namespace kvexact {

/// All positions in few bits, K and V each by a `quantiser` of its own, except for two exact ends: the first `sinks` tokens, and at least the
/// newest `tail` ones. A group is quantised as soon as all its tokens are older than that; groups start at multiples of their size, counted
/// from position 0, so `sinks` must be one, too.
///
/// Memory: the exact rows of the `max_rollback` tokens before the tail are kept as well, since a truncation makes them the tail again.
template <class Scalar, quantiser Keys, quantiser Values>
class quantised {
 public:
  using scalar = Scalar;

  struct options {
    typename Keys::options keys;
    typename Values::options values;
    std::uint64_t sinks = 0;
    std::uint64_t tail = 0;
    std::uint64_t max_rollback = 32;
  };

  static constexpr std::uint64_t most_tail = 1U << 20;
  static constexpr float largest_value = 1e30F;

  /// Errors: invalid_argument (a layer without heads or without values, sinks that cut through a group, an unusable option of a quantiser),
  /// out_of_range (too many channels; a tail, sinks or a rollback of more than `most_tail`), and what the quantisers' `make` gives.
  [[nodiscard]] static result<quantised> make(const layer_shape& shape, const options& chosen) noexcept {
    if (const auto fits = cache_shape::uniform(1, shape); !fits) return fits.error();
    if (shape.value_dim == 0) return error{error_code::invalid_argument, "the layer stores keys and values in one: quantised needs both"};
    if (chosen.sinks > most_tail || chosen.tail > most_tail || chosen.max_rollback > most_tail)
      return error{error_code::out_of_range, "sinks, tail or rollback of quantised are too long"};
    auto keys = Keys::make(shape.kv_heads, shape.key_dim, chosen.keys);
    if (!keys) return keys.error();
    auto values = Values::make(shape.kv_heads, shape.value_dim, chosen.values);
    if (!values) return values.error();
    if (chosen.sinks % keys->group_tokens() != 0 || chosen.sinks % values->group_tokens() != 0)
      return error{error_code::invalid_argument, "the sinks of quantised must be a multiple of the groups"};
    return quantised(shape, chosen, *std::move(keys), *std::move(values));
  }

  [[nodiscard]] const layer_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return max_rollback_; }
  [[nodiscard]] std::size_t entries(std::uint32_t) const noexcept { return static_cast<std::size_t>(length_); }
  /// What the quantisers counted as too large for them since the sequence began, and values beyond `largest_value`, which are clipped first;
  /// what was taken back and quantised again counts again.
  [[nodiscard]] std::uint64_t saturated() const noexcept { return saturated_; }
  /// Tokens from `sinks` to this one are quantised.
  [[nodiscard]] std::uint64_t quantised_end(cache_part part) const noexcept { return part == cache_part::key ? keys_.end : values_.end; }
  /// The quantised groups, [group][head][packed_bytes of the part's quantiser].
  [[nodiscard]] std::span<const std::byte> packed(cache_part part) const noexcept { return part == cache_part::key ? keys_.packed : values_.packed; }

  [[nodiscard]] std::size_t bytes() const noexcept {
    return sizeof(*this) + detail::bytes_of(keys_.packed) + detail::bytes_of(values_.packed) + detail::bytes_of(keys_.sinks) +
           detail::bytes_of(values_.sinks) + detail::bytes_of(keys_.rows) + detail::bytes_of(values_.rows);
  }

  result<void> append(const layer_tensors<const Scalar>& rows, std::uint64_t tokens) noexcept {
    const auto usable = detail::expect_rows(shape_, rows, length_, tokens);
    if (!usable) return usable;
    try {
      // Memory first, so that nothing has changed where there is none. Rows are taken in slices, which bounds the exact ones.
      reserve(keys_, key_format_, tokens);
      reserve(values_, value_format_, tokens);
      packing_memory memory;
      memory.fit(key_format_, groups_to_pack(keys_, key_format_, length_ + tokens));
      memory.fit(value_format_, groups_to_pack(values_, value_format_, length_ + tokens));
      for (std::uint64_t done = 0; done < tokens; done += slice_tokens)
        append_slice(rows, done, std::min<std::uint64_t>(slice_tokens, tokens - done), memory);
    } catch (...) {
      return error{error_code::out_of_memory, "the draft cache of a layer"};
    }
    return {};
  }

  result<void> truncate(std::uint64_t length) noexcept {
    if (length > length_) return error{error_code::out_of_range, "a cache cannot be truncated to more than it holds"};
    const std::uint64_t key_end = end_at(key_format_, length), value_end = end_at(value_format_, length);
    if (std::min(key_end, value_end) < rows_begin_) return error{error_code::out_of_range, "exact rows so far back are no longer held"};
    shorten(keys_, key_format_, key_end, length);
    shorten(values_, value_format_, value_end, length);
    length_ = length;
    return {};
  }

  result<void> materialise(std::uint32_t head, const materialised_head& out) const noexcept {
    const auto count = entries(head);
    const auto usable = detail::expect_room(shape_, head, count, out);
    if (!usable) return usable;
    try {
      std::vector<float> scratch(std::max(key_format_.scratch_floats(), value_format_.scratch_floats()));
      for (std::size_t i = 0; i < count; ++i) out.positions[i] = i;
      unpack(keys_, key_format_, head, out.keys, scratch);
      unpack(values_, value_format_, head, out.values, scratch);
    } catch (...) {
      return error{error_code::out_of_memory, "scratch memory"};
    }
    return {};
  }

  result<void> attend(std::uint32_t head, const attention_call& call) const noexcept
    requires computes_on_codes<Keys> && computes_on_codes<Values>
  {
    const std::size_t queries = call.log_mass.size();
    const auto usable = detail::expect_call(shape_, head, entries(head), call);
    if (!usable) return usable;
    try {
      const auto count = static_cast<std::size_t>(length_);
      std::vector<float> scores(count + std::max(key_format_.group_tokens(), value_format_.group_tokens()));
      std::vector<float> work(std::max(key_format_.working_floats(), value_format_.working_floats()));
      std::vector<float> scratch(std::max({key_format_.scratch_floats(), value_format_.scratch_floats(), std::size_t{shape_.value_dim}}));
      for (std::size_t q = 0; q < queries; ++q) {
        score(head, call.queries.subspan(q * shape_.key_dim, shape_.key_dim), scores, work, scratch);
        call.log_mass[q] = detail::softmax(std::span(scores).first(count));
        sum(head, scores, call.out.subspan(q * shape_.value_dim, shape_.value_dim), work, scratch);
      }
    } catch (...) {
      return error{error_code::out_of_memory, "scratch memory"};
    }
    return {};
  }

 private:
  static constexpr std::uint64_t slice_tokens = 16;
  /// Groups that are packed or unpacked in one call of a quantiser.
  static constexpr std::size_t groups_at_once = slice_tokens;
  /// Rows are moved to the front only when so many before them are no longer needed.
  static constexpr std::uint64_t drop_tokens = 8;

  struct part_storage {
    std::vector<std::byte> packed;
    std::vector<Scalar> sinks;  // [sinks, heads, dim]
    std::vector<Scalar> rows;   // [length - rows_begin_, heads, dim]
    std::uint64_t end = 0;      // of what is quantised
  };

  /// For as many groups as are packed at once.
  struct packing_memory {
    std::vector<float> stage, scratch;
    std::vector<std::byte> together;

    template <class Format>
    void fit(const Format& format, std::size_t groups) {
      if (groups == 0) return;
      stage.resize(std::max(stage.size(), groups * format.group_tokens() * format.dim()));
      scratch.resize(std::max(scratch.size(), format.scratch_floats()));
      together.resize(std::max(together.size(), groups * format.packed_bytes()));
    }
  };

  quantised(const layer_shape& shape, const options& chosen, Keys keys, Values values) noexcept
      : shape_(shape), key_format_(std::move(keys)), value_format_(std::move(values)), sinks_(chosen.sinks), tail_(chosen.tail),
        max_rollback_(chosen.max_rollback), rows_begin_(chosen.sinks) {
    keys_.end = values_.end = sinks_;
  }

  template <class Format>
  [[nodiscard]] std::size_t channels(const Format& format) const noexcept {
    return std::size_t{shape_.kv_heads} * format.dim();
  }
  /// Where what is quantised ends in a cache of `length` tokens.
  template <class Format>
  [[nodiscard]] std::uint64_t end_at(const Format& format, std::uint64_t length) const noexcept {
    if (length < sinks_ + tail_) return sinks_;
    return std::max(sinks_, (length - tail_) / format.group_tokens() * format.group_tokens());
  }

  /// Most groups that are packed at once on the way to `length`.
  template <class Format>
  [[nodiscard]] std::size_t groups_to_pack(const part_storage& part, const Format& format, std::uint64_t length) const noexcept {
    return static_cast<std::size_t>(std::min<std::uint64_t>((end_at(format, length) - part.end) / format.group_tokens(), groups_at_once));
  }
  template <class Format>
  void reserve(part_storage& part, const Format& format, std::uint64_t tokens) const {
    const std::uint64_t groups = (end_at(format, length_ + tokens) - sinks_) / format.group_tokens();
    detail::reserve_sparingly(part.packed, static_cast<std::size_t>(groups) * shape_.kv_heads * format.packed_bytes());
    detail::reserve_sparingly(part.sinks, static_cast<std::size_t>(std::min(sinks_, length_ + tokens)) * channels(format));
    const std::uint64_t after_sinks = length_ + tokens > sinks_ ? length_ + tokens - sinks_ : 0;
    const std::uint64_t held = tail_ + max_rollback_ + std::max(key_format_.group_tokens(), value_format_.group_tokens()) + drop_tokens + slice_tokens;
    detail::reserve_sparingly(part.rows, static_cast<std::size_t>(std::min(after_sinks, held)) * channels(format));
  }

  void append_slice(const layer_tensors<const Scalar>& rows, std::uint64_t first, std::uint64_t tokens, packing_memory& memory) {
    store(keys_, key_format_, rows.key, first, tokens);
    store(values_, value_format_, rows.value, first, tokens);
    length_ += tokens;
    pack(keys_, key_format_, memory);
    pack(values_, value_format_, memory);
    // What a rollback can make exact again stays.
    const std::uint64_t back = length_ > max_rollback_ ? length_ - max_rollback_ : 0;
    const std::uint64_t begin = std::min(end_at(key_format_, back), end_at(value_format_, back));
    if (begin < rows_begin_ + drop_tokens) return;
    for (part_storage* const part : {&keys_, &values_}) {
      const std::size_t dropped = static_cast<std::size_t>(begin - rows_begin_) * (part == &keys_ ? channels(key_format_) : channels(value_format_));
      part->rows.erase(part->rows.begin(), part->rows.begin() + static_cast<std::ptrdiff_t>(dropped));
    }
    rows_begin_ = begin;
  }
  template <class Format>
  void store(part_storage& part, const Format& format, const strided_tensor<const Scalar>& from, std::uint64_t first, std::uint64_t tokens) const {
    for (std::uint64_t t = 0; t < tokens; ++t) {
      std::vector<Scalar>& to = length_ + t < sinks_ ? part.sinks : part.rows;
      for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
        const Scalar* const row = detail::row_of(from, first + t, h);
        to.insert(to.end(), row, row + format.dim());
      }
    }
  }
  /// The exact row of a token that is held.
  template <class Format>
  [[nodiscard]] const Scalar* exact_row(const part_storage& part, const Format& format, std::uint64_t token, std::uint32_t head) const noexcept {
    const std::vector<Scalar>& from = token < sinks_ ? part.sinks : part.rows;
    const std::uint64_t row = token < sinks_ ? token : token - rows_begin_;
    return from.data() + static_cast<std::size_t>(row) * channels(format) + std::size_t{head} * format.dim();
  }
  template <class Format>
  void pack(part_storage& part, const Format& format, packing_memory& memory) {
    const std::uint64_t end = end_at(format, length_);
    const std::size_t group = format.group_tokens(), bytes = format.packed_bytes();
    while (part.end < end) {
      const auto groups = std::min<std::size_t>(groups_at_once, static_cast<std::size_t>(end - part.end) / group);
      const auto stage = std::span(memory.stage).first(groups * group * format.dim());
      const auto together = std::span(memory.together).first(groups * bytes);
      const std::size_t at = part.packed.size();
      part.packed.resize(at + groups * shape_.kv_heads * bytes);
      // Heads stand side by side in each group; a quantiser takes one head's groups in a row.
      for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
        for (std::size_t t = 0; t < groups * group; ++t) {
          const Scalar* const row = exact_row(part, format, part.end + t, h);
          for (std::uint32_t c = 0; c < format.dim(); ++c) {
            const float value = row[c].to_float(), kept = std::clamp(value, -largest_value, largest_value);
            saturated_ += kept != value;
            stage[t * format.dim() + c] = kept;
          }
        }
        saturated_ += format.pack(h, stage, together, memory.scratch);
        for (std::size_t g = 0; g < groups; ++g)
          std::copy_n(together.begin() + static_cast<std::ptrdiff_t>(g * bytes), bytes,
                      part.packed.begin() + static_cast<std::ptrdiff_t>(at + (g * shape_.kv_heads + h) * bytes));
      }
      part.end += groups * group;
    }
  }
  template <class Format>
  void shorten(part_storage& part, const Format& format, std::uint64_t end, std::uint64_t length) noexcept {
    part.end = end;
    part.packed.resize(static_cast<std::size_t>((end - sinks_) / format.group_tokens()) * shape_.kv_heads * format.packed_bytes());
    if (length < length_) {
      part.rows.resize(static_cast<std::size_t>(length > rows_begin_ ? length - rows_begin_ : 0) * channels(format));
      part.sinks.resize(static_cast<std::size_t>(std::min(length, sinks_)) * channels(format));
    }
  }

  template <class Format>
  [[nodiscard]] std::span<const std::byte> group_of(const part_storage& part, const Format& format, std::uint64_t token,
                                                    std::uint32_t head) const noexcept {
    const auto group = static_cast<std::size_t>((token - sinks_) / format.group_tokens());
    return std::span(part.packed).subspan((group * shape_.kv_heads + head) * format.packed_bytes(), format.packed_bytes());
  }
  template <class Format>
  void unpack(const part_storage& part, const Format& format, std::uint32_t head, std::span<float> out, std::span<float> scratch) const {
    const std::size_t dim = format.dim();
    for (std::uint64_t t = 0; t < length_; ++t) {
      if (t >= sinks_ && t < part.end) {
        t = part.end - 1;
        continue;
      }
      const Scalar* const row = exact_row(part, format, t, head);
      for (std::size_t c = 0; c < dim; ++c) out[static_cast<std::size_t>(t) * dim + c] = row[c].to_float();
    }
    const auto all_groups = static_cast<std::size_t>(part.end - sinks_) / format.group_tokens();
    std::vector<std::byte> together(std::min(groups_at_once, all_groups) * format.packed_bytes());
    for (std::uint64_t t = sinks_; t < part.end;) {
      const std::size_t groups = std::min<std::size_t>(groups_at_once, static_cast<std::size_t>(part.end - t) / format.group_tokens());
      for (std::size_t g = 0; g < groups; ++g) {
        const auto from = group_of(part, format, t + g * format.group_tokens(), head);
        std::copy(from.begin(), from.end(), together.begin() + static_cast<std::ptrdiff_t>(g * format.packed_bytes()));
      }
      const std::size_t tokens = groups * format.group_tokens();
      format.unpack(head, std::span(together).first(groups * format.packed_bytes()), out.subspan(static_cast<std::size_t>(t) * dim, tokens * dim), scratch);
      t += tokens;
    }
  }

  void score(std::uint32_t head, std::span<const float> query, std::span<float> scores, std::span<float> work, std::span<float> scratch) const noexcept {
    key_format_.prepare(head, query, work.first(key_format_.working_floats()), scratch);
    for (std::uint64_t t = 0; t < length_;) {
      const auto at = static_cast<std::size_t>(t);
      if (t >= sinks_ && t < keys_.end) {
        key_format_.dot(work, group_of(keys_, key_format_, t, head), scores.subspan(at, key_format_.group_tokens()));
        t += key_format_.group_tokens();
        continue;
      }
      const Scalar* const row = exact_row(keys_, key_format_, t, head);
      float sum = 0;
      for (std::uint32_t c = 0; c < shape_.key_dim; ++c) sum += query[c] * row[c].to_float();
      scores[at] = sum;
      ++t;
    }
  }
  void sum(std::uint32_t head, std::span<const float> weights, std::span<float> out, std::span<float> work, std::span<float> scratch) const noexcept {
    const auto sums = work.first(value_format_.working_floats());
    std::fill(sums.begin(), sums.end(), 0.0F);
    float weight = 0;
    for (std::uint64_t t = sinks_; t < values_.end; t += value_format_.group_tokens()) {
      const auto group = weights.subspan(static_cast<std::size_t>(t), value_format_.group_tokens());
      value_format_.add_weighted(group, group_of(values_, value_format_, t, head), sums);
      for (const float each : group) weight += each;
    }
    value_format_.finish(head, weight, sums, out, scratch);
    for (std::uint64_t t = 0; t < length_; ++t) {
      if (t >= sinks_ && t < values_.end) {
        t = values_.end - 1;
        continue;
      }
      const Scalar* const row = exact_row(values_, value_format_, t, head);
      for (std::uint32_t c = 0; c < shape_.value_dim; ++c) out[c] += weights[static_cast<std::size_t>(t)] * row[c].to_float();
    }
  }

  layer_shape shape_;
  Keys key_format_;
  Values value_format_;
  std::uint64_t sinks_, tail_, max_rollback_;
  std::uint64_t length_ = 0, saturated_ = 0;
  part_storage keys_, values_;
  std::uint64_t rows_begin_;  // the exact rows held begin here
};

}  // namespace kvexact

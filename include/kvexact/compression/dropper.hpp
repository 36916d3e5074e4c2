// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvexact/compression/buffer.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/eviction_rule.hpp>
#include <kvexact/compression/quantiser.hpp>
#include <kvexact/compression/row_format.hpp>
#include <kvexact/compression/rows.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

namespace detail {

/// A query whose token may still be taken back.
template <class Summary>
struct pending_query {
  std::uint64_t position = 0;
  std::vector<bf16> row;  ///< [entries held then, lanes]
  [[no_unique_address]] Summary summary;
};

/// Options of a dropper with row formats that have some of their own.
template <class Rule, class Keys, class Values>
struct packed_dropper_options {
  typename Rule::options rule;
  typename Keys::options keys;
  typename Values::options values;
};

}  // namespace detail

/// The machinery of every method that drops tokens: a compressor that keeps the rows of some positions, one set per KV head, and decides at
/// fixed positions which ones (`dropper_options`). `Rule` says which are worth keeping; equal scores favour the lower position. `Keys` and
/// `Values` say how rows are stored, from the start; `options` are the rule's where both are exact, and {rule, keys, values} elsewhere.
///
/// The eviction of boundary b takes place when the token of position b is appended, so all queries before b count and the entries are those
/// of one eviction later as soon as the length exceeds b. What it dropped is kept aside, and the attention of the newest `max_rollback`
/// queries is kept row by row, until no truncation can undo it; then both are given up. A head thus never holds more than `max_rollback`
/// entries besides the most that it gives. Attention that is never handed over counts as 0.
///
/// Errors of `observe` besides those of the concept: invalid_argument (a weight that is not between 0 and 1, a token whose attention has
/// been handed over before), out_of_memory; then nothing has changed.
template <cache_scalar Scalar, eviction_rule Rule, row_format Keys = exact_rows<Scalar>, row_format Values = exact_rows<Scalar>>
class dropper {
  static_assert(std::same_as<typename Keys::scalar, Scalar> && std::same_as<typename Values::scalar, Scalar>,
                "kvexact: a dropper's row formats must store its scalars");

 public:
  using scalar = Scalar;
  using options = std::conditional_t<std::same_as<Keys, exact_rows<Scalar>> && std::same_as<Values, exact_rows<Scalar>>,
                                     typename Rule::options, detail::packed_dropper_options<Rule, Keys, Values>>;

  /// The longest sequence.
  static constexpr std::uint64_t max_tokens = ~std::uint32_t{0} - 2;
  /// The most entries of a head.
  static constexpr std::uint64_t max_entries = ~std::uint32_t{0};

  /// Errors: invalid_argument (no heads or keys, an interval of 0, no query heads), out_of_range (too many channels or query heads, options
  /// by which a head may hold more than `max_entries`), what the `make` of the rule and the row formats give, out_of_memory.
  [[nodiscard]] static result<dropper> make(const layer_shape& shape, const options& chosen) noexcept {
    if (const auto fits = cache_shape::uniform(1, shape); !fits) return fits.error();
    if constexpr (std::same_as<options, typename Rule::options>) {
      return assemble(shape, chosen, {}, {});
    } else {
      return assemble(shape, chosen.rule, chosen.keys, chosen.values);
    }
  }

  [[nodiscard]] const layer_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return rule_.eviction().max_rollback; }
  [[nodiscard]] const Rule& rule() const noexcept { return rule_; }
  /// No truncation goes below this length.
  [[nodiscard]] std::uint64_t settled() const noexcept { return greatest_ - std::min(greatest_, max_rollback()); }
  /// What the row formats counted as too large for them since the sequence began; what was taken back and appended again counts again.
  [[nodiscard]] std::uint64_t saturated() const noexcept { return saturated_; }

  [[nodiscard]] result<void> append(const layer_tensors<const Scalar>& rows, std::uint64_t tokens) noexcept {
    if (tokens > max_tokens - length_) return error{error_code::out_of_range, "the sequence is too long"};
    if (const auto usable = detail::expect_rows(shape_, rows, length_, tokens); !usable) return usable;
    std::vector<std::byte> memory;
    std::vector<float> row_memory;
    try {
      reserve(tokens);
      row_memory.resize(row_scratch());
      if (schedule_.next(length_) < length_ + tokens) {
        workspace counter;
        (void)scratch(counter, most_held(tokens), *this);
        memory.resize(counter.needed());
      }
    } catch (...) {
      return error{error_code::out_of_memory, "entries of a dropper"};
    }
    for (std::uint64_t t = 0; t < tokens; ++t) {
      if (schedule_.next(length_) == length_) evict(memory, row_memory);
      if (length_ == greatest_) {
        ++greatest_;
        settle();
      }
      push(rows, t, row_memory);
    }
    shrink();
    return {};
  }

  [[nodiscard]] result<void> truncate(std::uint64_t length) noexcept {
    if (length > length_) return error{error_code::out_of_range, "truncation to more tokens than there are"};
    if (length < settled()) return error{error_code::out_of_range, "truncation further back than max_rollback"};
    length_ = length;
    for (head_entries& head : heads_) {
      const auto kept = static_cast<std::size_t>(std::ranges::lower_bound(head.positions, length) - head.positions.begin());
      head.positions.resize(kept);
      head.gone.resize(kept);
      head.keys.resize(kept * key_format_.units());
      head.values.resize(kept * value_format_.units());
      head.states.resize(kept * lanes());
      for (std::uint32_t& from : head.gone) {
        if (from > length) from = never;
      }
      while (!head.pending.empty() && head.pending.back().position >= length) head.pending.pop_back();
    }
    return {};
  }

  /// 0 for a head that does not exist.
  [[nodiscard]] std::size_t entries(std::uint32_t head) const noexcept {
    if (head >= heads_.size()) return 0;
    return static_cast<std::size_t>(std::ranges::count_if(heads_[head].gone, [&](std::uint64_t from) { return from > length_; }));
  }

  [[nodiscard]] result<void> materialise(std::uint32_t head, const materialised_head& out) const noexcept {
    const auto usable = detail::expect_room(shape_, head, entries(head), out);
    if (!usable) return usable;
    const head_entries& from = heads_[head];
    try {
      std::vector<float> memory(row_scratch());
      std::size_t to = 0;
      for (std::size_t i = 0; i < from.positions.size(); ++i) {
        if (from.gone[i] <= length_) continue;
        out.positions[to] = from.positions[i];
        read(key_format_, from.keys, head, i, out.keys.subspan(to * shape_.key_dim, shape_.key_dim), memory);
        read(value_format_, from.values, head, i, out.values.subspan(to * shape_.value_dim, shape_.value_dim), memory);
        ++to;
      }
    } catch (...) {
      return error{error_code::out_of_memory, "scratch memory"};
    }
    return {};
  }

  [[nodiscard]] std::size_t bytes() const noexcept {
    using detail::bytes_of;
    std::size_t sum = sizeof(*this) + bytes_of(heads_);
    for (const head_entries& head : heads_) {
      sum += bytes_of(head.positions) + bytes_of(head.gone) + bytes_of(head.keys) + bytes_of(head.values) + bytes_of(head.states) +
             bytes_of(head.pending);
      for (const pending_query& query : head.pending) sum += bytes_of(query.row);
    }
    return sum;
  }

  /// Whether the attention of this token's query makes any difference.
  [[nodiscard]] bool observes(std::uint64_t position) const noexcept requires attention_scorer<Rule> {
    return position < max_tokens && position >= window_begin(schedule_.next(position + 1));
  }

  [[nodiscard]] result<void> observe(const attention_rows& rows) noexcept requires attention_scorer<Rule> {
    if (rows.head >= heads_.size()) return error{error_code::out_of_range, "no such head"};
    if (length_ == 0 || rows.position != length_ - 1) return error{error_code::out_of_range, "attention of a token that is not the newest"};
    const auto where = static_cast<std::int64_t>(rows.position);
    const std::size_t count = entries(rows.head);
    if (rows.weights.size() != count * rule_.eviction().query_heads)
      return error{error_code::shape_mismatch, "attention weights are [query heads, entries]"}.at_token(where);
    for (const float weight : rows.weights) {
      if (!(weight >= 0 && weight <= most_weight))
        return error{error_code::invalid_argument, "an attention weight is not between 0 and 1"}.at_token(where);
    }
    head_entries& head = heads_[rows.head];
    if (head.folded == rows.position + 1 || (!head.pending.empty() && head.pending.back().position == rows.position))
      return error{error_code::invalid_argument, "the attention of this token has been handed over before"}.at_token(where);
    if (!observes(rows.position)) return {};
    try {
      pending_query query{rows.position, std::vector<bf16>(head.positions.size() * lanes()), {}};
      std::vector<std::uint32_t> order(count);
      query.summary = rule_.reduce(scored(rows.position, false), rows.weights, std::span(query.row).first(count * lanes()), order);
      spread(head, query.row);
      if (rows.position < settled()) {
        fold(query, head.folded, head.states, head.summary);
      } else {
        head.pending.push_back(std::move(query));
      }
      return {};
    } catch (...) {
      return error{error_code::out_of_memory, "attention of a token"}.at_token(where);
    }
  }

 private:
  using summary_type = typename Rule::summary;
  using pending_query = detail::pending_query<summary_type>;

  static constexpr std::uint32_t never = ~std::uint32_t{0};
  /// 1, and what softmax in few bits may round it to.
  static constexpr float most_weight = 1.01F;

  /// Everything held of one head, in order of position: also what is dropped but may come back.
  struct head_entries {
    std::vector<std::uint32_t> positions;
    std::vector<std::uint32_t> gone;  ///< the length from which on an entry is dropped
    std::vector<typename Keys::unit> keys;
    std::vector<typename Values::unit> values;
    std::vector<float> states;           ///< [entries, lanes], of all queries that cannot be taken back
    std::vector<pending_query> pending;  ///< the others, oldest first
    std::uint64_t folded = 0;            ///< 1 + the newest position in `states`
    [[no_unique_address]] summary_type summary{};
  };

  /// Working memory of one eviction.
  struct scratch {
    scratch(workspace& space, std::size_t entries, const dropper& cache) noexcept
        : order(space.take<std::uint32_t>(entries)), held(space.take<std::uint32_t>(entries)) {
      if constexpr (attention_scorer<Rule>) {
        positions = space.take<std::uint64_t>(entries);
        states = space.take<float>(entries * cache.lanes());
        if constexpr (Rule::reads_values) values = space.take<float>(entries * cache.shape_.value_dim);
        scores = space.take<double>(entries);
        memory = cache.rule_.take(space, entries);
      }
    }

    std::span<std::uint32_t> order;
    std::span<std::uint32_t> held;
    std::span<std::uint64_t> positions;
    std::span<float> states;
    std::span<float> values;
    std::span<double> scores;
    [[no_unique_address]] typename Rule::memory memory{};
  };

  [[nodiscard]] static result<dropper> assemble(const layer_shape& shape, const typename Rule::options& chosen,
                                                const typename Keys::options& key_options,
                                                const typename Values::options& value_options) noexcept {
    result<Rule> rule = Rule::make(shape, chosen);
    if (!rule) return rule.error();
    const dropper_options& common = rule->eviction();
    if (common.interval == 0) return error{error_code::invalid_argument, "the interval of evictions is at least 1 token"};
    if (common.query_heads == 0) return error{error_code::invalid_argument, "a KV head has at least one query head"};
    if (common.query_heads > cache_shape::max_channels) return error{error_code::out_of_range, "too many query heads"};
    if (std::max(detail::most_kept(common), common.first_eviction) > max_entries - common.max_rollback)
      return error{error_code::out_of_range, "a head would hold more entries than there can be"};
    result<Keys> keys = Keys::make(shape.kv_heads, shape.key_dim, key_options);
    if (!keys) return keys.error();
    result<Values> values = Values::make(shape.kv_heads, shape.value_dim, value_options);
    if (!values) return values.error();
    try {
      return dropper(shape, *std::move(rule), *std::move(keys), *std::move(values));
    } catch (...) {
      return error{error_code::out_of_memory, "heads of a dropper"};
    }
  }

  dropper(const layer_shape& shape, Rule rule, Keys keys, Values values)
      : shape_(shape),
        rule_(std::move(rule)),
        key_format_(std::move(keys)),
        value_format_(std::move(values)),
        schedule_(detail::eviction_schedule::of(rule_.eviction())),
        next_drop_(schedule_.first),
        heads_(shape.kv_heads) {}

  [[nodiscard]] std::uint32_t lanes() const noexcept {
    if constexpr (attention_scorer<Rule>) return rule_.lanes();
    return 0;
  }

  /// The most entries that a head can ever hold from now on.
  [[nodiscard]] std::size_t limit() const noexcept {
    const std::uint64_t later = detail::most_kept(rule_.eviction());
    const std::uint64_t most = next_drop_ == schedule_.first ? std::max(schedule_.first, later) : later;
    return static_cast<std::size_t>(most + max_rollback());
  }

  /// Position of the first query that counts for a boundary.
  [[nodiscard]] std::uint64_t window_begin(std::uint64_t boundary) const noexcept { return boundary - std::min(boundary, rule_.queries()); }

  [[nodiscard]] scored_query scored(std::uint64_t position, bool first) const noexcept {
    return {schedule_.next(position + 1) - position, first};
  }

  [[nodiscard]] std::size_t row_scratch() const noexcept { return std::max(key_format_.scratch_floats(), value_format_.scratch_floats()); }

  template <class Format, class Unit>
  static void read(const Format& format, const std::vector<Unit>& from, std::uint32_t head, std::size_t entry, std::span<float> row,
                   std::span<float> memory) noexcept {
    format.read(head, std::span(from).subspan(entry * format.units(), format.units()), row, memory);
  }

  template <class Format, class Unit>
  void write(const Format& format, std::vector<Unit>& to, std::uint32_t head, std::span<const Scalar> row,
             std::span<float> memory) noexcept {
    to.resize(to.size() + format.units());
    saturated_ += format.write(head, row, std::span(to).last(format.units()), memory);
  }

  /// The most entries of a head at any time while `tokens` more are appended.
  [[nodiscard]] std::size_t most_held(std::uint64_t tokens) const noexcept {
    return static_cast<std::size_t>(std::min<std::uint64_t>(limit(), heads_[0].positions.size() + tokens));
  }

  /// Calls visit(array, elements an entry) for everything that an entry has.
  template <class Visit>
  void for_each_array(head_entries& head, Visit&& visit) const {
    visit(head.keys, key_format_.units());
    if (shape_.value_dim > 0) visit(head.values, value_format_.units());
    if (lanes() > 0) visit(head.states, std::size_t{lanes()});
    visit(head.positions, std::size_t{1});
    visit(head.gone, std::size_t{1});
  }

  template <class T>
  static void set_capacity(std::vector<T>& array, std::size_t capacity) {
    std::vector<T> moved;
    moved.reserve(capacity);
    moved.assign(array.begin(), array.end());
    array.swap(moved);
  }

  /// Room for `tokens` more, as far as they can be held at the same time. Throws std::bad_alloc.
  void reserve(std::uint64_t tokens) {
    const std::size_t needed = most_held(tokens);
    const std::size_t capacity = std::min(limit(), needed + needed / 16);
    for (head_entries& head : heads_) {
      for_each_array(head, [&](auto& array, std::size_t each) {
        if (array.capacity() < needed * each) set_capacity(array, capacity * each);
      });
    }
  }

  /// After a first eviction that came late most of the room is never needed again.
  void shrink() noexcept {
    const std::size_t most = limit();
    try {
      for (head_entries& head : heads_) {
        for_each_array(head, [&](auto& array, std::size_t each) {
          if (array.capacity() > most * each) set_capacity(array, most * each);
        });
      }
    } catch (...) {  // no memory to copy it to: the room stays
    }
  }

  void push(const layer_tensors<const Scalar>& rows, std::uint64_t token, std::span<float> memory) noexcept {
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
      head_entries& head = heads_[h];
      head.positions.push_back(static_cast<std::uint32_t>(length_));
      head.gone.push_back(never);
      write(key_format_, head.keys, h, {detail::row_of(rows.key, token, h), shape_.key_dim}, memory);
      if (shape_.value_dim > 0) write(value_format_, head.values, h, {detail::row_of(rows.value, token, h), shape_.value_dim}, memory);
      head.states.resize(head.states.size() + lanes());
    }
    ++length_;
  }

  /// Spreads a row over the entries that are not dropped to one over all that are held.
  void spread(const head_entries& head, std::span<bf16> row) const noexcept {
    const std::size_t lanes_each = lanes();
    std::size_t from = entries_of(head);
    for (std::size_t to = head.positions.size(); to-- > 0;) {
      const bool present = head.gone[to] > length_;
      from -= present ? 1 : 0;
      for (std::size_t lane = 0; lane < lanes_each; ++lane) row[to * lanes_each + lane] = present ? row[from * lanes_each + lane] : bf16{};
    }
  }

  [[nodiscard]] std::size_t entries_of(const head_entries& head) const noexcept {
    return entries(static_cast<std::uint32_t>(&head - heads_.data()));
  }

  void fold(const pending_query& query, std::uint64_t& folded, std::span<float> states, summary_type& sum) const noexcept {
    const bool first = folded <= window_begin(schedule_.next(query.position + 1));
    rule_.fold(scored(query.position, first), query.row, query.summary, states.first(query.row.size()), sum);
    folded = query.position + 1;
  }

  /// Gives up what no truncation can bring back.
  void settle() noexcept {
    const std::uint64_t floor = settled();
    if constexpr (attention_scorer<Rule>) {
      for (head_entries& head : heads_) {
        auto query = head.pending.begin();
        for (; query != head.pending.end() && query->position < floor; ++query) fold(*query, head.folded, head.states, head.summary);
        head.pending.erase(head.pending.begin(), query);
      }
    }
    if (floor <= next_drop_) return;
    next_drop_ = schedule_.next(floor);
    for (head_entries& head : heads_) drop(head, floor);
  }

  void drop(head_entries& head, std::uint64_t floor) const noexcept {
    // Runs over `gone` itself last.
    const auto keep = [&](auto& array, std::size_t each) {
      std::size_t to = 0;
      for (std::size_t i = 0; i * each < array.size(); ++i) {
        if (head.gone[i] <= floor) continue;
        if (to != i) std::copy_n(array.data() + i * each, each, array.data() + to * each);
        ++to;
      }
      array.resize(to * each);
    };
    for (pending_query& query : head.pending) keep(query.row, lanes());
    for_each_array(head, keep);
  }

  /// The eviction of the boundary `length_`.
  void evict(std::span<std::byte> memory, std::span<float> row_memory) noexcept {
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
      workspace space(memory);
      scratch work(space, heads_[h].positions.size(), *this);
      evict(h, work, row_memory);
    }
  }

  void evict(std::uint32_t h, scratch& work, std::span<float> row_memory) noexcept {
    const dropper_options& common = rule_.eviction();
    head_entries& head = heads_[h];
    const std::uint64_t newest = length_ - std::min<std::uint64_t>(length_, common.window);
    std::size_t count = 0;
    std::size_t sinks = 0;
    std::size_t older = 0;
    for (std::size_t i = 0; i < head.positions.size(); ++i) {
      if (head.gone[i] <= length_) continue;
      work.held[count++] = static_cast<std::uint32_t>(i);
      sinks += head.positions[i] < std::min<std::uint64_t>(common.sinks, newest) ? 1 : 0;
      older += head.positions[i] < newest ? 1 : 0;
    }
    if (older - sinks <= common.budget) return;
    const std::span<std::uint32_t> candidates = work.order.first(older - sinks);
    for (std::size_t i = 0; i < candidates.size(); ++i) candidates[i] = static_cast<std::uint32_t>(sinks + i);
    if constexpr (attention_scorer<Rule>) {
      judge(h, older, work.held.first(count), work, row_memory);
      detail::best_first<double>(candidates, common.budget, work.scores);
    }
    for (const std::uint32_t each : candidates.subspan(common.budget)) head.gone[work.held[each]] = static_cast<std::uint32_t>(length_ + 1);
  }

  void judge(std::uint32_t h, std::size_t older, std::span<const std::uint32_t> held, scratch& work,
             std::span<float> row_memory) const noexcept {
    const head_entries& head = heads_[h];
    const std::size_t lanes_each = lanes();
    std::uint64_t folded = head.folded;
    summary_type sum = head.summary;
    std::ranges::copy(head.states, work.states.begin());
    for (const pending_query& query : head.pending) fold(query, folded, work.states, sum);
    if (folded <= window_begin(length_)) {  // all of it counted for earlier boundaries only
      std::ranges::fill(work.states, 0.0F);
      sum = {};
    }
    for (std::size_t i = 0; i < held.size(); ++i) {
      work.positions[i] = head.positions[held[i]];
      for (std::size_t lane = 0; lane < lanes_each; ++lane) work.states[i * lanes_each + lane] = work.states[held[i] * lanes_each + lane];
      if constexpr (Rule::reads_values)
        read(value_format_, head.values, h, held[i], work.values.subspan(i * shape_.value_dim, shape_.value_dim), row_memory);
    }
    rule_.score(judged_entries<summary_type>{h, older, work.positions.first(held.size()), work.states.first(held.size() * lanes_each),
                                             work.values, sum},
                work.memory, work.scores.first(older));
  }

  layer_shape shape_;
  Rule rule_;
  Keys key_format_;
  Values value_format_;
  detail::eviction_schedule schedule_;
  std::uint64_t length_ = 0;
  std::uint64_t greatest_ = 0;   ///< length so far
  std::uint64_t next_drop_ = 0;  ///< the first boundary whose eviction can still be undone
  std::uint64_t saturated_ = 0;
  std::vector<head_entries> heads_;
};

/// A dropper that keeps what it keeps in few bits: `quantised_dropper<bf16, window_attention, symmetric<4>, turbo_quant<4>>` is SnapKV on
/// int4 keys and TurboQuant values. The quantisers' groups are single tokens.
template <cache_scalar Scalar, eviction_rule Rule, quantiser Keys, quantiser Values>
using quantised_dropper = dropper<Scalar, Rule, packed_rows<Scalar, Keys>, packed_rows<Scalar, Values>>;

}  // namespace kvexact

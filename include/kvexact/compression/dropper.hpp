// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <kvexact/compression/buffer.hpp>
#include <kvexact/compression/compressor.hpp>
#include <kvexact/compression/rows.hpp>
#include <kvexact/core/result.hpp>
#include <kvexact/core/workspace.hpp>
#include <kvexact/numeric/bf16.hpp>
#include <kvexact/numeric/number_format.hpp>
#include <kvexact/tensor/cache_shape.hpp>

namespace kvexact {

/// What a dropper keeps, and when it drops the rest: at the boundaries `first_eviction`, `first_eviction + interval`, ... (tokens of the
/// sequence). At a boundary a head keeps its first `sinks` tokens, the newest `window` before the boundary, and of all others the `budget`
/// best. Everything after the last boundary is kept, so a head gives at most max(first_eviction, sinks + budget + window + interval)
/// entries.
struct dropper_options {
  std::uint32_t sinks = 4;
  std::uint32_t budget = 256;
  std::uint32_t window = 32;
  std::uint64_t first_eviction = 0;  ///< 0: sinks + budget + window + interval
  std::uint32_t interval = 64;       ///< at least 1
  std::uint32_t max_rollback = 32;
  std::uint32_t query_heads = 1;  ///< of one KV head
};

/// The query of one token, as a scorer sees it.
struct scored_query {
  std::uint64_t before = 0;  ///< how far it lies before the boundary for which it counts; the newest one: 1
  bool first = false;        ///< nothing that counts for this boundary has been folded before
};

/// The entries of one head at a boundary. `states` [entries, lanes]: what the scorer has folded of the queries; `values`: the rows of V.
/// The first `older` entries lie before the protected window.
template <class Scalar, class Summary>
struct judged_entries {
  std::uint32_t head = 0;
  std::size_t older = 0;
  std::span<const std::uint64_t> positions;
  std::span<const float> states;
  std::span<const Scalar* const> values;
  Summary summary;
};

/// What a dropper is told by its method: `make` checks the options (errors: invalid_argument, shape_mismatch), `eviction()` gives those
/// that all methods share. `summary` and `memory` are of use to an `attention_scorer` and empty elsewhere.
template <class S>
concept eviction_rule = std::movable<S> && std::copyable<typename S::summary> && std::copyable<typename S::memory> &&
    requires(const S& rule, const layer_shape& shape, const typename S::options& options) {
  { S::make(shape, options) }
  noexcept->std::same_as<result<S>>;
  { rule.eviction() }
  noexcept->std::same_as<const dropper_options&>;
};

/// A rule that judges tokens by the attention they get. It must not keep anything itself: what it says depends on its arguments alone.
///
/// - `queries()`: how many queries before a boundary count for it; at most `interval`, or all with `scorer_all_queries`.
/// - `lanes()`: floats that an entry needs of a query, and of all queries so far.
/// - `reduce(query, weights, row, order)`: from [query heads, entries] to `row` [entries, lanes]; what else a query tells is the `summary`.
///   `order` [entries] is working memory.
/// - `fold(query, row, summary, states, sum)`: takes a query into `states` [entries, lanes], which are 0 for tokens that no query has seen.
///   Queries come oldest first. Weights of tokens that are not held any more are 0.
/// - `score(entries, memory, scores)`: how much the first `older` entries are worth, all finite; the larger, the better. `memory` is what
///   `take(workspace, entries)` gave for at least as many entries.
template <class S>
concept attention_scorer = eviction_rule<S> &&
    requires(const S& scorer, workspace& space, std::size_t entries, const scored_query& query, std::span<const float> weights,
             std::span<float> row, std::span<std::uint32_t> order, typename S::summary& sum, const typename S::summary& of_row,
             const judged_entries<bf16, typename S::summary>& judged, std::span<double> scores, typename S::memory& memory) {
  { scorer.queries() }
  noexcept->std::same_as<std::uint64_t>;
  { scorer.lanes() }
  noexcept->std::same_as<std::uint32_t>;
  { scorer.take(space, entries) }
  noexcept->std::same_as<typename S::memory>;
  { scorer.reduce(query, weights, row, order) }
  noexcept->std::same_as<typename S::summary>;
  { scorer.fold(query, weights, of_row, row, sum) }
  noexcept;
  { scorer.score(judged, memory, scores) }
  noexcept;
};

inline constexpr std::uint64_t scorer_all_queries = ~std::uint64_t{0};

namespace detail {

/// What a head keeps at a boundary and appends until the next.
[[nodiscard]] inline std::uint64_t most_kept(const dropper_options& options) noexcept {
  return std::uint64_t{options.sinks} + options.budget + options.window + options.interval;
}

/// The absolute positions at which a dropper evicts.
struct eviction_schedule {
  std::uint64_t first = 1;
  std::uint64_t interval = 1;

  [[nodiscard]] static eviction_schedule of(const dropper_options& options) noexcept {
    return {options.first_eviction == 0 ? most_kept(options) : options.first_eviction, options.interval};
  }
  /// The first boundary that is at least `length`.
  [[nodiscard]] std::uint64_t next(std::uint64_t length) const noexcept {
    if (length <= first) return first;
    return first + (length - first + interval - 1) / interval * interval;
  }
};

/// [query heads, entries] to [entries].
inline void mean_over_heads(std::span<const float> weights, std::span<float> mean) noexcept {
  const std::size_t heads = weights.size() / mean.size();
  for (std::size_t i = 0; i < mean.size(); ++i) {
    float sum = 0;
    for (std::size_t h = 0; h < heads; ++h) sum += weights[h * mean.size() + i];
    mean[i] = sum / static_cast<float>(heads);
  }
}

/// Moves the `count` indices with the largest scores to the front; of equal scores the lower index counts as larger.
template <class Score>
void best_first(std::span<std::uint32_t> indices, std::size_t count, std::span<const Score> scores) noexcept {
  std::ranges::nth_element(indices, indices.begin() + static_cast<std::ptrdiff_t>(count),
                           [&](std::uint32_t a, std::uint32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
}

/// Of the methods that let the queries of the protected window decide. Windows do not overlap, so that one sum an entry is enough.
[[nodiscard]] inline result<void> check_window(const dropper_options& options) noexcept {
  if (options.window == 0) return error{error_code::invalid_argument, "the queries of the window decide: it is at least 1 token"};
  if (options.window > options.interval)
    return error{error_code::invalid_argument, "the queries of the window decide: it is at most as long as the interval of evictions"};
  return {};
}

/// A query whose token may still be taken back.
template <class Summary>
struct pending_query {
  std::uint64_t position = 0;
  std::vector<float> row;  ///< [entries held then, lanes]
  [[no_unique_address]] Summary summary;
};

}  // namespace detail

/// The machinery of every method that drops tokens: a compressor that keeps the exact rows of some positions, one set per KV head, and
/// decides at fixed positions which ones (`dropper_options`). `Rule` says which are worth keeping; equal scores favour the lower position.
///
/// The eviction of boundary b takes place when the token of position b is appended, so all queries before b count and the entries are those
/// of one eviction later as soon as the length exceeds b. What it dropped is kept aside, and the attention of the newest `max_rollback`
/// queries is kept row by row, until no truncation can undo it; then both are given up. A head thus never holds more than `max_rollback`
/// entries besides the most that it gives. Attention that is never handed over counts as 0.
///
/// Errors of `observe` besides those of the concept: invalid_argument (a weight that is negative or not finite, a token whose attention has
/// been handed over before), out_of_memory; then nothing has changed.
template <cache_scalar Scalar, eviction_rule Rule>
class dropper {
 public:
  using scalar = Scalar;
  using options = typename Rule::options;

  /// The longest sequence.
  static constexpr std::uint64_t max_tokens = std::uint64_t{1} << 48;
  /// The most entries of a head.
  static constexpr std::uint64_t max_entries = ~std::uint32_t{0};

  /// Errors: invalid_argument (no heads or keys, an interval of 0, no query heads, what the method says), out_of_range (too many channels
  /// or query heads, options by which a head may hold more than `max_entries`), shape_mismatch (what the method says), out_of_memory.
  [[nodiscard]] static result<dropper> make(const layer_shape& shape, const options& chosen) noexcept {
    if (const auto fits = cache_shape::uniform(1, shape); !fits) return fits.error();
    result<Rule> rule = Rule::make(shape, chosen);
    if (!rule) return rule.error();
    const dropper_options& common = rule->eviction();
    if (common.interval == 0) return error{error_code::invalid_argument, "the interval of evictions is at least 1 token"};
    if (common.query_heads == 0) return error{error_code::invalid_argument, "a KV head has at least one query head"};
    if (common.query_heads > cache_shape::max_channels) return error{error_code::out_of_range, "too many query heads"};
    if (std::max(detail::most_kept(common), common.first_eviction) > max_entries - common.max_rollback)
      return error{error_code::out_of_range, "a head would hold more entries than there can be"};
    try {
      return dropper(shape, std::move(*rule));
    } catch (...) {
      return error{error_code::out_of_memory, "heads of a dropper"};
    }
  }

  [[nodiscard]] const layer_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return rule_.eviction().max_rollback; }
  [[nodiscard]] const Rule& rule() const noexcept { return rule_; }

  [[nodiscard]] result<void> append(const layer_tensors<const Scalar>& rows, std::uint64_t tokens) noexcept {
    if (tokens == 0) return {};
    if (const auto good = check(rows, tokens); !good) return good;
    std::vector<std::byte> memory;
    try {
      reserve(tokens);
      if (schedule_.next(length_) < length_ + tokens) {
        workspace counter;
        (void)scratch(counter, most_held(tokens), rule_);
        memory.resize(counter.needed());
      }
    } catch (...) {
      return error{error_code::out_of_memory, "entries of a dropper"};
    }
    for (std::uint64_t t = 0; t < tokens; ++t) {
      if (schedule_.next(length_) == length_) evict(memory);
      if (length_ == greatest_) {
        ++greatest_;
        settle();
      }
      push(rows, t);
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
      head.keys.resize(kept * shape_.key_dim);
      head.values.resize(kept * shape_.value_dim);
      head.states.resize(kept * lanes());
      for (std::uint64_t& from : head.gone) {
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
    std::size_t to = 0;
    for (std::size_t i = 0; i < from.positions.size(); ++i) {
      if (from.gone[i] <= length_) continue;
      out.positions[to] = from.positions[i];
      const auto number = [](Scalar value) { return value.to_float(); };
      std::ranges::transform(from.key(i, shape_), out.keys.begin() + static_cast<std::ptrdiff_t>(to * shape_.key_dim), number);
      std::ranges::transform(from.value(i, shape_), out.values.begin() + static_cast<std::ptrdiff_t>(to * shape_.value_dim), number);
      ++to;
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
      if (!(weight >= 0 && weight <= std::numeric_limits<float>::max()))
        return error{error_code::invalid_argument, "an attention weight is negative or not finite"}.at_token(where);
    }
    head_entries& head = heads_[rows.head];
    if (head.folded == rows.position + 1 || (!head.pending.empty() && head.pending.back().position == rows.position))
      return error{error_code::invalid_argument, "the attention of this token has been handed over before"}.at_token(where);
    if (!observes(rows.position)) return {};
    try {
      pending_query query{rows.position, std::vector<float>(head.positions.size() * lanes()), {}};
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

  static constexpr std::uint64_t never = ~std::uint64_t{0};

  /// Everything held of one head, in order of position: also what is dropped but may come back.
  struct head_entries {
    std::vector<std::uint64_t> positions;
    std::vector<std::uint64_t> gone;  ///< the length from which on an entry is dropped
    std::vector<Scalar> keys;
    std::vector<Scalar> values;
    std::vector<float> states;           ///< [entries, lanes], of all queries that cannot be taken back
    std::vector<pending_query> pending;  ///< the others, oldest first
    std::uint64_t folded = 0;            ///< 1 + the newest position in `states`
    [[no_unique_address]] summary_type summary{};

    [[nodiscard]] std::span<const Scalar> key(std::size_t i, const layer_shape& shape) const noexcept {
      return std::span(keys).subspan(i * shape.key_dim, shape.key_dim);
    }
    [[nodiscard]] std::span<const Scalar> value(std::size_t i, const layer_shape& shape) const noexcept {
      return std::span(values).subspan(i * shape.value_dim, shape.value_dim);
    }
  };

  /// Working memory of one eviction.
  struct scratch {
    scratch(workspace& space, std::size_t entries, const Rule& rule) noexcept
        : order(space.take<std::uint32_t>(entries)), held(space.take<std::uint32_t>(entries)) {
      if constexpr (attention_scorer<Rule>) {
        positions = space.take<std::uint64_t>(entries);
        states = space.take<float>(entries * rule.lanes());
        values = space.take<const Scalar*>(entries);
        scores = space.take<double>(entries);
        memory = rule.take(space, entries);
      }
    }

    std::span<std::uint32_t> order;
    std::span<std::uint32_t> held;
    std::span<std::uint64_t> positions;
    std::span<float> states;
    std::span<const Scalar*> values;
    std::span<double> scores;
    [[no_unique_address]] typename Rule::memory memory{};
  };

  dropper(const layer_shape& shape, Rule rule)
      : shape_(shape),
        rule_(std::move(rule)),
        schedule_(detail::eviction_schedule::of(rule_.eviction())),
        next_drop_(schedule_.first),
        heads_(shape.kv_heads) {}

  [[nodiscard]] std::uint32_t lanes() const noexcept {
    if constexpr (attention_scorer<Rule>) return rule_.lanes();
    return 0;
  }

  /// No truncation goes below this length.
  [[nodiscard]] std::uint64_t settled() const noexcept { return greatest_ - std::min(greatest_, max_rollback()); }

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

  [[nodiscard]] result<void> check(const layer_tensors<const Scalar>& rows, std::uint64_t tokens) const noexcept {
    if (tokens > max_tokens - length_) return error{error_code::out_of_range, "the sequence is too long"};
    for (const cache_part part : cache_parts) {
      if (shape_.dim(part) > 0 && rows.part(part).data == nullptr) return error{error_code::invalid_argument, "a layer has no data"};
    }
    for (std::uint64_t t = 0; t < tokens; ++t) {
      for (const cache_part part : cache_parts) {
        for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
          if (!std::ranges::all_of(row_of(rows, part, t, head), &Scalar::is_finite))
            return error{error_code::invalid_argument, "a value is not finite"}.at_token(static_cast<std::int64_t>(length_ + t));
        }
      }
    }
    return {};
  }

  [[nodiscard]] std::span<const Scalar> row_of(const layer_tensors<const Scalar>& rows, cache_part part, std::uint64_t token,
                                               std::uint32_t head) const noexcept {
    if (shape_.dim(part) == 0) return {};
    return {detail::row_of(rows.part(part), token, head), shape_.dim(part)};
  }

  /// The most entries of a head at any time while `tokens` more are appended.
  [[nodiscard]] std::size_t most_held(std::uint64_t tokens) const noexcept {
    return static_cast<std::size_t>(std::min<std::uint64_t>(limit(), heads_[0].positions.size() + tokens));
  }

  /// Calls visit(array, elements an entry) for everything that an entry has.
  template <class Visit>
  void for_each_array(head_entries& head, Visit&& visit) const {
    visit(head.keys, std::size_t{shape_.key_dim});
    if (shape_.value_dim > 0) visit(head.values, std::size_t{shape_.value_dim});
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

  void push(const layer_tensors<const Scalar>& rows, std::uint64_t token) noexcept {
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
      head_entries& head = heads_[h];
      head.positions.push_back(length_);
      head.gone.push_back(never);
      const std::span<const Scalar> key = row_of(rows, cache_part::key, token, h);
      const std::span<const Scalar> value = row_of(rows, cache_part::value, token, h);
      head.keys.insert(head.keys.end(), key.begin(), key.end());
      head.values.insert(head.values.end(), value.begin(), value.end());
      head.states.resize(head.states.size() + lanes());
    }
    ++length_;
  }

  /// Spreads a row over the entries that are not dropped to one over all that are held.
  void spread(const head_entries& head, std::span<float> row) const noexcept {
    const std::size_t lanes_each = lanes();
    std::size_t from = entries_of(head);
    for (std::size_t to = head.positions.size(); to-- > 0;) {
      const bool present = head.gone[to] > length_;
      from -= present ? 1 : 0;
      for (std::size_t lane = 0; lane < lanes_each; ++lane) row[to * lanes_each + lane] = present ? row[from * lanes_each + lane] : 0;
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
  void evict(std::span<std::byte> memory) noexcept {
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
      workspace space(memory);
      scratch work(space, heads_[h].positions.size(), rule_);
      evict(h, work);
    }
  }

  void evict(std::uint32_t h, scratch& work) noexcept {
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
      judge(h, older, work.held.first(count), work);
      detail::best_first<double>(candidates, common.budget, work.scores);
    }
    for (const std::uint32_t each : candidates.subspan(common.budget)) head.gone[work.held[each]] = length_ + 1;
  }

  void judge(std::uint32_t h, std::size_t older, std::span<const std::uint32_t> held, scratch& work) const noexcept {
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
      work.values[i] = head.value(held[i], shape_).data();
      for (std::size_t lane = 0; lane < lanes_each; ++lane) work.states[i * lanes_each + lane] = work.states[held[i] * lanes_each + lane];
    }
    rule_.score(judged_entries<Scalar, summary_type>{h, older, work.positions.first(held.size()),
                                                     work.states.first(held.size() * lanes_each), work.values.first(held.size()), sum},
                work.memory, work.scores.first(older));
  }

  layer_shape shape_;
  Rule rule_;
  detail::eviction_schedule schedule_;
  std::uint64_t length_ = 0;
  std::uint64_t greatest_ = 0;   ///< length so far
  std::uint64_t next_drop_ = 0;  ///< the first boundary whose eviction can still be undone
  std::vector<head_entries> heads_;
};

}  // namespace kvexact

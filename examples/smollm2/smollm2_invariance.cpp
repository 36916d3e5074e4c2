// SPDX-License-Identifier: Apache-2.0
// How often outputs part where a row's bits depend on how it was computed, see --help.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <kvexact/bitstream/checksum.hpp>
#include <kvexact/compression/attention.hpp>
#include <kvexact/speculative/speculative_decoder.hpp>

#include "engine.hpp"
#include "generation.hpp"
#include "sequence_engine.hpp"
#include "token_file.hpp"
#include "tool_options.hpp"

using namespace kvexact;
using namespace kvexact::examples;

namespace {

/// Attention as on a GPU: a pass of few rows cuts the cache into as many parts as keep 16 units busy, each part is summed by itself, and
/// the sums are merged. So their order depends on the number of rows, and with `by_length` also on the length of the cache after the pass.
struct cutting {
  static constexpr std::size_t units = 16, chunk = 16;
  bool by_length = false;

  [[nodiscard]] static std::size_t parts(std::size_t rows) { return units / rows; }
  [[nodiscard]] std::size_t part(std::size_t position, std::size_t rows, std::size_t end) const {
    return by_length ? position * parts(rows) / end : position / chunk % parts(rows);
  }
};

/// The reference engine's layers with attention that is cut so, as far as passes have less than 16 rows. Otherwise a `sequence_engine`.
class cutting_engine {
 public:
  using scalar = bf16;

  [[nodiscard]] static outcome<cutting_engine> make(engine& model, std::size_t capacity, cutting cut) noexcept {
    auto cache = model.make_cache(capacity);
    if (!cache) return cache.error();
    auto shape = examples::detail::cache_shape_of(model.shape());
    if (!shape) return as_failure(shape.error());
    return cutting_engine(model, *std::move(shape), *std::move(cache), cut);
  }

  [[nodiscard]] std::uint32_t vocabulary() const noexcept { return static_cast<std::uint32_t>(model_->shape().vocabulary); }
  [[nodiscard]] const cache_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return cache_.capacity(); }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return ~std::uint64_t{0}; }

  result<void> forward(std::span<const std::uint32_t> tokens, std::span<float> logits) noexcept {
    if (const auto fits = examples::detail::expect_room(tokens, logits, vocabulary(), capacity() - length_); !fits) return fits;
    const std::size_t first = static_cast<std::size_t>(length_), width = model_->shape().width;
    std::vector<sequence_pass> passes;
    std::vector<row> rows;
    if (tokens.size() >= cutting::units) {
      passes.push_back({tokens, first, &cache_});
    } else {
      rows.reserve(tokens.size());
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        rows.emplace_back(*this, first + i, tokens.size(), first + tokens.size());
        passes.push_back({tokens.subspan(i, 1), first + i, nullptr, &rows.back(), &cache_.rotary()});
      }
    }
    model_->forward(passes);
    std::vector<bf16> hidden;
    for (const sequence_pass& each : passes) {
      if (!each.outcome) return error{error_code::invalid_argument, "a forward pass"};
      hidden.insert(hidden.end(), each.hidden.begin(), each.hidden.end());
    }
    model_->logits(std::span(hidden).last(logits.size() / vocabulary() * width), logits);
    length_ += tokens.size();
    return {};
  }
  result<void> truncate(std::uint64_t length) noexcept {
    if (length > length_) return error{error_code::out_of_range, "a cache cannot be truncated to more than it holds"};
    length_ = length;
    return {};
  }
  [[nodiscard]] layer_tensors<const bf16> rows(std::uint32_t layer, std::uint64_t position) const noexcept {
    const auto held = static_cast<std::size_t>(length_);
    return examples::detail::rows_from(shape_.layer(layer), cache_.keys(layer, held), cache_.values(layer, held), position);
  }

 private:
  /// One row of a pass of `rows` that ends before position `end`.
  class row final : public token_cache {
   public:
    row(cutting_engine& engine, std::size_t position, std::size_t rows, std::size_t end)
        : engine_(&engine), position_(position), rows_(rows), end_(end) {}

    status append(std::size_t layer, std::span<const bf16> keys, std::span<const bf16> values) override {
      engine_->cache_.write(layer, position_, keys, values);
      return done;
    }
    status attend(std::size_t layer, std::span<const float> queries, std::span<float> out) override {
      const model_shape& model = engine_->model_->shape();
      const std::size_t dim = model.head_dim, shared = model.heads / model.kv_heads;
      const std::span<const bf16> keys = engine_->cache_.keys(layer, position_ + 1), values = engine_->cache_.values(layer, position_ + 1);
      std::vector<std::size_t> positions;
      std::vector<float> scores, sum(dim);
      std::fill(out.begin(), out.end(), 0.0F);
      std::vector<float> masses(model.heads, -std::numeric_limits<float>::infinity());
      for (std::size_t part = 0; part < cutting::parts(rows_); ++part) {
        positions.clear();
        for (std::size_t t = 0; t <= position_; ++t) {
          if (engine_->cut_.part(t, rows_, end_) == part) positions.push_back(t);
        }
        if (positions.empty()) continue;
        scores.resize(positions.size());
        for (std::size_t head = 0; head < model.heads; ++head) {
          const auto row_of = [&](std::span<const bf16> rows, std::size_t t) {
            return rows.subspan((t * model.kv_heads + head / shared) * dim, dim);
          };
          const std::span<const float> query = queries.subspan(head * dim, dim);
          for (std::size_t i = 0; i < positions.size(); ++i)
            scores[i] = dot(query, row_of(keys, positions[i])) / std::sqrt(static_cast<float>(dim));
          const float mass = kvexact::detail::softmax(scores);
          std::fill(sum.begin(), sum.end(), 0.0F);
          for (std::size_t i = 0; i < positions.size(); ++i) {
            const std::span<const bf16> value = row_of(values, positions[i]);
            for (std::size_t c = 0; c < dim; ++c) sum[c] += scores[i] * value[c].to_float();
          }
          kvexact::detail::merge_attention(out.subspan(head * dim, dim), masses[head], sum, mass);
        }
      }
      return done;
    }

   private:
    /// In lanes, for speed; their number divides that of channels.
    static float dot(std::span<const float> query, std::span<const bf16> key) {
      std::array<float, 16> lanes{};
      for (std::size_t c = 0; c < query.size(); c += lanes.size()) {
        for (std::size_t lane = 0; lane < lanes.size(); ++lane) lanes[lane] += query[c + lane] * key[c + lane].to_float();
      }
      float sum = 0;
      for (const float each : lanes) sum += each;
      return sum;
    }

    cutting_engine* engine_;
    std::size_t position_, rows_, end_;
  };

  cutting_engine(engine& model, cache_shape shape, examples::kv_cache cache, cutting cut) noexcept
      : model_(&model), shape_(std::move(shape)), cache_(std::move(cache)), cut_(cut) {}

  engine* model_;
  cache_shape shape_;
  examples::kv_cache cache_;
  cutting cut_;
  std::uint64_t length_ = 0;
};

template <class Engine>
class engine_wrapper {
 public:
  using scalar = typename Engine::scalar;

  explicit engine_wrapper(Engine& engine) noexcept : engine_(&engine) {}
  [[nodiscard]] std::uint32_t vocabulary() const noexcept { return engine_->vocabulary(); }
  [[nodiscard]] const cache_shape& shape() const noexcept { return engine_->shape(); }
  [[nodiscard]] std::uint64_t length() const noexcept { return engine_->length(); }
  [[nodiscard]] std::uint64_t capacity() const noexcept { return engine_->capacity(); }
  [[nodiscard]] std::uint64_t max_rollback() const noexcept { return engine_->max_rollback(); }
  result<void> truncate(std::uint64_t length) noexcept { return engine_->truncate(length); }
  [[nodiscard]] layer_tensors<const scalar> rows(std::uint32_t layer, std::uint64_t position) const noexcept {
    return engine_->rows(layer, position);
  }

 protected:
  Engine* engine_;
};

/// Keeps no cache from pass to pass: computes the whole sequence again each time.
template <class Engine>
class uncached_engine : public engine_wrapper<Engine> {
 public:
  /// `tokens`: those that the engine has rows for, or more.
  uncached_engine(Engine& engine, std::span<const token_id> tokens)
      : engine_wrapper<Engine>(engine), tokens_(tokens.begin(), tokens.end()) {}

  result<void> forward(std::span<const token_id> tokens, std::span<float> logits) noexcept {
    tokens_.resize(static_cast<std::size_t>(this->length()));
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    const auto emptied = this->truncate(0);
    return emptied ? this->engine_->forward(tokens_, logits) : emptied;
  }

 private:
  std::vector<token_id> tokens_;
};

/// Notes, of each position computed last, the checksum of its logits and how far the second largest lies below the largest.
template <class Engine>
class recorded_engine : public engine_wrapper<Engine> {
 public:
  struct row {
    std::uint64_t logits = 0;
    float gap = 0;
  };

  using engine_wrapper<Engine>::engine_wrapper;
  [[nodiscard]] const std::vector<row>& recorded() const noexcept { return recorded_; }

  result<void> forward(std::span<const token_id> tokens, std::span<float> logits) noexcept {
    const auto passed = this->engine_->forward(tokens, logits);
    if (!passed) return passed;
    const std::size_t rows = logits.size() / this->vocabulary(), end = static_cast<std::size_t>(this->length());
    recorded_.resize(std::max(recorded_.size(), end));
    for (std::size_t i = 0; i < rows; ++i) {
      const std::span<const float> each = logits.subspan(i * this->vocabulary(), this->vocabulary());
      const auto top = top_two(each);
      if (!top) return top.error();
      recorded_[end - rows + i] = {checksum(std::as_bytes(each)), top->gap};
    }
    return {};
  }

 private:
  std::vector<row> recorded_;
};

/// Proposes what has come in another run.
class known_continuation {
 public:
  explicit known_continuation(std::span<const token_id> known) noexcept : known_(known) {}

  [[nodiscard]] std::uint64_t max_draft() const noexcept { return known_.size(); }
  [[nodiscard]] result<void> synchronise(std::span<const token_id>) noexcept { return {}; }
  template <class Rule, class Sampler>
  [[nodiscard]] result<void> propose(const draft_request<Rule, Sampler>& request, draft_block& block) noexcept {
    for (std::size_t i = 0; i < request.wanted && request.length() + block.size() < known_.size(); ++i) {
      const token_id token = known_[request.length() + block.size()];
      if (const auto pushed = block.push(token, distribution::point(token)); !pushed) return pushed;
    }
    return {};
  }

 private:
  std::span<const token_id> known_;
};

/// What one way of decoding gave; the k-th generated token comes from the k-th of the rows.
struct decoded {
  struct row {
    std::uint64_t logits, cache;  ///< checksums; of K and V in all layers
    float gap;
  };
  std::vector<token_id> tokens;  ///< with the prompt
  std::vector<row> rows;
};

struct task {
  std::span<const token_id> prompt;
  std::size_t new_tokens = 0;
  float temperature = 0;
  std::uint64_t seed = 0;
};

/// How rows come together in a pass.
struct pass_form {
  std::uint32_t rows = 1;         ///< the newest token and drafts
  std::uint32_t fixed_width = 0;  ///< see `speculative_decoder::options`
};

/// Drafts are `known`, a run to compare with; ends where it parts from that. Rows of the prompt that the engine has are used.
template <class Engine, class Rule>
outcome<decoded> decode(Engine& engine, const task& wanted, Rule rule, pass_form form, std::span<const token_id> known) {
  const std::size_t prompt = wanted.prompt.size();
  if (engine.length() >= prompt) {
    const auto back = engine.truncate(prompt - 1);
    if (!back) return as_failure(back.error());
  }
  const auto sampler = standard_sampler::make({.temperature = wanted.temperature});
  if (!sampler) return as_failure(sampler.error());
  recorded_engine<Engine> recorder(engine);
  auto decoder = speculative_decoder<recorded_engine<Engine>, known_continuation, Rule>::make(
      recorder, known_continuation(known), rule, fixed_draft_length(form.rows - 1),
      {.sampler = *sampler, .stops = {.max_new_tokens = wanted.new_tokens}, .longest_draft = form.rows, .fixed_width = form.fixed_width});
  if (!decoder) return as_failure(decoder.error());
  const auto begun = decoder->begin(wanted.prompt);
  if (!begun) return as_failure(begun.error());
  const auto is_known = [&](std::span<const token_id> tokens) {
    return tokens.size() <= known.size() && std::equal(tokens.begin(), tokens.end(), known.begin());
  };
  while (!decoder->stop() && (known.empty() || is_known(decoder->tokens()))) {
    const auto report = decoder->round();
    if (!report) return as_failure(report.error());
  }
  decoded all{{decoder->tokens().begin(), decoder->tokens().end()}, {}};
  std::vector<std::byte> bits;
  for (std::size_t position = prompt - 1; position + 1 < all.tokens.size(); ++position) {
    kvexact::detail::read_rows(engine, position, bits);
    const auto& [logits, gap] = recorder.recorded()[position];
    all.rows.push_back({logits, checksum(bits), gap});
  }
  return all;
}

/// Of all prompts. Rows are compared up to that which gave the first differing token: up to there they have the same tokens before them.
struct comparison {
  std::string engine, plain, other, rule;
  bool promised = false;  ///< whether a probe said that nothing would differ
  std::size_t prompts = 0, rows = 0, other_logits = 0, other_cache = 0;
  std::vector<std::size_t> parted = {};  ///< at which generated token, from 1
  float smallest_gap = std::numeric_limits<float>::infinity(), largest_gap = 0;  ///< of the two largest logits there

  void add(const decoded& expected, const decoded& found) {
    ++prompts;
    const auto begin = expected.tokens.end() - static_cast<std::ptrdiff_t>(expected.rows.size());  // behind the prompt
    const auto differs = std::mismatch(expected.tokens.begin(), expected.tokens.end(), found.tokens.begin(), found.tokens.end()).first;
    const auto same = static_cast<std::size_t>(differs - begin);
    if (same < expected.rows.size()) {
      parted.push_back(same + 1);
      smallest_gap = std::min(smallest_gap, expected.rows[same].gap);
      largest_gap = std::max(largest_gap, expected.rows[same].gap);
    }
    for (std::size_t k = 0; k < std::min(same + 1, expected.rows.size()); ++k) {
      ++rows;
      other_logits += expected.rows[k].logits != found.rows[k].logits;
      other_cache += expected.rows[k].cache != found.rows[k].cache;
    }
  }
  [[nodiscard]] bool broken() const { return promised && (!parted.empty() || other_logits + other_cache > 0); }

  void print() {
    std::sort(parted.begin(), parted.end());
    const auto share = [&](std::size_t count) {
      return 100.0 * static_cast<double>(count) / static_cast<double>(std::max<std::size_t>(rows, 1));
    };
    std::printf("| %s | %s | %s | %s | %zu of %zu |", engine.c_str(), plain.c_str(), other.c_str(), rule.c_str(), parted.size(), prompts);
    if (!parted.empty()) std::printf(" %zu, %zu", parted.front(), parted[parted.size() / 2]);
    std::printf(" |");
    if (!parted.empty() && rule == "greedy")
      std::printf(" %.2g to %.2g", static_cast<double>(smallest_gap), static_cast<double>(largest_gap));
    std::printf(" | %zu | %.1f %% | %.1f %% |\n", rows, share(other_logits), share(other_cache));
  }
};

struct plan {
  std::vector<std::vector<token_id>> prompts;
  std::size_t new_tokens = 64, few = 12;
  std::vector<std::uint32_t> widths{2, 4, 8, 16};
  std::uint32_t fixed_width = 4;
  float temperature = 0.8F;
  std::uint64_t seed = 0;
};

/// All comparisons of one engine.
class measurement {
 public:
  measurement(std::string engine, const plan& chosen) : engine_(std::move(engine)), plan_(chosen) {}

  /// Before anything is decoded, what the probes say after a prompt.
  template <class Engine>
  status probe(Engine& engine) {
    const std::span<const token_id> prompt = plan_.prompts.front();
    const auto read = engine.forward(prompt, {});
    if (!read) return as_failure(read.error());
    const auto tokens = prompt.first(std::min<std::size_t>(prompt.size(), plan_.widths.back()));
    const auto any = probe_row_invariance(engine, tokens, plan_.widths);
    if (!any) return as_failure(any.error());
    const auto fixed = probe_fixed_width(engine, tokens, plan_.fixed_width, 0);
    if (!fixed) return as_failure(fixed.error());
    any_width_ = any->invariant();
    same_width_ = fixed->invariant();
    const auto said = [](const row_probe& found) {
      if (found.invariant()) return "equal bits";
      return found.logits_equal ? "K/V differ" : found.rows_equal ? "logits differ" : "logits and K/V differ";
    };
    std::printf("%s: probe_row_invariance: %s; probe_fixed_width(%u): %s\n", engine_.c_str(), said(*any), plan_.fixed_width, said(*fixed));
    const auto back = engine.truncate(0);
    return back ? status(done) : as_failure(back.error());
  }

  /// One-row decoding against blocks of all widths, and against a cache that is off.
  template <class Engine, class Rule>
  status against_one_row(Engine& engine, const task& wanted, const Rule& rule, std::span<const std::uint32_t> widths) {
    const auto plain = decode(engine, wanted, rule, {}, {});
    if (!plain) return plain.error();
    const std::string name = wanted.temperature == 0 ? "greedy" : "sampled";
    for (const std::uint32_t width : widths) {
      const auto blocks = decode(engine, wanted, rule, {width}, plain->tokens);
      if (!blocks) return blocks.error();
      row("rows of one", "blocks of " + std::to_string(width), name, any_width_).add(*plain, *blocks);
    }
    uncached_engine<Engine> uncached(engine, wanted.prompt);
    const auto whole = decode(uncached, wanted, rule, {static_cast<std::uint32_t>(wanted.new_tokens)}, plain->tokens);
    if (!whole) return whole.error();
    row("rows of one", "cache off", name, any_width_).add(*plain, *whole);
    return done;
  }

  /// Decoding at a fixed width without drafts, against the same width with drafts, and against the longest of the other widths.
  template <class Engine>
  status at_fixed_width(Engine& engine, const task& wanted) {
    const std::uint32_t width = plan_.fixed_width, other = plan_.widths.back();
    const std::string name = "width " + std::to_string(width);
    const auto plain = decode(engine, wanted, greedy(), {1, width}, {});
    if (!plain) return plain.error();
    for (const std::uint32_t drafts : {width - 1, width / 2}) {
      const auto drafted = decode(engine, wanted, greedy(), {drafts + 1, width}, plain->tokens);
      if (!drafted) return drafted.error();
      row(name + ", no drafts", name + ", " + std::to_string(drafts) + " drafts", "greedy", same_width_).add(*plain, *drafted);
    }
    const auto wider = decode(engine, wanted, greedy(), {other, other}, plain->tokens);
    if (!wider) return wider.error();
    row(name + ", no drafts", "width " + std::to_string(other), "greedy", any_width_).add(*plain, *wider);
    return done;
  }

  template <class Engine>
  status run(Engine& engine, bool all) {
    if (const status probed = probe(engine); !probed) return probed;
    const std::uint32_t middle = plan_.widths[plan_.widths.size() / 2];
    for (std::size_t i = 0; i < (all ? plan_.prompts.size() : plan_.few); ++i) {
      if (const auto emptied = engine.truncate(0); !emptied) return as_failure(emptied.error());
      const task greedily{plan_.prompts[i], plan_.new_tokens};
      const task sampled{plan_.prompts[i], plan_.new_tokens, plan_.temperature, plan_.seed + i};
      status ran = all ? against_one_row(engine, greedily, greedy(), plan_.widths) : done;
      if (ran && all && i < plan_.few) ran = against_one_row(engine, sampled, sample_and_match(sampled.seed), std::span(&middle, 1));
      if (ran && !any_width_ && i < plan_.few) ran = at_fixed_width(engine, greedily);
      if (!ran) return ran;
    }
    return done;
  }

  [[nodiscard]] std::vector<comparison>& comparisons() { return comparisons_; }

 private:
  comparison& row(const std::string& plain, const std::string& other, const std::string& rule, bool promised) {
    const auto found = std::find_if(comparisons_.begin(), comparisons_.end(), [&](const comparison& each) {
      return each.plain == plain && each.other == other && each.rule == rule;
    });
    if (found != comparisons_.end()) return *found;
    return comparisons_.emplace_back(comparison{engine_, plain, other, rule, promised});
  }

  std::string engine_;
  const plan& plan_;
  bool any_width_ = false, same_width_ = false;
  std::vector<comparison> comparisons_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Decodes prompts with SmolLM2-135M in rows of one, in blocks as they are verified, and with the cache off, and counts where\n"
      "tokens, logits and K/V rows part: on the reference engine, and on the same with attention cut as on GPUs, where the order of\n"
      "sums depends on the number of rows (cut by rows), and on the length of the cache as well (cut by rows and length). Drafts are\n"
      "the output of plain decoding. Cache off: keys and values of the whole sequence are computed again, in one pass. Prints a table;\n"
      "exit status 1 if anything differs where a probe has promised that it would not.");
  std::vector<std::string> files;
  std::size_t prompts = 40, prompt_tokens = 128;
  plan chosen;
  engine_choice choice;
  app.add_option("--tokens", files, "Token ids as decimal text; prompts are pieces of them, the first ones of all files first")
      ->required()
      ->type_name("FILE...");
  app.add_option("--prompts", prompts)->check(CLI::Range(1, 100'000))->capture_default_str();
  app.add_option("--prompt-tokens", prompt_tokens)->check(CLI::Range(2, 4096))->capture_default_str();
  app.add_option("--new-tokens", chosen.new_tokens)->check(CLI::Range(2, 4096))->capture_default_str();
  app.add_option("--widths", chosen.widths, "Rows of a block")->check(CLI::Range(2, 64))->capture_default_str()->type_name("N...");
  app.add_option("--few", chosen.few, "Prompts that are also sampled, and decoded at a fixed width")->capture_default_str();
  app.add_option("--fixed-width", chosen.fixed_width)->check(CLI::Range(3, 64))->capture_default_str();
  app.add_option("--temperature", chosen.temperature, "Of the sampled ones")->check(CLI::Range(0.01, 100.0))->capture_default_str();
  app.add_option("--seed", chosen.seed)->capture_default_str();
  choice.add_to(app);
  CLI11_PARSE(app, argc, argv);

  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "smollm2_invariance: %s\n", why.text.c_str());
    return 2;
  };
  auto model = choice.load();
  if (!model) return fail(model.error());
  std::vector<std::vector<std::uint32_t>> texts;
  for (const std::string& path : files) {
    auto ids = read_tokens(path);
    if (!ids) return fail(ids.error());
    if (const status known = expect_known(path, *ids, model->shape().vocabulary); !known) return fail(known.error());
    texts.push_back(*std::move(ids));
  }
  const std::size_t longest =
      std::max_element(texts.begin(), texts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); })->size();
  for (std::size_t first = 0; first + prompt_tokens <= longest && chosen.prompts.size() < prompts; first += prompt_tokens) {
    for (const auto& text : texts) {
      if (first + prompt_tokens > text.size() || chosen.prompts.size() == prompts) continue;
      const auto begin = text.begin() + static_cast<std::ptrdiff_t>(first);
      chosen.prompts.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(prompt_tokens));
    }
  }
  if (chosen.prompts.size() < prompts) return fail({error_code::invalid_argument, "the files hold too few tokens for so many prompts"});
  chosen.few = std::min(chosen.few, prompts);
  std::sort(chosen.widths.begin(), chosen.widths.end());

  const std::size_t capacity = prompt_tokens + chosen.new_tokens + 4 * std::size_t{std::max(chosen.widths.back(), chosen.fixed_width)};
  auto reference = sequence_engine::make(*model, capacity);
  auto by_rows = cutting_engine::make(*model, capacity, {});
  auto by_length = cutting_engine::make(*model, capacity, {.by_length = true});
  if (!reference) return fail(reference.error());
  if (!by_rows) return fail(by_rows.error());
  if (!by_length) return fail(by_length.error());
  measurement all[] = {{"reference", chosen}, {"cut by rows", chosen}, {"cut by rows and length", chosen}};
  if (const status ran = all[0].run(*reference, true); !ran) return fail(ran.error());
  if (const status ran = all[1].run(*by_rows, true); !ran) return fail(ran.error());
  if (const status ran = all[2].run(*by_length, false); !ran) return fail(ran.error());

  std::printf("\n| engine | decoding | against | rule | outputs part | at token: first, median | gap there | rows | logits differ | K/V differ |\n"
              "|---|---|---|---|---|---|---|---|---|---|\n");
  bool broken = false;
  for (measurement& each : all) {
    for (comparison& row : each.comparisons()) {
      row.print();
      broken |= row.broken();
    }
  }
  if (broken) std::fprintf(stderr, "smollm2_invariance: a probe has promised too much\n");
  return broken ? 1 : 0;
}

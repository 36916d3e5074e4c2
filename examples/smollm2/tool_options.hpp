// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include <CLI/CLI.hpp>

#include "engine.hpp"

namespace kvexact::examples {

/// Where fetch.sh puts the model: $KVEXACT_CACHE/smollm2-135m, by default ~/.cache/kvexact/smollm2-135m.
[[nodiscard]] inline std::string default_model_folder() {
  const char* const cache = std::getenv("KVEXACT_CACHE");
  if (cache != nullptr && *cache != '\0') return std::string(cache) + "/smollm2-135m";
  const char* const home = std::getenv("HOME");
  return std::string(home != nullptr ? home : "") + "/.cache/kvexact/smollm2-135m";
}

/// Reads "SINKS+NEWEST", as in 4+256; NEWEST is at least 1.
[[nodiscard]] inline std::optional<attention_window> parse_window(std::string_view text) noexcept {
  attention_window window;
  const char* const end = text.data() + text.size();
  const auto sinks = std::from_chars(text.data(), end, window.sinks);
  if (sinks.ec != std::errc{} || sinks.ptr == end || *sinks.ptr != '+') return {};
  const auto newest = std::from_chars(sinks.ptr + 1, end, window.newest);
  if (newest.ec != std::errc{} || newest.ptr != end || window.newest == 0) return {};
  return window;
}

/// The options that name an engine, common to the tools.
struct engine_choice {
  std::string name = "bf16", folder = default_model_folder();
  bool unrotated = false, exact_kv = false;
  unsigned threads = 0;
  std::size_t group = 64, exact_layers = 0, depth = ~std::size_t{0};
  attention_window window;

  /// Adds the options, and to the end of the parsing a check that they fit together; `app` parses while this object is where it is.
  void add_to(CLI::App& app) {
    app.add_option("--engine", name,
                   "bf16: the target. fp8: e4m3 linear layers, weights scaled in blocks of 128 x 128, activations in groups of 64. "
                   "int8: both in groups of 64 or 32, every 64 channels rotated by a Hadamard matrix first")
        ->check(CLI::IsMember(precisions()))
        ->capture_default_str()
        ->type_name("NAME");
    app.add_flag("--unrotated", unrotated, "int8 without the rotation");
    const CLI::Option* const grouped = app.add_option("--group", group, "int8: channels that share a scale, 32 or 64")
                                           ->check(CLI::IsMember({32, 64}))
                                           ->capture_default_str()
                                           ->type_name("N");
    app.add_option_function<std::string>(
           "--window",
           [this](const std::string& text) {
             const auto parsed = parse_window(text);
             if (!parsed) throw CLI::ValidationError("--window", "'" + text + "' is not SINKS+NEWEST, as 4+256, with NEWEST at least 1");
             window = *parsed;
           },
           "A token attends only to the first SINKS tokens and, itself included, the NEWEST; the cost is then linear in the context")
        ->type_name("SINKS+NEWEST");
    const CLI::Option* const exact =
        app.add_option("--exact-layers", exact_layers,
                       "The first K layers are the target's, unquantised and with full attention, so that their keys and values are exact")
            ->check(CLI::Range(0, 100'000))
            ->capture_default_str()
            ->type_name("K");
    app.add_flag("--exact-kv,!--quantised-kv", exact_kv,
                 std::string("The projections to keys and values, 6 % of the work, are not quantised") + (exact_kv ? " (default here)" : ""));
    app.add_option("--model", folder, "Folder with model.safetensors")->capture_default_str()->type_name("DIR");
    app.add_option("--threads", threads, "0: all cores")->check(CLI::Range(0, 256))->capture_default_str()->type_name("N");
    app.final_callback([this, grouped, exact] {
      if (name != "int8" && unrotated) throw CLI::ValidationError("--unrotated", "needs --engine int8");
      if (name != "int8" && grouped->count() != 0) throw CLI::ValidationError("--group", "needs --engine int8");
      if (name == "bf16" && window.newest == 0 && exact->count() != 0) {
        throw CLI::ValidationError("--exact-layers", "needs --engine fp8 or int8, or --window");
      }
    });
  }

  [[nodiscard]] outcome<engine> load() const {
    engine_options options;
    options.precision = precisions().at(name);
    options.rotated = !unrotated;
    options.threads = threads;
    options.exact_layers = exact_layers;
    options.window = window;
    options.group = group;
    options.exact_projections = exact_kv;
    options.depth = depth;
    auto model = engine::load(folder + "/model.safetensors", options);
    if (!model && model.error().code == error_code::invalid_argument) {
      return failure{model.error().code, model.error().text + "\n(examples/smollm2/fetch.sh gets the model)"};
    }
    return model;
  }

 private:
  static const std::map<std::string, precision>& precisions() {
    static const std::map<std::string, precision> all{{"bf16", precision::bf16}, {"fp8", precision::fp8}, {"int8", precision::int8}};
    return all;
  }
};

}  // namespace kvexact::examples

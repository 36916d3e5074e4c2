// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <map>
#include <string>

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

/// The options that name an engine, common to the tools.
struct engine_choice {
  std::string name = "bf16", folder = default_model_folder();
  bool unrotated = false;
  unsigned threads = 0;

  void add_to(CLI::App& app) {
    app.add_option("--engine", name,
                   "bf16: the target. fp8: e4m3 linear layers, weights scaled in blocks of 128 x 128, activations in groups of 64. "
                   "int8: both in groups of 64, each rotated by a Hadamard matrix first")
        ->check(CLI::IsMember(precisions()))
        ->capture_default_str()
        ->type_name("NAME");
    app.add_flag("--unrotated", unrotated, "int8 without the rotation");
    app.add_option("--model", folder, "Folder with model.safetensors")->capture_default_str()->type_name("DIR");
    app.add_option("--threads", threads, "0: all cores")->check(CLI::Range(0, 256))->capture_default_str()->type_name("N");
  }

  [[nodiscard]] outcome<engine> load() const {
    auto model = engine::load(folder + "/model.safetensors", {precisions().at(name), !unrotated, threads});
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

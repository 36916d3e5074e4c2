// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "draft_methods.hpp"

namespace kvexact::examples {

/// The options that choose among the methods, common to the tools.
struct draft_method_choice {
  std::vector<std::string> only, skip;

  void add_to(CLI::App& app) {
    app.add_option("--only", only, "Only methods whose names hold one of these texts")->type_name("TEXT");
    app.add_option("--skip", skip, "No methods whose names hold one of these texts")->type_name("TEXT");
  }
  [[nodiscard]] std::vector<draft_method> methods() const {
    std::vector<draft_method> chosen;
    for (draft_method& method : all_draft_methods()) {
      const auto holds = [&](const std::string& text) { return method.name.find(text) != std::string::npos; };
      if (!only.empty() && std::none_of(only.begin(), only.end(), holds)) continue;
      if (std::none_of(skip.begin(), skip.end(), holds)) chosen.push_back(std::move(method));
    }
    return chosen;
  }
};

}  // namespace kvexact::examples

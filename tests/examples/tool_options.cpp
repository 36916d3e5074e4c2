// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <doctest/doctest.h>
#include <smollm2/engine.hpp>
#include <smollm2/tool_options.hpp>

#include "small_model.hpp"
#include "temporary_folder.hpp"

using namespace kvexact::examples;

TEST_CASE("tool options: windows") {
  const auto window = parse_window("4+256");
  REQUIRE(window);
  CHECK(window->sinks == 4);
  CHECK(window->newest == 256);
  CHECK(parse_window("0+1"));
  for (const char* const bad :
       {"", "4", "+", "4+", "+8", "4+0", "4+8x", "x4+8", "4 + 8", "-1+8", "4+-8", "4,8", "4+99999999999999999999"}) {
    CAPTURE(std::string(bad));
    CHECK_FALSE(parse_window(bad));
  }
}

TEST_CASE("tool options: what is chosen reaches the engine, what does not fit together is refused") {
  const temporary_folder folder;
  REQUIRE(small_model::write_model(folder / "model.safetensors"));
  const std::string model = folder / "";
  // The error of the command line, or nothing.
  const auto parse = [&](engine_choice& choice, std::vector<std::string> words) -> std::string {
    CLI::App app;
    choice.add_to(app);
    words.insert(words.end(), {"--model", model});
    try {
      app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
      return {};
    } catch (const CLI::ParseError& caught) {
      return caught.what();
    }
  };
  {
    engine_choice choice;
    CHECK(parse(choice, {"--engine", "int8", "--group", "32", "--window", "2+9", "--exact-layers", "1", "--unrotated"}).empty());
    CHECK(choice.group == 32);
    CHECK(choice.window.sinks == 2);
    CHECK(choice.window.newest == 9);
    CHECK(choice.exact_layers == 1);
    CHECK(choice.unrotated);
    const auto loaded = choice.load();
    REQUIRE(loaded);
    CHECK(loaded->is_exact(0));
    CHECK_FALSE(loaded->is_exact(1));
  }
  const std::vector<std::vector<std::string>> good{{},
                                                   {"--window", "4+256"},
                                                   {"--engine", "fp8", "--exact-layers", "2"},
                                                   {"--window", "0+1", "--exact-layers", "2"},
                                                   {"--engine", "int8", "--group", "64"}};
  for (const auto& words : good) {
    engine_choice choice;
    CHECK(parse(choice, words) == "");
  }
  const std::vector<std::vector<std::string>> bad{{"--engine", "int4"},
                                                  {"--window", "4"},
                                                  {"--engine", "int8", "--group", "48"},
                                                  {"--group", "64"},
                                                  {"--engine", "fp8", "--group", "32"},
                                                  {"--unrotated"},
                                                  {"--exact-layers", "2"},
                                                  {"--engine", "int8", "--exact-layers", "-1"}};
  for (const auto& words : bad) {
    engine_choice choice;
    const std::string why = parse(choice, words);
    CAPTURE(why);
    CHECK(why.starts_with(words[words.size() > 2 ? 2 : 0]));
  }
}

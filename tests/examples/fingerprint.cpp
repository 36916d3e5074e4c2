// SPDX-License-Identifier: Apache-2.0
#include "fingerprint/fingerprint.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <smollm2/instruction_set.hpp>

#include "temporary_folder.hpp"

using namespace kvexact::examples;

namespace {

/// What every build on every machine must find for the small model.
constexpr const char* pinned =
    "bf16 2c7c12ca7873c61c\n"
    "bf16_window 8d91263f77f92869\n"
    "fp8 377ac763c908074e\n"
    "int8_unrotated 400d09deee720e51\n"
    "int8 8cf58140448429ae\n"
    "int8_window 94594c86c4fb168a\n"
    "int8_exact_projections 02236676c56341a1\n"
    "int8_group_32 55239483774d6813\n";

#if defined(__clang__)
constexpr const char* compiler = "clang++";
#else
constexpr const char* compiler = "g++";
#endif

bool succeeds(const std::string& command) { return std::system(command.c_str()) == 0; }

}  // namespace

TEST_CASE("fingerprint: this build, any thread count and instruction set") {
  const temporary_folder folder;
  REQUIRE(small_model::write_model(folder / "model"));
  for (const auto isa : {instruction_set::baseline, instruction_set::avx2, instruction_set::avx512}) {
    if (detect_instruction_set() < isa) continue;
    for (const unsigned threads : {1U, 2U}) {
      const auto all = fingerprint::of_all(folder / "model", fingerprint::small_model_tokens(), threads, isa);
      REQUIRE(all);
      std::string text;
      for (const auto& [name, hash] : *all) {
        char digits[17];
        std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
        text += name + ' ' + digits + '\n';
      }
      CHECK(text == pinned);
    }
  }
}

// The compiler that built this test, once without optimisation and once with all that tempts it to reorder and to fuse. Sanitizers do not
// change what these builds do.
#if !defined(__SANITIZE_ADDRESS__) && defined(__x86_64__)
TEST_CASE("fingerprint: builds with other options") {
  if (!succeeds(std::string(compiler) + " --version >/dev/null 2>&1")) {
    MESSAGE(compiler, " is not there under this name, nothing is compared");
    return;
  }
  const temporary_folder folder;
  const auto quoted = [](const std::string& path) { return "'" + path + "'"; };
  const std::string program = quoted(folder / "program"), model = quoted(folder / "model"), output = folder / "output",
                    build = quoted(KVEXACT_TESTS_DIR "/examples/fingerprint/build.sh");
  for (const char* const options : {"-O0", "-O3 -march=native"}) {
    CAPTURE(std::string(options));
    REQUIRE(succeeds(build + " " + program + " " + compiler + " " + options));
    for (const char* const run : {" 1 baseline ", " 2 avx512 "}) {
      CAPTURE(std::string(run));
      REQUIRE(succeeds(program + run + model + " >" + quoted(output)));
      std::ostringstream text;
      text << std::ifstream(output).rdbuf();
      CHECK(text.str() == pinned);
    }
  }
}
#endif

// SPDX-License-Identifier: Apache-2.0
// Prints the fingerprints of the engine's predictions, a line each, as text and hexadecimal number. One translation unit, so that it
// builds anywhere with one command, see build.sh.
//   usage: program THREADS baseline|avx2|avx512 MODEL                the small model of the tests, written to the file MODEL first
//          program THREADS baseline|avx2|avx512 MODEL TOKENS COUNT   the first COUNT tokens of the file TOKENS
// An instruction set that the machine lacks stands for its best one.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <smollm2/engine.cpp>
#include <smollm2/token_file.hpp>

#include "fingerprint.hpp"

using namespace kvexact::examples;

int main(int argc, char** argv) {
  if (argc != 4 && argc != 6) return 2;
  const auto fail = [](const failure& why) {
    std::fprintf(stderr, "%s\n", why.text.c_str());
    return 1;
  };
  std::vector<std::uint32_t> ids;
  if (argc == 6) {
    auto read = read_tokens(argv[4]);
    if (!read) return fail(read.error());
    ids = std::move(*read);
    ids.resize(std::min<std::size_t>(ids.size(), std::strtoul(argv[5], nullptr, 10)));
  } else {
    ids = fingerprint::small_model_tokens();
    if (auto written = small_model::write_model(argv[3]); !written) return fail(written.error());
  }
  const std::string name = argv[2];
  const auto asked = name == "avx512" ? instruction_set::avx512 : name == "avx2" ? instruction_set::avx2 : instruction_set::baseline;
  const auto threads = static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10));
  const auto all = fingerprint::of_all(argv[3], ids, threads, std::min(asked, detect_instruction_set()));
  if (!all) return fail(all.error());
  for (const auto& [way, hash] : *all) std::printf("%s %016" PRIx64 "\n", way.c_str(), hash);
  return 0;
}

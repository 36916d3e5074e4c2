// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/core/instruction_set.hpp>

using namespace kvexact;

namespace {

/// Integer and floating-point work that a compiler vectorises.
struct mix {
  KVEXACT_ALWAYS_INLINE static void run(const std::vector<std::uint32_t>& in, std::vector<std::uint64_t>& out, std::vector<float>& scaled,
                                        int& calls) noexcept {
    ++calls;
    for (std::size_t i = 0; i < in.size(); ++i) {
      const std::uint64_t wide = std::uint64_t{in[i]} * 0x9e3779b1U;
      out[i] = (wide >> (in[i] & 31U)) ^ (wide << 7);
      scaled[i] = static_cast<float>(in[i] >> 9) * 0.37F;
    }
  }
};

struct move_only {
  explicit move_only(int number) : value(number) {}
  move_only(move_only&&) = default;
  int value;
};

struct forwarded {
  KVEXACT_ALWAYS_INLINE static void run(move_only&& from, int& to) noexcept { to = from.value; }
};

#ifdef KVEXACT_TARGET_AVX512
/// A kernel of its own for AVX-512. It says that it ran, which no real one may.
struct with_own_code {
  static void run(int& ran) noexcept { ran = 1; }
  KVEXACT_TARGET_AVX512 static void run_avx512(int& ran) noexcept { ran = 512; }
};
#endif

std::vector<instruction_set> available() {
  std::vector<instruction_set> all{instruction_set::baseline};
  for (const instruction_set set : {instruction_set::avx2, instruction_set::avx512})
    if (set <= best_instruction_set()) all.push_back(set);
  return all;
}

}  // namespace

TEST_CASE("instruction_set: the best one is stable") { CHECK(best_instruction_set() == best_instruction_set()); }

TEST_CASE("instruction_set: every available one gives the same results") {
  for (std::size_t size = 0; size < 100; size += 11) {
    CAPTURE(size);
    std::vector<std::uint32_t> in(size);
    for (std::size_t i = 0; i < size; ++i) in[i] = static_cast<std::uint32_t>(i * 2654435761U + 12345U);
    std::vector<std::uint64_t> expected(size);
    std::vector<float> expected_scaled(size);
    int calls = 0;
    mix::run(in, expected, expected_scaled, calls);
    REQUIRE(calls == 1);
    for (const instruction_set set : available()) {
      CAPTURE(static_cast<int>(set));
      std::vector<std::uint64_t> out(size);
      std::vector<float> scaled(size);
      calls = 0;
      run_on<mix>(set, in, out, scaled, calls);
      CHECK(calls == 1);
      CHECK(out == expected);
      CHECK(scaled == expected_scaled);
    }
  }
}

TEST_CASE("instruction_set: arguments are forwarded") {
  for (const instruction_set set : available()) {
    int to = 0;
    run_on<forwarded>(set, move_only(42), to);
    CHECK(to == 42);
  }
}

#ifdef KVEXACT_TARGET_AVX512
TEST_CASE("instruction_set: a kernel's own function for AVX-512 is preferred, for AVX-512 only") {
  for (const instruction_set set : available()) {
    int ran = 0;
    run_on<with_own_code>(set, ran);
    CHECK(ran == (set == instruction_set::avx512 ? 512 : 1));
  }
}
#endif

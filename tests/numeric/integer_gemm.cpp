// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvexact/core/instruction_set.hpp>
#include <kvexact/numeric/integer_gemm.hpp>

using namespace kvexact;

namespace {

struct problem {
  std::size_t rows, columns, depth;
  std::size_t a_stride, b_stride, out_stride;
  std::vector<std::int16_t> a, b;  // as long as needed, so that a sanitizer sees every access beyond
  std::vector<std::int32_t> before;

  /// `draw()`: a factor. What lies between rows and in `before` is random.
  template <class Draw>
  problem(std::size_t r, std::size_t c, std::size_t d, std::size_t gap, Draw&& draw)
      : rows(r), columns(c), depth(d), a_stride(d + gap), b_stride(d + 2 * gap), out_stride(c + gap), a(r * a_stride), b(c * b_stride) {
    std::mt19937 random(static_cast<std::uint32_t>(r * 1000003 + c * 1009 + d));
    for (auto& x : a) x = static_cast<std::int16_t>(draw(random));
    for (auto& x : b) x = static_cast<std::int16_t>(draw(random));
    if (r > 0) a.resize(a.size() - gap);
    if (c > 0) b.resize(b.size() - 2 * gap);
    before.resize(r * out_stride);
    for (auto& x : before) x = static_cast<std::int32_t>(random());
  }

  /// By definition, in 64 bits and then modulo 2^32; all of `out`.
  [[nodiscard]] std::vector<std::int32_t> expected() const {
    std::vector<std::int32_t> out = before;
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < columns; ++j) {
        std::int64_t sum = out[i * out_stride + j];
        for (std::size_t k = 0; k < depth; ++k) sum += std::int64_t{a[i * a_stride + k]} * b[j * b_stride + k];
        out[i * out_stride + j] = static_cast<std::int32_t>(static_cast<std::uint32_t>(sum));
      }
    }
    return out;
  }
};

std::vector<instruction_set> available() {
  std::vector<instruction_set> all;
  for (const instruction_set set : {instruction_set::baseline, instruction_set::avx2, instruction_set::avx512})
    if (set <= best_instruction_set()) all.push_back(set);
  return all;
}

/// All of `out` after the library's product.
std::vector<std::int32_t> product(instruction_set set, const problem& p) {
  auto out = p.before;
  run_on<integer_gemm>(set, p.a.data(), p.a_stride, p.rows, p.b.data(), p.b_stride, p.columns, p.depth, out.data(), p.out_stride);
  return out;
}

void check(const problem& p) {
  CAPTURE(p.rows);
  CAPTURE(p.columns);
  CAPTURE(p.depth);
  const auto expected = p.expected();
  for (const instruction_set set : available()) {
    CAPTURE(static_cast<int>(set));
    CHECK(product(set, p) == expected);
  }
}

std::int32_t any(std::mt19937& random) { return static_cast<std::int16_t>(random()); }

}  // namespace

TEST_CASE("integer_gemm: any numbers of rows and columns, with and without gaps between rows") {
  for (std::size_t rows = 0; rows < 10; ++rows) {
    for (std::size_t columns = 0; columns < 7; ++columns) {
      for (const std::size_t gap : {std::size_t{0}, std::size_t{3}}) check(problem(rows, columns, 37, gap, any));
    }
  }
}

TEST_CASE("integer_gemm: any depth") {
  for (std::size_t depth = 0; depth < 140; ++depth) check(problem(5, 3, depth, 1, any));
  for (const std::size_t depth : {2047U, 2048U, 2049U, 4096U, 4135U, 6000U}) check(problem(6, 3, depth, 0, any));
}

TEST_CASE("integer_gemm: usual shapes") {
  check(problem(64, 256, 576, 0, any));
  check(problem(70, 64, 256, 0, any));
}

TEST_CASE("integer_gemm: the extreme factors wrap modulo 2^32") {
  constexpr std::int32_t low = std::numeric_limits<std::int16_t>::min();
  constexpr std::int32_t high = std::numeric_limits<std::int16_t>::max();
  for (const std::size_t depth : {1U, 2U, 3U, 7U, 8U, 16U, 17U, 32U, 34U, 64U, 2050U}) {
    check(problem(5, 3, depth, 0, [](std::mt19937&) { return low; }));
    check(problem(5, 3, depth, 0, [](std::mt19937&) { return high; }));
    check(problem(5, 3, depth, 0, [](std::mt19937& random) { return random() % 2 == 0 ? low : high; }));
  }
  problem p(1, 1, 2, 0, [](std::mt19937&) { return low; });
  p.before[0] = 0;
  CHECK(p.expected()[0] == std::numeric_limits<std::int32_t>::min());  // 2 * 2^30
  check(p);
}

TEST_CASE("integer_gemm: factors of 127 are exact up to the depth that the documentation names") {
  constexpr std::size_t depth = 133144;
  static_assert(std::int64_t{depth} * 127 * 127 < (std::int64_t{1} << 31) &&
                std::int64_t{depth + 1} * 127 * 127 >= (std::int64_t{1} << 31));
  for (const std::int32_t sign : {1, -1}) {
    problem p(1, 1, depth, 0, [](std::mt19937&) { return 127; });
    for (auto& x : p.b) x = static_cast<std::int16_t>(sign * x);
    p.before[0] = 0;
    for (const instruction_set set : available()) {
      CAPTURE(static_cast<int>(set));
      CHECK(product(set, p)[0] == sign * std::int32_t{depth * 127 * 127});
    }
  }
}

TEST_CASE("integer_gemm: the tile for other processors") {
  using tile = detail::gemm_tile;
  const problem p(tile::rows, tile::columns, 29, 2, any);
  const tile::rows_of_a a{p.a.data(), p.a.data() + p.a_stride, p.a.data() + 2 * p.a_stride, p.a.data() + 3 * p.a_stride};
  const tile::rows_of_b b{p.b.data(), p.b.data() + p.b_stride};
  tile::sums_type sums;
  tile::multiply(a, b, p.depth, sums);
  const auto expected = p.expected();
  for (std::size_t i = 0; i < tile::rows; ++i) {
    for (std::size_t j = 0; j < tile::columns; ++j) {
      const std::size_t at = i * p.out_stride + j;
      CHECK(tile::add(p.before[at], sums[i * tile::columns + j]) == expected[at]);
    }
  }
}

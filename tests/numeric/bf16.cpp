// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/numeric/bf16.hpp>

#include "number_line.hpp"

using namespace kvexact;

namespace {
const test::format described{8, 7, 127, true, 0x1.FEp127, 0x1p128, 0x1p-133};
const test::number_line line(described);
}  // namespace

TEST_CASE("bf16: constants") { test::check_constants<bf16>(described); }
TEST_CASE("bf16: every pattern reads as its definition and is written back") { test::check_every_pattern<bf16>(described); }
TEST_CASE("bf16: rounds every number, midpoint and their neighbours to nearest even") {
  test::check_rounding<bf16>(described, line, test::critical_floats(line));
}
TEST_CASE("bf16: rounds floats of the whole range to nearest even") { test::check_rounding<bf16>(described, line, test::spread_floats()); }
TEST_CASE("bf16: saturates and counts") {
  test::check_saturation<bf16>(described, line, test::critical_floats(line));
  test::check_saturation<bf16>(described, line, test::spread_floats());
}
TEST_CASE("bf16: NaNs of float") { test::check_float_nans<bf16>(described); }

TEST_CASE("bf16: known numbers") {
  static_assert(sizeof(bf16) == 2);
  static_assert(bf16::from_float(1.0F).bits == 0x3f80 && bf16::from_bits(0xc0a0).to_float() == -5.0F);
  CHECK(bf16::from_float(3.14159274F).bits == 0x4049);
  CHECK(bf16::from_float(0x1.FEp127F).bits == 0x7f7f);
  CHECK(bf16::from_float(0x1.FEFFFEp127F).bits == 0x7f7f);
  CHECK(bf16::from_float(0x1.FFp127F).bits == 0x7f80);
  CHECK(bf16::from_float(0x1p-133F).bits == 0x0001);
  CHECK(bf16::from_float(0x1p-134F).bits == 0x0000);
  CHECK(bf16::from_float(0x1.8p-133F).bits == 0x0002);
  CHECK(bf16::from_float(-0.0F).bits == 0x8000);
}

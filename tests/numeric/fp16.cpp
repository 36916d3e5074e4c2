// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/numeric/fp16.hpp>

#include "number_line.hpp"

using namespace kvexact;

namespace {
const test::format described{5, 10, 15, true, 65504.0, 65536.0, 0x1p-24};
const test::number_line line(described);
}  // namespace

TEST_CASE("fp16: constants") { test::check_constants<fp16>(described); }
TEST_CASE("fp16: every pattern reads as its definition and is written back") { test::check_every_pattern<fp16>(described); }
TEST_CASE("fp16: rounds every number, midpoint and their neighbours to nearest even") {
  test::check_rounding<fp16>(described, line, test::critical_floats(line));
}
TEST_CASE("fp16: rounds floats of the whole range to nearest even") { test::check_rounding<fp16>(described, line, test::spread_floats()); }
TEST_CASE("fp16: saturates and counts") {
  test::check_saturation<fp16>(described, line, test::critical_floats(line));
  test::check_saturation<fp16>(described, line, test::spread_floats());
}
TEST_CASE("fp16: NaNs of float") { test::check_float_nans<fp16>(described); }

TEST_CASE("fp16: known numbers") {
  static_assert(sizeof(fp16) == 2);
  static_assert(fp16::from_float(1.0F).bits == 0x3c00 && fp16::from_bits(0xc500).to_float() == -5.0F);
  CHECK(fp16::from_float(0.333333343F).bits == 0x3555);
  CHECK(fp16::from_float(65504.0F).bits == 0x7bff);
  CHECK(fp16::from_float(65519.996F).bits == 0x7bff);
  CHECK(fp16::from_float(65520.0F).bits == 0x7c00);
  CHECK(fp16::from_float(0x1p-14F).bits == 0x0400);
  CHECK(fp16::from_float(0x1p-24F).bits == 0x0001);
  CHECK(fp16::from_float(0x1p-25F).bits == 0x0000);
  CHECK(fp16::from_float(0x1.000002p-25F).bits == 0x0001);
  CHECK(fp16::from_float(-0.0F).bits == 0x8000);
}

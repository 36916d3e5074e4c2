// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include <doctest/doctest.h>

#include <kvexact/numeric/fp8_e4m3.hpp>

#include "number_line.hpp"

using namespace kvexact;

namespace {
const test::format described{4, 3, 7, false, 448.0, 480.0, 0x1p-9};
const test::number_line line(described);
}  // namespace

TEST_CASE("fp8_e4m3: constants") { test::check_constants<fp8_e4m3>(described); }
TEST_CASE("fp8_e4m3: every pattern reads as its definition and is written back") { test::check_every_pattern<fp8_e4m3>(described); }
TEST_CASE("fp8_e4m3: rounds every number, midpoint and their neighbours to nearest even") {
  test::check_rounding<fp8_e4m3>(described, line, test::critical_floats(line));
}
TEST_CASE("fp8_e4m3: rounds floats of the whole range to nearest even") {
  test::check_rounding<fp8_e4m3>(described, line, test::spread_floats());
}
TEST_CASE("fp8_e4m3: saturates and counts") {
  test::check_saturation<fp8_e4m3>(described, line, test::critical_floats(line));
  test::check_saturation<fp8_e4m3>(described, line, test::spread_floats());
}
TEST_CASE("fp8_e4m3: NaNs of float") { test::check_float_nans<fp8_e4m3>(described); }

TEST_CASE("fp8_e4m3: known numbers") {
  static_assert(sizeof(fp8_e4m3) == 1);
  static_assert(fp8_e4m3::from_float(1.0F).bits == 0x38 && fp8_e4m3::from_bits(0xca).to_float() == -5.0F);
  CHECK(fp8_e4m3::from_float(448.0F).bits == 0x7e);
  CHECK(fp8_e4m3::from_float(464.0F).bits == 0x7e);
  CHECK(fp8_e4m3::from_float(464.00003F).bits == 0x7f);
  CHECK(fp8_e4m3::from_float(std::numeric_limits<float>::infinity()).bits == 0x7f);
  CHECK(fp8_e4m3::from_float(-std::numeric_limits<float>::infinity()).bits == 0xff);
  CHECK(fp8_e4m3::from_float(0x1p-6F).bits == 0x08);
  CHECK(fp8_e4m3::from_float(0x1p-9F).bits == 0x01);
  CHECK(fp8_e4m3::from_float(0x1p-10F).bits == 0x00);
  CHECK(fp8_e4m3::from_float(0x1.8p-9F).bits == 0x02);
  CHECK(fp8_e4m3::from_float(-0.0F).bits == 0x80);
}

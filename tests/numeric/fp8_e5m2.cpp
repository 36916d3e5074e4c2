// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvexact/numeric/fp8_e5m2.hpp>

#include "number_line.hpp"

using namespace kvexact;

namespace {
const test::format described{5, 2, 15, true, 57344.0, 65536.0, 0x1p-16};
const test::number_line line(described);
}  // namespace

TEST_CASE("fp8_e5m2: constants") { test::check_constants<fp8_e5m2>(described); }
TEST_CASE("fp8_e5m2: every pattern reads as its definition and is written back") { test::check_every_pattern<fp8_e5m2>(described); }
TEST_CASE("fp8_e5m2: rounds every number, midpoint and their neighbours to nearest even") {
  test::check_rounding<fp8_e5m2>(described, line, test::critical_floats(line));
}
TEST_CASE("fp8_e5m2: rounds floats of the whole range to nearest even") {
  test::check_rounding<fp8_e5m2>(described, line, test::spread_floats());
}
TEST_CASE("fp8_e5m2: saturates and counts") {
  test::check_saturation<fp8_e5m2>(described, line, test::critical_floats(line));
  test::check_saturation<fp8_e5m2>(described, line, test::spread_floats());
}
TEST_CASE("fp8_e5m2: NaNs of float") { test::check_float_nans<fp8_e5m2>(described); }

TEST_CASE("fp8_e5m2: known numbers") {
  static_assert(sizeof(fp8_e5m2) == 1);
  static_assert(fp8_e5m2::from_float(1.0F).bits == 0x3c && fp8_e5m2::from_bits(0xc5).to_float() == -5.0F);
  CHECK(fp8_e5m2::from_float(57344.0F).bits == 0x7b);
  CHECK(fp8_e5m2::from_float(61439.996F).bits == 0x7b);
  CHECK(fp8_e5m2::from_float(61440.0F).bits == 0x7c);
  CHECK(fp8_e5m2::from_float(0x1p-14F).bits == 0x04);
  CHECK(fp8_e5m2::from_float(0x1p-16F).bits == 0x01);
  CHECK(fp8_e5m2::from_float(0x1p-17F).bits == 0x00);
  CHECK(fp8_e5m2::from_float(0x1.8p-16F).bits == 0x02);
  CHECK(fp8_e5m2::from_float(-0.0F).bits == 0x80);
}

// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <xxhash.h>

#include <Eigen/Core>

#include <kvexact/kvexact.hpp>

int main() {
  const std::string version =
      std::to_string(KVEXACT_VERSION_MAJOR) + "." + std::to_string(KVEXACT_VERSION_MINOR) + "." + std::to_string(KVEXACT_VERSION_PATCH);
  const bool same_version = version == EXPECTED_VERSION;
  const bool converts = kvexact::bf16::from_float(1.0F).bits == 0x3f80;
  const bool hashes = XXH64("", 0, 0) == 0xef46db3751d8e999U;
  const bool solves = Eigen::Vector2f(3.0F, 4.0F).norm() == 5.0F;
  return same_version && converts && hashes && solves ? 0 : 1;
}

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/run.sh [PRESET...]
# Builds and runs the tests of the given presets, by default all that matter: clang, asan, release. On Debian, installs what is missing
# first. Warnings are errors, but for asan, where the sanitizers' own code makes g++ warn.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

presets=("$@")
if [ ${#presets[@]} -eq 0 ]; then
  presets=(clang asan release)
fi

cmake/install_packages.sh build test

jobs=$(nproc)
for preset in "${presets[@]}"; do
  echo "== $preset"
  werror=ON
  if [ "$preset" = asan ]; then
    werror=OFF
  fi
  cmake --preset "$preset" -DCMAKE_COMPILE_WARNING_AS_ERROR=$werror >/dev/null
  cmake --build --preset "$preset" --parallel "$jobs"
  ctest --preset "$preset" --parallel "$jobs"
done

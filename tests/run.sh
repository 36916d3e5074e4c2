#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tests/run.sh [PRESET...]
# Builds and runs the tests of the given presets, by default with both compilers: asan (clang++, sanitizers) and release (g++). On Debian,
# installs what is missing first. Warnings are errors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

presets=("$@")
if [ ${#presets[@]} -eq 0 ]; then
  presets=(asan release)
fi

cmake/install_packages.sh build test

jobs=$(nproc)
for preset in "${presets[@]}"; do
  echo "== $preset"
  cmake --preset "$preset" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON >/dev/null
  cmake --build --preset "$preset" --parallel "$jobs"
  ctest --preset "$preset" --parallel "$jobs"
done

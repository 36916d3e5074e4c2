#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: build.sh OUTPUT COMPILER [OPTION...]      builds program.cpp
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
output=$1
shift
"$@" -std=c++20 -ffp-contract=off -DXXH_INLINE_ALL -I"$root/include" -I"$root/examples" "${BASH_SOURCE[0]%/*}/program.cpp" -pthread -o "$output"

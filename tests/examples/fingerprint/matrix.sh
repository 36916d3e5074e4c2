#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# usage: matrix.sh MODEL TOKENS COUNT
# The fingerprints of a real model from g++ and clang++ at -O0, -O2 and -O3 -march=native, with 1 and 2 threads and, but for -O0, without
# vector instructions. Prints them once and fails at the first build whose fingerprints differ. Takes some minutes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for compiler in g++ clang++; do
  for options in -O0 -O2 "-O3 -march=native"; do
    read -ra list <<<"$options"
    "$here/build.sh" "$folder/program" "$compiler" "${list[@]}"
    runs=("1 avx512" "2 avx512" "2 avx2" "2 baseline")
    [[ $options == -O0 ]] && runs=("${runs[@]:0:2}")
    for run in "${runs[@]}"; do
      read -r threads isa <<<"$run"
      "$folder/program" "$threads" "$isa" "$@" >"$folder/now"
      [[ -f $folder/first ]] || { cp "$folder/now" "$folder/first" && cat "$folder/first"; }
      diff "$folder/first" "$folder/now" || { echo "differs: $compiler $options, $threads threads, $isa" >&2; exit 1; }
      echo "same: $compiler $options, $threads threads, $isa"
    done
  done
done

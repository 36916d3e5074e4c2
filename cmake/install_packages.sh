#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing on Debian, as root; elsewhere says what is missing. Nothing missing: no network, no output.
#   usage: cmake/install_packages.sh [build] [test] [demo]
set -euo pipefail

tools=()     # name:package, wherever the tool comes from
libraries=() # Debian packages
for purpose in "$@"; do
  case $purpose in
    build)
      tools+=(g++:g++ cmake:cmake ninja:ninja-build python3:python3)
      libraries+=(libxxhash-dev libeigen3-dev nlohmann-json3-dev libcli11-dev)
      ;;
    test)
      tools+=(clang++:clang git:git)
      libraries+=(doctest-dev libbenchmark-dev libclang-rt-dev)
      ;;
    demo)
      tools+=(zstd:zstd)
      libraries+=(fortunes python3-venv)
      ;;
    *)
      echo "install_packages.sh: unknown purpose $purpose" >&2
      exit 2
      ;;
  esac
done

missing=()
for tool in "${tools[@]}"; do
  command -v "${tool%%:*}" >/dev/null || missing+=("${tool#*:}")
done
if command -v dpkg-query >/dev/null; then
  installed=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' "${libraries[@]}" 2>/dev/null || true)
  for library in "${libraries[@]}"; do
    grep -qx "$library installed" <<<"$installed" || missing+=("$library")
  done
fi
[[ ${#missing[@]} -gt 0 ]] || exit 0
if ! command -v apt-get >/dev/null || [[ $(id -u) -ne 0 ]]; then
  echo "missing: ${missing[*]}; install them (on Debian, as root: apt-get install ${missing[*]}) and run this again" >&2
  exit 1
fi
echo "installing with apt-get: ${missing[*]}"
apt-get -qq update
DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends "${missing[@]}" >/dev/null

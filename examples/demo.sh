#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job from nothing to a table: real KV caches of SmolLM2-135M, encoded and decoded; then some tokens decoded speculatively.
#   usage: examples/demo.sh [CALIBRATION=4] [HELD_OUT=1] [documents|chunks] [--json FILE]
#   CALIBRATION, HELD_OUT   sequences of 1024 tokens to calibrate on (1 to 24) and to measure (1 to 6); docs/results.md has 24 and 6
#   documents, chunks       calibration and held-out text from different documents (default), or from one shuffled mixture
#   FILE                    gets the table as JSON
#   KVEXACT_CACHE           where downloads and caches are kept (default ~/.cache/kvexact; 0.1 GB a sequence)
# Installs what is missing (on Debian, as root), fetches the model (93 MB, the first time only) and builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '3,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi
export KVEXACT_CACHE=${KVEXACT_CACHE:-$HOME/.cache/kvexact}

cmake/install_packages.sh build demo
examples/smollm2/fetch.sh
if [[ ! -f $KVEXACT_CACHE/tokens/complete ]]; then
  echo "text: fortunes and Python's documentation"
  "$KVEXACT_CACHE/venv/bin/python" examples/smollm2/make_tokens.py
  touch "$KVEXACT_CACHE/tokens/complete"
fi

echo "building"
cmake --preset release >/dev/null
cmake --build --preset release --target smollm2_batch smollm2_cache smollm2_codec smollm2_generate kvexact_tool | tail -n 1
python3 examples/demo.py "$@"

echo
echo "exact speculative decoding: drafts on a KVarN cache of 4 bits, the same without drafts beside it"
build/release/examples/smollm2_generate --tokens "$KVEXACT_CACHE/tokens/documents/held_out_00.txt" --max-tokens 48 --compressor "KVarN 4" \
  --draft-length 6 --compare

echo
echo "and prompts of four kinds in a batch, on three kinds of draft cache: tokens and K/V rows of plain decoding"
"$KVEXACT_CACHE/venv/bin/python" examples/smollm2/make_prompts.py "$KVEXACT_CACHE/tokens/prompts" 8
build/release/examples/smollm2_batch --tokens "$KVEXACT_CACHE"/tokens/prompts/*.txt --max-tokens 32 --draft-length 6 \
  --only "KVarN 4" "TurboQuant 3, 3" "SnapKV, a quarter" --skip centred "in int4" "in TurboQuant"

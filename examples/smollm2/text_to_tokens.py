# SPDX-License-Identifier: Apache-2.0
"""A text file (UTF-8) as SmolLM2's token ids, decimal. usage: "$KVEXACT_CACHE/venv/bin/python" text_to_tokens.py TEXT TOKENS [MAXIMUM]"""
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # the import below would leave a folder in the clone
from make_tokens import open_tokenizer, write_tokens

if len(sys.argv) not in (3, 4):
    sys.exit(__doc__)
text = Path(sys.argv[1]).read_text(encoding="utf8")
ids = open_tokenizer().encode(text, add_special_tokens=False).ids
if len(sys.argv) == 4:
    ids = ids[: int(sys.argv[3])]
write_tokens(Path(sys.argv[2]), ids)
print(f"{len(ids)} tokens in {sys.argv[2]}")

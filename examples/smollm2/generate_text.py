# SPDX-License-Identifier: Apache-2.0
"""Continues a text with SmolLM2-135M by exact speculative decoding.

Run it with the Python that fetch.sh made; options after -- go to smollm2_generate:
  "$KVEXACT_CACHE/venv/bin/python" generate_text.py "Once upon a time" -- --compressor "KVarN 4" --max-tokens 100 --compare
  "$KVEXACT_CACHE/venv/bin/python" generate_text.py --chat "Why is the sky blue?" -- --temperature 0.7 --seed 3
"""
import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True  # the import below would leave a folder in the clone
from make_tokens import open_tokenizer, write_tokens

ROOT = Path(__file__).resolve().parents[2]
END_OF_TURN = "<|im_end|>"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", help="the prompt; - reads it from standard input")
parser.add_argument("--chat", action="store_true", help="the text is a question to the model, which ends its answer by itself")
parser.add_argument("--tool", default=ROOT / "build/release/examples/smollm2_generate", help="default: that of the release build")
split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
arguments = parser.parse_args(sys.argv[1:split])

tokenizer = open_tokenizer()
text = sys.stdin.read() if arguments.text == "-" else arguments.text
options = sys.argv[split + 1 :]
if arguments.chat:
    text = f"<|im_start|>user\n{text}{END_OF_TURN}\n<|im_start|>assistant\n"
    options += ["--end", str(tokenizer.token_to_id(END_OF_TURN))]
with tempfile.TemporaryDirectory() as folder:
    prompt = Path(folder) / "prompt.txt"
    write_tokens(prompt, tokenizer.encode(text, add_special_tokens=False).ids)
    run = subprocess.run([arguments.tool, "--tokens", prompt, *options], stdout=subprocess.PIPE, text=True)
ids = [int(each) for each in run.stdout.split()]
print(tokenizer.decode(ids, skip_special_tokens=True))
sys.exit(run.returncode)

# SPDX-License-Identifier: Apache-2.0
"""Text for calibration and measurement as token ids: Debian's fortunes and Python's own documentation, SmolLM2's tokens.

Run it with the Python that fetch.sh made: "$KVEXACT_CACHE/venv/bin/python" make_tokens.py. It writes files of decimal ids, one
sequence of --length tokens a file:
  FOLDER/documents/{calibration,held_out}_NN.txt   calibration and held-out sequences come from different documents
  FOLDER/chunks/{calibration,held_out}_NN.txt      both are drawn from one shuffled mixture, so they share documents
The documentation is that of the running interpreter, so ids differ a little from one Python version to the next.
"""
import argparse
import os
import pydoc
import random
import re
import shutil
import sys
import tempfile
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

from tokenizers import Tokenizer

CACHE = Path(os.environ.get("KVEXACT_CACHE") or Path.home() / ".cache/kvexact")
FORTUNES = Path("/usr/share/games/fortunes")
# A held-out document after every few others, so that both kinds and all subjects are spread over both sides.
FORTUNE_DOCUMENTS = (
    "literature science people work wisdom politics news law education humorists miscellaneous platitudes definitions "
    "medicine computers food love art songs-poems startrek sports riddles"
).split()
PYTHON_DOCUMENTS = "decimal statistics argparse logging typing json unittest datetime collections random threading sqlite3 asyncio".split()
HELD_OUT_EVERY = 4


def open_tokenizer(folder: Path = CACHE / "smollm2-135m") -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # text that looks like a control token stays text
    return tokenizer


def write_tokens(path: Path, ids: list[int]) -> None:
    """Decimal ids, 16 a line; the file appears when it is complete."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text("".join(" ".join(map(str, ids[i : i + 16])) + "\n" for i in range(0, len(ids), 16)))
    temporary.replace(path)


def fortune_texts() -> dict[str, str]:
    found = {name: FORTUNES / name for name in FORTUNE_DOCUMENTS if (FORTUNES / name).exists()}
    if not found:
        sys.exit(f"make_tokens.py: no fortunes in {FORTUNES} (on Debian: apt-get install fortunes)")
    return {name: path.read_text(encoding="utf8", errors="ignore").replace("%\n", "\n") for name, path in found.items()}


def python_texts() -> dict[str, str]:
    texts = {}
    for name in PYTHON_DOCUMENTS:
        text = re.sub(r".\x08", "", pydoc.render_doc(import_module(name)))  # overstrikes, the terminal's bold face
        texts[name] = re.sub(r" at 0x[0-9a-f]+>", ">", text)[:60000]  # addresses differ from run to run
    return texts


def cut(text: str, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return [ids[i : i + length] for i in range(0, len(ids) - length, length)]


def interleave(lists: list[list]) -> list:
    return [item for row in zip_longest(*lists) for item in row if item is not None]


def split_by_documents(kinds: list[dict[str, list]]) -> tuple[list, list]:
    """Sequences for calibration and held-out, best spread first: kinds of text alternate, then documents, then places in a document."""
    sides = ([], [])
    for held_out, side in enumerate(sides):
        per_kind = []
        for documents in kinds:
            names = [n for i, n in enumerate(documents) if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == bool(held_out)]
            shuffled = []
            for name in names:
                chunks = list(documents[name])
                random.Random(name).shuffle(chunks)
                shuffled.append(chunks)
            per_kind.append(interleave(shuffled))
        side.extend(interleave(per_kind))
    return sides


def split_by_chunks(kinds: list[dict[str, list]], calibration: int) -> tuple[list, list]:
    mixture = [chunk for documents in kinds for chunks in documents.values() for chunk in chunks]
    random.Random(0).shuffle(mixture)
    return mixture[:calibration], mixture[calibration:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CACHE / "tokens", metavar="FOLDER", help="default: %(default)s; replaced if it exists")
    parser.add_argument("--calibration", type=int, default=24, metavar="N", help="calibration sequences (default %(default)s)")
    parser.add_argument("--held-out", type=int, default=6, metavar="N", help="held-out sequences (default %(default)s)")
    parser.add_argument("--length", type=int, default=1024, metavar="N", help="tokens a sequence (default %(default)s)")
    options = parser.parse_args()

    tokenizer = open_tokenizer()
    kinds = [
        {name: cut(text, tokenizer, options.length) for name, text in texts.items()} for texts in (fortune_texts(), python_texts())
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tokens.", dir=options.out.parent) as folder:
        for split, sides in (("documents", split_by_documents(kinds)), ("chunks", split_by_chunks(kinds, options.calibration))):
            (Path(folder) / "tokens" / split).mkdir(parents=True)
            for name, wanted, sequences in zip(("calibration", "held_out"), (options.calibration, options.held_out), sides):
                if len(sequences) < wanted:
                    sys.exit(f"make_tokens.py: the {split} split has only {len(sequences)} {name} sequences of {options.length} tokens")
                for i, ids in enumerate(sequences[:wanted]):
                    write_tokens(Path(folder) / "tokens" / split / f"{name}_{i:02}.txt", ids)
        if options.out.exists():
            shutil.rmtree(options.out)
        (Path(folder) / "tokens").rename(options.out)
    print(f"{options.calibration} + {options.held_out} sequences of {options.length} tokens for each split in {options.out}")


if __name__ == "__main__":
    main()

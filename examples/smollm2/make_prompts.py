# SPDX-License-Identifier: Apache-2.0
"""Prompts of four kinds as token ids: prose, code, questions, lists; from Debian's fortunes, Python's standard library, and templates.

usage: "$KVEXACT_CACHE/venv/bin/python" make_prompts.py FOLDER [PROMPTS]
Writes FOLDER/NNN_kind.txt for smollm2_batch, kinds in turn, by default 200. Text is that of the running machine, so ids differ a little from
one release to the next.
"""
import inspect
import itertools
import random
import sys
from importlib import import_module
from pathlib import Path

sys.dont_write_bytecode = True  # the import below would leave a folder in the clone
from make_tokens import fortune_texts, open_tokenizer, write_tokens

LONGEST = 96  # tokens of a prompt
MODULES = "argparse ast asyncio.tasks calendar collections configparser csv dataclasses datetime difflib email.message fractions heapq".split()
SUBJECTS = (
    "the moon, a volcano, bread, the heart, gravity, a rainbow, the printing press, glass, honey, the ocean, electricity, a violin, vaccines, "
    "the Roman Empire, photosynthesis, a computer, paper, the immune system, chess, an earthquake, coffee, the periodic table, a bridge, "
    "sleep, music, democracy, the telephone, steel, a glacier, memory"
).split(", ")
QUESTIONS = (
    "<|im_start|>user\nWhat is {0}, and why does it matter?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nHow would you explain {0} to a child?<|im_end|>\n<|im_start|>assistant\n",
    "Question: Who first studied {0}, and what did they find?\nAnswer:",
)
LISTS = (
    "Ten things to know about {0}:\n\n1.",
    "A shopping list for a party whose theme is {0}:\n-",
    "<|im_start|>user\nGive me a numbered list of facts about {0}.<|im_end|>\n<|im_start|>assistant\n1.",
)


def prose():
    texts = [part.strip() for text in fortune_texts().values() for part in text.split("\n\n")]
    return [text for text in texts if len(text) > 200]


def code():
    """Beginnings of functions and classes, cut in the middle."""
    found = []
    for name in MODULES:
        lines = inspect.getsource(import_module(name)).splitlines()
        starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "class "))]
        found += ["\n".join(lines[i : i + 12]) for i in starts if i + 12 < len(lines)]
    return found


def filled(templates):
    return [template.format(subject) for template, subject in itertools.product(templates, SUBJECTS)]


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder, wanted = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 200
    kinds = {"prose": prose(), "code": code(), "question": filled(QUESTIONS), "list": filled(LISTS)}
    for name, texts in kinds.items():
        random.Random(name).shuffle(texts)
        if len(texts) < (wanted + len(kinds) - 1) // len(kinds):
            sys.exit(f"make_prompts.py: only {len(texts)} prompts of the kind {name}")
    tokenizer = open_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(wanted):
        name = list(kinds)[i % len(kinds)]
        # The markers of turns are the model's own control tokens.
        tokenizer.encode_special_tokens = name in ("prose", "code")
        ids = tokenizer.encode(kinds[name][i // len(kinds)], add_special_tokens=False).ids
        write_tokens(folder / f"{i:03}_{name}.txt", ids[:LONGEST])
    print(f"{wanted} prompts in {folder}")


if __name__ == "__main__":
    main()

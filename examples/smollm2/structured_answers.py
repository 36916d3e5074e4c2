# SPDX-License-Identifier: Apache-2.0
"""How often a structured answer breaks when SmolLM2-135M decodes on a lossy cache, as a table in Markdown.

Run it with the Python that fetch.sh made:
  "$KVEXACT_CACHE/venv/bin/python" structured_answers.py --tool build/release/examples/smollm2_answers --calibration FILE
The prompts are made here: records as text, or as JSON with other fields, and the beginning of their JSON; lists of functions and of
tests, and the beginning of their Python. The model goes on. A cell says how many answers, cut to that many tokens, are the beginning of
something valid (JSON; for Python, up to the last whole line) and how many are the full cache's. A prompt counts as long as the full
cache's answer is valid.
"""
import argparse
import codeop
import json
import random
import re
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

sys.dont_write_bytecode = True  # the import below would leave a folder in the clone
from make_tokens import open_tokenizer, write_tokens

FULL_CACHE = "none"  # its name among the methods

FIRST_NAMES = "Mira Ivo Tamsin Joren Adela Bashir Odile Ruben Saskia Kofi Petra Lennart Noor Emeka Freya Hamid Ingrid Jules Katya Omar".split()
LAST_NAMES = "Olsen Brandt Achterberg Mensah Kowalski Duval Lindqvist Haddad Novak Ferreira Okafor Sato Brennan Varga Ilves Rossi".split()
TOWNS = "Bergen Porto Gdansk Utrecht Lyon Tartu Graz Malmo Cork Split Ghent Turku Bilbao Brno Aarhus Verona".split()
JOBS = "carpenter nurse surveyor baker pilot welder botanist editor plumber chemist tailor geologist".split()
GOODS = "kettle lantern hammer blanket compass teapot ladder basket mirror candle shovel bucket".split()
COLOURS = "copper green black oak blue steel red white".split()
SERVICES = "billing search mailer gateway archive reports sessions uploads metrics catalogue scheduler profiles".split()
STATES = "open closed waiting".split()


# Of each kind of prompt: what the answer is about, and the answer's beginning.


def person(rng: random.Random) -> dict:
    return {
        "name": f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        "age": rng.randint(19, 79),
        "town": rng.choice(TOWNS),
        "job": rng.choice(JOBS),
        "member": rng.random() < 0.5,
    }


def order(rng: random.Random) -> dict:
    items = [
        {"item": f"{rng.choice(COLOURS)} {rng.choice(GOODS)}", "count": rng.randint(1, 9), "price": rng.randint(200, 9900) / 100}
        for _ in range(rng.randint(1, 3))
    ]
    return {"customer": rng.choice(LAST_NAMES), "items": items}


def service(rng: random.Random) -> dict:
    return {
        "service": rng.choice(SERVICES),
        "port": rng.randint(1024, 9999),
        "limits": {"memory": rng.choice([128, 256, 512, 1024]), "cpu": rng.randint(1, 16) / 4},
        "hosts": [f"{rng.choice('abcdef')}{rng.randint(10, 99)}.local" for _ in range(rng.randint(1, 3))],
        "backup": rng.choice([True, False, None]),
    }


def ticket(rng: random.Random) -> dict:
    return {
        "ticket": f"{rng.choice('ABCDEF')}-{rng.randint(100, 999)}",
        "owner": rng.choice(FIRST_NAMES),
        "status": rng.choice(STATES),
        "hours": rng.randint(1, 40),
        "tags": rng.sample(GOODS, 2),
    }


def person_line(record: dict) -> str:
    return f"{record['name']}; {record['age']} years; {record['town']}; {record['job']}; {'member' if record['member'] else 'guest'}"


def order_line(record: dict) -> str:
    items = " and ".join(f"{i['count']} x {i['item']} at {i['price']:.2f}" for i in record["items"])
    return f"{record['customer']}: {items}"


def service_lines(record: dict) -> str:
    backup = {True: "yes", False: "no", None: "not set"}[record["backup"]]
    limits = record["limits"]
    return (
        f"{record['service']}, port {record['port']}, memory {limits['memory']}, cpu {limits['cpu']}, "
        f"hosts {' '.join(record['hosts'])}, backup {backup}"
    )


def renamed(record: dict) -> dict:
    """The ticket with its fields renamed and put in another order."""
    return {
        "id": record["ticket"],
        "state": record["status"],
        "person": record["owner"],
        "effort": {"hours": record["hours"]},
        "tags": record["tags"],
    }


def json_prompt(rng: random.Random, make, line, change=lambda record: record, count: int = 14, shown: int = 4) -> tuple[str, str]:
    """Numbered records, and the JSON of the first ones up to the number of the next."""
    records = [make(rng) for _ in range(count)]
    listing = "".join(f"{i + 1}. {line(record)}\n" for i, record in enumerate(records))
    begun = "".join("  " + json.dumps({"number": i + 1} | change(record)) + ",\n" for i, record in enumerate(records[:shown]))
    return f"Records:\n{listing}\nThe same as JSON:\n", f'[\n{begun}  {{"number": {shown + 1},'


FORMULAS = {
    "area_of_rectangle": ("width, height", "width * height"),
    "speed": ("distance, hours", "distance / hours"),
    "to_kelvin": ("celsius", "celsius + 273.15"),
    "to_fahrenheit": ("celsius", "celsius * 9 / 5 + 32"),
    "price_with_tax": ("price, rate", "price * (1 + rate)"),
    "discounted": ("price, percent", "price - price * percent / 100"),
    "volume_of_box": ("width, height, depth", "width * height * depth"),
    "density": ("mass, volume", "mass / volume"),
    "body_mass_index": ("mass, height", "mass / (height * height)"),
    "kinetic_energy": ("mass, speed", "0.5 * mass * speed * speed"),
    "simple_interest": ("amount, rate, years", "amount * rate * years"),
    "average": ("first, second", "(first + second) / 2"),
    "to_miles": ("kilometres", "kilometres * 0.621371"),
    "to_minutes": ("hours, minutes", "hours * 60 + minutes"),
    "perimeter": ("width, height", "2 * (width + height)"),
    "power": ("voltage, current", "voltage * current"),
    "resistance": ("voltage, current", "voltage / current"),
    "momentum": ("mass, speed", "mass * speed"),
    "pressure": ("force, area", "force / area"),
    "triangle_area": ("base, height", "base * height / 2"),
}


def function_text(name: str) -> str:
    arguments, formula = FORMULAS[name]
    checks = " or ".join(f"{argument} < 0" for argument in arguments.split(", "))
    return (
        f'def {name}({arguments}):\n    """{name.replace("_", " ").capitalize()}: {formula}."""\n    if {checks}:\n'
        f'        raise ValueError("{name} needs positive numbers")\n    return {formula}\n'
    )


def code_prompt(comments: list[str], code: list[str], shown: int) -> tuple[str, str]:
    """A list of comments, then each again with its code."""
    begun = "".join(f"{comment}\n{text}\n\n" for comment, text in zip(comments[:shown], code))
    return "\n".join(comments) + "\n\n", begun + "#"


def function_prompt(rng: random.Random) -> tuple[str, str]:
    names = rng.sample(sorted(FORMULAS), 12)
    comments = [f"# {i + 1}. {name}({FORMULAS[name][0]}) = {FORMULAS[name][1]}" for i, name in enumerate(names)]
    return code_prompt(comments, [function_text(name) for name in names], shown=3)


def test_prompt(rng: random.Random) -> tuple[str, str]:
    comments, code = [], []
    for i, name in enumerate(rng.sample(sorted(FORMULAS), 14)):
        arguments, formula = FORMULAS[name]
        values = {argument: rng.randint(2, 60) for argument in arguments.split(", ")}
        call = f"{name}({', '.join(map(str, values.values()))})"
        expected = round(eval(formula, {}, values), 2)  # a formula of this file
        comments.append(f"# {i + 1}. {call} is {expected}")
        message = f'f"{call} is {{result}}, not {expected}"'
        code.append(f"def test_{name}():\n    result = {call}\n    assert round(result, 2) == {expected}, {message}\n")
    return code_prompt(comments, code, shown=4)


KINDS = {
    "people": ("json", lambda rng: json_prompt(rng, person, person_line)),
    "orders": ("json", lambda rng: json_prompt(rng, order, order_line, count=11, shown=3)),
    "services": ("json", lambda rng: json_prompt(rng, service, service_lines, count=11, shown=3)),
    "tickets": ("json", lambda rng: json_prompt(rng, ticket, json.dumps, renamed, count=12)),
    "functions": ("python", function_prompt),
    "tests": ("python", test_prompt),
}


# What a token of JSON is, and the beginning of one at the end of the text.
TOKEN = re.compile(r'[ \t\r\n]+|[{}\[\],:]|"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"|true|false|null')
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
BEGINNING = re.compile(
    r'(?:"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*(?:\\(?:u[0-9a-fA-F]{0,3})?)?'
    r"|-|-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE][+-]?[0-9]*|t|tr|tru|f|fa|fal|fals|n|nu|nul)\Z"
)


def end_of_json(text: str) -> int | None:
    """Where the first JSON value of the text ends; len(text) + 1 where more must follow; None where nothing that follows makes it valid."""
    open_now: list[str] = []  # brackets
    wanted = {"value"}
    at = 0
    while at < len(text):
        if BEGINNING.match(text, at):
            kind = "key" if text[at] == '"' and "key" in wanted else "value"
            return len(text) + 1 if kind in wanted else None
        found = TOKEN.match(text, at) or NUMBER.match(text, at)
        if not found:
            return None
        token, at = found.group(), found.end()
        if token.isspace():
            continue
        if token in ",:":
            if token not in wanted:
                return None
            wanted = {"value"} if token == ":" or open_now[-1] == "[" else {"key"}
            continue
        if token[0] == '"' and "key" in wanted:
            wanted = {":"}
            continue
        if token in "]}":
            if token not in wanted:
                return None
            open_now.pop()
        elif "value" not in wanted:
            return None
        elif token in "[{":
            open_now.append(token)
            wanted = {"value", "]"} if token == "[" else {"key", "}"}
            continue
        if not open_now:
            return at
        wanted = {",", "]"} if open_now[-1] == "[" else {",", "}"}
    return len(text) + 1


def python_begins(text: str) -> bool:
    """Whether the whole lines of the text can be the beginning of a Python program."""
    source = text[: text.rfind("\n") + 1]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codeop.compile_command(source, symbol="exec")
    except (SyntaxError, ValueError, OverflowError):
        return False
    return True


class Prompt:
    def __init__(self, name: str, language: str, text: str, beginning: str):
        self.name, self.language, self.text, self.beginning = name, language, text, beginning

    def is_valid(self, answer: str, ended: bool) -> bool:
        """`ended`: the model wrote its end of text."""
        text = self.beginning + answer
        if self.language == "python":
            return python_begins(text + "\n" if ended else text)
        end = end_of_json(text)
        return end is not None and not (ended and end > len(text))


class Answer:
    """An answer in tokens; what stands behind the end of its JSON value or the model's end of text is cut off."""

    def __init__(self, prompt: Prompt, ids: list[int], tokenizer, ends: set[int]):
        self.prompt, self.tokenizer = prompt, tokenizer
        self.ids, self.ended = ids, False
        for i, token in enumerate(ids):
            if token in ends:
                self.ids, self.ended = ids[:i], True
                break
        if prompt.language == "json":
            low, high = 0, len(self.ids)  # the least number of tokens that hold a whole value, if any does
            if self.is_complete(high):
                while low < high:
                    middle = (low + high) // 2
                    low, high = (low, middle) if self.is_complete(middle) else (middle + 1, high)
                self.ids, self.ended = self.ids[:low], False

    def text(self, length: int) -> str:
        return self.tokenizer.decode(self.ids[:length])

    def is_complete(self, length: int) -> bool:
        text = self.prompt.beginning + self.text(length)
        end = end_of_json(text)
        return end is not None and end <= len(text)

    def is_valid(self, length: int) -> bool:
        return self.prompt.is_valid(self.text(length), self.ended and length > len(self.ids))


def make_prompts(each: int) -> list[Prompt]:
    prompts = []
    for i in range(each):
        for kind, (language, make) in KINDS.items():
            text, beginning = make(random.Random(f"{kind} {i}"))
            prompts.append(Prompt(f"{kind}_{i:02}", language, text + beginning, beginning))
    return prompts


def table(prompts: list[Prompt], answers: dict[str, dict[str, Answer]], lengths: list[int]) -> str:
    """Markdown: a row for each method, for JSON and Python."""
    full = answers[FULL_CACHE]
    lines = []
    for language, title in (("json", "JSON"), ("python", "Python")):
        own = [p for p in prompts if p.language == language]
        if not own:
            continue
        counted = {n: [p for p in own if full[p.name].is_valid(n)] for n in lengths}
        lines.append(f"| {title}: valid / the full cache's | " + " | ".join(f"{n} tokens" for n in lengths) + " |")
        lines.append("|---" * (1 + len(lengths)) + "|")
        lines.append("| answers counted | " + " | ".join(str(len(counted[n])) for n in lengths) + " |")
        for method, by_prompt in answers.items():
            cells = []
            for n in lengths:
                valid = sum(by_prompt[p.name].is_valid(n) for p in counted[n])
                same = sum(by_prompt[p.name].ids[:n] == full[p.name].ids[:n] for p in counted[n])
                cells.append(f"{valid} / {same}")
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", type=Path, required=True, metavar="FILE", help="smollm2_answers")
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="token ids of other text, for means of channels")
    parser.add_argument("--each", type=int, default=2, metavar="N", help="prompts of each of the six kinds (default %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128, 256], metavar="N", help="default: 16 32 64 128 256")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="methods whose names hold one of these, and the full cache")
    parser.add_argument("--skip", nargs="+", default=[], metavar="TEXT", help="no methods whose names hold one of these")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default %(default)s")
    parser.add_argument("--answers", type=Path, metavar="FOLDER", help="write prompts and answers there as text")
    options = parser.parse_args()
    if not options.tool.is_file():
        parser.error(f"--tool: there is no {options.tool}")

    tokenizer = open_tokenizer()
    ends = {tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")}
    prompts = make_prompts(options.each)
    by_name = {prompt.name: prompt for prompt in prompts}
    answers: dict[str, dict[str, Answer]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        for prompt in prompts:
            write_tokens(Path(folder) / f"{prompt.name}.txt", tokenizer.encode(prompt.text, add_special_tokens=False).ids)
        command = [options.tool.resolve(), "--calibration", options.calibration]
        command += ["--steps", max(options.lengths), "--threads", options.threads]
        command += ["--end", *ends, "--prompts", *(Path(folder) / f"{prompt.name}.txt" for prompt in prompts)]
        command += ["--only", FULL_CACHE, *options.only] if options.only else []
        command += ["--skip", *options.skip] if options.skip else []
        with subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True) as running:
            for line in running.stdout:
                path, method, ids = line.rstrip("\n").split("\t")
                name = Path(path).stem
                print(f"{name}: {method}", file=sys.stderr)
                answers[method][name] = Answer(by_name[name], [int(i) for i in ids.split()], tokenizer, ends)
        if running.returncode:
            sys.exit(running.returncode)

    if options.answers:
        options.answers.mkdir(parents=True, exist_ok=True)
        for prompt in prompts:
            text = f"{prompt.text}\n"
            for method in answers:
                text += f"\n---- {method}\n{prompt.beginning}{answers[method][prompt.name].text(max(options.lengths))}\n"
            (options.answers / f"{prompt.name}.txt").write_text(text)
    sizes = [len(tokenizer.encode(prompt.text, add_special_tokens=False).ids) for prompt in prompts]
    print(f"{len(prompts)} prompts of {min(sizes)} to {max(sizes)} tokens\n\n" + table(prompts, answers, options.lengths))


if __name__ == "__main__":
    main()

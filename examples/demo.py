# SPDX-License-Identifier: Apache-2.0
"""What demo.sh runs after the build: makes the caches, calibrates, encodes, decodes, compares, prints the table. Standard library only."""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CACHE = Path(os.environ["KVEXACT_CACHE"])
TOOLS = Path("build/release/examples")
DAYS_KEPT = 7  # caches of another build or text, since they were last used: other clones may be running their own demo
FORMATS = {"bf16": "bf16", "f8_e4m3": "fp8 e4m3", "fp16": "fp16"}
ROTARY = ["--rope-base", "100000", "--rope-pairs", "interleaved"]
# Multiply-adds of a pass of SmolLM2 for each scalar of its cache, without attention: weights of a layer / channels of its K and V.
PASS_ADDS = (576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536) // 384


class Method(NamedTuple):
    """A row of the table; `preset` is the codec's name in the library, `prediction` names the copy whose cache is handed over."""

    name: str
    preset: str
    options: list[str]
    needs: str
    prediction: str = ""
    in_loop: bool = False


def in_loop(name: str, *options: str) -> Method:
    return Method(name, "codec_closed_loop", ["--engine", "int8", *options], "profile, engine, ids", in_loop=True)


def predicted(copy: str) -> tuple[Method, Method]:
    return (Method(f"{copy} copy, plain", "plain_codec_with_prediction", ["--plain"], "profile, prediction", copy),
            Method(f"{copy} copy", "codec_with_prediction", [], "profile, prediction", copy))


NONE = Method("none", "plain_codec_without_model", ["--predictor", "none"], "profile")
CROSS_LAYER = Method("cross_layer", "codec_without_model", [], "profile")
CLOSED_LOOP = in_loop("int8 closed loop")
METHODS = (NONE, CROSS_LAYER, *predicted("fp8"), *predicted("int8"), CLOSED_LOOP, in_loop("int8 closed loop, 4+256", "--window", "4+256"))
ROWS = [("bf16", each) for each in METHODS] + [("f8_e4m3", each) for each in METHODS] + [("fp16", CROSS_LAYER), ("fp16", CLOSED_LOOP)]


def fail(text: str):
    sys.exit(f"demo: {text}")


def sequences(split: str, calibration: int, held_out: int) -> dict[str, list[Path]]:
    folder = CACHE / "tokens" / split
    found = {kind: sorted(folder.glob(f"{kind}_*.txt"))[:count] for kind, count in (("calibration", calibration), ("held_out", held_out))}
    if len(found["calibration"]) < calibration or len(found["held_out"]) < held_out:
        fail(f"{folder} has too few sequences; at most 24 and 6")
    return found


def claim(folder: Path):
    """Makes a folder of caches, or marks it as used now, and removes those beside it that have not been used for long."""
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in folder.parent.iterdir():
        with suppress(FileNotFoundError):  # someone else may remove it, too
            if other != folder and time.time() - other.stat().st_mtime > DAYS_KEPT * 86400:
                shutil.rmtree(other)


def make_caches(split: str, tokens: list[Path]) -> Path:
    """Runs the engines over the sequences whose caches are not there yet. A changed engine or text starts over."""
    sources = hashlib.sha256((TOOLS / "smollm2_cache").read_bytes())
    for path in sorted((CACHE / "tokens").glob("*/*.txt")):
        sources.update(path.read_bytes())
    folder = CACHE / "caches" / sources.hexdigest()[:16] / split
    claim(folder.parent)
    for name, engine_name, formats in (("target", "bf16", list(FORMATS)), ("fp8", "fp8", ["bf16"]), ("int8", "int8", ["bf16"])):
        outputs = {path: [folder / f"{path.stem}.{name}.{dtype}.safetensors" for dtype in formats] for path in tokens}
        missing = [path for path in tokens if not all(out.exists() for out in outputs[path])]
        if not missing:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        start = time.time()
        print(f"running the {engine_name} engine over {len(missing)} sequences ...", end=" ", flush=True)
        command = [TOOLS / "smollm2_cache", "--engine", engine_name, "--tokens", *missing, "--out"]
        command += [out for path in missing for out in outputs[path]]
        if name == "target":
            command += ["--dtype", *formats]
        subprocess.run(command, check=True)
        print(f"{time.time() - start:.0f} s", flush=True)
    return folder


def report(tool: str, *command) -> dict:
    done = subprocess.run([TOOLS / tool, *command, "--json"], capture_output=True, text=True)  # warnings are in the report, too
    if done.returncode not in (0, 3):
        fail(f"{tool} {command[0]} failed: {done.stderr}")
    return json.loads(done.stdout)


def zstd_ratio(cache: Path, scratch: Path) -> float:
    packed = scratch / "packed.zst"
    subprocess.run(["zstd", "-q", "-f", "-3", str(cache), "-o", str(packed)], check=True)
    return cache.stat().st_size / packed.stat().st_size


class Caches:
    """Where the caches of a sequence are."""

    def __init__(self, folder: Path, found: dict[str, list[Path]]):
        self.folder, self.found = folder, found

    def cache(self, tokens: Path, dtype: str, name: str = "target") -> str:
        return str(self.folder / f"{tokens.stem}.{name}.{dtype}.safetensors")

    def prediction(self, method: Method, tokens: Path) -> list[str]:
        return ["--prediction", self.cache(tokens, "bf16", method.prediction)] if method.prediction else []

    def calibrate(self, dtype: str, method: Method, profile: str):
        tokens = self.found["calibration"]
        if method.in_loop:
            report("smollm2_codec", "calibrate", "--out", profile, "--dtype", dtype, "--threads", "1", *method.options, *tokens)
        else:
            predictions = (a for p in tokens for a in self.prediction(method, p))
            caches = (self.cache(p, dtype) for p in tokens)
            report("kvexact", "calibrate", "--out", profile, *ROTARY, *method.options, *predictions, *caches)

    def measure(self, dtype: str, method: Method, profile: str, scratch: Path) -> dict:
        about = report("kvexact", "inspect", profile)
        row = {"cache": FORMATS[dtype], "prediction": method.name, "preset": method.preset, "cache_bytes": 0, "stream_bytes": 0,
               "scalars": 0, "encode_seconds": 0.0, "decode_seconds": 0.0, "profile_bytes": about["bytes"], "needs": method.needs,
               "bit_exact": True, "warnings": [],
               "multiply_adds_per_scalar": about["models"][0].get("maps", {}).get("multiply_adds_per_scalar", 0),
               "engine_multiply_adds_per_scalar": PASS_ADDS if method.in_loop or method.prediction else 0}
        stream, back = str(scratch / "stream.kvx"), str(scratch / "back.safetensors")
        for tokens in self.found["held_out"]:
            cache = self.cache(tokens, dtype)
            if method.in_loop:
                encoded = report("smollm2_codec", "encode", "--tokens", tokens, "--cache", cache, "--profile", profile, "--out", stream)
                decoded = report("smollm2_codec", "decode", stream, "--profile", profile, "--out", back)
            else:
                prediction = self.prediction(method, tokens)
                encoded = report("kvexact", "encode", cache, "--out", stream, "--profile", profile, *prediction)
                decoded = report("kvexact", "decode", stream, "--out", back, "--profile", profile, *prediction)
            row["bit_exact"] &= report("kvexact", "verify", cache, back)["bit_exact"]
            row["encode_seconds"] += encoded["seconds"]
            row["decode_seconds"] += decoded["seconds"]
            row["warnings"] += [encoded["warning"]] if "warning" in encoded else []
            for key in ("cache_bytes", "stream_bytes", "scalars"):
                row[key] += encoded[key]
        row["bits_per_scalar"] = 8 * row["stream_bytes"] / row["scalars"]
        row["ratio"] = row["cache_bytes"] / row["stream_bytes"]
        return row


def calibrate_all(caches: Caches, scratch: Path) -> dict[tuple[str, str], str]:
    """Profiles of all rows; each takes one thread, so several are made at a time."""
    profiles = {(dtype, method.name): str(scratch / f"{i}.kvp") for i, (dtype, method) in enumerate(ROWS)}
    start = time.time()
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as workers:
        running = [workers.submit(caches.calibrate, dtype, method, profiles[dtype, method.name]) for dtype, method in ROWS]
        for done, each in enumerate(as_completed(running), 1):
            try:
                each.result()
            except BaseException:
                workers.shutdown(cancel_futures=True)
                raise
            print(f"\rcalibrating {len(ROWS)} profiles ... {done}", end="", flush=True)
    print(f", {time.time() - start:.0f} s", flush=True)
    return profiles


def main():
    parser = argparse.ArgumentParser(prog="demo.sh", add_help=False)
    parser.add_argument("calibration", type=int, nargs="?", default=4)
    parser.add_argument("held_out", type=int, nargs="?", default=1)
    parser.add_argument("split", choices=("documents", "chunks"), nargs="?", default="documents")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    calibration, held_out, split = arguments.calibration, arguments.held_out, arguments.split
    if calibration < 1 or held_out < 1:
        fail("see demo.sh --help")
    found = sequences(split, calibration, held_out)
    caches = Caches(make_caches(split, found["calibration"] + found["held_out"]), found)

    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        scratch = Path(folder)
        profiles = calibrate_all(caches, scratch)
        zstd = {dtype: zstd_ratio(Path(caches.cache(found["held_out"][0], dtype)), scratch) for dtype in FORMATS}
        others = "from other documents" if split == "documents" else "chunks of the same documents"
        print(f"""
SmolLM2-135M (Instruct, Q4_1 weights dequantised to bf16), held-out sequences of 1024 tokens: {held_out}.
Calibration on {calibration}, {others}. More of them make streams smaller, most of all where the profile is
large; docs/results.md has larger runs.
Ratio: bytes of the cache's values / bytes of the whole stream file. Speed: MB of cache a second, files mapped. Adds: multiply-adds
of 8-bit integers for each scalar, for the profile's maps. A copy has to run as well, for encoding and for decoding, a pass of about
{PASS_ADDS} multiply-adds a scalar beside its attention; it is part of the closed loop's speeds, and not of those with a prediction.
Decoding needs the profile; a codec with prediction also the copy's cache, the closed loop the copy itself and the ids of the tokens,
which these streams carry.
""")
        print(f"{'cache':9} {'preset':27} {'prediction':23} {'bits/scalar':>11} {'ratio':>7} {'zstd -3':>8} {'encode':>9} {'decode':>9} "
              f"{'profile':>9} {'adds':>5}  bit-exact")
        rows = []
        for dtype, method in ROWS:
            row = caches.measure(dtype, method, profiles[dtype, method.name], scratch) | {"zstd_ratio": zstd[dtype]}
            rows.append(row)
            speeds = [row["cache_bytes"] / 1e6 / row[f"{action}_seconds"] for action in ("encode", "decode")]
            print(f"{row['cache']:9} {row['preset']:27} {row['prediction']:23} {row['bits_per_scalar']:11.3f} {row['ratio']:7.3f} "
                  f"{row['zstd_ratio']:8.3f} {speeds[0]:4.0f} MB/s {speeds[1]:4.0f} MB/s {row['profile_bytes'] / 1e6:6.2f} MB "
                  f"{row['multiply_adds_per_scalar']:5.0f}  {'yes' if row['bit_exact'] else 'NO'}"
                  f"{' !' if row['warnings'] else ''}", flush=True)
        if any(row["warnings"] for row in rows):
            print("! far from what the profile reached on its calibration text: that was too little")
    if arguments.json:
        table = {"calibration": calibration, "held_out": held_out, "split": split, "rows": rows}
        Path(arguments.json).write_text(json.dumps(table, indent=2) + "\n")
    if not all(row["bit_exact"] for row in rows):
        fail("a decoded cache differs")


if __name__ == "__main__":
    main()

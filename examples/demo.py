# SPDX-License-Identifier: Apache-2.0
"""What demo.sh runs after the build: makes the caches, calibrates, encodes, decodes, compares, prints the table. Standard library only."""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CACHE = Path(os.environ["KVEXACT_CACHE"])
TOOLS = Path("build/release/examples")
FORMATS = {"bf16": "bf16", "fp16": "fp16", "f8_e4m3": "fp8 e4m3"}
PREDICTORS = {"none": "none", "fp8": "fp8 copy", "int8": "int8 copy"}
ROTARY = ["--rope-base", "100000", "--rope-pairs", "interleaved"]


def fail(text: str):
    sys.exit(f"demo: {text}")


def sequences(split: str, calibration: int, held_out: int) -> dict[str, list[Path]]:
    folder = CACHE / "tokens" / split
    found = {kind: sorted(folder.glob(f"{kind}_*.txt"))[:count] for kind, count in (("calibration", calibration), ("held_out", held_out))}
    if len(found["calibration"]) < calibration or len(found["held_out"]) < held_out:
        fail(f"{folder} has too few sequences; at most 24 and 6")
    return found


def make_caches(split: str, tokens: list[Path]) -> Path:
    """Runs the engines over the sequences whose caches are not there yet. A changed engine or text starts over."""
    sources = hashlib.sha256((TOOLS / "smollm2_cache").read_bytes())
    for path in sorted((CACHE / "tokens").glob("*/*.txt")):
        sources.update(path.read_bytes())
    root = CACHE / "caches"
    folder = root / sources.hexdigest()[:16] / split
    if root.exists():
        for old in root.iterdir():
            if old.name != folder.parent.name:
                shutil.rmtree(old)
    for name, engine_name, formats in (("target", "bf16", list(FORMATS)), ("fp8", "fp8", ["bf16"]), ("int8", "int8", ["bf16"])):
        outputs = {path: [folder / f"{path.stem}.{name}.{dtype}.safetensors" for dtype in formats] for path in tokens}
        missing = [path for path in tokens if not all(out.exists() for out in outputs[path])]
        if not missing:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        start = time.time()
        print(f"running the {engine_name} engine over {len(missing)} sequences ...", end=" ", flush=True)
        command = [TOOLS / "smollm2_cache", "--engine", engine_name, "--tokens", *missing, "--out", *(o for p in missing for o in outputs[p])]
        if name == "target":
            command += ["--dtype", *formats]
        subprocess.run(command, check=True)
        print(f"{time.time() - start:.0f} s", flush=True)
    return folder


def report(*command) -> dict:
    done = subprocess.run([TOOLS / "kvexact", *command, "--json"], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 3):
        fail(f"kvexact {command[0]} failed")
    return json.loads(done.stdout)


def zstd_ratio(cache: Path, scratch: Path) -> float:
    packed = scratch / "packed.zst"
    subprocess.run(["zstd", "-q", "-f", "-3", str(cache), "-o", str(packed)], check=True)
    return cache.stat().st_size / packed.stat().st_size


def measure(folder: Path, found: dict[str, list[Path]], dtype: str, predictor: str, scratch: Path) -> dict:
    def cache(path: Path, name: str = "target", kind: str = dtype) -> str:
        return str(folder / f"{path.stem}.{name}.{kind}.safetensors")

    def prediction(path: Path) -> list[str]:
        return [] if predictor == "none" else ["--prediction", cache(path, predictor, "bf16")]

    profile = str(scratch / "model.kvp")
    calibrated = report("calibrate", "--out", profile, *ROTARY, *(a for p in found["calibration"] for a in prediction(p)),
                        *(cache(p) for p in found["calibration"]))
    row = {"profile": calibrated["bytes"], "cache": 0, "stream": 0, "scalars": 0, "encode": 0.0, "decode": 0.0, "exact": True}
    for path in found["held_out"]:
        stream, back = str(scratch / "stream.kvx"), str(scratch / "back.safetensors")
        encoded = report("encode", cache(path), "--out", stream, "--profile", profile, *prediction(path))
        decoded = report("decode", stream, "--out", back, "--profile", profile, *prediction(path))
        row["exact"] &= report("verify", cache(path), back)["bit_exact"]
        row["cache"] += encoded["cache_bytes"]
        row["stream"] += encoded["stream_bytes"]
        row["scalars"] += encoded["scalars"]
        row["encode"] += encoded["seconds"]
        row["decode"] += decoded["seconds"]
    row["zstd"] = zstd_ratio(Path(cache(found["held_out"][0])), scratch)
    return row


def main():
    arguments = sys.argv[1:]
    calibration = int(arguments[0]) if arguments else 8
    held_out = int(arguments[1]) if len(arguments) > 1 else 2
    split = arguments[2] if len(arguments) > 2 else "documents"
    if split not in ("documents", "chunks") or calibration < 1 or held_out < 1:
        fail("see demo.sh --help")
    found = sequences(split, calibration, held_out)
    folder = make_caches(split, found["calibration"] + found["held_out"])

    print(f"\nSmolLM2-135M (Instruct, Q4_1 weights dequantised to bf16), {held_out} held-out sequences of 1024 tokens,\n"
          f"calibrated on {calibration} others ({'from other documents' if split == 'documents' else 'chunks of the same documents'}). "
          "Ratio: bytes of the cache's values / bytes of the whole stream file.\n"
          "Speed: MB of cache a second, one thread, files mapped. Decoding with a prediction needs the same prediction again,\n"
          "so the time of the engine that makes it comes on top.\n")
    print(f"{'cache':9} {'prediction':10} {'bits/scalar':>11} {'ratio':>7} {'zstd -3':>8} {'encode':>9} {'decode':>9} {'profile':>9}  bit-exact")
    exact = True
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        for dtype, cache_name in FORMATS.items():
            for predictor, predictor_name in PREDICTORS.items():
                row = measure(folder, found, dtype, predictor, Path(scratch))
                exact &= row["exact"]
                print(f"{cache_name:9} {predictor_name:10} {8 * row['stream'] / row['scalars']:11.3f} {row['cache'] / row['stream']:7.3f} "
                      f"{row['zstd']:8.3f} {row['cache'] / 1e6 / row['encode']:4.0f} MB/s {row['cache'] / 1e6 / row['decode']:4.0f} MB/s "
                      f"{row['profile'] / 1e3:6.0f} kB  bit-exact: {'yes' if row['exact'] else 'NO'}", flush=True)
    if not exact:
        fail("a decoded cache differs")


main()

# SPDX-License-Identifier: Apache-2.0
"""rate_against_compute.py TOOLS TOKENS WORK [--calibration N] [--held-out M] [--svg FILE]

Bits per scalar of real bf16 caches of SmolLM2-135M against the multiply-adds that decoding spends on a scalar, for every predictor of the
library at several settings. TOOLS: the folder of the built examples; TOKENS: a folder with calibration_NN.txt and held_out_NN.txt
(examples/smollm2/make_tokens.py); WORK: where caches and results are kept, so that a second run only fills in what is missing. Prints a
table in Markdown, and writes the plot. Standard library only. Some two CPU minutes a row with 8 calibration sequences.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys

LAYERS, WIDTH, KV_WIDTH, HIDDEN = 30, 576, 192, 1536
SCALARS_PER_TOKEN = LAYERS * 2 * KV_WIDTH
PROJECTIONS = 2 * KV_WIDTH * WIDTH
REST = 2 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN  # queries, output, feed-forward; attention comes on top
ROTARY = ["--rope-base", "100000", "--rope-pairs", "interleaved"]


def engine_cost(layers, tokens, window=0):
    """Multiply-adds of an engine for a scalar of the cache: projections in every layer, the rest in the first `layers`."""
    seen = min(tokens / 2, window) if window else tokens / 2
    return (LAYERS * PROJECTIONS + layers * (REST + 2 * seen * WIDTH)) / SCALARS_PER_TOKEN


def rows():
    """Name, family, calibrate options of the tool, engine options (None: no engine), layers that the engine runs whole."""
    yield "channel means", "no model", ["--predictor", "none"], None, 0
    for back in (1, 2, 3):
        yield f"cross_layer, {back} back", "no model", ["--layers-back", str(back)], None, 0
    yield "cross_layer, 3 back, per head", "no model", ["--layers-back", "3", "--per-head"], None, 0
    for rank in (16, 64):
        yield f"cross_layer, 3 back, rank {rank}", "no model", ["--layers-back", "3", "--rank", str(rank)], None, 0
    yield "cross_layer, 3 back, whole tiles", "no model", ["--layers-back", "3", "--block-size", "0"], None, 0
    for copy in ("fp8", "int8"):
        yield f"{copy} copy, plain", "open loop", ["--plain", copy], None, LAYERS
        yield f"{copy} copy + maps", "open loop + maps", [copy], None, LAYERS
    yield "fp8", "closed loop", None, ["--engine", "fp8", "--quantised-kv"], LAYERS
    yield "int8", "closed loop", None, ["--quantised-kv"], LAYERS
    yield "int8, exact K V projections", "closed loop", None, [], LAYERS
    yield "int8, window 4+256", "closed loop", None, ["--quantised-kv", "--window", "4+256"], LAYERS
    yield "int8, exact K V, window 4+256", "closed loop", None, ["--window", "4+256"], LAYERS
    for depth in (5, 10, 20):
        yield f"target's first {depth} layers", "early exit", None, ["--exact-layers", str(depth), "--depth", str(depth)], depth


class Bench:
    def __init__(self, arguments):
        self.tools = pathlib.Path(arguments.tools)
        self.work = pathlib.Path(arguments.work)
        self.work.mkdir(parents=True, exist_ok=True)
        tokens = pathlib.Path(arguments.tokens)
        self.calibration = sorted(tokens.glob("calibration_*.txt"))[: arguments.calibration]
        self.held_out = sorted(tokens.glob("held_out_*.txt"))[: arguments.held_out]
        if len(self.calibration) < arguments.calibration or len(self.held_out) < arguments.held_out:
            sys.exit(f"{tokens}: too few sequences")

    def run(self, tool, *command):
        done = subprocess.run([self.tools / tool, *map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout) if done.stdout else {}

    def cache(self, tokens, engine):
        path = self.work / f"{tokens.stem}.{engine}.safetensors"
        if not path.exists():
            self.run("smollm2_cache", "--engine", engine, "--tokens", tokens, "--out", path)
        return path

    def measure(self, name, options, engine):
        """Bits per scalar and the multiply-adds a scalar of the maps."""
        done = self.work / (name.replace(" ", "_").replace(",", "").replace("'", "") + ".json")
        if done.exists():
            return json.loads(done.read_text())
        profile, stream, back = (self.work / part for part in ("profile", "stream", "back.safetensors"))
        copy = None
        if engine is not None:
            self.run("smollm2_codec", "calibrate", "--json", "--out", profile, *engine, *self.calibration)
        else:
            copy = next((each for each in options if each in ("fp8", "int8")), None)
            options = [each for each in options if each != copy]
            caches = [self.cache(each, "bf16") for each in self.calibration]
            predictions = [part for each in self.calibration for part in ("--prediction", self.cache(each, copy))] if copy else []
            self.run("kvexact", "calibrate", "--json", "--out", profile, *ROTARY, *predictions, *options, *caches)
        models = self.run("kvexact", "inspect", "--json", profile)["models"]
        size = scalars = 0
        for tokens in self.held_out:
            cache = self.cache(tokens, "bf16")
            if engine is not None:
                coded = self.run("smollm2_codec", "encode", "--json", "--tokens", tokens, "--cache", cache, "--profile", profile, "-o", stream)
                self.run("smollm2_codec", "decode", "--json", stream, "--profile", profile, "-o", back)
            else:
                prediction = ["--prediction", self.cache(tokens, copy)] if copy else []
                coded = self.run("kvexact", "encode", "--json", cache, "--profile", profile, "-o", stream, *prediction)
                self.run("kvexact", "decode", "--json", stream, "--profile", profile, "-o", back, *prediction)
            self.run("kvexact", "verify", "--json", cache, back)
            size += coded["stream_bytes"]
            scalars += coded["scalars"]
        maps = models[0].get("maps", {}).get("multiply_adds_per_scalar", 0)
        result = {"bits": 8 * size / scalars, "maps": maps, "profile": profile.stat().st_size}
        done.write_text(json.dumps(result))
        return result


COLOURS = {"no model": "#1b7837", "open loop": "#b2182b", "open loop + maps": "#e08214", "closed loop": "#2166ac", "early exit": "#762a83"}


def plot(points):
    """An SVG: multiply-adds a scalar on a logarithmic axis, bits per scalar on a linear one."""
    width, height, left, bottom, top, right = 860, 520, 60, 50, 20, 20
    most_bits = math.ceil(max(bits for _, _, _, bits in points)) + 0.5
    low, high = 0, 4.4  # log10(1 + multiply-adds)

    def x(cost):
        return left + (math.log10(1 + cost) - low) / (high - low) * (width - left - right)

    def y(bits):
        return height - bottom - bits / most_bits * (height - top - bottom)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for bits in range(0, math.floor(most_bits) + 1, 2):
        out.append(f'<line x1="{left}" y1="{y(bits):.1f}" x2="{width - right}" y2="{y(bits):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y(bits) + 4:.1f}" text-anchor="end">{bits}</text>')
    for power in range(0, 5):
        cost = 10**power if power else 0
        out.append(f'<line x1="{x(cost):.1f}" y1="{top}" x2="{x(cost):.1f}" y2="{height - bottom}" stroke="#eee"/>')
        out.append(f'<text x="{x(cost):.1f}" y="{height - bottom + 16}" text-anchor="middle">{cost}</text>')
    out.append(f'<text x="{(left + width) / 2}" y="{height - 12}" text-anchor="middle">multiply-adds a scalar at decoding (engine and maps)</text>')
    out.append(f'<text x="16" y="{height / 2}" text-anchor="middle" transform="rotate(-90 16 {height / 2})">bits per scalar, bf16</text>')
    for name, family, cost, bits in points:
        near_right = x(cost) > width - 220
        out.append(f'<circle cx="{x(cost):.1f}" cy="{y(bits):.1f}" r="4" fill="{COLOURS[family]}"/>')
        anchor, shift = ("end", -7) if near_right else ("start", 7)
        out.append(f'<text x="{x(cost) + shift:.1f}" y="{y(bits) + 4:.1f}" text-anchor="{anchor}" font-size="9">{name}</text>')
    for i, (family, colour) in enumerate(COLOURS.items()):
        out.append(f'<circle cx="{left + 20}" cy="{height - bottom - 90 + 16 * i}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{left + 30}" y="{height - bottom - 86 + 16 * i}">{family}</text>')
    return "\n".join([*out, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools")
    parser.add_argument("tokens")
    parser.add_argument("work")
    parser.add_argument("--calibration", type=int, default=8)
    parser.add_argument("--held-out", type=int, default=1)
    parser.add_argument("--svg")
    bench = Bench(arguments := parser.parse_args())
    tokens = len(bench.held_out[0].read_text().split())
    points = []
    print("| predictor | settings | bits per scalar | ratio | multiply-adds a scalar: engine | maps | profile |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, family, options, engine, layers in rows():
        found = bench.measure(f"{family} {name}", options, engine)
        window = 260 if engine and "--window" in engine else 0
        cost = engine_cost(layers, tokens, window) if layers else 0
        print(f"| {family} | {name} | {found['bits']:.3f} | {16 / found['bits']:.3f} | {cost:.0f} | {found['maps']:.0f} | "
              f"{found['profile'] / 1e6:.2f} MB |", flush=True)
        points.append((name, family, cost + found["maps"], found["bits"]))
    if arguments.svg:
        pathlib.Path(arguments.svg).write_text(plot(points))


main()

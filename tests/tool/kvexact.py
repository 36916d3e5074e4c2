# SPDX-License-Identifier: Apache-2.0
"""kvexact.py TOOL [unittest options]

Runs the command line `kvexact` as a user does, on small caches made here.
"""

import json
import os
import pathlib
import pty
import random
import re
import resource
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import unittest

TOOL = ""
SHARED = None  # folder of the caches, profiles and streams that many tests read and none may change
SIZES = {"BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F32": 4}
NOBODY = 65534
WARNING = rb"kvexact: warning: [^\r\n\x1b]+: the profile does not fit this cache: [^\r\n\x1b]+\n"
TIMEOUT = 120  # seconds; reached only where the tool hangs


# Caches ------------------------------------------------------------------------------------------------------------------------------


def safetensors(tensors, metadata=None):
    """Bytes of a file with {name: (dtype, shape, data)}."""
    header = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def tensors_of(path):
    """The reverse of `safetensors`."""
    content = pathlib.Path(path).read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    return {name: (each["dtype"], each["shape"], content[end:][slice(*each["data_offsets"])]) for name, each in header.items()}


def narrow(dtype, values):
    """Values as bytes of the number format, rounded towards zero."""
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    if dtype == "F8_E5M2":  # the upper half of F16
        return struct.pack(f"<{len(values)}e", *values)[1::2]
    words = [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]
    if dtype == "BF16":
        return struct.pack(f"<{len(words)}H", *(word >> 16 for word in words))
    # E4M3: exponent bias 7 in place of 127; what is too small for a normal number becomes zero.
    return bytes((word >> 24 & 128) | max(0, min(126, (word >> 20 & 0x7FF) - (120 << 3))) for word in words)


def make_cache(seed, dtype="BF16", tokens=40, layers=2, heads=2, key_dim=8, value_dim=6, scales=False):
    """Tensors of a cache; each channel has a mean and a spread of its own."""
    generator = random.Random(seed)
    channels = random.Random(0)  # the same "model" for all seeds
    cache = {}
    for layer in range(layers):
        for part, dim in (("k", key_dim), ("v", value_dim)):
            if dim == 0:
                continue
            about = [(channels.gauss(0, 2), channels.uniform(0.2, 2)) for _ in range(heads * dim)]
            values = [generator.gauss(*each) for _ in range(tokens) for each in about]
            cache[f"layers.{layer}.{part}"] = (dtype, [tokens, heads, dim], narrow(dtype, values))
            if scales:
                cache[f"layers.{layer}.{part}_scale"] = ("F32", [1], struct.pack("<f", generator.uniform(0.01, 0.1)))
    return cache


def make_prediction(cache, seed=0):
    """A BF16 cache near `cache`; zeros where that is E4M3."""
    generator = random.Random(seed)
    prediction = {}
    for name, (dtype, shape, data) in cache.items():
        if name.endswith("_scale"):
            continue
        if dtype == "BF16":
            values = [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
        elif dtype == "F16":
            values = struct.unpack(f"<{len(data) // 2}e", data)
        elif dtype == "F8_E5M2":
            values = [struct.unpack("<e", bytes((0, byte)))[0] for byte in data]
        else:
            values = [0.0] * len(data)
        prediction[name] = ("BF16", shape, narrow("BF16", [value + generator.gauss(0, 0.05) for value in values]))
    return prediction


def with_bit_flipped(tensors, name, bit):
    dtype, shape, data = tensors[name]
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return {**tensors, name: (dtype, shape, bytes(flipped))}


def make_related_cache(seed, tokens=400, layers=3, heads=2, key_dim=8, value_dim=6):
    """A cache and a prediction of it. In the cache all channels of a token come from the same five numbers, and what the prediction misses
    from another one."""
    generator = random.Random(seed)
    model = random.Random(0)
    hidden = [[generator.gauss(0, 1) for _ in range(5)] for _ in range(tokens)]
    missed = [generator.gauss(0, 1) for _ in range(tokens)]
    cache, prediction = {}, {}
    for layer in range(layers):
        for part, dim in (("k", key_dim), ("v", value_dim)):
            weights = [[model.gauss(0, 1) for _ in range(6)] for _ in range(heads * dim)]
            values, guesses = [], []
            for numbers, error in zip(hidden, missed):
                for weight in weights:
                    values.append(sum(a * b for a, b in zip(numbers, weight)) + generator.gauss(0, 0.01))
                    guesses.append(values[-1] + 0.2 * error * weight[5])
            name, shape = f"layers.{layer}.{part}", [tokens, heads, dim]
            cache[name], prediction[name] = ("BF16", shape, narrow("BF16", values)), ("BF16", shape, narrow("BF16", guesses))
    return cache, prediction


def xxh64(data, seed=0):
    """XXH64, the checksum of the format."""
    primes = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579, 2870177450012600261)
    most = (1 << 64) - 1

    def turn(value, by):
        return (value << by | value >> 64 - by) & most

    def mix(state, word):
        return turn((state + word * primes[1]) & most, 31) * primes[0] & most

    at = 0
    if len(data) >= 32:
        lanes = [(seed + primes[0] + primes[1]) & most, (seed + primes[1]) & most, seed, (seed - primes[0]) & most]
        while at + 32 <= len(data):
            lanes = [mix(lane, word) for lane, word in zip(lanes, struct.unpack_from("<4Q", data, at))]
            at += 32
        sum_ = sum(turn(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18))) & most
        for lane in lanes:
            sum_ = ((sum_ ^ mix(0, lane)) * primes[0] + primes[3]) & most
    else:
        sum_ = (seed + primes[4]) & most
    sum_ = (sum_ + len(data)) & most
    while at + 8 <= len(data):
        sum_ = (turn(sum_ ^ mix(0, struct.unpack_from("<Q", data, at)[0]), 27) * primes[0] + primes[3]) & most
        at += 8
    if at + 4 <= len(data):
        sum_ = (turn(sum_ ^ struct.unpack_from("<I", data, at)[0] * primes[0] & most, 23) * primes[1] + primes[2]) & most
        at += 4
    for byte in data[at:]:
        sum_ = turn(sum_ ^ byte * primes[4] & most, 11) * primes[0] & most
    for shift, prime in ((33, primes[1]), (29, primes[2]), (32, 1)):
        sum_ = (sum_ ^ sum_ >> shift) * prime & most
    return sum_


def with_word(content, section, at, word):
    """A file of the format with another u32 in a section, and checksums that fit."""
    content = bytearray(content)
    table, count = struct.unpack("<QQ", content[-32:-16])
    for entry in range(table, table + 32 * count, 32):
        found, _, offset, size, _ = struct.unpack_from("<IIQQQ", content, entry)
        if found == section:
            struct.pack_into("<I", content, offset + at, word)
            struct.pack_into("<Q", content, entry + 24, xxh64(content[offset : offset + size]))
    struct.pack_into("<Q", content, len(content) - 16, xxh64(content[table:-16], xxh64(content[:16])))
    return bytes(content)


def contents(folder):
    """{name: bytes, or what it is} of everything in a folder."""
    found = {}
    for path in pathlib.Path(folder).iterdir():
        mode = path.lstat().st_mode
        found[path.name] = path.read_bytes() if stat.S_ISREG(mode) and os.access(path, os.R_OK) else (stat.S_IFMT(mode), path.is_symlink())
    return found


def setUpModule():
    global SHARED
    SHARED = pathlib.Path(tempfile.mkdtemp(prefix="kvexact-tool-shared-"))
    unittest.addModuleCleanup(shutil.rmtree, SHARED)
    for i, name in enumerate("abcd"):
        cache = make_cache(i)
        SHARED.joinpath(f"{name}.safetensors").write_bytes(safetensors(cache))
        SHARED.joinpath(f"{name}_pred.safetensors").write_bytes(safetensors(make_prediction(cache)))
    a, b, c, a_pred, b_pred, c_pred = (f"{name}.safetensors" for name in ("a", "b", "c", "a_pred", "b_pred", "c_pred"))
    for command in (["calibrate", "-o", "plain.kvp", "--predictor", "none", a, b],
                    ["calibrate", "-o", "other.kvp", "--predictor", "none", b, c],
                    ["calibrate", "-o", "predicted.kvp", "--plain", "--prediction", a_pred, "--prediction", b_pred, a, b],
                    ["encode", c, "-o", "plain.kvx", "--profile", "plain.kvp"],
                    ["encode", c, "-o", "predicted.kvx", "--profile", "predicted.kvp", "--prediction", c_pred]):
        subprocess.run([TOOL, *command], cwd=SHARED, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)


class Case(unittest.TestCase):
    """A folder of its own for each test; shared files must stay as they are."""

    maxDiff = 2000

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvexact tool ü "))
        self.addCleanup(shutil.rmtree, self.folder)
        before = contents(SHARED)
        self.addCleanup(lambda: self.assertTrue(contents(SHARED) == before, "a shared file has changed"))

    def write(self, name, tensors, **more):
        self.folder.joinpath(name).write_bytes(tensors if isinstance(tensors, bytes) else safetensors(tensors, **more))
        return name

    def start(self, *arguments, **options):
        return subprocess.run([TOOL, *map(os.fspath, arguments)], cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=TIMEOUT, check=False, **options)

    def run_tool(self, *arguments, code=0, **options):
        """Standard output of a run that must succeed: nothing on standard error, not even a progress bar. But these small caches say little
        of each other, so encoding may warn that the profile does not fit."""
        ended = self.start(*arguments, **options)
        warned = WARNING if arguments[0] == "encode" else rb""
        self.assertEqual(ended.returncode, code, (arguments, ended.stderr))
        self.assertRegex(ended.stderr, rb"\A(" + warned + rb")?\Z", arguments)
        return ended.stdout.decode(errors="surrogateescape")

    def report(self, *arguments, code=0):
        return json.loads(self.run_tool(*arguments, "--json", code=code))

    def fails(self, *arguments, says=(), code=1, **options):
        """Standard error of a run that must fail, in one line, and leave the folder as it is."""
        before = contents(self.folder)
        ended = self.start(*arguments, **options)
        message = ended.stderr.decode(errors="surrogateescape")
        self.assertEqual((ended.returncode, ended.stdout), (code, b""), (arguments, message))
        if code == 1:
            self.assertRegex(message, r"\Akvexact: [^\r\n\x1b]+\n\Z")
        for words in [says] if isinstance(says, str) else says:
            self.assertIn(words, message, arguments)
        self.assertTrue(contents(self.folder) == before, f"{arguments} left or changed something: {sorted(contents(self.folder))}")
        return message

    def assert_same_tensors(self, left, right):
        self.assertTrue(tensors_of(left) == tensors_of(right), f"{left} and {right} differ")


# What works --------------------------------------------------------------------------------------------------------------------------


class RoundTrip(Case):
    def round_trip(self, caches, predictions=()):
        """Calibrates on all, encodes and decodes the last, whose path is returned with its stream's."""
        names = [self.write(f"{i}.safetensors", cache) for i, cache in enumerate(caches)]
        guesses = [self.write(f"{i}_pred.safetensors", each) for i, each in enumerate(predictions)]
        options = [word for guess in guesses for word in ("--prediction", guess)]
        self.run_tool("calibrate", "--out", "x.kvp", *names, *options)
        self.code(names[-1], options[-2:])

    def code(self, name, options=(), profile="x.kvp"):
        self.run_tool("encode", name, "-o", "x.kvx", "--profile", profile, *options)
        self.run_tool("decode", "x.kvx", "-o", "back.safetensors", "--profile", profile, *options)
        self.assert_same_tensors(self.folder / name, self.folder / "back.safetensors")
        self.assertEqual(self.run_tool("verify", name, "back.safetensors"), "bit-exact: yes\n")

    def test_number_formats(self):
        for dtype in ("BF16", "F16", "F8_E4M3", "F8_E5M2"):
            for predicted in (False, True):
                for scales in (False, True) if SIZES[dtype] == 1 else (False,):
                    with self.subTest(dtype=dtype, predicted=predicted, scales=scales):
                        caches = [make_cache(i, dtype, scales=scales) for i in range(3)]
                        self.round_trip(caches, [make_prediction(cache) for cache in caches] if predicted else [])

    def test_every_bit_pattern(self):
        for dtype in ("BF16", "F8_E4M3"):
            size = SIZES[dtype]
            patterns = b"".join(pattern.to_bytes(size, "little") for pattern in range(1 << 8 * size))
            shape = [len(patterns) // size // 4, 2, 2]
            with self.subTest(dtype=dtype):
                self.round_trip([{"layers.0.k": (dtype, shape, patterns)}])

    def test_no_values_and_uneven_layers(self):
        self.round_trip([make_cache(i, value_dim=0) for i in range(2)])
        uneven = {**make_cache(0, layers=1), "layers.1.k": ("BF16", [40, 1, 12], narrow("BF16", [0.5] * 480))}
        self.round_trip([uneven])

    def test_few_and_many_tokens(self):
        for tokens in (0, 1, 31, 32, 33, 256, 257, 1100):
            with self.subTest(tokens=tokens):
                name = self.write("t.safetensors", make_cache(9, tokens=tokens))
                guess = self.write("t_pred.safetensors", make_prediction(make_cache(9, tokens=tokens)))
                self.code(name, profile=SHARED / "plain.kvp")
                self.code(name, ["--prediction", guess], profile=SHARED / "predicted.kvp")

    def test_scales_of_any_bits(self):
        cache = make_cache(3, "F8_E4M3", scales=True)
        names = [name for name in cache if name.endswith("_scale")]
        for name, bits in zip(names, (0x7FC12345, 0x00000000, 0xBF800000, 0x7F800000)):
            cache[name] = ("F32", [1], struct.pack("<I", bits))
        self.round_trip([cache])

    def test_order_of_tensors_and_metadata_do_not_matter(self):
        cache = make_cache(2)
        self.write("turned.safetensors", dict(reversed(cache.items())), metadata={"model": "m"})
        for name in (SHARED / "c.safetensors", "turned.safetensors"):
            self.run_tool("encode", name, "-o", "x.kvx", "--profile", SHARED / "plain.kvp")
            self.assertEqual(self.folder.joinpath("x.kvx").read_bytes(), SHARED.joinpath("plain.kvx").read_bytes())

    def test_predictions_make_streams_smaller_and_go_by_order(self):
        self.assertLess(SHARED.joinpath("predicted.kvx").stat().st_size, SHARED.joinpath("plain.kvx").stat().st_size)
        caches = [SHARED / "a.safetensors", SHARED / "b.safetensors"]
        guesses = [SHARED / "a_pred.safetensors", SHARED / "b_pred.safetensors"]
        right = self.report("calibrate", "--plain", "-o", "right.kvp", *caches, "--prediction", guesses[0], "--prediction", guesses[1])
        wrong = self.report("calibrate", "--plain", "-o", "wrong.kvp", *caches, "--prediction", guesses[1], "--prediction", guesses[0])
        self.assertEqual(self.folder.joinpath("right.kvp").read_bytes(), SHARED.joinpath("predicted.kvp").read_bytes())
        self.assertLess(right["bits_per_scalar"]["external"] + 1, wrong["bits_per_scalar"]["external"])
        self.assertEqual(right["bits_per_scalar"]["channel_mean"], wrong["bits_per_scalar"]["channel_mean"])

    def test_an_old_output_is_replaced_on_success(self):
        for name, command in (("x.kvp", ["calibrate", SHARED / "a.safetensors"]),
                              ("x.kvx", ["encode", SHARED / "c.safetensors", "--profile", SHARED / "plain.kvp"]),
                              ("x.safetensors", ["decode", SHARED / "plain.kvx", "--profile", SHARED / "plain.kvp"])):
            self.write(name, b"old")
            self.run_tool(*command, "-o", name)
            self.assertGreater(self.folder.joinpath(name).stat().st_size, 100)
        self.assertEqual(sorted(contents(self.folder)), ["x.kvp", "x.kvx", "x.safetensors"])
        self.assert_same_tensors(SHARED / "c.safetensors", self.folder / "x.safetensors")


class Reports(Case):
    """--json holds every figure of the text."""

    def figures(self, text):
        return [float(figure) for figure in re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w.-]*\d)", text)]

    def both(self, *arguments, code=0):
        return self.run_tool(*arguments, code=code), self.report(*arguments, code=code)

    def test_calibrate(self):
        text, report = self.both("calibrate", "--predictor", "none", "-o", "x.kvp", SHARED / "a.safetensors", SHARED / "b.safetensors")
        size = self.folder.joinpath("x.kvp").stat().st_size
        self.assertEqual([report[key] for key in ("profile", "bytes", "dtype", "caches", "tokens")], ["x.kvp", size, "BF16", 2, 80])
        self.assertIn(f"x.kvp: {size} bytes, from 2 caches of BF16, 80 tokens, ", text)
        self.assertIn(f"{report['bits_per_scalar']['channel_mean']:.3f} bits per scalar", text)
        self.assertGreaterEqual(report["seconds"], 0)

    def test_encode_and_decode(self):
        for action, source, out in (("encode", "c.safetensors", "x.kvx"), ("decode", "plain.kvx", "x.safetensors")):
            text, report = self.both(action, SHARED / source, "-o", out, "--profile", SHARED / "plain.kvp")
            size = SHARED.joinpath("plain.kvx").stat().st_size
            scalars = 40 * 2 * 2 * (8 + 6)
            self.assertEqual([report[key] for key in ("file", "dtype", "tokens", "scalars", "cache_bytes", "stream_bytes")],
                             [out, "BF16", 40, scalars, 2 * scalars, size])
            self.assertAlmostEqual(report["bits_per_scalar"], 8 * size / scalars)
            self.assertAlmostEqual(report["ratio"], 2 * scalars / size)
            self.assertGreater(report["megabytes_per_second"], 0)
            self.assertIn(f"{out}: {action}d 40 tokens of BF16, cache {2 * scalars} bytes, stream {size} bytes, "
                          f"{report['bits_per_scalar']:.3f} bits per scalar, ratio {report['ratio']:.3f}, ", text)

    def test_inspect_stream(self):
        for name, predictor in (("plain", "channel_mean"), ("predicted", "external")):
            path = SHARED / f"{name}.kvx"
            text, report = self.both("inspect", path)
            profile = self.report("inspect", SHARED / f"{name}.kvp")
            size = path.stat().st_size
            keys = ("file", "kind", "dtype", "predictor", "profile_hash", "tokens", "storage_scales", "bytes")
            self.assertEqual([report[key] for key in keys],
                             [str(path), "stream", "BF16", predictor, profile["profile_hash"], 40, 0, size])
            self.assertEqual(report["shape"], [{"layers": 2, "kv_heads": 2, "key_dim": 8, "value_dim": 6}])
            self.assertEqual(len(report["decoding_needs"]), 2 if name == "predicted" else 1)
            self.assertEqual((report["decodes_alone"], report["token_ids"]), ("any layers and tokens", 0))
            [layers] = report["layers"]
            self.assertEqual([layers["begin"], layers["end"], layers["modes"]], [0, 2, [predictor]])
            for words in (f"stream of 40 tokens, BF16, predictor {predictor}, {size} bytes, ratio {report['ratio']:.3f}\n",
                          "2 layers of 2 kv heads, key dim 8, value dim 6\n",
                          f"{report['chunks']} chunks, interleaved rANS with {report['lanes']} lanes and {report['precision']} bits, 0 ",
                          f"decoding needs: {' and '.join(report['decoding_needs'])}\n", "decodes alone: any layers and tokens\n"):
                self.assertIn(words, text)
            self.assertEqual(self.figures(text.splitlines()[-1]), [0, 1, round(layers["bits_per_scalar"], 3), round(layers["ratio"], 3)])

    def test_inspect_profile(self):
        path = SHARED / "predicted.kvp"
        text, report = self.both("inspect", path)
        self.assertEqual([report[key] for key in ("file", "kind", "dtype", "bytes")], [str(path), "profile", "BF16", path.stat().st_size])
        self.assertEqual([model["predictor"] for model in report["models"]], ["external", "channel_mean"])
        self.assertIn(f"profile {report['profile_hash']} for BF16, {path.stat().st_size} bytes\n", text)
        for model in report["models"]:
            self.assertRegex(text, rf"{model['predictor']} +{model['tables']} tables, {model['bits_per_scalar']:.3f} bits")

    def test_inspect_shows_what_the_cache_was(self):
        cache = make_cache(0, "F8_E5M2", tokens=0, value_dim=0, scales=True)
        self.write("empty.safetensors", cache)
        self.write("full.safetensors", make_cache(0, "F8_E5M2", value_dim=0, scales=True))
        self.run_tool("calibrate", "-o", "x.kvp", "full.safetensors")
        self.run_tool("encode", "empty.safetensors", "-o", "x.kvx", "--profile", "x.kvp")
        text, report = self.both("inspect", "x.kvx")
        self.assertEqual([report[key] for key in ("dtype", "tokens", "storage_scales", "chunks", "layers")], ["F8_E5M2", 0, 2, 0, []])
        self.assertEqual(report["shape"], [{"layers": 2, "kv_heads": 2, "key_dim": 8, "value_dim": 0}])
        self.assertIn("stream of 0 tokens, F8_E5M2", text)

    def test_noise_is_stored_and_needs_no_prediction(self):
        noise = {"layers.0.k": ("BF16", [64, 2, 8], random.Random(0).randbytes(2048))}
        self.write("noise.safetensors", noise)
        self.write("calm.safetensors", {"layers.0.k": ("BF16", [64, 2, 8], narrow("BF16", [1.5] * 1024))})
        self.run_tool("calibrate", "-o", "x.kvp", "calm.safetensors", "--prediction", "calm.safetensors")
        self.run_tool("encode", "noise.safetensors", "-o", "x.kvx", "--profile", "x.kvp", "--prediction", "calm.safetensors")
        report = self.report("inspect", "x.kvx")
        self.assertEqual(report["layers"][0]["modes"], ["stored"])
        self.assertEqual(report["decoding_needs"], [f"profile {report['profile_hash']}"])
        self.run_tool("decode", "x.kvx", "-o", "back.safetensors", "--profile", "x.kvp")
        self.assert_same_tensors(self.folder / "noise.safetensors", self.folder / "back.safetensors")

    def test_a_path_of_any_bytes(self):
        name = os.fsdecode(b"\xff\xfe.kvx")
        report = self.report("encode", SHARED / "c.safetensors", "-o", name, "--profile", SHARED / "plain.kvp")
        self.assertIn("\ufffd", report["file"])
        self.assertEqual(self.report("inspect", name)["tokens"], 40)
        self.assertIn(name, self.run_tool("inspect", name))

    def test_verify(self):
        a, b = SHARED / "a.safetensors", SHARED / "b.safetensors"
        self.assertEqual(self.report("verify", a, a), {"a": str(a), "b": str(a), "bit_exact": True})
        text, report = self.both("verify", a, b, code=3)
        self.assertEqual([report["a"], report["b"], report["bit_exact"]], [str(a), str(b), False])
        self.assertEqual(text, f"bit-exact: no; {report['difference']}\n")


class Verify(Case):
    def difference(self, left, right):
        self.write("left.safetensors", left)
        self.write("right.safetensors", right)
        text = self.run_tool("verify", "left.safetensors", "right.safetensors", code=3)
        self.assertTrue(text.startswith("bit-exact: no; ") and text.endswith("\n"), text)
        return text[len("bit-exact: no; ") : -1]

    def test_names_the_first_difference(self):
        for dtype, pattern in (("BF16", "0x{:04x}"), ("F16", "0x{:04x}"), ("F8_E4M3", "0x{:02x}"), ("F8_E5M2", "0x{:02x}")):
            cache = make_cache(1, dtype)
            size = SIZES[dtype]
            for part, dim, token, head, at, bit in (("0.k", 8, 0, 0, 0, 0), ("0.v", 6, 39, 1, 5, 8 * size - 1), ("1.k", 8, 17, 1, 3, 5)):
                name = f"layers.{part}"
                element = (token * 2 + head) * dim + at
                other = with_bit_flipped(cache, name, 8 * size * element + bit)
                values = [int.from_bytes(each[name][2][size * element :][:size], "little") for each in (cache, other)]
                where = f"tensor '{name}' differs first at token {token}, head {head}, dim {at}: "
                self.assertEqual(self.difference(cache, other), where + " and ".join(map(pattern.format, values)))
                self.assertEqual(self.difference(other, cache), where + " and ".join(map(pattern.format, reversed(values))))

    def test_the_first_of_several(self):
        cache = make_cache(1)
        other = cache
        for name, bit in (("layers.1.v", 0), ("layers.0.v", 16 * (2 * 12 + 6 + 1)), ("layers.0.v", 16 * (3 * 12))):
            other = with_bit_flipped(other, name, bit)
        self.assertIn("tensor 'layers.0.v' differs first at token 2, head 1, dim 1: ", self.difference(cache, other))

    def test_scales(self):
        cache = make_cache(1, "F8_E4M3", scales=True)
        cache["layers.1.v_scale"] = ("F32", [1], struct.pack("<f", 1.0))
        other = with_bit_flipped(cache, "layers.1.v_scale", 31)
        self.assertEqual(self.difference(cache, other), "tensor 'layers.1.v_scale' differs first at element 0: 0x3f800000 and 0xbf800000")

    def test_equal_numbers_of_other_bits_differ_and_equal_nans_do_not(self):
        def one(bits):
            return {"layers.0.k": ("BF16", [1, 1, 1], struct.pack("<H", bits))}

        self.assertIn("0x0000 and 0x8000", self.difference(one(0), one(0x8000)))
        self.assertIn("0x7fc0 and 0x7fc1", self.difference(one(0x7FC0), one(0x7FC1)))
        self.write("nan.safetensors", one(0x7FC1))
        self.run_tool("verify", "nan.safetensors", "nan.safetensors")

    def test_missing_tensors(self):
        cache = make_cache(1)
        less = {name: tensor for name, tensor in cache.items() if name != "layers.1.k"}
        self.assertEqual(self.difference(cache, less), "tensor 'layers.1.k' is missing in right.safetensors")
        self.assertEqual(self.difference(less, cache), "tensor 'layers.1.k' is missing in left.safetensors")

    def test_other_shape_or_dtype(self):
        dtype, _, data = make_cache(1)["layers.0.k"]
        left = {"layers.0.k": (dtype, [40, 2, 8], data)}
        self.assertEqual(self.difference(left, {"layers.0.k": (dtype, [40, 4, 4], data)}),
                         "tensor 'layers.0.k' is BF16 [40, 2, 8] in left.safetensors and BF16 [40, 4, 4] in right.safetensors")
        self.assertIn("and F16 [40, 2, 8] in", self.difference(left, {"layers.0.k": ("F16", [40, 2, 8], data)}))

    def test_order_in_the_file_does_not_matter(self):
        cache = make_cache(1)
        self.write("left.safetensors", cache)
        self.write("right.safetensors", dict(reversed(cache.items())))
        self.run_tool("verify", "left.safetensors", "right.safetensors")

    def test_a_file_that_cannot_be_read_is_a_failure_not_a_difference(self):
        self.fails("verify", SHARED / "a.safetensors", "nowhere", says="nowhere: cannot open: No such file")
        self.fails("verify", SHARED / "plain.kvx", SHARED / "a.safetensors", says="not a safetensors file?")


class Predictors(Case):
    """Which of them a profile is for, and what it takes along. In these caches every channel says something of the others."""

    OPTIONS = {"none": ["--predictor", "none"], "cross": [], "plain": ["--plain"], "maps": []}
    NAMES = {"none": "channel_mean", "cross": "cross_layer", "plain": "external", "maps": "cross_layer on external"}

    @classmethod
    def setUpClass(cls):
        cls.home = pathlib.Path(tempfile.mkdtemp(prefix="kvexact-tool-predictors-"))
        cls.addClassCleanup(shutil.rmtree, cls.home)
        for i, name in enumerate("ab"):
            cache, prediction = make_related_cache(i)
            cls.home.joinpath(f"{name}.safetensors").write_bytes(safetensors(cache))
            cls.home.joinpath(f"{name}_pred.safetensors").write_bytes(safetensors(prediction))
        for kind in cls.NAMES:
            guess = [["--prediction", cls.home / f"{name}_pred.safetensors"] if kind in ("plain", "maps") else [] for name in "ab"]
            for command in (["calibrate", cls.home / "a.safetensors", "-o", cls.home / f"{kind}.kvp", *guess[0], *cls.OPTIONS[kind]],
                            ["encode", cls.home / "b.safetensors", "-o", cls.home / f"{kind}.kvx", "--profile", cls.home / f"{kind}.kvp",
                             *guess[1]]):
                subprocess.run([TOOL, *command], check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)

    def guess(self, kind, name="b_pred.safetensors"):
        return ["--prediction", self.home / name] if kind in ("plain", "maps") else []

    def size(self, name):
        return self.home.joinpath(name).stat().st_size

    def test_each_gives_back_every_bit_and_maps_make_streams_smaller(self):
        for kind in self.NAMES:
            self.run_tool("decode", self.home / f"{kind}.kvx", "-o", "back.safetensors", "--profile", self.home / f"{kind}.kvp",
                          *self.guess(kind))
            self.assert_same_tensors(self.home / "b.safetensors", self.folder / "back.safetensors")
        self.assertLess(self.size("cross.kvx"), 0.8 * self.size("none.kvx"))
        self.assertLess(self.size("maps.kvx"), 0.8 * self.size("plain.kvx"))
        self.assertLess(self.size("maps.kvx"), self.size("none.kvx"))

    def test_calibrate_says_which_it_is_for(self):
        for options, kind in ((["--predictor", "cross_layer"], "cross"), (["--plain"], "none"),
                              (["--predictor", "none", "--plain"], "none")):
            report = self.report("calibrate", "-o", "x.kvp", self.home / "a.safetensors", *options)
            self.assertEqual(self.folder.joinpath("x.kvp").read_bytes(), self.home.joinpath(f"{kind}.kvp").read_bytes())
            self.assertIn(self.NAMES[kind], report["bits_per_scalar"])
            self.assertIn("channel_mean", report["bits_per_scalar"])

    def test_inspect_streams(self):
        for kind, needs, alone in (("none", 1, "any layers and tokens"), ("cross", 1, "any token range"),
                                   ("plain", 2, "any layers and tokens"), ("maps", 2, "any token range")):
            report = self.report("inspect", self.home / f"{kind}.kvx")
            self.assertEqual([report["predictor"], report["decodes_alone"], len(report["decoding_needs"])], [self.NAMES[kind], alone, needs])
            self.assertEqual([layer["modes"] for layer in report["layers"]], [[self.NAMES[kind]]])
            self.assertIn(f"decodes alone: {alone}\n", self.run_tool("inspect", self.home / f"{kind}.kvx"))

    def test_inspect_profiles(self):
        for kind, layers_back in (("none", None), ("cross", 3), ("plain", None), ("maps", 1)):
            text, report = self.run_tool("inspect", self.home / f"{kind}.kvp"), self.report("inspect", self.home / f"{kind}.kvp")
            self.assertEqual([model["predictor"] for model in report["models"]], [self.NAMES[kind]] + ["channel_mean"] * (kind != "none"))
            maps = report["models"][0].get("maps")
            self.assertEqual(maps and maps["layers_back"], layers_back)
            self.assertTrue(all("maps" not in model for model in report["models"][1:]))
            self.assertNotIn("note", report)
            self.assertEqual(f"    maps: {layers_back} layers back, blocks of 16 channels; " in text, maps is not None)
            if maps:
                self.assertIn(f"; {maps['bytes']} bytes, {maps['multiply_adds_per_scalar']:.0f} multiply-adds per scalar\n", text)

    def test_shape_of_the_maps(self):
        # Three layers of 2 heads with 8 and 6 channels, 84 in all; multiply-adds a token, counted by hand: for each layer K, V.
        full = {"rank": 0, "block_size": 16, "per_head": False}
        first = 8 * 8 + 6 * (16 + 22)  # the heads of a tile are coded one after the other
        second = 8 * (28 + 36) + 6 * (44 + 50)
        third = 8 * (56 + 64) + 6 * (72 + 78)
        for options, kind, adds, shape in (
                ([], "cross", first + second + third, {**full, "layers_back": 3}),
                ([], "maps", first + 2 * second, {**full, "layers_back": 1}),
                (["--layers-back", "1"], "cross", first + 2 * second, {**full, "layers_back": 1}),
                (["--layers-back", "2"], "maps", first + second + third, {**full, "layers_back": 2}),
                (["--block-size", "0"], "cross", 12 * 16 + (16 * 28 + 12 * 44) + (16 * 56 + 12 * 72), {**full, "block_size": 0}),
                (["--rank", "2", "--block-size", "0"], "maps", 2 * 16 + 12 * 2 + 2 * (2 * 28 + 16 * 2 + 2 * 44 + 12 * 2),
                 {"rank": 2, "block_size": 0, "per_head": False}),
                (["--per-head"], "maps", 12 * 8 + 2 * (16 * 14 + 12 * 22), {**full, "per_head": True})):
            with self.subTest(options=options, kind=kind):
                self.run_tool("calibrate", self.home / "a.safetensors", "-o", "x.kvp", *self.guess(kind, "a_pred.safetensors"), *options)
                maps = self.report("inspect", "x.kvp")["models"][0]["maps"]
                self.assertEqual({key: maps[key] for key in shape}, shape)
                self.assertAlmostEqual(maps["multiply_adds_per_scalar"], adds / 84)
                self.run_tool("encode", self.home / "b.safetensors", "-o", "x.kvx", "--profile", "x.kvp", *self.guess(kind))
                self.run_tool("decode", "x.kvx", "-o", "back.safetensors", "--profile", "x.kvp", *self.guess(kind))
                self.assert_same_tensors(self.home / "b.safetensors", self.folder / "back.safetensors")

    def test_options_that_need_maps(self):
        for options in (["--rank", "2"], ["--per-head"], ["--layers-back", "1"], ["--block-size", "16"]):
            for kind in (["--plain"], ["--predictor", "none"], ["--plain", *self.guess("plain", "a_pred.safetensors")]):
                self.fails("calibrate", self.home / "a.safetensors", "-o", "x", *options, *kind, says=[options[0], "there are none"])
        self.fails("calibrate", self.home / "a.safetensors", "-o", "x", "--predictor", "none", *self.guess("maps", "a_pred.safetensors"),
                   says=["--predictor none", "--prediction"])

    def test_profiles_of_other_predictors(self):
        for stream in self.NAMES:
            for profile in self.NAMES:
                if stream != profile:
                    self.fails("decode", self.home / f"{stream}.kvx", "-o", "x", "--profile", self.home / f"{profile}.kvp",
                               *self.guess(stream), says="profile_mismatch")
        for kind in ("none", "cross"):
            self.fails("encode", self.home / "b.safetensors", "-o", "x", "--profile", self.home / f"{kind}.kvp", *self.guess("maps"),
                       says=[f"{kind}.kvp: profile_mismatch", "calibrate with --prediction"])
        for kind in ("plain", "maps"):
            self.fails("encode", self.home / "b.safetensors", "-o", "x", "--profile", self.home / f"{kind}.kvp",
                       says=[f"{kind}.kvp: prediction_missing", "--prediction"])
            self.fails("decode", self.home / f"{kind}.kvx", "-o", "x", "--profile", self.home / f"{kind}.kvp",
                       says=[f"{kind}.kvx: prediction_missing", "--prediction"])
            self.fails("decode", self.home / f"{kind}.kvx", "-o", "x", "--profile", self.home / f"{kind}.kvp",
                       *self.guess(kind, "a_pred.safetensors"), says=f"{kind}.kvx: prediction_mismatch")
        for kind in ("none", "cross"):
            for prediction in ("nowhere", self.home / "b_pred.safetensors"):
                self.fails("decode", self.home / f"{kind}.kvx", "-o", "x", "--profile", self.home / f"{kind}.kvp", "--prediction", prediction,
                           says=f"{kind}.kvx: was encoded without a prediction")

    def test_unknown_predictors(self):
        self.write("odd.kvx", with_word(self.home.joinpath("cross.kvx").read_bytes(), 1, 4, 77))
        self.fails("decode", "odd.kvx", "-o", "x", "--profile", self.home / "cross.kvp", says="odd.kvx: unsupported: unknown predictor 77")
        self.write("odd.kvp", with_word(self.home.joinpath("cross.kvp").read_bytes(), 16, 4 * (6 + 5 + 2 + 1), 77))
        self.fails("encode", self.home / "b.safetensors", "-o", "x", "--profile", "odd.kvp", says="odd.kvp: unsupported: unknown predictor 77")

    def test_closed_loop_is_refused(self):
        closed_loop = 5
        stream = with_word(self.home.joinpath("cross.kvx").read_bytes(), 1, 4, closed_loop)
        self.write("loop.kvx", stream)
        report = self.report("inspect", "loop.kvx")
        self.assertEqual((report["predictor"], report["decodes_alone"]), ("closed_loop", "any token prefix"))
        self.fails("decode", "loop.kvx", "-o", "x", "--profile", self.home / "cross.kvp",
                   says=["loop.kvx: unsupported: for the closed loop, which needs an engine", "smollm2_codec"])
        # Six words, the shape with one run of layers, no rotation, the number of models.
        self.write("loop.kvp", with_word(self.home.joinpath("cross.kvp").read_bytes(), 16, 4 * (6 + 5 + 2 + 1), closed_loop))
        self.assertEqual(self.report("inspect", "loop.kvp")["models"][0]["predictor"], "closed_loop")
        self.fails("encode", self.home / "b.safetensors", "-o", "x", "--profile", "loop.kvp",
                   says=["loop.kvp: unsupported: for the closed loop, which needs an engine", "smollm2_codec"])

    def warning(self, cache, profile, *options):
        """What encoding warns of, the same as text and as JSON; the file must be good all the same."""
        command = ["encode", cache, "-o", "x.kvx", "--profile", profile, *options]
        ended = self.start(*command, "--json")
        report = json.loads(ended.stdout)
        text = ended.stderr.decode()
        self.assertEqual((ended.returncode, text), (0, f"kvexact: warning: x.kvx: {report['warning']}\n" if "warning" in report else ""))
        self.assertEqual(self.start(*command).stderr.decode(), text)
        self.run_tool("decode", "x.kvx", "-o", "back.safetensors", "--profile", profile, *options)
        self.run_tool("verify", cache, "back.safetensors")
        return report.get("warning")

    def test_a_profile_that_does_not_fit(self):
        def noise(spread):
            generator = random.Random(5)
            return {name: (dtype, shape, narrow(dtype, [generator.gauss(0, spread) for _ in range(len(data) // 2)]))
                    for name, (dtype, shape, data) in make_related_cache(0)[0].items()}

        self.write("strange.safetensors", noise(6))
        self.write("stranger.safetensors", noise(20))
        self.write("short.safetensors", {name: (dtype, [1, *shape[1:]], data[: len(data) // shape[0]])
                                         for name, (dtype, shape, data) in noise(20).items()})
        for kind in self.NAMES:
            profile = self.home / f"{kind}.kvp"
            self.assertIsNone(self.warning(self.home / "b.safetensors", profile, *self.guess(kind)), kind)
        self.assertRegex(self.warning("strange.safetensors", self.home / "cross.kvp"),
                         r"does not fit this cache: 2 of 2 chunks are coded without its predictor; [\d.]+ bits per scalar, [\d.]+ on ")
        self.assertRegex(self.warning("strange.safetensors", self.home / "none.kvp"), r"does not fit this cache: [\d.]+ bits per scalar")
        self.assertRegex(self.warning("stranger.safetensors", self.home / "none.kvp"), r"does not fit this cache: 2 of 2 chunks")
        self.assertIsNone(self.warning("short.safetensors", self.home / "cross.kvp"))
        # Where storing was to be expected, it is nobody's fault.
        self.write("bits.safetensors", {"layers.0.k": ("BF16", [256, 2, 8], random.Random(6).randbytes(8192))})
        self.run_tool("calibrate", "bits.safetensors", "-o", "bits.kvp")
        self.assertIsNone(self.warning("bits.safetensors", "bits.kvp"))


# The command line --------------------------------------------------------------------------------------------------------------------


class CommandLine(Case):
    def test_help(self):
        text = self.run_tool("--help")
        for command in ("calibrate", "encode", "decode", "inspect", "verify"):
            self.assertIn(f"  {command} ", text)
            self.assertIn("--json", self.run_tool(command, "--help"))
        for words in ("0 done", "1 failed", "3 verify found a difference", "100 and above: wrong command line"):
            self.assertIn(words, " ".join(text.split()))

    def test_the_examples_of_the_help_work(self):
        names = "abcd"
        for name in names:
            shutil.copy(SHARED / f"{name}.safetensors", self.folder)
            shutil.copy(SHARED / f"{name}_pred.safetensors", self.folder / f"{name}_int8.safetensors")
        commands = re.findall(r"^  kvexact (.+)$", self.run_tool("--help"), re.MULTILINE)
        self.assertEqual([command.split()[0] for command in commands],
                         ["calibrate", "encode", "decode", "verify", "calibrate", "encode", "decode"])
        for command in commands:
            self.run_tool(*command.split())
        self.assert_same_tensors(self.folder / "d.safetensors", self.folder / "d2.safetensors")

    def test_version(self):
        self.assertRegex(self.run_tool("--version"), r"\A\d+\.\d+\.\d+\n\Z")

    def test_wrong_command_lines(self):
        cache, profile = SHARED / "a.safetensors", SHARED / "plain.kvp"
        twice = ["--prediction", cache, "--prediction", cache]
        for arguments, says in (([], "required"),
                                (["encod", cache], "'encod'"),
                                (["encode"], "cache"),
                                (["encode", cache], "--out"),
                                (["encode", cache, "-o", "x"], "--profile"),
                                (["encode", cache, "-o", "x", "--profile"], "--profile"),
                                (["encode", cache, cache, "-o", "x", "--profile", profile], ""),
                                (["encode", cache, "-o", "x", "--profile", profile, *twice], "--prediction"),
                                (["encode", cache, "-o", "x", "--profile", profile, "--fast"], "--fast"),
                                (["decode", "-o", "x", "--profile", profile], "stream"),
                                (["calibrate", cache], "--out"),
                                (["calibrate", "-o", "x"], "caches"),
                                (["calibrate", "-o", "x", cache, "--rope-base", "much"], "--rope-base"),
                                (["calibrate", "-o", "x", cache, "--rope-base", "1e4", "--rope-dim", "-2"], "--rope-dim"),
                                (["calibrate", "-o", "x", cache, "--rope-dim", "4"], "--rope-base"),
                                (["calibrate", "-o", "x", cache, "--rope-base", "1e4", "--rope-frequencies", "f"], "--rope-frequencies"),
                                (["calibrate", "-o", "x", cache, "--rope-base", "1e4", "--rope-pairs", "third"], "--rope-pairs"),
                                (["calibrate", "-o", "x", cache, "--predictor", "magic"], "--predictor"),
                                (["calibrate", "-o", "x", cache, "--layers-back", "0"], "--layers-back"),
                                (["calibrate", "-o", "x", cache, "--layers-back", "9"], "--layers-back"),
                                (["calibrate", "-o", "x", cache, "--rank", "0"], "--rank"),
                                (["calibrate", "-o", "x", cache, "--block-size", "-1"], "--block-size"),
                                (["calibrate", "-o", "x", cache, "--rank", "2", "--per-head"], "--per-head"),
                                (["inspect"], "file"),
                                (["inspect", cache, cache], ""),
                                (["verify", cache], "2 required"),
                                (["verify", cache, cache, cache], "2 required")):
            with self.subTest(arguments=arguments):
                ended = self.start(*arguments)
                self.assertGreaterEqual(ended.returncode, 100)
                self.assertIn(says, ended.stderr.decode())
                self.assertEqual(contents(self.folder), {})

    def test_one_prediction_for_each_cache(self):
        a, b = SHARED / "a.safetensors", SHARED / "b.safetensors"
        guess = ["--prediction", SHARED / "a_pred.safetensors"]
        for arguments in ([a, b, *guess], [a, *guess, *guess]):
            self.fails("calibrate", "-o", "x", *arguments, says="one --prediction for each cache")
        # The option takes one file, so that caches may follow it.
        self.run_tool("calibrate", "-o", "x.kvp", *guess, a)

    def rotary_of(self, *options):
        self.run_tool("calibrate", "-o", "x.kvp", SHARED / "a.safetensors", *options)
        report = self.report("inspect", "x.kvp")
        if "rotary" in report:
            self.assertIn(f"{report['rotary']['dim']} dimensions in {report['rotary']['pairs']} pairs", self.run_tool("inspect", "x.kvp"))
        return report.get("rotary"), report["profile_hash"]

    def test_rotary_options(self):
        self.write("f.txt", b"1 0.1 0.01\n0.001\n")
        none, _ = self.rotary_of()
        self.assertIsNone(none)
        half, by_base = self.rotary_of("--rope-base", "10000")
        self.assertEqual(half, {"pairs": "half", "dim": 8})
        interleaved, other = self.rotary_of("--rope-base", "10000", "--rope-pairs", "interleaved")
        self.assertEqual(interleaved, {"pairs": "interleaved", "dim": 8})
        self.assertNotEqual(by_base, other)
        self.assertEqual(self.rotary_of("--rope-base", "500000", "--rope-dim", "4")[0], {"pairs": "half", "dim": 4})
        # Base 10000 over 8 dimensions is 10000^0, ^-1/4, ^-1/2, ^-3/4.
        self.assertEqual(self.rotary_of("--rope-frequencies", "f.txt"), (half, by_base))
        self.assertEqual(self.rotary_of("--rope-frequencies", "f.txt", "--rope-pairs", "interleaved"), (interleaved, other))
        self.run_tool("encode", SHARED / "c.safetensors", "-o", "x.kvx", "--profile", "x.kvp")
        self.run_tool("decode", "x.kvx", "-o", "back.safetensors", "--profile", "x.kvp")
        self.assert_same_tensors(SHARED / "c.safetensors", self.folder / "back.safetensors")

    def test_rotary_options_out_of_range(self):
        for options, says in ((["--rope-base", "0"], "base is above 1"),
                              (["--rope-base", "1"], "base is above 1"),
                              (["--rope-base=-5"], "base is above 1"),
                              (["--rope-base", "nan"], "base is above 1"),
                              (["--rope-base", "inf"], "base is above 1"),
                              (["--rope-base", "1e4", "--rope-dim", "0"], "rotary dimension"),
                              (["--rope-base", "1e4", "--rope-dim", "3"], "rotary dimension"),
                              (["--rope-base", "1e4", "--rope-dim", "10"], "fewer dimensions than are rotated (layer 0)"),
                              (["--rope-base", "1e4", "--rope-dim", "4294967294"], "rotary dimension"),
                              (["--rope-pairs", "half"], "--rope-pairs needs --rope-base or --rope-frequencies")):
            self.fails("calibrate", "-o", "x", SHARED / "a.safetensors", *options, says=says)

    def test_bad_rotary_frequencies(self):
        self.folder.joinpath("folder").mkdir()
        for content, says in ((b"", "should hold decimal numbers"), (b"1 0.1 many\n", "'many'"), (b"1 0.5 1e", "'1e'"),
                              (b"1,0.1", "'1,0.1'"),
                              (b"1 -0.1", "[0, 2 pi)"), (b"6.3", "[0, 2 pi)"), (b"nan", "[0, 2 pi)"), (b"1 1e999", "'1e999'"),
                              (b"1 1 1 1 1", "fewer dimensions than are rotated"), (b"1 " * 100000, "number of rotary frequencies"), (bytes(range(256)), "")):
            self.write("f.txt", content)
            self.fails("calibrate", "-o", "x", SHARED / "a.safetensors", "--rope-frequencies", "f.txt", says=says)
        self.fails("calibrate", "-o", "x", SHARED / "a.safetensors", "--rope-frequencies", "nowhere", says="nowhere: cannot open")
        for path in (self.write("f.txt", b"1" * (1 << 20 | 1)), "/dev/zero"):
            self.fails("calibrate", "-o", "x", SHARED / "a.safetensors", "--rope-frequencies", path,
                       says=f"{path}: too large, more than 1 MiB of text")
        self.fails("calibrate", "-o", "x", SHARED / "a.safetensors", "--rope-frequencies", "folder", says="folder: ")


# What must be refused ----------------------------------------------------------------------------------------------------------------


class Mismatches(Case):
    def encode_fails(self, cache, *options, profile="plain.kvp", says=()):
        return self.fails("encode", cache, "-o", "x", "--profile", SHARED / profile, *options, says=says)

    def decode_fails(self, stream, *options, profile="plain.kvp", says=()):
        return self.fails("decode", SHARED / stream, "-o", "x", "--profile", SHARED / profile, *options, says=says)

    def test_profile(self):
        needed, given = (self.report("inspect", SHARED / name)["profile_hash"] for name in ("plain.kvp", "other.kvp"))
        self.decode_fails("plain.kvx", profile="other.kvp",
                          says=["plain.kvx: profile_mismatch", f"needs {needed}", f"other.kvp is {given}"])
        self.encode_fails(SHARED / "c.safetensors", "--prediction", SHARED / "c_pred.safetensors",
                          says=["plain.kvp: profile_mismatch", "calibrate with --prediction"])
        self.decode_fails("predicted.kvx", "--prediction", SHARED / "c_pred.safetensors", says="plain.kvp: profile_mismatch")

    def test_dtype(self):
        self.write("f16.safetensors", make_cache(0, "F16"))
        self.encode_fails("f16.safetensors", says=["plain.kvp: dtype_mismatch"])
        self.fails("calibrate", "-o", "x", SHARED / "a.safetensors", "f16.safetensors", says="f16.safetensors: other number format than")
        self.encode_fails(SHARED / "c.safetensors", "--prediction", "f16.safetensors", profile="predicted.kvp",
                          says="f16.safetensors: a prediction is BF16")
        self.run_tool("calibrate", "-o", "f16.kvp", "f16.safetensors")
        self.fails("decode", SHARED / "plain.kvx", "-o", "x", "--profile", "f16.kvp", says="f16.kvp: dtype_mismatch")

    def test_shape(self):
        for change, says in (({"layers": 3}, "3 layers, but"), ({"heads": 3}, "layer 0 has 3 heads, key dim 8, value dim 6, but in"),
                             ({"key_dim": 10}, "layer 0 has 2 heads, key dim 10"),
                             ({"value_dim": 0}, "layer 0 has 2 heads, key dim 8, value dim 0")):
            self.write("other.safetensors", make_cache(0, **change))
            self.encode_fails("other.safetensors", says=["other.safetensors: shape_mismatch: ", says, "plain.kvp"])
            for other in (["other.safetensors", SHARED / "a.safetensors"], [SHARED / "a.safetensors", "other.safetensors"]):
                self.fails("calibrate", "-o", "x", *other, says=[f"{other[1]}: shape_mismatch", f"{other[0]}"])
            for arguments in (["encode", SHARED / "c.safetensors"], ["decode", SHARED / "predicted.kvx"]):
                self.fails(*arguments, "-o", "x", "--profile", SHARED / "predicted.kvp", "--prediction", "other.safetensors",
                           says=["other.safetensors: shape_mismatch: ", says])
        last = {**make_cache(0), "layers.1.v": ("BF16", [40, 2, 7], bytes(1120))}
        self.write("other.safetensors", last)
        self.encode_fails("other.safetensors", says="layer 1 has 2 heads, key dim 8, value dim 7, but in")

    def test_prediction_missing(self):
        self.decode_fails("predicted.kvx", profile="predicted.kvp", says=["predicted.kvx: prediction_missing", "--prediction"])
        self.encode_fails(SHARED / "c.safetensors", profile="predicted.kvp", says=["predicted.kvp: prediction_missing", "--prediction"])

    def test_prediction_of_other_length(self):
        for tokens in (0, 39, 41):
            self.write("other.safetensors", make_cache(2, tokens=tokens))
            for arguments in (["encode", SHARED / "c.safetensors"], ["decode", SHARED / "predicted.kvx"]):
                self.fails(*arguments, "-o", "x", "--profile", SHARED / "predicted.kvp", "--prediction", "other.safetensors",
                           says=["other.safetensors: ", f"{tokens} tokens", "40"])
            self.fails("calibrate", "-o", "x", SHARED / "a.safetensors", "--prediction", "other.safetensors", says=f"{tokens} tokens")

    def test_prediction_with_one_other_bit(self):
        prediction = tensors_of(SHARED / "c_pred.safetensors")
        for name in prediction:
            bits = 8 * len(prediction[name][2])
            for bit in (0, 7 + bits // 2, bits - 1):
                self.write("other.safetensors", with_bit_flipped(prediction, name, bit))
                self.decode_fails("predicted.kvx", "--prediction", "other.safetensors", profile="predicted.kvp",
                                  says="predicted.kvx: prediction_mismatch")

    def test_nothing_to_calibrate_on(self):
        self.write("empty.safetensors", make_cache(0, tokens=0))
        self.write("nan.safetensors", {"layers.0.k": ("BF16", [8, 1, 1], b"\xc0\x7f" * 8)})
        for name in ("empty.safetensors", "nan.safetensors"):
            self.fails("calibrate", "-o", "x", name, says="not_calibrated")


class NotACache(Case):
    def refused(self, tensors, *says, **more):
        self.write("x.safetensors", tensors, **more)
        for arguments in (["encode", "x.safetensors", "--profile", SHARED / "plain.kvp"], ["calibrate", "x.safetensors"],
                          ["encode", SHARED / "c.safetensors", "--profile", SHARED / "predicted.kvp", "--prediction", "x.safetensors"]):
            self.fails(*arguments, "-o", "x", says=["x.safetensors: ", *says])

    def test_other_names(self):
        key = make_cache(0)["layers.0.k"]
        for name in ("past_key_values.0.key", "model.layers.0.self_attn.k", "key_cache.0", "layers.0.K", "layers.00.k", "layers.1.k",
                     "layers.0.v"):
            self.refused({name: key}, "no tensor 'layers.0.k'", f"'{name}'", "a cache has tensors layers.N.k and layers.N.v")
        self.refused({}, "no tensor 'layers.0.k'", "no tensors")

    def test_unknown_tensors(self):
        cache = make_cache(0)
        for name in ("positions", "layers.2.v", "layers.3.k", "layers.0.q", "layers.0.k_zero", "layers.0.v_scales"):
            self.refused({**cache, name: ("BF16", [40, 2, 6], bytes(960))}, f"tensor '{name}' is not part of a cache", "would be lost")
        self.refused({name: tensor for name, tensor in cache.items() if name != "layers.1.k"}, "tensor 'layers.1.v' is not part")

    def test_control_characters_of_names_do_not_reach_the_terminal(self):
        self.refused({**make_cache(0), "\x1b[2J\r\n": ("F32", [0], b"")}, r"'\x1b[2J\x0d\x0a'")

    def test_odd_tensors(self):
        cache = make_cache(0)
        for name, tensor, says in (("layers.0.k", ("F32", [40, 2, 4], bytes(1280)), "a cache holds BF16, F16, F8_E4M3 or F8_E5M2, not F32"),
                                   ("layers.1.k", ("F16", [40, 2, 8], bytes(1280)), "other number format"),
                                   ("layers.0.v", ("BF16", [39, 2, 6], bytes(936)), "other number of tokens"),
                                   ("layers.1.v", ("BF16", [40, 3, 6], bytes(1440)), "other number of heads"),
                                   ("layers.0.k", ("BF16", [40, 16], bytes(1280)), "should be [tokens, heads, head_dim]"),
                                   ("layers.0.k", ("BF16", [1, 40, 2, 8], bytes(1280)), "should be [tokens, heads, head_dim]"),
                                   ("layers.0.k", ("BF16", [40, 0, 8], b""), "heads or dimensions"),
                                   ("layers.1.v", ("BF16", [40, 2, 0], b""), "heads or dimensions"),
                                   ("layers.0.k", ("BF16", [0, 2, 1 << 40], b""), "heads or dimensions")):
            self.refused({**cache, name: tensor}, f"tensor '{name}'", says)

    def test_odd_scales(self):
        one = ("F32", [1], struct.pack("<f", 1))
        self.refused({**make_cache(0), "layers.0.k_scale": one}, "layers.0.k_scale", "only fp8 caches have scales")
        cache = make_cache(0, "F8_E4M3")
        scaled = make_cache(0, "F8_E4M3", scales=True)
        self.refused({**cache, "layers.1.v_scale": one}, "layers.1.v_scale", "not for 'layers.0.k'")
        self.refused({name: tensor for name, tensor in scaled.items() if name != "layers.1.k_scale"}, "'layers.1.k_scale' is missing")
        for odd in (("F32", [2], bytes(8)), ("F32", [], bytes(4)), ("F32", [0], b""), ("BF16", [1], bytes(2))):
            self.refused({**scaled, "layers.0.v_scale": odd}, "'layers.0.v_scale'", "should be F32 [1]")


class BadInputs(Case):
    """Anything in the place of any input."""

    PLACES = ("cache", "profile", "stream", "prediction", "inspect", "verify")

    def everywhere(self, path, places=PLACES, says=(), **options):
        c, plain, predicted = SHARED / "c.safetensors", SHARED / "plain.kvp", SHARED / "predicted.kvp"
        commands = {"cache": [["calibrate", path], ["calibrate", c, path], ["encode", path, "--profile", plain]],
                    "profile": [["encode", c, "--profile", path], ["decode", SHARED / "plain.kvx", "--profile", path]],
                    "stream": [["decode", path, "--profile", plain]],
                    "inspect": [["inspect", path]],
                    "verify": [["verify", path, c], ["verify", c, path]],
                    "prediction": [["encode", c, "--profile", predicted, "--prediction", path], ["calibrate", c, "--prediction", path],
                                   ["decode", SHARED / "predicted.kvx", "--profile", predicted, "--prediction", path]]}
        for place in places:
            output = [] if place in ("inspect", "verify") else ["-o", "x"]
            for command in commands[place]:
                self.fails(*command, *output, says=[f"{path}: ", *says], **options)

    def test_empty_and_garbage(self):
        generator = random.Random(1)
        for content in (b"", b"\0", bytes(7), bytes(8), bytes(4096), b"\xff" * 64, generator.randbytes(5000), b"layers.0.k\n" * 20,
                        struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 1 << 62) + b"{}"):
            self.write("bad", content)
            self.everywhere("bad")

    def test_one_kind_for_another(self):
        for name, fitting in (("d.safetensors", ("cache", "prediction", "verify")), ("other.kvp", ("profile", "inspect")),
                              ("predicted.kvx", ("stream", "inspect"))):
            shutil.copy(SHARED / name, self.folder)
            self.everywhere(name, [place for place in self.PLACES if place not in fitting])
        self.fails("decode", SHARED / "plain.kvp", "-o", "x", "--profile", SHARED / "plain.kvp", says="this is a profile, not a stream")
        self.fails("encode", SHARED / "c.safetensors", "-o", "x", "--profile", SHARED / "plain.kvx", says="this is a stream, not a profile")

    def test_no_regular_files(self):
        self.folder.joinpath("folder").mkdir()
        os.mkfifo(self.folder / "pipe")
        os.symlink("folder", self.folder / "link")
        for path in ("folder", "pipe", "link", "/dev/null", "/dev/zero"):
            self.everywhere(path, says=["not a regular file"])

    def test_nowhere(self):
        os.symlink("nowhere", self.folder / "dangling")
        for path in ("nowhere", "no/where", "dangling"):
            self.everywhere(path, says=["cannot open: No such file or directory"])
        self.everywhere("/dev/null/x", says=["cannot open: Not a directory"])

    def truncated(self, name, *places):
        content = SHARED.joinpath(name).read_bytes()
        generator = random.Random(2)
        for length in sorted({0, 1, 8, len(content) - 1, len(content) // 2, *(generator.randrange(len(content)) for _ in range(4))}):
            self.write("short", content[:length])
            self.everywhere("short", places)
        self.write("long", content + b"\0")
        self.everywhere("long", places)

    def test_truncated_cache(self):
        self.truncated("c.safetensors", "cache", "prediction", "verify")

    def test_truncated_profile(self):
        self.truncated("plain.kvp", "profile", "inspect")

    def test_truncated_stream(self):
        self.truncated("plain.kvx", "stream", "inspect")

    def test_flipped_bits(self):
        generator = random.Random(3)
        for name, command in (("plain.kvp", ["encode", SHARED / "c.safetensors", "-o", "x", "--profile", "flipped"]),
                              ("plain.kvx", ["decode", "flipped", "-o", "x", "--profile", SHARED / "plain.kvp"])):
            content = bytearray(SHARED.joinpath(name).read_bytes())
            for bit in generator.sample(range(8 * len(content)), 30):
                content[bit // 8] ^= 1 << bit % 8
                self.write("flipped", bytes(content))
                content[bit // 8] ^= 1 << bit % 8
                self.fails(*command, says="flipped: ")


class Permissions(Case):
    """As somebody who may not do everything: root is turned into nobody for these."""

    def setUp(self):
        super().setUp()
        self.who = {}
        if os.geteuid() == 0:
            self.folder.chmod(0o777)
            self.addCleanup(SHARED.chmod, SHARED.stat().st_mode)
            SHARED.chmod(0o755)
            tool = SHARED.parent / f"kvexact-tool-{os.getpid()}"
            shutil.copy(TOOL, tool)
            tool.chmod(0o755)
            self.addCleanup(tool.unlink)
            self.who = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "executable": os.fspath(tool)}
            try:
                self.run_tool("inspect", SHARED / "plain.kvx", **self.who)
            except (OSError, subprocess.SubprocessError, AssertionError) as why:
                self.skipTest(f"the tool does not run as another user: {why}")

    def test_unreadable_inputs(self):
        self.write("secret", SHARED.joinpath("c.safetensors").read_bytes())
        self.folder.joinpath("secret").chmod(0)
        BadInputs.everywhere(self, "secret", BadInputs.PLACES, says=["cannot open: Permission denied"], **self.who)

    def test_read_only_folder(self):
        closed = self.folder / "closed"
        closed.mkdir()
        for name in ("x.kvp", "x.kvx", "x.safetensors"):
            closed.joinpath(name).write_bytes(b"old")
        closed.chmod(0o555)
        self.addCleanup(closed.chmod, 0o755)
        before = contents(closed)
        for command in (["calibrate", SHARED / "a.safetensors", "-o", "closed/x.kvp"],
                        ["encode", SHARED / "c.safetensors", "--profile", SHARED / "plain.kvp", "-o", "closed/x.kvx"],
                        ["decode", SHARED / "plain.kvx", "--profile", SHARED / "plain.kvp", "-o", "closed/x.safetensors"]):
            self.fails(*command, says=f"{command[-1]}: cannot create: Permission denied", **self.who)
        self.assertEqual(contents(closed), before)


# Outputs -----------------------------------------------------------------------------------------------------------------------------


class Outputs(Case):
    def commands(self):
        """Each writing command without its -o."""
        return (["calibrate", SHARED / "a.safetensors"],
                ["encode", SHARED / "c.safetensors", "--profile", SHARED / "plain.kvp"],
                ["decode", SHARED / "plain.kvx", "--profile", SHARED / "plain.kvp"])

    def test_where_no_file_can_be(self):
        self.folder.joinpath("folder").mkdir()
        self.folder.joinpath("folder/file").write_bytes(b"kept")
        os.mkfifo(self.folder / "pipe")
        for command in self.commands():
            self.fails(*command, "-o", "nowhere/x", says="nowhere/x: cannot create: No such file or directory")
            self.fails(*command, "-o", "folder/file/x", says="folder/file/x: cannot create: Not a directory")
            self.fails(*command, "-o", "n" * 300, says="File name too long")
            for path in ("folder", "folder/", "pipe", "/dev/null", "/dev/full"):
                self.fails(*command, "-o", path, says=f"{path}: exists and is not a regular file")
            self.fails(*command, "-o", "", says="")
        self.assertEqual(contents(self.folder / "folder"), {"file": b"kept"})

    def test_an_output_that_is_an_input(self):
        for name in ("c.safetensors", "c_pred.safetensors", "predicted.kvp", "predicted.kvx"):
            shutil.copy(SHARED / name, self.folder)
        os.symlink("c.safetensors", self.folder / "link")
        self.write("f.txt", b"1 0.5\n")
        guess = ["--profile", "predicted.kvp", "--prediction", "c_pred.safetensors"]
        for command, outputs in ((["calibrate", "c.safetensors", "--prediction", "c_pred.safetensors", "--rope-frequencies", "f.txt"],
                                  ["c.safetensors", "./c.safetensors", self.folder / "c.safetensors", "link", "c_pred.safetensors",
                                   "f.txt"]),
                                 (["encode", "c.safetensors", *guess], ["c.safetensors", "link", "c_pred.safetensors", "predicted.kvp"]),
                                 (["encode", "link", *guess], ["c.safetensors", "link"]),
                                 (["decode", "predicted.kvx", *guess], ["predicted.kvx", "c_pred.safetensors", "predicted.kvp"])):
            for out in outputs:
                self.fails(*command, "-o", out, says=[f"{out}: would replace an input"])

    def test_a_failure_keeps_the_old_output(self):
        stream = bytearray(SHARED.joinpath("plain.kvx").read_bytes())
        stream[len(stream) // 2] ^= 1  # inside the last chunk: found when the output is already begun
        self.write("damaged.kvx", bytes(stream))
        self.write("old", b"old")
        self.fails("decode", "damaged.kvx", "-o", "old", "--profile", SHARED / "plain.kvp", says="checksum_mismatch")
        self.fails("encode", SHARED / "c.safetensors", "-o", "old", "--profile", SHARED / "predicted.kvp", "--prediction", "damaged.kvx")
        self.fails("calibrate", SHARED / "a.safetensors", "damaged.kvx", "-o", "old")

    def test_a_full_disk(self):
        def limit():
            # Its signal would end the program, as a default for files that grow too large.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

        self.write("old", b"old")
        for command in self.commands():
            for out in ("new", "old"):
                self.fails(*command, "-o", out, says=[f"{out}: cannot ", "File too large"], preexec_fn=limit)

    def test_an_impossible_output_is_noticed_before_the_work(self):
        # The other error comes only when the cache or the stream is read.
        stream = bytearray(SHARED.joinpath("plain.kvx").read_bytes())
        stream[len(stream) // 2] ^= 1
        self.write("damaged.kvx", bytes(stream))
        self.write("nan.safetensors", {"layers.0.k": ("BF16", [8, 1, 1], b"\xc0\x7f" * 8)})
        for command, late in ((["calibrate", "nan.safetensors"], "not_calibrated"),
                              (["encode", "nan.safetensors", "--profile", SHARED / "plain.kvp"], "shape_mismatch"),
                              (["decode", "damaged.kvx", "--profile", SHARED / "plain.kvp"], "checksum_mismatch")):
            self.fails(*command, "-o", "nowhere/x", says="nowhere/x: cannot create")
            self.fails(*command, "-o", "x", says=late)

    def test_outputs_follow_the_umask_and_close(self):
        for command in self.commands():
            self.run_tool(*command, "-o", "x", umask=0o027)
            self.assertEqual(stat.S_IMODE(self.folder.joinpath("x").stat().st_mode), 0o640)


class Terminal(Case):
    """On a terminal that nobody reads, the tool blocks once the progress bar has filled the terminal's buffer: a run of known length can be
    stopped in its middle without a race."""

    TOKENS = 1 << 21

    @classmethod
    def setUpClass(cls):
        cls.home = pathlib.Path(tempfile.mkdtemp(prefix="kvexact-tool-long-"))
        cls.addClassCleanup(shutil.rmtree, cls.home)
        noise = random.Random(4).randbytes(1 << 16) * (cls.TOKENS >> 16)
        few = noise[:4096]
        for name, data in (("long", noise), ("few", few)):
            cls.home.joinpath(f"{name}.safetensors").write_bytes(safetensors({"layers.0.k": ("F8_E5M2", [len(data), 1, 1], data)}))
        for command in (["calibrate", "few.safetensors", "-o", "x.kvp"],
                        ["encode", "long.safetensors", "-o", "long.kvx", "--profile", "x.kvp"]):
            subprocess.run([TOOL, *command], cwd=cls.home, check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT)

    def commands(self):
        return (("encoding", ["encode", self.home / "long.safetensors", "--profile", self.home / "x.kvp"]),
                ("decoding", ["decode", self.home / "long.kvx", "--profile", self.home / "x.kvp"]))

    def start_on_terminal(self, *arguments):
        ours, theirs = pty.openpty()
        self.addCleanup(os.close, ours)
        process = subprocess.Popen([TOOL, *map(os.fspath, arguments)], cwd=self.folder, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=theirs)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        os.close(theirs)
        return process, ours

    def read(self, terminal, until=None):
        """What the terminal shows until some words come, or to the end."""
        shown = b""
        end = time.monotonic() + TIMEOUT
        while until is None or until not in shown:
            ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
            self.assertTrue(ready, f"nothing more after {shown[-200:]}")
            try:
                more = os.read(terminal, 1024)
            except OSError:  # the other side is closed
                more = b""
            if not more:
                break
            shown += more
        return shown

    def start_and_wait_for_the_bar(self, what, command):
        process, terminal = self.start_on_terminal(*command, "-o", "old")
        self.assertIn(f"{what} [".encode(), self.read(terminal, b"%"))
        [part] = [name for name in contents(self.folder) if name != "old"]
        self.assertRegex(part, r"\Aold\..*\.part\Z")
        self.assertIsNone(process.poll())
        return process, terminal, part

    def test_progress(self):
        bar = f" [{'#' * 40}] 100 %"
        calibrate = ["calibrate", SHARED / "a.safetensors", SHARED / "b.safetensors"]
        for what, name, command in (("calibrating ...", "x.kvp", [*calibrate, "--plain"]),
                                    ("calibrating, some seconds a cache ...", "x.kvp", calibrate),
                                    ("\rencoding" + bar, "x.kvx", ["encode", SHARED / "a.safetensors", "--profile", SHARED / "plain.kvp"]),
                                    ("\rdecoding" + bar, "x.safetensors",
                                     ["decode", SHARED / "plain.kvx", "--profile", SHARED / "plain.kvp"])):
            process, terminal = self.start_on_terminal(*command, "-o", name)
            shown = self.read(terminal).decode()
            self.assertEqual(process.wait(TIMEOUT), 0)
            self.assertIn(what, shown)
            self.assertTrue(shown.endswith("\r\x1b[K"), "it is not wiped away")
            process, terminal = self.start_on_terminal(*command, "-o", name, "--json")
            self.assertEqual(self.read(terminal), b"")
            self.assertEqual(process.wait(TIMEOUT), 0)
            json.loads(process.stdout.read())

    def test_killed_in_the_middle(self):
        for what, command in self.commands():
            self.write("old", b"old")
            process, _, part = self.start_and_wait_for_the_bar(what, command)
            process.kill()
            self.assertEqual(process.wait(TIMEOUT), -signal.SIGKILL)
            self.assertEqual(self.folder.joinpath("old").read_bytes(), b"old")
            self.run_tool(*self.commands()[0][1], "-o", "old")  # what was left does not stand in the way
            self.assertEqual(sorted(contents(self.folder)), sorted(["old", part]))
            self.folder.joinpath(part).unlink()
        self.assertEqual(self.folder.joinpath("old").read_bytes(), self.home.joinpath("long.kvx").read_bytes())

    def test_interrupted_in_the_middle(self):
        self.write("old", b"old")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for what, command in self.commands():
                process, terminal, _ = self.start_and_wait_for_the_bar(what, command)
                process.send_signal(number)
                self.assertIn(b"kvexact: interrupted", self.read(terminal))
                self.assertEqual(process.wait(TIMEOUT), -number)
                self.assertEqual(contents(self.folder), {"old": b"old"})


if __name__ == "__main__":
    TOOL = os.path.abspath(sys.argv.pop(1))
    unittest.main()

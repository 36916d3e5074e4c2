# SPDX-License-Identifier: Apache-2.0
"""smollm2_codec.py FOLDER [unittest options]

Runs the command line `smollm2_codec` of a folder, which has the other tools as well, as a user does. Most tests need the model, which
examples/smollm2/fetch.sh gets, and are skipped without it; they take 64 tokens.
"""

import importlib.util
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unittest

from kvexact import safetensors, xxh64

CODEC = TOOL = CACHE = ""
TIMEOUT = 120  # seconds; reached only where the tool hangs
TOKENS = 64
MODEL = pathlib.Path(os.environ.get("KVEXACT_CACHE") or pathlib.Path.home() / ".cache/kvexact") / "smollm2-135m/model.safetensors"


def run(*command, folder):
    return subprocess.run([*map(os.fspath, command)], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, check=False)


def contents(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def ids(seed, tokens=TOKENS):
    generator = random.Random(seed)
    return "".join(f"{generator.randrange(49152)}\n" for _ in range(tokens)).encode()


def with_note(profile, note):
    """A profile file without a note with this one, and checksums that fit."""
    body = profile[16:-64 - 4] + struct.pack("<I", len(note)) + note
    table = struct.pack("<IIQQQ", 16, 0, 16, len(body), xxh64(body)) + struct.pack("<QQ", 16 + len(body), 1)
    return profile[:16] + body + table + struct.pack("<Q", xxh64(table, xxh64(profile[:16]))) + profile[-8:]


class Case(unittest.TestCase):
    """A folder of its own for each test."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvexact loop ü "))
        self.addCleanup(shutil.rmtree, self.folder)

    def write(self, name, content):
        self.folder.joinpath(name).write_bytes(content)
        return name

    def succeeds(self, *arguments, tool=None):
        """Standard output of a run that says nothing on standard error."""
        ended = run(tool or CODEC, *arguments, folder=self.folder)
        self.assertEqual((ended.returncode, ended.stderr), (0, b""), arguments)
        return ended.stdout.decode()

    def report(self, *arguments, tool=None):
        return json.loads(self.succeeds(*arguments, "--json", tool=tool))

    def fails(self, *arguments, says=(), code=1, tool=None):
        """A run that must fail in one line and leave the folder as it is."""
        before = contents(self.folder)
        ended = run(tool or CODEC, *arguments, folder=self.folder)
        message = ended.stderr.decode()
        if code == 1:
            self.assertEqual((ended.returncode, ended.stdout), (1, b""), (arguments, message))
            self.assertRegex(message, r"\A(kvexact|smollm2_codec): [^\r\n\x1b]+\n(\(examples/smollm2/fetch.sh gets the model\)\n)?\Z")
        else:
            self.assertGreaterEqual(ended.returncode, code, (arguments, message))
        for words in [says] if isinstance(says, str) else says:
            self.assertIn(words, message, arguments)
        self.assertTrue(contents(self.folder) == before, f"{arguments} left or changed something: {sorted(contents(self.folder))}")


class CommandLine(Case):
    """What needs no model."""

    def test_help(self):
        text = self.succeeds("--help")
        for command in ("calibrate", "encode", "decode"):
            self.assertIn(f"  {command} ", text)
            self.assertIn("--json", self.succeeds(command, "--help"))
        self.assertIn("100 and above: wrong command line", " ".join(text.split()))

    def test_wrong_command_lines(self):
        for arguments, says in (([], "required"),
                                (["calibrate", "t.txt"], "--out"),
                                (["calibrate", "-o", "x"], "tokens"),
                                (["calibrate", "-o", "x", "t.txt", "--dtype", "f8_e5m2"], "--dtype"),
                                (["calibrate", "-o", "x", "t.txt", "--engine", "int4"], "--engine"),
                                (["calibrate", "-o", "x", "t.txt", "--engine", "fp8", "--unrotated"], "--unrotated"),
                                (["calibrate", "-o", "x", "t.txt", "--group", "48"], "--group"),
                                (["calibrate", "-o", "x", "t.txt", "--window", "256"], "--window"),
                                (["calibrate", "-o", "x", "t.txt", "--window", "4+0"], "--window"),
                                (["calibrate", "-o", "x", "t.txt", "--layers-back", "9"], "--layers-back"),
                                (["calibrate", "-o", "x", "t.txt", "--rank", "2", "--per-head"], "--per-head"),
                                (["calibrate", "-o", "x", "t.txt", "--block-size", "-1"], "--block-size"),
                                (["encode", "--tokens", "t.txt", "--cache", "c", "-o", "x"], "--profile"),
                                (["encode", "--tokens", "t.txt", "--profile", "p", "-o", "x"], "--cache"),
                                (["encode", "--cache", "c", "--profile", "p", "-o", "x"], "--tokens"),
                                (["decode", "--profile", "p", "-o", "x"], "stream"),
                                (["decode", "s", "--profile", "p", "-o", "x", "--fast"], "--fast")):
            with self.subTest(arguments=arguments):
                self.fails(*arguments, says=says, code=100)

    def test_missing_and_bad_files(self):
        self.write("t.txt", ids(0))
        self.write("words.txt", b"1 2 many\n")
        self.write("garbage", random.Random(0).randbytes(5000))
        nowhere = ["--model", "nowhere"]
        self.fails("calibrate", "t.txt", "-o", "x", *nowhere, says=["nowhere/model.safetensors", "fetch.sh"])
        self.fails("encode", "--tokens", "t.txt", "--cache", "nowhere", "--profile", "p", "-o", "x", says="nowhere: cannot open")
        self.fails("encode", "--tokens", "t.txt", "--cache", "garbage", "--profile", "p", "-o", "x", says="garbage: ")
        self.fails("decode", "nowhere", "--profile", "p", "-o", "x", says="nowhere: cannot open")
        self.fails("decode", "garbage", "--profile", "p", "-o", "x", says="garbage: ")

    def test_endless_token_files(self):
        self.write("cache", safetensors({"layers.0.k": ("BF16", [1, 1, 1], bytes(2))}))
        for path in (self.write("t.txt", b"1 " * (1 << 25 | 1)), "/dev/zero"):
            self.fails("encode", "--tokens", path, "--cache", "cache", "--profile", "p", "-o", "x",
                       says=f"{path}: too large, more than 64 MiB of text")

    def test_notes_that_cannot_be(self):
        numbers = random.Random(5)
        values = [numbers.gauss(0, 1) for _ in range(320)]
        self.write("c", safetensors({"layers.0.k": ("BF16", [40, 1, 8], b"".join(struct.pack("<f", value)[2:] for value in values))}))
        self.write("t.txt", ids(0, 40))
        self.succeeds("calibrate", "c", "-o", "p", "--plain", tool=TOOL)
        profile = self.folder.joinpath("p").read_bytes()
        good = {"engine": "int8", "rotated": True, "group": 64, "exact_kv": True, "exact_layers": 0, "depth": 3, "window": [4, 32]}

        def refused(note, *says):
            self.write("p", with_note(profile, note))
            self.fails("encode", "--tokens", "t.txt", "--cache", "c", "--profile", "p", "-o", "x", "--model", "nowhere", says=says)

        refused(json.dumps(good).encode(), "nowhere/model.safetensors")  # past the note
        for number in ("-1", "1.5", "1e300", '"3"', "null", "true", "18446744073709551616"):
            for key in ("depth", "exact_layers", "group"):
                refused(json.dumps({**good, key: "HERE"}).replace('"HERE"', number).encode(), "p: the profile's note has", "where a count should stand")
            for window in (f"[{number}, 32]", f"[4, {number}]"):
                refused(json.dumps({**good, "window": "HERE"}).replace('"HERE"', window).encode(), "p: the profile's note has")
        for note in (b"{", b"[]", b"3", b"\xff", json.dumps({**good, "window": [4]}).encode(), json.dumps({**good, "group": 48}).encode(),
                     json.dumps({**good, "engine": "int4"}).encode(), json.dumps({"engine": "int8"}).encode()):
            refused(note, "p: was not made by smollm2_codec calibrate")

    def test_an_impossible_output_is_noticed_before_the_work(self):
        for command in (["calibrate", "nowhere.txt"], ["encode", "--tokens", "nowhere", "--cache", "nowhere", "--profile", "p"],
                        ["decode", "nowhere", "--profile", "p"]):
            self.fails(*command, "-o", "no/x", says="no/x: cannot create")

    def test_an_output_that_is_an_input(self):
        for name in ("t.txt", "c", "p", "s"):
            self.write(name, b"kept")
        for name in ("t.txt", "c", "p"):
            self.fails("encode", "--tokens", "t.txt", "--cache", "c", "--profile", "p", "-o", name, says=f"{name}: would replace an input")
        for name in ("s", "p"):
            self.fails("decode", "s", "--profile", "p", "-o", name, says=f"{name}: would replace an input")
        self.fails("calibrate", "t.txt", "-o", "t.txt", says="t.txt: would replace an input")


class Demo(Case):
    def test_caches_of_others_are_kept_while_in_use(self):
        place = pathlib.Path(__file__).resolve().parents[2] / "examples/demo.py"
        os.environ.setdefault("KVEXACT_CACHE", str(self.folder))
        spec = importlib.util.spec_from_file_location("demo", place)
        demo = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(demo)
        day = 86400
        for name, age in (("own", 30 * day), ("other", 6 * day), ("old", 8 * day)):
            self.folder.joinpath(name).mkdir()
            self.folder.joinpath(name, "file").write_bytes(b"cache")
            os.utime(self.folder / name, (time.time() - age,) * 2)
        demo.claim(self.folder / "own")
        demo.claim(self.folder / "new")
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["new", "other", "own"])
        self.assertTrue(self.folder.joinpath("own/file").exists())


@unittest.skipUnless(MODEL.exists(), "without the model")
class ClosedLoop(Case):
    @classmethod
    def setUpClass(cls):
        cls.home = pathlib.Path(tempfile.mkdtemp(prefix="kvexact-loop-"))
        cls.addClassCleanup(shutil.rmtree, cls.home)
        for name, seed in (("a", 1), ("b", 2)):
            cls.home.joinpath(f"{name}.txt").write_bytes(ids(seed))
        cls.calibrated = run(CODEC, "calibrate", "a.txt", "b.txt", "-o", "loop.kvp", "--json", "--window", "4+32", folder=cls.home)
        if cls.calibrated.returncode != 0:
            raise AssertionError(cls.calibrated.stderr)
        commands = [[CACHE, "--tokens", "a.txt", "--out", "c.safetensors"]]
        for name, more in (("c", []), ("bare", ["--without-token-ids"])):
            commands.append([CODEC, "encode", "--tokens", "a.txt", "--cache", "c.safetensors", "--profile", "loop.kvp", "-o", f"{name}.kvx", *more])
        for command in commands:
            ended = run(*command, folder=cls.home)
            if ended.returncode != 0:
                raise AssertionError(ended.stderr)
        for name in ("loop.kvp", "c.kvx", "bare.kvx", "c.safetensors", "a.txt", "b.txt"):
            setattr(cls, name.replace(".", "_"), cls.home / name)

    def test_round_trip(self):
        self.succeeds("decode", self.c_kvx, "--profile", self.loop_kvp, "-o", "back.safetensors", "--threads", "1")
        self.succeeds("verify", self.c_safetensors, "back.safetensors", tool=TOOL)
        self.fails("decode", self.bare_kvx, "--profile", self.loop_kvp, "-o", "x", says=["bare.kvx: needs the ids of its 64 tokens", "--tokens"])
        self.succeeds("decode", self.bare_kvx, "--tokens", self.a_txt, "--profile", self.loop_kvp, "-o", "bare.safetensors")
        self.succeeds("verify", self.c_safetensors, "bare.safetensors", tool=TOOL)
        self.assertLess(self.bare_kvx.stat().st_size, self.c_kvx.stat().st_size)

    def test_reports(self):
        report = json.loads(self.calibrated.stdout)
        self.assertEqual([report[key] for key in ("bytes", "dtype", "tokens")], [self.loop_kvp.stat().st_size, "bf16", 2 * TOKENS])
        for key, value in {"engine": "int8", "rotated": True, "group": 64, "window": "4+32"}.items():
            self.assertEqual(report["engine"][key], value)
        decoded = self.report("decode", self.c_kvx, "--profile", self.loop_kvp, "-o", "back.safetensors")
        self.assertEqual([decoded[key] for key in ("tokens", "scalars", "stream_bytes")], [TOKENS, TOKENS * 11520, self.c_kvx.stat().st_size])
        self.assertEqual(decoded["engine"], report["engine"])

    def test_inspect_and_decode_by_kvexact(self):
        report = self.report("inspect", self.loop_kvp, tool=TOOL)
        self.assertEqual(report["models"][0]["predictor"], "closed_loop")
        self.assertEqual(report["models"][0]["maps"]["corrected_hidden_width"], 576)
        self.assertEqual(json.loads(report["note"])["window"], [4, 32])
        self.assertIn("  note: '", self.succeeds("inspect", self.loop_kvp, tool=TOOL))
        for stream, carried in ((self.c_kvx, TOKENS), (self.bare_kvx, 0)):
            about = self.report("inspect", stream, tool=TOOL)
            self.assertEqual([about[key] for key in ("predictor", "token_ids", "decodes_alone")], ["closed_loop", carried, "any token prefix"])
            self.assertEqual("carries the ids" in self.succeeds("inspect", stream, tool=TOOL), carried > 0)
        self.fails("decode", self.c_kvx, "--profile", self.loop_kvp, "-o", "x", tool=TOOL,
                   says=["c.kvx: unsupported", "closed loop", "smollm2_codec"])
        self.fails("encode", self.c_safetensors, "--profile", self.loop_kvp, "-o", "x", tool=TOOL,
                   says=["loop.kvp: unsupported", "closed loop", "smollm2_codec"])

    def test_a_cache_that_does_not_fit(self):
        numbers = random.Random(3)
        noise = b"".join(struct.pack("<f", numbers.gauss(0, 1))[2:] for _ in range(TOKENS * 192))
        header = {}
        for i in range(60):
            header[f"layers.{i // 2}.{'kv'[i % 2]}"] = {"dtype": "BF16", "shape": [TOKENS, 3, 64],
                                                      "data_offsets": [i * len(noise), (i + 1) * len(noise)]}
        text = json.dumps(header).encode()
        self.write("noise", struct.pack("<Q", len(text)) + text + noise * 60)
        ended = run(CODEC, "encode", "--tokens", self.a_txt, "--cache", "noise", "--profile", self.loop_kvp, "-o", "x.kvx", "--json",
                    folder=self.folder)
        warning = json.loads(ended.stdout)["warning"]
        self.assertIn("the profile does not fit this cache", warning)
        self.assertEqual(ended.stderr.decode(), f"smollm2_codec: warning: x.kvx: {warning}\n")
        self.succeeds("decode", "x.kvx", "--profile", self.loop_kvp, "-o", "back")
        self.succeeds("verify", "noise", "back", tool=TOOL)

    def test_token_ids_of_another_cache(self):
        ended = run(CODEC, "encode", "--tokens", self.b_txt, "--cache", self.c_safetensors, "--profile", self.loop_kvp, "-o", "x.kvx",
                    folder=self.folder)
        self.assertEqual(ended.returncode, 0)
        self.assertIn(f"or {self.b_txt} has the token ids of another cache", ended.stderr.decode())

    def test_wrong_tokens(self):
        self.write("short.txt", ids(1, TOKENS - 1))
        self.write("words.txt", b"1 2 many\n")
        self.write("large.txt", b"49152 " * TOKENS)
        common = ["--profile", self.loop_kvp, "-o", "x"]
        for file, says in (("short.txt", ["63", "64"]), ("words.txt", "words.txt: word 3, 'many'"),
                           ("large.txt", "large.txt: token 0, the id 49152: the model's vocabulary has 49152 ids"),
                           ("nowhere", "nowhere: cannot open")):
            if file in ("words.txt", "large.txt"):
                self.fails("calibrate", self.b_txt, file, "-o", "x", says=says)
            self.fails("encode", "--tokens", file, "--cache", self.c_safetensors, *common, says=says)
            self.fails("decode", self.bare_kvx, "--tokens", file, *common, says=says)
        for stream in (self.bare_kvx, self.c_kvx):
            self.fails("decode", stream, "--tokens", self.b_txt, *common, says=["prediction_mismatch", "other token ids"])

    def test_wrong_profiles(self):
        self.succeeds("calibrate", self.c_safetensors, "-o", "other.kvp", "--plain", tool=TOOL)
        for command in (["encode", "--tokens", self.a_txt, "--cache", self.c_safetensors], ["decode", self.c_kvx]):
            self.fails(*command, "--profile", "other.kvp", "-o", "x", says=["other.kvp: ", "not made by smollm2_codec calibrate"])
            self.fails(*command, "--profile", self.c_kvx, "-o", "x", says="this is a stream, not a profile")
            self.fails(*command, "--profile", "nowhere", "-o", "x", says="nowhere: cannot open")
        self.succeeds("encode", self.c_safetensors, "--profile", "other.kvp", "-o", "plain.kvx", tool=TOOL)
        self.fails("decode", "plain.kvx", "--profile", self.loop_kvp, "-o", "x", says=["plain.kvx: ", "not coded in closed loop"])

    def test_damaged_streams(self):
        content = self.c_kvx.read_bytes()
        for length in (0, 100, len(content) // 2, len(content) - 1):
            self.write("short.kvx", content[:length])
            self.fails("decode", "short.kvx", "--profile", self.loop_kvp, "-o", "x", says="short.kvx: ")
        generator = random.Random(4)
        for bit in generator.sample(range(8 * len(content)), 3):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            self.write("damaged.kvx", bytes(damaged))
            self.fails("decode", "damaged.kvx", "--profile", self.loop_kvp, "-o", "x", says="damaged.kvx: ")


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv.pop(1)).absolute()
    CODEC, TOOL, CACHE = (str(folder / name) for name in ("smollm2_codec", "kvexact", "smollm2_cache"))
    unittest.main()

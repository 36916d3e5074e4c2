# SPDX-License-Identifier: Apache-2.0
"""Speed of the codec beside ZipNN (PyPI: zipnn) on the same bytes in one run, in CPU time, the best of several turns.

usage: compare_zipnn.py BENCH_CODEC_STREAM --cache CACHE --profile PROFILE [--prediction FILE]   (CACHE in BF16)
"""
import json
import re
import subprocess
import sys
import time

import zipnn

TURNS = 5


def tensor_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
        file.seek(8 + header)
        return file.read()


def measure_zipnn(data: bytes) -> tuple[float, float, float]:
    """MB/s of compression and decompression, and the ratio. ZipNN changes its input, so it gets a copy."""
    packer = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
    packing, unpacking = [], []
    for _ in range(TURNS):
        copy = bytearray(data)
        start = time.process_time()
        packed = packer.compress(copy)
        packing.append(time.process_time() - start)
        start = time.process_time()
        unpacked = packer.decompress(packed)
        unpacking.append(time.process_time() - start)
    if bytes(unpacked) != data:
        sys.exit("compare_zipnn.py: ZipNN did not give the bytes back")
    return len(data) / min(packing) / 1e6, len(data) / min(unpacking) / 1e6, len(data) / len(packed)


def measure_codec(command: list[str]) -> dict[str, float]:
    """MB/s by benchmark name."""
    command = [*command, "--benchmark_format=json", f"--benchmark_repetitions={TURNS}"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
    best: dict[str, float] = {}
    for row in report["benchmarks"]:
        if row["run_type"] == "iteration":
            name = re.sub(r"/repeats:\d+$", "", row["name"])
            best[name] = max(best.get(name, 0), row["bytes_per_second"] / 1e6)
    return best


def main():
    if len(sys.argv) < 4 or "--cache" not in sys.argv:
        sys.exit(__doc__)
    data = tensor_bytes(sys.argv[sys.argv.index("--cache") + 1])
    packing, unpacking, ratio = measure_zipnn(data)
    print(f"{'':36} MB/s of cache   x ZipNN")
    print(f"{'ZipNN compress (ratio %.3f)' % ratio:36} {packing:10.0f}")
    print(f"{'ZipNN decompress':36} {unpacking:10.0f}")
    for name, speed in measure_codec(sys.argv[1:]).items():
        peer = packing if name.startswith("encode") else unpacking
        print(f"{name:36} {speed:10.0f} {speed / peer:9.2f}")


main()

# SPDX-License-Identifier: Apache-2.0
"""Every block of C++ in the README stands word for word in one of the quickstarts, which tests run. Usage: check_readme.py ROOT"""
import re
import sys
from pathlib import Path

root = Path(sys.argv[1])
programs = [path.read_text() for path in sorted((root / "examples/quickstart").glob("*.cpp"))]
blocks = re.findall(r"```cpp\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
missing = [block for block in blocks if not any(block in program for program in programs)]
for block in missing:
    print(f"in no program of examples/quickstart:\n{block}")
print(f"{len(blocks)} blocks, {len(missing)} missing")
sys.exit(1 if missing or not blocks else 0)

# SPDX-License-Identifier: Apache-2.0
"""Every block of C++ in the README stands word for word in the quickstart, which a test runs. Usage: check_readme.py ROOT"""
import re
import sys
from pathlib import Path

root = Path(sys.argv[1])
program = (root / "examples/quickstart/quickstart.cpp").read_text()
blocks = re.findall(r"```cpp\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
missing = [block for block in blocks if block not in program]
for block in missing:
    print(f"not in examples/quickstart/quickstart.cpp:\n{block}")
print(f"{len(blocks)} blocks, {len(missing)} missing")
sys.exit(1 if missing or not blocks else 0)

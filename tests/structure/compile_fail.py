# SPDX-License-Identifier: Apache-2.0
"""compile_fail.py COMPILER [FLAG...] FILE

FILE starts with `// expect: TEXT`. Succeeds if the compiler refuses FILE and one of its errors contains TEXT.
"""

import re
import subprocess
import sys


def main(arguments):
    *command, path = arguments
    with open(path, encoding="utf-8") as file:
        first_line = file.readline()
    expectation = re.fullmatch(r"// expect: (\S.*)\n", first_line)
    if not expectation:
        return f"{path}: the first line must be '// expect: TEXT'"
    expected = expectation[1].strip()

    run = subprocess.run([*command, "-fsyntax-only", path], capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return f"{path}: compiles, but should be refused with '{expected}'"
    # The place, then the message: not the source excerpts, in which the text could stand by itself.
    errors = [line for line in run.stderr.splitlines() if re.match(r"\S.*:\d+:\d+: (fatal )?error: ", line)]
    if not any(expected in line for line in errors):
        return f"{path}: refused, but without '{expected}':\n{run.stderr}"
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

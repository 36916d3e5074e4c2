# SPDX-License-Identifier: Apache-2.0
"""check_headers.py INCLUDE_DIR

Checks the rules that hold for everything below include/: one-way layering, a complete umbrella, few and prefixed macros, no printing,
aborting or throwing. Prints each violation with its place and fails if there is one.
"""

import pathlib
import re
import sys

# A folder includes itself and the folders of earlier lines, never another one of its own line. The last line is seen by nothing.
LEVELS = (
    ("core",),
    ("numeric", "bitstream"),
    ("tensor",),
    ("engine", "entropy"),
    ("residual", "prediction", "compression"),
    ("codec", "speculative"),
    ("remote",),
    ("cuda",),
)
LEVEL = {folder: level for level, folders in enumerate(LEVELS) for folder in folders}

# What headers may include besides themselves and the standard library (whose names have neither dot nor slash).
LIBRARIES = re.compile(r"xxhash\.h|Eigen/\w+|(imm|x86|cpu)intrin\.h|cpuid\.h|arm_neon\.h|arm_sve\.h")
CUDA_LIBRARIES = re.compile(r"cuda\w*(\.h|/.+)|cub/.+|thrust/.+|cooperative_groups(\.h|/.+)")
PRINTING_LIBRARIES = {"cstdio", "iostream", "print", "syncstream"}

MACRO_LIMIT = 15
FORBIDDEN = re.compile(
    r"\bthrow\b"
    r"|\bstd::(cout|cerr|clog|wcout|wcerr|print|println)\b"
    r"|\b(abort|terminate|exit|quick_exit|_Exit|v?[fs]?n?printf|f?puts|f?putc|putchar|perror|__assert_fail|__builtin_trap)\s*\("
)

STRING = r'"(?:\\.|[^"\\\n])*"' r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'"
COMMENT = r"//[^\n]*|/\*.*?\*/"


def blank(text, with_strings):
    """The text without its comments (and strings), line numbers kept."""

    def replacement(match):
        if match[0].startswith("/") or with_strings:
            return "\n" * match[0].count("\n")
        return match[0]

    return re.sub(f"{COMMENT}|{STRING}", replacement, text, flags=re.DOTALL)


def lines_matching(pattern, text):
    for number, line in enumerate(text.split("\n"), start=1):
        for match in re.finditer(pattern, line):
            yield number, match


class Checker:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.umbrella = "kvexact/kvexact.hpp"
        self.violations = []
        self.macros = set()
        self.headers = {
            path.relative_to(self.root).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(self.root.rglob("*"))
            if path.is_file()
        }

    def complain(self, header, line, message):
        self.violations.append(f"{header}:{line}: {message}")

    def run(self):
        for header, text in self.headers.items():
            if not self.check_place(header):
                continue
            self.check_opening(header, text)
            code = blank(text, with_strings=False)
            self.check_includes(header, code)
            self.check_macros(header, code)
            for line, match in lines_matching(FORBIDDEN, blank(text, with_strings=True)):
                self.complain(header, line, f"'{match[0]}': headers do not print, abort or throw")
        if len(self.macros) >= MACRO_LIMIT:
            self.complain("kvexact", 0, f"{len(self.macros)} macros, the limit is {MACRO_LIMIT - 1}: {', '.join(sorted(self.macros))}")
        self.check_umbrella()
        return self.violations

    def check_place(self, header):
        if header == self.umbrella:
            return True
        top, _, rest = header.partition("/")
        folder, _, name = rest.partition("/")
        suffix = pathlib.PurePosixPath(name).suffix
        if top != "kvexact" or folder not in LEVEL or "/" in name:
            self.complain(header, 0, "is in none of the folders that check_headers.py knows")
            return False
        if suffix != ".hpp" and not (suffix == ".cuh" and folder == "cuda"):
            self.complain(header, 0, "headers end in .hpp, or in .cuh below cuda/")
            return False
        return True

    def check_opening(self, header, text):
        if text.split("\n")[:2] != ["// SPDX-License-Identifier: Apache-2.0", "#pragma once"]:
            self.complain(header, 1, "starts with the SPDX line and #pragma once")

    def check_includes(self, header, code):
        folder = header.split("/")[1]
        for line, match in lines_matching(r"^\s*#\s*include\s*(\S+)", code):
            if not (match[1].startswith("<") and match[1].endswith(">")):
                self.complain(header, line, f"{match[1]}: includes are written <...>")
                continue
            included = match[1][1:-1]
            if included.startswith("kvexact/"):
                self.check_layer(header, line, included)
            elif included in PRINTING_LIBRARIES:
                self.complain(header, line, f"<{included}>: headers do not print")
            elif re.search(r"[./]", included) and not LIBRARIES.fullmatch(included):
                if not (folder == "cuda" and CUDA_LIBRARIES.fullmatch(included)):
                    self.complain(header, line, f"<{included}> belongs to no library that headers may use")

    def check_layer(self, header, line, included):
        if included not in self.headers:
            self.complain(header, line, f"<{included}> does not exist")
            return
        if included == self.umbrella:
            self.complain(header, line, "the umbrella is for users, headers include what they use")
            return
        folder, other = header.split("/")[1], included.split("/")[1]
        if header == self.umbrella:
            if other == "cuda":
                self.complain(header, line, "the umbrella is for the host only")
        elif folder != other and not LEVEL.get(other, 0) < LEVEL.get(folder, 0):
            self.complain(header, line, f"<{included}>: {folder}/ must not see {other}/")

    def check_macros(self, header, code):
        for line, match in lines_matching(r"^\s*#\s*define\s+(\w+)", code):
            self.macros.add(match[1])
            if not match[1].startswith("KVEXACT_"):
                self.complain(header, line, f"macro {match[1]} lacks the prefix KVEXACT_")

    def check_umbrella(self):
        if self.umbrella not in self.headers:
            self.complain(self.umbrella, 0, "does not exist")
            return
        included = set(re.findall(r"^#include <(.+)>", self.headers[self.umbrella], flags=re.MULTILINE))
        for header in self.headers:
            if header.endswith(".hpp") and header != self.umbrella and not header.startswith("kvexact/cuda/") and header not in included:
                self.complain(self.umbrella, 0, f"lacks #include <{header}>")


def main(root):
    checker = Checker(root)
    violations = checker.run()
    for violation in violations:
        print(violation)
    print(f"{len(checker.headers)} headers, {len(checker.macros)} macros, {len(violations)} violations")
    return 1 if violations or not checker.headers else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""check_the_checks.py COMPILER

Breaks each rule once in a scratch tree and expects check_headers.py and compile_fail.py to notice.
"""

import pathlib
import sys
import tempfile
import unittest

import check_headers
import compile_fail

COMPILER = ""
OPENING = "// SPDX-License-Identifier: Apache-2.0\n#pragma once\n"


class CheckHeaders(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.write("core/a.hpp", "#include <vector>\n#define KVEXACT_A 1'000 // throw\n")
        self.write("numeric/b.hpp", '#include <kvexact/core/a.hpp>\nauto text = "std::abort()";\n/* #define X\n#include <iostream> */')
        self.write("codec/c.hpp", "#include <Eigen/Dense>\n#include <xxhash.h>\n#include <kvexact/numeric/b.hpp>\n")
        self.write("cuda/d.cuh", "#include <cub/cub.cuh>\n#include <kvexact/codec/c.hpp>\n")
        self.umbrella = ["core/a", "numeric/b", "codec/c"]

    def write(self, name, text, opening=OPENING):
        path = pathlib.Path(self.directory.name, "kvexact", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(opening + text, encoding="utf-8")

    def violations(self):
        self.write("kvexact.hpp", "".join(f"#include <kvexact/{name}.hpp>\n" for name in self.umbrella))
        return check_headers.Checker(self.directory.name).run()

    def expect(self, *texts):
        violations = self.violations()
        self.assertEqual(len(violations), len(texts), violations)
        for violation, text in zip(violations, texts):
            self.assertIn(text, violation)

    def add(self, name, text, opening=OPENING):
        self.write(f"{name}.hpp", text, opening)
        self.umbrella.append(name)

    def test_a_good_tree_passes(self):
        self.expect()

    def test_lower_sees_higher(self):
        self.add("numeric/x", "#include <kvexact/codec/c.hpp>\n")
        self.expect("kvexact/numeric/x.hpp:3: <kvexact/codec/c.hpp>: numeric/ must not see codec/")

    def test_neighbours(self):
        self.add("bitstream/x", "#include <kvexact/numeric/b.hpp>\n")
        self.add("speculative/x", "#  include <kvexact/codec/c.hpp>\n")
        self.expect("bitstream/ must not see numeric/", "speculative/ must not see codec/")

    def test_every_level_sees_the_earlier_ones_only(self):
        folders = [folder for folders in check_headers.LEVELS for folder in folders if folder != "cuda"]
        for folder in folders:
            self.add(f"{folder}/here", "")
        for low in folders:
            for high in folders:
                allowed = low == high or check_headers.LEVEL[low] < check_headers.LEVEL[high]
                self.write(f"{high}/here.hpp", f"#include <kvexact/{low}/here.hpp>\n")
                with self.subTest(high=high, low=low):
                    self.expect(*[] if allowed else [f"{high}/ must not see {low}/"])
                self.write(f"{high}/here.hpp", "")

    def test_nothing_sees_cuda(self):
        self.add("remote/x", "#include <kvexact/cuda/d.cuh>\n")
        self.umbrella.append("cuda/e")
        self.write("cuda/e.hpp", "")
        self.expect("the umbrella is for the host only", "remote/ must not see cuda/")

    def test_incomplete_umbrella(self):
        self.umbrella.remove("numeric/b")
        self.expect("lacks #include <kvexact/numeric/b.hpp>")

    def test_umbrella_used_inside(self):
        self.add("codec/x", "#include <kvexact/kvexact.hpp>\n")
        self.expect("kvexact/codec/x.hpp:3: the umbrella is for users")

    def test_missing_header(self):
        self.add("codec/x", "#include <kvexact/core/missing.hpp>\n")
        self.expect("does not exist")

    def test_unknown_places(self):
        self.add("misc/x", "")
        self.add("core/detail/x", "")
        self.write("core/x.h", "")
        self.write("../other.hpp", "")
        self.expect("core/detail/x.hpp:0: is in none", "core/x.h:0: headers end in .hpp", "misc/x.hpp:0: is in none", "other.hpp:0: is in none", "lacks #include <other.hpp>")

    def test_foreign_includes(self):
        self.add("codec/x", '#include "codec/c.hpp"\n#include <torch/extension.h>\n#include <cub/cub.cuh>\n#include <iostream>\n')
        self.expect("includes are written <...>", "<torch/extension.h>", "<cub/cub.cuh>", "<iostream>")

    def test_macros(self):
        self.add("core/x", "# define ASSERT(x) x\n" + "".join(f"#define KVEXACT_{i}\n" for i in range(13)))
        self.expect("kvexact/core/x.hpp:3: macro ASSERT lacks the prefix", "15 macros, the limit is 14")

    def test_opening(self):
        self.add("core/x", "", opening="#pragma once\n")
        self.expect("starts with the SPDX line")

    def test_forbidden_words(self):
        for text in (
            "throw 1;", "std::abort();", "abort ();", "std::terminate();", "std::exit(1);", 'printf("");', 'std::fprintf(stderr, "");',
            'snprintf(b, 1, "");', "std::cout << 1;", "std::cerr << 1;", 'puts("");', "__builtin_trap();",
        ):
            with self.subTest(text=text):
                self.umbrella = ["core/a", "numeric/b", "codec/c"]
                self.add("core/x", f"char c = '\"'; /* \n */ {text} // \"\n")
                self.expect("kvexact/core/x.hpp:4: ")


class CompileFail(unittest.TestCase):
    def run_on(self, text):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, "case.cpp")
            path.write_text(text, encoding="utf-8")
            return compile_fail.main([COMPILER, "-std=c++20", str(path)])

    def test_expected_error(self):
        self.assertEqual(self.run_on('// expect: our sentence\nstatic_assert(false, "kvexact: our sentence");\n'), 0)

    def test_case_that_compiles(self):
        self.assertIn("compiles", self.run_on("// expect: our sentence\n"))

    def test_other_error(self):
        self.assertIn("refused, but without", self.run_on('// expect: our sentence\nstatic_assert(false, "kvexact: another"); // our sentence\n'))

    def test_text_in_a_warning_only(self):
        self.assertIn("refused, but without", self.run_on("// expect: our sentence\n#warning our sentence\nstatic_assert(false);\n"))

    def test_no_expectation(self):
        self.assertIn("first line", self.run_on("static_assert(false);\n"))


if __name__ == "__main__":
    COMPILER = sys.argv.pop()
    unittest.main()

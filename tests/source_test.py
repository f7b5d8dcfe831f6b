"""What the compiler does not check about the source tree: source_test.py SOURCE_DIR"""
import os
import pathlib
import re
import sys
import unittest

SOURCE = pathlib.Path(sys.argv[1])
FILES = [p for d in ("include", "src", "tools", "tests", "examples", "benchmarks", "python")
         for p in (SOURCE / d).rglob("*") if p.suffix in (".h", ".cpp", ".def", ".cu", ".cuh")]

# Each layer may include itself, the public headers, and these.
LAYERS = {
    "include/gatefold": [],
    "src/format": [],
    "src/checkpoint": ["format/"],
    "src/quantize": ["format/"],
    "src/cpu": ["format/", "moe/kernel.h"],  # the seam
    "src/cuda": ["format/", "moe/kernel.h", "quantize/gptq.h", "quantize/layer_quantizer.h", "quantize/smoothing.h"],
    "src/moe": ["format/", "checkpoint/", "quantize/", "cpu/", "cuda/"],
    "src/model": ["format/", "checkpoint/", "quantize/", "moe/"],
}
# What may be used in some places only.
ONLY = {
    r"\bgetenv\b": r"src/format/options\.cpp|tests/",
    r"nlohmann": r"src/checkpoint/|src/moe/tuning_file\.cpp|tools/|tests/",
    r"immintrin\.h|\b_mm\d*_|\b__m\d{3}": r"src/cpu/|.*\.isa\.cpp",
    r"cblas|lapack": r"src/quantize/|src/model/|tests/",
    r"\basm\b": r"src/cpu/|src/cuda/",
    r"<<<|<cuda\w*\.h>": r"(src|tests|benchmarks)/cuda/",
    r"\b(abort|exit)\(|\b(printf|cout|cerr)\b|fmt::print": r"tools/|tests/|examples/|benchmarks/",
}


class SourceTest(unittest.TestCase):
    def test_layers(self):
        seen = set()
        for path in FILES:
            name = path.relative_to(SOURCE).as_posix()
            layer = next((layer for layer in LAYERS if name.startswith(layer + "/")), None)
            if layer is None:
                continue
            seen.add(layer)
            allowed = ("gatefold/", layer.split("/")[1] + "/", *LAYERS[layer])
            for include in re.findall(r'^#include "(.*)"', path.read_text(), re.M):
                with self.subTest(file=name, include=include):
                    self.assertTrue(include.startswith(allowed))
        self.assertEqual(seen, set(LAYERS))

    def test_only_where_it_belongs(self):
        for path in FILES:
            name = path.relative_to(SOURCE).as_posix()
            code = re.sub(r"//.*", "", path.read_text())
            for pattern, places in ONLY.items():
                if not re.match(places, name):
                    with self.subTest(file=name, pattern=pattern):
                        self.assertNotRegex(code, pattern)

    def test_scripts_can_be_executed(self):
        for path in (SOURCE / "scripts").iterdir():
            with self.subTest(file=path.name):
                self.assertTrue(os.access(path, os.X_OK))

    def test_files_are_short(self):
        for path in FILES:
            with self.subTest(file=path.relative_to(SOURCE).as_posix()):
                self.assertLessEqual(path.read_text().count("\n"), 500)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

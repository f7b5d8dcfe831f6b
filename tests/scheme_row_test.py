"""A new scheme is one line in schemes.def: scheme_row_test.py BUILD_DIR SOURCE_DIR"""
import json
import pathlib
import shutil
import subprocess
import sys
import unittest

BUILD, SOURCE = map(pathlib.Path, sys.argv[1:3])
SCRATCH = BUILD / "scheme_row_test"
ROW = "GATEFOLD_SCHEME(int8_g64, scaled(int8, bf16, per_group(64)), act16)\n"
# Block scales of 8 bits do not go with a second scale per token only.
BAD_ROW = "GATEFOLD_SCHEME(bad, scaled(e2m1, ue4m3, per_group(16)), act16)\n"


def run(*command, code=0):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def write_if_changed(path, content):
    """Keeps times, so that a second run builds only what has changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not (path.exists() and path.read_bytes() == content):
        path.write_bytes(content)


class SchemeRowTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.tree = SCRATCH / "tree"
        paths = [path for name in ("include", "src", "tools", "cmake") for path in (SOURCE / name).rglob("*")]
        files = {path.relative_to(SOURCE) for path in paths if path.is_file()}
        for stale in cls.tree.rglob("*"):
            if stale.is_file() and stale.relative_to(cls.tree) not in files:
                stale.unlink()
        table = pathlib.Path("include/gatefold/schemes.def")
        for name in {*files, pathlib.Path("CMakeLists.txt"), pathlib.Path("LICENSE")} - {table}:
            write_if_changed(cls.tree / name, (SOURCE / name).read_bytes())
        rows = (SOURCE / table).read_bytes()
        write_if_changed(cls.tree / table, rows + ROW.encode())
        write_if_changed(SCRATCH / "bad/gatefold/schemes.def", rows + BAD_ROW.encode())
        cache = (BUILD / "CMakeCache.txt").read_text()
        cls.barkeep = next(line.split("=")[1] for line in cache.splitlines() if line.startswith("BARKEEP_INCLUDE_DIR"))

    def test_a_row_that_no_reference_can_run_does_not_compile(self):
        command = ["c++", "-std=c++20", "-fsyntax-only", "-I", self.tree / "include", "-I", self.tree / "src",
                   self.tree / "src/format/scheme.cpp"]
        run(*command)
        command[3:3] = ["-I", SCRATCH / "bad"]  # found first
        self.assertIn("scheme bad: no reference can run this row", run(*command, code=1).stderr)

    def test_one_line_makes_a_scheme(self):
        build = SCRATCH / "build"
        run("cmake", "-S", self.tree, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0",
            "-DGATEFOLD_TESTS=OFF",
            "-DGATEFOLD_CUDA=OFF",
            f"-DBARKEEP_INCLUDE_DIR={self.barkeep}")
        run("cmake", "--build", build, "--target", "gatefold_tool")
        tool, model = build / "gatefold", SOURCE / "models/tiny-moe"

        rows = json.loads(run(tool, "schemes", "--json").stdout)["schemes"]
        row = next(row for row in rows if row["name"] == "int8_g64")
        self.assertEqual(row["bits_per_weight"], 8.25)
        self.assertGreaterEqual(len(row["kernels"]), 3)
        self.assertIn("`int8_g64`", run(tool, "schemes", "--markdown").stdout)

        quantized, text = SCRATCH / "quantized", SCRATCH / "text"
        shutil.rmtree(quantized, ignore_errors=True)
        text.write_bytes((model / "valid.txt").read_bytes()[:512])
        run(tool, "quantize", model, quantized, "--scheme", "int8_g64")
        self.assertEqual(json.loads(run(tool, "inspect", quantized, "--json").stdout)["scheme"], "int8_g64")
        window = ["--text", text, "--window", 256]
        compared = run(tool, "compare", model, *window, "--schemes", "bf16,int8_g64", "--json")
        exact, compared = json.loads(compared.stdout)["rows"]
        self.assertAlmostEqual(compared["bits_per_byte"], exact["bits_per_byte"], delta=0.02)
        self.assertLess(0, compared["kl"])
        self.assertLess(compared["kl"], 0.001)
        stored = json.loads(run(tool, "eval", quantized, *window, "--json").stdout)
        self.assertEqual(stored["bits_per_byte"], compared["bits_per_byte"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

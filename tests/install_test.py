"""The installed package can be used by a project that knows nothing else:
install_test.py BUILD_DIR SOURCE_DIR"""
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

BUILD, SOURCE = map(pathlib.Path, sys.argv[1:3])
ROOT = BUILD / "install_test"


def run(*command):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


class InstallTest(unittest.TestCase):
    def test_example_with_the_installed_package(self):
        shutil.rmtree(ROOT, ignore_errors=True)
        prefix = ROOT / "prefix"
        run("cmake", "--install", BUILD, "--prefix", prefix)
        self.assertTrue(os.access(prefix / "bin/gatefold", os.X_OK))
        script = (prefix / "share/bash-completion/completions/gatefold").read_text()
        self.assertIn("_gatefold()", script)
        for header in (SOURCE / "include/gatefold").iterdir():
            self.assertTrue((prefix / "include/gatefold" / header.name).exists())

        example = ROOT / "example"  # a copy: nothing of this repository is beside it
        shutil.copytree(SOURCE / "examples", example)
        run("cmake", "-S", example, "-B", ROOT / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}",
            "-DCMAKE_BUILD_TYPE=Release")
        run("cmake", "--build", ROOT / "build")
        output = run(ROOT / "build/layer", SOURCE / "models/tiny-moe")
        self.assertRegex(output, r"^cpu\.\w+\.mxfp4: y\[0\] = -?\d")
        failed = subprocess.run([ROOT / "build/layer", ROOT], capture_output=True, text=True)
        self.assertEqual(failed.returncode, 1)
        self.assertIn(str(ROOT), failed.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

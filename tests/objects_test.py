"""Objects compiled for one instruction set define nothing that the linker could take for another:
objects_test.py BUILD_DIR"""
import pathlib
import subprocess
import sys
import unittest

BUILD = pathlib.Path(sys.argv[1])


class ObjectsTest(unittest.TestCase):
    def test_no_weak_symbols(self):
        for isa in ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"):
            objects = list((BUILD / f"CMakeFiles/gatefold_{isa}.dir").rglob("*.o"))
            self.assertTrue(objects)
            for path in objects:
                names = subprocess.run(["nm", "-C", "--defined-only", path], capture_output=True, check=True, text=True)
                symbols = [line.split(" ", 2)[1:] for line in names.stdout.splitlines()]
                with self.subTest(object=path.relative_to(BUILD)):
                    self.assertEqual([name for kind, name in symbols if kind in "WVuw"], [])
                    # What others can see is in the namespace of this instruction set.
                    own = (f"gatefold::{isa}::", f"vtable for gatefold::{isa}::")
                    self.assertEqual([name for kind, name in symbols if kind in "TDBR" and not name.startswith(own)], [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

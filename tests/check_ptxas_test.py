"""scripts/check_ptxas sees what it should in a compiler's report: check_ptxas_test.py SOURCE_DIR"""
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(sys.argv[1]) / "scripts/check_ptxas"

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_90a'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 1 barriers, 1024 bytes smem
"""
SPILL = """\
ptxas info    : Compiling entry function '_Z4poorPf' for 'sm_90a'
ptxas info    : Function properties for _Z4poorPf
    16 bytes stack frame, 12 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""
SERIALIZED = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions defining accumulator registers of a wgmma between start and end of the pipeline stage in the function '_Z4slowPf'
"""


class CheckPtxasTest(unittest.TestCase):
    def check(self, *reports, options=()):
        with tempfile.TemporaryDirectory() as folder:
            for index, report in enumerate(reports):
                (pathlib.Path(folder) / f"file{index}.cu.o.ptxas").write_text(report)
            done = subprocess.run([sys.executable, SCRIPT, folder, *options], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def test_clean(self):
        code, output = self.check(CLEAN, CLEAN, options=["--list"])
        self.assertEqual(code, 0)
        self.assertIn("2 kernels in 2 files, 0 faults", output)
        self.assertRegex(output, r"16 registers +1024 B shared +0 B local  good")

    def test_spills(self):
        code, output = self.check(CLEAN, CLEAN + SPILL)
        self.assertEqual(code, 1)
        self.assertIn("file1.cu: poor: 12 bytes of spill stores, 24 bytes of spill loads", output)
        self.assertNotIn("good", output)

    def test_serialized_wgmma(self):
        code, output = self.check(CLEAN + SERIALIZED)
        self.assertEqual(code, 1)
        self.assertIn("(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized", output)

    def test_no_report_is_a_fault(self):
        self.assertEqual(self.check()[0], 1)
        self.assertEqual(self.check("")[0], 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

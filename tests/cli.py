"""What the tests of the command line share. They are called as NAME_test.py TOOL SOURCE_DIR."""
import ctypes
import errno
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

TOOL, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
TINY = SOURCE / "models/tiny-moe"
TEXT = (TINY / "valid.txt").read_bytes()[: 4 * 64]


def tool(*args, code=0, **kwargs):
    done = subprocess.run([TOOL, *map(str, args)], capture_output=True, timeout=600, **kwargs)
    assert done.returncode == code, f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def tool_json(*args, code=0):
    """The object on stdout; that there is exactly one."""
    return json.loads(tool(*args, "--json", code=code).stdout)


def without_noreplace():
    """For preexec_fn: renameat2 fails with EINVAL, as on file systems (NFS) that know none of its flags."""
    number = {"x86_64": 316, "aarch64": 276}[os.uname().machine]
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    allow, fail = 0x7FFF0000, 0x00050000 | errno.EINVAL
    steps = [(load, 0, 0, 0), (jump_if_equal, 0, 1, number), (give, 0, 0, fail), (give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    libc, no_new_privileges, seccomp = ctypes.CDLL(None, use_errno=True), 38, 22
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(seccomp, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


def read_safetensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[8 + size + begin : 8 + size + end])
    return tensors


class CliTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.folder / "text"
        self.text.write_bytes(TEXT)


def main():
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])

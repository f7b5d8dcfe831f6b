"""What src/torch_abi.h declares is what torch's own headers declare."""
import pathlib
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

SOURCE = pathlib.Path(__file__).resolve().parents[1] / "src"
INCLUDE = pathlib.Path(torch.__file__).parent / "include"
PROGRAM = r"""
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <type_traits>
#include "torch_abi.h"
using namespace gatefold::python;
#define GATEFOLD_TORCH(result, name, arguments) \
  static_assert(std::is_same_v<decltype(&::name), decltype(TorchFunctions::name)>, #name);
GATEFOLD_TORCH_FUNCTIONS(GATEFOLD_TORCH)
"""


def test_declarations():
    compiler = shutil.which("c++")
    if compiler is None or not (INCLUDE / "torch/csrc/stable/c/shim.h").exists():
        pytest.skip("needs a compiler and torch's headers")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-", f"-I{SOURCE}", f"-isystem{INCLUDE}",
               f"-isystem{INCLUDE}/torch/csrc/api/include", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    compiled = subprocess.run(command, input=PROGRAM, text=True, capture_output=True)
    assert compiled.returncode == 0, compiled.stderr

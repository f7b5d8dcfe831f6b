"""What `gatefold convert --to compressed-tensors` writes, dequantized by compressed-tensors itself.

Sources: tiny-moe, quantized and taken through another convention; and, where GATEFOLD_CHECKPOINTS names a folder of
them, checkpoints that GPTQModel and ModelOpt wrote. The same environment as test_compressed_tensors.py.
"""

import json
import os
import pathlib
import subprocess

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_compressed_tensors import DUMP, MODEL, PROJECTIONS, assert_same_bits, decompress_f32, gatefold  # noqa: E402

REAL = os.environ.get("GATEFOLD_CHECKPOINTS")
SOURCES = ["int4_g128 by gptq", "uint4_g64 by gptq", "uint4_g32 by awq", "int8 by compressed-tensors"]
REAL_SOURCES = ["gptq-sym-g128", "gptq-asym-g64", "gptq-x192-g128", "awq-g64", "modelopt-fp8"]


def dump(directory, out):
    subprocess.run([DUMP, str(directory), str(out)], check=True)
    return load_file(out / "model.safetensors")


def check(source, directory):
    """compressed-tensors sees in `directory` the weights that we see in `source`."""
    ours = dump(source, directory.parent / "ours")
    quantization = json.loads((directory / "config.json").read_text())["quantization_config"]
    group = QuantizationConfig.model_validate(quantization).config_groups["group_0"]
    tensors = load_file(directory / "model.safetensors")
    assert BaseCompressor.get_value_from_registry(group.format)
    for key, expected in ours.items():
        layer, expert, projection = key.split(".")
        prefix = f"model.layers.{layer}.mlp.experts.{expert}.{PROJECTIONS[projection]}."
        state = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        assert_same_bits(decompress_f32(state, group) + 0.0, expected + 0.0, key)


@pytest.mark.parametrize("source", SOURCES)
def test_tiny_moe(source, tmp_path):
    scheme, by = source.split(" by ")
    gatefold("quantize", MODEL, tmp_path / "quantized", "--scheme", scheme)
    gatefold("convert", tmp_path / "quantized", tmp_path / "between", "--to", by)
    gatefold("convert", tmp_path / "between", tmp_path / "converted", "--to", "compressed-tensors")
    check(tmp_path / "quantized", tmp_path / "converted")


@pytest.mark.skipif(REAL is None, reason="GATEFOLD_CHECKPOINTS names no folder of checkpoints")
@pytest.mark.parametrize("source", REAL_SOURCES)
def test_real(source, tmp_path):
    directory = pathlib.Path(REAL or "") / source
    gatefold("convert", directory, tmp_path / "converted", "--to", "compressed-tensors")
    check(directory, tmp_path / "converted")

"""What `gatefold convert --to gptq` and `--to awq` write, dequantized by GPTQModel's own layers on the CPU.

tiny-moe, quantized and converted: GPTQModel sees the weights that we see, bit for bit. Also `pip install gptqmodel`,
beside what test_compressed_tensors.py needs.
"""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gptqmodel")

from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # noqa: E402
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear  # noqa: E402
from gptqmodel.quantization import QuantizeConfig  # noqa: E402
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm  # noqa: E402
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_compressed_tensors import MODEL, PROJECTIONS, assert_same_bits, gatefold  # noqa: E402
from test_convert import dump  # noqa: E402

SOURCES = [
    ("int4_g128", "gptq"),
    ("int4_g32", "gptq"),
    ("int4_channel", "gptq"),
    ("uint4_g64", "gptq"),
    ("int8_g128", "gptq"),
    ("uint4_g128", "awq"),
    ("uint4_g32", "awq"),
]


def layer_of(kind, config, tensors):
    """GPTQModel's layer with these tensors."""
    words, rows = tensors["qweight"].shape
    if kind is AwqTorchLinear:
        size = {"in_features": words, "out_features": rows * 8}
    else:
        size = {"in_features": words * 32 // config.bits, "out_features": rows}
    layer = kind(
        bits=config.bits,
        group_size=config.group_size,
        sym=config.sym,
        desc_act=config.desc_act,
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=True,
        **size,
    )
    for name, tensor in tensors.items():
        buffer = getattr(layer, name)
        assert buffer.shape == tensor.shape and buffer.dtype in (tensor.dtype, torch.float16), name
        setattr(layer, name, tensor)
    return layer


def dequantized(config, version, tensors):
    """[out, in] in f32."""
    tensors = dict(tensors, scales=tensors["scales"].float())
    if config.export_quant_method().value == "awq":
        layer = layer_of(AwqTorchLinear, config, tensors)
        return dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size).T
    layer = layer_of(TorchLinear, config, tensors)
    layer.post_init()
    if version == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, config.bits, torch.int32)
    return layer.dequantize_weight().T


@pytest.mark.parametrize("scheme, convention", SOURCES)
def test_weights(scheme, convention, tmp_path):
    gatefold("quantize", MODEL, tmp_path / "quantized", "--scheme", scheme)
    gatefold("convert", tmp_path / "quantized", tmp_path / "converted", "--to", convention)
    quantization = json.loads((tmp_path / "converted" / "config.json").read_text())["quantization_config"]
    config = QuantizeConfig.from_quant_config(quantization)
    assert config.export_quant_method().value == convention
    tensors = load_file(tmp_path / "converted" / "model.safetensors")
    ours = dump(tmp_path / "quantized", tmp_path / "ours")
    assert len(ours) == 4 * 16 * 3
    for key, expected in ours.items():
        layer, expert, projection = key.split(".")
        prefix = f"model.layers.{layer}.mlp.experts.{expert}.{PROJECTIONS[projection]}."
        state = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        assert_same_bits(dequantized(config, quantization.get("checkpoint_format"), state).float() + 0.0, expected + 0.0, key)

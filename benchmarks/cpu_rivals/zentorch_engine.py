"""zentorch: zentorch_fused_moe. It packs each expert when it first sees it, in place for some formats."""
import torch
import zentorch

import formats

FORMATS = {
    "bf16": formats.bf16,
    "int8 w8a8": formats.int8_channel,
    "int4 g128 w4a8": formats.int4_signed(128),
    "int4 g32 w4a8": formats.int4_signed(32),
}


def tensor(array):
    result = torch.from_numpy(array)
    return result.view(torch.bfloat16) if result.dtype == torch.uint16 else result


class Engine:
    interleaved = False

    def __init__(self, name, shape, threads):
        self.matrix = FORMATS[name]
        torch.set_num_threads(threads)

    def layer(self, up, down):
        up, down = map(tensor, up), map(tensor, down)
        return next(up), next(down), next(up, None), next(down, None)

    def inputs(self, x, ids, weights):
        x = torch.from_numpy(x).bfloat16()
        return torch.zeros_like(x), x, torch.from_numpy(weights), torch.from_numpy(ids).int()

    def run(self, layer, inputs):
        out, x, weights, ids = inputs
        up, down, up_scales, down_scales = layer
        torch.ops.zentorch.zentorch_fused_moe(out, x, up, down, None, None, weights, ids, False, "silu",
                                              up_scales, down_scales)
        return out

    def result(self, out):
        return out.float().numpy()


VERSIONS = f"zentorch {zentorch.__version__}, torch {torch.__version__}"

"""One MoE layer as a torch operator, compiled: python examples/torch_op.py"""
import torch

from gatefold.torch import Experts

torch.manual_seed(0)
experts, hidden, intermediate, top_k = 8, 256, 128, 2
gate_up = torch.randn(experts, 2 * intermediate, hidden, dtype=torch.bfloat16) / hidden**0.5
down = torch.randn(experts, hidden, intermediate, dtype=torch.bfloat16) / intermediate**0.5
router = torch.randn(experts, hidden, dtype=torch.bfloat16) / hidden**0.5

layer = Experts.quantize(gate_up, down, "mxfp4", top_k=top_k)


def moe(x):
    weights, ids = torch.softmax(x @ router.T, dim=-1, dtype=torch.float32).topk(top_k)
    return x + layer(x, ids, weights / weights.sum(dim=-1, keepdim=True))


x = torch.randn(16, hidden, dtype=torch.bfloat16)
compiled = torch.compile(moe, fullgraph=True)
with torch.no_grad():
    difference = (compiled(x).float() - moe(x).float()).abs().max().item()
print(f"{layer}\ncompiled: largest difference {difference:g}")

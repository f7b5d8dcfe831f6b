# One MoE layer of a checkpoint, quantized on load and run on 8 tokens.
import sys

import numpy as np

import gatefold

directory = sys.argv[1] if len(sys.argv) > 1 else "models/tiny-moe"
experts = gatefold.load_experts(directory, layer=0, scheme="mxfp4")
plan = gatefold.MoePlan.create(experts, max_tokens=8)
y = plan.run(np.full((8, experts.spec.hidden), 0.5, np.float32))
print(f"{plan.kernel_name}: y[0] = {y[0, 0]:g}")

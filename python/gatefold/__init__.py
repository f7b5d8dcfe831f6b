"""Quantized Mixture-of-Experts layers: the C++ library's names, for tensors of any library that speaks DLPack.

    import gatefold
    experts = gatefold.load_experts("Qwen3-30B-A3B", layer=0, scheme="mxfp4")
    plan = gatefold.MoePlan.create(experts, max_tokens=512)
    y = plan.run(x)                             # numpy or torch, f32, f16 or bf16

Needs numpy. gatefold.torch has operators and a module for torch, gatefold.transformers a drop-in for transformers.

Threads: schemes, matrices, weights and plans may be used by several threads at once; calls that compute release the
interpreter. Each call of a plan has a workspace of its own, kept for later calls. A process that is forked after the
first call cannot use the package (Unsupported): start it with multiprocessing's method "spawn".
"""
from ._core import (Activation, BadFile, ConvertReport, Error, ExpertWeights, InternalError, InvalidArgument, IoError,
                    LinearPlan, LinearWeights, MoePlan, MoeSpec, QuantizedActivation, QuantizedMatrix, Routing, Scheme,
                    Unsupported, __version__, grouped_gemm, has_cuda, load_experts, pack, quantize, quantize_activation,
                    quantize_checkpoint, scaled_mm, schemes)

__all__ = [name for name in dir() if not name.startswith("_")]

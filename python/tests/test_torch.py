"""Operators and the module for torch."""
import pathlib
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import gatefold
import gatefold.torch
from common import HIDDEN, INTERMEDIATE, TINY, TOP_K, inputs, run_in_threads, weights
from gatefold.torch import Experts

SCHEMES = [scheme.name for scheme in gatefold.schemes()]
QUANTIZING = [scheme.name for scheme in gatefold.schemes() if scheme.quantizes_activations]
ops = torch.ops.gatefold


def experts(scheme="mxfp4", **options):
    return Experts.quantize(*map(torch.from_numpy, weights()), scheme, top_k=TOP_K, **options)


def tensors(tokens):
    return [torch.from_numpy(array) for array in inputs(tokens)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_same_bits_as_numpy(scheme):
    module = experts(scheme)
    arrays = inputs(5)
    expected = gatefold.MoePlan.create(gatefold.pack(*weights(), scheme, top_k=TOP_K)).run(*arrays)
    np.testing.assert_array_equal(module(*map(torch.from_numpy, arrays)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dlpack_of_every_float(dtype):
    """pack, quantize and run of torch tensors, where numpy has no bf16."""
    gate_up, down = (torch.from_numpy(w).to(dtype) for w in weights())
    plan = gatefold.MoePlan.create(gatefold.pack(gate_up, down, "int8", top_k=TOP_K))
    x, ids, topk_weights = tensors(3)
    y = plan.run(x.to(dtype), ids.long(), topk_weights.to(dtype))
    assert y.dtype == dtype and y.shape == x.shape
    assert torch.equal(y, experts_of(gate_up, down)(x.to(dtype), ids, topk_weights.to(dtype)))


def test_types_of_codes():
    """What torch calls the types of codes and scales is known."""
    x, ids, w = tensors(3)
    for scheme, codes, scales in (("fp8_block_afp8", torch.float8_e4m3fn, torch.float32), ("int8_aint8", torch.int8, torch.float32),
                                  ("mxfp8_amxfp8", torch.float8_e4m3fn, torch.float8_e8m0fnu),
                                  ("nvfp4_anvfp4", torch.uint8, torch.float8_e4m3fn)):
        values, of_values, of_tokens = ops.quantize_activation(x, scheme)
        plan = gatefold.MoePlan.create(experts(scheme).experts)
        with pytest.raises(gatefold.InvalidArgument, match="hidden_scales are for GPUs only"):
            plan.run(values.view(codes), ids, w, hidden_scales=of_values.view(scales), hidden_token_scales=of_tokens)


def test_weights_may_go_after_packing():
    """Freed or resized: the packed ones are copies."""
    gate_up, down = map(torch.from_numpy, weights())
    gate_up, down = gate_up.clone(), down.clone()
    module = Experts.quantize(gate_up, down, "int8", top_k=TOP_K)
    plan = gatefold.MoePlan.create(gatefold.pack(gate_up, down, "int8", top_k=TOP_K))
    expected = plan.run(*tensors(3))
    gate_up.resize_(1).fill_(torch.nan)
    del down
    assert torch.equal(plan.run(*tensors(3)), expected) and torch.equal(module(*tensors(3)), expected)


def test_no_tokens():
    plan = gatefold.MoePlan.create(experts().experts)
    assert plan.run(*tensors(0)).shape == (0, HIDDEN)


def experts_of(gate_up, down):
    return Experts.quantize(gate_up, down, "int8", top_k=TOP_K)


def test_opcheck():
    module = experts()
    for tokens in (0, 1, 5):
        x, ids, topk_weights = tensors(tokens)
        torch.library.opcheck(ops.fused_experts.default, (x, ids, topk_weights, module.handle))
        torch.library.opcheck(ops.fused_experts.default, (x.bfloat16(), ids.long(), topk_weights, module.handle))


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_products(scheme):
    x, w = tensors(5)[0], gatefold.quantize(weights()[1][0], scheme)
    torch.library.opcheck(ops.quantize_activation.default, (x, scheme))
    values, scales, token_scales = ops.quantize_activation(x, scheme)
    direct = gatefold.quantize_activation(x, scheme)
    np.testing.assert_array_equal(values, direct.values)
    np.testing.assert_array_equal(scales, direct.scales)
    np.testing.assert_array_equal(token_scales, direct.token_scales)
    arguments = (values, scales, token_scales, torch.from_numpy(w.values.copy()), torch.from_numpy(w.scales.copy()), scheme,
                 w.tensor_scale or 1.0)
    torch.library.opcheck(ops.scaled_mm.default, arguments)
    np.testing.assert_array_equal(ops.scaled_mm(*arguments), gatefold.scaled_mm(direct, w))


class Products(torch.nn.Module):
    def forward(self, x, offsets, codes, scales):
        return (ops.scaled_mm(x, 7, 64), ops.scaled_mm(codes, 7, 64, scales=scales),
                ops.grouped_gemm(x, offsets, 7, 32, bias=scales, dtype=torch.float16),
                ops.fused_experts(codes, offsets, scales, 7, 64, scales))


def test_products_with_packed_matrices_are_traced():
    """They run on GPUs alone; elsewhere the types and shapes of their results are known."""
    x, offsets = tensors(5)[0], torch.zeros(3, dtype=torch.int32)
    rows = torch.export.Dim("rows", min=2)
    dynamic = {"x": {0: rows}, "offsets": None, "codes": {0: rows}, "scales": {0: rows}}
    arguments = (x, offsets, x.to(torch.float8_e4m3fn), torch.ones(5, 1))
    exported = torch.export.export(Products(), arguments, dynamic_shapes=dynamic)
    results = [node.meta["val"] for node in exported.graph.output_node().args[0]]
    assert [result.dtype for result in results] == [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
    assert [result.shape[1] for result in results] == [64, 64, 32, 64]
    assert all(result.shape[0] == exported_rows(exported) for result in results)


def exported_rows(exported):
    return next(node for node in exported.graph.nodes if node.name == "x").meta["val"].shape[0]


def test_compile_export_autocast():
    module = experts()
    call = lambda x, ids, w: module(x * 2, ids, w) + 1
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for tokens in (2, 7):
        assert torch.equal(compiled(*tensors(tokens)), call(*tensors(tokens)))
    exported = torch.export.export(module, tuple(tensors(3)))
    assert "gatefold.fused_experts" in str(exported.graph)
    assert torch.equal(exported.module()(*tensors(3)), module(*tensors(3)))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(*tensors(3)), experts()(*tensors(3)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_dict(scheme):
    module = experts(scheme)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    again = Experts(module.spec)
    again.load_state_dict(state)
    assert torch.equal(again(*tensors(4)), module(*tensors(4)))
    del state["down_values"]
    with pytest.raises(RuntimeError, match="down_values"):
        Experts(module.spec).load_state_dict(state)
    module.load_state_dict(again.state_dict())
    assert torch.equal(again(*tensors(4)), module(*tensors(4)))


def test_weights_are_held_once():
    module = experts()
    assert [name for name, _ in module.named_buffers()] == []
    assert module.experts.packed_bytes < 1.1 * sum(tensor.nbytes for tensor in module.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), module.drop_state().state_dict().values()))


def test_experts_of_a_checkpoint():
    module = Experts.load(TINY, 1, "mxfp4")
    x, ids = torch.randn(3, 256), torch.tensor([[0, 1, 2, 3]] * 3)[:, :module.spec.top_k]
    w = torch.rand(ids.shape)
    plan = gatefold.MoePlan.create(gatefold.load_experts(TINY, 1, "mxfp4", shared_expert=False))
    assert torch.equal(module(x, ids, w), plan.run(x, ids, w))
    with pytest.raises(RuntimeError, match="the weights are those of .*tiny-moe"):
        module.state_dict()


RUN_EXPORTED = """
import sys, torch, gatefold.torch
sys.path.insert(0, sys.argv[1])
from test_torch import experts, tensors
module = torch.nn.Sequential(experts())
gatefold.torch.publish(module)
program = torch.export.load(sys.argv[2]).module()
assert torch.equal(program(*tensors(3)), module[0](*tensors(3)))
del module
try:
    program(*tensors(3))
except RuntimeError as error:
    assert "handle of no packed experts" in str(error)
else:
    raise AssertionError("it ran without weights")
"""


class Call(torch.nn.Module):
    """With experts somewhere in it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return self.inner[0](*inputs)


def test_saved_export(tmp_path):
    """Runs in another process, where experts of the same name are."""
    module = torch.nn.Sequential(experts())
    gatefold.torch.publish(module)
    file = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Call(module), tuple(tensors(3))), file)
    here = str(pathlib.Path(__file__).parent)
    subprocess.run([sys.executable, "-c", RUN_EXPORTED, here, str(file)], check=True)


def test_biases_and_layouts():
    gate_up, down = map(torch.from_numpy, weights())
    bias, down_bias = torch.randn(4, 2 * INTERMEDIATE), torch.randn(4, HIDDEN)
    plain = Experts.quantize(gate_up, down, "int8", top_k=TOP_K, gate_up_bias=bias, down_bias=down_bias)
    woven = lambda t: torch.stack(t.chunk(2, dim=1), dim=2).flatten(1, 2)
    other = Experts.quantize(woven(gate_up).transpose(1, 2), down.transpose(1, 2), "int8", top_k=TOP_K,
                             gate_up_bias=woven(bias), down_bias=down_bias, interleaved=True, transposed=True)
    assert torch.equal(plain(*tensors(3)), other(*tensors(3)))
    again = Experts(other.spec)
    again.load_state_dict(other.state_dict())
    assert torch.equal(plain(*tensors(3)), again(*tensors(3)))


def test_moving():
    module = experts()
    assert module.to("cpu") is module and module.half().state_dict()["gate_values"].dtype == torch.uint8
    with pytest.raises(RuntimeError, match="packed for cpu"):
        module.to("meta")


def test_bad_input():
    module, of_codes = experts(), experts("fp8_channel_afp8")
    x, ids, w = tensors(3)
    codes, scales = x.to(torch.float8_e4m3fn), torch.ones(3, 1)
    for message, call in [
        (r"hidden is F32 \[3, 64\]", lambda: module(x[:, :64], ids, w)),
        (r"topk_ids is I32 \[2, 2\]", lambda: module(x, ids[:2], w)),
        (r"topk_ids\[0, 0\] = -1", lambda: module(x, ids * 0 - 1, w)),
        ("topk_ids is", lambda: module(x, ids.float(), w)),
        ("hidden is", lambda: module(x.double(), ids, w)),
        ("requires a gradient", lambda: module(x.clone().requires_grad_(), ids, w)),
        (r"hidden \[3, 128\] has strides", lambda: ops.fused_experts(x.t().contiguous().t(), ids, w, module.handle)),
        ("handle of no packed experts", lambda: ops.fused_experts(x, ids, w, 1 << 40)),
        ("inference only", lambda: ops.fused_experts(x.clone().requires_grad_(), ids, w, module.handle).sum().backward()),
        ("no scheme", lambda: ops.quantize_activation(x, "int5")),
        ("x .* expected", lambda: ops.scaled_mm(x, x, w, x, x, "int8_aint8", 1.0)),
        ("handle of no packed matrices", lambda: ops.scaled_mm(x, 1 << 40, 64)),
        ("width = 64, but hidden states have 128", lambda: ops.fused_experts(codes, ids, w, of_codes.handle, 64, scales)),
        ("hidden_scales are for GPUs only", lambda: ops.fused_experts(codes, ids, w, of_codes.handle, HIDDEN, scales)),
        (r"scales is F32 \[2, 1\]", lambda: ops.fused_experts(codes, ids, w, of_codes.handle, HIDDEN, scales[:2])),
        ("handle of no packed matrices", lambda: ops.grouped_gemm(x, ids, module.handle, 64, bias=w, dtype=torch.float16)),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
    plan = gatefold.MoePlan.create(module.experts)
    for message, call in [
        ("hidden requires a gradient", lambda: plan.run(x.clone().requires_grad_(), ids, w)),
        ("gate_up requires a gradient", lambda: gatefold.pack(torch.nn.Parameter(torch.zeros(4, 8, 8)), x, "bf16", top_k=1)),
        ("hidden cannot be read: .*meta", lambda: plan.run(x.to("meta"), ids, w)),
        ("hidden cannot be read", lambda: plan.run(x.to_sparse(), ids, w)),
        ("hidden is a view whose signs", lambda: plan.run(torch._neg_view(x), ids, w)),
        ("hidden has a type", lambda: plan.run(x.to(torch.complex64), ids, w)),
        (r"topk_ids \[3, 2\] has strides \[1, 3\]", lambda: plan.run(x, ids.t().contiguous().t(), w)),
    ]:
        with pytest.raises(gatefold.InvalidArgument, match=message):
            call()
    with pytest.raises(gatefold.InvalidArgument, match="gate_up is"):
        Experts.quantize(torch.zeros(4, 6, 8), torch.zeros(4, 8, 6), "bf16", top_k=1)
    handle = module.handle
    del module, plan
    with pytest.raises(RuntimeError, match="handle of no packed experts"):
        ops.fused_experts(x, ids, w, handle)


def test_threads():
    module = experts()
    calls = [lambda i=i: module(*tensors(1 + i)) for i in range(4)]
    assert run_in_threads(calls, torch.equal, times=50) == 0


def test_gatefold_needs_no_torch():
    code = "import sys, gatefold; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

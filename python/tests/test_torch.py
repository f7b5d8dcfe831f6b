"""Operators and the module for torch."""
import subprocess
import sys
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import gatefold
import gatefold.torch
from common import HIDDEN, INTERMEDIATE, TOP_K, inputs, weights
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
    module.drop_state()
    assert torch.equal(again(*tensors(4)), module(*tensors(4)))
    with pytest.raises(RuntimeError, match="dropped"):
        module.state_dict()


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
    module = experts()
    x, ids, w = tensors(3)
    for message, call in [
        (r"hidden is \[3, 64\]", lambda: module(x[:, :64], ids, w)),
        (r"topk_ids is \[2, 2\]", lambda: module(x, ids[:2], w)),
        (r"topk_ids\[0, 0\] = -1", lambda: module(x, ids * 0 - 1, w)),
        ("topk_ids is", lambda: module(x, ids.float(), w)),
        ("hidden is", lambda: module(x.double(), ids, w)),
        ("requires a gradient", lambda: module(x.clone().requires_grad_(), ids, w)),
        ("not contiguous", lambda: ops.fused_experts(x.t().contiguous().t(), ids, w, module.handle)),
        ("handle of no packed experts", lambda: ops.fused_experts(x, ids, w, 1 << 40)),
        ("inference only", lambda: ops.fused_experts(x.clone().requires_grad_(), ids, w, module.handle).sum().backward()),
        ("no scheme", lambda: ops.quantize_activation(x, "int5")),
        ("x .* expected", lambda: ops.scaled_mm(x, x, w, x, x, "int8_aint8", 1.0)),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
    with pytest.raises(gatefold.InvalidArgument, match="requires a gradient"):
        gatefold.MoePlan.create(module.experts).run(x.clone().requires_grad_(), ids, w)
    with pytest.raises(gatefold.InvalidArgument, match="gate_up is"):
        Experts.quantize(torch.zeros(4, 6, 8), torch.zeros(4, 8, 6), "bf16", top_k=1)
    handle = module.handle
    del module
    with pytest.raises(RuntimeError, match="handle of no packed experts"):
        ops.fused_experts(x, ids, w, handle)


def test_threads():
    module = experts()
    expected = [module(*tensors(1 + i)) for i in range(4)]
    wrong = []

    def work(i):
        for _ in range(50):
            if not torch.equal(module(*tensors(1 + i)), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_gatefold_needs_no_torch():
    code = "import sys, gatefold; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not (gatefold.has_cuda and torch.cuda.is_available()), reason="needs a GPU and a build with CUDA")
def test_cuda_graph():
    module = experts(device="cuda")
    x, ids, w = (tensor.cuda() for tensor in tensors(3))
    expected = module(x, ids, w)
    assert torch.equal(gatefold.MoePlan.create(module.experts).run(x, ids, w), expected)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        module(x, ids, w)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        y = module(x, ids, w)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)

"""Products with packed matrices on a GPU: plans, operators, streams, graphs, bad calls."""
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import gatefold
import gatefold.torch
from common import relative
from test_cuda import QUANTIZING, SCHEMES, experts, late_copy, ops, pytestmark

N, K = 192, 256


def matrices(scheme, count=3):
    rng = np.random.default_rng(7)
    return [gatefold.quantize(rng.normal(0, 0.1, (N, K)).astype(np.float32), scheme) for _ in range(count)]


def rows(count, seed=8):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, K)).astype(np.float32)).bfloat16().cuda()


def linear_plan(of, max_rows=70, **options):
    types = {name: options[name] for name in ("act_dtype", "weights_only") if name in options}
    return gatefold.LinearPlan.create(gatefold.LinearWeights.pack(of, **types), max_rows=max_rows, **options)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_grouped_gemm_against_the_cpu(scheme):
    of, x = matrices(scheme), rows(70)
    plan = linear_plan(of, debug_workspace=True)
    bias = torch.randn(3, N, device="cuda")
    for offsets in ((0, 40, 40, 70), (0, 0, 1, 70), (0, 70, 70, 70)):
        expected = gatefold.grouped_gemm(x.cpu(), offsets, of)
        y, sums = plan.grouped_gemm(x, ints(*offsets)), torch.empty(70, N, device="cuda")
        assert y.dtype == torch.bfloat16 and relative(y.double().cpu().numpy(), expected) <= 0.01
        assert plan.grouped_gemm(x, ints(*offsets), out=sums) is sums and torch.equal(sums.bfloat16(), y)
        of_row = bias.repeat_interleave(ints(*offsets).diff(), dim=0)
        torch.testing.assert_close(plan.grouped_gemm(x.float(), ints(*offsets), bias=bias), sums + of_row, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scaled_mm_against_the_cpu(scheme):
    of, bias = matrices(scheme, 1), torch.randn(N, device="cuda")
    plan = linear_plan(of[0])
    for count in (0, 1, 9, 70):
        x = rows(count)
        y = plan.scaled_mm(x)
        assert y.dtype == torch.bfloat16 and y.shape == (count, N)
        if count == 0:
            continue
        assert relative(y.double().cpu().numpy(), gatefold.grouped_gemm(x.cpu(), [0, count], of)) <= 0.01
        torch.testing.assert_close(plan.scaled_mm(x.float(), bias=bias), plan.scaled_mm(x.float()) + bias, rtol=1e-5, atol=1e-5)


TYPES = {"fp8_channel_afp8": (torch.float8_e4m3fn, torch.float32), "fp8_block_afp8": (torch.float8_e4m3fn, torch.float32),
         "int8_aint8": (torch.int8, torch.float32), "mxfp8_amxfp8": (torch.float8_e4m3fn, torch.float8_e8m0fnu),
         "nvfp4_anvfp4": (torch.uint8, torch.float8_e4m3fn)}


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_rows_that_are_quantized(scheme):
    """Codes with scales have the bits of numbers that are rounded to them; as bytes, and as what they are."""
    alone, grouped = linear_plan(matrices(scheme, 1)), linear_plan(matrices(scheme))
    for count in (1, 9, 70):
        x = rows(count)
        q = gatefold.quantize_activation(x, scheme)
        scales = {"scales": q.scales, "token_scales": q.token_scales}
        expected, y = alone.scaled_mm(x), alone.scaled_mm(q.values, **scales)
        assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
        codes, of_codes = TYPES.get(scheme, (torch.uint8, torch.uint8))
        typed = alone.scaled_mm(q.values.view(codes), scales=q.scales.view(of_codes), token_scales=q.token_scales)
        assert torch.equal(typed, expected)
        if scheme != "fp8_tensor_afp8":  # one scale for each group, and one for all rows
            offsets = ints(0, count // 2, count // 2, count)
            assert torch.equal(grouped.grouped_gemm(q.values, offsets, **scales), grouped.grouped_gemm(x, offsets))
    half = linear_plan(matrices(scheme, 1), act_dtype="f16")
    assert half.scaled_mm(q.values, **scales).dtype == torch.float16


def test_other_rows_change_nothing():
    plan, x, offsets = linear_plan(matrices("int4_g128"), batch_invariant=True), rows(70), ints(0, 40, 40, 70)
    together = plan.grouped_gemm(x, offsets)
    assert torch.equal(plan.grouped_gemm(x[:1], ints(0, 1, 1, 1)), together[:1])
    assert torch.equal(plan.grouped_gemm(x[40:], ints(0, 0, 0, 30)), together[40:])


def test_products_in_streams_and_graphs():
    plan, x, offsets = linear_plan(matrices("fp8_block_afp8")), rows(70), ints(0, 40, 40, 70)
    expected, stream = plan.grouped_gemm(x, offsets), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        y = plan.grouped_gemm(late_copy(x), offsets)
        assert not stream.query()  # nobody has waited
        assert torch.equal(y, expected)
        late = late_copy(x)
    y = plan.grouped_gemm(late, offsets, out=torch.empty_like(y), stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(y, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = plan.grouped_gemm(x, offsets)
    for now in ((0, 40, 40, 70), (0, 0, 69, 70)):
        offsets.copy_(ints(*now))
        graph.replay()
        assert torch.equal(plan.grouped_gemm(x, offsets), y)


@pytest.mark.parametrize("scheme", ["int4_g128", "fp8_channel_afp8", "nvfp4_anvfp4"])
def test_products_as_operators(scheme):
    pack = lambda count, **options: gatefold.LinearWeights.pack(matrices(scheme, count), **options)
    many, one, x, offsets = pack(3), pack(1), rows(9), ints(0, 4, 4, 9)
    bias, handle, create = torch.randn(3, N, device="cuda"), many.handle, gatefold.LinearPlan.create
    grouped = lambda x, offsets: ops.grouped_gemm(x * 2, offsets, handle, N, bias=bias, dtype=torch.float32) + 1
    assert torch.equal(ops.scaled_mm(x, one.handle, N), create(one).scaled_mm(x))
    half = pack(1, act_dtype="f16")
    assert torch.equal(ops.scaled_mm(x.half(), half.publish(scheme), N), create(half, act_dtype="f16").scaled_mm(x.half()))
    sums = torch.empty(9, N, device="cuda")
    assert torch.equal(grouped(x, offsets), create(many).grouped_gemm(x * 2, offsets, bias=bias, out=sums) + 1)
    torch.library.opcheck(ops.scaled_mm.packed, (x, one.handle, N))
    torch.library.opcheck(ops.grouped_gemm.default, (x, offsets, many.handle, N, bias), {"dtype": torch.float32})
    for options in ({"dynamic": True}, {"mode": "reduce-overhead"}):
        compiled = torch.compile(grouped, fullgraph=True, **options)
        for _ in range(3):
            assert torch.equal(compiled(x, offsets), grouped(x, offsets))
    gatefold.torch.debug()
    try:
        assert torch.equal(ops.scaled_mm(x, one.handle, N), create(one).scaled_mm(x))
    finally:
        gatefold.torch.debug(False)
    invariant = pack(3, batch_invariant=True)
    together = ops.grouped_gemm(x, offsets, invariant.handle, N)
    assert torch.equal(ops.grouped_gemm(x[4:], ints(0, 0, 0, 5), invariant.handle, N), together[4:])
    if scheme != "int4_g128":
        q = gatefold.quantize_activation(x, scheme)
        arguments = (q.values, one.handle, N, None, q.scales, q.token_scales)
        torch.library.opcheck(ops.scaled_mm.packed, arguments)
        assert torch.equal(ops.scaled_mm(*arguments), ops.scaled_mm(x, one.handle, N))


def test_linear_weights():
    packed = gatefold.LinearWeights.pack(iter(matrices("int4_g128")), device="cuda:0")
    assert (packed.scheme, packed.matrices, packed.n, packed.k, packed.device) == ("int4_g128", 3, N, K, "cuda:0")
    assert repr(packed) == "LinearWeights('int4_g128', matrices=3, n=192, k=256, device='cuda:0')"
    assert 3 * N * K // 2 < packed.packed_bytes < 3 * N * K
    plan = gatefold.LinearPlan.create(packed, max_rows=9)
    assert plan.max_rows == 9 and plan.workspace_bytes() > 0 and plan.weights.matrices == 3
    x, offsets = rows(9), ints(0, 3, 3, 9)
    expected = plan.grouped_gemm(x, offsets)
    del packed
    assert torch.equal(plan.grouped_gemm(x, offsets), expected)


def test_bad_products():
    plan, x, offsets = linear_plan(matrices("fp8_channel_afp8")), rows(3), ints(0, 1, 1, 3)
    q = gatefold.quantize_activation(x, "fp8_channel_afp8")
    y, bias = torch.empty(3, N, device="cuda"), torch.zeros(3, N, device="cuda")
    odd = torch.empty(3 * N + 1, device="cuda")[1:].view(3, N)
    alone = linear_plan(matrices("fp8_channel_afp8", 1), weights_only=True)
    for message, call in [
        ("x is on the CPU, expected GPU 0", lambda: plan.grouped_gemm(x.cpu(), offsets)),
        (r"x is BF16 \[3, 128\].* = \[-1, 256\]", lambda: plan.grouped_gemm(x[:, :128].contiguous(), offsets)),
        ("x is F64", lambda: plan.grouped_gemm(x.double(), offsets)),
        (r"x \[3, 256\] has strides", lambda: plan.grouped_gemm(x.t().contiguous().t(), offsets)),
        ("71 rows, but the plan was made for 0..70", lambda: plan.grouped_gemm(rows(71), offsets)),
        ("offsets is on the CPU", lambda: plan.grouped_gemm(x, offsets.cpu())),
        ("offsets is I64, expected I32 on a GPU", lambda: plan.grouped_gemm(x, offsets.long())),
        (r"offsets is I32 \[3\].* = \[4\]", lambda: plan.grouped_gemm(x, offsets[:3])),
        ("bias is F16, expected F32 on a GPU", lambda: plan.grouped_gemm(x, offsets, bias=bias.half())),
        (r"bias is F32 \[192\].* = \[3, 192\]", lambda: plan.grouped_gemm(x, offsets, bias=bias[0])),
        (r"out is F32 \[2, 192\].* = \[3, 192\]", lambda: plan.grouped_gemm(x, offsets, out=y[:2])),
        ("out is not aligned to 16 bytes", lambda: plan.grouped_gemm(x, offsets, out=odd)),
        ("scaled_mm is of one matrix, but the weights are 3", lambda: plan.scaled_mm(x)),
        (r"x is BF16 \[3, 256\], expected U8 \[3, 256\] or F8_E4M3", lambda: plan.grouped_gemm(x, offsets, scales=q.scales)),
        (r"scales is U8 \[2, 4\], expected U8 \[3, 4\] or F32 \[3, 1\]", lambda: plan.grouped_gemm(q.values, offsets, scales=q.scales[:2])),
        ("scales is on the CPU", lambda: plan.grouped_gemm(q.values, offsets, scales=q.scales.cpu())),
        ("16 bits", lambda: alone.scaled_mm(q.values, scales=q.scales)),
        ("x is on a GPU, expected the CPU", lambda: gatefold.scaled_mm(q, matrices("fp8_channel_afp8", 1)[0])),
        ("matrix 1 ", lambda: gatefold.LinearWeights.pack([*matrices("int8", 1), *matrices("int8_g32", 1)])),
        ("0 matrices", lambda: gatefold.LinearWeights.pack([])),
        ("max_rows = 0", lambda: linear_plan(matrices("int8"), max_rows=0)),
        ("act_dtype = 'f32'", lambda: linear_plan(matrices("int8"), act_dtype="f32")),
        ("device 99: this machine has", lambda: gatefold.LinearWeights.pack(matrices("int8"), device="cuda:99")),
    ]:
        with pytest.raises(gatefold.Error, match=message):
            call()
    handle = plan.weights.handle
    for message, call in [
        ("x is on the CPU, expected GPU 0", lambda: ops.grouped_gemm(x.cpu(), offsets.cpu(), handle, N)),
        ("offsets is I64, expected I32 on a GPU", lambda: ops.grouped_gemm(x, offsets.long(), handle, N)),
        ("n = 5, but the weights have 192 rows", lambda: ops.grouped_gemm(x, offsets, handle, 5)),
        ("scaled_mm is of one matrix, but the weights are 3", lambda: ops.scaled_mm(x, handle, N)),
        ("handle of no packed experts", lambda: ops.fused_experts(x, offsets, y, handle)),
        ("inference only", lambda: ops.grouped_gemm(x.clone().requires_grad_(), offsets, handle, N).sum().backward()),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
    del plan
    with pytest.raises(RuntimeError, match="handle of no packed matrices"):
        ops.grouped_gemm(x, offsets, handle, N)


def test_products_of_cupy():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    plan, offsets = linear_plan(matrices("fp8_block_afp8")), cupy.asarray([0, 4, 4, 9], "int32")
    x = cupy.asarray(rows(9).float())
    q, y = gatefold.quantize_activation(x, "fp8_block_afp8"), plan.grouped_gemm(x, offsets)
    assert isinstance(q.values, cupy.ndarray) and y.dtype == x.dtype
    with_scales = plan.grouped_gemm(q.values, offsets, scales=q.scales.view("float32"), out=cupy.empty_like(y))
    np.testing.assert_array_equal(with_scales.get(), y.get())
    np.testing.assert_array_equal(y.get(), plan.grouped_gemm(torch.as_tensor(x), torch.as_tensor(offsets)).cpu())

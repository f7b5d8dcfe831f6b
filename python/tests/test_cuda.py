"""On a GPU: the operators, plans on the caller's stream, graphs, what cannot be seen there, transformers models."""
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import gatefold
import gatefold.torch
from common import EXPERTS, TINY, TOP_K, inputs, relative, run_in_threads, weights
from gatefold.torch import Experts

pytestmark = pytest.mark.skipif(not (gatefold.has_cuda and torch.cuda.is_available()),
                                reason="needs a GPU and a build with CUDA")
SCHEMES = [scheme.name for scheme in gatefold.schemes()]
QUANTIZING = [scheme.name for scheme in gatefold.schemes() if scheme.quantizes_activations]
ops = torch.ops.gatefold


def experts(scheme="mxfp4", device="cuda", **options):
    return Experts.quantize(*map(torch.from_numpy, weights()), scheme, top_k=TOP_K, device=device, **options)


def tensors(tokens, device="cuda"):
    return [torch.from_numpy(array).to(device) for array in inputs(tokens)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_against_the_cpu(scheme):
    module, expected = experts(scheme), experts(scheme, "cpu")(*tensors(33, "cpu"))
    y = module(*tensors(33))
    assert relative(y.cpu().numpy(), expected.double().numpy()) <= 0.02
    assert torch.equal(gatefold.MoePlan.create(module.experts).run(*tensors(33)), y)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert all(tensor.device.type == "cpu" for tensor in state.values())
    again = Experts(module.spec, device="cuda")
    again.load_state_dict(state)
    assert torch.equal(again(*tensors(33)), y)
    with pytest.raises(RuntimeError, match="dropped"):
        module.drop_state().state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_on_the_gpu(dtype):
    """Read where they are, after what a stream still does to them."""
    sources = [torch.from_numpy(w).to(dtype) for w in weights()]
    x, ids, w = tensors(5)
    run = lambda packed: gatefold.MoePlan.create(packed).run(x.to(dtype), ids, w)
    expected = run(gatefold.pack(*sources, "int4_g128", top_k=TOP_K, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        late = [torch.zeros_like(s, device="cuda") for s in sources]
        torch.cuda._sleep(100_000_000)
        for tensor, source in zip(late, sources):
            tensor.copy_(source.pin_memory(), non_blocking=True)
        packed = gatefold.pack(*late, "int4_g128", top_k=TOP_K, device="cuda")
    torch.cuda.synchronize()
    assert torch.equal(run(packed), expected) and expected.dtype == dtype
    module = Experts.quantize(*(s.cuda() for s in sources), "int4_g128", top_k=TOP_K, device="cuda")
    assert torch.equal(module(x.to(dtype), ids, w), expected)
    on_host = gatefold.pack(*(s.cuda() for s in sources), "int4_g128", top_k=TOP_K)
    assert relative(run_on_cpu(on_host, dtype), expected.double().cpu().numpy()) <= 0.02


def run_on_cpu(packed, dtype):
    x, ids, w = tensors(5, "cpu")
    return gatefold.MoePlan.create(packed).run(x.to(dtype), ids, w).double().numpy()


@pytest.fixture(params=["module", "plan"])
def call(request):
    module = experts()
    return module if request.param == "module" else gatefold.MoePlan.create(module.experts).run


def late_copy(x):
    """Is written a tenth of a second from now, by the current stream."""
    late = torch.full_like(x, torch.nan)
    torch.cuda._sleep(100_000_000)
    return late.copy_(x)


@pytest.mark.parametrize("scheme", ["bf16", "mxfp4", "int4_g128_aint8"])
def test_other_tokens_change_nothing(scheme):
    module = experts(scheme, batch_invariant=True)
    plan = gatefold.MoePlan.create(module.experts, batch_invariant=True)
    tokens = tensors(65)
    for call in (module, plan.run):
        together = call(*tokens)
        for part in (slice(0, 1), slice(1, 9), slice(9, 65)):
            assert torch.equal(call(*(tensor[part] for tensor in tokens)), together[part])


def test_parts_of_the_experts_add_up():
    x, ids, w = tensors(65)
    gate_up, down = map(torch.from_numpy, weights())
    half, sums = EXPERTS // 2, 0
    for first in (0, half):
        part = Experts.quantize(gate_up[first:first + half], down[first:first + half], "mxfp4", top_k=TOP_K, ep_size=2,
                                device="cuda")
        own = torch.where((ids >= first) & (ids < first + half), ids - first, -1)
        sums = sums + part(x, own, w).double()
    assert relative(sums.cpu().numpy(), experts()(x, ids, w).double().cpu().numpy()) <= 0.01


def test_work_is_queued_in_the_callers_stream(call):
    x, ids, w = tensors(3)
    expected = call(x, ids, w)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        y = call(late_copy(x), ids, w)
        assert not torch.cuda.current_stream().query()  # nobody has waited
        assert torch.equal(y, expected)


def test_work_is_queued_in_the_stream_that_is_named():
    plan = gatefold.MoePlan.create(experts().experts)
    x, ids, w = tensors(3)
    expected, stream = plan.run(x, ids, w), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = late_copy(x)
    y = plan.run(late, ids, w, out=torch.empty_like(x), stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_graph(call):
    x, ids, w = tensors(3)
    expected = call(x, ids, w)
    with torch.cuda.stream(torch.cuda.Stream()):
        call(x, ids, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(x, ids, w)
    for factor in (1, 2):
        y.zero_()
        w.mul_(factor)
        graph.replay()
        assert torch.equal(y, factor * expected)
        assert torch.equal(call(x, ids, w), y)  # beside the graph


def test_opcheck_compile_autocast():
    module = experts()
    for tokens in (0, 1, 5):
        x, ids, w = tensors(tokens)
        torch.library.opcheck(ops.fused_experts.default, (x, ids, w, module.handle))
        torch.library.opcheck(ops.quantize_activation.default, (x, "nvfp4_anvfp4"))
    call = lambda x, ids, w: module(x * 2, ids, w) + 1
    for options in ({"dynamic": True}, {"mode": "reduce-overhead"}):
        compiled = torch.compile(call, fullgraph=True, **options)
        for tokens in (2, 2, 7):
            assert torch.equal(compiled(*tensors(tokens)), call(*tensors(tokens)))
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(module(*tensors(3)), experts()(*tensors(3)))


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_quantize_activation(scheme):
    x = tensors(5)[0]
    direct = gatefold.quantize_activation(x, scheme)
    assert (direct.scheme, direct.rows, direct.k) == (scheme, *x.shape)
    for ours, part, expected in zip(ops.quantize_activation(x, scheme), ("values", "scales", "token_scales"),
                                    ops.quantize_activation(x.cpu(), scheme)):
        assert torch.equal(ours.cpu(), expected) and torch.equal(getattr(direct, part).cpu(), expected)


@pytest.mark.parametrize("scheme", QUANTIZING)
def test_hidden_states_that_are_quantized(scheme):
    plan = gatefold.MoePlan.create(experts(scheme).experts)
    x, ids, w = tensors(33)
    x = x.bfloat16()
    for rows in (slice(0, 0), slice(0, 1), slice(0, 33)):
        q = gatefold.quantize_activation(x[rows], scheme)
        y = plan.run(q.values, ids[rows], w[rows], hidden_scales=q.scales, hidden_token_scales=q.token_scales)
        assert y.dtype == torch.bfloat16 and torch.equal(y, plan.run(x[rows], ids[rows], w[rows]))
        arguments = (q.values, ids[rows], w[rows], plan.experts.handle, x.shape[1], q.scales, q.token_scales)
        assert torch.equal(ops.fused_experts(*arguments), y)
        assert ops.fused_experts(*arguments, dtype=torch.float32).dtype == torch.float32


def test_ids_out_of_range():
    """Add nothing; who debugs is told."""
    module = experts()
    x, ids, w = tensors(3)
    w[1, 0] = 0
    expected = module(x, ids, w)
    ids[1, 0], w[1, 0] = EXPERTS, 1
    assert torch.equal(module(x, ids, w), expected)
    plan = gatefold.MoePlan.create(module.experts, debug_workspace=True)
    with pytest.raises(gatefold.InvalidArgument, match=r"topk_ids\[1, 0\] = 4 is not within 0..3"):
        plan.run(x, ids, w)
    gatefold.torch.debug()
    try:
        with pytest.raises(RuntimeError, match=r"topk_ids\[1, 0\] = 4 is not within 0..3"):
            module(x, ids, w)
        ids[1, 0], w[1, 0] = 0, 0
        module(x, ids, w)
    finally:
        gatefold.torch.debug(False)


def test_bad_input():
    module = experts()
    plan = gatefold.MoePlan.create(module.experts)
    x, ids, w = tensors(3)
    on_cpu = experts(device="cpu")
    for message, call in [
        ("hidden is on the CPU, expected GPU 0", lambda: module(x.cpu(), ids, w)),
        ("topk_ids is on the CPU", lambda: ops.fused_experts(x, ids.cpu(), w, module.handle)),
        ("topk_ids is I64, expected I32 on a GPU", lambda: ops.fused_experts(x, ids.long(), w, module.handle)),
        ("topk_weights is F16, expected F32 on a GPU", lambda: ops.fused_experts(x, ids, w.half(), module.handle)),
        ("hidden is on GPU 0, expected the CPU", lambda: ops.fused_experts(x, ids, w, on_cpu.handle)),
        ("packed for cuda", lambda: module.to("cpu")),
        ("packed for cpu", lambda: on_cpu.cuda()),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()
    for message, call in [
        ("hidden is on the CPU, expected GPU 0", lambda: plan.run(x.cpu(), ids, w)),
        ("topk_weights is on the CPU", lambda: plan.run(x, ids, w.cpu())),
        ("topk_ids is I64, expected I32 on a GPU", lambda: plan.run(x, ids.long(), w)),
        ("topk_weights is F16, expected F32 on a GPU", lambda: plan.run(x, ids, w.half())),
        ("out is on the CPU", lambda: plan.run(x, ids, w, out=x.cpu())),
        ("weights is on GPU 0, expected the CPU", lambda: gatefold.quantize(x, "int8")),
        ("device 99: this machine has", lambda: experts(device="cuda:99")),
    ]:
        with pytest.raises(gatefold.Error, match=message):
            call()
    with pytest.raises(gatefold.Unsupported, match="for a GPU"):
        module.experts.matrix(0, "up")
    assert module.cuda() is module


def test_threads():
    module = experts()
    plan = gatefold.MoePlan.create(module.experts)

    def call(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            y = module(*tensors(1 + i)) if i % 2 else plan.run(*tensors(1 + i))
            return y.cpu()

    assert run_in_threads([lambda i=i: call(i) for i in range(4)], torch.equal, times=20) == 0


FORKED = """
import os, sys, numpy, torch, gatefold
sys.path.insert(0, sys.argv[1])
from common import TOP_K, weights
torch.zeros(1, device="cuda")
child = os.fork()
if child == 0:
    try:
        gatefold.pack(*weights(), "int8", top_k=TOP_K, device="cuda")
        os._exit(3)
    except gatefold.Error as error:
        print(type(error).__name__, error, flush=True)
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_fork_after_torch_has_begun(request):
    done = subprocess.run([sys.executable, "-c", FORKED, str(request.path.parent)], capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 0 and "fork" in done.stdout, done.stdout + done.stderr


def in_child(queue, module):
    try:
        module(*tensors(1))
        queue.put("ran")
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


def test_fork():
    module = experts()
    module(*tensors(1))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=in_child, args=(queue, module))
    process.start()
    try:
        assert "fork" in queue.get(timeout=60).lower()
    finally:
        process.kill()
        process.join()


def test_cupy():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    module = experts()
    plan = gatefold.MoePlan.create(module.experts)
    expected = module(*tensors(3)).cpu().numpy()
    arrays = [cupy.asarray(array) for array in inputs(3)]
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        y = plan.run(*arrays)
        stream.synchronize()
    assert isinstance(y, cupy.ndarray)
    np.testing.assert_array_equal(y.get(), expected)
    packed = gatefold.pack(*map(cupy.asarray, weights()), "mxfp4", top_k=TOP_K, device="cuda")
    np.testing.assert_array_equal(gatefold.MoePlan.create(packed).run(*arrays).get(), expected)


def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import gatefold.transformers as gt
    from test_transformers import FAMILIES, GENERATE, IDS, tiny

    gt.register()
    run = lambda model: model(IDS.cuda()).logits.double().cpu().numpy()
    load = transformers.AutoModelForCausalLM.from_pretrained
    with torch.no_grad():
        for family in FAMILIES:
            model = tiny(family, torch.bfloat16).cuda()
            eager = run(model)
            model.set_experts_implementation("gatefold")
            assert 0 < relative(run(model), eager) <= 0.02, family
            assert model.generate(IDS.cuda(), **GENERATE).shape == (1, 15)
            gt.quantize_(model, "int8")
            quantized = run(model)
            assert 0 < relative(quantized, eager) <= 0.05, family
            model.save_pretrained(tmp_path / family)
            assert np.array_equal(run(load(tmp_path / family, dtype=torch.bfloat16, device_map="cuda")), quantized), family


def test_checkpoints(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import gatefold.transformers as gt

    load, ids = transformers.AutoModelForCausalLM.from_pretrained, torch.arange(64)[None].cuda()
    gatefold.quantize_checkpoint(TINY, str(tmp_path / "q"), "mxfp4")
    with torch.no_grad():
        plain = load(TINY, dtype=torch.bfloat16, device_map="cuda")(ids).logits
        direct = load(TINY, dtype=torch.bfloat16, device_map="cuda", quantization_config=gt.GatefoldConfig("mxfp4"))(ids).logits
        assert torch.equal(gt.from_pretrained(tmp_path / "q", dtype=torch.bfloat16, device_map="cuda")(ids).logits, direct)
    assert relative(direct.double().cpu().numpy(), plain.double().cpu().numpy()) <= 0.3


def test_fp8_checkpoint(tmp_path):
    """transformers quantizes a model to FP8, and leaves its experts to Gatefold."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import gatefold.transformers as gt

    gt.register()
    load, ids = transformers.AutoModelForCausalLM.from_pretrained, torch.arange(64)[None].cuda()
    plain = load(TINY, dtype=torch.bfloat16, device_map="cuda")
    dense = [name for name, part in plain.named_modules() if isinstance(part, torch.nn.Linear)]
    config = transformers.FineGrainedFP8Config(modules_to_not_convert=dense)
    model = load(TINY, dtype=torch.bfloat16, device_map="cuda", quantization_config=config, experts_implementation="gatefold")
    experts = model.model.layers[0].mlp.experts
    assert type(experts).__name__ == "FP8Experts" and experts.gate_up_proj.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        assert 0 < relative(model(ids).logits.double().cpu().numpy(), plain(ids).logits.double().cpu().numpy()) <= 0.1
    assert experts._gatefold_experts.spec.scheme == "fp8_block_afp8"

"""The package without torch: every scheme against numpy, bad input, threads, processes."""
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import gatefold
from common import EXPERTS, HIDDEN, INTERMEDIATE, TINY, TOP_K, dequantized, inputs, reference, relative, run_in_threads, weights

SCHEMES = [scheme.name for scheme in gatefold.schemes()]


def layer(scheme="mxfp4", **options):
    return gatefold.pack(*weights(), scheme, top_k=TOP_K, precision="f32", **options)


def plan(scheme="mxfp4", **options):
    return gatefold.MoePlan.create(layer(scheme), precision="f32", **options)


def test_schemes_are_those_of_the_command_line():
    listed = json.loads(subprocess.run([sys.executable, "-m", "gatefold", "schemes", "--json"], check=True,
                                       capture_output=True).stdout)
    assert [row["name"] for row in listed["schemes"]] == SCHEMES
    mxfp4 = next(scheme for scheme in gatefold.schemes() if scheme.name == "mxfp4")
    assert mxfp4.bits_per_weight() == 4.25 and mxfp4.weights == "e2m1, ue8m0 per 32" and not mxfp4.batch_dependent


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_against_numpy(scheme):
    gate_up, down = weights()
    experts = gatefold.pack(gate_up, down, scheme, top_k=TOP_K, precision="f32", weights_only=True)
    plan = gatefold.MoePlan.create(experts, max_tokens=9, precision="f32", weights_only=True, debug_workspace=True)
    x, ids, topk_weights = inputs(9)
    halves = [dequantized(half, scheme) for half in np.split(gate_up, 2, axis=1)]
    expected = reference(np.concatenate(halves, axis=1), dequantized(down, scheme), x, ids, topk_weights)
    assert relative(plan.run(x, ids, topk_weights), expected) <= 1e-4  # activations are 16-bit fixed point
    assert relative(plan.run(x, ids.astype(np.int64), topk_weights.astype(np.float16)), expected) <= 1e-3
    assert plan.run(x.astype(np.float16), ids, topk_weights).dtype == np.float16


def test_layouts_of_weights():
    gate_up, down = weights()
    x, ids, topk_weights = inputs(3)
    run = lambda experts: gatefold.MoePlan.create(experts).run(x, ids, topk_weights)
    expected = run(gatefold.pack(gate_up, down, "int4_g128", top_k=TOP_K))
    rows = gate_up.reshape(EXPERTS, 2, INTERMEDIATE, HIDDEN).swapaxes(1, 2).reshape(gate_up.shape)
    interleaved = gatefold.pack(rows, down, "int4_g128", top_k=TOP_K, interleaved=True)
    transposed = gatefold.pack(np.ascontiguousarray(rows.swapaxes(1, 2)), np.ascontiguousarray(down.swapaxes(1, 2)),
                               "int4_g128", top_k=TOP_K, interleaved=True, transposed=True)
    strided = gatefold.pack(np.repeat(gate_up, 2, axis=1)[:, ::2], down[..., ::-1].copy()[..., ::-1], "int4_g128",
                            top_k=TOP_K)
    one_by_one = gatefold.ExpertWeights.pack(
        gatefold.MoeSpec("int4_g128", experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, intermediate=INTERMEDIATE),
        lambda e, name: gatefold.quantize(
            down[e] if name == "down" else np.split(gate_up[e], 2)[name == "up"], "int4_g128"))
    for experts in (interleaved, transposed, strided, one_by_one):
        np.testing.assert_array_equal(run(experts), expected)


def test_parts_of_the_experts_add_up():
    gate_up, down = weights()
    x, ids, topk_weights = inputs(9)
    pack = lambda experts, **options: gatefold.pack(gate_up[experts], down[experts], "int4_g128", top_k=TOP_K, **options)
    parts = [pack(slice(e, e + 1), ep_size=EXPERTS) for e in range(EXPERTS)]
    assert (parts[0].spec.experts, parts[0].spec.top_k, parts[0].spec.ep_size) == (1, TOP_K, EXPERTS)
    sums = sum(gatefold.MoePlan.create(part).run(x, ids - e, topk_weights) for e, part in enumerate(parts))
    np.testing.assert_allclose(sums, gatefold.MoePlan.create(pack(slice(None))).run(x, ids, topk_weights), atol=1e-5)
    with pytest.raises(gatefold.InvalidArgument, match="one of 4 parts of the experts, and cannot route to others"):
        gatefold.MoePlan.create(parts[0]).run(x)
    with pytest.raises(gatefold.InvalidArgument, match="ep_size 0"):
        pack(slice(None), ep_size=0)


def test_parts_of_a_checkpoint_add_up():
    def run(**part):
        experts = gatefold.load_experts(TINY, layer=1, scheme="int4_g64", precision="f32", **part)
        own = ids - part.get("ep_rank", 0) * experts.spec.experts
        return gatefold.MoePlan.create(experts, max_tokens=5, precision="f32").run(x, own, topk_weights)

    spec = gatefold.load_experts(TINY, layer=1).spec
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5, spec.hidden)).astype(np.float32)
    ids = np.array([rng.permutation(spec.experts)[:spec.top_k] for _ in range(5)], np.int32)
    topk_weights = rng.random(ids.shape).astype(np.float32)
    np.testing.assert_allclose(sum(run(ep_size=2, ep_rank=rank) for rank in range(2)), run(), atol=1e-5)
    with pytest.raises(gatefold.InvalidArgument, match="ep_rank 2, ep_size 2"):
        run(ep_size=2, ep_rank=2)


def test_biases_activation_and_router():
    gate_up, down = weights()
    rng = np.random.default_rng(5)
    bias, down_bias = rng.normal(size=(EXPERTS, 2 * INTERMEDIATE)), rng.normal(size=(EXPERTS, HIDDEN))
    bias, down_bias = bias.astype(np.float32), down_bias.astype(np.float32)
    router = rng.normal(size=(EXPERTS, HIDDEN)).astype(np.float32)
    x, _, _ = inputs(5)
    experts = gatefold.pack(gate_up, down, "bf16", top_k=TOP_K, router=router, gate_up_bias=bias, down_bias=down_bias,
                            activation=gatefold.Activation("swiglu", alpha=1.702, beta=1.0, limit=7.0),
                            routing=gatefold.Routing(score="softmax", renormalize=True), precision="f32")
    plan = gatefold.MoePlan.create(experts, precision="f32")
    logits = x @ router.T
    gate_up, down = dequantized(gate_up, "bf16"), dequantized(down, "bf16")
    expected = np.zeros((5, HIDDEN))
    for t in range(5):
        ids = np.argsort(-logits[t], kind="stable")[:TOP_K]
        p = np.exp(logits[t] - logits[t].max())[ids]
        for e, w in zip(ids, p / p.sum()):
            g, u = np.split(gate_up[e].astype(np.float64) @ x[t] + bias[e], 2)
            g, u = np.minimum(g, 7), np.clip(u, -7, 7)
            expected[t] += w * (down[e] @ (g / (1 + np.exp(-1.702 * g)) * (u + 1)) + down_bias[e])
    assert relative(plan.run(x, logits), expected) <= 1e-5
    assert relative(plan.run(x, router_logits=logits), expected) <= 1e-5
    assert relative(plan.run(x), expected) <= 1e-5


def test_checkpoint_layer_runs_and_is_kept_by_the_plan():
    plan = gatefold.MoePlan.create(gatefold.load_experts(TINY, 0, "int4_g128"), max_tokens=4)
    assert plan.experts.spec.scheme == "int4_g128" and plan.experts.spec.hidden == 256
    x = np.ones((4, 256), np.float32)
    first = plan.run(x)
    assert np.isfinite(first).all() and plan.kernel_name.endswith(".int4_g128")
    assert "workspace" in plan.describe() and plan.workspace_bytes(8) > plan.workspace_bytes() > 0
    out = np.empty_like(x)
    assert plan.run(x, out=out) is out
    np.testing.assert_array_equal(out, first)
    assert plan.run(np.empty((0, 256), np.float32)).shape == (0, 256)


def test_other_tokens_change_nothing():
    p = plan("int4_g128_aint8", batch_invariant=True)
    x, ids, topk_weights = inputs(33)
    together = p.run(x, ids, topk_weights)
    for part in (slice(0, 1), slice(1, 8), slice(8, 33)):
        np.testing.assert_array_equal(p.run(x[part], ids[part], topk_weights[part]), together[part])


def test_weights_may_go_after_packing():
    gate_up, down = weights()
    experts = gatefold.pack(gate_up, down, "int8", top_k=TOP_K)
    plan = gatefold.MoePlan.create(experts)
    x, ids, topk_weights = inputs(2)
    before = plan.run(x, ids, topk_weights)
    gate_up[:] = np.nan
    down.resize((0,), refcheck=False)
    del gate_up, down, experts
    np.testing.assert_array_equal(plan.run(x, ids, topk_weights), before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrix_from_its_parts(scheme):
    w = weights()[1][0]
    q = gatefold.quantize(w, scheme)
    again = gatefold.QuantizedMatrix(scheme, q.n, q.k, q.values, q.scales, q.zero_points, q.tensor_scale,
                                     q.tensor_scale_divides)
    np.testing.assert_array_equal(again.dequantize(), q.dequantize())
    with pytest.raises(gatefold.InvalidArgument, match="values is .* bytes, expected"):
        gatefold.QuantizedMatrix(scheme, q.n, q.k, q.values[:-1], q.scales, q.zero_points, q.tensor_scale)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_matrices_come_back(scheme):
    gate_up, down = weights()
    experts = layer(scheme)
    for projection, w in zip(("gate", "up", "down"), (*np.split(gate_up[3], 2), down[3])):
        q, back = gatefold.quantize(w, scheme), experts.matrix(3, projection)
        for part in ("values", "scales", "zero_points"):
            np.testing.assert_array_equal(getattr(back, part), getattr(q, part))
        assert (back.tensor_scale, back.tensor_scale_divides) == (q.tensor_scale, q.tensor_scale_divides)


def test_names():
    experts = layer()
    handle = experts.publish("a")
    assert handle == experts.publish("a") != experts.publish("b")
    with pytest.raises(gatefold.InvalidArgument, match="'a' is the name of other weights"):
        layer().publish("a")
    del experts
    assert layer().publish("a") == handle


def test_checkpoint_without_its_shared_expert(tmp_path):
    alone = gatefold.load_experts(TINY, 0, "int8", shared_expert=False)
    assert alone.spec.shared_intermediate == 0


@pytest.mark.parametrize("scheme", [s.name for s in gatefold.schemes() if s.quantizes_activations])
def test_products(scheme):
    w, x = gatefold.quantize(weights()[1][0], scheme), inputs(6)[0]
    a = gatefold.quantize_activation(x, scheme)
    assert a.rows == 6 and a.k == HIDDEN and a.values.shape[0] == 6
    y = gatefold.scaled_mm(a, w)
    assert relative(y, x @ w.dequantize().T) <= (0.2 if scheme == "nvfp4_anvfp4" else 0.06)
    grouped = gatefold.grouped_gemm(x, [0, 2, 2, 6], [w, w, w])
    if scheme != "fp8_tensor_afp8":  # one scale for the tensor
        np.testing.assert_allclose(grouped, y, rtol=1e-5, atol=1e-5)
    with pytest.raises(gatefold.InvalidArgument, match="offsets"):
        gatefold.grouped_gemm(x, [0, 4, 2, 6], [w, w, w])


def test_grouped_gemm_holds_what_a_sequence_gives():
    weights = np.random.default_rng(2).standard_normal((64, HIDDEN)).astype(np.float32)

    class Fresh(list):
        def __iter__(self):
            return (gatefold.quantize(weights, "int8") for _ in range(3))

    x = np.random.default_rng(3).standard_normal((6, HIDDEN)).astype(np.float32)
    w = gatefold.quantize(weights, "int8")
    np.testing.assert_array_equal(gatefold.grouped_gemm(x, [0, 2, 2, 6], Fresh()),
                                  gatefold.grouped_gemm(x, [0, 2, 2, 6], [w, w, w]))


def test_matrices_are_packed_for_gpus():
    w = gatefold.quantize(weights()[1][0], "int8")
    with pytest.raises(TypeError, match=r"matrices\[1\] is a <class 'NoneType'>, expected a QuantizedMatrix"):
        gatefold.LinearWeights.pack([w, None])
    with pytest.raises(TypeError, match=r"weights\[0\] is a <class 'int'>"):
        gatefold.grouped_gemm(inputs(1)[0], [0, 1], [1])
    if not gatefold.has_cuda:
        for matrices in (w, [w, w], iter([w])):
            with pytest.raises(gatefold.Unsupported, match="no CUDA"):
                gatefold.LinearWeights.pack(matrices)


def test_hidden_states_that_are_quantized():
    """As bytes, and as what they are; on a CPU their form alone is looked at."""
    x, ids, w = inputs(3)
    for scheme, codes, scales in (("int8_aint8", np.int8, np.float32), ("nvfp4_anvfp4", np.uint8, np.uint8)):
        p, q = plan(scheme), gatefold.quantize_activation(x, scheme)
        for form in (np.uint8, codes):
            given = {"hidden_scales": q.scales.view(scales), "hidden_token_scales": q.token_scales}
            with pytest.raises(gatefold.InvalidArgument, match="hidden_scales are for GPUs only"):
                p.run(q.values.view(form), ids, w, out=np.empty_like(x), **given)


def test_no_tokens_of_16_bits():
    x, ids, w = inputs(0)
    assert plan().run(x, ids.astype(np.int64), w.astype(np.float16)).shape == (0, HIDDEN)


def bad_calls():
    x, ids, w = inputs(3)
    p, fp4 = plan(max_tokens=4), plan("nvfp4_anvfp4")
    q = gatefold.quantize_activation(x, "nvfp4_anvfp4")
    of_fp4 = lambda hidden=q.values, scales=q.scales, token_scales=q.token_scales: fp4.run(
        hidden, ids, w, hidden_scales=scales, hidden_token_scales=token_scales)
    wide = np.zeros((3, 2 * HIDDEN), np.float32)
    read_only = np.zeros_like(x)
    read_only.flags.writeable = False
    return [
        ("hidden is F64", lambda: p.run(x.astype(np.float64), ids, w)),
        (r"hidden is F32 \[128\]", lambda: p.run(x[0], ids, w)),
        (r"hidden is F32 \[3, 64\].*128", lambda: p.run(np.ascontiguousarray(x[:, :64]), ids, w)),
        (r"hidden is F32 \[3, 0\]", lambda: p.run(x[:, :0], ids, w)),
        ("hidden has 9 dimensions", lambda: p.run(x.reshape((1,) * 7 + x.shape), ids, w)),
        ("experts 0", lambda: gatefold.pack(*(a[:0] for a in weights()), "mxfp4", top_k=1)),
        (r"hidden .*strides \[256, 2\]", lambda: p.run(wide[:, ::2], ids, w)),
        ("topk_ids is F32", lambda: p.run(x, ids.astype(np.float32), w)),
        (r"topk_ids is I32 \[2, 2\].*\[3, 2\]", lambda: p.run(x, ids[:2], w)),
        (r"topk_ids\[0, 0\] = 4 is not within 0..3", lambda: p.run(x, np.full_like(ids, 4), w)),
        (r"topk_ids\[0, 0\] = -1", lambda: p.run(x, np.full_like(ids, -1), w)),
        (r"= 4294967296", lambda: p.run(x, np.full((3, 2), 1 << 32), w)),
        ("topk_weights is I64", lambda: p.run(x, ids, w.astype(np.int64))),
        (r"router_logits is F32 \[3, 2\]", lambda: p.run(x, w)),
        ("no router", lambda: p.run(x)),
        ("go together", lambda: p.run(x, topk_weights=w)),
        ("5 tokens", lambda: p.run(*inputs(5))),
        ("out is read-only", lambda: p.run(x, ids, w, out=read_only)),
        (r"out \[3, 128\] has strides \[256, 2\]", lambda: p.run(x, ids, w, out=wide[:, ::2])),
        (r"topk_weights \[3, 2\] has strides \[4, 2\]", lambda: p.run(x, ids, np.zeros((3, 4), np.float32)[:, ::2])),
        (r"out is F32 \[3, 256\]", lambda: p.run(x, ids, w, out=wide)),
        ("no scheme 'int5'", lambda: layer("int5")),
        ("k = 100 is not a multiple", lambda: gatefold.quantize(np.zeros((4, 100), np.float32), "int4_g128")),
        (r"NaN at \[0, 0\]", lambda: gatefold.quantize(np.full((1, 128), np.nan, np.float32), "int4_g128")),
        ("expert 0, gate: NaN", lambda: gatefold.pack(*(np.full_like(a, np.nan) for a in weights()), "mxfp4", top_k=1)),
        ("down is F32", lambda: gatefold.pack(weights()[0], weights()[0], "mxfp4", top_k=1)),
        ("rows cannot be gate and up", lambda: gatefold.pack(weights()[0][:, :3], weights()[1], "mxfp4", top_k=1)),
        ("top_k", lambda: gatefold.pack(*weights(), "mxfp4", top_k=5)),
        (r"router is F32 \[4, 1\]", lambda: layer(router=np.zeros((4, 1), np.float32))),
        ("device = 'tpu'", lambda: layer(device="tpu")),
        ("precision = 'f64'", lambda: gatefold.MoePlan.create(layer(), precision="f64")),
        ("max_tokens = 0", lambda: plan(max_tokens=0)),
        ("kind = 'relu'", lambda: gatefold.Activation("relu")),
        ("layer 9", lambda: gatefold.load_experts(TINY, 9)),
        ("leaves activations in 16 bit", lambda: gatefold.quantize_activation(x, "mxfp4")),
        ("projection = 'side'", lambda: layer().matrix(0, "side")),
        ("expert 4 is not within 0..3", lambda: layer().matrix(4, "up")),
        ("device = 'cpu': .* gatefold.scaled_mm", lambda: gatefold.LinearWeights.pack([], device="cpu")),
        ("mxfp4 leaves activations in 16 bit", lambda: p.run(x, ids, w, hidden_scales=w)),
        (r"hidden is F32 \[3, 128\], expected U8 \[3, 64\]", lambda: of_fp4(hidden=x)),
        (r"hidden_scales is U8 \[2, 8\], expected U8 \[3, 8\] or F8_E4M3 \[3, 8\]", lambda: of_fp4(scales=q.scales[:2])),
        ("hidden_scales is given without token scales", lambda: of_fp4(token_scales=None)),
        (r"hidden_token_scales is F32 \[2\].*\[3\]", lambda: of_fp4(token_scales=q.token_scales[:2])),
        (r"hidden_token_scales is I32, expected F32", lambda: of_fp4(token_scales=q.token_scales.view(np.int32))),
        ("hidden_token_scales is given without scales", lambda: of_fp4(scales=None)),
        (r"hidden \[3, 64\] has strides", lambda: of_fp4(hidden=np.zeros((3, 128), np.uint8)[:, ::2])),
        ("method = 'magic'", lambda: gatefold.quantize_checkpoint(TINY, "/tmp/none", "mxfp4", method="magic")),
    ]


@pytest.mark.parametrize("index", range(len(bad_calls())))
def test_bad_input(index):
    message, call = bad_calls()[index]
    with pytest.raises(gatefold.InvalidArgument, match=message) as raised:
        call()
    assert isinstance(raised.value, ValueError) and isinstance(raised.value, gatefold.Error)


def test_other_errors():
    with pytest.raises(TypeError, match="hidden is a <class 'list'>"):
        plan().run([[1.0]])
    with pytest.raises(gatefold.IoError, match="/nowhere"):
        gatefold.load_experts("/nowhere", 0)
    if not gatefold.has_cuda:
        with pytest.raises(gatefold.Unsupported, match="CUDA"):
            layer(device="cuda")
    with pytest.raises(ZeroDivisionError):
        gatefold.ExpertWeights.pack(layer().spec, lambda e, name: 1 // 0)


@pytest.mark.parametrize("shared", [True, False])
def test_threads(shared):
    """Four threads with a plan each, or with one: the same bits as alone."""
    plans = [plan(threads=2)] * 4 if shared else [plan(threads=2) for _ in range(4)]
    calls = [lambda p=p, i=i: p.run(*inputs(1 + i, i)) for i, p in enumerate(plans)]
    assert run_in_threads(calls, np.array_equal, times=100) == 0


def test_other_threads_go_on():
    """While C++ computes: the interpreter is released."""
    experts, tokens = layer("int8"), 1024
    stamps, done = [], threading.Event()

    def stamp():
        while not done.wait(0.001):
            stamps.append(time.monotonic())

    thread = threading.Thread(target=stamp)
    thread.start()
    took = 0
    while took < 0.3:  # long enough to be seen
        tokens *= 2
        p, call = gatefold.MoePlan.create(experts, max_tokens=tokens, precision="f32"), inputs(tokens)
        start = time.monotonic()
        p.run(*call)
        took = time.monotonic() - start
    done.set()
    thread.join()
    assert sum(start < at < start + took for at in stamps) >= 5


def run_in_child(queue):
    try:
        plan().run(*inputs(1))
        queue.put("ran")
    except gatefold.Error as error:
        queue.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(method):
    plan().run(*inputs(1))
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=run_in_child, args=(queue,))
    process.start()
    try:
        said = queue.get(timeout=60)
    finally:
        process.kill()
        process.join()
    assert said == "ran" if method == "spawn" else said.startswith("Unsupported: this process was forked")


def test_quantize_checkpoint(tmp_path):
    told = []
    report = gatefold.quantize_checkpoint(TINY, str(tmp_path / "q"), "mxfp4",
                                          progress=lambda done, total: told.append((done, total)))
    assert report.written_bytes < report.source_bytes and told[-1][0] == told[-1][1] > 0
    x = np.ones((2, 256), np.float32)
    run = lambda *of: gatefold.MoePlan.create(gatefold.load_experts(*of)).run(x)
    np.testing.assert_array_equal(run(str(tmp_path / "q"), 0), run(TINY, 0, "mxfp4"))
    with pytest.raises(gatefold.Error, match="exists"):
        gatefold.quantize_checkpoint(TINY, str(tmp_path / "q"), "mxfp4")
    with pytest.raises(KeyError):
        gatefold.quantize_checkpoint(TINY, str(tmp_path / "r"), "mxfp4", progress=lambda done, total: {}[done])


def test_interrupt_stops_a_long_call(tmp_path):
    """Ctrl-C while a checkpoint is quantized: KeyboardInterrupt, and nothing is left."""
    out = tmp_path / "out"
    tokens = list(open(TINY + "/calibration.txt", "rb").read(1 << 17))
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what they run in the background
    try:
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            gatefold.quantize_checkpoint(TINY, str(out), "int4_g128", method="gptq", tokens=tokens)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 30 and not out.exists()


def test_import_is_quick():
    code = "import numpy, time; t = time.time(); import gatefold; print(time.time() - t)"
    times = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
             for _ in range(3)]
    assert min(times) < 0.2

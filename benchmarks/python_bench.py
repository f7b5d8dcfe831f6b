"""What the Python package costs and gains, beside transformers' own experts (needs torch and transformers):

    python benchmarks/python_bench.py [overhead] [model] [layer] [memory]

Ways of doing the same take turns, and each gets its median of many runs: what else the machine does hits all of them.
"""
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import gatefold
import gatefold.torch
import gatefold.transformers

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = ROOT / "models/tiny-moe"


def medians(calls, seconds=3.0, most=2000, between=lambda: None, burst=1):
    """us of each call, in turns of so many calls in a row; `between` is called before each turn and not timed."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end and len(next(iter(times.values()))) < most:
        for name, call in calls.items():
            between()
            start = time.perf_counter()
            for _ in range(burst):
                call()
            times[name].append((time.perf_counter() - start) / burst)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def table(title, columns, rows):
    print(f"\n{title}\n\n| | " + " | ".join(map(str, columns)) + " |\n|---|" + "---:|" * len(columns))
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + " |")


def overhead():
    """A call with no tokens: all that happens before and after the kernel. On a GPU also one token: with the launches,
    but without waiting for them, in bursts that the queue holds (it is emptied outside of what is timed)."""
    weights = [torch.randn(4, 256, 128), torch.randn(4, 128, 128)]
    op, rows = torch.ops.gatefold.fused_experts, {}
    for device in ("cpu", "cuda") if gatefold.has_cuda and torch.cuda.is_available() else ("cpu",):
        module = gatefold.torch.Experts.quantize(*weights, "int4_g128", top_k=2, device=device)
        plan = gatefold.MoePlan.create(module.experts)
        for tokens in (0,) if device == "cpu" else (0, 1):
            arrays = np.zeros((tokens, 128), np.float32), np.zeros((tokens, 2), np.int32), np.zeros((tokens, 2), np.float32)
            tensors = [torch.from_numpy(array).to(device) for array in arrays]
            out, handle = torch.empty_like(tensors[0]), module.handle
            calls = {"torch.empty_like": lambda: torch.empty_like(out), "plan.run, torch": lambda: plan.run(*tensors),
                     "plan.run, torch, out": lambda: plan.run(*tensors, out=out), "torch.ops.gatefold.fused_experts": lambda: op(*tensors, handle)}
            if device == "cpu":
                calls |= {"plan.run, numpy": lambda: plan.run(*arrays), "plan.run, numpy, out": lambda: plan.run(*arrays, out=arrays[0])}
            between = torch.cuda.synchronize if device == "cuda" else lambda: None
            times = medians(calls, most=2000, between=between, burst=20)
            rows |= {f"{device}, {tokens} tokens: {name}": [value] for name, value in times.items()}
    table("Overhead of a call, us", ["us"], rows)


def model():
    """tiny-moe, bf16: one forward pass of so many tokens."""
    gatefold.transformers.register()
    models = {}
    for name in ("eager", "grouped_mm", "gatefold"):
        models[name] = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16, experts_implementation=name).eval()
    counts = (1, 16, 512)
    rows = {name: [] for name in models}
    for tokens in counts:
        ids = torch.arange(tokens)[None] % 256
        with torch.no_grad():
            for name, value in medians({name: lambda m=m: m(ids, use_cache=False) for name, m in models.items()}).items():
                rows[name].append(value)
    table("tiny-moe through transformers, bf16, us a forward pass of so many tokens", counts, rows)
    text = torch.tensor(list((TINY / "valid.txt").read_bytes()[:16384])).reshape(-1, 512)
    with torch.no_grad():
        for name, m in models.items():
            logits = m(text).logits[:, :-1].float().flatten(0, 1)
            print(f"{name}: {torch.nn.functional.cross_entropy(logits, text[:, 1:].flatten()).item() / np.log(2):.5f} bits per byte")


def layer():
    """The experts of a layer of Qwen3-30B-A3B, random weights."""
    config = Qwen3MoeConfig(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8)
    modules = {}
    config._experts_implementation = "eager"
    eager = Qwen3MoeExperts(config).to(torch.bfloat16).eval()
    for parameter in eager.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.requires_grad_(False)
    modules["eager"] = eager
    for scheme in ("bf16", "int4_g128"):
        modules[f"gatefold {scheme}"] = gatefold.transformers.QuantizedExperts.of(eager, 8, scheme).drop_state()
    counts = (1, 16, 512)
    rows = {name: [] for name in modules}
    for tokens in counts:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(tokens, 2048, generator=generator).bfloat16()
        weights, ids = torch.rand(tokens, 128, generator=generator).topk(8)
        weights = (weights / weights.sum(-1, keepdim=True)).bfloat16()
        with torch.no_grad():
            for name, value in medians({n: lambda m=m: m(x, ids, weights) for n, m in modules.items()}).items():
                rows[name].append(value)
    table("Experts of a Qwen3-30B-A3B layer, bf16 activations, us", counts, rows)


def memory():
    """Most memory while a model is quantized, beyond what it held before; each in a process of its own."""
    config = Qwen3MoeConfig(vocab_size=256, hidden_size=1024, moe_intermediate_size=512, intermediate_size=512,
                            num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4, num_experts=64,
                            num_experts_per_tok=4)
    with tempfile.TemporaryDirectory() as directory:
        Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
        print(f"\nMemory beside what was there before, MB (experts of a layer: {64 * 3 * 1024 * 512 * 2 / 1e6:.0f})\n\n"
              "| | at most | after |\n|---|---:|---:|")
        for how in PEAKS:
            program = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import python_bench as b; b.peak({directory!r}, {how!r})"
            subprocess.run([sys.executable, "-c", program], check=True)


PEAKS = ("from_pretrained", "quantize_", "from_pretrained with GatefoldConfig")


def peak(directory, how):
    sys.path.append(str(ROOT / "python/tests"))
    from common import Peak

    options = {"quantization_config": gatefold.transformers.GatefoldConfig("mxfp4")} if how == PEAKS[2] else {}
    load = lambda: AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options)
    model = load() if how == "quantize_" else None
    with Peak() as held:
        model = load() if model is None else gatefold.transformers.quantize_(model, "mxfp4")
    print(f"| `{how}` | {held.most / 1e6:.0f} | {held.after / 1e6:.0f} |")


if __name__ == "__main__":
    for part in sys.argv[1:] or ["overhead", "model", "layer", "memory"]:
        {"overhead": overhead, "model": model, "layer": layer, "memory": memory}[part]()

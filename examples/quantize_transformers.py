"""Loss, size and speed of a transformers model with its experts in several schemes:

    python examples/quantize_transformers.py [DIR] [--schemes int8,int4_g128,mxfp4] [--tokens 4096] [--plot FILE]

DIR is a byte-level model with a valid.txt (models/tiny-moe). A plot of size against loss needs matplotlib.
"""
import argparse
import copy
import pathlib
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import gatefold
import gatefold.transformers

parser = argparse.ArgumentParser()
parser.add_argument("DIR", nargs="?", default="models/tiny-moe", type=pathlib.Path)
parser.add_argument("--schemes", default="int8,int4_g128,mxfp4", type=lambda text: text.split(","))
parser.add_argument("--tokens", default=4096, type=int)
parser.add_argument("--plot", type=pathlib.Path)
options = parser.parse_args()

WINDOW = 512
text = (options.DIR / "valid.txt").read_bytes()[: options.tokens // WINDOW * WINDOW]
windows = torch.tensor(list(text)).reshape(-1, WINDOW)


def measure(model):
    """Bits per byte, and tokens per second."""
    with torch.no_grad():
        model(windows[:1])
        start = time.perf_counter()
        logits = torch.cat([model(window[None]).logits[0, :-1].float() for window in windows])
        seconds = time.perf_counter() - start
    loss = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten()).item()
    return loss / np.log(2), windows.numel() / seconds


model = AutoModelForCausalLM.from_pretrained(options.DIR, dtype=torch.bfloat16, experts_implementation="eager").eval()
bits = {scheme.name: scheme.bits_per_weight() for scheme in gatefold.schemes()}
rows = [("eager", 16.0, *measure(model))]
for scheme in options.schemes:
    quantized = gatefold.transformers.quantize_(copy.deepcopy(model), scheme)
    rows.append((scheme, bits[scheme], *measure(quantized)))

print(f"{'experts':<18}{'bits/weight':>12}{'bits/byte':>12}{'tokens/s':>10}")
for name, size, loss, speed in rows:
    print(f"{name:<18}{size:12.3f}{loss:12.4f}{speed:10.0f}")

if options.plot:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, size, loss, _ in rows:
        axes.plot(size, loss, "o")
        axes.annotate(name, (size, loss), textcoords="offset points", xytext=(4, 4))
    axes.set_xlabel("bits per weight of the experts")
    axes.set_ylabel("bits per byte")
    figure.tight_layout()
    figure.savefig(options.plot)
    print(f"wrote {options.plot}")

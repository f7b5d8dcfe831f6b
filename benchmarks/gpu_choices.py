#!/usr/bin/env python3
"""How much what the model chooses on the GPU loses: gpu_choices.py TOOL [--layers L,..] [--schemes S,..] [--tokens T,..]

Runs `gatefold tune` (into a file that is thrown away). A line for each choice that takes longer than another candidate by 3 %
or more; then how many times as long as the best candidate choices take, in the geometric mean and at worst.
"""
import argparse
import statistics
import subprocess
import sys
import tempfile

from gpu_table import LAYERS, run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("--layers", default=",".join(layer for layer in LAYERS if "," not in layer))
    parser.add_argument("--schemes", help="all that fit, if not given")
    parser.add_argument("--tokens", default="1,4,16,64,128,512,2048,4096")
    arguments = parser.parse_args()

    schemes = arguments.schemes.split(",") if arguments.schemes else [
        row["name"] for row in run(arguments.tool, "schemes")["schemes"]
    ]
    losses = []
    print("| layer | scheme | tokens | chosen | us | best | us | times |\n|---|---|---:|---|---:|---|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for layer in arguments.layers.split(","):
            for scheme in schemes:
                try:
                    rows = run(arguments.tool, "tune", "--backend", "cuda", "--model", layer, "--scheme", scheme, "--tokens",
                               arguments.tokens, "--weight-bytes", "300MB", "-o", f"{folder}/tuning.json")
                except subprocess.CalledProcessError as error:  # as a scheme that these widths do not fit
                    print(f"{layer}, {scheme}: {error.stderr.decode().strip()}", flush=True)
                    continue
                for row in rows["rows"]:
                    best = min(row["candidates"], key=lambda candidate: candidate["us"])
                    losses.append(row["us_default"] / best["us"])
                    if losses[-1] >= 1.03:
                        print(f"| {layer} | `{scheme}` | {row['tokens']} | {row['default']} | {row['us_default']:.1f} | "
                              f"{best['tuning']} | {best['us']:.1f} | {losses[-1]:.3f} |", flush=True)
    if not losses:
        sys.exit("No choice was measured.")
    print(f"\n{len(losses)} choices: {statistics.geometric_mean(losses):.3f} times the best candidate's time in the mean, "
          f"{max(losses):.3f} at worst.")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What multiplies on the GPU are busy with: gpu_counters.py TOOL [--layers L,..] [--schemes S,..] [--tokens T,..]

Runs `gatefold bench` under ncu (Nsight Compute), clocks as they are. A row has the multiplies of a layer, us (of gate and up,
and of down; or of two calls that have one launch each), and their means by time: the clock of multiprocessors, and, in per
cent of what each could do, memory, the L2 cache, shared memory, tensor cores, the units of masks and shifts, and the issue of
instructions.
"""
import argparse
import csv
import subprocess

from gpu_table import LAYERS, MANY_TOKENS, many_schemes

TIME, CLOCK = "gpu__time_duration.sum", "sm__cycles_elapsed.avg.per_second"
PEAK = ".avg.pct_of_peak_sustained_elapsed"
# Of several counters the largest; and by how much: tensor cores' peak is that of sparse operands.
COLUMNS = {
    "memory": (["dram__throughput"], 1),
    "L2": (["lts__throughput"], 1),
    "shared": (["l1tex__data_pipe_lsu_wavefronts"], 1),
    "tensor": ([f"sm__ops_path_tensor_src_{kind}" for kind in ("bf16_dst_fp32", "fp16", "fp8", "int8")], 2),
    "masks": (["sm__inst_executed_pipe_alu"], 1),
    "issue": (["sm__issue_active"], 1),
}


def counters(tool, layer, scheme, tokens):
    """Of two launches in a row, numbers by counter."""
    name, *options = scheme.split()
    names = [counter + PEAK for of_column, _ in COLUMNS.values() for counter in of_column]
    out = subprocess.run(
        ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--cache-control", "none",
         "--kernel-name", "regex:^moe_", "--launch-skip", "4", "--launch-count", "2",
         "--metrics", ",".join([TIME, CLOCK, *names]),
         tool, "bench", "--backend", "cuda", "--model", layer, "--scheme", name, *options, "--tokens", str(tokens),
         "--from", "ids", "--seconds", "0.001", "--weight-bytes", "300MB"],
        stdout=subprocess.PIPE, text=True, check=True).stdout
    header, _, *rows = csv.reader(out[out.index('"ID"'):].splitlines())
    return [{name: float(row[header.index(name)].replace(",", "")) for name in [TIME, CLOCK, *names]} for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("--layers", default=",".join(layer for layer in LAYERS if "," not in layer))
    parser.add_argument("--schemes", help="of those of gpu_table.py --many")
    parser.add_argument("--tokens", default=",".join(map(str, MANY_TOKENS)))
    arguments = parser.parse_args()
    print("| layer | scheme | tokens | us | MHz | " + " | ".join(COLUMNS) + " |\n|---|---|" + "---:|" * (3 + len(COLUMNS)))
    for layer in arguments.layers.split(","):
        for scheme in many_schemes(layer):
            if arguments.schemes and scheme not in arguments.schemes.split(","):
                continue
            for tokens in arguments.tokens.split(","):
                rows = counters(arguments.tool, layer, scheme, tokens)
                us = sum(row[TIME] for row in rows)

                def mean(name):
                    return sum(row[name] * row[TIME] for row in rows) / us

                cells = [f"{factor * max(mean(name + PEAK) for name in names):.0f}" for names, factor in COLUMNS.values()]
                times = " + ".join(f"{row[TIME] / 1e3:.0f}" for row in rows)
                print(f"| {layer} | `{scheme}` | {tokens} | {times} | {mean(CLOCK) / 1e6:.0f} | " + " | ".join(cells) + " |",
                      flush=True)


if __name__ == "__main__":
    main()

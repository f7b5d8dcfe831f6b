#!/usr/bin/env python3
"""Times MoE layers on the GPU and prints them beside their bars: gpu_table.py TOOL [--quick] [--json FILE]

A cell is the time of a call in us and, in brackets, its ratio to the bar: what reading the weights or multiplying takes
(the larger, measured in the same run), and a few per cent and us more. --quick: two layers, fewer token counts.
"""
import argparse
import json
import subprocess

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128]
# The arguments of gatefold bench for a layer, its experts and experts per token, and the schemes.
COMMON = ["int4_g128", "int4_g128_afp8", "mxfp4", "nvfp4", "fp8_block", "fp8_block_afp8"]
LAYERS = {
    "qwen3-30b-a3b": (128, 8, COMMON),
    "gpt-oss-120b": (128, 4, ["mxfp4", "int4_g32", "fp8_channel", "fp8_channel_afp8"]),
    "deepseek-v3": (32, 8, COMMON),
    "mixtral-8x7b": (8, 2, COMMON),
    "deepseek-v4-pro": (48, 6, COMMON),
    "2048,512,256,8": (256, 8, ["fp8_block_afp8"]),
}
QUICK = {"qwen3-30b-a3b": ["int4_g128"], "deepseek-v3": ["int4_g128", "fp8_block_afp8"]}


def bar(floor, bits, tokens, experts, top_k):
    """us, or None: where an expert has more than 16 tokens, and for 16-bit weights, there is no bar."""
    if bits > 9 or tokens * top_k > 16 * experts:
        return None
    if tokens == 1:
        return floor + 5
    few = tokens <= 32
    factor = (1.06 if few else 1.10) if bits < 5 else (1.04 if few else 1.05)
    return factor * floor + 4


def cell(row, limit):
    return f"{row['us_median']:.1f}" + (f" ({row['us_median'] / limit:.2f})" if limit else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", help="where all rows of gatefold bench go")
    arguments = parser.parse_args()

    def tool(*command):
        return json.loads(subprocess.run([arguments.tool, *command, "--json"], capture_output=True, check=True).stdout)

    bits = {row["name"]: row["bits_per_weight"] for row in tool("schemes")["schemes"]}
    tokens = TOKENS[::3] if arguments.quick else TOKENS
    rows, within, bars = [], 0, 0
    print("| layer | scheme | from | " + " | ".join(map(str, tokens)) + " |\n|---|---|---|" + "---:|" * len(tokens))
    for layer, (experts, top_k, schemes) in LAYERS.items():
        if arguments.quick and layer not in QUICK:
            continue
        for scheme in QUICK[layer] if arguments.quick else schemes:
            done = tool("bench", "--backend", "cuda", "--shape" if "," in layer else "--model", layer, "--scheme", scheme,
                        "--tokens", ",".join(map(str, tokens)), "--from", "ids,logits")["rows"]
            rows += [{"layer": layer, **row} for row in done]
            floors = {row["tokens"]: row["us_floor"] for row in done if row["from"] == "ids"}
            limits = {t: bar(floors[t], bits[scheme], t, experts, top_k) for t in tokens}
            print(f"| {layer} | `{scheme}` | *floor* | " + " | ".join(f"{floors[t]:.1f}" for t in tokens) + " |")
            for way in "ids", "logits":
                cells = [row for row in done if row["from"] == way]
                bars += sum(limits[row["tokens"]] is not None for row in cells)
                within += sum((limits[row["tokens"]] or 0) >= row["us_median"] for row in cells)
                print(f"| | | {way} | " + " | ".join(cell(row, limits[row["tokens"]]) for row in cells) + " |", flush=True)
    clocks = sorted({(row["sm_mhz"], row["memory_mhz"]) for row in rows})
    rates = {round(row["multiply_gflop_per_s"] / 1e3) for row in rows}
    print(f"\n{within} of {bars} cells within their bars. Clocks, SM and memory MHz: from {clocks[0]} to {clocks[-1]}. "
          f"cuBLAS: {min(rates)} to {max(rates)} TFLOP/s.")
    for message in sorted({row["unmeasured"] for row in rows} - {""}):
        print("Not measured:", message)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

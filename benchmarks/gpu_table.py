#!/usr/bin/env python3
"""Times MoE layers on the GPU and prints them beside their bars: gpu_table.py TOOL [--quick | --many] [--json FILE]

A cell is the time of a call in us and, in brackets, its ratio to the bar: what reading the weights or multiplying takes
(the larger, measured in the same run), and a few per cent and us more. Then, from ids, how many times as fast as the
best of the other kernels that were measured. --quick: two layers, fewer token counts; --many: 64 tokens and more, from ids.
"""
import argparse
import json
import math
import subprocess

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128]
MANY_TOKENS = [64, 128, 512, 4096, 16384]
# The arguments of gatefold bench for a layer, its experts and experts per token, and the schemes, with options.
COMMON = ["int4_g128", "int4_g128_afp8", "mxfp4", "mxfp4_afp8", "nvfp4", "fp8_block", "fp8_block_afp8"]
LAYERS = {
    "qwen3-30b-a3b": (128, 8, COMMON),
    "gpt-oss-120b": (128, 4, ["mxfp4", "mxfp4_afp8", "int4_g32", "fp8_channel", "fp8_channel_afp8"]),
    "deepseek-v3": (32, 8, COMMON),
    "mixtral-8x7b": (8, 2, COMMON),
    "deepseek-v4-pro": (48, 6, COMMON),
    "2048,512,256,8": (256, 8, ["fp8_block_afp8"]),
}
QUICK = {"qwen3-30b-a3b": ["int4_g128"], "deepseek-v3": ["int4_g128", "fp8_block_afp8"]}
FAST = "fp8_channel_afp8 --fast-accumulation"
MANY = ["int4_g128", "int4_g128_afp8", "mxfp4_afp8", "fp8_block", "fp8_channel_afp8", FAST, "int8_aint8"]

# us of the best other kernel of a class, measured on an H200 on 2026-11-21 (docs/performance.md says which).
RIVAL_TOKENS = [1, 8, 32, 128, 512, 4096]
RIVALS = {
    "W4A16": {"qwen3-30b-a3b": [24.1, 57.9, 100.2, 121.8, 166.9, 655.8],
              "gpt-oss-120b": [35.9, 135.9, 318.1, 488.9, 597.4, 1544.6],
              "deepseek-v3": [66.8, 192.8, 240.9, 300.5, 616.6, 4444.8],
              "mixtral-8x7b": [70.9, 193.0, 261.1, 335.1, 604.2, 4447.3],
              "deepseek-v4-pro": [75.6, 317.6, 455.1, 550.3, 915.6, 5280.3]},
    "W8A16": {"qwen3-30b-a3b": [22, 85, 152, 173, 219, 748],
              "gpt-oss-120b": [42, 210, 529, 819, 890, 1862],
              "deepseek-v3": [109, 327, 368, 417, 740, 5127],
              "mixtral-8x7b": [109, 311, 362, 438, 757, 4984],
              "deepseek-v4-pro": [118, 505, 767, 889, 1169, 6131]},
    "W4A8": {"qwen3-30b-a3b": [24, 54, 91, 104, 143, 527],
             "gpt-oss-120b": [35, 121, 282, 442, 491, 1148],
             "deepseek-v3": [60, 174, 195, 223, 441, 2690],
             "mixtral-8x7b": [64, 178, 198, 216, 421, 2592],
             "deepseek-v4-pro": [69, 269, 396, 424, 599, 3071]},
    "W8A8": {"qwen3-30b-a3b": [24, 79, 142, 167, 191, 500],
             "gpt-oss-120b": [41, 195, 492, 770, 832, 1289],
             "deepseek-v3": [99, 302, 341, 361, 477, 2898],
             "mixtral-8x7b": [102, 307, 340, 354, 457, 2631],
             "deepseek-v4-pro": [110, 484, 720, 754, 824, 3262]},
}
# The best of these in most cells, Humming per channel, adds up all products of a row in the sums of the multiply, by its
# source: as --fast-accumulation does.
RIVALS["W8A8, fast"] = RIVALS["W8A8"]


def run(tool, *command):
    """What a command of gatefold says in JSON."""
    return json.loads(subprocess.run([tool, *command, "--json"], capture_output=True, check=True).stdout)


def many_schemes(layer):
    """With 64 tokens and more. (gpt-oss' widths are no multiples of 128.)"""
    return [*LAYERS[layer][2], FAST] if layer == "gpt-oss-120b" else MANY


def bar(floor, scheme, bits, tokens, experts, top_k):
    """us, or None: there is no bar for 16-bit weights, nor for sums of fewer bits."""
    if bits > 9 or scheme == FAST:
        return None
    few_bits, fp8, int8 = bits < 5, "_afp8" in scheme, scheme.endswith("_aint8")
    if tokens > 128:
        if not fp8 and not int8:
            return {512: 1.15, 4096: 1.12}.get(tokens, 1.10) * floor
        loose = {512: 1.25, 4096: 1.25} if int8 else {512: 1.30 if few_bits else 1.20, 4096: 1.20}
        return loose.get(tokens, 1.20 if int8 else 1.15) * floor
    if tokens * top_k > 16 * experts:
        return (1.15 if not fp8 and not int8 else 1.08 if few_bits or int8 else 1.05) * floor + 4
    if tokens == 1:
        return floor + 5
    few = tokens <= 32
    factor = (1.06 if few else 1.10) if few_bits else (1.04 if few else 1.05)
    return factor * floor + 4


def class_of(scheme, bits):
    if bits > 9 or scheme.endswith("_aint8"):
        return None
    return "W8A8, fast" if scheme == FAST else f"W{4 if bits < 5 else 8}A{8 if '_afp8' in scheme else 16}"


def cell(row, limit):
    return f"{row['us_median']:.1f}" + (f" ({row['us_median'] / limit:.2f})" if limit else "")


def compare(rows, bits):
    """Prints, per class and number of tokens, how many times as fast as the best other kernel the fastest scheme is:
    the geometric mean over layers, and the worst of them."""
    best = {}
    for row in rows:
        kind = class_of(row["scheme"], bits[row["scheme"].split()[0]])
        if row["from"] != "ids" or row["tokens"] not in RIVAL_TOKENS or row["layer"] not in RIVALS.get(kind, {}):
            continue
        rival = RIVALS[kind][row["layer"]][RIVAL_TOKENS.index(row["tokens"])]
        found = best.setdefault((kind, row["tokens"]), {})
        found[row["layer"]] = max(found.get(row["layer"], 0), rival / row["us_median"])
    if not best:
        return
    tokens = sorted({tokens for _, tokens in best})
    print("\n| times as fast as the best other | " + " | ".join(map(str, tokens)) + " |\n|---|" + "---:|" * len(tokens))
    for kind in RIVALS:
        cells = []
        for count in tokens:
            ratios = best.get((kind, count), {})
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios)) if ratios else 0
            cells.append(f"{mean:.2f} ({min(ratios, key=ratios.get)} {min(ratios.values()):.2f})" if ratios else "")
        print(f"| {kind}: mean (least) | " + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--weight-bytes", default="3GB", help="of gatefold bench")
    parser.add_argument("--json", help="where all rows of gatefold bench go")
    arguments = parser.parse_args()

    bits = {row["name"]: row["bits_per_weight"] for row in run(arguments.tool, "schemes")["schemes"]}
    tokens = MANY_TOKENS if arguments.many else TOKENS[::3] if arguments.quick else TOKENS
    ways = ["ids"] if arguments.many else ["ids", "logits"]
    rows, within, bars = [], 0, 0
    print("| layer | scheme | from | " + " | ".join(map(str, tokens)) + " |\n|---|---|---|" + "---:|" * len(tokens))
    for layer, (experts, top_k, schemes) in LAYERS.items():
        if arguments.quick and layer not in QUICK or arguments.many and "," in layer:
            continue
        if arguments.many:
            schemes = many_schemes(layer)
        for scheme in QUICK[layer] if arguments.quick else schemes:
            name, *options = scheme.split()
            done = run(arguments.tool, "bench", "--backend", "cuda", "--shape" if "," in layer else "--model", layer,
                       "--scheme", name, *options, "--tokens", ",".join(map(str, tokens)), "--from", ",".join(ways),
                       "--weight-bytes", arguments.weight_bytes)["rows"]
            rows += [{"layer": layer, **row, "scheme": scheme} for row in done]
            floors = {row["tokens"]: row["us_floor"] for row in done if row["from"] == "ids"}
            limits = {t: bar(floors[t], scheme, bits[name], t, experts, top_k) for t in tokens}
            print(f"| {layer} | `{scheme}` | *floor* | " + " | ".join(f"{floors[t]:.1f}" for t in tokens) + " |")
            for way in ways:
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
    compare(rows, bits)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

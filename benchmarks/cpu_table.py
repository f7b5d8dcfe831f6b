"""Times every scheme on this CPU and prints the table of docs/performance.md: cpu_table.py TOOL [--model M] ...

Ratios are to what the same threads read and multiply at best between the runs (gatefold bench).
"""
import argparse
import json
import subprocess


def bench(arguments, *more):
    command = [arguments.tool, *arguments.cpu, *more, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,16,512")
    parser.add_argument("--schemes", help="comma-separated; all by default")
    parser.add_argument("--cpu", help="as for gatefold")
    arguments = parser.parse_args()
    arguments.cpu = ["--cpu", arguments.cpu] if arguments.cpu else []
    schemes = arguments.schemes.split(",") if arguments.schemes else [
        row["name"] for row in bench(arguments, "schemes")["schemes"]]
    tokens = arguments.tokens.split(",")
    print("| scheme | " + " | ".join(f"{t} tokens: us | of read | of multiply" for t in tokens) + " |")
    print("|---|" + "---:|---:|---:|" * len(tokens))
    for scheme in schemes:
        rows = bench(arguments, "bench", "--model", arguments.model, "--scheme", scheme, "--tokens",
                     arguments.tokens)["rows"]
        cells = [f"{row['us_median']:.0f} | {row['read_ratio']:.2f} | {row['multiply_ratio']:.2f}" for row in rows]
        print(f"| `{scheme}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

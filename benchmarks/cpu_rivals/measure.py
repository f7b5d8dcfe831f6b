"""Times one rival in one format: measure.py RIVAL FORMAT ... (run by cpu_rivals.py).

First prints {"error", "versions"}; then, for each number of tokens on a line of stdin, {"us", "read_gb_per_s"}.
"""
import argparse
import collections
import concurrent.futures
import ctypes
import importlib
import json
import pathlib
import statistics
import sys
import time

import numpy as np

Shape = collections.namedtuple("Shape", "hidden width experts top_k")


def random_call(random, shape, tokens):
    """Inputs, top_k different experts for every token, all as likely, and their weights."""
    x = random.standard_normal((tokens, shape.hidden), np.float32)
    ids = random.random((tokens, shape.experts)).argsort(1)[:, :shape.top_k]
    weights = random.random((tokens, shape.top_k), np.float32) + np.float32(0.5)
    return x, ids, weights / weights.sum(1, keepdims=True)


def calls_to_all(random, shape, tokens):
    """Calls that together reach every expert: some rivals pack an expert when they first meet it."""
    for start in range(0, shape.experts, tokens * shape.top_k):
        x, ids, weights = random_call(random, shape, tokens)
        yield x, (start + np.arange(ids.size).reshape(ids.shape)) % shape.experts, weights


def expected(engine, up, down, x, ids, weights):
    """The layer in float32, on dequantized weights."""
    result = np.zeros_like(x)
    for expert in np.unique(ids):
        dense_up, dense_down = up.dense(expert), down.dense(expert)
        for token, slot in np.argwhere(ids == expert):
            hidden = dense_up @ x[token]
            gate, linear = (hidden[0::2], hidden[1::2]) if engine.interleaved else np.split(hidden, 2)
            result[token] += weights[token, slot] * (dense_down @ (gate / (1 + np.exp(-gate)) * linear))
    return result


def build(engine, shape, random, arguments):
    """Layers of the same weights, each in memory of its own, and how far the first is from the float result."""
    up = engine.matrix(random, shape.experts, 2 * shape.width, shape.hidden)
    down = engine.matrix(random, shape.experts, shape.hidden, shape.width)
    call = random_call(random, shape, 2)
    reference = expected(engine, up, down, *call)
    count = int(-(-arguments.weight_bytes // sum(a.nbytes for a in up.arrays + down.arrays)))
    copies = [[tuple(map(np.copy, m.arrays)) for m in (up, down)] for _ in range(count - 1)]
    with concurrent.futures.ThreadPoolExecutor(arguments.threads) as pool:
        layers = list(pool.map(lambda arrays: engine.layer(*arrays), [(up.arrays, down.arrays), *copies]))
    difference = engine.result(engine.run(layers[0], engine.inputs(*call))) - reference
    return layers, float(np.linalg.norm(difference) / np.linalg.norm(reference))


def warm_up(engine, layers, shape, random, tokens):
    for layer in layers:
        for call in calls_to_all(random, shape, tokens):
            engine.run(layer, engine.inputs(*call))


def time_calls(engine, layers, shape, random, tokens, seconds):
    """Median, in microseconds, of calls that take at least so many seconds together."""
    times = []
    while len(times) < 3 or sum(times) < seconds:
        inputs = engine.inputs(*random_call(random, shape, tokens))
        start = time.perf_counter()
        engine.run(layers[len(times) % len(layers)], inputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def read_gb_per_s(threads, piece=1 << 22):
    """How fast the large blocks of this process are read: by a search for four bytes that are not there."""
    maps = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
    starts = []
    for line in maps:
        begin, end = (int(address, 16) for address in line[0].split("-"))
        if line[1] == "rw-p" and len(line) == 5 and end - begin >= 1 << 26:  # of no file
            starts += range(begin, end - piece, piece)
    starts = starts[:128 * threads]
    search = ctypes.CDLL(None).wmemchr
    search.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

    def read(part):
        for start in part:
            search(start, 0x7FA1B2C3, piece // 4)

    time.sleep(0.1)  # until the threads of the library no longer wait busily
    rates = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(2):  # the first wakes the threads
            begin = time.perf_counter()
            list(pool.map(read, [starts[i::threads] for i in range(threads)]))
            rates.append(len(starts) * piece / (time.perf_counter() - begin) / 1e9)
    return max(rates)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rival")
    parser.add_argument("format")
    parser.add_argument("--shape", type=lambda s: Shape(*map(int, s.split(","))), required=True)
    parser.add_argument("--tokens", type=lambda s: list(map(int, s.split(","))), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--weight-bytes", type=float, required=True)
    arguments = parser.parse_args()
    shape, threads = arguments.shape, arguments.threads
    module = importlib.import_module(arguments.rival + "_engine")
    engine = module.Engine(arguments.format, shape, threads)
    random = np.random.Generator(np.random.SFC64(time.time_ns()))
    layers, error = build(engine, shape, random, arguments)
    for tokens in arguments.tokens:
        warm_up(engine, layers, shape, random, tokens)
    print(json.dumps({"versions": module.VERSIONS, "error": error}), flush=True)
    for line in sys.stdin:
        tokens = int(line)
        before = read_gb_per_s(threads)
        us = time_calls(engine, layers, shape, random, tokens, arguments.seconds)
        print(json.dumps({"us": us, "read_gb_per_s": [before, read_gb_per_s(threads)]}), flush=True)


if __name__ == "__main__":
    main()

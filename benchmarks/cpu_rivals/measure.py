"""Times one rival in one format and prints a JSON object: measure.py RIVAL FORMAT ... (run by cpu_rivals.py)."""
import argparse
import collections
import concurrent.futures
import importlib
import json
import statistics
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
    reference = expected(engine, up, down, *call) if arguments.check else None
    count = int(-(-arguments.weight_bytes // sum(a.nbytes for a in up.arrays + down.arrays)))
    copies = [[tuple(map(np.copy, m.arrays)) for m in (up, down)] for _ in range(count - 1)]
    with concurrent.futures.ThreadPoolExecutor(arguments.threads) as pool:
        layers = list(pool.map(lambda arrays: engine.layer(*arrays), [(up.arrays, down.arrays), *copies]))
    if reference is None:
        return layers, None
    difference = engine.result(engine.run(layers[0], engine.inputs(*call))) - reference
    return layers, float(np.linalg.norm(difference) / np.linalg.norm(reference))


def time_calls(engine, layers, shape, random, tokens, seconds):
    """Median, in microseconds, of calls that take at least so many seconds together."""
    for layer in layers:
        for call in calls_to_all(random, shape, tokens):
            engine.run(layer, engine.inputs(*call))
    times = []
    while len(times) < 5 or sum(times) < seconds:
        inputs = engine.inputs(*random_call(random, shape, tokens))
        start = time.perf_counter()
        engine.run(layers[len(times) % len(layers)], inputs)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rival")
    parser.add_argument("format")
    parser.add_argument("--shape", type=lambda s: Shape(*map(int, s.split(","))), required=True)
    parser.add_argument("--tokens", type=lambda s: list(map(int, s.split(","))), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--weight-bytes", type=float, required=True)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    module = importlib.import_module(arguments.rival + "_engine")
    engine = module.Engine(arguments.format, arguments.shape, arguments.threads)
    random = np.random.Generator(np.random.SFC64(time.time_ns()))
    layers, error = build(engine, arguments.shape, random, arguments)
    times = {tokens: time_calls(engine, layers, arguments.shape, random, tokens, arguments.seconds)
             for tokens in arguments.tokens}
    print(json.dumps({"versions": module.VERSIONS, "error": error, "us": times}))


if __name__ == "__main__":
    main()

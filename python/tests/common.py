"""Small layers, and what they compute, in numpy."""
import pathlib
import threading

import numpy as np

import gatefold

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = str(ROOT / "models/tiny-moe")
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 128, 128, 2


def weights(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    gate_up = rng.normal(0, 0.1, (EXPERTS, 2 * INTERMEDIATE, HIDDEN))
    down = rng.normal(0, 0.1, (EXPERTS, HIDDEN, INTERMEDIATE))
    return gate_up.astype(dtype), down.astype(dtype)


def inputs(tokens, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, HIDDEN)).astype(np.float32)
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)], np.int32).reshape(-1, TOP_K)
    return x, ids, rng.random((tokens, TOP_K)).astype(np.float32)


def dequantized(stack, scheme):
    return np.stack([gatefold.quantize(np.ascontiguousarray(w), scheme).dequantize() for w in stack])


def reference(gate_up, down, x, ids, topk_weights):
    """SwiGLU experts in double precision; gate_up holds gate, then up."""
    y = np.zeros_like(x, dtype=np.float64)
    for t in range(len(x)):
        for slot, e in enumerate(ids[t]):
            g, u = np.split(gate_up[e].astype(np.float64) @ x[t], 2)
            y[t] += topk_weights[t, slot] * (down[e].astype(np.float64) @ (g / (1 + np.exp(-g)) * u))
    return y


def relative(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


def run_in_threads(calls, same, times):
    """Calls each of them so many times in a thread of its own: how often a result differed from what it gives alone."""
    expected = [call() for call in calls]
    wrong = []

    def work(call, alone):
        wrong.extend(1 for _ in range(times) if not same(call(), alone))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(wrong)


class Peak:
    """How many bytes a process holds more than at first, at most and at the end; of memory that is no file's."""

    def __enter__(self):
        self._before, self.most, self._done = self._held(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        self.after = self._held() - self._before

    def _watch(self):
        while not self._done.wait(0.002):
            self.most = max(self.most, self._held() - self._before)

    @staticmethod
    def _held():
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) << 10

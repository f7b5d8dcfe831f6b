#!/usr/bin/env python3
"""Writes formats.txt: what ml_dtypes makes of every code and of every rounding boundary.

Needs numpy and ml_dtypes. Lines: `decode FORMAT CODE F32BITS` and `encode FORMAT F32BITS CODE`, in hex.
Overflow is clamped before the cast: ml_dtypes gives NaN or Inf there, Gatefold's narrow formats saturate.
"""
import pathlib

import ml_dtypes
import numpy as np

FLOATS = {
    "bf16": (ml_dtypes.bfloat16, np.uint16, 613),  # (type, code type, take every n-th code)
    "f16": (np.float16, np.uint16, 613),
    "e4m3": (ml_dtypes.float8_e4m3fn, np.uint8, 1),
    "e5m2": (ml_dtypes.float8_e5m2, np.uint8, 1),
    "e2m1": (ml_dtypes.float4_e2m1fn, np.uint8, 1),
    "ue8m0": (ml_dtypes.float8_e8m0fnu, np.uint8, 1),
    "ue4m3": (ml_dtypes.float8_e4m3fn, np.uint8, 1),
}
INTEGERS = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127)}


def boundaries(values):
    """The midpoints of neighbours, and the f32 just below and above each."""
    values = np.unique(values[np.isfinite(values)].astype(np.float64))
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    below, above = np.nextafter(middle, np.float32(-np.inf)), np.nextafter(middle, np.float32(np.inf))
    return np.concatenate([middle, below, above])


def main():
    lines = []
    for name, (dtype, code_type, step) in FLOATS.items():
        bits = 4 if name == "e2m1" else 8 * np.dtype(code_type).itemsize
        count = 128 if name == "ue4m3" else 1 << bits
        codes = np.arange(0, count, dtype=np.uint32).astype(code_type)
        values = codes.view(dtype).astype(np.float32)
        for code in range(0, count, step):
            lines.append(f"decode {name} {code:x} {values[code].view(np.uint32):x}")
        neighbours = values if step == 1 else np.concatenate(
            [values[i : i + 2] for i in range(0, count - 1, step) if np.isfinite(values[i : i + 2]).all()])
        samples = boundaries(neighbours)
        if name == "ue8m0":
            samples = samples[samples >= 2.0**-126]  # ml_dtypes does not take the nearest of two subnormals
        largest = np.float32(np.nanmax(values[np.isfinite(values)]))
        if name not in ("bf16", "f16"):
            samples = np.concatenate([samples, np.float32([largest * 1.01, 3e38])])
        if name in ("ue8m0", "ue4m3"):
            samples = samples[samples >= 0]
        clamped = samples if name in ("bf16", "f16") else np.clip(samples, -largest, largest)
        encoded = clamped.astype(np.float32).astype(dtype).view(code_type)
        for sample, code in zip(samples, encoded):
            lines.append(f"encode {name} {np.float32(sample).view(np.uint32):x} {int(code):x}")
    for name, (low, high) in INTEGERS.items():
        mask = 255 if name == "int8" else 15
        for value in range(low, high + 1):
            lines.append(f"decode {name} {value & mask:x} {np.float32(value).view(np.uint32):x}")
        samples = np.concatenate([boundaries(np.arange(low - 2, high + 3)), np.float32([-1e9, 1e9])])
        for sample in samples:
            value = int(np.clip(np.rint(sample), low, high))
            lines.append(f"encode {name} {np.float32(sample).view(np.uint32):x} {value & mask:x}")
    pathlib.Path(__file__).with_name("formats.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

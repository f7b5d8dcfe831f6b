"""Random weights in the formats of the rivals, each with its dequantized values.

A matrix of all experts has n rows and k columns; its values are about as large as those of a trained layer.
"""
import collections

import numpy as np

# arrays: what a rival is given; dense(expert): float32 [n, k]
Matrix = collections.namedtuple("Matrix", "arrays dense")

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SIZE = 0.02


def random_bytes(random, *shape):
    return np.frombuffer(bytearray(random.bytes(int(np.prod(shape)))), np.uint8).reshape(shape)


def random_scales(random, *shape):
    return random.random(shape, np.float32) + np.float32(0.5)


def nibbles(packed):
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def per_block(values, scales, block):
    n, k = values.shape
    return (values.astype(np.float32).reshape(n, k // block, block) * scales[:, :, None]).reshape(n, k)


def bf16_to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def e4m3_to_float(codes):
    exponent, fraction = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    magnitude = np.where(exponent == 0, fraction / 512, np.ldexp(1 + fraction / 8, exponent.astype(int) - 7))
    return np.where(codes & 128, -magnitude, magnitude).astype(np.float32)


def bf16(random, experts, n, k):
    bits = random_bytes(random, experts, n, 2 * k).view(np.uint16)
    bits &= 0x80FF  # sign, fraction, lowest bit of the exponent
    bits |= 0x3C00  # 2^-7
    return Matrix((bits,), lambda e: bf16_to_float(bits[e]))


def int8_channel(random, experts, n, k):
    codes = random_bytes(random, experts, n, k).view(np.int8)
    scales = random_scales(random, experts, n) * np.float32(SIZE / 74)
    return Matrix((codes, scales), lambda e: codes[e] * scales[e][:, None])


def int8_offset(block):
    """Bytes less 128, f32 scales [n, k / block]."""
    def matrix(random, experts, n, k):
        codes = random_bytes(random, experts, n, k)
        scales = random_scales(random, experts, n, k // block) * np.float32(SIZE / 74)
        return Matrix((codes, scales), lambda e: per_block(codes[e].astype(np.float32) - 128, scales[e], block))
    return matrix


def int4_offset(block):
    """Nibbles less 8, the lower one first, f32 scales [n, k / block]."""
    def matrix(random, experts, n, k):
        packed = random_bytes(random, experts, n, k // 2)
        scales = random_scales(random, experts, n, k // block) * np.float32(SIZE / 4.6)
        return Matrix((packed, scales),
                      lambda e: per_block(nibbles(packed[e]).astype(np.float32) - 8, scales[e], block))
    return matrix


def int4_signed(block):
    """Nibbles in two's complement, the lower one first, f32 scales [k / block, n]."""
    def matrix(random, experts, n, k):
        packed = random_bytes(random, experts, n, k // 2)
        scales = random_scales(random, experts, k // block, n) * np.float32(SIZE / 4.6)
        return Matrix((packed.view(np.int8), scales),
                      lambda e: per_block((nibbles(packed[e]) ^ 8).astype(np.float32) - 8, scales[e].T, block))
    return matrix


def int4_gptq(block):
    """Nibbles less 8, eight of a column in 32 bits [k / 8, n], bf16 scales [k / block, n]."""
    def matrix(random, experts, n, k):
        packed = random_bytes(random, experts, k // 8, 4 * n).view(np.uint32)
        scales = float_to_bf16(random_scales(random, experts, k // block, n) * np.float32(SIZE / 4.6))

        def dense(e):
            codes = np.stack([(packed[e] >> (4 * i)) & 15 for i in range(8)], 1).reshape(k, n)
            return per_block(codes.T.astype(np.float32) - 8, bf16_to_float(scales[e]).T, block)
        return Matrix((packed.view(np.int32), scales), dense)
    return matrix


def fp8_block(random, experts, n, k):
    """e4m3, f32 per 128x128."""
    codes = random_bytes(random, experts, n, k)
    codes &= 0xBF  # below 2
    scales = random_scales(random, experts, -(-n // 128), -(-k // 128)) * np.float32(SIZE / 0.6)
    return Matrix((codes, scales), lambda e: e4m3_to_float(codes[e]) *
                  scales[e].repeat(128, 0)[:n].repeat(128, 1)[:, :k])


def mxfp4(random, experts, n, k):
    """e2m1, the lower nibble first, ue8m0 per 32."""
    packed = random_bytes(random, experts, n, k // 2)
    scales = random.integers(119, 122, (experts, n, k // 32), np.uint8)
    return Matrix((packed, scales), lambda e: per_block(
        E2M1[nibbles(packed[e])], np.ldexp(np.float32(1), scales[e].astype(int) - 127), 32))

"""Payloads and values of the C++ codec, with which the engines must agree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import golden
import gradwire

NUMBER = 7
HEADER = 32  # bytes of a frame before its payload
CHUNK = 40960  # values of a chunk
CODECS = [f"inceptionn:bound={b},mode={m}" for b in (10, 8, 6) for m in ("paper", "strict")]


def compress(values: bytes, codec: str) -> bytes:
    """The codec's payload of float32 values, at most a chunk of them."""
    assert len(values) <= 4 * CHUNK
    return gradwire.encode(np.frombuffer(values, np.float32), codec)[HEADER:]


def decompress(payload: bytes, n: int) -> bytes:
    """The n values of a payload; ValueError if it is none."""
    assert n <= CHUNK
    return gradwire.decode(golden.encoder.seal_frame(NUMBER, 0, 0, n, payload)).tobytes()


def random_values(n: int, seed: int) -> bytes:
    """Values of all classes, a third of them with random bits (NaN, Inf, denormals, huge)."""
    draw = np.random.default_rng(seed)
    exponents = draw.integers(112, 130, n, np.uint32)
    bits: npt.NDArray[np.uint32] = draw.integers(0, 1 << 32, n, np.uint32)
    classes = bits & np.uint32(0x807FFFFF) | exponents << np.uint32(23)
    # Mantissas of few bits come near the limits of the classes.
    round_ones = classes & np.uint32(0xFFF80000)
    kind = draw.integers(0, 3, n)
    return np.choose(kind, [bits, classes, round_ones]).astype("<u4").tobytes()


def runs_of_one_class(n: int, seed: int) -> bytes:
    """Stretches of values that all take 0, 1, 2 or 4 bytes, like real gradients."""
    draw = np.random.default_rng(seed)
    size = np.repeat(draw.integers(0, 4, n // 64 + 1), 64)[:n]
    values = np.choose(size, [1e-5, 0.01, 0.3, 1.5]) * draw.choice([-1, 1], n)
    return values.astype("<f4").tobytes()

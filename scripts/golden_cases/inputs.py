"""The tensors that the golden files encode, and functions that build parts of frames."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import common
import reference_encoder as encoder

NAN, INF, MAX = math.nan, math.inf, common.FLT_MAX
TINY = 2.0**-149  # the smallest denormal
SIGNALLING_NAN = bytes.fromhex("010080ff")


def gradient(seed: int, count: int) -> list[float]:
    """Heavy-tailed values around zero, like gradients."""
    draw = random.Random(seed)
    return [common.f32(draw.gauss(0, 1) ** 3 * 1e-3) for _ in range(count)]


def zero_runs() -> list[float]:
    """Ones, with 1, 2, ... 30 packed bytes of zeros between them."""
    return [value for run in range(1, 31) for value in [1.0] * 5 + [0.0] * (5 * run)]


def classes() -> list[float]:
    """Magnitudes from 2^-12 to below 4, with the first and last of each exponent."""
    draw = random.Random(2)
    edges = [1.0, 1.0 + 2.0**-23, 2.0 - 2.0**-23, 1.5, 1.125, 1.875]
    parts = edges + [draw.random() + 1 for _ in range(5)]
    values = [common.f32(part) * 2.0**e for e in range(-12, 2) for part in parts]
    values = [value * sign for value in values for sign in (1.0, -1.0)]
    draw.shuffle(values)
    return values


INPUTS: dict[str, list[float]] = {
    "gradient": gradient(1, 1021),
    "spike": [0.0] * 700 + [-2.0] + [0.0] * 320,
    "runs": zero_runs(),
    "classes": classes(),
    "zero": [0.0, -0.0, 0.0],
    "ties": [1.0, 0.5, -0.5, 0.50000006, -0.50000006, 0.49999997, -0.49999997, -1.0],
    "ties-175": [1.0, 0.875, -0.875, 0.87500006, -0.87500006, 0.87499994, 0.0, -0.0, 0.5, -1.0],
    "denormals": [TINY, -TINY, 0.0, 2 * TINY, 3 * TINY, -4 * TINY, 5 * TINY],
    "tiny": [TINY, -0.0, -TINY],
    "huge": [MAX, -MAX, MAX / 2, -MAX / 2, 0.75 * MAX, 1.0],
    "rounding": [1.00390625, 1.01171875, 1.00390637, -1.00390625, 3.3895314e38, 3.3961776e38, -MAX],
    "rounding-f16": [
        *(1.00048828125, 1.00146484375, 1.0004884004592896, -1.00048828125, 65504.0, 65519.996),
        *(65520.0, -65520.0, 2.0**-25, 2.0**-25 + 2.0**-48, 1.5 * 2.0**-24, -(2.0**-14), 6.1e-5),
    ],
    "equal": [common.f32(0.1)],
    "special": [NAN, INF, -INF, -0.0, TINY, MAX, 1.0],
    "nan": [1.0, NAN, 2.0],
    "infinity": [1.0, 2.0, -INF],
    "blocks": [0.0] * 5 + [1.0, -0.25] + [0.0] * 3 + [-0.0] * 5 + [-8.0],
}
TENSORS = {name: common.to_bytes(values) for name, values in INPUTS.items()}
TENSORS["special"] += SIGNALLING_NAN
GRADIENTS = common.to_bytes(gradient(20, 39))


def take(values: bytes, n: int) -> bytes:
    """The first n values of a file that is repeated as often as needed."""
    return (values * (4 * n // len(values) + 1))[: 4 * n]


def scales(*values: float) -> bytes:
    return common.to_bytes(list(values))


def builder(number: int) -> Callable[..., bytes]:
    """A function that seals frames of this codec number, whatever their fields hold."""

    def frame(n: int, payload: bytes, a: int = 0, b: int = 0, **fields: int) -> bytes:
        return encoder.seal_frame(number, a, b, n, payload, **fields)

    return frame


def put(data: bytes, at: int, replacement: bytes) -> bytes:
    return data[:at] + replacement + data[at + len(replacement) :]


def sizes(*numbers: int, width: int = 2) -> bytes:
    return b"".join(number.to_bytes(width, "little") for number in numbers)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)

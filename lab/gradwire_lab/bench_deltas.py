"""Measures deltas next to memcpy and to XOR with zstd, in one process, after checking them.

Arrays are weights in bfloat16 before and after a step of Adam whose learning rate changes the given
share of them, or float32 after such a step: weights and both of Adam's states, all of which change.
All work is done by one thread, and times are those of the process on a core: what other programs
take meanwhile does not count.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire import _core
from gradwire_lab.bench import CheckError, interleave

SHARES = {"bf16 0.3 %": 0.003, "bf16 1 %": 0.01, "bf16 3 %": 0.03, "bf16 10 %": 0.1}
STATES = ("f32 weights", "f32 exp_avg", "f32 exp_avg_sq")
CHANGES = (*SHARES, *STATES)

# Arrays repeat so many values.
_PERIOD = 1 << 22
_STEPS = 60

Bytes = NDArray[np.uint8]
Compress = Callable[[Any], bytes]
Decompress = Callable[[bytes], bytes]
Call = Callable[[], object]


@dataclass(frozen=True)
class DeltaRow:
    """Bits are those of a changed element, rates 10^9 bytes of one array a second.

    entropy: of order 0, of (place, step): of the steps of all elements, 0 among them. None where
    all change: the steps of a float32 are too many to be counted.
    encode: finds the changes, codes them with the digest of the result, and brings a copy of the
    base up to the result. The base's digest is known, as a publisher knows it.
    apply: in place, with the digest of the result. apply_decoded: the same of a delta that was
    decoded before, as `Subscriber.fetch` does.
    of_memcpy: shares of memcpy's bandwidth in bytes moved. memcpy moves two arrays; encode three,
    as it reads the base and the result and writes the copy; apply two.
    others: by compressor, (bits, rate, rate of the way back), where its package is installed. It
    takes the XOR of the two arrays, and both rates include the XOR, or the result alone.
    """

    change: str
    numel: int
    changed: float
    bits: float
    entropy: float | None
    encode: float
    encode_of_memcpy: float
    apply: float
    apply_of_memcpy: float
    apply_decoded: float
    memcpy: float
    others: dict[str, tuple[float, float, float]]


def measure(change: str, numel: int, seconds: float, seed: int) -> DeltaRow:
    """Checks, then times one change for about `seconds` each. Raises CheckError."""
    base, result = make_arrays(change, numel, seed)
    width, arrays = base.itemsize, (base.view(np.uint8), result.view(np.uint8))
    digests = [_core.digest_array(array) for array in arrays]
    room = np.empty(_core.max_delta_size(numel, width), np.uint8)

    def encode(copy: Bytes, to: int) -> int:
        written = _core.encode_delta(
            *(copy, arrays[to], room),
            width=width,
            is_float=True,
            follow=True,
            base_digest=digests[1 - to],
        )
        return int(written["size"])

    copy = arrays[0].copy()
    deltas = [room[: encode(copy, to)].copy() for to in (1, 0)]
    for to in (1, 0):
        _core.apply_delta(deltas[1 - to], copy)
        if not np.array_equal(copy, arrays[to]):
            raise CheckError(f"check failed: {change}, {numel} values: not the result")
    decoded = [_core.DecodedDelta(delta) for delta in deltas]
    values, turns = copy.copy(), {"encode": 1, "apply": 1}

    def encode_next() -> None:
        encode(copy, turns["encode"])
        turns["encode"] ^= 1

    def apply_next() -> None:
        _core.apply_delta(deltas[1 - turns["apply"]], values)
        turns["apply"] ^= 1

    def apply_decoded_next() -> None:
        decoded[1 - turns["apply"]].apply(values)
        turns["apply"] ^= 1

    copied = np.zeros_like(base)
    others, sizes = _others(change, base, result, copied)
    both_ways = [call for pair in others.values() for call in pair]
    own = [lambda: np.copyto(copied, base), encode_next, apply_next, apply_decoded_next]
    calls = [*own, *both_ways]
    times = interleave(calls, seconds, time.process_time)
    memcpy, encoding, applying, moving, *taken = (median(samples) for samples in times)
    differing = max(int(np.count_nonzero(base != result)), 1)
    rate = 1e-9 * base.nbytes
    return DeltaRow(
        change=change,
        numel=numel,
        changed=differing / numel,
        bits=8 * len(deltas[0]) / differing,
        entropy=_entropy(base, result) / differing if change in SHARES else None,
        encode=rate / encoding,
        encode_of_memcpy=3 / 2 * memcpy / encoding,
        apply=rate / applying,
        apply_of_memcpy=memcpy / applying,
        apply_decoded=rate / moving,
        memcpy=rate / memcpy,
        others={
            name: (8 * sizes[name] / differing, rate / there, rate / back)
            for name, there, back in zip(others, taken[::2], taken[1::2], strict=True)
        },
    )


def make_arrays(change: str, numel: int, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The bits of an array before and after a step: uint16 of bfloat16, or uint32 of float32."""
    draw, n = np.random.default_rng(seed), min(numel, _PERIOD)
    pair: tuple[NDArray[Any], NDArray[Any]]
    if change in STATES:
        *_, before, after = _adam(draw, n)
        at = STATES.index(change)
        pair = before[at].view(np.uint32), after[at].view(np.uint32)
    else:
        weights = draw.standard_normal(n, np.float32) * np.float32(0.02)
        # Adam's quotient of the two moments is at most about 1.
        update = np.clip(draw.standard_normal(n, np.float32) / 2, -1, 1).astype(np.float32)
        least, most = 1e-9, 1e-2
        for _ in range(30):
            rate = (least * most) ** 0.5
            pair = _narrow(weights), _narrow(weights - np.float32(rate) * update)
            if np.count_nonzero(pair[0] != pair[1]) < SHARES[change] * n:
                least = rate
            else:
                most = rate
    return np.resize(pair[0], numel), np.resize(pair[1], numel)


def _adam(draw: np.random.Generator, n: int) -> list[list[NDArray[np.float32]]]:
    """Weights, exp_avg and exp_avg_sq after the last two of some steps at a rate of 1e-3, whose
    gradients are noise of another scale for each weight."""
    f32 = np.float32
    w, m, v = draw.standard_normal(n, f32) * f32(0.02), np.zeros(n, f32), np.zeros(n, f32)
    scale = f32(1e-4) * np.exp(2 * draw.standard_normal(n, f32))
    states: list[list[NDArray[np.float32]]] = []
    for step in range(1, _STEPS + 1):
        g = draw.standard_normal(n, f32) * scale
        m = f32(0.9) * m + f32(0.1) * g
        v = f32(0.999) * v + f32(0.001) * g * g
        w = w - f32(1e-3 / (1 - 0.9**step)) * m / (np.sqrt(v / f32(1 - 0.999**step)) + f32(1e-8))
        states = [*states[-1:], [w, m, v]]
    return states


def _narrow(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bfloat16 of finite values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _entropy(base: NDArray[Any], result: NDArray[Any]) -> float:
    """Bits of the steps of all elements, by their counts."""
    sign = 1 << (8 * base.itemsize - 1)

    def ordered(bits: NDArray[Any]) -> NDArray[np.int64]:
        return np.where(bits < sign, bits.astype(np.int64), sign - 1 - bits.astype(np.int64))

    n = min(base.size, _PERIOD)
    _, counts = np.unique(ordered(result[:n]) - ordered(base[:n]), return_counts=True)
    return float(-(counts * np.log2(counts / n)).sum()) * base.size / n


def _others(
    change: str, base: NDArray[Any], result: NDArray[Any], xor: NDArray[Any]
) -> tuple[dict[str, tuple[Call, Call]], dict[str, int]]:
    """Calls of the compressors that are installed, there and back, and the bytes that they make.
    Raises CheckError."""
    compressors: dict[str, tuple[Compress, Decompress]] = {}
    if zstd := _module("zstandard"):
        unpack = zstd.ZstdDecompressor().decompress
        compressors["xor + zstd -1"] = zstd.ZstdCompressor(level=1).compress, unpack
        if change in STATES:
            compressors["xor + zstd -3"] = zstd.ZstdCompressor(level=3).compress, unpack
    if change in STATES and (zipnn := _module("zipnn")):
        packer = zipnn.ZipNN(bytearray_dtype="float32", input_format="byte", threads=1)
        both = packer.compress, packer.decompress
        compressors |= {"xor + zipnn": both, "zipnn": both}

    calls: dict[str, tuple[Call, Call]] = {}
    sizes = {}
    for name, (compress, decompress) in compressors.items():

        def there(name: str = name, compress: Compress = compress) -> bytes:
            given = np.bitwise_xor(base, result, out=xor) if name.startswith("xor") else result
            # zipnn writes into what it is given.
            return compress(given.tobytes() if "zipnn" in name else given)

        coded = there()

        def back(
            name: str = name, coded: bytes = coded, decompress: Decompress = decompress
        ) -> NDArray[Any]:
            values = np.frombuffer(decompress(coded), base.dtype)
            return np.bitwise_xor(values, base, out=xor) if name.startswith("xor") else values

        if not np.array_equal(back(), result):
            raise CheckError(f"check failed: {change}, {name}: not the result")
        calls[name], sizes[name] = (there, back), len(coded)
    return calls, sizes


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None

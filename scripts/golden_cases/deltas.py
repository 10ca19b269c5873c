"""Arrays before and after, for deltas of every element and mode; deltas that an encoder would write
otherwise; and deltas with a fault, each with the status that refuses it."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import delta as spec
import delta_encoder as encoder
from common import ceil_div, little
from golden_cases.inputs import put

NAMES = {0: "int8", 1: "int16", 2: "int32", 16: "fp8", 17: "float16", 18: "float32"}
# Bits whose order is special, of bfloat16, binary16 and E4M3, too: both zeros, the smallest and the
# largest magnitudes, infinities, NaNs with payloads.
SPECIAL = {
    1: (0, 0x80, 1, 0x81, 7, 0x87, 8, 0x78, 0x7C, 0x7D, 0x7E, 0x7F, 0xF8, 0xFC, 0xFE, 0xFF),
    2: (
        *(0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x7F7F, 0x7F80),
        *(0x7FC0, 0x7FFF, 0xFC00, 0xFF80, 0xFFC1, 0xFFFF),
    ),
    4: (
        *(0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001),
        *(0x7FC00000, 0x7FFFFFFF, 0xFF800000, 0xFFC12345, 0xFFFFFFFF),
    ),
}


@dataclass(frozen=True)
class Case:
    """The base is `period`, repeated to n elements. The result has `result` at byte `at`."""

    element: int
    n: int
    period: bytes
    result: bytes
    at: int = 0

    def arrays(self) -> tuple[bytes, bytes]:
        size = self.n * spec.ELEMENTS[self.element]
        base = (self.period * (size // max(len(self.period), 1) + 1))[:size]
        return base, base[: self.at] + self.result + base[self.at + len(self.result) :]


def moved(element: int, base: bytes, steps: list[int]) -> bytes:
    """Each element by its step."""
    width = spec.ELEMENTS[element]
    bits, result = 8 * width, b""
    for i, step in enumerate(steps):
        value = little(base[i * width : (i + 1) * width])
        if element >= spec.FLOATS:
            value = spec.in_order((spec.in_order(value, bits) + step) % (1 << bits), bits)
        else:
            value = (value + step) % (1 << bits)
        result += value.to_bytes(width, "little")
    return result


def draw_steps(draw: random.Random, n: int, share: float, sizes: list[int]) -> list[int]:
    return [
        draw.choice(sizes) * draw.choice((-1, 1)) if draw.random() < share else 0 for _ in range(n)
    ]


def weights(width: int, n: int) -> bytes:
    """Any bits for integers and fp8; small floats otherwise."""
    draw = random.Random(width)
    if width == 1:
        return draw.randbytes(n)
    values = b"".join(struct.pack("<f", draw.gauss(0, 0.02)) for _ in range(n))
    if width == 4:
        return values
    return b"".join(values[i + 2 : i + 4] for i in range(0, len(values), 4))


def cases() -> Iterator[tuple[str, Case]]:
    """Deltas as an encoder writes them."""
    for element, name in NAMES.items():
        width = spec.ELEMENTS[element]
        draw = random.Random(element)
        base = weights(width, 509)
        largest = 1 << (8 * width - 1)
        kinds = {
            "unchanged": (37, 0.0, [1]),
            "sparse": (509, 0.03, [1]),
            "sparse-far": (509, 0.1, [1, 1, 1, 2, 3, largest // 3, largest]),
            "dense": (301, 1.0, [0, 1, 2, 3, 5]),
            "one-size": (5, 1.0, [1]),
        }
        for kind, (n, share, sizes) in kinds.items():
            result = moved(element, base, draw_steps(draw, n, share, sizes))
            yield f"{name}-{kind}", Case(element, n, base, result)
        if element == 0:
            steps = draw_steps(draw, 2900, 0.21, [1, 1, 2, 3, largest])
            yield f"{name}-sparse-runs", Case(0, 2900, base, moved(0, base * 6, steps))
        special = b"".join(bits.to_bytes(width, "little") for bits in SPECIAL[width])
        count = len(SPECIAL[width])
        for shift in (1, 5):
            turned = special[shift * width :] + special[: shift * width]
            yield f"{name}-special-{shift}", Case(element, count, special, turned)
        # Every special bit pattern moves by one place, among many that stay.
        steps = [draw.choice((-1, 1)) if i < count else 0 for i in range(16 * count)]
        result = moved(element, special * 16, steps)
        yield f"{name}-special-steps", Case(element, 16 * count, special, result)
        # As far as nothing but the elements themselves is smaller.
        yield f"{name}-verbatim", Case(element, 67, base, draw.randbytes(67 * width))
        yield f"{name}-1", Case(element, 1, base, moved(element, base, [-1]))
        yield f"{name}-0", Case(element, 0, base, b"")
    # The second chunk changes at its end, and the last, which is short, wherever it can.
    draw = random.Random(7)
    period = weights(1, 61)
    n, at = 2 * spec.CHUNK + 700, 2 * spec.CHUNK - 300
    for name, sizes in {"sparse": [1], "dense": [1, 2, 3], "verbatim": [*range(1, 128)]}.items():
        base = (period * (n // 61 + 1))[at:n]
        share = 0.01 if name == "sparse" else 1.0
        steps = draw_steps(draw, 300, 0.1, [1, 2]) + draw_steps(draw, 700, share, sizes)
        yield f"chunks-{name}", Case(0, n, period, moved(0, base, steps), at)


def others() -> Iterator[tuple[str, Case, bytes]]:
    """Payloads that no encoder writes, for the result of each case."""
    draw = random.Random(3)
    base = weights(2, 200)
    steps = draw_steps(draw, 200, 0.5, [1])
    case = Case(17, 200, base, moved(17, base, steps))
    yield "dense-for-few", case, chunk(spec.DENSE, encoder.encode_dense(steps, 16))
    yield "verbatim-for-few", case, b"\x03" + case.result
    yield "sparse-without-change", Case(17, 9, base, base[:18]), chunk(spec.SPARSE, b"\0\0")
    yield "few-in-runs", case, chunk(spec.SPARSE, sparse_with(steps, runs=4, k=3))
    # Each gap is longer than the table of a decoder, or an escape.
    few = [step if i % 50 == 49 else 0 for i, step in enumerate(steps)]
    for k in (0, 2, 15):
        name, of = f"parameter-{k}", Case(17, 200, base, moved(17, base, few))
        yield name, of, chunk(spec.SPARSE, sparse_with(few, runs=1, k=k))
    far = [step * 3 for step in steps]
    data = sparse_with(far, runs=1, k=0)[:-1]  # without the count of runs of far steps
    changes = sum(map(bool, steps))
    places = encoder.encode_places([True] * changes)
    sizes = b"\x0f" + encoder.to_bytes(encoder.size_code(3, 15) * changes)
    of = Case(17, 200, base, moved(17, base, far))
    yield "largest-order", of, chunk(spec.SPARSE, data + places + sizes)


def sparse_with(steps: list[int], runs: int, k: int) -> bytes:
    """A sparse chunk without far steps whose places have these runs and this parameter."""
    run = 64 * ceil_div(len(steps), 64 * runs)
    strings = []
    for begin in range(0, runs * run, run):
        part = steps[begin : begin + run]
        places = [-1, *(i for i, step in enumerate(part) if step), len(part)]
        codes = [encoder.gap_code(at - before - 1, k) for before, at in pairwise(places)]
        strings.append(encoder.to_bytes(encoder.low_first(k, 4) + "".join(codes)))
    signs = encoder.to_bytes("".join(str(int(step < 0)) for step in steps if step))
    return bytes([runs]) + encoder.with_sizes(strings) + signs + b"\0"


def chunk(mode: int, data: bytes) -> bytes:
    """The payload of a single chunk."""
    return bytes([mode]) + encoder.number(len(data)) + data


def errors() -> Iterator[tuple[str, str, bytes, int]]:
    """Name, status, bytes, and n of the base, whose elements are 0. The checksum is correct, unless
    it is the fault."""
    base = bytes(200)
    result = moved(17, base, [0] * 50 + [3, -1] + [0] * 48)
    good = encoder.encode(17, base, result)

    def payload(data: bytes, n: int = 100) -> bytes:
        return encoder.seal(17, n, 0, base[: 2 * n], base[: 2 * n], data)

    def sealed(data: bytes) -> bytes:
        return put(data, 4, spec.checksum_of(data).to_bytes(4, "little"))

    def sparse(data: bytes) -> bytes:
        return payload(chunk(spec.SPARSE, data))

    one = encoder.encode_places([True] + [False] * 99)
    one_far = one + b"\0" + encoder.encode_places([True])
    assert spec.status_of(sparse(one + b"\0\0"), base) != "corrupt_payload"

    def places(bits: str, runs: int = 1) -> bytes:
        """The place of one change in one run, by its parameter and codes, and no sign."""
        return sparse(bytes([runs]) + encoder.to_bytes(bits) + b"\0\0")

    def sizes(bits: str, order: int = 0) -> bytes:
        return sparse(one_far + bytes([order]) + encoder.to_bytes(bits))

    def dense(lengths: list[int], strings: list[bytes]) -> bytes:
        lengths = lengths + [0] * (18 - len(lengths))
        head = bytes(a | b << 4 for a, b in zip(lengths[::2], lengths[1::2], strict=True))
        sizes = b"".join(encoder.number(len(string)) for string in strings[:-1])
        return payload(chunk(spec.DENSE, head + sizes + b"".join(strings)))

    zeros = [*[bytes(4)] * 4, b""]  # 25 elements with a code of one bit each
    assert spec.status_of(dense([1], zeros), base) == "ok"
    too_long = encoder.to_bytes("0" + encoder.low_first(1, 15))  # the sign, and 2^15 + 1
    in_runs = sparse_with([1] + [0] * 99, runs=4, k=3)
    assert spec.status_of(sparse(in_runs), base) != "corrupt_payload"
    faults = {
        "truncated": {"header": good[:47], "empty": b"", "payload": sealed(good[:-1])},
        "bad_magic": {"magic": sealed(put(good, 0, b"GW"))},
        "unsupported_version": {"version": sealed(put(good, 2, b"\2"))},
        "reserved_bits": {
            f"element-{code}": sealed(put(good, 3, bytes([code]))) for code in (3, 15, 19, 32)
        },
        "trailing_bytes": {"byte-more": sealed(good + b"\0")},
        "limit_exceeded": {"n": sealed(put(good, 8, (2**40 + 1).to_bytes(8, "little")))},
        "length_mismatch": {"another-length": encoder.encode(17, base[2:], result[2:])},
        "checksum_mismatch": {
            "checksum": put(good, 4, bytes([good[4] ^ 1])),
            "another-base": encoder.encode(17, b"\1" + base[1:], result),
            "result-digest": sealed(put(good, 32, bytes(8))),
        },
        "corrupt_payload": {
            "modes-cut": payload(b""),
            "modes-padding": payload(b"\x04"),
            "size-cut": payload(b"\x01"),
            "size-longer-than-it-must-be": payload(b"\x01\x81\x00\x00"),
            "size-of-four-bytes": payload(b"\x01\x80\x80\x80\x01"),
            "chunk-too-long": sparse(bytes(290)),
            "bytes-after-the-chunks": payload(b"\0\0"),
            "chunk-cut": payload(b"\x03" + base[1:]),
            "places-empty": sparse(b""),
            "places-in-two-runs": places("0000" + "1" + "0" * 11 + encoder.low_first(99, 16), 2),
            "places-cut": sparse(one[:-1]),
            "place-beyond-the-end": places("0000" + "1" + "0" * 11 + encoder.low_first(100, 16)),
            "places-padding": places("1000" + "10" + "0" * 11 + encoder.low_first(99, 16) + "1"),
            "runs-cut": sparse(b"\4\1"),
            "run-beyond-the-end": sparse(b"\4\1\1\x7f\0\0\0\0"),
            "run-of-another-size": sparse(in_runs[:1] + bytes([in_runs[1] + 1]) + in_runs[2:]),
            "signs-cut": sparse(one),
            "signs-padding": sparse(one + b"\2\0"),
            "far-cut": sparse(one + b"\0"),
            "far-beyond-the-changes": sparse(one + b"\0" + one),
            "bytes-after-the-steps": sparse(one + b"\0\0\0"),
            "sizes-cut": sparse(one_far),
            "order-of-the-sizes": sizes("1" + "0" * 16, 16),
            "far-size-cut": sparse(one_far + b"\0"),
            "size-too-far": sizes(encoder.size_code(32769, 0)),
            "size-of-32-bits": sizes("0" * 32 + "1" + "0" * 32),
            "sizes-padding": sizes("11"),
            "lengths-cut": payload(chunk(spec.DENSE, bytes(8))),
            "lengths-padding": dense([1] + [0] * 16 + [1], zeros),
            "length-12": dense([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12], zeros),
            "lengths-incomplete": dense([1, 2], zeros),
            "lengths-of-nothing": dense([], zeros),
            "lengths-too-many": dense([1, 1, 1], zeros),
            "no-code-begins-so": dense([1], [b"\1" + bytes(3), *zeros[1:]]),
            "codes-cut": dense([1], [bytes(4), bytes(3), bytes(4), bytes(4), b""]),
            "codes-too-long": dense([1], [bytes(5), *zeros[1:]]),
            "codes-padding": dense([1], [*zeros[1:4], bytes(3) + b"\2", b""]),
            "codes-beyond-the-end": payload(chunk(spec.DENSE, b"\1" + bytes(8) + b"\x7f\0\0\0")),
            "step-too-long": dense([1] + [0] * 15 + [1], [b"\1" + bytes(3), *zeros[1:4], too_long]),
            "step-cut": dense([1] + [0] * 15 + [1], [b"\1" + bytes(3), *zeros[1:4], b"\1"]),
            "steps-padding": dense([1, 1], [b"\1" + bytes(3), *zeros[1:4], b"\2"]),
            "steps-too-long": dense([1], [*zeros[:4], b"\0"]),
        },
    }
    for status, group in faults.items():
        for name, data in group.items():
            yield name, status, data, 100

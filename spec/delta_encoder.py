"""An encoder of deltas (format.md) that makes the same choices as gradwire's."""

from __future__ import annotations

from itertools import pairwise

import delta as spec
from common import ceil_div, little
from payloads import rice


def encode(element: int, base: bytes, result: bytes) -> bytes:
    """The delta that leads from `base` to `result`, two arrays of the same length."""
    width = spec.ELEMENTS[element]
    n = len(result) // width
    modes, sizes, chunks, changed = [], b"", b"", 0
    for at in range(0, len(result), spec.CHUNK * width):
        after = result[at : at + spec.CHUNK * width]
        steps = steps_between(element, base[at : at + spec.CHUNK * width], after)
        mode, data = encode_chunk(steps, 8 * width, after)
        changed += sum(map(bool, steps))
        modes.append(mode)
        chunks += data
        if mode in (spec.SPARSE, spec.DENSE):
            sizes += number(len(data))
    payload = bytearray(ceil_div(len(modes), 4))
    for i, mode in enumerate(modes):
        payload[i // 4] |= mode << i % 4 * 2
    return seal(element, n, changed, base, result, bytes(payload) + sizes + chunks)


def seal(element: int, n: int, changed: int, base: bytes, result: bytes, payload: bytes) -> bytes:
    """A delta with this payload."""
    numbers = (n, changed, spec.digest(base), spec.digest(result), len(payload))
    body = b"".join(value.to_bytes(8, "little") for value in numbers) + payload
    data = b"GD" + bytes([1, element]) + bytes(4) + body
    return data[:4] + spec.checksum_of(data).to_bytes(4, "little") + body


def steps_between(element: int, base: bytes, result: bytes) -> list[int]:
    width = spec.ELEMENTS[element]
    bits = 8 * width
    steps = []
    for at in range(0, len(result), width):
        a, b = little(base[at : at + width]), little(result[at : at + width])
        if element >= spec.FLOATS:
            a, b = spec.in_order(a, bits), spec.in_order(b, bits)
        step = (b - a) % (1 << bits)
        steps.append(step - (1 << bits) if step >> (bits - 1) else step)
    return steps


def encode_chunk(steps: list[int], bits: int, result: bytes) -> tuple[int, bytes]:
    """The mode and the bytes of a chunk."""
    changed = sum(map(bool, steps))
    if changed == 0:
        return spec.UNCHANGED, b""
    best, least = (spec.VERBATIM, result), len(result)
    if changed <= len(steps) // 4:
        data = encode_sparse(steps)
        if whole(data) < least:
            best, least = (spec.SPARSE, data), whole(data)
    if changed > len(steps) // 8 or best[0] == spec.VERBATIM:
        data = encode_dense(steps, bits)
        if whole(data) < least:
            best = (spec.DENSE, data)
    return best


def whole(chunk: bytes) -> int:
    """The bytes of a chunk with those of its size."""
    return len(number(len(chunk))) + len(chunk)


def encode_sparse(steps: list[int]) -> bytes:
    changes = [step for step in steps if step]
    far = [abs(step) for step in changes if abs(step) > 1]
    return (
        encode_places([step != 0 for step in steps])
        + to_bytes("".join(str(int(step < 0)) for step in changes))
        + encode_places([abs(step) > 1 for step in changes])
        + (encode_sizes(far) if far else b"")
    )


def runs_of(count: int) -> int:
    return 0 if count == 0 else 1 if count < spec.LEAST_IN_RUNS else spec.RUNS


def encode_places(bits: list[bool]) -> bytes:
    """Which of the bits are set."""
    runs = runs_of(sum(bits))
    if runs == 0:
        return b"\0"
    run = 64 * ceil_div(len(bits), 64 * runs)
    strings = []
    for begin in range(0, runs * run, run):
        part = bits[begin : begin + run]
        places = [-1, *(i for i, bit in enumerate(part) if bit), len(part)]
        gaps = [at - before - 1 for before, at in pairwise(places)]
        best = best_of(gaps)
        strings.append(to_bytes(low_first(best, 4) + "".join(gap_code(gap, best) for gap in gaps)))
    return bytes([runs]) + with_sizes(strings)


def with_sizes(strings: list[bytes]) -> bytes:
    return b"".join(number(len(string)) for string in strings[:-1]) + b"".join(strings)


def best_of(gaps: list[int]) -> int:
    """The parameter that takes the fewest bits, of four below the bits of the mean."""
    bits = (sum(gaps) // len(gaps)).bit_length()
    tried = range(max(0, bits - 4), max(0, bits - 1) + 1)
    return min(tried, key=lambda k: sum(len(gap_code(gap, k)) for gap in gaps))


def encode_sizes(sizes: list[int]) -> bytes:
    widths = [(size - 2).bit_length() for size in sizes]

    def length(order: int) -> int:
        return sum(order + 1 if width <= order else 2 * width - 1 - order for width in widths)

    order, strings = min(range(16), key=length), runs_of(len(sizes))
    most = ceil_div(len(sizes), strings)
    parts = [sizes[i * most : (i + 1) * most] for i in range(strings)]
    codes = [to_bytes("".join(size_code(size, order) for size in part)) for part in parts]
    return bytes([order]) + with_sizes(codes)


def gap_code(gap: int, g: int) -> str:
    """Bits in the order in which they stand, as in all functions here."""
    if gap >> g >= rice.ESCAPE:
        return "0" * rice.ESCAPE + low_first(gap, rice.GAP_BITS)
    return "0" * (gap >> g) + "1" + low_first(gap % (1 << g), g)


def size_code(size: int, m: int) -> str:
    value = size - 2 + (1 << m)
    length = value.bit_length() - 1
    return "0" * (length - m) + "1" + low_first(value - (1 << length), length)


def encode_dense(steps: list[int], bits: int) -> bytes:
    counts = [0] * (bits + 1)
    for step in steps:
        counts[abs(step).bit_length()] += 1
    lengths = code_lengths(counts)
    codes = {symbol: code for code, symbol in spec.prefix_codes(lengths).items()}
    lengths += [0] * (len(lengths) % 2)
    head = bytes(low | high << 4 for low, high in zip(lengths[::2], lengths[1::2], strict=True))
    run, strings = ceil_div(len(steps), spec.RUNS), []
    for i in range(spec.RUNS):
        part = steps[i * run : (i + 1) * run]
        strings.append(to_bytes("".join(codes[abs(step).bit_length()] for step in part)))
    strings.append(to_bytes("".join(map(size_bits, steps))))
    return head + with_sizes(strings)


def size_bits(step: int) -> str:
    """The sign, and the size below its highest bit."""
    length = abs(step).bit_length()
    if length == 0:
        return ""
    return str(int(step < 0)) + low_first(abs(step) - (1 << length - 1), length - 1)


def code_lengths(counts: list[int]) -> list[int]:
    """Huffman's lengths. Counts are halved, rounded up, until no code is too long."""
    while max(lengths := huffman(counts)) > spec.LONGEST_PREFIX:
        counts = [(count + 1) // 2 for count in counts]
    return lengths


def huffman(counts: list[int]) -> list[int]:
    """Of equal counts a symbol is taken before a sum, a lower symbol before a higher one."""
    leaves = sorted((count, [symbol]) for symbol, count in enumerate(counts) if count)
    lengths = [0] * len(counts)
    if len(leaves) == 1:
        lengths[leaves[0][1][0]] = 1
        return lengths
    sums: list[tuple[int, list[int]]] = []
    while len(leaves) + len(sums) > 1:
        pair = []
        for _ in range(2):
            queue = leaves if not sums or (leaves and leaves[0][0] <= sums[0][0]) else sums
            pair.append(queue.pop(0))
        symbols = pair[0][1] + pair[1][1]
        for symbol in symbols:
            lengths[symbol] += 1
        sums.append((pair[0][0] + pair[1][0], symbols))
    return lengths


def low_first(value: int, length: int) -> str:
    return "".join(str(value >> i & 1) for i in range(length))


def to_bytes(bits: str) -> bytes:
    return int("0" + bits[::-1], 2).to_bytes(ceil_div(len(bits), 8), "little")


def number(value: int) -> bytes:
    """At most 21 bits in one to three bytes."""
    data = b""
    while value >= 0x80:
        data += bytes([value & 0x7F | 0x80])
        value >>= 7
    return data + bytes([value])

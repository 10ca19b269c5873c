"""Deltas (format.md): from one array of elements to another of the same length."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from common import FormatError, ceil_div, little, require
from payloads import rice
from payloads.rice import Bits

HEADER = 48
CHUNK = 65536  # elements
BLOCK = 65536  # bytes of an array with a digest of their own
UNCHANGED, SPARSE, DENSE, VERBATIM = range(4)  # modes
MOST_FAR = 16384
LONGEST_PREFIX = 11
RUNS = 4  # of the steps of a chunk, unless a sparse one has few
LEAST_IN_RUNS = 512
ELEMENTS = {0: 1, 1: 2, 2: 4, 16: 1, 17: 2, 18: 4}  # widths in bytes
FLOATS = 16  # elements from this number on


@dataclass(frozen=True)
class Delta:
    element: int
    n: int
    changed: int
    base_digest: int
    result_digest: int
    payload: bytes

    @property
    def width(self) -> int:
        return ELEMENTS[self.element]


def digest(array: bytes) -> int:
    blocks = (array[at : at + BLOCK] for at in range(0, len(array), BLOCK))
    digests = (xxhash.xxh3_64_intdigest(block).to_bytes(8, "little") for block in blocks)
    return xxhash.xxh3_64_intdigest(b"".join(digests))


def parse(data: bytes) -> Delta:
    require(len(data) >= HEADER, "truncated", "no whole header")
    require(data[:2] == b"GD", "bad_magic", "not a delta")
    require(data[2] == 1, "unsupported_version", f"version {data[2]}")
    require(data[3] in ELEMENTS, "reserved_bits", f"element {data[3]}")
    n, changed, base, result, size = (little(data[at : at + 8]) for at in range(8, HEADER, 8))
    require(size <= len(data) - HEADER, "truncated", "the payload is cut")
    require(size == len(data) - HEADER, "trailing_bytes", "bytes after the payload")
    require(n <= 1 << 40, "limit_exceeded", f"{n} elements")
    require(little(data[4:8]) == checksum_of(data), "checksum_mismatch", "the bytes were changed")
    return Delta(data[3], n, changed, base, result, data[HEADER:])


def checksum_of(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data[:4] + data[8:]) & 0xFFFFFFFF


def status_of(data: bytes, base: bytes) -> str:
    """What comes of applying a delta: "ok", or the status that refuses it."""
    try:
        apply(parse(data), base)
    except FormatError as error:
        return error.status
    return "ok"


def apply(delta: Delta, base: bytes) -> bytes:
    """The array that the delta leads to from `base`."""
    require(len(base) == delta.n * delta.width, "length_mismatch", "another length")
    result = b""
    for begin, (mode, data) in zip(range(0, delta.n, CHUNK), chunks_of(delta), strict=True):
        part = base[begin * delta.width : (begin + CHUNK) * delta.width]
        result += apply_chunk(delta, mode, data, part)
    require(digest(result) == delta.result_digest, "checksum_mismatch", "not the result")
    return result


def chunks_of(delta: Delta) -> list[tuple[int, bytes]]:
    """The mode and the bytes of each chunk."""
    count = ceil_div(delta.n, CHUNK)
    head = ceil_div(count, 4)
    payload = delta.payload
    require(len(payload) >= head, "corrupt_payload", "the modes are cut")
    modes = [payload[i // 4] >> i % 4 * 2 & 3 for i in range(4 * head)]
    require(not any(modes[count:]), "corrupt_payload", "padding of the modes")
    at, sizes = head, []
    for i, mode in enumerate(modes[:count]):
        n = min(CHUNK, delta.n - i * CHUNK)
        size = {UNCHANGED: 0, VERBATIM: n * delta.width}.get(mode)
        if size is None:
            size, at = take_number(payload, at)
            most = n * delta.width + n // 4 + 64
            require(size <= most, "corrupt_payload", f"chunk {i} has {size} bytes")
        sizes.append(size)
    require(at + sum(sizes) == len(payload), "corrupt_payload", "the chunks' sizes")
    found = []
    for mode, size in zip(modes, sizes, strict=False):
        found.append((mode, payload[at : at + size]))
        at += size
    return found


def take_number(data: bytes, at: int) -> tuple[int, int]:
    """A number of one to three bytes, and where the next byte is."""
    value = 0
    for i in range(3):
        require(at < len(data), "corrupt_payload", "a number is cut")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            require(byte > 0 or i == 0, "corrupt_payload", "a number is longer than it must be")
            return value, at
    require(False, "corrupt_payload", "a number has more than three bytes")
    raise AssertionError


def apply_chunk(delta: Delta, mode: int, data: bytes, base: bytes) -> bytes:
    if mode in (UNCHANGED, VERBATIM):
        return data if mode == VERBATIM else base
    n = len(base) // delta.width
    steps = (sparse_steps if mode == SPARSE else dense_steps)(data, n, 8 * delta.width)
    width, bits = delta.width, 8 * delta.width
    result = b""
    for i, step in enumerate(steps):
        element = little(base[i * width : (i + 1) * width])
        if delta.element >= FLOATS:
            element = in_order((in_order(element, bits) + step) % (1 << bits), bits)
        else:
            element = (element + step) % (1 << bits)
        result += element.to_bytes(width, "little")
    return result


def in_order(element: int, bits: int) -> int:
    """The place of a float's bits in the order of numbers, as two's complement, and back."""
    sign = 1 << (bits - 1)
    return element ^ (sign - 1) if element & sign else element


def sparse_steps(data: bytes, n: int, bits: int) -> list[int]:
    places, at = take_places(data, n)
    signs = data[at : at + ceil_div(len(places), 8)]
    require(len(signs) == ceil_div(len(places), 8), "corrupt_payload", "the signs are cut")
    reader, steps = Bits(signs), [0] * n
    for place in places:
        steps[place] = -1 if reader.take(1) else 1
    require(reader.ended(), "corrupt_payload", "padding of the signs")
    data = data[at + len(signs) :]
    far, at = take_places(data, len(places))
    require(len(far) <= MOST_FAR, "corrupt_payload", f"{len(far)} far steps")
    if not far:
        require(at == len(data), "corrupt_payload", "bytes after the last step")
        return steps
    for place, size in zip(far, sizes_of(data[at:], len(far), bits), strict=True):
        steps[places[place]] *= size
    return steps


def take_places(data: bytes, n: int) -> tuple[list[int], int]:
    """Which of n bits are set, and how many bytes say so."""
    require(len(data) > 0, "corrupt_payload", "the places are cut")
    runs, at = data[0], 1
    require(runs in (0, 1, RUNS), "corrupt_payload", f"{runs} runs")
    if runs == 0:
        return [], at
    sizes = []
    for _ in range(runs - 1):
        size, at = take_number(data, at)
        sizes.append(size)
    run, places = 64 * ceil_div(n, 64 * runs), []
    for i in range(runs):
        begin, end = min(i * run, n), min((i + 1) * run, n)
        reader = Bits(data[at:])
        k = reader.take(4)
        place = begin + take_gap(reader, k)
        while place < end:
            places.append(place)
            place += 1 + take_gap(reader, k)
        require(place == end, "corrupt_payload", "a place beyond its run")
        require(reader.take(-reader.at % 8) == 0, "corrupt_payload", "padding of a run")
        at += reader.at // 8
        require(i == runs - 1 or reader.at // 8 == sizes[i], "corrupt_payload", "size of a run")
    return places, at


def take_gap(reader: Bits, k: int) -> int:
    zeros = 0
    while zeros < rice.ESCAPE and reader.take(1) == 0:
        zeros += 1
    if zeros == rice.ESCAPE:
        return reader.take(rice.GAP_BITS)
    return (zeros << k) + reader.take(k)


def sizes_of(data: bytes, count: int, bits: int) -> list[int]:
    """The sizes of far steps."""
    require(len(data) > 0 and data[0] <= 15, "corrupt_payload", "the order of the sizes")
    order, strings = data[0], 1 if count < LEAST_IN_RUNS else RUNS
    most, sizes = ceil_div(count, strings), []
    for i, string in enumerate(take_strings(data, 1, strings)):
        reader = Bits(string)
        for _ in range(max(0, min(most, count - i * most))):
            sizes.append(take_size(reader, order))
            require(sizes[-1] <= 1 << (bits - 1), "corrupt_payload", "no step is so long")
        require(reader.ended(), "corrupt_payload", "bits after the last size")
    return sizes


def take_strings(data: bytes, at: int, count: int) -> list[bytes]:
    """Strings up to the end of the data, before them the sizes of all but the last."""
    sizes = []
    for _ in range(count - 1):
        size, at = take_number(data, at)
        sizes.append(size)
    require(sum(sizes) <= len(data) - at, "corrupt_payload", "the strings are cut")
    strings = []
    for size in [*sizes, len(data) - at - sum(sizes)]:
        strings.append(data[at : at + size])
        at += size
    return strings


def take_size(reader: Bits, order: int) -> int:
    zeros = 0
    while reader.take(1) == 0:
        zeros += 1
        require(zeros <= 31, "corrupt_payload", "a size is too long")
    low = zeros + order
    return (1 << low | reader.take(low)) - (1 << order) + 2


def dense_steps(data: bytes, n: int, bits: int) -> list[int]:
    symbols = bits + 1
    head = ceil_div(symbols, 2)
    require(len(data) >= head, "corrupt_payload", "the lengths are cut")
    lengths = [data[i // 2] >> i % 2 * 4 & 15 for i in range(2 * head)]
    require(not any(lengths[symbols:]), "corrupt_payload", "padding of the lengths")
    codes = prefix_codes(lengths[:symbols])
    run, lengths_of_sizes = ceil_div(n, RUNS), []
    *strings, sizes = take_strings(data, head, RUNS + 1)
    for i, string in enumerate(strings):
        reader = Bits(string)
        for _ in range(max(0, min(run, n - i * run))):
            lengths_of_sizes.append(take_symbol(reader, codes))
        require(reader.ended(), "corrupt_payload", "bits after the last code")
    reader, steps = Bits(sizes), []
    for length in lengths_of_sizes:
        if length == 0:
            steps.append(0)
            continue
        sign, size = reader.take(1), 1 << (length - 1) | reader.take(length - 1)
        require(size <= 1 << (bits - 1), "corrupt_payload", "no step is so long")
        steps.append(-size if sign else size)
    require(reader.ended(), "corrupt_payload", "bits after the last size")
    return steps


def take_symbol(reader: Bits, codes: dict[str, int]) -> int:
    code = str(reader.take(1))
    while code not in codes:
        require(len(code) < LONGEST_PREFIX, "corrupt_payload", "no code begins so")
        code += str(reader.take(1))
    return codes[code]


def prefix_codes(lengths: list[int]) -> dict[str, int]:
    """By code, its bits in the order in which they are read: the symbol."""
    used = sorted((length, symbol) for symbol, length in enumerate(lengths) if length)
    require(all(length <= LONGEST_PREFIX for length, _ in used), "corrupt_payload", "a length")
    taken = sum(1 << (LONGEST_PREFIX - length) for length, _ in used)
    whole = 1 << LONGEST_PREFIX
    complete = taken == (whole // 2 if len(used) == 1 else whole)
    require(complete, "corrupt_payload", "the prefix code is not complete")
    codes, code, before = {}, 0, 0
    for length, symbol in used:
        code <<= length - before
        codes[f"{code:0{length}b}"] = symbol
        code, before = code + 1, length
    return codes

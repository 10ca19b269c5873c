"""Chunks of 40960 values, each coded alone. If their sizes vary, a list of sizes precedes them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TypeVar

from common import ceil_div, little, require

CHUNK_VALUES = 40960
T = TypeVar("T")


def count_chunks(n: int) -> int:
    return ceil_div(n, CHUNK_VALUES)


def sizes_bytes(n: int, width: int) -> int:
    """Bytes of the list of sizes, `width` for each; a single chunk has no list."""
    return width * count_chunks(n) if n > CHUNK_VALUES else 0


def total(n: int, size_of: Callable[[int], int]) -> int:
    """Bytes of all chunks of n > 0 values; a chunk of k values takes size_of(k)."""
    full, last = divmod(n - 1, CHUNK_VALUES)
    return full * size_of(CHUNK_VALUES) + size_of(last + 1)


def split(
    data: bytes, n: int, width: int, size_of: Callable[[int], int] | None = None
) -> list[tuple[bytes, int]]:
    """Each chunk, and the number of values in it.

    Without size_of, `data` begins with the sizes if there are several chunks. With size_of there
    is no list, and a chunk of k values takes size_of(k) bytes.
    """
    counts = [min(CHUNK_VALUES, n - first) for first in range(0, n, CHUNK_VALUES)]
    if size_of is not None:
        sizes = [size_of(count) for count in counts]
    elif len(counts) > 1:
        end = sizes_bytes(n, width)
        sizes = [little(data[at : at + width]) for at in range(0, end, width)]
        data = data[end:]
    else:
        sizes = [len(data)]
    require(sum(sizes) == len(data), "corrupt_payload", "sizes don't add up")
    bounds = pairwise(accumulate(sizes, initial=0))
    return [(data[begin:end], count) for (begin, end), count in zip(bounds, counts, strict=False)]


# --- Encoding ---------------------------------------------------------------------------------


def cut(values: list[T]) -> list[list[T]]:
    return [values[first : first + CHUNK_VALUES] for first in range(0, len(values), CHUNK_VALUES)]


def join(chunks: list[bytes], width: int) -> bytes:
    """The list of sizes, then the chunks; with width 0 there is no list."""
    listed = chunks if width and len(chunks) > 1 else []
    return b"".join(len(chunk).to_bytes(width, "little") for chunk in listed) + b"".join(chunks)

"""Which arrays and tensors have elements in the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Reach:
    """Where the elements of an array lie.

    device: its name. address: of the first element. strides: in bytes, none negative. width: of an
    element, in bytes. There is at least one element.
    """

    name: str
    device: str
    address: int
    shape: Sequence[int]
    strides: Sequence[int]
    width: int

    @property
    def end(self) -> int:
        """The address behind the last element."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.address + last + self.width

    @property
    def is_nested(self) -> bool:
        """Whether each stride is beyond the reach of those below it: no elements overlap."""
        reach = self.width
        for stride, n in sorted(zip(self.strides, self.shape, strict=True)):
            if n > 1 and stride < reach:
                return False
            reach += (n - 1) * stride
        return True


def first_overlap(reaches: Iterable[Reach]) -> tuple[str, str] | None:
    """The names of two arrays that have an element, or a part of one, in the same memory; twice the
    same name for one whose own elements do. None if there is no such array.

    Arrays that reach into each other take a byte for each byte of their reach.
    """
    together: list[Reach] = []
    end = 0
    for reach in sorted(reaches, key=lambda r: (r.device, r.address)):
        if together and reach.device == together[0].device and reach.address < end:
            together.append(reach)
            end = max(end, reach.end)
            continue
        if found := _overlap_of(together):
            return found
        together, end = [reach], reach.end
    return _overlap_of(together)


def _overlap_of(reaches: Sequence[Reach]) -> tuple[str, str] | None:
    """The same for arrays whose reaches are one span of memory."""
    if len(reaches) < 2 and all(reach.is_nested for reach in reaches):
        return None
    start = reaches[0].address
    marks = np.zeros(max(reach.end for reach in reaches) - start, np.bool_)
    numel = 0
    for number, reach in enumerate(reaches):
        mine = _elements_in(marks, start, reach)
        if mine.any():
            mine[...] = False
            # The earlier one that has lost a mark.
            other = next(r for r in reaches[:number] if not _elements_in(marks, start, r).all())
            return other.name, reach.name
        mine[...] = True
        numel += mine.size
        if np.count_nonzero(marks) < numel:
            return reach.name, reach.name
    return None


def _elements_in(marks: np.ndarray, start: int, reach: Reach) -> np.ndarray:
    return np.ndarray(
        (*reach.shape, reach.width),
        np.bool_,
        marks,
        reach.address - start,
        (*reach.strides, 1),
    )

"""Which arrays have elements in the same memory, against the bytes of their elements."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.memory_overlap import Reach, first_overlap


def bytes_of(reach: Reach) -> list[int]:
    places = np.full(1, reach.address)
    for n, stride in zip((*reach.shape, reach.width), (*reach.strides, 1), strict=True):
        places = (places[:, None] + np.arange(n) * stride).reshape(-1)
    return [int(place) for place in places]


def shares(reaches: list[Reach]) -> bool:
    found = [place for reach in reaches for place in bytes_of(reach)]
    return len(set(found)) < len(found)


def reach(name: str, address: int, shape: list[int], strides: list[int], width: int = 4) -> Reach:
    return Reach(name, "cpu", address, shape, strides, width)


def test_pairs_are_named() -> None:
    whole, row = reach("whole", 64, [4, 4], [16, 4]), reach("row", 80, [4], [4])
    apart = reach("apart", 128, [4], [4])
    assert first_overlap([whole, row, apart]) == ("whole", "row")
    assert first_overlap([whole, apart]) is None
    assert first_overlap([reach("expanded", 64, [4, 4], [0, 4])]) == ("expanded", "expanded")
    left, right = reach("left", 64, [4, 2], [16, 4]), reach("right", 72, [4, 2], [16, 4])
    assert first_overlap([left, right]) is None
    assert first_overlap([left, Reach("right", "cuda:0", 64, [4], [4], 4)]) is None


@pytest.mark.parametrize("seed", range(200))
def test_as_the_bytes_say(seed: int) -> None:
    random = np.random.default_rng(seed)
    reaches = []
    for number in range(random.integers(1, 4)):
        dims = random.integers(0, 3)
        shape, strides = random.integers(1, 4, dims), random.integers(0, 9, dims) * 2
        width, address = int(random.choice([1, 2, 4])), int(random.integers(0, 40)) * 2
        reaches.append(reach(str(number), address, list(shape), list(strides), width))
    assert (first_overlap(reaches) is not None) == shares(reaches)

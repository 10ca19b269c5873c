"""Deltas against the decoder in plain Python, spec/delta.py, and the entropy of what changed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import xxhash

from golden import ROOT
from gradwire import GradwireError, _core

sys.path.insert(0, str(ROOT / "spec"))
import delta as spec
import delta_encoder
from common import FormatError

ORDERS = [(width, is_float) for width in (1, 2, 4) for is_float in (False, True)]
# "many" have several runs of places and of sizes.
CHANGES = {
    "nothing": (0.0, 1),
    "few": (0.01, 1),
    "some": (0.1, 300),
    "many": (0.24, 3),
    "all": (1.0, 20),
}


def draw(width: int, change: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An array and how it looks after a change."""
    random = np.random.default_rng(seed)
    share, largest = CHANGES[change]
    dtype = np.dtype(f"u{width}")
    base = random.integers(0, 256, n * width, dtype=np.uint8)
    steps = random.integers(-largest, largest + 1, n) * (random.random(n) < share)
    return base, (base.view(dtype) + steps.astype(dtype)).view(np.uint8)


def encode(base: np.ndarray, result: np.ndarray, width: int, is_float: bool) -> bytes:
    room = np.empty(_core.max_delta_size(len(base) // width, width), np.uint8)
    written = _core.encode_delta(base, result, room, width=width, is_float=is_float, follow=False)
    return room[: written["size"]].tobytes()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("width", "is_float"), ORDERS)
def test_the_decoder_of_the_format_page_agrees(width: int, is_float: bool, change: str) -> None:
    base, result = draw(width, change, 6000)
    data = encode(base, result, width, is_float)
    parsed = spec.parse(data)
    assert spec.apply(parsed, base.tobytes()) == result.tobytes()
    assert parsed.changed == np.count_nonzero((base != result).reshape(-1, width).any(axis=1))
    assert parsed.base_digest == _core.digest_array(base) == spec.digest(base.tobytes())
    element = width.bit_length() - 1 + (16 if is_float else 0)
    assert delta_encoder.encode(element, base.tobytes(), result.tobytes()) == data
    values = base.copy()
    _core.apply_delta(data, values)
    assert np.array_equal(values, result)


def test_two_chunks_and_a_fold() -> None:
    first, second = draw(2, "few", 70000)
    steps = draw(2, "few", 70000, seed=1)
    third = (second.view("u2") + (steps[1].view("u2") - steps[0].view("u2"))).view(np.uint8)
    one, two = encode(first, second, 2, True), encode(second, third, 2, True)
    room = np.empty(_core.max_delta_size(70000, 2), np.uint8)
    folded = room[: _core.fold_deltas(one, two, room)["size"]].tobytes()
    assert spec.apply(spec.parse(folded), first.tobytes()) == third.tobytes()


def test_damage_is_refused_alike() -> None:
    """Whatever byte is changed, with the checksum made right again."""
    base, result = draw(2, "some", 700)
    whole = encode(base, result, 2, True)
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        at = int(random.integers(len(whole)))
        damaged[at] ^= int(random.integers(1, 256))
        covered = bytes(damaged[:4] + damaged[8:])
        damaged[4:8] = (xxhash.xxh3_64_intdigest(covered) & 0xFFFFFFFF).to_bytes(4, "little")
        statuses = []
        for decode in (
            lambda data: spec.apply(spec.parse(data), base.tobytes()),
            lambda data: _core.apply_delta(data, base.copy()),
        ):
            try:
                decode(bytes(damaged))
                statuses.append("ok")
            except FormatError as error:
                statuses.append(error.status)
            except GradwireError as error:
                statuses.append(str(error.code))
        assert statuses[0] == statuses[1], (at, damaged[at])


@pytest.mark.parametrize("share", [0.003, 0.01, 0.03, 0.1])
def test_sizes_are_near_the_entropy(share: float) -> None:
    """Of places and steps, in weights that a step of Adam changes by one ulp or a few. So many that
    the header does not count."""
    n, random = 1 << 22, np.random.default_rng(3)
    base = random.normal(0, 0.02, n).astype(np.float32).view(np.uint32) >> 16
    sizes = random.choice([1, 2, 3, 4, 8], n, p=[0.89, 0.07, 0.02, 0.01, 0.01])
    steps = (random.random(n) < share) * sizes * random.choice([-1, 1], n)
    result = (base.astype(np.int64) + steps).astype(np.uint16).view(np.uint8)
    size = len(encode(base.astype(np.uint16).view(np.uint8), result, 2, True))
    _, counts = np.unique(steps, return_counts=True)
    entropy = -(counts * np.log2(counts / n)).sum()
    assert 8 * size <= 1.05 * entropy

"""torch.set_flush_denormal, which changes the arithmetic of the calling thread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

import gradwire
import lockstep
from gradwire._core import Exchange, Layout

CODECS = [info["name"] for info in gradwire.codecs()] + ["3lc:s=1.1", "qsgd:norm=l2"]
RANKS = 4


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


Array = npt.NDArray[np.float32]


def gradients(ranks: int, numel: int) -> list[Array]:
    """Many denormals, and normal numbers whose products with a scale are denormal."""
    random = np.random.default_rng(1)
    sizes = np.resize([1e-40, 1e-38, 1e-37], numel)
    return list((random.standard_normal((ranks, numel)) * sizes).astype(np.float32))


def encode_all(codec: str, x: Array, threads: int) -> tuple[list[bytes], list[bytes]]:
    compressor = gradwire.Compressor(codec, x.size, threads=threads)
    frames = [compressor.encode(x, step) for step in range(3)]
    arrays = [gradwire.decode(frame, threads=threads) for frame in frames]
    arrays += [gradwire.decode(frames[0], dtype="bfloat16", threads=threads)]
    residual = compressor.residual
    if residual is not None:
        arrays.append(residual)
    return frames, [np.asarray(array).tobytes() for array in arrays]


def flush_is_on() -> bool:
    return bool((torch.tensor([1e-39]) * 0.5 == 0).item())


# Above 32 chunks of 40960 values, two threads share the work.
@pytest.mark.parametrize(("numel", "threads"), [(3001, 1), (33 * 40960 + 7, 2)])
def test_bytes_and_values_stay_the_same(
    numel: int, threads: int, request: pytest.FixtureRequest
) -> None:
    (x,) = gradients(1, numel)
    codecs = CODECS if threads == 1 else ["3lc", "int8", "qsgd:bits=4", "topk"]
    expected = [encode_all(codec, x, threads) for codec in codecs]
    request.getfixturevalue("flushing")
    assert flush_is_on()
    for codec, made in zip(codecs, expected, strict=True):
        assert encode_all(codec, x, threads) == made, codec
    assert flush_is_on(), "the caller's setting is back"


def average(kind: str, codec: str, inputs: list[Array]) -> list[bytes]:
    layout = Layout([("w", [10, inputs[0].size // 10])], RANKS, codec)
    ranks = [Exchange(layout, rank, kind) for rank in range(RANKS)]
    results = []
    for step in range(3):
        buckets = [x.copy() for x in inputs]
        lockstep.average(ranks, buckets, step)
        results += [bucket.tobytes() for bucket in buckets]
    pieces = [piece["values"] for rank in ranks for piece in rank.export_residuals()]
    return results + [piece.tobytes() for piece in pieces]


@pytest.mark.parametrize("kind", ["sharded", "ring", "broadcast", "terngrad"])
def test_averages_stay_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    inputs = gradients(RANKS, 3000)
    codecs = ["raw", "terngrad"] if kind == "terngrad" else ["raw", "3lc", "int8", "bf16"]
    expected = [average(kind, codec, inputs) for codec in codecs]
    request.getfixturevalue("flushing")
    for codec, made in zip(codecs, expected, strict=True):
        assert average(kind, codec, inputs) == made, codec

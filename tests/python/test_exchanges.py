"""The exchanges of the Python module, all ranks in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import lockstep
from gradients import has_code, same_bits
from gradwire import GradwireError, exchanges
from gradwire._core import Exchange, Layout

pytestmark = pytest.mark.filterwarnings("error")

TENSORS = [("a.weight", [64, 300]), ("a.bias", [64]), ("b.weight", [100, 47])]
MACHINES = [0, 0, 1, 1, 2]

Array = npt.NDArray[np.float32]


def gradients(ranks: int, numel: int) -> list[Array]:
    random = np.random.default_rng(1)
    return [random.standard_normal(numel, dtype=np.float32) for _ in range(ranks)]


def make(kind: str, codec: str, **options: Any) -> list[Exchange]:
    between = kind.startswith("hierarchical")
    world_size = 3 if between else len(MACHINES)
    layout = Layout(TENSORS, world_size, codec)
    if between:
        options["machine_of_rank"] = MACHINES
    return [Exchange(layout, rank, kind, **options) for rank in range(len(MACHINES))]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sharded", {}),
        ("ring", {}),
        ("broadcast", {}),
        ("terngrad", {}),
        ("hierarchical", {}),
        ("hierarchical:between=ring", {}),
        ("hierarchical:between=broadcast", {}),
        ("hierarchical:between=terngrad", {}),
    ],
)
def test_every_kind_averages_over_the_ranks(kind: str, options: dict[str, str]) -> None:
    exchanges = make(kind, "raw", **options)
    buckets = gradients(len(MACHINES), 64 * 300 + 64 + 4700)
    mean = np.mean(np.stack(buckets).astype(np.float64), axis=0)
    lockstep.average(exchanges, buckets)
    np.testing.assert_allclose(buckets[0], mean, atol=1e-6)
    for bucket in buckets:
        assert same_bits(bucket, buckets[0])


def loss_of_least_squares(kind: str, codec: str, ranks: int = 8) -> float:
    """After 100 steps of SGD with momentum 0.9; each rank has 32 examples a step."""
    random = np.random.default_rng(5)
    truth = random.standard_normal((64, 8), dtype=np.float32)
    layout = Layout([("weight", [64, 8])], ranks, codec)
    machines = range(ranks) if kind == "hierarchical" else None
    workers = [Exchange(layout, rank, kind, machine_of_rank=machines) for rank in range(ranks)]
    weight: Array = np.zeros_like(truth)
    velocity: Array = np.zeros_like(truth)
    for step in range(100):
        buckets: list[Array] = []
        for _ in range(ranks):
            inputs = random.standard_normal((32, 64), dtype=np.float32)
            gradient = inputs.T @ (inputs @ (weight - truth)) / 32
            buckets.append(gradient.ravel().astype(np.float32))
        lockstep.average(workers, buckets, step)
        velocity = np.float32(0.9) * velocity + buckets[0].reshape(64, 8)
        weight = weight - np.float32(0.02) * velocity
    return float(np.square(weight - truth).mean())


@pytest.mark.parametrize(
    "info",
    [info for info in exchanges() if not info["has_servers"]],
    ids=lambda info: info["name"],
)
def test_every_exchange_bears_its_default_codec(info: dict[str, Any]) -> None:
    raw = loss_of_least_squares(info["name"], "raw")
    assert loss_of_least_squares(info["name"], info["default_codec"]) < 0.01 + 2 * raw


def test_a_ring_does_not_bear_every_codec() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        assert not loss_of_least_squares("ring", "3lc:s=1.75") < 10


def test_terngrad_shares_scales_and_pulls_sums() -> None:
    exchanges = make("terngrad", "terngrad", seed=3)
    buckets = gradients(len(MACHINES), 64 * 300 + 64 + 4700)
    lockstep.average(exchanges, buckets)
    for bucket in buckets:
        assert same_bits(bucket, buckets[0])
    for segment in Layout(TENSORS, len(MACHINES), "terngrad").segments:
        if segment["push_codec"] == "raw":
            continue
        begin = segment["bucket_offset"]
        values = buckets[2][begin : begin + segment["numel"]]
        sums = values / np.min(np.abs(values[values != 0]))
        np.testing.assert_allclose(sums, np.round(sums), atol=1e-4)
        assert len(MACHINES) < len(np.unique(np.round(sums))) <= 2 * len(MACHINES) + 1
    stats = exchanges[0].stats()
    assert 0 < stats["scale_bytes"] < stats["push_bytes"]
    assert not exchanges[0].keeps_residuals
    assert "pull qsgd:levels=5" in exchanges[0].describe()


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("sharded", "3lc"),
        ("ring", "int8"),
        ("terngrad", "terngrad"),
        ("hierarchical", "3lc"),
        ("hierarchical:between=ring,within=ring", "int8"),
        ("hierarchical:between=terngrad", "terngrad"),
    ],
)
def test_every_rank_tells_what_is_not_finite(kind: str, codec: str) -> None:
    exchanges = make(kind, codec)
    buckets = gradients(len(MACHINES), 64 * 300 + 64 + 4700)
    buckets[3][64 * 300 + 7] = np.nan
    lockstep.average(exchanges, buckets)
    for exchange, bucket in zip(exchanges, buckets, strict=True):
        assert exchange.non_finite == {
            "rank": 3,
            "tensor": "a.bias",
            "element": 7,
            "text": "the gradient of rank 3 is not finite at element 7 of a.bias",
        }
        assert np.isnan(bucket).all()


def test_local_bytes_of_a_hierarchy_are_counted_apart() -> None:
    exchanges = make("hierarchical:between=terngrad", "terngrad")
    buckets = gradients(len(MACHINES), 64 * 300 + 64 + 4700)
    lockstep.average(exchanges, buckets)
    assert exchanges[1].stats()["local_bytes"] > buckets[0].nbytes
    assert exchanges[1].stats()["push_bytes"] == 0
    assert exchanges[4].stats()["local_bytes"] == 0
    assert 0 < exchanges[4].stats()["push_bytes"] < buckets[0].nbytes / 4


@pytest.mark.parametrize(
    ("kind", "codec", "options", "text"),
    [
        ("star", "raw", {}, "valid ones are: sharded, ring, "),
        ("hierarchical", "raw", {}, "needs the machine of each rank"),
        ("hierarchical", "raw", {"machine_of_rank": [0, 1]}, "the layout is for 5 machines"),
        ("hierarchical:between=star", "raw", {"machine_of_rank": range(5)}, "is no exchange"),
        ("ring", "raw", {"machine_of_rank": range(5)}, "does not ask for the machine"),
        ("sharded:between=ring", "raw", {}, "is no exchange"),
        ("broadcast", "raw", {"update": print}, "takes no update"),
        ("terngrad", "raw", {"update": print}, "takes no update"),
        ("terngrad", "qsgd:ef=on", {}, "no residual is kept"),
        ("terngrad", "3lc", {}, "no residual is kept"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, codec: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(GradwireError, match=text) as error:
        Exchange(Layout(TENSORS, 5, codec), 0, kind, **options)
    assert has_code(error, "invalid_argument")


def test_two_tensors_of_one_name_are_refused() -> None:
    """A residual that is imported would go to the first of them alone."""
    for name in ("w", ""):
        with pytest.raises(GradwireError, match=f"two tensors have the name '{name}'") as error:
            Layout([(name, [64, 64]), ("b", [3]), (name, [64, 64])], 2, "3lc")
        assert has_code(error, "invalid_argument")


def test_more_ranks_than_the_sums_have_levels_are_refused() -> None:
    with pytest.raises(GradwireError, match="at most 8191 ranks"):
        Exchange(Layout(TENSORS, 8192, "terngrad"), 0, "terngrad")


def test_a_chosen_codec_is_of_a_push_or_of_a_pull() -> None:
    chosen = [("both", "a.weight", "int8:bucket=512")]
    with pytest.raises(GradwireError, match="of a push or of a pull, not of both"):
        Layout(TENSORS, 2, "auto:bits=2", chosen=chosen)


def test_residuals_lie_in_contiguous_memory_at_addresses_for_floats() -> None:
    exchange = Exchange(Layout(TENSORS, 2, "int8"), 0)
    n = exchange.residual_bytes
    memory = np.zeros(2 * n, np.uint8)
    with pytest.raises(GradwireError, match="not C-contiguous"):
        exchange.keep_residuals_in(memory[:n][::-1])
    with pytest.raises(GradwireError, match="multiple of 4"):
        exchange.keep_residuals_in(memory[1 : n + 1])
    exchange.keep_residuals_in(memory[:n])

"""While a bucket waits for peers, the next one is encoded and sent: the same bits, own errors."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from cluster import Cluster
from gradwire.torch.buckets.bucket import Bucket
from gradwire.torch.buckets.bucket_runner import BucketRunner
from gradwire.torch.buckets.session import Session
from gradwire.torch.errors import PeerMismatchError
from gradwire.torch.network.engine import receive
from gradwire.torch.network.transport import Kind
from gradwire.torch.network.wire import Wire
from ways import WAYS, build, integers

STEPS, WIDTH = 6, 128
CODECS = {"hook": "3lc:s=1.00,coder=rice", "hook, ring": "int8", "FSDP2": "qsgd:bits=4"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    cluster = Cluster(4)
    yield cluster
    cluster.close()


def make_model(width: int = WIDTH) -> nn.Module:
    """Each of its layers is a bucket, or a unit."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def loss(module: nn.Module, rank: int, step: int, width: int = WIDTH) -> torch.Tensor:
    inputs = integers(4 * width, seed=1000 * step + rank).view(4, width)
    return module(inputs / 100).square().mean()


def after(seconds: Callable[[], float], method: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *of: Any, **named: Any) -> Any:
        time.sleep(seconds())
        return method(self, *of, **named)

    return wait


def train_late(
    way: str,
    ahead: bool,
    late: Mapping[tuple[type, str], Callable[[], float]],
    encoded: list[int],
    width: int = WIDTH,
) -> tuple[Any, int]:
    """The parameters and residuals of this rank, and how many buckets were encoded ahead. late:
    methods, and the seconds that each of their calls waits. encoded: gets these buckets."""
    warnings.simplefilter("ignore")
    can_encode, encode = BucketRunner.can_encode_ahead, BucketRunner.encode_ahead

    def note(self: BucketRunner, job: Any) -> Any:
        encoded.append(job.index)
        return encode(self, job)

    codec: Any = {"codec": CODECS[way]} if way in CODECS else {}
    if width != WIDTH:
        codec = {"codec": "raw"}
    patches = [
        mock.patch.object(BucketRunner, "encode_ahead", note),
        mock.patch.object(BucketRunner, "can_encode_ahead", lambda *of: ahead and can_encode(*of)),
        *(
            mock.patch.object(owner, name, after(seconds, getattr(owner, name)))
            for (owner, name), seconds in late.items()
        ),
    ]
    with ExitStack() as patched:
        for patch in patches:
            patched.enter_context(patch)
        training = build(way, make_model(width), **codec)
        training.run(STEPS, partial(loss, width=width))
        kept = [r["values"].tolist() for r in training.source.state_dict()["residuals"]]
        values = [value.tolist() for value in training.values().values()]
        training.close()
    return (values, kept), len(encoded)


def train(way: str, ahead: bool) -> tuple[Any, int]:
    """A bucket comes while the one before it waits for a message already."""
    encoded: list[int] = []

    def seconds() -> float:
        """Long until a bucket was encoded ahead, on a loaded machine, too."""
        return 0.5 if ahead and not encoded else 0.02

    late = {(Session, "submit_for_torch"): lambda: 0.05, (Wire, "receive"): seconds}
    return train_late(way, ahead, late, encoded)


@pytest.mark.parametrize("way", [*CODECS, "hook, terngrad", "hook, pull codec"])
def test_the_bits_are_those_of_buckets_in_turn(ranks: Cluster, way: str) -> None:
    world = min(WAYS[way].ranks)
    in_turn, ahead = (ranks.run(world, train, way, each) for each in (False, True))
    assert [bits for bits, _ in in_turn] == [bits for bits, _ in ahead]
    assert all(count == 0 for _, count in in_turn)
    assert all(count > 0 for _, count in ahead), "else nothing is shown"


def train_with_delays(way: str, ahead: bool, seed: int, width: int) -> tuple[Any, int]:
    """Delays are drawn wherever messages and buckets may overtake each other."""
    draws = random.Random(seed)

    def seconds() -> float:
        return draws.choice([0, 0, 0, 0.002, 0.01, 0.03])

    methods: list[tuple[type, str]] = [
        *((Session, "submit_for_torch"), (Bucket, "_begin")),
        *((Wire, "receive"), (Wire, "send")),
    ]
    return train_late(way, ahead, dict.fromkeys(methods, seconds), [], width)


# 400: packets have a rest beyond their head.
@pytest.mark.parametrize("width", [WIDTH, 400])
@pytest.mark.parametrize("way", [*CODECS, "hook, hierarchical"])
def test_the_bits_do_not_depend_on_who_is_late(ranks: Cluster, way: str, width: int) -> None:
    in_turn = ranks.run(4, train_with_delays, way, False, 0, width)
    for seed in (1, 2):
        ahead = ranks.run(4, train_with_delays, way, True, seed, width)
        assert [bits for bits, _ in in_turn] == [bits for bits, _ in ahead]
        assert any(count > 0 for _, count in ahead), "else nothing is shown"


def take_another_bucket(number: int) -> str:
    """Rank 0 sends a packet of this turn, where rank 1 is at its first."""
    group = dist.new_group(backend="gloo")
    wire = Wire(group, timeout=30.0)
    wire.begin_turn()
    wire.ahead_limits = {Kind.PACKET: 100}
    if wire.rank == 0:
        for size in range(1, 4):
            wire.send(1, Kind.PACKET, np.zeros(size, np.uint8), number, in_turn=True)
        dist.barrier()
        return ""
    try:
        return str(receive(wire, 0, Kind.PACKET, 100).size)
    except PeerMismatchError as error:
        return str(error)
    finally:
        dist.barrier()


@pytest.mark.parametrize(("number", "said"), [(1, "1"), (2, "not at the same"), (7, "not at the")])
def test_more_than_the_next_bucket_is_refused(ranks: Cluster, number: int, said: str) -> None:
    """Of the next one a peer may send so much as a bucket begins with."""
    assert said in ranks.run(2, take_another_bucket, number)[1]


def fail_ahead() -> str:
    """Rank 0 fails to encode in the encoder's thread."""
    warnings.simplefilter("ignore")
    begin = Bucket._begin

    def fail(self: Bucket, job: Any, wire: Wire, said: Any, *others: Any) -> Any:
        if not said and wire.rank == 0:
            raise RuntimeError(f"no memory for bucket {job.index}")
        return begin(self, job, wire, said, *others)

    with (
        mock.patch.object(Bucket, "_begin", fail),
        mock.patch.object(Wire, "receive", after(lambda: 0.2, Wire.receive)),
    ):
        training = build("hook", make_model(), codec="int8")
        try:
            training.run(STEPS, loss)
        except RuntimeError as error:
            return str(error)
        finally:
            training.close()
    return "nothing"


def test_an_error_is_that_of_its_own_bucket(ranks: Cluster) -> None:
    own, other = ranks.run(2, fail_ahead)
    assert "no memory for bucket" in own
    assert "rank 0 stopped: RuntimeError: no memory for bucket" in other

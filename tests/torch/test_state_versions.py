"""States of other versions: every way says which format its states have, and refuses a later one.

A state is that of a source, or for servers an entry of the optimizer's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from cluster import Cluster
from frozen import Distances
from gradwire.torch import LocalSteps, Schedule, loopback
from gradwire.torch.checkpoint import FORMAT
from ways import WAYS, build

SOURCES = [name for name, way in WAYS.items() if way.kind != "backend"]  # which keeps no state
EVERY = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    cluster = Cluster(4)
    yield cluster
    cluster.close()


def said_of_formats(way: str, formats: list[Any]) -> list[str]:
    """What the way says of states that name these formats, beginning with its own."""
    warnings.simplefilter("ignore")
    training = build(way, Distances())
    source, said = training.source, []
    state = source.state_dict()
    own = state.get("gradwire", state)
    for name in [own["format"], *formats]:
        changed = own | {"format": name}
        try:
            source.load_state_dict(state | {"gradwire": changed} if own is not state else changed)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append(f"takes {name}")
    training.close()
    return said


@pytest.mark.parametrize("way", SOURCES)
def test_every_way_refuses_a_later_format(ranks: Cluster, way: str) -> None:
    found = ranks.run(min(WAYS[way].ranks), said_of_formats, way, [FORMAT + 1, None])
    for taken, later, none in found:
        assert taken == f"takes {FORMAT}"
        assert f"the state has format {FORMAT + 1}, and this version of gradwire reads" in later
        assert none == "not a gradwire state: its format is None"


class Streaming:
    """A rank of LocalSteps with a delay."""

    def __init__(self, delay: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        inner = SGD(self.model.parameters(), lr=0.1)
        schedule = Schedule(every=EVERY, delay=delay)
        self.optimizer = LocalSteps(inner, self.model, "raw", schedule=schedule)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 3)).square().sum().backward()
            self.optimizer.step()


def load_first_format(delay: int, steps: int, ends: bool, rank: int) -> str:
    """What a rank says of a state that was saved after so many steps, in a version in which
    exchanges began with their turn. ends: all was exchanged."""
    saved = Streaming(delay)
    saved.step(steps)
    if ends:
        saved.optimizer.synchronize()
    loading = Streaming(delay)
    loading.model.load_state_dict(saved.model.state_dict())
    try:
        loading.optimizer.load_state_dict(saved.optimizer.state_dict() | {"format": 1})
    except ValueError as error:
        return str(error)
    for one in (saved, loading):  # both end at the same model
        one.step(2 * EVERY)
    assert torch.equal(saved.model.weight, loading.model.weight)
    return "goes on"


@pytest.mark.parametrize("steps", range(1, EVERY + 1))
def test_a_delay_of_the_first_format_cannot_be_continued_between_exchanges(steps: int) -> None:
    """With one of 1 to `every` - 1 steps, its exchanges begin and end in other steps now."""
    for delay in range(EVERY + 1):
        (said,) = loopback.run(1, partial(load_first_format, delay, steps, False))
        if delay in (0, EVERY):
            assert said == "goes on"
        else:
            assert "whose exchanges began with their turn" in said
            assert f"delay={delay} steps later" in said
        (said,) = loopback.run(1, partial(load_first_format, delay, steps, True))
        assert said == "goes on"

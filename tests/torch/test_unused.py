"""A parameter that no rank has a gradient of stays as it is, and so does what is owed to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from cluster import Cluster
from gradwire.torch import outer_nesterov
from gradwire.torch.errors import PeerMismatchError
from gradwire.torch.network.engine import Unused
from gradwire.torch.network.transport import Kind
from gradwire.torch.server.group_options import UnusedOfWorkers, unused_message
from training import batch, load, make_model, save
from ways import Way, build

PART = "branch."  # of the parameters' names
USED, BY_ONE, BY_NONE = "used", "by one rank", "by none"
Case = tuple[str, dict[str, Any]]  # kind of a way, options: some are of `train` alone


@dataclass
class Ended:
    """The part's values, what is owed to it, and other values, of a rank after each step; nothing
    on a server."""

    part: list[bytes]
    owed: list[bytes]
    others: list[bytes]
    losses: list[float]


def train_each(cases: list[Case], steps: list[str]) -> list[Ended]:
    return [train(kind, steps, **options) for kind, options in cases]


def train(
    kind: str,
    steps: list[str],
    resumed_at: int | None = None,
    outer: bool = False,
    inner: Callable[..., Optimizer] | None = None,
    **options: Any,
) -> Ended:
    """resumed_at: the state is saved and loaded before this step."""
    ended = Ended([], [], [], [])
    if outer:
        options["outer"] = outer_nesterov()
    if kind == "hook":
        options |= {"start_iter": 0}
    way = Way(kind, options, servers=options.get("servers", 1))
    training = build(way, make_model(), inner or _adamw)
    source = training.source

    def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, labels = batch(rank, step)
        used = steps[step] == USED or (steps[step] == BY_ONE and rank == 0)
        loss = nn.functional.cross_entropy(module(inputs, used), labels)
        ended.losses.append(loss.item())
        return loss

    def note(taken: int) -> None:
        if kind == "server":
            if source.is_server:
                return
            source.synchronize()
        named = list(training.model.named_parameters())
        state = {"residuals": []} if source is None else source.state_dict()
        residuals = state.get("gradwire", state)["residuals"]
        ended.part.append(_bytes([p for name, p in named if name.startswith(PART)]))
        ended.others.append(_bytes([p for name, p in named if not name.startswith(PART)]))
        ended.owed.append(_bytes([r["values"] for r in residuals if r["name"].startswith(PART)]))
        if taken == resumed_at:
            source.load_state_dict(load(save(source.state_dict())))

    training.run(len(steps), loss_of, note)
    training.close()
    return ended


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def _adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=2e-3, weight_decay=0.1)


def _bytes(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)


STEPS = [USED, USED, USED, USED, BY_NONE, BY_NONE, BY_NONE, BY_NONE, BY_ONE, BY_NONE]
COARSE = "3lc:s=1.75"

# The step after which the part stands still, for each way.
WAYS = {
    "hook": (("hook", {"codec": COARSE}), 3),
    "hook, raw": (("hook", {"codec": "raw"}), 3),
    "hook, bfloat16 residuals": (("hook", {"codec": f"{COARSE},residual=bf16"}), 3),
    "hook, ring": (("hook", {"codec": "int8", "exchange": "ring"}), 3),
    "hook, broadcast": (("hook", {"codec": COARSE, "exchange": "broadcast"}), 3),
    "hook, terngrad": (("hook", {"codec": "terngrad", "exchange": "terngrad"}), 3),
    "hook, machines": (
        ("hook", {"codec": COARSE, "exchange": "hierarchical", "ranks_per_machine": 2}),
        3,
    ),
    "hook, rings in machines": (
        (
            "hook",
            {
                "codec": "int8",
                "exchange": "hierarchical:within=ring,between=ring",
                "ranks_per_machine": 2,
            },
        ),
        3,
    ),
    "sharded": (("sharded", {"codec": COARSE}), 3),
    "sharded, raw": (("sharded", {"codec": "raw"}), 3),
    "sharded, SGD": (("sharded", {"codec": "qsgd:bits=4", "inner": sgd}), 3),
    "local": (("local", {"codec": COARSE}), 3),
    "local, resumed": (("local", {"codec": COARSE, "every": 2, "resumed_at": 5}), 3),
    "local, every second": (("local", {"codec": COARSE, "every": 2}), 3),
    "local, fragments": (
        ("local", {"codec": COARSE, "every": 2, "fragments": 2, "delay": 1}),
        6,
    ),
    "local, back to back": (("local", {"codec": COARSE, "every": 2, "delay": 2}), 6),
    "local, outer": (("local", {"codec": COARSE, "every": 2, "outer": True}), 3),
}


@pytest.mark.parametrize("world", [2, 4])
def test_it_stands_still_while_no_rank_uses_it(cluster: Cluster, world: int) -> None:
    ways = {n: w for n, w in WAYS.items() if world == 4 or "machine" not in n}
    if world == 4:  # where ranks pass on what others said
        ways = {n: w for n, w in ways.items() if "machine" in n or "ring" in n}
    ranks = cluster.run(world, train_each, [way for way, _ in ways.values()], STEPS)
    for rank in ranks:
        for (name, (_, still)), ended in zip(ways.items(), rank, strict=True):
            assert len(set(ended.part[: still + 1])) > 1, f"{name}: it must have moved"
            assert len(set(ended.part[still:8])) == 1, name
            assert len(set(ended.owed[still:8])) == 1, name
            assert len(set(ended.others)) >= 5, name
    for index, name in enumerate(ways):
        if "fragments" in name or "back" in name:
            continue  # the last changes are still under way
        used_by_one = [rank[index].part[9] for rank in ranks]
        assert len(set(used_by_one)) == 1, f"{name}: replicas differ"
        assert used_by_one[0] != ranks[0][index].part[7], f"{name}: it must move again"


SERVED = {
    "raw": {"codec": "raw"},
    "servers": {"codec": "raw", "servers": 2},
    "part by part": {"codec": "raw", "barrier": "tensor"},
    "pushes": {"codec": COARSE, "pull_codec": "raw"},
    "pulls of gradients": {"codec": "raw", "pulls": "gradients"},
    "pulls of gradients, owed": {"codec": COARSE, "pulls": "gradients", "servers": 2},
    "pulls of gradients, shared scales": {"codec": "terngrad", "pulls": "gradients"},
}


def test_servers_do_not_step_what_no_worker_uses(cluster: Cluster) -> None:
    ranks = cluster.run(4, train_each, [("server", options) for options in SERVED.values()], STEPS)
    for index, name in enumerate(SERVED):
        workers = [rank[index] for rank in ranks if rank[index].part]
        assert len(workers) >= 2
        for ended in workers:
            if name == "backup":
                # A version may lack the push of the only worker that uses it, or be skipped.
                assert len(set(ended.part)) > 1, name
                assert len(set(ended.others)) == len(ended.others), name
                continue
            assert len(set(ended.part[:4])) == 4, f"{name}: it must have moved"
            assert len(set(ended.others)) == len(STEPS), name
            assert len(set(ended.part[3:8])) == 1, name
            assert len(set(ended.owed[3:8])) == 1, name
            assert ended.part[8] != ended.part[7], f"{name}: it must move again"
            assert ended.part[9] == ended.part[8], name


def test_raw_trains_as_ddp_does(cluster: Cluster) -> None:
    ways = [("plain", {}), ("hook", {"codec": "raw"}), ("sharded", {"codec": "raw"})]
    for plain, *others in cluster.run(2, train_each, ways, STEPS):
        for ended in others:
            assert ended.losses == pytest.approx(plain.losses, rel=1e-5)
            for ours, theirs in zip(
                ended.part + ended.others, plain.part + plain.others, strict=True
            ):
                values, expected = (np.frombuffer(v, np.float32) for v in (ours, theirs))
                # An owner steps pieces of tensors, of which other values end a vector, and Adam
                # divides by small numbers.
                np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)


def test_servers_ask_the_workers_whose_pushes_are_in_the_version() -> None:
    """Such as without the last one, of backup_workers."""
    said = UnusedOfWorkers(3)
    said.take(0, unused_message(4, [0, 1], 3))
    said.take(1, unused_message(4, [1, 2], 3))
    said.take(1, unused_message(5, [2], 3))  # with staleness, a worker is ahead
    assert said.everywhere(4, [0, 1]) == [1]
    assert said.everywhere(5, [1]) == [2]
    said.take(2, unused_message(6, [0], 3))
    assert said.everywhere(6, [0, 2]) == [], "worker 0 has all gradients"
    said.take(0, unused_message(7, [0], 3))
    said.replace(0)
    assert said.everywhere(7, [0]) == [], "another process has its place"
    with pytest.raises(ValueError, match="it has 9 bytes"):
        UnusedOfWorkers(9).take(0, unused_message(0, [], 3))


class _Pipe:
    """A wire of rank 0 of 3."""

    rank = 0
    peers = (1, 2)

    def __init__(self) -> None:
        self.sent: list[tuple[int, Kind, bytes]] = []

    def send(
        self, peer: int, kind: Kind, payload: object, part: int, in_turn: bool = False
    ) -> None:
        assert (part, in_turn) == (3, True)
        self.sent.append((peer, kind, bytes(payload)))  # type: ignore[call-overload]


def test_a_rank_says_once_what_it_lacks_and_passes_on_what_it_heard() -> None:
    for passes_on in (False, True):
        pipe, unused = _Pipe(), Unused([9, 2])
        wire: Any = pipe
        said = unused.begin(wire, 10, passes_on)
        said.tell(wire, 1, 3)
        assert pipe.sent == [(1, Kind.UNUSED, b"\0\0\0\0\x20\x40")]
        assert unused.everywhere() == []
        heard = b"\2\0\0\0\x20\x00" + b"\1\0\0\0\xff\xc0"
        said.learn(2, np.frombuffer(heard, np.uint8))
        assert unused.everywhere() == [2]
        said.tell(wire, 1, 3)
        said.tell(wire, 2, 3)
        own, of_2 = b"\0\0\0\0\x20\x40", b"\2\0\0\0\x20\x00"
        passed = [(1, Kind.UNUSED, of_2)] if passes_on else []
        assert pipe.sent[1:] == [*passed, (2, Kind.UNUSED, own)]


@pytest.mark.parametrize("message", [b"\1", b"\1\0\0\0\xff\xc0\1", b"\3\0\0\0\xff\xc0"])
def test_a_message_of_other_ranks_or_tensors_is_refused(message: bytes) -> None:
    wire: Any = _Pipe()
    said = Unused().begin(wire, 10, True)
    with pytest.raises(PeerMismatchError, match="no entries of 2 bytes of these ranks"):
        said.learn(2, np.frombuffer(message, np.uint8))

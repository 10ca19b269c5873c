"""`ServerOptimizer`: fine-grained barriers with backup workers, second turns and staleness."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from attention_jobs import Trained, Way, train_attention
from cluster import Cluster, Died
from gradwire.torch import BackupWorkers, Execution, ServerOptimizer
from gradwire.torch.network.loopback import _here
from gradwire.torch.network.transport import NOTHING, Kind
from gradwire.torch.server.server_link import Message
from gradwire.torch.server.side import Side
from gradwire.torch.server.worker_loop import Working
from runs import said_by, sgd, threads
from training import INPUTS, batch, digest, make_model

BARRIERS = ("step", "tensor")
CODECS = ["3lc:s=1.5,coder=rice", "qsgd:bits=4", "raw"]
TURNS: dict[str, Any] = {"backup_workers": BackupWorkers(1, "any")}
VERSIONS = 8


@dataclass(frozen=True)
class Plan:
    """How `train` trains.

    Attributes:
        arguments: of ServerOptimizer.
        steps: that a worker takes at most, by rank, before it leaves.
        late: numbers of steps before which worker 1 waits until another one is 12 versions ahead.
        torn: the same, but in the backward pass, when other parts than `first` are pushed.
        versions_of: that the workers have, by rank.
        branch: 0: the even ones of its steps use the model's branch, 1: the odd ones; None: all.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    servers: int = 1
    steps: dict[int, int] = field(default_factory=dict)
    late: tuple[int, ...] = ()
    torn: tuple[int, ...] = ()
    versions_of: dict[int, int] = field(default_factory=dict)
    versions: int = VERSIONS
    branch: int | None = None

    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, labels = batch(rank, step)
        uses_branch = self.branch is None or step % 2 == self.branch
        return nn.functional.cross_entropy(model(inputs, uses_branch), labels)


@dataclass
class Seen:
    """What a rank has seen.

    Attributes:
        values: digests of the model's parts, by number and version.
        ahead: for each use of a part in a forward pass, the versions that it lacked.
    """

    values: dict[tuple[int, int], str] = field(default_factory=dict)
    ahead: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    final: str = ""
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


def train(plan: Plan) -> Seen:
    """The images depend on the number of the worker's own steps."""
    model, seen = make_model(), Seen()
    optimizer = ServerOptimizer(
        sgd(model.parameters()),
        model=model,
        servers=plan.servers,
        execution=Execution(timeout=60.0),
        **plan.arguments,
    )
    optimizer.connect()
    if optimizer.is_server:
        optimizer.serve()
    else:
        _work(plan, model, optimizer, seen)
    seen.final = digest(model)
    seen.model = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    seen.stats = optimizer.stats().as_dict()
    return seen


def _work(plan: Plan, model: nn.Module, optimizer: ServerOptimizer, seen: Seen) -> None:
    rank = optimizer.rank
    assert isinstance(optimizer._side, Working)
    parts = list(optimizer._side.parts.values())
    is_tensorwise = plan.arguments.get("barrier") == "tensor"

    def note_use(module: nn.Module, inputs: object, output: object) -> None:
        own = {id(tensor) for tensor in module.parameters(recurse=False)}
        for part in parts:
            if own & {id(tensor) for tensor in part.tensors}:
                lacking = part.exchange.next_version - part.exchange.version(*part.exchange.servers)
                seen.ahead.append(lacking)

    if is_tensorwise:
        for module in model.modules():
            module.register_forward_hook(note_use)

    def wait(least: int) -> None:
        _here.ranks.wait(lambda: plan.versions_of[0] >= least)

    def on_gradient(gradient: torch.Tensor) -> None:
        if rank == 1 and step in plan.torn:
            wait(optimizer.version + 12)

    model.get_parameter("first.weight").register_hook(on_gradient)
    step = 0
    while optimizer.version < plan.versions and step < plan.steps.get(rank, 10**6):
        plan.versions_of[rank] = optimizer.version
        if rank == 1 and step in plan.late:
            wait(optimizer.version + 12)
        optimizer.zero_grad()
        loss = plan.loss(model, rank, step)
        loss.backward()
        optimizer.step()
        step += 1
        seen.losses.append(loss.item())
        seen.versions.append(optimizer.version)
        for part in parts if is_tensorwise else ():
            (server,) = part.exchange.servers
            content = b"".join(t.detach().numpy().tobytes() for t in part.tensors)
            version = part.exchange.version(server)
            seen.values[part.number, version] = hashlib.sha256(content).hexdigest()
    optimizer.close()


def check_parts(workers: list[Seen]) -> None:
    """Two workers at the same version of a part have the same bits."""
    known: dict[tuple[int, int], str] = {}
    for worker in workers:
        for place, content in worker.values.items():
            assert known.setdefault(place, content) == content, place
    assert len(known) < sum(len(worker.values) for worker in workers)  # there were such parts


def as_threads(plan: Plan, ranks: int) -> list[Seen]:
    """Their order is always the same."""

    def run(rank: int) -> Seen:
        return train(plan)

    return threads(ranks, run)


def run_both(plan: Plan, ranks: int) -> list[list[Seen]]:
    """With each barrier, the same ranks as threads."""
    plans = [replace(plan, arguments=plan.arguments | {"barrier": each}) for each in BARRIERS]
    return [as_threads(one, ranks) for one in plans]


@pytest.mark.parametrize("codec", CODECS)
def test_two_workers_and_a_backup_that_never_comes(codec: str) -> None:
    """All versions have the pushes of the same two workers, so the barriers make the same bits."""
    plan = Plan({"codec": codec, "backup_workers": 1}, servers=2, steps={2: 0})
    for one, other in zip(*run_both(plan, 5), strict=True):
        assert one.losses == other.losses
        assert one.final == other.final
        if one.losses:
            assert one.versions == other.versions == list(range(1, VERSIONS + 1))
            assert one.final != digest(make_model())


@pytest.mark.parametrize("codec", CODECS)
def test_a_worker_takes_the_turns_of_two_that_are_away(codec: str) -> None:
    """From version 1 on both pushes are of worker 0, with either barrier."""
    plan = Plan({"codec": codec} | TURNS, steps={1: 1, 2: 0})
    expected, answers = run_both(plan, 4)
    for one, other in zip(expected, answers, strict=True):
        assert one.losses == other.losses
        assert one.final == other.final
    versions = [1, *(v for made in range(1, VERSIONS) for v in (made, made + 1))]
    assert expected[0].versions == answers[0].versions == versions
    if codec == "raw":
        check_pairs(plan, expected[0])


def check_pairs(plan: Plan, worker: Seen) -> None:
    """Version 0 has the first pushes of two workers, each later one has two of worker 0."""
    model = make_model()
    optimizer = sgd(model.parameters())
    pairs = [((0, 0), (1, 0))]
    pairs += [((0, step), (0, step + 1)) for step in range(1, 2 * plan.versions - 1, 2)]
    for pair in pairs:
        optimizer.zero_grad()
        for rank, step in pair:
            (plan.loss(model, rank, step) / 2).backward()
        optimizer.step()
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(worker.model[name], tensor.detach(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("branch", [0, 1])
@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_tensor_that_one_of_two_pushes_has_no_gradient_of_is_stepped(
    barrier: str, branch: int
) -> None:
    arguments = TURNS | {"barrier": barrier, "codec": "raw"}
    plan = Plan(arguments, steps={1: 1, 2: 0}, versions=4, branch=branch)
    check_pairs(plan, as_threads(plan, 4)[0])


@pytest.mark.parametrize("staleness", [1, 3])
def test_no_part_is_staler_than_the_bound(staleness: int) -> None:
    plan = Plan({"staleness": staleness, "barrier": "tensor"}, servers=2, versions=30)
    answers = as_threads(plan, 5)
    workers = answers[:3]
    check_parts(workers)
    for worker in workers:
        assert max(worker.ahead) <= staleness
        assert len(worker.losses) >= 30
        assert worker.versions == sorted(worker.versions)
        assert worker.final == workers[0].final
    assert max(workers[0].ahead) == staleness
    assert sum(worker.stats["dropped_pushes"][3] for worker in workers) == 0


@pytest.mark.parametrize("history", [64, 2])
@pytest.mark.parametrize("more", [{}, TURNS, {"staleness": 1}], ids=str)
def test_a_late_worker_catches_up_part_by_part(more: dict[str, Any], history: int) -> None:
    common: dict[str, Any] = {"backup_workers": 1, "history": history, "barrier": "tensor"}
    arguments = common | more
    answers = as_threads(Plan(arguments, servers=2, late=(2, 4), versions=40), 5)
    workers, servers = answers[:3], answers[3:]
    check_parts(workers)
    for worker in workers:
        assert max(worker.ahead) <= arguments.get("staleness", 0)
        assert worker.versions == sorted(worker.versions)
        assert worker.versions[-1] >= 40
        assert worker.final == workers[0].final
        assert all(torch.isfinite(tensor).all() for tensor in worker.model.values())
    assert 4 < len(workers[1].losses) < len(workers[0].losses)
    assert all(server.stats["dropped_pushes"][1] > 0 for server in servers)
    assert all((server.stats["models_sent"] > 0) is (history == 2) for server in servers)


@pytest.mark.parametrize("more", [{}, TURNS, {"staleness": 1}], ids=str)
def test_a_worker_with_parts_at_several_versions_pushes_for_the_oldest(
    more: dict[str, Any],
) -> None:
    common: dict[str, Any] = {"backup_workers": 1, "barrier": "tensor"}
    answers = as_threads(Plan(common | more, servers=2, torn=(2, 4), versions=40), 5)
    workers = answers[:3]
    check_parts(workers)
    held_back = [sum(worker.stats["dropped_pushes"].values()) for worker in workers]
    assert held_back[0] == held_back[2] == 0
    assert 0 < held_back[1] <= 16  # in each of two times, the 4 parts in 2 steps
    assert {worker.final for worker in workers} == {workers[0].final}


@pytest.mark.parametrize("more", [{"backup_workers": 1}, TURNS], ids=str)
def test_workers_that_are_equally_fast_end_with_one_model(more: dict[str, Any]) -> None:
    """The last one is late by a moment in each version, which costs it its push and no step."""
    plan = Plan(more | {"barrier": "tensor"}, versions=20)
    answers = as_threads(plan, 4)
    check_parts(answers[:3])
    for worker in answers[:3]:
        assert worker.versions == list(range(1, 21))
        assert worker.final == answers[0].final
    assert sum(answers[3].stats["dropped_pushes"].values()) > 0


@pytest.mark.parametrize("more", [{"backup_workers": 1}, TURNS], ids=str)
def test_training_goes_on_without_a_worker_that_dies_in_its_backward_pass(
    fragile_cluster: Cluster, more: dict[str, Any]
) -> None:
    """Some of its parts were pushed in that step, others not."""
    fragile_cluster.start(3, train_attention, Way(victim=1, steps=30, arguments=more))
    answers = fragile_cluster.collect(range(3), seconds=90)
    assert isinstance(answers[1], Died)
    assert isinstance(answers[0], Trained), answers[0].trace
    assert isinstance(answers[2], Trained), answers[2].trace
    assert len(answers[0].losses) >= 29


def test_messages_for_a_part_in_use_wait_for_the_end_of_the_step() -> None:
    """In the order in which they came; others are handled at once."""
    handled: list[Message] = []

    def note(side: Side[Any], message: Message) -> None:
        handled.append(message)

    working = Working.__new__(Working)
    working._in_use, working._held, working._again = set(), [], None
    kinds = [(Kind.PACKET, 3), (Kind.PACKET, 2), (Kind.CATCH_UP, 3), (Kind.OVER, 3)]
    messages = [Message(5, kind, NOTHING, part, 0.0) for kind, part in kinds]
    with mock.patch.object(Side, "_handle", note):
        working.use(3)
        for message in messages:
            working._handle(message)
        assert handled == [messages[1], messages[3]]
        working.release()
        assert handled == [messages[1], messages[3], messages[0], messages[2]]


def test_stale_pulls_do_not_change_what_a_forward_pass_has_used(cluster: Cluster) -> None:
    """Tied, checkpointed and uncalled modules; PyTorch finds a tensor that changes before its
    gradient is computed."""
    way = Way(steps=25, arguments={"staleness": 2}, servers=2, pause={1: 0.02})
    answers = cluster.run(5, train_attention, way)
    for worker in answers[:3]:
        assert len(worker.losses) >= 25
        assert worker.final == answers[0].final
        assert worker.losses[-1] < worker.losses[0]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "word": (
        {"backup_workers": BackupWorkers(1, "all")},
        "turns is 'all'; valid ones are own and any",
    ),
    "backup": ({"backup_workers": BackupWorkers(0, "any")}, "is 0 and must be 1 or more"),
    "stale": (TURNS | {"staleness": 1}, "staleness is 1 and must be 0"),
    "pulls": ({"pulls": "gradients", "backup_workers": 1}, "backup_workers is 1, valid is 0"),
}


def test_turns_that_nobody_can_have_are_refused() -> None:
    def refuse(rank: int) -> None:
        for arguments, words in REFUSED.values():
            model = nn.Linear(INPUTS, 3)
            said = said_by(partial(ServerOptimizer, sgd(model.parameters()), **arguments))
            assert said.startswith("ValueError")
            assert words in said

    threads(3, refuse)

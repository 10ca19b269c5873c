"""`Overlap.NEXT_STEP`: double buffering with the hook, averages one step late."""

from __future__ import annotations

import copy
import hashlib
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster import Cluster, Failed
from gradwire.torch import GradwireState, Overlap, gradwire_hook, reshard
from runs import said_by, threads
from training import batch, loss_of, make_model, make_optimizer

LATE: dict[str, Any] = {"overlap": Overlap.NEXT_STEP}
STEPS = 8


class Convolutional(nn.Module):
    """Parameters that lie in memory in another order than row-major."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(4, 24, 3)
        self.last = nn.Linear(24 * 2 * 2, 5)
        weight = self.conv.weight
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x.view(-1, 4, 3, 4), (0, 0, 0, 1))
        return self.last(torch.relu(self.conv(x)).flatten(1))


@dataclass(frozen=True)
class Plan:
    """How the ranks train. saved: states by rank, and the number of their steps. noted: the number
    of steps after which the state is noted."""

    arguments: dict[str, Any] = field(default_factory=lambda: {"codec": "raw"} | LATE)
    steps: int = STEPS
    convolutional: bool = False
    ddp: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": 0.05})
    saved: tuple[list[dict[str, Any]], int] | None = None
    noted: int = -1


@dataclass
class Seen:
    model: dict[str, torch.Tensor]
    digests: list[str]
    state: dict[str, Any]
    stats: dict[str, Any]


def train(rank: int, plan: Plan) -> Seen:
    model = Convolutional() if plan.convolutional else make_model()
    optimizer = make_optimizer(model)
    ddp = DistributedDataParallel(model, **plan.ddp)
    state = GradwireState(**plan.arguments)
    ddp.register_comm_hook(state, gradwire_hook)
    first, noted, digests = 0, {}, []
    if plan.saved is not None:
        states, first = plan.saved
        saved = copy.deepcopy(states[rank])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["gradwire"])
    for step in range(first, plan.steps):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        digests.append(hashlib.sha256(content).hexdigest())
        if step + 1 == plan.noted:
            noted = copy.deepcopy(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "gradwire": state.state_dict(),
                }
            )
    state.close()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Seen(parameters, digests, noted, state.stats().as_dict())


def train_alone(plan: Plan, ranks: int, start: int) -> dict[str, torch.Tensor]:
    """The same without gradwire: from step `start` on, the average of the step before."""
    model = Convolutional() if plan.convolutional else make_model()
    optimizer = make_optimizer(model)
    before = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(plan.steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            (loss_of(model, rank, step) / ranks).backward()
        if step >= start:
            now = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            for parameter, gradient in zip(model.parameters(), before, strict=True):
                parameter.grad = gradient
            before = now
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("convolutional", [False, True])
def test_each_step_applies_the_average_of_the_step_before(
    cluster: Cluster, start: int, convolutional: bool
) -> None:
    """With start_iter=0 the first step is before DDP has made its final buckets."""
    arguments = {"codec": "raw", "start_iter": start} | LATE
    plan = Plan(arguments, convolutional=convolutional)
    answers = cluster.run(2, run, plan)
    assert answers[0].digests == answers[1].digests
    for name, expected in train_alone(plan, 2, start).items():
        torch.testing.assert_close(answers[0].model[name], expected, atol=2e-6, rtol=1e-5)
    assert answers[0].stats["steps"] == STEPS


def run(plan: Plan) -> Seen:
    return train(torch.distributed.get_rank(), plan)


@pytest.mark.parametrize("codec", ["3lc:s=1.00,coder=rice", "qsgd:bits=4", "int8"])
def test_replicas_are_equal_and_sent_as_much(cluster: Cluster, codec: str) -> None:
    plan = Plan({"codec": codec} | LATE)
    late = cluster.run(3, run, plan)
    assert {tuple(answer.digests) for answer in late} == {tuple(late[0].digests)}
    usual = cluster.run(3, run, Plan({"codec": codec}))
    assert usual[0].digests[:2] == late[0].digests[:2]  # raw steps
    assert usual[0].digests[2] != late[0].digests[2]
    assert late[0].stats["values"] == usual[0].stats["values"]


@pytest.mark.parametrize("convolutional", [False, True])
def test_a_state_has_the_average_that_is_under_way(cluster: Cluster, convolutional: bool) -> None:
    """DDP makes other buckets in the first step after a restart, so the codec is one whose averages
    do not depend on them."""
    arguments = {"codec": "raw", "start_iter": 0} | LATE
    plan = Plan(arguments, convolutional=convolutional, noted=4)
    whole = cluster.run(2, run, plan)
    states = [answer.state for answer in whole]
    assert states[0]["gradwire"]["late"].keys() == whole[0].model.keys()
    for name, average in states[0]["gradwire"]["late"].items():
        assert torch.equal(average, states[1]["gradwire"]["late"][name])
        assert average.any() or "bias" in name
    resumed = cluster.run(2, run, replace(plan, saved=(states, 4)))
    assert resumed[0].digests == whole[0].digests[4:]
    moved = reshard([state["gradwire"] for state in states], 3)
    for state in moved:
        assert state["late"].keys() == states[0]["gradwire"]["late"].keys()
    for state in states:
        del state["gradwire"]["late"]
    without = cluster.run(2, run, replace(plan, saved=(states, 4)))
    assert without[0].digests[0] != whole[0].digests[4]


def sleep_and_measure(seconds: float) -> list[float]:
    """Seconds of each step, with an exchange that takes as long as the computation: rank 1's
    gradients come `seconds` later than rank 0's, in the odd steps, and the reverse in the even."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    state = GradwireState("raw", start_iter=0, **LATE)
    ddp.register_comm_hook(state, gradwire_hook)
    rank, times = torch.distributed.get_rank(), []
    for step in range(6):
        begun = time.perf_counter()
        if step >= 2 and step % 2 == rank:
            time.sleep(seconds)
        loss_of(ddp, rank, step).backward()
        times.append(time.perf_counter() - begun)
    state.close()
    return times


def test_a_rank_does_not_wait_for_the_gradients_of_its_step(cluster: Cluster) -> None:
    """In two steps each rank sleeps once: together they take one sleep, and not two."""
    first, second = cluster.run(2, sleep_and_measure, 0.6)
    assert first[2] > 0.6
    assert second[2] < 0.3
    assert sum(first[2:6]) < 4 * 0.6 - 0.5
    assert sum(second[2:6]) < 4 * 0.6 - 0.5


def fail(kind: str) -> str:
    rank = torch.distributed.get_rank()
    arguments: dict[str, Any] = {"codec": "raw", "start_iter": 0} | LATE
    options: dict[str, Any] = {}
    if kind == "other":
        arguments |= {"overlap": Overlap.ON} if rank == 1 else {}
    if kind == "unused":
        options = {"find_unused_parameters": True}
    model = make_model()
    if kind == "frozen later":
        options = {"static_graph": True}
    ddp = DistributedDataParallel(model, **options)
    ddp.register_comm_hook(GradwireState(**arguments), gradwire_hook)
    for step in range(3):
        inputs, _ = batch(rank, step)
        ddp(inputs, use_branch=kind != "frozen later").sum().backward()
        model.zero_grad()
    return "nothing"


WRONG = {
    "other": "averages one step late",
    "unused": "find_unused_parameters=True: overlap=Overlap.NEXT_STEP needs a gradient of every",
    "frozen later": "has no gradient in this step: overlap=Overlap.NEXT_STEP needs a gradient",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_late_averages_rule_out_is_said(fragile_cluster: Cluster, kind: str) -> None:
    fragile_cluster.start(2, fail, kind)
    answers = fragile_cluster.collect(range(2), seconds=60).values()
    said = [answer.message for answer in answers if isinstance(answer, Failed)]
    assert len(said) == 2, answers
    assert any(WRONG[kind] in text for text in said), said


def test_a_scaler_and_a_state_of_another_overlap_are_refused() -> None:
    def refuse(rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu")
        said = said_by(lambda: GradwireState(scaler=scaler, overlap=Overlap.NEXT_STEP))
        assert said.startswith("ValueError")
        assert "takes no scaler" in said
        state = GradwireState(**LATE).state_dict() | {"late": {"w": torch.ones(3)}}
        said = said_by(lambda: GradwireState().load_state_dict(state))
        assert "the state has late averages" in said

    threads(1, refuse)

"""Functions that a test cluster runs with LocalSteps whose model is cut into fragments."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.torch import LocalSteps, outer_nesterov, sparse_loco
from gradwire.torch.optimizers.fragment import deal_layers
from gradwire.torch.optimizers.local_rules import OuterFactory
from gradwire.torch.options import grouped
from optimizer_jobs import LOCAL, take_step
from training import batch, load, make_model, save

WIDTH, CLASSES = 16, 5
OUTERS: dict[str, OuterFactory | None] = {
    "none": None,
    "diloco": outer_nesterov(),
    "slow": outer_nesterov(0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
}


Parameters = dict[str, np.ndarray]


@dataclass(frozen=True)
class Streamed:
    """How the ranks train."""

    options: dict[str, Any]  # of LocalSteps
    local: str = "sgd"
    outer: str = "none"
    steps: int = 12
    start: int = 0
    synchronize_at: int | None = None
    infinite_step: int | None = None  # the last rank's gradient becomes infinite
    saves_each_step: bool = False
    saved: list[bytes] | None = None  # by rank, for a restart


@dataclass
class Course:
    """The results of one rank, with an entry for each step."""

    tensors: list[dict[str, str]] = field(default_factory=list)  # a digest of each parameter
    anchors: list[dict[str, str]] = field(default_factory=list)
    push_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)  # at the end
    stats: dict[str, Any] = field(default_factory=dict)
    report: str = ""
    warnings: list[str] = field(default_factory=list)
    saved: bytes = b""
    layouts: int = 0  # that the ranks compared and kept


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.detach().numpy().tobytes()).hexdigest()


def train_each(runs: list[Streamed]) -> list[Course]:
    return [train(run) for run in runs]


def train(run: Streamed) -> Course:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model, course = make_model(), Course()
    optimizer = LocalSteps(
        LOCAL[run.local](model.parameters()), model, outer=OUTERS[run.outer], **grouped(run.options)
    )
    if run.saved is not None:
        state = load(run.saved[rank])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(run.start, run.start + run.steps):
            inputs, labels = batch(rank, step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            if step == run.infinite_step and rank == last:
                gradient = model.second.weight.grad
                assert gradient is not None
                gradient.view(-1)[3] = float("inf")
            optimizer.step()
            if step == run.synchronize_at:
                optimizer.synchronize()
            if run.saves_each_step:
                optimizer.state_dict()
            course.losses.append(loss.item())
            course.push_bytes.append(optimizer.last_step()["push_bytes"])
            course.tensors.append({n: _digest(p) for n, p in model.named_parameters()})
            anchors = {name: _digest(anchor) for name, anchor in optimizer.anchors().items()}
            course.anchors.append(anchors)
    course.layouts = len(optimizer._peers.session.runner._buckets)
    course.warnings = [str(warning.message) for warning in caught]
    course.saved = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    course.parameters = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    course.stats = optimizer.stats().as_dict()
    course.report = optimizer.stats().report()
    optimizer.close()
    return course


Change = Callable[[str, list[torch.Tensor]], torch.Tensor]
Step = Callable[[str, torch.Tensor], torch.Tensor]


def run_by_hand(run: Streamed, world_size: int, average: Change, outer: Step) -> list[Parameters]:
    """Streaming DiLoCo (arXiv:2501.18512, algorithm 2) in one process. The parameters of each rank
    at the end.

    average   of the ranks' changes of a parameter
    outer     what is subtracted from a parameter's anchor, given the average
    """
    every = run.options["every"]
    count, delay, mix = (run.options.get(key, 0) for key in ("fragments", "delay", "mix"))
    models = [make_model() for _ in range(world_size)]
    optimizers = [LOCAL[run.local](model.parameters()) for model in models]
    named = list(models[0].named_parameters())
    fragments = [[named[p][0] for p in places] for places in deal_layers(named, count or 1)]
    anchor = {name: values.detach().clone() for name, values in named}
    under_way: dict[int, list[tuple[str, torch.Tensor]]] = {}  # by the step that applies them
    for step in range(1, run.steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, labels = batch(rank, step - 1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with torch.no_grad():
            for index, names in enumerate(fragments):
                if step % every == (index + 1) * every // len(fragments) % every:
                    under_way[step + delay] = [
                        (n, average(n, [anchor[n] - m.get_parameter(n) for m in models]))
                        for n in names
                    ]
            for name, change in under_way.pop(step, []):
                anchor[name] -= outer(name, change)
                for model in models:
                    mine = model.get_parameter(name)
                    mine.copy_(mix * mine + (1 - mix) * anchor[name])
    return [
        {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        for model in models
    ]


def stream_by_hand(run: Streamed, world_size: int) -> list[Parameters]:
    """With float32 averages and Nesterov momentum by its formula."""
    velocity: dict[str, torch.Tensor] = {}

    def outer(name: str, change: torch.Tensor) -> torch.Tensor:
        velocity[name] = 0.9 * velocity.get(name, torch.zeros_like(change)) + change
        return 0.7 * (change + 0.9 * velocity[name])

    return run_by_hand(run, world_size, lambda _, changes: torch.stack(changes).mean(0), outer)


def sparse_loco_by_hand(run: Streamed, world_size: int) -> list[Parameters]:
    """Every rank's changes go through the codec, with a residual that decays (arXiv:2508.15706)."""
    owed: dict[tuple[str, int], np.ndarray] = {}
    codec = run.options["codec"] + ",ef=off"

    def average(name: str, changes: list[torch.Tensor]) -> torch.Tensor:
        decoded = []
        for rank, change in enumerate(changes):
            values = change.numpy().ravel()
            if change.dim() > 1:  # others go raw
                values = values + owed.get((name, rank), 0.0)
                sent = gradwire.decode(gradwire.encode(values.astype(np.float32), codec))
                owed[name, rank] = run.options["residual_decay"] * (values - sent)
                values = sent
            decoded.append(torch.tensor(values).view_as(change))
        return torch.stack(decoded).mean(0)

    return run_by_hand(run, world_size, average, lambda _, change: change)


def residuals(saved: bytes) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = load(saved)["optimizer"]["residuals"]
    return entries


def refusals(all_options: list[dict[str, Any]]) -> list[str]:
    said = []
    for options in all_options:
        model = make_model()
        try:
            LocalSteps(LOCAL["sgd"](model.parameters()), model, **grouped(options))
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def step_before_the_peer() -> list[bool]:
    """Rank 0 returns from the steps of a whole delay before rank 1 takes the step that begins the
    exchange; the exchanges that the steps of rank 0 had applied by then."""
    model = make_model()
    options: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 2, "timeout": 20.0}
    optimizer = LocalSteps(LOCAL["sgd"](model.parameters()), model, **grouped(options))
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)
    applied = []
    for step in range(4):
        take_step(model, optimizer, step)
        applied.append(optimizer.last_step()["step"] >= 0)
        if dist.get_rank() == 0 and step == 2:  # an exchange began one step ago
            dist.send(torch.zeros(1), 1)
    optimizer.close()
    return applied


def push_bytes_of_layers(layers: int, options: dict[str, Any], steps: int) -> list[int]:
    """The bytes that each step's exchange pushed, for a stack of equal layers."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    optimizer = LocalSteps(torch.optim.SGD(model.parameters(), lr=0.01), model, **grouped(options))
    pushed = []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        pushed.append(optimizer.last_step()["push_bytes"])
    optimizer.close()
    return pushed


def learn_sparsely(density: float, steps: int) -> tuple[float, int]:
    return learn("none", {"every": 8, **sparse_loco(density)}, steps)


def learn(outer: str, options: dict[str, Any], steps: int) -> tuple[float, int]:
    """The loss on data of no rank, after a training on what a fixed network says; the bytes that
    this rank has pushed and pulled."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    model = nn.Sequential(
        *(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU()),
        *(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, CLASSES)),
    )
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = LocalSteps(adamw, model, **grouped({"outer": OUTERS[outer], **options}))

    def loss_on(seed: int, samples: int) -> torch.Tensor:
        inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            labels = teacher(inputs).argmax(dim=1)
        return nn.functional.cross_entropy(model(inputs), labels)

    for step in range(steps):
        optimizer.zero_grad()
        loss_on(1000 * (1 + dist.get_rank()) + step, 32).backward()
        optimizer.step()
    optimizer.synchronize()
    stats = optimizer.stats().as_dict()
    optimizer.close()
    return loss_on(7, 2048).item(), stats["push_bytes"] + stats["pull_bytes"]

"""Trainings of a few steps, by threads or by processes, and what each rank has seen of its own."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from gradwire.torch import loopback
from owed import Owed, owed_in
from training import TwoPaths, loss_of, make_model
from ways import Inner, Loss, Training, Way, build, local_of

Result = TypeVar("Result")
State = dict[str, Any]
Deed = Callable[[Training], object]
INFINITE_NAME = "second.weight"


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)


def adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=2e-3)


def adagrad(parameters: Any) -> Optimizer:
    """It has its state before the first step."""
    return Adagrad(parameters, lr=0.02, initial_accumulator_value=0.1)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=2e-3, weight_decay=0.1)


def sgd_of_two_groups(parameters: Iterable[nn.Parameter]) -> Optimizer:
    given = list(parameters)
    thin, thick = ([p for p in given if (p.dim() < 2) is is_thin] for is_thin in (True, False))
    return sgd([{"params": thick, "lr": 0.02}, {"params": thin, "weight_decay": 0.0}])


def make_different_model() -> TwoPaths:
    """Parameters and a buffer differ between ranks, until all take those of rank 0."""
    model = make_model()
    model.register_buffer("seen", torch.tensor(dist.get_rank(), dtype=torch.int64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * dist.get_rank())
    return model


def _nothing(training: Training) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """How all ranks train.

    Attributes:
        way: how gradwire takes part.
        inner: makes the user's optimizer.
        steps: in all, with those before a restart.
        saved: the states of all ranks to go on from; None: the beginning.
        start: how many steps the saved states have.
        notes: numbers of steps after which the state is noted.
        with_gradients: by the number of steps before, what happens between backward and step.
        after: by the number of steps, what happens then.
        scheduled: a scheduler halves the learning rates in every second step.
        scale: the first scale of a GradScaler.
        begin: happens before the first step.
    """

    way: Way
    inner: Inner = sgd
    steps: int = 6
    saved: Sequence[State] | None = None
    start: int = 0
    notes: Collection[int] = ()
    with_gradients: Mapping[int, Deed] = field(default_factory=dict)
    after: Mapping[int, Deed] = field(default_factory=dict)
    scheduled: bool = False
    scale: float | None = None
    begin: Deed = _nothing
    loss: Loss = loss_of
    model: Callable[[], nn.Module] = make_different_model


@dataclass
class Run:
    """What one rank has seen. Lists have an entry for each step."""

    training: Training
    tensors: list[dict[str, str]] = field(default_factory=list)  # a digest of each parameter
    anchors: list[dict[str, str]] = field(default_factory=list)  # of LocalSteps
    push_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)  # by the number of steps
    warnings: list[Warning] = field(default_factory=list)  # of a thread
    stats: dict[str, Any] = field(default_factory=dict)
    report: str = ""

    @property
    def digests(self) -> list[str]:
        return ["".join(tensors.values()) for tensors in self.tensors]

    @property
    def state(self) -> State:
        """At the end."""
        return self.states[max(self.states)]

    def said(self, category: type[Warning]) -> list[str]:
        return [str(warning) for warning in self.warnings if isinstance(warning, category)]

    def owed(self, steps: int) -> Owed:
        return owed_in(self.states[steps]["optimizer"])


def run(case: Case) -> Run:
    """Trains as one rank."""
    training = build(case.way, case.model(), case.inner)
    run, source = Run(training), training.source
    halving = StepLR(training.optimizer, 2, 0.5) if case.scheduled else None
    if case.saved is not None:
        state = case.saved[dist.get_rank()]
        training.load(state, case.start)
        if halving is not None:
            halving.load_state_dict(state["halving"])
    if case.scale is not None:
        training.scaler = torch.amp.GradScaler("cpu", case.scale)
    if case.with_gradients:
        training.use_gradients = lambda steps: case.with_gradients.get(steps, _nothing)(training)

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        value = case.loss(module, rank, step)
        run.losses.append(value.item())
        return value

    def note(steps: int) -> None:
        case.after.get(steps, _nothing)(training)
        if halving is not None:
            halving.step()
        run.tensors.append(digests_of(training.values()))
        if hasattr(source, "anchors"):
            run.anchors.append(digests_of(source.anchors()))
        if hasattr(source, "last_step"):
            run.push_bytes.append(source.last_step()["push_bytes"])
        if steps in case.notes or steps == case.steps:
            run.states[steps] = training.state()
            if halving is not None:
                run.states[steps]["halving"] = dict(halving.state_dict())

    _here.said = run.warnings
    case.begin(training)
    training.run(case.steps - case.start, loss, note)
    assert not any(values.any() for values in training.model.buffers()), "rank 0 has zeros"
    if source is not None:
        run.stats, run.report = source.stats().as_dict(), source.stats().report()
    training.close()
    return run


def run_each(world: int, cases: Mapping[str, Case]) -> list[dict[str, Run]]:
    """For each rank, a thread, the runs by their names."""
    return threads(world, lambda rank: {name: run(case) for name, case in cases.items()})


def run_one(world: int, case: Case) -> list[Run]:
    return threads(world, lambda rank: run(case))


def threads(world: int, job: Callable[[int], Result]) -> list[Result]:
    """As `loopback.run`; each rank's warnings go to its own run."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda said, *args, **more: _here.said.append(said)
        return loopback.run(world, job)


class _Here(threading.local):
    """Where a thread's warnings go."""

    def __init__(self) -> None:
        self.said: list[Any] = []


_here = _Here()


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(local_of(values).reshape(-1).view(torch.uint8).numpy()).hexdigest()
        for name, values in tensors.items()
    }


def make_infinite(training: Training) -> None:
    """One value of the last rank's gradient."""
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient = training.model.get_parameter(INFINITE_NAME).grad
        assert gradient is not None
        local_of(gradient).view(-1)[3] = float("inf")


def settle(training: Training) -> None:
    training.settle()


def kill(victim: int, training: Training) -> None:
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)


def restarted(case: Case, ranks: Sequence[Run], steps: int) -> Case:
    """The same from the states that were noted after so many steps."""
    return replace(case, saved=[rank.states[steps] for rank in ranks], start=steps)


def said_by(call: Callable[[], object]) -> str:
    """The type and text of the error that it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

"""Functions that a test cluster runs with ShardedOptimizer or LocalSteps instead of the hook."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import LocalSteps, ShardedOptimizer, outer_nesterov
from gradwire.torch.errors import NonFiniteStepWarning
from gradwire.torch.options import grouped
from jobs import Owed, owed_in
from training import TwoPaths, batch, digest, load, make_model, save

LOCAL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=2e-3),
    "calm": lambda p: torch.optim.Adam(p, lr=2e-3, betas=(0.5, 0.99)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.1),
    # Its divisor is eps.
    "steady": lambda p: torch.optim.Adam(p, lr=1e3, eps=1e6),
}
INFINITE_NAME = "second.weight"


@dataclass(frozen=True)
class Wrapped:
    """How the ranks train. `make` names the wrapper; None: DDP with the optimizer itself."""

    make: str | None = "sharded"
    local: str = "sgd"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    start: int = 0
    scheduled: bool = False
    two_groups: bool = False
    infinite_step: int | None = None  # the last rank's gradient or parameter becomes infinite
    synchronize_at: int | None = None
    saved: list[bytes] | None = None  # by rank, for a restart
    scale: float | None = None  # the first scale of a GradScaler


@dataclass
class Run:
    """The results of one rank. Lists have an entry for each step."""

    digests: list[str]
    losses: list[float]
    parameters: dict[str, np.ndarray]
    stats: dict[str, Any]
    report: str
    push_bytes: list[int]
    warnings: list[str]
    owed: list[Owed]
    state_bytes: int
    exact: list[tuple[str, int, np.ndarray]]
    saved: bytes


WRAPPERS: dict[str, Callable[..., Any]] = {
    "sharded": lambda *args, **options: ShardedOptimizer(*args, **grouped(options)),
    "local": lambda *args, **options: LocalSteps(*args, outer=None, **grouped(options)),
    "diloco": lambda *args, **options: LocalSteps(
        *args, outer=outer_nesterov(), **grouped(options)
    ),
    "slow": lambda *args, **options: LocalSteps(
        *args, outer=outer_nesterov(0.1), **grouped(options)
    ),
}


def run_each(all_options: list[Wrapped]) -> list[Run]:
    return [run(options) for options in all_options]


def run_unlike(options_by_rank: list[Wrapped]) -> Run:
    return run(options_by_rank[dist.get_rank()])


def groups(model: nn.Module, two: bool) -> Any:
    if not two:
        return model.parameters()
    thin = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "lr": 0.02},
        {"params": thin, "weight_decay": 0.0},
    ]


def make_different_model() -> TwoPaths:
    """Parameters and a buffer differ between ranks, until all take those of rank 0."""
    model = make_model()
    model.register_buffer("seen", torch.tensor(dist.get_rank(), dtype=torch.int64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * dist.get_rank())
    return model


def run(options: Wrapped, on_step: Callable[[int], None] = lambda step: None) -> Run:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = make_different_model()
    optimizer: Any = LOCAL[options.local](groups(model, options.two_groups))
    forward: nn.Module = model
    if options.make is None:
        forward = DistributedDataParallel(model)
    else:
        optimizer = WRAPPERS[options.make](optimizer, model, **options.options)
        assert int(model.get_buffer("seen")) == 0
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if options.scheduled else None
    if options.saved is not None:
        state = load(options.saved[rank])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(state["scheduler"])
    scaler = torch.amp.GradScaler("cpu", options.scale or 1.0, enabled=options.scale is not None)
    result = Run([], [], {}, {}, "", [], [], [], 0, [], b"")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(options.start, options.start + options.steps):
            on_step(step)
            inputs, labels = batch(rank, step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(forward(inputs), labels)
            scaler.scale(loss).backward()
            if options.infinite_step == step and rank == last:
                gradient = model.get_parameter(INFINITE_NAME).grad
                assert gradient is not None
                gradient.view(-1)[3] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            if step == options.synchronize_at:
                optimizer.synchronize()
            if scheduler is not None:
                scheduler.step()
            result.losses.append(loss.item())
            result.digests.append(digest(model))
            if options.make is not None:
                result.push_bytes.append(optimizer.last_step()["push_bytes"])
                if options.infinite_step is not None:
                    result.owed.append(owed_in(optimizer.state_dict()))
    result.warnings = [str(w.message) for w in caught if w.category is NonFiniteStepWarning]
    result.parameters = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    if options.make is None:
        return result
    state = optimizer.state_dict()
    result.owed.append(owed_in(state))
    result.stats = optimizer.stats().as_dict()
    result.report = optimizer.stats().report()
    if options.make == "sharded":
        result.state_bytes = optimizer.state_bytes()
        result.exact = [
            (p["name"], p["offset"], p["values"].numpy()) for p in state["shard"]["pieces"]
        ]
    saved = {"model": model.state_dict(), "optimizer": state}
    if scheduler is not None:
        saved["scheduler"] = scheduler.state_dict()
    result.saved = save(saved)
    optimizer.close()
    return result


def run_and_die(options: Wrapped, victim: int, at_step: int) -> None:
    def on_step(step: int) -> None:
        if dist.get_rank() == victim and step == at_step:
            os.kill(os.getpid(), signal.SIGKILL)

    run(options, on_step)


def refusals_of_sharded() -> dict[str, str]:
    """The type and text of each error, by the name of the wrong use."""
    said: dict[str, str] = {}

    def note(what: str, call: Callable[[], Any]) -> None:
        try:
            call()
            said[what] = "nothing"
        except Exception as error:
            said[what] = f"{type(error).__name__}: {error}"

    def wrap(make: Callable[[nn.Module], torch.optim.Optimizer]) -> ShardedOptimizer:
        model = make_model()
        return ShardedOptimizer(make(model), model)

    def wrap_in_ddp(model: nn.Module) -> ShardedOptimizer:
        return ShardedOptimizer(LOCAL["sgd"](model.parameters()), DistributedDataParallel(model))

    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = LOCAL["adam"](model.parameters())
        model(batch(0, 0)[0]).sum().backward()
        optimizer.step()
        return optimizer

    def frozen(model: nn.Module) -> torch.optim.Optimizer:
        model.get_parameter("last.bias").requires_grad_(False)
        return LOCAL["sgd"](model.parameters())

    def swap(model: nn.Module) -> ShardedOptimizer:
        return ShardedOptimizer(model, LOCAL["sgd"](model.parameters()))  # type: ignore[arg-type]

    note("order", lambda: swap(make_model()))
    note("lbfgs", lambda: wrap(lambda m: torch.optim.LBFGS(m.parameters())))
    note("stepped", lambda: wrap(stepped))
    note("frozen", lambda: wrap(frozen))
    note("foreign", lambda: wrap(lambda m: LOCAL["sgd"](make_model().parameters())))
    note("ddp", lambda: wrap_in_ddp(make_model()))
    note("double", lambda: wrap(lambda m: LOCAL["sgd"](m.double().parameters())))
    model = make_model()
    inner = LOCAL["adam"](model.parameters())
    optimizer = ShardedOptimizer(inner, model, "3lc")
    note("group", lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0, 0)[0]).sum()).backward()
    note("scaler", lambda: scaler.step(optimizer))
    last = model.get_parameter("last.weight")
    last.grad = torch.ones_like(last).to_sparse()
    note("sparse", optimizer.step)
    model.zero_grad()
    state = optimizer.state_dict()
    note("rank", lambda: optimizer.load_state_dict(state | {"rank": 5}))
    note("codec", lambda: optimizer.load_state_dict(state | {"codec": "raw"}))
    note("format", lambda: optimizer.load_state_dict({"some": "thing"}))
    other = make_model()
    sgd = ShardedOptimizer(LOCAL["sgd"](other.parameters()), other, "3lc")
    note("class", lambda: sgd.load_state_dict(state))
    optimizer.close()
    note("closed", optimizer.step)
    return said


def explode() -> str:
    """An optimizer turns finite gradients into infinity, on the rank that owns a parameter."""
    model = make_model()
    optimizer = ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=1e38), model)
    for step in range(3):
        (100 * model(batch(dist.get_rank(), step)[0])).square().sum().backward()
        optimizer.step()
    return "nothing"


def state_bytes_of(layers: int, width: int) -> int:
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    optimizer = ShardedOptimizer(torch.optim.Adam(model.parameters()), model)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return optimizer.state_bytes()


def drop_optimizers() -> tuple[int, int]:
    """Number of gradwire threads: with two optimizers, and after the last reference is gone."""
    gc.collect()
    before = _own_threads()
    model = make_model()
    kept: list[Any] = [
        ShardedOptimizer(LOCAL["sgd"](model.parameters()), model),
        LocalSteps(LOCAL["sgd"](model.parameters()), model, every=1),
    ]
    for optimizer in kept:
        model(batch(0, 0)[0]).sum().backward()
        optimizer.step()
    running = _own_threads() - before
    del optimizer
    kept.clear()
    gc.collect()
    return running, _own_threads() - before


def _own_threads() -> int:
    return sum(thread.name == "gradwire" for thread in threading.enumerate())


def average_by_hand(options: Wrapped, every: int, outer: bool) -> dict[str, np.ndarray]:
    """Local steps in one process: float32 averages, and Nesterov momentum by its formula."""
    world_size = dist.get_world_size()
    models = [make_model() for _ in range(world_size)]
    optimizers = [LOCAL[options.local](model.parameters()) for model in models]
    anchor = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    velocity = {name: torch.zeros_like(values) for name, values in anchor.items()}
    for step in range(options.steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, labels = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for name, values in anchor.items():
                total = torch.stack([values - m.get_parameter(name) for m in models]).sum(0)
                change = total / world_size
                if outer:
                    velocity[name] = 0.9 * velocity[name] + change
                    change = 0.7 * (change + 0.9 * velocity[name])
                values -= change
                for model in models:
                    model.get_parameter(name).copy_(values)
    return {name: p.detach().numpy().copy() for name, p in models[0].named_parameters()}


STREAMING_REFUSALS: dict[str, dict[str, Any]] = {
    "no fragment": {"fragments": 0},
    "layers": {"every": 9, "fragments": 6},
    "steps": {"every": 2, "fragments": 3},
    "long delay": {"every": 2, "delay": 3},
    "all mixed": {"every": 2, "mix": 1.0},
    "back to back": {"every": 2, "delay": 2, "mix": 0.5},
    "mixed momentum": {"every": 2, "delay": 1, "mix": 0.5, "late_momentum": True},
    "mixed gains": {"every": 2, "delay": 1, "mix": 0.5, "correct_noise": True},
    "auto": {"every": 2, "fragments": 2, "codec": "auto:bits=1"},
}


def refusals_of_local_steps() -> dict[str, str]:
    said: dict[str, str] = {}
    model = make_model()
    optimizer = LocalSteps(LOCAL["sgd"](model.parameters()), model, every=2, outer=outer_nesterov())
    plain = LocalSteps(LOCAL["sgd"](model.parameters()), model, every=2)
    often = LocalSteps(LOCAL["sgd"](model.parameters()), model, every=1, outer=outer_nesterov())
    state = optimizer.state_dict()
    clipped = LocalSteps(LOCAL["adam"](model.parameters()), model, clip_norm=1.0)
    model(batch(0, 0)[0]).sum().backward()
    last = model.get_parameter("last.weight")
    last.grad = torch.ones_like(last).to_sparse()
    adam = LOCAL["adam"](model.parameters())
    cycled = LocalSteps(adam, model)
    adam.param_groups[0]["betas"] = (0.85, 0.99)
    (part,) = plain.state_dict()["fragments"]
    earlier = often.state_dict()
    del earlier["fragments"][0]["used"]

    def altered(entry: str, **values: Any) -> dict[str, Any]:
        state = plain.state_dict()
        return {**state, entry: {**state[entry], **values}}

    def streaming(**options: Any) -> LocalSteps:
        return LocalSteps(LOCAL["adamw"](model.parameters()), model, **grouped(options))

    calls: dict[str, Callable[[], Any]] = {
        "momentum": lambda: LocalSteps(LOCAL["sgd"](model.parameters()), model, late_momentum=True),
        "betas": cycled.step,
        "order": lambda: LocalSteps(model, LOCAL["sgd"](model.parameters())),  # type: ignore
        "every": lambda: LocalSteps(LOCAL["sgd"](model.parameters()), model, every=0),
        "norm": lambda: LocalSteps(LOCAL["sgd"](model.parameters()), model, clip_norm=0.0),
        "sparse": clipped.step,
        "group": lambda: plain.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        "rank": lambda: optimizer.load_state_dict(state | {"rank": 5}),
        "outer": lambda: plain.load_state_dict(state),
        "saved every": lambda: often.load_state_dict(state),
        "twice": lambda: LocalSteps(plain, model),
        "earlier version": lambda: often.load_state_dict(earlier),
        "delay": lambda: plain.load_state_dict(altered("schedule", delay=1)),
        "class": lambda: often.load_state_dict(
            {**often.state_dict(), "optimizer_class": "AdamW", "optimizer": adam.state_dict()}
        ),
        "lbfgs": lambda: LocalSteps(torch.optim.LBFGS(model.parameters()), model, clip_norm=1.0),
        "noise": lambda: clipped.load_state_dict(
            {**altered("schedule", every=1), "fragments": [{**part, "momentum": {}}]}
        ),
        **{name: partial(streaming, **options) for name, options in STREAMING_REFUSALS.items()},
    }
    for what, call in calls.items():
        try:
            call()
            said[what] = "nothing"
        except (RuntimeError, TypeError, ValueError) as error:
            said[what] = f"{type(error).__name__}: {error}"
    return said


def models_after_steps(
    make: str, options: dict[str, Any] | None, steps: int, gain: float = 1.0
) -> list[list[np.ndarray]]:
    """The parameters after each step of one rank. options: of LocalSteps; None: clip_grad_norm_ and
    the optimizer itself. gain: in the place of each estimated gain."""
    model = make_model()
    inner = LOCAL[make](model.parameters())
    optimizer: Any = inner
    if options is not None:
        optimizer = LocalSteps(inner, model, codec="raw", **grouped(options))
        (fragment,) = optimizer._averaging.fragments
        if fragment.noise is not None:
            fragment.noise.gains = lambda: [gain] * len(list(model.parameters()))
    after = []
    for step in range(steps):
        inputs, labels = batch(0, step)
        optimizer.zero_grad()
        (50.0 * nn.functional.cross_entropy(model(inputs), labels)).backward()
        if options is None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after.append([p.detach().numpy().copy() for p in model.parameters()])
    return after


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, **options: bool
) -> None:
    inputs, labels = batch(dist.get_rank(), step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs, **options), labels).backward()
    optimizer.step()


def step_and_freeze(gain: float) -> tuple[np.ndarray, np.ndarray]:
    """A parameter that had a gradient in the first step alone: after this step, and at the end."""
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.0, 0.99))
    optimizer = LocalSteps(inner, model, codec="raw")
    (fragment,) = optimizer._averaging.fragments
    assert fragment.noise is not None
    fragment.noise.gains = lambda: [gain] * len(list(model.parameters()))  # type: ignore[method-assign]
    after = []
    for step in range(4):
        take_step(model, optimizer, step, use_branch=step == 0)
        after.append(model.branch.weight.detach().numpy().copy())
    return after[0], after[-1]


def roll_back(options: Wrapped, saved_after: int) -> list[list[str]]:
    """The digests after each of the steps that follow a state, and again after loading it."""
    model = make_model()
    inner = LOCAL[options.local](model.parameters())
    optimizer = LocalSteps(inner, model, **grouped(options.options))

    def train(first: int) -> list[str]:
        digests = []
        for step in range(first, options.steps):
            if step == saved_after:
                saved.append(save({"model": model.state_dict(), "own": optimizer.state_dict()}))
            take_step(model, optimizer, step)
            digests.append(digest(model))
        return digests

    saved: list[bytes] = []
    before = train(0)[saved_after:]
    state = load(saved[0])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["own"])
    return [before, train(saved_after)]


def step_with_sparse_gradients() -> tuple[str, float]:
    """LocalSteps sends changes of parameters, so the local optimizer may take sparse gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(40, 8, sparse=True), nn.Linear(8, 2))
    embedding = model.get_parameter("0.weight")
    before = embedding.detach().clone()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # whose state is sparse
    optimizer = LocalSteps(inner, model, every=2, codec="raw")
    for step in range(4):
        optimizer.zero_grad()
        model(torch.tensor([[dist.get_rank(), 20 + step]])).square().sum().backward()
        optimizer.step()
    changed = (embedding - before).abs().sum(dim=1).count_nonzero()
    return digest(model), changed.item()

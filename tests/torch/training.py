"""A small training, run by real ranks in the tests and by one process in the simulation."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import GradwireState, gradwire_hook
from gradwire.torch.options import grouped

BATCH = 8
INPUTS = 48
CLASSES = 5
NamedShapes = list[tuple[str, list[int]]]


class TwoPaths(nn.Module):
    """Layers large enough to be cut across ranks, a convolution, a branch that may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 160)
        self.second = nn.Linear(160, 144)
        self.conv = nn.Conv1d(9, 12, 3)
        self.branch = nn.Linear(144, 24)
        self.last = nn.Linear(12 * 14, CLASSES)

    def forward(self, x: torch.Tensor, use_branch: bool = True) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        result = self.last(torch.relu(self.conv(x.view(-1, 9, 16))).flatten(1))
        if use_branch:
            result = result + self.branch(x)[:, :CLASSES]
        return result


def make_model(dtype: torch.dtype = torch.float32) -> TwoPaths:
    torch.manual_seed(7)
    return TwoPaths().to(dtype)


def batch(rank: int, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return (
        torch.randn(BATCH, INPUTS, generator=generator),
        torch.randint(0, CLASSES, (BATCH,), generator=generator),
    )


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, labels = batch(rank, step)
    return nn.functional.cross_entropy(module(inputs), labels)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Options:
    """How the ranks train. `state` are arguments of GradwireState; None: DDP without the hook."""

    steps: int = 10
    state: dict[str, Any] | None = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": 0.05})
    micro_batches: int = 1  # all but the last run under no_sync
    branch_every: int = 1  # the branch is used in every n-th step
    start: int = 0  # first step, for a restart
    residuals: list[bytes] | None = None  # saved states of the hook by rank, for a restart
    weights: bytes | None = None  # saved model and optimizer, for a restart
    dtype: torch.dtype = torch.float32  # of the model and of its gradients
    device: str = "cpu"


@dataclass
class Trained:
    """The results of one rank. `buckets[step]` lists the tensors of each bucket, in order."""

    digest: str
    parameters: dict[str, np.ndarray]
    buckets: list[list[NamedShapes]]
    losses: list[float]
    stats: dict[str, Any]  # empty without the hook
    report: str
    last_steps: list[dict[str, Any]]
    residuals: bytes | None
    weights: bytes


def save(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def load(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


def gather(content: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The content of every rank: what `load` reads, and so no pickles of objects."""
    own = torch.frombuffer(bytearray(save(content)), dtype=torch.uint8)
    sizes = [torch.empty_like(torch.tensor(0)) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor(own.numel()), group)
    padded = nn.functional.pad(own, (0, int(max(sizes)) - own.numel()))
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded, group)
    return [load(one[:n].numpy().tobytes()) for one, n in zip(everyone, sizes, strict=True)]


def digest(model: nn.Module) -> str:
    return hashlib.sha256(
        b"".join(p.detach().view(torch.uint8).cpu().numpy().tobytes() for p in model.parameters())
    ).hexdigest()


def train(options: Options, on_step: Callable[[int], None] = lambda step: None) -> Trained:
    rank = dist.get_rank()
    model = make_model(options.dtype).to(options.device)
    optimizer = make_optimizer(model)
    if options.weights is not None:
        weights = load(options.weights)
        model.load_state_dict(weights["model"])
        optimizer.load_state_dict(weights["optimizer"])
    ddp = DistributedDataParallel(model, **options.ddp)
    log: list[list[NamedShapes]] = []
    state = None
    if options.state is not None:
        state = GradwireState(**grouped(options.state))
        if options.residuals is not None:
            state.load_state_dict(load(options.residuals[rank]))
        ddp.register_comm_hook(state, recording_hook(model, log))
    losses, last_steps = [], []
    for step in range(options.start, options.start + options.steps):
        on_step(step)
        log.append([])
        optimizer.zero_grad()
        use_branch = step % options.branch_every == 0
        for micro in range(options.micro_batches):
            inputs, labels = (part.to(options.device) for part in batch(rank, step, micro))
            is_last = micro == options.micro_batches - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                output = ddp(inputs.to(options.dtype), use_branch).float()
                loss = nn.functional.cross_entropy(output, labels)
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if state is not None:
            last_steps.append(state.last_step())
    return Trained(
        digest=digest(model),
        parameters={
            name: p.detach().float().cpu().numpy().copy() for name, p in model.named_parameters()
        },
        buckets=log,
        losses=losses,
        stats={} if state is None else state.stats().as_dict(),
        report="" if state is None else state.stats().report(),
        last_steps=last_steps,
        residuals=None if state is None else save(state.state_dict()),
        weights=save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}),
    )


def recording_hook(model: nn.Module, log: list[list[NamedShapes]]) -> Callable[..., Any]:
    """A gradwire_hook that records the tensors of each bucket in `log`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def hook(state, bucket):  # type: ignore[no-untyped-def] # DDP wants none or evaluated ones
        log[-1].append([(names[id(p)], list(p.shape)) for p in bucket.parameters()])
        return gradwire_hook(state, bucket)

    return hook

"""Ways to use a model that fully_shard has sharded in which not every step uses every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from gradwire.torch import FullyShardComm
from ways import local_of, mesh_of

WIDTH = 24
STEPS = 4
Loss = torch.Tensor


class Towers(nn.Module):
    """Two towers, each a unit, and parameters of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH))
        self.head = nn.Linear(WIDTH, 16)
        self.spare = nn.Linear(WIDTH, 16)  # used where a situation says so
        self.checkpoints: bool | None = None  # use_reentrant

    def forward(self, x: torch.Tensor, spare: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        left = self._run(self.left, x)
        right = self._run(self.right, left)
        return self.head(right) + (self.spare(right) if spare else 0.0), self.spare(left)

    def _run(self, tower: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints is None:
            return tower(x)
        x = x if x.requires_grad else x.detach().requires_grad_()
        return checkpoint(tower, x, use_reentrant=self.checkpoints)


def _loss(outputs: torch.Tensor) -> Loss:
    return (outputs.float() - 1.0).square().mean()


def whole(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    yield _loss(model(x, spare=True)[0])


def unused_output(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    one, other = model(x)
    yield _loss(one) + _loss(other) if step < 2 else _loss(one)


def unused_tower(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    one, other = model(x)
    yield _loss(one if step % 2 else other)


def non_root(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    """The root, and then a part of the model alone."""
    yield _loss(model(x)[0])
    yield _loss(model.right(x))


def two_parts(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    """Two forward passes of parts of the model, then their backward passes."""
    if step == 0:
        with torch.no_grad():
            model(x)  # it must be the first
    one, other = model.left(x), model.left(2.0 * x)
    yield _loss(one)
    yield _loss(other)


def forward_twice(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    yield _loss(model(x, spare=step % 2 == 0)[0]) + _loss(model(-x)[0])


def accumulated(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    """The last of three backward passes reduces, and uses less than those before."""
    for part in range(3):
        model.set_requires_gradient_sync(part == 2)
        model.set_reshard_after_backward(part == 2)
        yield _loss(model(x + part, spare=part == 1)[0])


def accumulated_in_part(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    """The last backward pass has the gradients of a tower whose forward pass was before."""
    if step == 0:
        with torch.no_grad():
            model(x)
    model.set_requires_gradient_sync(False)
    yield _loss(model.left(x))
    model.set_requires_gradient_sync(True)
    yield _loss(model.right(x))


def thawing(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    """Frozen parts come and go; in one step the root has nothing to train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(step % 3 == 0 or name.startswith(("left", "right")[step % 3 - 1]))
    yield _loss(model(x)[0])


def by_rank(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    """Ranks use different parameters of a unit."""
    yield _loss(model(x, spare=step % 2 == 1 and dist.get_rank() == 1)[0])


@dataclass(frozen=True)
class Situation:
    """Each step makes the backward passes of `losses`, and then steps AdamW."""

    losses: Callable[[Any, torch.Tensor, int], Iterator[Loss]]
    mixed: dict[str, Any] = field(default_factory=dict)
    reshard: bool | int | None = None
    checkpoints: bool | None = None
    frozen: tuple[str, ...] = ()  # beginnings of the names
    clip: float | None = None
    in_backward: bool = False  # the optimizer steps there
    zeros: bool = False  # set_reduce_scatter_unused_params
    keeps_zeros: bool = False  # zero_grad(set_to_none=False)
    set: Callable[[FSDPModule], object] = id  # called with each unit
    is_set_late: bool = False  # when the model has its FullyShardComm


def _sum_thirds(unit: FSDPModule) -> None:
    unit.set_gradient_divide_factor(3.0)
    unit.set_force_sum_reduction_for_comms(True)


def _add_after_reduction(unit: FSDPModule) -> None:
    def add(reduced: torch.Tensor) -> None:
        reduced.add_(0.01)

    unit.set_all_reduce_hook(add)


def _take_hook_back(unit: Any) -> None:
    _add_after_reduction(unit)
    unit.set_all_reduce_hook(None)


def hook_of_one_step(model: Any, x: torch.Tensor, step: int) -> Iterator[Loss]:
    """It is there in the first step."""
    for unit in (model.left, model.right, model):
        (_add_after_reduction if step == 0 else _take_hook_back)(unit)
    yield _loss(model(x)[0])


SITUATIONS = {
    "whole": Situation(whole),
    "unused output": Situation(unused_output),
    "unused output, no resharding": Situation(unused_output, reshard=False),
    "unused tower": Situation(unused_tower),
    "unused tower, gradients of zeros kept": Situation(unused_tower, keeps_zeros=True),
    "unused tower, clipped": Situation(unused_tower, clip=0.1),
    "unused tower, step in backward": Situation(unused_tower, in_backward=True),
    "unused tower, bfloat16": Situation(
        unused_tower, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ),
    "unused tower, float16": Situation(unused_tower, {"param_dtype": torch.float16}),
    "unused tower, zeros asked for": Situation(unused_tower, zeros=True),
    "checkpoints": Situation(unused_tower, checkpoints=False),
    "reentrant checkpoints": Situation(unused_tower, checkpoints=True),
    "non-root": Situation(non_root),
    "two parts": Situation(two_parts),
    "forward twice": Situation(forward_twice),
    "accumulated": Situation(accumulated),
    "accumulated, bfloat16": Situation(
        accumulated, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ),
    "accumulated in part": Situation(accumulated_in_part),
    "thawing": Situation(thawing),
    "root without parameters to train": Situation(unused_tower, frozen=("head", "spare")),
    "tower without parameters to train": Situation(whole, frozen=("left",)),
    "resharded to fewer": Situation(unused_tower, reshard=2),
    "divided by the shards": Situation(
        whole, set=lambda unit: unit.set_gradient_divide_factor(2.0), is_set_late=True
    ),
    "divided by the program": Situation(whole, set=_sum_thirds),
    "hook": Situation(unused_tower, set=_add_after_reduction),
    "hook of one step": Situation(hook_of_one_step),
    "late hook": Situation(unused_tower, set=_add_after_reduction, is_set_late=True),
}


@dataclass
class Trained:
    """The results of one rank: after each step, which parameters have a gradient, the loss, and
    this rank's shards."""

    gradients: list[list[str]]
    losses: list[float]
    shards: list[bytes]


def shard(model: Any, hybrid: bool, **options: Any) -> Any:
    for module in (model.left, model.right, model):
        fully_shard(module, mesh=mesh_of(1 + hybrid), **options)
    return model


def make_towers() -> Any:
    torch.manual_seed(3)
    return Towers()


def train(situation: Situation, codec: str | None, hybrid: bool = False) -> Trained:
    """codec: None: without gradwire."""
    model = make_towers()
    model.checkpoints = situation.checkpoints
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(situation.frozen))
    policy = MixedPrecisionPolicy(**situation.mixed)
    shard(model, hybrid, mp_policy=policy, reshard_after_forward=situation.reshard)
    model.set_reduce_scatter_unused_params(situation.zeros)
    units = [model.left, model.right, model]
    for unit in [] if situation.is_set_late else units:
        situation.set(unit)
    comm = None if codec is None else FullyShardComm(model, codec, start_iter=0)
    for unit in units if situation.is_set_late else []:
        situation.set(unit)
    optimizers = _optimizers(model, situation.in_backward)
    generator = torch.Generator().manual_seed(dist.get_rank())
    trained = Trained([], [], [])
    for step in range(STEPS):
        x = torch.randn(6, WIDTH, generator=generator)
        total = 0.0
        for loss in situation.losses(model, x, step):
            loss.backward()
            total += loss.item()
        if situation.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), situation.clip)
        trained.gradients.append([n for n, p in model.named_parameters() if p.grad is not None])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not situation.keeps_zeros)
        model.reshard()
        trained.losses.append(total)
        shards = [p for p in model.parameters() if isinstance(p, DTensor)]
        trained.shards.append(b"".join(local_of(p).numpy().tobytes() for p in shards))
    if comm is not None:
        comm.close()
    return trained


def _optimizers(model: nn.Module, in_backward: bool) -> list[torch.optim.Optimizer]:
    """Those without parameters step after backward."""

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)

    if not in_backward:
        return [adamw(model.parameters())]
    for parameter in model.parameters():
        optimizer = adamw([parameter])

        def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return []


# Where FullyShardComm is made ------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))  # ignored by fully_shard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.abs() * 10).long() % 32
        return self.head(self.tower(self.embedding(rows) * self.scale))


def _validated(model: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def _stepped(model: Any, x: torch.Tensor) -> None:
    _loss(model(x)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def _forwarded(model: Any, x: torch.Tensor) -> None:
    """Its graph is kept, so that the parameters of the root stay whole."""
    model(x)


def _unsharded(model: Any, x: torch.Tensor) -> None:
    model.unshard()
    model.tower.unshard()


def _asked(model: Any, x: torch.Tensor) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    _validated(model, x)
    model.load_state_dict(state, assign=True)


def _replaced(model: Any, x: torch.Tensor) -> None:
    """FSDP2 still has the parameters of the tower that was there."""
    _validated(model, x)
    model.reshard()
    model.tower = nn.Identity()


def _on_meta(model: Any, x: torch.Tensor) -> None:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            local_of(parameter).fill_(0.01 * (place + 1))


BEFORE: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "nothing": lambda model, x: None,
    "validated": _validated,
    "stepped": _stepped,
    "forwarded": _forwarded,
    "unsharded": _unsharded,
    "asked": _asked,
    "replaced": _replaced,
    "on meta": _on_meta,
}


def make_after(before: str, reshard: bool | int, rank: int) -> list[tuple[str, list[float]]]:
    """The names that FullyShardComm has, and the losses of a training; without it, with raw, and
    with int8."""
    results = []
    for codec in (None, "raw", "int8"):
        torch.manual_seed(3)
        with torch.device("meta" if before == "on meta" else "cpu"):
            model: Any = Tied()
        options: dict[str, Any] = {"mesh": mesh_of(1), "reshard_after_forward": reshard}
        fully_shard(model.tower, **options)
        fully_shard(model, **options, ignored_params={model.scale})
        x = torch.randn(8, generator=torch.Generator().manual_seed(rank))
        BEFORE[before](model, x)
        comm = None if codec is None else FullyShardComm(model, codec, start_iter=0)
        for module in (model, model.tower):
            if isinstance(module, FSDPModule):
                module.reshard()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            loss = _loss(model(x))
            loss.backward()
            adamw.step()
            adamw.zero_grad()
            losses.append(loss.item())
        names = ""
        if comm is not None:
            names = ", ".join(name for name, _ in comm.state_dict()["tensors"])
            comm.close()
        results.append((names, losses))
    return results


def owed_over_unused_steps(hybrid: bool) -> list[dict[str, bytes]]:
    """What is owed to each parameter after each of three backward passes; the second leaves out a
    tower and the root's last layer, the third is not finite beside that."""
    model = shard(make_towers(), hybrid)
    comm = FullyShardComm(model, "3lc:s=1.5", start_iter=0)
    owed = []
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(3):
        outputs = model(x)[step > 0]
        (_loss(outputs) * (float("nan") if step == 2 else 1.0)).backward()
        model.zero_grad()
        values: dict[str, list[bytes]] = {}
        for residual in comm.state_dict()["residuals"]:
            values.setdefault(residual["name"], []).append(residual["values"].numpy().tobytes())
        owed.append({name: b"".join(parts) for name, parts in values.items()})
    comm.close()
    return owed

"""How the ranks of a run keep one model: a strategy for each way, chosen by the settings.

The training loop calls `forward`, sets the learning rate of `optimizer` and steps it, whatever
happens there. A new way is one more class here and one more line in `choose`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.train.settings import (
    MOMENTUM,
    PLAIN_DDP,
    SHARDED_OPTIMIZER,
    WEIGHT_DECAY,
    TrainSettings,
)

if TYPE_CHECKING:
    from gradwire.torch import GradwireState, LocalSteps, ShardedOptimizer


class Strategy(Protocol):
    """One rank's way to train a model together with the other ranks."""

    @property
    def forward(self) -> nn.Module:
        """The model, to be called."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def sent_bytes(self) -> tuple[int, int] | None:
        """Of pushes and pulls in the last step; None: it does not tell."""

    def stats(self) -> dict[str, Any] | None:
        """Sums over all steps with the names of gradwire.torch.Stats; None: it does not tell."""

    def explain(self, error: BaseException) -> BaseException:
        """The error to show for one that came out of a step: names ranks that are gone."""

    def close(self) -> None: ...


class PlainDdp:
    """DDP's own all-reduce."""

    def __init__(self, model: nn.Module, settings: TrainSettings) -> None:
        self.forward = _distribute(model)
        self.optimizer = _local_optimizer(model, settings)

    def sent_bytes(self) -> tuple[int, int] | None:
        return None

    def stats(self) -> dict[str, Any] | None:
        return None

    def explain(self, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        pass


class _Compressed:
    """What all ways of gradwire have in common: a source of statistics."""

    def __init__(
        self,
        forward: nn.Module,
        optimizer: torch.optim.Optimizer,
        source: GradwireState | LocalSteps | ShardedOptimizer,
    ) -> None:
        self.forward = forward
        self.optimizer = optimizer
        self._source = source

    def sent_bytes(self) -> tuple[int, int] | None:
        step = self._source.last_step()
        return step["push_bytes"], step["pull_bytes"]

    def stats(self) -> dict[str, Any] | None:
        return self._source.stats().as_dict()

    def explain(self, error: BaseException) -> BaseException:
        return self._source.explain(error)

    def close(self) -> None:
        self._source.close()


def choose(model: nn.Module, codec: str, settings: TrainSettings) -> Strategy:
    """The strategy of a run of `codec`. Needs an initialised process group."""
    if codec == PLAIN_DDP:
        return PlainDdp(model, settings)
    if settings.exchange == SHARDED_OPTIMIZER:
        return sharded_optimizer(model, codec, settings)
    if settings.every > 1:
        return local_steps(model, codec, settings)
    return hook(model, codec, settings)


def hook(model: nn.Module, codec: str, settings: TrainSettings) -> Strategy:
    """DDP with gradwire's hook, over a sharded or a ring exchange."""
    from gradwire.torch import GradwireState, gradwire_hook

    state = GradwireState(
        start_iter=settings.start_iter,
        exchange=settings.exchange,
        **_coding(codec, settings),
    )
    forward = _distribute(model)
    forward.register_comm_hook(state, gradwire_hook)
    return _Compressed(forward, _local_optimizer(model, settings), state)


def sharded_optimizer(model: nn.Module, codec: str, settings: TrainSettings) -> Strategy:
    from gradwire.torch import ShardedOptimizer

    local = _local_optimizer(model, settings)
    optimizer = ShardedOptimizer(local, model, **_coding(codec, settings))
    return _Compressed(model, optimizer, optimizer)


def local_steps(model: nn.Module, codec: str, settings: TrainSettings) -> Strategy:
    """Plain averages of what the ranks changed, over a sharded or a ring exchange."""
    from gradwire.torch import LocalSteps

    optimizer = LocalSteps(
        _local_optimizer(model, settings),
        model,
        every=settings.every,
        exchange=settings.exchange,
        **_coding(codec, settings),
    )
    return _Compressed(model, optimizer, optimizer)


def _coding(codec: str, settings: TrainSettings) -> dict[str, Any]:
    """Arguments that all ways of gradwire take alike."""
    return {
        "codec": codec,
        "rules": [
            (rule.pattern, rule.codec) + (() if rule.role is None else (rule.role,))
            for rule in settings.rules
        ],
        "exclude": list(settings.exclude),
        "threads": settings.threads,
        "seed": settings.seed,
    }


def _local_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), settings.learning_rate, MOMENTUM, weight_decay=WEIGHT_DECAY
    )


def _distribute(model: nn.Module) -> DistributedDataParallel:
    """Every rank keeps the batch norm statistics of its own batches; PyTorch 2.13 gives the option
    a new name."""
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        return DistributedDataParallel(model, forward_sync_buffers=False)
    return DistributedDataParallel(model, broadcast_buffers=False)

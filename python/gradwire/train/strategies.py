"""How the ranks of a run keep one model: a strategy for each way, chosen by the settings.

The training loop calls `forward`, sets the learning rate of `optimizer` and steps it, whatever
happens there. A new way is one more class here and one more line in `choose`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.train.settings import (
    MOMENTUM,
    PLAIN_DDP,
    SERVER,
    SHARDED_OPTIMIZER,
    WEIGHT_DECAY,
    TrainSettings,
)

if TYPE_CHECKING:
    from gradwire.torch import GradwireState, LocalSteps, ServerOptimizer, ShardedOptimizer


# A server hears nothing while rank 0 evaluates, which may take long on a slow machine.
_PATIENCE_SECONDS = 2 * 3600.0


class Strategy(Protocol):
    """One rank's way to train a model together with the other ranks."""

    @property
    def forward(self) -> nn.Module:
        """The model, to be called."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def steps_done(self, step: int) -> int:
        """How many steps of the run are done after this rank took `step`, counted from 0. More than
        step + 1: the others went on without it."""

    def sent_bytes(self) -> tuple[int, int] | None:
        """Of pushes and pulls in the last step; None: it does not tell."""

    def stats(self) -> dict[str, Any] | None:
        """Sums over all steps with the names of gradwire.torch.Stats; None: it does not tell."""

    def explain(self, error: BaseException) -> BaseException:
        """The error to show for one that came out of a step: names ranks that are gone."""

    def close(self) -> None: ...


class PlainDdp:
    """DDP's own all-reduce."""

    def __init__(
        self, model: nn.Module, settings: TrainSettings, workers: dist.ProcessGroup
    ) -> None:
        self.forward = _distribute(model, workers)
        self.optimizer = _local_optimizer(model, settings)

    def steps_done(self, step: int) -> int:
        return step + 1

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

    def steps_done(self, step: int) -> int:
        return step + 1

    def sent_bytes(self) -> tuple[int, int] | None:
        step = self._source.last_step()
        return step["push_bytes"], step["pull_bytes"]

    def stats(self) -> dict[str, Any] | None:
        return self._source.stats().as_dict()

    def explain(self, error: BaseException) -> BaseException:
        return self._source.explain(error)

    def close(self) -> None:
        self._source.close()


class _Served:
    """A worker of dedicated servers, which hold the model and the optimizer's state."""

    def __init__(self, model: nn.Module, optimizer: ServerOptimizer) -> None:
        self.forward = model
        self.optimizer = optimizer
        optimizer.connect()
        self._before = (0, 0)

    def steps_done(self, step: int) -> int:
        return self.optimizer.version

    def sent_bytes(self) -> tuple[int, int] | None:
        before, stats = self._before, self.optimizer.stats()
        self._before = (stats.push_bytes, stats.pull_bytes)
        return stats.push_bytes - before[0], stats.pull_bytes - before[1]

    def stats(self) -> dict[str, Any] | None:
        return self.optimizer.stats().as_dict()

    def explain(self, error: BaseException) -> BaseException:
        return self.optimizer.error or error

    def close(self) -> None:
        self.optimizer.close()


def choose(
    model: nn.Module, codec: str, settings: TrainSettings, workers: dist.ProcessGroup
) -> Strategy:
    """The strategy of a worker in a run of `codec`."""
    if codec == PLAIN_DDP:
        return PlainDdp(model, settings, workers)
    if settings.exchange == SERVER:
        return _Served(model, _server_optimizer(model, codec, settings))
    if settings.exchange == SHARDED_OPTIMIZER:
        return sharded_optimizer(model, codec, settings)
    if settings.every > 1:
        return local_steps(model, codec, settings)
    return hook(model, codec, settings)


def serve(model: nn.Module, codec: str, settings: TrainSettings) -> dict[str, Any] | None:
    """A server's part of a run, to its end. Returns its statistics; None if it had nothing to do.

    Raises CommunicationError naming a worker that is gone.
    """
    if codec == PLAIN_DDP:
        return None
    optimizer = _server_optimizer(model, codec, settings)
    optimizer.serve()
    return optimizer.stats().as_dict()


def hook(model: nn.Module, codec: str, settings: TrainSettings) -> Strategy:
    """DDP with gradwire's hook, over the exchange that is set."""
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
    """Plain averages of what the ranks changed, over the exchange that is set."""
    from gradwire.torch import LocalSteps

    optimizer = LocalSteps(
        _local_optimizer(model, settings),
        model,
        every=settings.every,
        exchange=settings.exchange,
        **_coding(codec, settings),
    )
    return _Compressed(model, optimizer, optimizer)


def _server_optimizer(model: nn.Module, codec: str, settings: TrainSettings) -> ServerOptimizer:
    from gradwire.torch import ServerOptimizer

    return ServerOptimizer(
        _local_optimizer(model, settings),
        servers=settings.servers,
        named_parameters=model.named_parameters(),
        backup_workers=settings.backup_workers,
        timeout=_PATIENCE_SECONDS,
        **_coding(codec, settings),
    )


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


def _distribute(
    model: nn.Module, workers: dist.ProcessGroup | None = None
) -> DistributedDataParallel:
    """Every rank keeps the batch norm statistics of its own batches; PyTorch 2.13 gives the option
    a new name."""
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        return DistributedDataParallel(model, process_group=workers, forward_sync_buffers=False)
    return DistributedDataParallel(model, process_group=workers, broadcast_buffers=False)

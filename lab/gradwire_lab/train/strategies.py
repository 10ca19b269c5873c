"""How the workers of a run keep one model: a strategy for each way, chosen by the settings.

The training loop sets the learning rate of `optimizer` and calls `take_step`; it knows nothing more
about how the workers exchange. A new way is a subclass of Strategy and a line in `choose`.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from gradwire.local_schedule import EVERY_STEP
from gradwire.torch import (
    GradwireState,
    LocalSteps,
    ServerOptimizer,
    ShardedOptimizer,
    gradwire_hook,
    outer_nesterov,
)
from gradwire.torch.optimizer_list import OptimizerList
from gradwire.torch.options import grouped
from gradwire_lab.train import rivals
from gradwire_lab.train.records import StepCosts
from gradwire_lab.train.rivals import is_rival
from gradwire_lab.train.settings import BETAS, SERVED, SHARDED_OPTIMIZER, TrainSettings, both_ways
from gradwire_lab.train.strategy import Strategy
from gradwire_lab.train.text_models import BLOCKS
from gradwire_lab.train.torch_ddp import TorchDdp, distribute

# A server receives nothing while rank 0 evaluates, which may take long on a slow machine.
_PATIENCE_SECONDS = 2 * 3600.0


class _Local(Strategy):
    """A worker that steps a model of its own between exchanges."""

    optimizer: LocalSteps

    def __init__(self, model: nn.Module, optimizer: LocalSteps) -> None:
        super().__init__(model, optimizer, optimizer)

    def weights(self) -> list[Tensor]:
        """On which all workers agreed last."""
        anchors = self.optimizer.anchors()
        return [anchors[name] for name, _ in self._model.named_parameters()]

    def finish(self) -> None:
        self.optimizer.synchronize()


class _Served(Strategy):
    """A worker of dedicated servers."""

    optimizer: ServerOptimizer

    def __init__(
        self, model: nn.Module, optimizer: ServerOptimizer, settings: TrainSettings
    ) -> None:
        super().__init__(model, optimizer, every=settings.every)
        optimizer.connect()
        self.takes_over_servers_model = SERVED[settings.exchange] == "updates"
        self._before = StepCosts(0, 0, 0.0, 0.0)

    def steps_done(self, step: int) -> int:
        return max(step + 1, self.optimizer.version)  # with staleness, versions come later

    def last_costs(self) -> StepCosts:
        before, stats = astuple(self._before), self.optimizer.stats()
        own = stats.encode_seconds + stats.decode_seconds
        self._before = StepCosts(stats.push_bytes, stats.pull_bytes, stats.wire_seconds, own)
        grown = zip(astuple(self._before), before, strict=True)
        return StepCosts(*(now - earlier for now, earlier in grown))

    def stats(self) -> dict[str, Any]:
        return self.optimizer.stats().as_dict()

    def settle(self) -> None:
        self.optimizer.synchronize()

    def explain(self, error: BaseException) -> BaseException:
        return self.optimizer.error or error

    def close(self) -> None:
        self.optimizer.close()


def choose(
    model: nn.Module, codec: str, settings: TrainSettings, workers: dist.ProcessGroup
) -> Strategy:
    local, clip = local_optimizer(model, settings), settings.clip
    if is_rival(codec):
        return TorchDdp(model, local, rivals.parse(codec), workers, clip)
    coding = _coding(codec, settings)
    if settings.has_servers:
        return _Served(model, _server_optimizer(model, codec, settings), settings)
    if settings.exchange == SHARDED_OPTIMIZER:
        sharded = ShardedOptimizer(local, model, **grouped(coding))
        return Strategy(model, sharded, sharded, every=settings.every)
    coding["exchange"] = settings.exchange
    if settings.takes_local_steps:
        return _Local(model, _local_steps(model, local, settings, coding))
    state = GradwireState(start_iter=settings.start_iter, **grouped(coding))
    forward = distribute(model)
    forward.register_comm_hook(state, gradwire_hook)
    return Strategy(model, local, state, forward, clip)


def _local_steps(
    model: nn.Module, local: Optimizer, settings: TrainSettings, coding: dict[str, Any]
) -> LocalSteps:
    outer = {
        "average": None,
        "sgd": lambda parameters: SGD(parameters, settings.outer_lr),
        "nesterov": outer_nesterov(settings.outer_lr),
    }
    return LocalSteps(
        local,
        model,
        outer=outer[settings.outer],
        residual_decay=settings.residual_decay,
        correct_noise={"default": None, "on": True, "off": False}[settings.correct_noise],
        clip_norm=settings.clip or None,
        **grouped(coding | _named(settings, *vars(EVERY_STEP))),
    )


def serve(model: nn.Module, codec: str, settings: TrainSettings) -> dict[str, Any] | None:
    """A server's part of a run, to its end. Returns its statistics; None for rivals, which have no
    servers.

    Raises CommunicationError, which names a worker that is gone.
    """
    if is_rival(codec):
        return None
    optimizer = _server_optimizer(model, codec, settings)
    optimizer.serve()
    return optimizer.stats().as_dict()


def _server_optimizer(model: nn.Module, codec: str, settings: TrainSettings) -> ServerOptimizer:
    local = local_optimizer(model, settings)
    if settings.clip > 0.0:  # whoever steps the model clips the average

        def clip(stepped: Optimizer, *_: Any) -> None:
            parameters = [p for group in stepped.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, settings.clip)

        local.register_step_pre_hook(clip)
    return ServerOptimizer(
        local,
        pulls=SERVED[settings.exchange],
        named_parameters=model.named_parameters(),
        model=model,
        **_named(settings, "servers", "backup_workers", "staleness", "barrier"),
        **grouped({"timeout": _PATIENCE_SECONDS, **_coding(codec, settings)}),
    )


def _coding(codec: str, settings: TrainSettings) -> dict[str, Any]:
    """The arguments that every strategy of gradwire takes."""
    push, pull = both_ways(codec)
    rules = [astuple(rule) for rule in settings.rules]
    coding = {"codec": push, "pull_codec": None if pull == push else pull, "rules": rules}
    names = ("min_numel", "exclude", "exclude_last", "threads", "seed")
    return coding | _named(settings, *names)


def _named(settings: TrainSettings, *names: str) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}


def local_optimizer(model: nn.Module, settings: TrainSettings) -> Optimizer:
    """AdamW leaves vectors undecayed, as is usual for biases and normalisation. Muon steps the
    matrices inside the blocks, at rates of the same size, and AdamW the rest."""
    rate, decay = settings.learning_rate, settings.weight_decay * settings.loss_scale
    parameters = list(model.parameters())
    if settings.optimizer == "muon":
        hidden = [
            p for name, p in model.named_parameters() if name.startswith(BLOCKS) and p.dim() == 2
        ]
        muon = Muon(hidden, rate, decay, adjust_lr_fn="match_rms_adamw")
        ours = {id(p) for p in hidden}
        return OptimizerList([muon, _adamw([p for p in parameters if id(p) not in ours], settings)])
    matrices_first = sorted(parameters, key=lambda p: p.dim() <= 1)
    if settings.optimizer == "sgd":
        return SGD(matrices_first, rate, settings.momentum, weight_decay=decay)
    if settings.optimizer == "adam":
        return Adam(matrices_first, rate, BETAS, weight_decay=decay)
    return _adamw(parameters, settings)


def _adamw(parameters: list[nn.Parameter], settings: TrainSettings) -> AdamW:
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, settings.learning_rate, BETAS, weight_decay=settings.weight_decay)

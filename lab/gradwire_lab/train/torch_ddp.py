"""The strategy of plain DDP, and of the hooks that come with PyTorch.

PyTorch does not count what it sends. The bytes here are computed for a ring all-reduce: a rank
sends each value of the payload (N - 1) / N times while it is summed ("push") and as often
afterwards ("pull").
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire_lab.train.models import parameter_count
from gradwire_lab.train.records import StepCosts
from gradwire_lab.train.rivals import BF16, FP16, POWERSGD, Rival
from gradwire_lab.train.strategy import Strategy

_ONE_BUCKET_MB = 2.0**20

_HOOKS: dict[str, Callable[[Any, Any], torch.futures.Future[torch.Tensor]]] = {
    # DDP refuses bf16_compress_hook by its name without NCCL, although Gloo sums bfloat16, too.
    BF16: lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket),
    FP16: default_hooks.fp16_compress_hook,
}


def distribute(
    model: nn.Module, workers: dist.ProcessGroup | None = None, bucket_mb: float | None = None
) -> DistributedDataParallel:
    """DDP in which every rank keeps the batch norm statistics of its own batches. PyTorch 2.13
    renames the option. bucket_mb: size of a bucket; None: DDP's own."""
    known = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {sync: False}
    if bucket_mb is not None:
        options["bucket_cap_mb"] = bucket_mb
    return DistributedDataParallel(model, process_group=workers, **options)


class TorchDdp(Strategy):
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rival: Rival,
        workers: dist.ProcessGroup,
        clip: float,
    ) -> None:
        # PowerSGD reduces a bucket twice, the second time when the first result is there. Ranks
        # that do so with several buckets at a time differ in the order, and Gloo aborts them.
        bucket_mb = _ONE_BUCKET_MB if rival.name == POWERSGD else None
        forward = distribute(model, workers, bucket_mb)
        super().__init__(model, optimizer, forward=forward, clip=clip)
        self._values = parameter_count(model)
        share = (workers.size() - 1) / workers.size()
        self._bytes_of_value = share * (2 if rival.name in _HOOKS else 4)
        self._power_sgd = None
        self._counted = 0  # of the values that PowerSGD has sent
        self._last_bytes = self._sent_bytes = 0.0
        if rival.name == POWERSGD:
            self._power_sgd = PowerSGDState(
                workers, matrix_approximation_rank=rival.rank, start_powerSGD_iter=rival.start
            )
            forward.register_comm_hook(self._power_sgd, powerSGD_hook)
        elif rival.name in _HOOKS:
            forward.register_comm_hook(workers, _HOOKS[rival.name])

    def take_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().take_step(inputs, targets)
        before = self._counted
        if self._power_sgd is not None:  # it does not count its first steps, uncompressed ones
            self._counted = self._power_sgd.total_numel_after_compression
        self._last_bytes = self._bytes_of_value * (self._counted - before or self._values)
        self._sent_bytes += self._last_bytes
        return loss

    def last_costs(self) -> StepCosts:
        return StepCosts(self._last_bytes, self._last_bytes)

    def stats(self) -> dict[str, Any]:
        sent = {"push_bytes": self._sent_bytes, "pull_bytes": self._sent_bytes}
        return {"steps": self._steps, **sent, "control_bytes": 0, "computed": True}

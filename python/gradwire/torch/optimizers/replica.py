"""What ShardedOptimizer and LocalSteps share: a model that is kept equal on all ranks, without DDP.

The ranks compare their settings and tensors, take over rank 0's parameters and buffers, and
exchange one bucket with a value for each value of the parameters.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.torch.link.engine import agree
from gradwire.torch.link.wire import Bytes, Kind, Wire
from gradwire.torch.records import checkpoint
from gradwire.torch.records.exchange_settings import ExchangeSettings
from gradwire.torch.records.parameters import NamedTensor, name_parameters, shapes_of
from gradwire.torch.records.wrapping_optimizer import WrappingOptimizer
from gradwire.torch.session.bucket import BucketJob
from gradwire.torch.session.session import Session
from gradwire.torch.session.session_owner import SessionOwner


class ReplicaOptimizer(SessionOwner, WrappingOptimizer):
    """Wraps an optimizer of a plain module, and keeps the module equal on all ranks."""

    # So that a GradScaler calls `step`, which refuses it, whatever the gradients are.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer, model: nn.Module, settings: ExchangeSettings) -> None:
        super().__init__(optimizer)
        self._replica = Replica(optimizer, model, settings)
        self._session = self._replica.session

    def _check_step(self) -> None:
        """Raises RuntimeError if a torch.amp.GradScaler called `step`, or the earlier error."""
        if vars(self).pop("found_inf", None) is not None:
            vars(self).pop("grad_scale", None)
            raise RuntimeError(
                f"{type(self).__name__} takes no GradScaler, which would skip steps on single "
                "ranks: train in float32 or bfloat16"
            )
        if self.error is not None:
            raise self.error


class Replica:
    """This rank's copy of the model, and the bucket through which it follows the others.

    names, parameters   of the optimizer, in the order of its groups
    bucket              f32, flat: the values of all parameters, one after the other
    parts               views of the bucket, shaped as the parameters
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, settings: ExchangeSettings) -> None:
        """Raises ValueError for a model in DDP, and for a parameter that the model lacks or that
        gets no gradient; TypeError for a parameter that is not dense float32 on the CPU.
        """
        named = _name_trainable(optimizer, model)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.tensors = shapes_of(named)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.bucket = torch.zeros(sum(sizes))
        self.parts = [
            part.view(p.shape)
            for part, p in zip(self.bucket.split(sizes), self.parameters, strict=True)
        ]
        self.settings = settings
        self._model = model
        self.session = Session(settings)
        self.session.close_with(self)

    def follow_rank_0(self, settings: Sequence[str]) -> None:
        """Compares `settings` and the model's tensors on all ranks, then takes rank 0's values.

        Raises PeerMismatchError naming the first difference between two ranks.
        """
        named = [("parameter", n, p.detach()) for n, p in self._model.named_parameters()]
        tensors = named + [("buffer", n, b) for n, b in self._model.named_buffers()]
        lines = [f"exchange {self.settings.exchange}"]
        lines += [f"{kind} {name} {list(t.shape)} {t.dtype}" for kind, name, t in tensors]

        def work(wire: Wire) -> torch.Tensor:
            agree("\n".join([*settings, *lines]), wire)
            self.session.runner.find_machines()
            values = _broadcast([tensor for _, _, tensor in tensors], wire)
            digest = hashlib.sha256(values).hexdigest()
            agree(f"values {digest} after the broadcast", wire)
            return self.bucket

        try:
            self.session.start(work, "comparing and broadcasting the model").wait()
        except BaseException:
            # The finalizer does not run: the error refers to this object, and the session to it.
            self.session.close()
            raise

    def find_non_finite(self) -> str | None:
        """Where the first NaN or Inf of the bucket is, as text; None if there is none."""
        if bool(torch.isfinite(self.bucket).all()):
            return None
        for name, part in zip(self.names, self.parts, strict=True):
            elements = torch.isfinite(part.reshape(-1)).logical_not().nonzero()
            if len(elements):
                return f"not finite at element {int(elements[0])} of {name}"
        raise AssertionError("the parts are the bucket")

    def exchange(self, step: int, fault: str | None = None) -> bool:
        """Turns the bucket into the exchange's result, the same bits on every rank.

        `fault`: what is wrong with this rank's values, if that is known. (An exchange whose codec
        keeps a residual finds NaN and Inf itself; any other one passes them through.)
        False: the result is not finite. The step is counted as skipped, and no rank may apply it.
        """
        job = BucketJob(
            step=step,
            index=0,
            last=True,
            raw=False,
            tensors=self.tensors,
            values=self.bucket,
            loss_scale=None,
            queued=time.perf_counter(),
            hook_seconds=0.0,
            hook_cpu_seconds=0.0,
        )
        self.session.submit(job).wait()
        runner = self.session.runner
        if not runner.last_step.skipped and not bool(torch.isfinite(self.bucket).all()):
            runner.skip_last_step(
                f"the gradient of rank {self.session.rank} is {fault}"
                if fault
                else "the gradient of another rank is not finite, or the sum of all"
            )
        return not runner.last_step.skipped

    def check_state(self, state: checkpoint.StateDict) -> None:
        """Raises ValueError for a state of another rank, world size or codec."""
        session = self.session
        checkpoint.check_place(state, session.rank, session.world_size, self.settings.text())


def _name_trainable(optimizer: Optimizer, model: nn.Module) -> list[NamedTensor]:
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "the model is in DistributedDataParallel, which averages gradients itself: give the "
            "module in it, and call that"
        )
    named = name_parameters(optimizer, model.named_parameters())
    for name, parameter in named:
        if not parameter.requires_grad:
            raise ValueError(f"{name} requires no gradient: leave it out of the optimizer")
        if parameter.device.type != "cpu":
            raise TypeError(
                f"float32 parameters on the CPU are exchanged; {name} is on {parameter.device}"
            )
    return named


def _broadcast(tensors: Sequence[torch.Tensor], wire: Wire) -> Bytes:
    """Overwrites the tensors with rank 0's, bit for bit; returns their bytes."""
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    values = torch.cat(parts).numpy() if parts else np.empty(0, np.uint8)
    if wire.rank == 0:
        for peer in wire.peers:
            wire.send(peer, Kind.PACKET, values)
        wire.flush()
        return values
    kind, received = wire.receive(0)
    assert (kind, received.size) == (Kind.PACKET, values.size), "they agreed on the tensors"
    values = received.copy()
    wire.release(0)
    offset = 0
    for tensor, part in zip(tensors, parts, strict=True):
        piece = torch.from_numpy(values[offset : offset + part.numel()].copy())
        tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
        offset += part.numel()
    return values

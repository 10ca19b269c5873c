"""A model that is to be the same on all ranks, without DistributedDataParallel.

What ShardedOptimizer and LocalSteps share: the ranks compare what they have, take over rank 0's
parameters and buffers, and exchange one bucket that holds a value for each of the model's.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.torch import checkpoint
from gradwire.torch.bucket import BucketJob
from gradwire.torch.coding import Coding
from gradwire.torch.engine import Lines, agree
from gradwire.torch.names import NamedShape
from gradwire.torch.runner import BucketRunner
from gradwire.torch.session import LEAVE_SECONDS, Session, explain_by, finish
from gradwire.torch.stats import Stats, summarize
from gradwire.torch.wire import Bytes, Kind, Wire

NamedParameter = tuple[str, nn.Parameter]


def name_parameters(optimizer: Optimizer, model: nn.Module) -> list[NamedParameter]:
    """The optimizer's parameters in its order, with the names that the model gives them.

    Raises ValueError for a parameter that the model has not, or that gets no gradient, and for a
    model in DDP; TypeError for a parameter that is not float32 on the CPU.
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "the model is in DistributedDataParallel, which averages gradients itself: give the "
            "module in it, and call that"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is none "
                    "of the model's"
                )
            if not parameter.requires_grad:
                raise ValueError(f"{name} requires no gradient: leave it out of the optimizer")
            if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
                raise TypeError(
                    f"float32 parameters on the CPU are exchanged; {name} is {parameter.dtype} on "
                    f"{parameter.device}"
                )
            named.append((name, parameter))
    return named


def refuse_gradient_scaler(optimizer: Optimizer) -> None:
    """To be called in `step`. Raises RuntimeError if a torch.amp.GradScaler called it."""
    if vars(optimizer).pop("found_inf", None) is not None:
        vars(optimizer).pop("grad_scale", None)
        raise RuntimeError(
            f"{type(optimizer).__name__} takes no GradScaler, which would skip steps on single "
            "ranks: train in float32 or bfloat16"
        )


class Replica:
    """This rank's copy of the model, and the bucket through which it follows the others.

    bucket   f32, flat: the values of all `named` parameters, one behind the other
    parts    views of the bucket, shaped as the parameters
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        model: nn.Module,
        coding: Coding,
        process_group: dist.ProcessGroup | None,
        timeout: float,
    ) -> None:
        self.parameters = [parameter for _, parameter in named]
        self.tensors: list[NamedShape] = [(name, list(p.shape)) for name, p in named]
        self.bucket = torch.zeros(sum(p.numel() for p in self.parameters))
        sizes = [p.numel() for p in self.parameters]
        self.parts = [
            part.view(p.shape)
            for part, p in zip(self.bucket.split(sizes), self.parameters, strict=True)
        ]
        self.coding = coding
        self._model = model
        self._session = Session.open(coding, process_group, timeout)
        self._finalizer = weakref.finalize(self, finish, self._session)

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def world_size(self) -> int:
        return self._session.world_size

    @property
    def error(self) -> Exception | None:
        return self._session.error

    def follow_rank_0(self, settings: Sequence[str]) -> None:
        """Compares `settings` and the model's tensors on all ranks, then takes rank 0's values.

        Raises PeerMismatchError naming the first difference between two ranks.
        """
        named = [("parameter", n, p.detach()) for n, p in self._model.named_parameters()]
        tensors = named + [("buffer", n, b) for n, b in self._model.named_buffers()]
        lines = [f"exchange {self.coding.exchange}"]
        lines += [f"{kind} {name} {list(t.shape)} {t.dtype}" for kind, name, t in tensors]

        def work(wire: Wire) -> torch.Tensor:
            agree(Lines(wire.rank, [*settings, *lines]), wire)
            self._session.runner.find_machines()
            values = _broadcast([tensor for _, _, tensor in tensors], wire)
            digest = hashlib.sha256(values).hexdigest()
            agree(Lines(wire.rank, [f"values {digest} after the broadcast"]), wire)
            return self.bucket

        try:
            self._session.start(work, "comparing and broadcasting the model").wait()
        except BaseException:
            self.close()  # nobody else will: the error refers to this object, and the session to it
            raise

    def find_non_finite(self) -> str | None:
        """Where the bucket holds NaN or Inf first, in words."""
        if bool(torch.isfinite(self.bucket).all()):
            return None
        for (name, _), part in zip(self.tensors, self.parts, strict=True):
            elements = torch.isfinite(part.reshape(-1)).logical_not().nonzero()
            if len(elements):
                return f"not finite at element {int(elements[0])} of {name}"
        raise AssertionError("the parts are the bucket")

    def exchange(self, step: int, fault: str | None = None) -> bool:
        """Turns the bucket into the exchange's result, the same bits on every rank.

        `fault`: what is known to be wrong with this rank's values. The exchange itself names them
        where a codec keeps a residual; else NaN is passed through and not marked.
        False: it is not finite, was counted as skipped, and must not be applied by any rank.
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
        self._session.submit(job).wait()
        runner = self._session.runner
        if not runner.last_step.skipped and not bool(torch.isfinite(self.bucket).all()):
            runner.skip_last_step(
                f"the gradient of rank {self.rank} is {fault}"
                if fault
                else "the gradient of another rank is not finite, or the sum of all"
            )
        return not runner.last_step.skipped

    def stats(self) -> Stats:
        runner = self._session.runner
        return summarize(
            runner.totals,
            codec=self.coding.text(),
            world_size=self.world_size,
            raw_tensors=runner.raw_tensors(),
        )

    def last_step(self) -> dict[str, Any]:
        return self._session.runner.last_step.summary()

    def state_dict(self, step: int) -> checkpoint.StateDict:
        """This rank's place, codec and residuals, as in a state of the hook."""
        return {
            "format": checkpoint.FORMAT,
            "codec": self.coding.text(),
            "rank": self.rank,
            "world_size": self.world_size,
            "iterations": step,
            "ranks_per_machine": self._idle_runner().ranks_per_machine,
            "loss_scale": None,
            "residuals": checkpoint.residuals_to_list(self._idle_runner().residuals()),
        }

    def check_state(self, state: checkpoint.StateDict) -> None:
        """Raises ValueError if another rank, another world or another codec saved it."""
        checkpoint.residuals_of(state)
        saved = (state["rank"], state["world_size"], state["codec"])
        here = (self.rank, self.world_size, self.coding.text())
        if saved != here:
            raise ValueError(
                "the state is that of rank {} of {} with {}, this is rank {} of {} with {}".format(
                    *saved, *here
                )
            )

    def load_state_dict(self, state: checkpoint.StateDict) -> None:
        self._idle_runner().replace_residuals({**state, "loss_scale": None})

    def explain(self, error: BaseException) -> BaseException:
        return explain_by(self._session, error)

    def close(self) -> None:
        if self._finalizer.detach() and self._session.close(LEAVE_SECONDS):
            self._session.runner.release()

    def _idle_runner(self) -> BucketRunner:
        if not self._session.drain(LEAVE_SECONDS):
            raise RuntimeError("a step is under way; residuals can be had between two steps only")
        return self._session.runner


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

"""The base of ShardedOptimizer and LocalSteps: it keeps a model equal on all ranks, without DDP.

The ranks compare their settings and tensors, take over rank 0's parameters and buffers, and
exchange buckets with a value for each value of the parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.torch.link.engine import agree, receive
from gradwire.torch.link.meeting import Meeting
from gradwire.torch.link.wire import Kind, Wire
from gradwire.torch.records import checkpoint
from gradwire.torch.records.exchange_settings import ExchangeSettings
from gradwire.torch.records.modes import ordinary_tensors
from gradwire.torch.records.parameters import (
    NamedTensor,
    all_finite,
    local_of,
    name_parameters,
    named_buffers,
    named_parameters,
    pack,
    shapes_of,
    split_like,
    tensors_in_common,
    unpack,
)
from gradwire.torch.records.shards import group_of_shards
from gradwire.torch.records.shared_parameters import SharedParameters
from gradwire.torch.records.wrapping_optimizer import WrappingOptimizer
from gradwire.torch.session.session import Session, SessionOwner

BESIDE = "(statistics of the gradient)"


class ReplicaBucket:
    """What is exchanged for some parameters, f32 and flat.

    values   of the parameters, one after the other, and then `beside` further values, which are
             averaged too, and go raw if `BESIDE` is excluded
    parts    views of the values, shaped as the parameters
    beside   view of the further values
    tensors  names and shapes of all
    """

    @ordinary_tensors()
    def __init__(self, named: Sequence[NamedTensor], beside: int = 0) -> None:
        self.tensors = shapes_of(named)
        if beside:
            self.tensors.append((BESIDE, [beside]))
        parameters = [parameter for _, parameter in named]
        numel = sum(parameter.numel() for parameter in parameters)
        self.values = torch.zeros(numel + beside, dtype=torch.float32, device="cpu")
        self.beside = self.values[numel:]
        self.parts = split_like(self.values[:numel], parameters)

    def find_non_finite(self) -> str | None:
        """Where the first NaN or Inf of the parameters is, as text; None if there is none."""
        for (name, _), part in zip(self.tensors, self.parts, strict=False):
            if not all_finite(part):
                element = int(torch.isfinite(part.reshape(-1)).logical_not().nonzero()[0])
                return f"not finite at element {element} of {name}"
        return None


class ReplicaOptimizer(SessionOwner, WrappingOptimizer):
    """Wraps an optimizer of a plain module, and keeps the module equal on all ranks.

    _names, _parameters   of the optimizer, in the order of its groups
    _shards               the ranks among which FSDP2 has sharded the parameters; None: it has not
    """

    # A rank alone must not leave out a step. So a GradScaler calls `step` even if gradients are not
    # finite; meanwhile this object has attributes `found_inf` and `grad_scale`, see _scaler_says.
    _step_supports_amp_scaling = True
    _session: Session

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        named: Sequence[NamedTensor],
        settings: ExchangeSettings,
    ) -> None:
        """named: the optimizer's parameters, as name_trainable gives them."""
        super().__init__(optimizer)
        self._shared = SharedParameters(type(self).__name__, named, optimizer, model)
        self._shards = group_of_shards(named)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._settings = settings.with_last_excluded(shapes_of(named))
        self._model = model

    def _connect(self, meeting: Meeting | None = None) -> None:
        """Begins a session with the ranks of the process group, or with those of `meeting`."""
        self._session = Session(self._settings, meeting=meeting)
        self._session.close_with(self)

    def close(self) -> None:
        """Ends the communication thread and its process group, and gives the wrapped optimizer
        back. Statistics and residuals stay. Happens by itself at exit, or when this is dropped."""
        super().close()
        self._own_use.end()

    def _model_tensors(self) -> list[tuple[str, str, torch.Tensor]]:
        """Kind, name and values of all tensors that ranks have in common at the beginning."""
        model = self._model
        places = {
            "parameter": [(n, local_of(p).detach()) for n, p in named_parameters(model)],
            "buffer": named_buffers(model),
        }
        return [
            (kind, name, tensor)
            for kind, named in places.items()
            for name, tensor in tensors_in_common(model, kind, named)
        ]

    def _describe(self, settings: Sequence[str]) -> str:
        """What must be equal on all ranks: `settings`, arguments and tensors, a line for each."""
        lines = [*self._settings.describe(), f"shard {self._shard_text()}"]
        tensors = self._model_tensors()
        lines += [f"{kind} {name} {list(t.shape)} {t.dtype}" for kind, name, t in tensors]
        return "\n".join([*settings, *lines])

    def _follow_rank_0(self, settings: Sequence[str]) -> None:
        """Compares `settings` and the model's tensors on all ranks, then takes rank 0's values.

        Raises PeerMismatchError naming the first difference between two ranks.
        """

        def work(wire: Wire) -> None:
            agree(self._describe(settings), wire)
            self._session.runner.agree_with_peers()
            digest = _broadcast([tensor for _, _, tensor in self._model_tensors()], wire)
            agree(f"values {digest} after the broadcast", wire)

        self._session.start(work, "comparing and broadcasting the model").result()

    def _shard_text(self) -> str:
        """This rank's place among those that share the model (FSDP2)."""
        return (
            "0 of 1" if self._shards is None else f"{self._shards.rank()} of {self._shards.size()}"
        )

    def _scaler_says(self) -> tuple[float | None, bool]:
        """If a torch.amp.GradScaler called `step`: the scale of the gradients (None: they are not
        scaled), and whether one of them is not finite."""
        scale, found = (vars(self).get(name) for name in ("grad_scale", "found_inf"))
        return None if scale is None else float(scale), found is not None and bool(found)

    def _identity(self, source: str) -> checkpoint.Identity:
        """What this rank's state says of its origin. source: the class."""
        shapes = [
            (name, list(parameter.shape))
            for name, parameter in zip(self._names, self._parameters, strict=True)
        ]
        return self._session.identity(source, shapes)


def name_trainable(optimizer: Optimizer, model: nn.Module) -> list[NamedTensor]:
    """The optimizer's parameters with their names, in the order of its groups.

    Raises ValueError for a model in DDP, and for a parameter that the model lacks or that gets no
    gradient; TypeError for a parameter that is not dense float32 on the CPU.
    """
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


def _broadcast(tensors: Sequence[torch.Tensor], wire: Wire) -> str:
    """Overwrites the tensors with rank 0's, bit for bit; returns the digest of their bytes."""
    if wire.rank == 0:
        values = pack(tensors)
        for peer in wire.peers:
            wire.send(peer, Kind.TENSORS, values)
        wire.flush()
        return hashlib.sha256(values).hexdigest()
    values = receive(wire, 0, Kind.TENSORS, sum(tensor.nbytes for tensor in tensors))
    unpack(values, tensors)
    digest = hashlib.sha256(values).hexdigest()
    wire.release(0)
    return digest

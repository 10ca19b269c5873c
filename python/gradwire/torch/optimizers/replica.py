"""A plain module that is equal on all ranks, without DDP.

The ranks compare their settings and tensors, take over rank 0's parameters and buffers, and
exchange buckets with a value for each value of the parameters.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from gradwire.torch import checkpoint
from gradwire.torch.buckets.session import Session
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.network.engine import agree, receive
from gradwire.torch.network.transport import Kind, Transport
from gradwire.torch.optimizer_list import parts_of
from gradwire.torch.parameters import (
    NamedTensor,
    all_finite,
    device_of,
    group_of_shards,
    name_parameters,
    named_buffers,
    named_parameters,
    ordinary_tensors,
    refuse_wrapped,
    shapes_of,
    split_like,
    tensors_in_common,
)
from gradwire.torch.shared_parameters import SharedParameters
from gradwire.torch.staging.moves import pack, unpack
from gradwire.torch.tensor_memory import local_of
from gradwire.torch.wrapping_optimizer import step_of_copy

BESIDE = "(statistics of the gradient)"


class ReplicaBucket:
    """What is exchanged for some parameters, f32 and flat.

    Attributes:
        values: Those of the parameters, one after the other, and then further values, which are
            averaged too, and go raw if `BESIDE` is excluded.
        parts: Views of the values, shaped as the parameters.
        beside: View of the further values.
        tensors: Names and shapes of all.
    """

    @ordinary_tensors()
    def __init__(self, named: Sequence[NamedTensor], device: torch.device, beside: int = 0) -> None:
        self.tensors = shapes_of(named)
        if beside:
            self.tensors.append((BESIDE, [beside]))
        parameters = [parameter for _, parameter in named]
        numel = sum(parameter.numel() for parameter in parameters)
        self.values = torch.zeros(numel + beside, dtype=torch.float32, device=device)
        self.beside = self.values[numel:]
        self.parts = split_like(self.values[:numel], parameters)
        self._numel = numel

    def find_non_finite(self, values: torch.Tensor) -> str | None:
        """Where the first NaN or Inf of the parameters is, as text; None if there is none.

        values: Those of the bucket, or a copy on the host.
        """
        return None if all_finite(values[: self._numel]) else self._describe_fault()

    def look_with(self, others: torch.Tensor) -> tuple[str | None, list[float]]:
        """What `find_non_finite` returns, and other values, f32 and flat; the host waits once."""
        values = self.values[: self._numel]
        extremes = torch.stack(torch.aminmax(values)) if self._numel else values
        read = torch.cat([others, extremes]).cpu().tolist()
        read, extremes_read = read[: others.numel()], read[others.numel() :]
        return (None if all(map(math.isfinite, extremes_read)) else self._describe_fault()), read

    def _describe_fault(self) -> str | None:
        for (name, _), part in zip(self.tensors, self.parts, strict=False):
            if not all_finite(part):
                element = int(torch.isfinite(part.reshape(-1)).logical_not().nonzero()[0])
                return f"not finite at element {element} of {name}"
        return None


class Replica:
    """A rank's module, and those of its parameters that an optimizer steps.

    Attributes:
        named: Names and parameters, in the order of the optimizer's groups.
        device: Where the parameters are.
        shards: The ranks among which FSDP2 has sharded the parameters. None: it has not.
        shared: Finds out what the user does to the parameters.
    """

    def __init__(
        self, owner: str, optimizer: Optimizer, model: nn.Module, settings: ExchangeSettings
    ) -> None:
        """Looks the parameters up in the model.

        Args:
            owner: The class to name in errors and states.

        Raises:
            ValueError: The model is in DDP, lacks a parameter, or has one that gets no gradient; or
                it is on several devices.
            TypeError: A parameter is not dense, or not float32, bfloat16 or float16.
        """
        self.named = _name_trainable(optimizer, model)
        self.names = [name for name, _ in self.named]
        self.parameters = [parameter for _, parameter in self.named]
        self.device = device_of(self.named)
        self.shards = group_of_shards(self.named)
        self.shared = SharedParameters(owner, self.named, optimizer, model)
        self.settings = settings.with_last_excluded(shapes_of(self.named))
        self.model = model
        self._owner = owner

    def tensors(self) -> list[tuple[str, str, torch.Tensor]]:
        """Kind, name and values of all tensors that ranks have in common at the beginning."""
        places = {
            "parameter": [(n, local_of(p)) for n, p in named_parameters(self.model)],
            "buffer": named_buffers(self.model),
        }
        return [
            (kind, name, tensor.detach())
            for kind, named in places.items()
            for name, tensor in tensors_in_common(self.model, kind, named)
        ]

    def describe(self, settings: Sequence[str]) -> str:
        """What must be equal on all ranks: `settings`, arguments and tensors, a line for each."""
        lines = [*self.settings.describe(), f"shard {self.shard_text()}"]
        lines += [f"{kind} {name} {list(t.shape)} {t.dtype}" for kind, name, t in self.tensors()]
        return "\n".join([*settings, *lines])

    def follow_rank_0(self, session: Session, settings: Sequence[str]) -> None:
        """Compares `settings` and the model's tensors on all ranks, then takes rank 0's values.

        Raises PeerMismatchError naming the first difference between two ranks.
        """

        def work(wire: Transport) -> None:
            agree(self.describe(settings), wire)
            session.runner.agree_with_peers()
            digest = _broadcast([tensor for _, _, tensor in self.tensors()], wire)
            agree(f"values {digest} after the broadcast", wire)

        session.start(work, "comparing and broadcasting the model").result()

    def shard_text(self) -> str:
        """This rank's place among those that share the model (FSDP2)."""
        return "0 of 1" if self.shards is None else f"{self.shards.rank()} of {self.shards.size()}"

    def identity(self, session: Session) -> checkpoint.Identity:
        """What this rank's state says of its origin."""
        return session.identity(self._owner, [(n, list(p.shape)) for n, p in self.named])


def _name_trainable(optimizer: Optimizer, model: nn.Module) -> list[NamedTensor]:
    named = name_parameters(optimizer, model.named_parameters())
    refuse_wrapped(model, [parameter for _, parameter in named])
    for name, parameter in named:
        if not parameter.requires_grad:
            raise ValueError(f"{name} requires no gradient: leave it out of the optimizer")
    return named


def _broadcast(tensors: Sequence[torch.Tensor], wire: Transport) -> str:
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


# torch.save's entry for a tensor: a name, two headers of ZIP, alignment to 64 bytes, the pickle.
_BESIDE_TENSOR = 512
_BESIDE_ALL = 65536  # names and numbers
_MOST_MODELS = 256


def bytes_of(state: object) -> int:
    """The bytes of the tensors in dicts, lists and tuples, with what torch.save adds to each; a
    tensor on the meta device counts as if it had values."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size() + _BESIDE_TENSOR
    if isinstance(state, Mapping):
        return sum(bytes_of(each) for each in state.values())
    if isinstance(state, list | tuple):
        return sum(bytes_of(each) for each in state)
    return 0


def most_bytes(*states: object) -> int:
    """The bytes of a message with these states. An Optimizer stands for its largest state."""
    optimizers = [part for s in states if isinstance(s, Optimizer) for part in parts_of(s)]
    others = [state for state in states if not isinstance(state, Optimizer)]
    return sum(map(_of_optimizer, optimizers)) + bytes_of(others) + _BESIDE_ALL


def _of_optimizer(optimizer: Optimizer) -> int:
    """Most optimizers make their state in the first step, so a copy of this one takes a step. One
    that can't be copied so counts as `_MOST_MODELS` times its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = bytes_of(list(optimizer.state.values()))
    if isinstance(optimizer, LBFGS):
        # The direction and the gradient before; of each kept step two of these and two numbers.
        numel = sum(p.numel() for p in parameters)
        flat = torch.empty(numel, dtype=parameters[0].dtype, device="meta")
        history = optimizer.param_groups[0]["history_size"]
        return bytes_of([flat] * (2 + 2 * history)) + (1 + 2 * history) * _BESIDE_TENSOR
    with contextlib.suppress(Exception):  # of any optimizer's own code
        return max(own, bytes_of(list(step_of_copy(optimizer).state.values())))
    return max(own, _MOST_MODELS * bytes_of(parameters))

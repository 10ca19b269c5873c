"""A model's parameters as one bucket, cut among servers."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
import torch
from torch.optim import Optimizer

from gradwire._core import Layout, ServerExchange
from gradwire.torch.names import NamedShape
from gradwire.torch.server_options import Group, apply_options
from gradwire.torch.wire import Bytes

_VERSION = struct.Struct("<Q")


class NamedParameters:
    """The parameters of an optimizer, in the order of its groups."""

    def __init__(
        self, optimizer: Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
    ) -> None:
        """Raises TypeError for what is not dense float32, ValueError for one without a name."""
        names = None if named is None else {id(tensor): name for name, tensor in named}
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        for index, group in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(group["params"]):
                name = f"{index}.{place}" if names is None else names.get(id(tensor))
                if name is None:
                    raise ValueError(
                        f"parameter {place} of group {index} is not among named_parameters"
                    )
                if tensor.dtype != torch.float32 or tensor.layout != torch.strided:
                    raise TypeError(
                        f"ServerOptimizer takes dense float32 parameters; {name} is "
                        f"{tensor.dtype}, {tensor.layout}"
                    )
                self.tensors.append(tensor)
                self.names.append(name)

    def shapes(self) -> list[NamedShape]:
        return [
            (name, list(tensor.shape))
            for name, tensor in zip(self.names, self.tensors, strict=True)
        ]

    def snapshot(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.tensors]

    def equal(self, others: list[torch.Tensor]) -> bool:
        pairs = zip(self.tensors, others, strict=True)
        return all(torch.equal(tensor.detach(), other) for tensor, other in pairs)


def _pack_model(version: int, tensors: list[torch.Tensor]) -> Bytes:
    parts = [np.frombuffer(_VERSION.pack(version), dtype=np.uint8)]
    for tensor in tensors:
        parts.append(tensor.detach().cpu().contiguous().view(-1).numpy().view(np.uint8))
    return np.concatenate(parts)


class ServerPart:
    """The bucket that an exchange works in, and the parameters behind it."""

    def __init__(self, layout: Layout, parameters: NamedParameters, rank: int) -> None:
        self.bucket = np.zeros(layout.numel, dtype=np.float32)
        self._first_version: dict[int, int] = {}  # of each server's tensors, on a worker
        self._rank = rank
        self._workers = layout.workers
        self._parameters = parameters
        self._values: list[torch.Tensor] = []  # of the bucket, in each parameter's shape
        flat, start = torch.from_numpy(self.bucket), 0
        for tensor in parameters.tensors:
            self._values.append(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        places = {name: place for place, name in enumerate(parameters.names)}
        self._of_server: dict[int, list[int]] = {}
        for segment in layout.segments:
            self._of_server.setdefault(segment["owner"], []).append(places[segment["name"]])
        self._before: list[torch.Tensor] = []  # a server's tensors before its step
        self._replica: list[torch.Tensor] = []  # the same as the workers have them

    @property
    def is_server(self) -> bool:
        return self._rank >= self._workers

    @property
    def numel(self) -> int:
        """Values of a server's own tensors."""
        return sum(tensor.numel() for tensor in self._tensors(self._rank))

    def values_pulled(self, exchange: ServerExchange) -> int:
        """By a worker, in all versions that it applied."""
        return sum(
            (exchange.version(server) - first) * tensor.numel()
            for server, first in self._first_version.items()
            for tensor in self._tensors(server)
        )

    # On a worker

    def fill_with_gradients(self) -> None:
        """Raises TypeError for a gradient that is not dense."""
        for values, tensor in zip(self._values, self._parameters.tensors, strict=True):
            if tensor.grad is None:
                values.zero_()
            elif tensor.grad.layout != torch.strided:
                raise TypeError(f"ServerOptimizer takes dense gradients, not {tensor.grad.layout}")
            else:
                values.copy_(tensor.grad)

    @torch.no_grad()
    def apply(self, server: int) -> None:
        """Adds the change of the server's tensors, which is in the bucket."""
        for place in self._of_server.get(server, ()):
            tensor = self._parameters.tensors[place]
            tensor.add_(self._values[place].to(tensor.device))

    @torch.no_grad()
    def load_model(self, server: int, message: Bytes) -> int:
        """Takes over what `model` made there; its version."""
        (version,) = _VERSION.unpack_from(message)
        values = torch.from_numpy(message[_VERSION.size :].view(np.float32))
        start = 0
        for tensor in self._tensors(server):
            tensor.copy_(values[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        self._first_version.setdefault(server, version)
        return int(version)

    # On a server

    @torch.no_grad()
    def keep_model(self, with_replica: bool) -> None:
        """Notes the tensors as they are, so that the next step's change can be told.

        with_replica: keeps them as the workers have them, too, for `replica`.
        """
        self._before = [tensor.detach().clone() for tensor in self._tensors(self._rank)]
        if with_replica:
            self._replica = [tensor.cpu().clone() for tensor in self._before]

    @torch.no_grad()
    def model(self, version: int) -> Bytes:
        return _pack_model(version, self._tensors(self._rank))

    def replica(self, version: int) -> Bytes:
        """The model as workers have it that pulled all versions."""
        return _pack_model(version, self._replica)

    @torch.no_grad()
    def follow(self) -> None:
        """The bucket holds the change of a version as the workers decode it."""
        if self._replica:
            for place, tensor in zip(self._of_server[self._rank], self._replica, strict=True):
                tensor.add_(self._values[place])

    def named_model(self) -> dict[str, torch.Tensor]:
        return {
            self._parameters.names[place]: self._parameters.tensors[place].detach().clone()
            for place in self._of_server.get(self._rank, ())
        }

    @torch.no_grad()
    def load_named(self, model: dict[str, torch.Tensor]) -> None:
        """Raises ValueError if these are not this server's tensors."""
        own = {self._parameters.names[place] for place in self._of_server.get(self._rank, ())}
        if own != model.keys():
            raise ValueError(
                f"the state's tensors are {sorted(model)}, rank {self._rank} has {sorted(own)}"
            )
        for place in self._of_server.get(self._rank, ()):
            self._parameters.tensors[place].copy_(model[self._parameters.names[place]])

    def step(self, optimizer: Optimizer, options: list[Group] | None) -> None:
        """The bucket holds the averages of the tensors here; afterwards what the step changed."""
        if options is not None:
            apply_options(optimizer.param_groups, options)
        for tensor in self._parameters.tensors:
            tensor.grad = None  # the optimizer leaves alone what is on other servers
        places = self._of_server.get(self._rank, ())
        for place in places:
            tensor = self._parameters.tensors[place]
            tensor.grad = self._values[place].to(tensor.device)
        optimizer.step()
        with torch.no_grad():
            for place, before in zip(places, self._before, strict=True):
                tensor = self._parameters.tensors[place]
                tensor.grad = None
                self._values[place].copy_(tensor - before)
                before.copy_(tensor)

    def _tensors(self, server: int) -> list[torch.Tensor]:
        return [self._parameters.tensors[place] for place in self._of_server.get(server, ())]

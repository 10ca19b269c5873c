"""A model's parameters as one bucket, which is divided among the servers."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from gradwire._core import Layout
from gradwire.torch.link.wire import Bytes, Kind
from gradwire.torch.records.parameters import NamedTensor, Options, copy_gradient, split_like
from gradwire.torch.server.group_options import apply_options

_VERSION = struct.Struct("<Q")


class _Place(NamedTuple):
    """A parameter, and its values in the bucket in the parameter's shape."""

    name: str
    tensor: torch.Tensor
    values: torch.Tensor


class ServerPart:
    """The bucket of a server exchange, and the parameters whose values it holds."""

    def __init__(self, layout: Layout, named: Sequence[NamedTensor], rank: int) -> None:
        self.bucket = np.zeros(layout.numel, dtype=np.float32)
        parts = split_like(torch.from_numpy(self.bucket), [tensor for _, tensor in named])
        self._places = {
            name: _Place(name, tensor, part)
            for (name, tensor), part in zip(named, parts, strict=True)
        }
        self._of_server: defaultdict[int, list[_Place]] = defaultdict(list)
        for segment in layout.segments:
            self._of_server[segment["owner"]].append(self._places[segment["name"]])
        self._own = self._of_server[rank]  # of a server
        self._before: list[torch.Tensor] = []  # a server's tensors before its step
        self._replica: list[torch.Tensor] = []  # a server's tensors as the workers have them

    def numel(self, server: int) -> int:
        """Values of a server's tensors."""
        return sum(place.values.numel() for place in self._of_server[server])

    # On a worker

    def fill_with_gradients(self) -> None:
        """Copies the gradients into the bucket. Raises TypeError for a sparse gradient."""
        for name, tensor, values in self._places.values():
            copy_gradient(name, tensor, values)

    @torch.no_grad()
    def apply(self, server: int, version: int) -> None:
        """Adds the change of the server's tensors, which is in the bucket."""
        for _, tensor, values in self._of_server[server]:
            tensor.add_(values.to(tensor.device))

    @torch.no_grad()
    def load_model(self, server: int, message: Bytes) -> int:
        """Takes over the tensors of the message, from the server's `model`. Returns its version."""
        (version,) = _VERSION.unpack_from(message)
        values = torch.from_numpy(message[_VERSION.size :].view(np.float32))
        tensors = [place.tensor for place in self._of_server[server]]
        for tensor, part in zip(tensors, split_like(values, tensors), strict=True):
            tensor.copy_(part)
        return int(version)

    # On a server

    @torch.no_grad()
    def keep_model(self, with_replica: bool) -> None:
        """Keeps a copy of the tensors, from which `step` computes the change of the next version.

        with_replica: also keeps a copy of the tensors as the workers have them, for CATCH_UP.
        """
        self._before = [place.tensor.detach().clone() for place in self._own]
        if with_replica:
            self._replica = [tensor.cpu().clone() for tensor in self._before]

    def model(self, version: int, kind: Kind = Kind.MODEL) -> Bytes:
        """The tensors here; with CATCH_UP, those of a worker that pulled all versions."""
        catch_up = kind is Kind.CATCH_UP
        tensors = self._replica if catch_up else [place.tensor for place in self._own]
        parts = [np.frombuffer(_VERSION.pack(version), dtype=np.uint8)]
        for tensor in tensors:
            parts.append(tensor.detach().cpu().contiguous().view(-1).numpy().view(np.uint8))
        return np.concatenate(parts)

    @torch.no_grad()
    def follow(self) -> None:
        """Adds the change in the bucket, as the workers decode it, to the tensors of CATCH_UP."""
        if not self._replica:
            return
        for place, tensor in zip(self._own, self._replica, strict=True):
            tensor.add_(place.values)

    def named_model(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor, _ in self._own}

    @torch.no_grad()
    def load_named(self, model: dict[str, torch.Tensor]) -> None:
        """Takes over saved tensors. Raises ValueError if they are not those of this server."""
        own = {place.name for place in self._own}
        if own != model.keys():
            raise ValueError(
                f"the state's tensors are {sorted(model)}, this server has {sorted(own)}"
            )
        for name, tensor, _ in self._own:
            tensor.copy_(model[name])

    def step(self, optimizer: Optimizer, options: list[Options] | None) -> None:
        """Replaces the averaged gradients in the bucket by the change that the step makes."""
        if options is not None:
            apply_options(optimizer.param_groups, options)
        for _, tensor, _ in self._places.values():
            tensor.grad = None  # the optimizer must not step tensors of other servers
        for _, tensor, values in self._own:
            tensor.grad = values.to(tensor.device)
        optimizer.step()
        with torch.no_grad():
            for (_, tensor, values), before in zip(self._own, self._before, strict=True):
                tensor.grad = None
                values.copy_(tensor - before)
                before.copy_(tensor)

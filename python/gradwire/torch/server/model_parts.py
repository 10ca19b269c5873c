"""A part of a model, or a whole model, as one bucket, which is divided among the servers."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from gradwire._core import Layout
from gradwire.torch.network.transport import Bytes, Kind
from gradwire.torch.parameters import (
    NamedTensor,
    Options,
    copy_gradient,
    ordinary_tensors,
    split_like,
)
from gradwire.torch.server.group_options import (
    VERSION_BYTES,
    apply_options,
    read_version,
    version_message,
)
from gradwire.torch.shared_parameters import mark_of

# What workers pull: the changes of the servers' model, or the averages of their gradients.
UPDATES, GRADIENTS = PULLS = ("updates", "gradients")


class _Place(NamedTuple):
    """A parameter, and its values in the bucket in the parameter's shape."""

    name: str
    tensor: torch.Tensor
    values: torch.Tensor


class ServerPart:
    """The bucket of a server exchange, and the parameters whose values it holds.

    A server turns its own parameters into float32. A worker sums the changes of a parameter of 16
    bits in float32, and rounds the sum: most changes are too small for 16 bits.

    With pulls="gradients" the workers step the parameters themselves. A server has them only to
    begin with.
    """

    @ordinary_tensors()
    def __init__(
        self, layout: Layout, named: Sequence[NamedTensor], rank: int, pulls: str = UPDATES
    ) -> None:
        self.layout = layout
        self._pulls_gradients = pulls == GRADIENTS
        self.bucket = np.zeros(layout.numel, dtype=np.float32)
        parts = split_like(torch.from_numpy(self.bucket), [tensor for _, tensor in named])
        self._places = {
            name: _Place(name, tensor, part)
            for (name, tensor), part in zip(named, parts, strict=True)
        }
        self._of_server: defaultdict[int, list[_Place]] = defaultdict(list)
        for segment in layout.segments:
            self._of_server[segment["owner"]].append(self._places[segment["name"]])
        self._rank = rank
        self._own = self._of_server[rank]  # of a server
        for place in self._own:
            place.tensor.data = place.tensor.data.float()
        self._wide: dict[str, torch.Tensor] = {}  # a worker's sums, by name
        self._marks: dict[str, tuple[int, int]] = {}  # of a worker's tensors, as the servers' are
        self._edited: list[str] = []  # tensors that the user has changed
        self._before: list[torch.Tensor] = []  # a server's tensors before its step
        self._replica: list[torch.Tensor] = []  # a server's tensors as the workers have them

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [place.tensor for place in self._places.values()]

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def names_at(self, places: Collection[int]) -> set[str]:
        """The names of the tensors at these places among all."""
        names = self.names
        return {names[place] for place in places}

    def numel(self, server: int) -> int:
        """Values of a server's tensors."""
        return sum(place.values.numel() for place in self._of_server[server])

    @property
    def max_model_size(self) -> int:
        """The most bytes of a server's `model`."""
        return VERSION_BYTES + 4 * max(map(self.numel, self._of_server), default=0)

    # On a worker

    def fill_with_gradients(self, factor: float) -> None:
        """Copies the gradients, times `factor`, into the bucket. Raises TypeError for a sparse
        gradient."""
        for name, tensor, values in self._places.values():
            copy_gradient(name, tensor, values)
        if factor != 1.0:
            self.bucket *= np.float32(factor)

    def unused(self) -> list[int]:
        """The places of the tensors without a gradient."""
        places = enumerate(self._places.values())
        return [number for number, place in places if place.tensor.grad is None]

    @ordinary_tensors()
    def apply(self, server: int, version: int) -> None:
        """Adds the change of the server's tensors, which is in the bucket."""
        self._note_edits(self._of_server[server])
        for name, tensor, values in self._of_server[server]:
            total = self._wide.get(name, tensor)
            total.add_(values.to(tensor.device))
            if total is not tensor:
                tensor.copy_(total)
            self._marks[name] = mark_of(tensor)

    def check_unedited(self) -> None:
        """Raises RuntimeError if the user has changed a tensor since it came from the servers."""
        self._note_edits(self._places.values())
        for name in self._edited:
            raise RuntimeError(
                f"{name} was changed between two steps on rank {self._rank}, but the servers have "
                "the model: change it before connect(). To evaluate other weights, put them into a "
                "copy of the model"
            )

    def forget_edits(self) -> None:
        """The tensors have the servers' values again."""
        self._edited.clear()
        self._marks = {name: mark_of(place.tensor) for name, place in self._places.items()}

    def _note_edits(self, places: Iterable[_Place]) -> None:
        for name, tensor, _ in places:
            mark = mark_of(tensor)
            if not self._pulls_gradients and self._marks.get(name, mark) != mark:
                self._edited.append(name)

    def step_replica(
        self, optimizer: Optimizer, servers: Sequence[int], unused: Collection[str]
    ) -> None:
        """Steps the tensors of these servers by the averages in the bucket, which become their
        gradients, as with DDP. unused: the names of tensors that no worker has a gradient of."""
        places = [place for server in servers for place in self._of_server[server]]
        places = [place for place in places if place.name not in unused]
        with ordinary_tensors():
            for _, tensor, values in places:
                if tensor.grad is None:
                    tensor.grad = torch.empty_like(tensor)
                tensor.grad.copy_(values)
        with _only(optimizer, [place.tensor for place in places]):
            optimizer.step()

    @ordinary_tensors()
    def load_model(self, server: int, message: Bytes) -> int:
        """Takes over the tensors of the message, from the server's `model`. Returns its version.
        Raises ValueError for a message of another size."""
        whole = VERSION_BYTES + 4 * self.numel(server)
        if message.size not in (whole, VERSION_BYTES):
            raise ValueError(
                f"it has {message.size} bytes; the tensors of rank {server} and their version have "
                f"{whole}, the version alone {VERSION_BYTES}"
            )
        version = read_version(message)
        if message.size == VERSION_BYTES:
            return version
        values = torch.from_numpy(message[VERSION_BYTES:].view(np.float32))
        places = self._of_server[server]
        parts = split_like(values, [place.tensor for place in places])
        for (name, tensor, _), part in zip(places, parts, strict=True):
            tensor.copy_(part)
            if tensor.dtype != torch.float32 and not self._pulls_gradients:
                self._wide[name] = part.to(tensor.device, copy=True)
            self._marks[name] = mark_of(tensor)
        return version

    def named_replica(self) -> dict[str, torch.Tensor]:
        """The sums of the changes on a worker, f32."""
        if self._pulls_gradients:
            return {}
        return {
            name: self._wide.get(name, tensor).detach().float().cpu().clone()
            for name, tensor, _ in self._places.values()
        }

    @ordinary_tensors()
    def load_replica(self, replica: dict[str, torch.Tensor]) -> None:
        """Takes over the sums of a saved worker."""
        for name, tensor, _ in self._places.values():
            tensor.copy_(replica[name])
            if tensor.dtype != torch.float32:
                self._wide[name] = replica[name].to(tensor.device, copy=True)
            self._marks[name] = mark_of(tensor)

    # On a server

    @property
    def own_names(self) -> set[str]:
        """The names of this server's tensors."""
        return {place.name for place in self._own}

    @ordinary_tensors()
    def keep_model(self, with_replica: bool) -> None:
        """Keeps a copy of the tensors, from which `step` computes the change of the next version.

        with_replica: also keeps a copy of the tensors as the workers have them, for CATCH_UP.
        """
        self._before = [place.tensor.detach().clone() for place in self._own]
        if with_replica:
            self._replica = [tensor.cpu().clone() for tensor in self._before]

    def drop_model(self) -> None:
        """From now on this server has no model: `model` has only the version."""
        self._own = []

    def model(self, version: int, kind: Kind = Kind.MODEL) -> Bytes:
        """The tensors here; with CATCH_UP, those of a worker that pulled all versions."""
        catch_up = kind is Kind.CATCH_UP
        tensors = self._replica if catch_up else [place.tensor for place in self._own]
        parts = [version_message(version)]
        for tensor in tensors:
            parts.append(tensor.detach().cpu().contiguous().view(-1).numpy().view(np.uint8))
        return np.concatenate(parts)

    @ordinary_tensors()
    def follow(self) -> None:
        """Adds the change in the bucket, as the workers decode it, to the tensors of CATCH_UP."""
        if not self._replica:
            return
        for place, tensor in zip(self._own, self._replica, strict=True):
            tensor.add_(place.values)

    def named_model(self) -> dict[str, torch.Tensor]:
        if self._pulls_gradients:
            return {}
        return {name: tensor.detach().clone() for name, tensor, _ in self._own}

    @ordinary_tensors()
    def load_named(self, model: dict[str, torch.Tensor]) -> None:
        """Takes over saved tensors, among which must be those of this server."""
        for name, tensor, _ in self._own:
            tensor.copy_(model[name])

    @ordinary_tensors()
    def step(
        self, optimizer: Optimizer, options: list[Options] | None, unused: Collection[str]
    ) -> None:
        """Replaces the averaged gradients in the bucket by the change that the step makes. unused:
        the names of tensors that no worker has a gradient of, which are not stepped."""
        if options is not None:
            apply_options(optimizer.param_groups, options)
        for name, tensor, values in self._own:
            tensor.grad = None if name in unused else values.to(tensor.device)
        with _only(optimizer, [place.tensor for place in self._own]):
            optimizer.step()
        for (_, tensor, values), before in zip(self._own, self._before, strict=True):
            tensor.grad = None
            values.copy_(tensor - before)
            before.copy_(tensor)


@contextlib.contextmanager
def _only(optimizer: Optimizer, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, the optimizer has no other parameters: neither those of other servers nor, which
    would take time, those of other parts."""
    kept = {id(tensor) for tensor in tensors}
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = [p for p in parameters if id(p) in kept]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters

"""A part of a model, or a whole model, as one bucket, which is divided among the servers."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.optim import Optimizer

from gradwire._core import ServerSide, WorkerSide
from gradwire.torch.network.transport import Bytes
from gradwire.torch.parameters import Options, copy_gradient, ordinary_tensors, split_like
from gradwire.torch.server.group_options import (
    VERSION_BYTES,
    UnusedOfWorkers,
    apply_options,
    read_version,
    version_message,
)
from gradwire.torch.server.server_plan import PartPlan, ServerPlan
from gradwire.torch.staging.moves import moved, overwrite, pack
from gradwire.torch.staging.stage import Stage
from gradwire.torch.tensor_memory import in_order_of, mark_of

Exchange = TypeVar("Exchange", ServerSide, WorkerSide)
Values = np.ndarray[Any, np.dtype[np.float32]]


class _Place(NamedTuple):
    """A parameter, and its values in the bucket in the parameter's shape: `values` on the device of
    the parameter, `hosted` on the host."""

    name: str
    tensor: torch.Tensor
    values: torch.Tensor
    hosted: torch.Tensor


class Part(Generic[Exchange]):
    """The parameters of a part, and the bucket with their values that its exchange sends.

    Attributes:
        number: That all ranks give to the part.
        own: The parameters for which this rank keeps residuals.
    """

    exchange: Exchange
    own: list[_Place]

    def __init__(self, number: int, part: PartPlan, stage: Stage) -> None:
        self.number: int = number
        self._stage: Stage = stage
        layout, named = part
        tensors = [tensor for _, tensor in named]
        device = tensors[0].device if tensors else "cpu"
        self._values: torch.Tensor = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self._hosted: torch.Tensor = stage.beside(self._values)
        self.bucket: Values = self._hosted.numpy()  # the engine's
        views = [split_like(values, tensors) for values in (self._values, self._hosted)]
        self._places = [_Place(*pair, *v) for pair, *v in zip(named, *views, strict=True)]
        place_of = {place.name: place for place in self._places}
        self._of_server: defaultdict[int, list[_Place]] = defaultdict(list)
        # From the first to the last value of a server, which are copied at once: those of other
        # servers between them are the same on both sides, or nobody reads them.
        self._spans: dict[int, slice] = {}
        for segment in layout.segments:
            server, start = segment["owner"], segment["bucket_offset"]
            self._of_server[server].append(place_of[segment["name"]])
            first = self._spans.get(server, slice(start, 0)).start
            self._spans[server] = slice(first, start + segment["numel"])

    def _put(self, server: int) -> None:
        """Brings the server's values of the bucket to the device."""
        span = self._spans.get(server, slice(0, 0))
        self._stage.put(self._hosted[span], self._values[span])

    def _bring(self, server: int) -> None:
        """Brings the server's values of the bucket to the host."""
        span = self._spans.get(server, slice(0, 0))
        self._stage.bring(self._values[span], self._hosted[span])

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [place.tensor for place in self._places]

    @property
    def names(self) -> list[str]:
        return [place.name for place in self._places]

    @property
    def own_names(self) -> set[str]:
        return {place.name for place in self.own}

    @property
    def numel(self) -> int:
        """Values of this rank's parameters."""
        return _numel(self.own)

    def names_at(self, places: Collection[int]) -> set[str]:
        """The names of the tensors at these places among all."""
        return {self._places[place].name for place in places}


class WorkerPart(Part[WorkerSide]):
    """A part on a worker, which sums the changes of a parameter of 16 bits in float32, and rounds
    the sum: most changes are too small for 16 bits.

    With pulls="gradients" it steps the parameters itself.

    Attributes:
        unused_everywhere: The names of the tensors that no worker has a gradient of, in this step.
    """

    @ordinary_tensors()
    def __init__(self, number: int, part: PartPlan, rank: int, plan: ServerPlan) -> None:
        super().__init__(number, part, plan.stage)
        settings = plan.settings
        self.exchange = WorkerSide(part[0], rank, self._pull, **settings.of_exchange())
        self.own = self._places
        self.unused_everywhere: set[str] = set()
        self._rank = rank
        self._pulls_gradients = settings.pulls_gradients
        self._averaged: list[int] = []  # servers whose averages are in the bucket
        self._wide: dict[str, torch.Tensor] = {}  # the sums, by name
        self._marks: dict[str, tuple[int, int]] = {}  # of the tensors, as the servers' are
        self._edited: list[str] = []  # tensors that the user has changed

    @property
    def max_model_size(self) -> int:
        """The most bytes of a server's `model`."""
        return VERSION_BYTES + 4 * max(map(_numel, self._of_server.values()), default=0)

    def fill_with_gradients(self, factor: float) -> None:
        """Copies the gradients, times `factor`, into the bucket. Raises TypeError for a sparse
        gradient, and RuntimeError if `step_replica` broke off, such as by an interrupt."""
        if self._averaged:
            raise RuntimeError(
                f"the last step of rank {self._rank} broke off, so that its replica lacks what "
                "those of other workers have: go on from a checkpoint"
            )
        for name, tensor, values, _ in self._places:
            copy_gradient(name, tensor, values)
        self._stage.bring(self._values, self._hosted)
        if factor != 1.0:
            self.bucket *= np.float32(factor)

    def unused(self) -> list[int]:
        """The places of the tensors without a gradient."""
        return [i for i, place in enumerate(self._places) if place.tensor.grad is None]

    @ordinary_tensors()
    def _pull(self, server: int, version: int) -> None:
        """The bucket has the change of the server's tensors, or the average of their gradients."""
        self._put(server)
        if self._pulls_gradients:
            self._averaged.append(server)
            return
        self._note_edits(self._of_server[server])
        for name, tensor, values, _ in self._of_server[server]:
            total = self._wide.get(name, tensor)
            total.add_(values)
            if total is not tensor:
                tensor.copy_(total)
            self._marks[name] = mark_of(tensor)

    def check_unedited(self, was_loaded: bool) -> None:
        """Raises RuntimeError if the user has changed a tensor since it came from the servers.
        was_loaded: the user has loaded the servers' values again."""
        if was_loaded:
            self._edited.clear()
            self._marks = {name: mark_of(tensor) for name, tensor, *_ in self._places}
        self._note_edits(self._places)
        for name in self._edited:
            raise RuntimeError(
                f"{name} was changed between two steps on rank {self._rank}, but the servers have "
                "the model: change it before connect(). To evaluate other weights, put them into a "
                "copy of the model"
            )

    def _note_edits(self, places: Iterable[_Place]) -> None:
        for name, tensor, *_ in places:
            mark = mark_of(tensor)
            if not self._pulls_gradients and self._marks.get(name, mark) != mark:
                self._edited.append(name)

    def step_replica(self, optimizer: Optimizer) -> None:
        """Steps the tensors by the averages in the bucket, which become their gradients, as with
        DDP."""
        averaged, unused = self._averaged, self.unused_everywhere
        places = [p for s in averaged for p in self._of_server[s] if p.name not in unused]
        with ordinary_tensors():
            for _, tensor, values, _ in places:
                if tensor.grad is None:
                    tensor.grad = torch.empty_like(tensor)
                tensor.grad.copy_(values)
        if averaged:
            with _only(optimizer, places):
                optimizer.step()
        self._averaged, self.unused_everywhere = [], set()

    @ordinary_tensors()
    def load_model(self, server: int, message: Bytes) -> int:
        """Takes over the tensors of the message, from the server's `model`. Returns its version.
        Raises ValueError for a message of another size."""
        places = self._of_server[server]
        whole = VERSION_BYTES + 4 * _numel(places)
        if message.size not in (whole, VERSION_BYTES):
            raise ValueError(
                f"it has {message.size} bytes; the tensors of rank {server} and their version have "
                f"{whole}, the version alone {VERSION_BYTES}"
            )
        if message.size == whole:
            values = torch.from_numpy(message[VERSION_BYTES:].view(np.float32))
            self._take_over(places, split_like(values, [place.tensor for place in places]))
        return read_version(message)

    def named_model(self) -> dict[str, torch.Tensor]:
        """The sums of the changes, f32; nothing with pulls="gradients"."""
        if self._pulls_gradients:
            return {}
        wide = moved(self._wide.get(name, tensor) for name, tensor, *_ in self._places)
        return {name: values.float().clone() for name, values in zip(self.names, wide, strict=True)}

    @ordinary_tensors()
    def load_named(self, model: dict[str, torch.Tensor]) -> None:
        """Takes over what `named_model` gave."""
        self._take_over(self._places, [model[place.name] for place in self._places])

    def _take_over(self, places: Sequence[_Place], values: Sequence[torch.Tensor]) -> None:
        there = moved(values, [place.tensor.device for place in places])
        for (name, tensor, *_), wide in zip(places, there, strict=True):
            tensor.copy_(wide)
            if tensor.dtype != torch.float32 and not self._pulls_gradients:
                self._wide[name] = wide.clone()
            self._marks[name] = mark_of(tensor)


class ServerPart(Part[ServerSide]):
    """A part on a server, which turns its own parameters into float32.

    With pulls="gradients" it has them only to begin with.
    """

    @ordinary_tensors()
    def __init__(
        self,
        number: int,
        part: PartPlan,
        rank: int,
        plan: ServerPlan,
        optimizer: Optimizer,
        update: Callable[[ServerPart], None],
    ) -> None:
        """optimizer: its states of 16 bits become float32, too. update: turns the averages in the
        bucket into the model's change."""
        super().__init__(number, part, plan.stage)
        settings = plan.settings
        self._rank = rank
        on_average = None if settings.pulls_gradients else partial(update, self)
        self.exchange = ServerSide(part[0], rank, on_average, **settings.of_exchange())
        self.own = self._of_server[rank]
        for place in self.own:
            kept, dtype = optimizer.state.get(place.tensor, {}), place.tensor.dtype
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.dtype == dtype:
                    kept[key] = value.float()
            place.tensor.data = place.tensor.data.float()
        self.said = UnusedOfWorkers(len(self._places))
        self._pulls_gradients = settings.pulls_gradients
        self._model = self.own
        self._before: list[torch.Tensor] = []  # the tensors before the step
        self._replica: list[torch.Tensor] = []  # the tensors as the workers have them

    @ordinary_tensors()
    def begin(self, with_replica: bool) -> None:
        """Called when the workers have the model. From now on a server with pulls="gradients" has
        none: `model` has only the version.

        with_replica: keeps a copy of the tensors as the workers have them, for CATCH_UP.
        """
        if self._pulls_gradients:
            self._model = []
            return
        self._before = [place.tensor.detach().clone() for place in self.own]
        if with_replica:
            self._replica = [values.clone() for values in moved(self._before)]

    def model(self) -> Bytes:
        """The version and the tensors."""
        return self._message_of([place.tensor for place in self._model])

    def catch_up_model(self) -> Bytes:
        """The version, and the tensors of a worker that pulled all versions."""
        return self._message_of(self._replica)

    def _message_of(self, tensors: Sequence[torch.Tensor]) -> Bytes:
        return pack(tensors, version_message(self.exchange.version))

    @ordinary_tensors()
    def follow(self) -> None:
        """Adds the change in the bucket, as the workers decode it, to the tensors of CATCH_UP."""
        for place, tensor in zip(self.own, self._replica, strict=False):  # there may be no replica
            tensor.add_(place.hosted)

    def named_model(self) -> dict[str, torch.Tensor]:
        """This server's tensors; nothing with pulls="gradients"."""
        if self._pulls_gradients:
            return {}
        values = moved(place.tensor for place in self.own)
        return {place.name: v.clone() for place, v in zip(self.own, values, strict=True)}

    @ordinary_tensors()
    def load_named(self, model: dict[str, torch.Tensor]) -> None:
        """Takes over saved tensors, among which must be those of this server."""
        overwrite([place.tensor for place in self.own], [model[place.name] for place in self.own])

    @ordinary_tensors()
    def step(
        self, optimizer: Optimizer, options: list[Options] | None, unused: Collection[str]
    ) -> None:
        """Replaces the averaged gradients in the bucket by the change that the step makes. unused:
        the names of tensors that no worker has a gradient of, which are not stepped."""
        if options is not None:
            apply_options(optimizer.param_groups, options)
        self._put(self._rank)
        for name, tensor, values, _ in self.own:
            tensor.grad = None if name in unused else in_order_of(tensor, values)
        with _only(optimizer, self.own):
            optimizer.step()
        for (_, tensor, values, _), before in zip(self.own, self._before, strict=True):
            tensor.grad = None
            values.copy_(tensor - before)
            before.copy_(tensor)
        self._bring(self._rank)


def _numel(places: Iterable[_Place]) -> int:
    return sum(place.values.numel() for place in places)


@contextlib.contextmanager
def _only(optimizer: Optimizer, places: Sequence[_Place]) -> Iterator[None]:
    """Inside, the optimizer has no other parameters: neither those of other servers nor, which
    would take time, those of other parts."""
    kept = {id(place.tensor) for place in places}
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = [p for p in parameters if id(p) in kept]
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters

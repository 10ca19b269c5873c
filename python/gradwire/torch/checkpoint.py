"""What a rank keeps from step to step, as a checkpoint: saved by each rank, and loaded again.

A state is a dictionary of plain values and tensors (`torch.load(..., weights_only=True)` reads it):

    format      2. (In 1, LocalSteps with a delay began exchanges at their turn.)
    source      the class that saved it, such as GradwireState
    codec, exchange   of the training, as text
    rank, world_size
    tensors     the names and shapes of the model's parameters; None, or missing: not known
    residuals   list of {"kind", "name": str, "offset": int, "values": f32[n]}: n values of the
                parameter `name`, from its flattened element `offset` on. The kinds are those of
                Residual

and, where the source has a session with equal ranks:

    iterations
    loss_scale  the gradient scaler's scale, which the residuals have, too; None: no scaler
    ranks_per_machine   of a hierarchical exchange: the first of so many ranks keeps residuals. 1
                for the other exchanges, and if the entry is missing. None: no residuals exist yet
    auto        what `auto` codecs chose, and after how many steps; None, or missing: no such codec

Entries of the sources' own stand in their `state_dict`. resharding/reshard.py moves states to
another number of ranks, and says what is owed to a parameter.
"""

from __future__ import annotations

import contextlib
import io
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from gradwire._core import AutoGoal, Compressor, Exchange, is_goal
from gradwire.errors import warn_deprecated
from gradwire.torch.optimizer_list import name_of
from gradwire.torch.parameters import NamedShape, clean_name, ordinary_tensors
from gradwire.torch.staging.moves import moved
from gradwire.torch.state_kinds import require_dict, require_state

FORMAT = 2
StateDict = dict[str, Any]
# Entries that name parameters. A server's state has all of its own in the last.
_NAMING = {
    *("residuals", "tensors", "shard", "dims", "auto", "model", "buffers", "gradwire", "late"),
}


class Residual(NamedTuple):
    """Values of parameter `name` that were not sent, from its flattened element `offset` on.

    `kind`: "push" if this rank owes them to the owner, "pull" if the owner owes them to all ranks.
    "owed": all ranks together owe them to the average of the next step; every rank's state has the
    same, and the rank takes its share when it has an exchange for the parameter.
    """

    kind: str
    name: str
    offset: int
    values: npt.NDArray[np.float32]


def to_bytes(state: StateDict) -> bytes:
    buffer = io.BytesIO()
    torch.save(_on_host(state), buffer)
    return buffer.getvalue()


def _on_host(state: Any) -> Any:
    """The state with all tensors in dictionaries, lists and tuples on the CPU, and with numbers of
    Python in the place of NumPy's, such as a learning rate, which from_bytes would not take."""
    elsewhere: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            elsewhere.append(tensor)
        return tensor

    _with_tensors(state, note)
    hosted = moved(elsewhere)
    return _with_tensors(state, lambda t: t if t.device.type == "cpu" else next(hosted))


def _with_tensors(state: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The state with each tensor in dictionaries, lists and tuples as `change` returns it."""
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        return {key: _with_tensors(value, change) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_with_tensors(value, change) for value in state)
    return state


@ordinary_tensors()
def from_bytes(saved: bytes) -> StateDict:
    """Runs no code that the bytes may hold."""
    state: StateDict = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
    return state


def with_clean_names(state: StateDict) -> StateDict:
    """The state with names of parameters as states have them now. Earlier ones kept the prefixes of
    modules that wrap others. Raises TypeError for what is no dict."""
    require_dict(state)
    return state | {key: _clean(state[key]) for key in _NAMING & state.keys()}


def _clean(entry: Any) -> Any:
    if isinstance(entry, str):
        return clean_name(entry)
    if isinstance(entry, dict):
        return {_clean(key): _clean(value) for key, value in entry.items()}
    return [_clean(value) for value in entry] if isinstance(entry, list) else entry


def residuals_in(exchange: Exchange, names: Collection[str] | None = None) -> list[Residual]:
    """Those of the tensors with these names; None: of all."""
    if names is not None and not names:
        return []  # the export copies all residuals
    found = [Residual(**entry) for entry in exchange.export_residuals()]
    return found if names is None else [residual for residual in found if residual.name in names]


def take_residuals(exchange: Exchange, names: Collection[str]) -> list[Residual]:
    """Takes those of the tensors with these names out of the exchange."""
    taken = residuals_in(exchange, names)
    for residual in taken:
        exchange.import_residual(*residual._replace(values=-residual.values))
    return taken


@contextlib.contextmanager
def held_back(exchange: Exchange, names: Collection[str]) -> Iterator[None]:
    """Inside, the exchange has no residuals of the tensors with these names: nothing that is owed
    to them is sent."""
    owed = take_residuals(exchange, names)
    try:
        yield
    finally:
        for residual in owed:
            exchange.import_residual(*residual)


@dataclass(frozen=True)
class Identity:
    """What a state has in common with all objects that may load it; the entries of these names.

    exchange, tensors   None: not known, and not compared
    """

    source: str
    codec: str
    rank: int
    world_size: int
    exchange: str | None = None
    tensors: Sequence[NamedShape] | None = None

    @ordinary_tensors()
    def make_state(self, residuals: Iterable[Residual], **more: Any) -> StateDict:
        """A state of this rank. `more`: further entries of the state."""
        tensors = self.tensors
        return {
            "format": FORMAT,
            "source": self.source,
            "codec": self.codec,
            "exchange": self.exchange,
            "rank": self.rank,
            "world_size": self.world_size,
            "tensors": None if tensors is None else [[name, list(s)] for name, s in tensors],
            **more,
            "residuals": [
                residual._asdict() | {"values": torch.from_numpy(residual.values.copy())}
                for residual in residuals
            ],
        }

    def check(self, state: StateDict) -> None:
        """Raises ValueError naming the first difference, and what converts the state."""
        residuals_of(state)  # raises if it is no state
        source = state.get("source", self.source)
        if source != self.source:
            raise ValueError(f"the state is that of a {source}, this is a {self.source}")
        if (state["rank"], state["world_size"]) != (self.rank, self.world_size):
            moves = "; gradwire.torch.reshard moves states to another world"
            raise ValueError(
                f"the state is that of rank {state['rank']} of {state['world_size']}, this is rank "
                f"{self.rank} of {self.world_size}"
                + (moves if state["world_size"] != self.world_size else "")
            )
        for what, here, is_same in (
            ("codec", self.codec, _same_codecs),
            ("exchange", self.exchange, operator.eq),
        ):
            there = state.get(what)
            if there is not None and here is not None and not is_same(there, here):
                raise ValueError(
                    f"the state is that of a training with {what} '{there}', this one has "
                    f"'{here}'; gradwire.torch.reshard(..., {what}='{here}') moves what is owed"
                )
        if self.tensors is not None:
            check_tensors(state, self.tensors)


def _same_codecs(one: str, other: str) -> bool:
    """Whether two texts ("push codec", or "push codec, pull codec") are of the same codecs."""
    return one == other or _parse_codecs(one) == _parse_codecs(other)


def _parse_codecs(text: str) -> list[str]:
    """The codecs of pushes and pulls, with all their parameters."""
    push, _, pull = text.partition(", pull ")
    return [in_full(codec) for codec in (push, pull or push)]


def in_full(codec: str) -> str:
    """The codec, or the `auto` text, with all its parameters."""
    return AutoGoal(codec).text if is_goal(codec) else Compressor(codec, 1).codec


def check_tensors(state: StateDict, tensors: Sequence[NamedShape]) -> None:
    """Raises ValueError naming the first parameter in which the state's model differs."""
    if state.get("tensors") is None:
        return
    theirs = {name: list(shape) for name, shape in state["tensors"]}
    ours = {name: list(shape) for name, shape in tensors}
    for name in [*ours, *theirs]:
        if theirs.get(name) == ours.get(name):
            continue
        there, here = (
            f"has {name} {of[name]}" if name in of else f"has no {name}" for of in (theirs, ours)
        )
        raise ValueError(f"the state is that of another model: it {there}, this model {here}")


def check_order(state: StateDict, names: Sequence[str]) -> None:
    """Raises ValueError if the optimizer had the parameters in another order than these names have:
    what it keeps of them is counted, not named."""
    theirs = [name for name, _ in state.get("tensors") or ()]
    for place, (there, here) in enumerate(zip(theirs, names, strict=False)):
        if there != here:
            raise ValueError(
                f"the state is that of an optimizer with other groups: its parameter {place} is "
                f"{there}, here it is {here}. Give the parameters in the same order"
            )


def check_optimizer(state: StateDict, optimizer: Optimizer) -> None:
    """Raises ValueError if the state's `optimizer_class` is another than that of `optimizer`, which
    would take over another algorithm's values without a word."""
    theirs, ours = state.get("optimizer_class"), name_of(optimizer)
    if theirs != ours:
        raise ValueError(f"the state is that of the optimizer {theirs}, this one wraps {ours}")


def residuals_of(state: StateDict) -> list[Residual]:
    """The state's residuals. Raises ValueError if it is no state, or that of a later version."""
    require_state(state)
    version = state["format"]
    if version > FORMAT:
        raise ValueError(
            f"the state has format {version}, and this version of gradwire reads formats 1 to "
            f"{FORMAT}: load it with the version that saved it, or a later one"
        )
    return [
        Residual(
            entry["kind"],
            entry["name"],
            int(entry["offset"]),
            entry["values"].detach().to("cpu", torch.float32).contiguous().numpy().copy(),
        )
        for entry in state["residuals"]
    ]


def ranks_per_machine_of(state: StateDict) -> int:
    return state.get("ranks_per_machine", 1) or 1


_OLD_NAMES = {"path": "f", "state": "obj"}  # in their old order


def _takes_the_old_order(save: Callable[..., None]) -> Callable[..., None]:
    """Lets `save(path, state)`, the order of the first versions, do until 0.3 what
    `save(state, path)` does."""

    @wraps(save)
    def either(*given: Any, **named: Any) -> None:
        are_swapped = len(given) == 2 and _is_path(given[0]) and not _is_path(given[1])
        if are_swapped or _OLD_NAMES.keys() & named.keys():
            warn_deprecated(
                "gradwire.torch.save(path, state)",
                "save(state, path), as for torch.save",
                since="0.1",
            )
            old = dict(zip(_OLD_NAMES, given, strict=False)) | named
            given, named = (), {_OLD_NAMES.get(name, name): value for name, value in old.items()}
        save(*given, **named)

    return either


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


@_takes_the_old_order
def save(obj: Any, f: str | os.PathLike[str]) -> None:
    """`torch.save(obj, f)`, but whole or not at all.

    The file is written beside `f` under another name, flushed to the disk and renamed. If the
    process is killed at any byte, or the disk is full, or the machine stops, `f` holds what it held
    before, or all of `obj`. A kill leaves the other file, `.NAME.*`, which the next save removes.

    `obj`: what `torch.save` takes, such as
    `{"model": model.state_dict(), "gradwire": state.state_dict()}`;
    `torch.load(f, weights_only=True)` reads it. Each rank that keeps residuals saves a file of its
    own. Raises OSError that names `f`, and TypeError if it is no path: an open file can't be
    replaced.
    """
    if not _is_path(f):
        raise TypeError(
            f"gradwire.torch.save needs a path, whose file it replaces, not {type(f).__name__}: "
            "torch.save writes to an open file"
        )
    from gradwire.files import replace_file

    with replace_file(Path(f), durable=True) as file:
        torch.save(obj, cast(IO[bytes], file))


@dataclass(frozen=True)
class MemoryOrder:
    """shape: of the tensor. dims: its dimensions as they lie in memory, the outermost first; those
    of one element, whose place means nothing, come before all others."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], dims: Iterable[int]) -> MemoryOrder:
        return MemoryOrder(tuple(shape), tuple(sorted(dims, key=lambda dim: shape[dim] > 1)))

    @staticmethod
    def of_strides(tensor: torch.Tensor) -> MemoryOrder:
        """As DDP does: row-major for a tensor whose elements do not fill its memory exactly."""
        shape, strides = tensor.shape, tensor.stride()
        rows = MemoryOrder.of(shape, range(len(shape)))
        found = MemoryOrder.of(shape, sorted(rows.dims, key=lambda dim: -strides[dim]))
        return found if tensor.permute(found.dims).is_contiguous() else rows

    @property
    def is_row_major(self) -> bool:
        return self == MemoryOrder.of(self.shape, range(len(self.shape)))

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """All values of the tensor, flat, from this order to row-major."""
        return self.view(values).reshape(-1)

    def from_rows(self, values: torch.Tensor) -> torch.Tensor:
        """The reverse of `to_rows`."""
        return values.view(self.shape).permute(self.dims).reshape(-1)

    def view(self, values: torch.Tensor) -> torch.Tensor:
        """Flat values in this order, as the tensor."""
        in_memory = values.view([self.shape[dim] for dim in self.dims])
        return in_memory.permute([self.dims.index(dim) for dim in range(len(self.dims))])


Orders = Mapping[str, MemoryOrder]  # of the tensors that are not row-major, by their names


def reordered(
    residuals: Iterable[Residual],
    orders: Orders,
    reorder: Callable[[MemoryOrder, torch.Tensor], torch.Tensor],
) -> Iterator[Residual]:
    """Residuals of an exchange whose bucket has these orders, to or from rows. Consecutive values
    of a tensor in another order are none among its rows, so its residuals become whole tensors,
    with zeros where there is none."""
    whole: dict[tuple[str, str], npt.NDArray[np.float32]] = {}
    for residual in residuals:
        order = orders.get(residual.name)
        if order is None:
            yield residual
            continue
        key = residual.kind, residual.name
        values = whole.setdefault(key, np.zeros(prod(order.shape), np.float32))
        end = residual.offset + residual.values.size
        values[residual.offset : end] += residual.values
    for (kind, name), values in whole.items():
        yield Residual(kind, name, 0, reorder(orders[name], torch.from_numpy(values)).numpy())

"""What updates are applied to: a model, a dictionary of tensors, the tensors of a file."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from math import prod
from operator import attrgetter
from typing import Any, TypeGuard

import numpy as np

from gradwire.weights.errors import StaleBaseError, WeightsError
from gradwire.weights.tensors import (
    Place,
    View,
    is_torch,
    make_values,
    overlapping,
    tied_names,
    views_of,
)
from gradwire.weights.update import Entry, Update, digest_of

Track = Callable[[Sequence[Any]], Iterator[Any]]  # passes a list on, and shows progress


class Target:
    """Tensors that updates change in place. Those of a dictionary may appear and vanish, too, but
    not where it is of a model's own tensors: the model would keep the old ones.

    make: the value that a dictionary gets for a new tensor; None: an array or tensor of zeros.
    remedy: what to do if these are not the tensors of an update's base. None: the user knows the
    update as a delta, without versions.
    """

    def __init__(
        self,
        owner: Any,
        threads: int,
        make: Callable[[str, str, tuple[int, ...]], Any] | None = None,
        remedy: str | None = None,
    ) -> None:
        self._owner = owner
        self._open = owner if _is_open(owner) else None
        # What a model has in its state beside tensors of plain values may be of no version.
        self._refused: dict[str, WeightsError] | None = {} if self._open is None else None
        self._views = views_of(owner, refused=self._refused)
        parts = sorted(filter(attrgetter("at"), self._views.values()), key=attrgetter("numel"))
        self._parts = {view.name: view for view in parts}  # the largest one of each tensor
        self._threads, self._remedy = threads, remedy
        # New tensors are as the others are; an empty dictionary gets what the program works with.
        kinds = [is_torch(view.values) for view in self._views.values()]
        self.use_torch = any(kinds) if kinds else sys.modules.get("torch") is not None
        devices = {one.values.device for one in self._views.values() if is_torch(one.values)}
        self._device = devices.pop() if len(devices) == 1 else "cpu"
        self._make = make or self._zeros

    def find(self, entry: Entry) -> View | None:
        """The tensor that an entry is about; None: there is none, or one of another shape."""
        view = self._views.get(entry.key)
        if view is None and entry.at and entry.name in self._views:
            whole = self._views[entry.name]
            if whole.shape == entry.whole:
                view = whole.part(entry.at, entry.shape)
        return view if view is not None and view.form == entry.form else None

    def check(self, update: Update) -> None:
        """Raises an error unless the update can be applied: StaleBaseError, WeightsError."""
        self.check_base(update)
        self._check_ties(update)
        again = views_of(self._owner, refused={})
        for entry in update.entries.values():
            view = self._views.get(entry.key) or self._views.get(entry.name)
            if view is None or entry.kind == "same" or self.find(entry) is None:
                continue
            if not view.is_same_memory(again.get(view.key)):
                raise WeightsError(
                    f"tensor {entry.name!r} is a copy, made anew at each look, so writing it would "
                    "change nothing: give a dictionary of the tensors themselves, such as "
                    "dict(model.named_parameters()), or arrays in place of numbers"
                )
            if not view.is_writable:
                raise WeightsError(
                    f"tensor {entry.name!r} cannot be written: it is read-only, or elements of it "
                    "share memory, as of an expanded one. Nothing was changed; give a copy of it"
                )

    def check_base(self, update: Update) -> None:
        """As `check`, for who does not write."""
        held = Counter[str]()  # elements of tensors that are in parts
        for entry in update.entries.values():
            held[entry.name] += entry.numel if entry.at else 0
            if self._refused and entry.name in self._refused:
                raise self._refused[entry.name]
        for entry in update.entries.values():
            view = self.find(entry)
            if self.is_elsewhere(entry):
                continue
            if entry.to and self.is_elsewhere(update.entries[entry.to]):
                raise WeightsError(
                    f"tensor {entry.key!r} is tied to {entry.to!r}, which is not here: receive both"
                )
            if view is None and entry.kind in ("delta", "same"):
                self._refuse_base(update, entry, f"the model {self._describe(entry)}")
            if view is None and self._open is None:
                raise WeightsError(
                    f"tensor {entry.name!r} of {self._call(update)} is {entry.dtype} "
                    f"{list(entry.whole or entry.shape)}, the model {self._describe(entry)}; make "
                    f"the model that {self._call(update)} is of"
                )
            whole = prod(entry.whole) if entry.at else 0
            if entry.key not in self._views and held[entry.name] != whole:
                raise WeightsError(
                    f"tensor {entry.name!r}: {self._call(update)} has {held[entry.name]} of "
                    f"its {prod(entry.whole)} elements; let all ranks publish theirs, or receive "
                    "the same parts as Shard(values, at, whole)"
                )
            based = view if entry.kind in ("delta", "same") else None
            if based is not None and digest_of(based.read(), self._threads) != entry.base:
                self._refuse_base(update, entry, "its values are others")
        for view in self._views.values():
            own = update.entries.get(view.key)
            is_there = own is not None and self.find(own) is not None
            if view.at and view.numel and view.name in held and not is_there:
                raise WeightsError(
                    f"tensor {view.name!r}: {self._call(update)} has no part of {view.dtype} "
                    f"and shape {list(view.shape)} at {list(view.at)}, as it is here; receivers "
                    "have whole tensors, or the shards that the publishers have"
                )

    def is_elsewhere(self, entry: Entry) -> bool:
        """Whether other ranks hold it: this one has other parts of the tensor, or nothing of it."""
        part = None if entry.key in self._views else self._parts.get(entry.name)
        return part is not None and (bool(entry.at) or not part.numel)

    def _check_ties(self, update: Update) -> None:
        """Raises WeightsError if tensors that differ in the update are one memory here, and none of
        them can get memory of its own."""
        for key, to, is_equal in self._shared(update):
            if not is_equal and not self._can_part(key, to):
                raise WeightsError(
                    f"tensors {key!r} and {to!r} are one memory here, and differ in "
                    f"{self._call(update)}; make the model that {self._call(update)} is of"
                )

    def _shared(self, update: Update) -> Iterator[tuple[str, str, bool]]:
        """The keys of tensors that are one memory here and stay in their places, and whether they
        are equal in the update. The first one comes later."""
        tied = dict.fromkeys(key for pair in tied_names(self._views) for key in reversed(pair))
        entries = {key: self._entries_of(key, update) for key in tied}
        staying = {  # without the others, of which one may be the first of several
            key: self._views[key]
            for key, own in entries.items()
            if own and all(map(self.find, own))
        }
        for key, to in list(tied_names(staying)):
            yield key, to, _results(entries[key], update) == _results(entries[to], update)

    def _entries_of(self, key: str, update: Update) -> list[Entry]:
        """Of the tensor here with this key: one, or those of its parts."""
        if key in update.entries:
            return [update.entries[key]]
        return [entry for entry in update.entries.values() if entry.at and entry.name == key]

    def _can_part(self, key: str, to: str) -> bool:
        """Whether both are the same object of a dictionary, as `_tie` makes them. Another view of
        the memory may be part of a model, which would not get the new tensor."""
        values = None if self._open is None else self._open.get(key)
        if self._open is None or values is not self._open.get(to):
            return False
        return is_torch(values) or isinstance(values, np.ndarray)

    def _part(self, update: Update) -> set[str]:
        """Gives tensors that differ in the update memory of their own. Returns the keys of entries
        of those that are equal and stay one memory, which another entry writes."""
        again = set[str]()
        writers: dict[tuple[str, Place], str] = {}  # of each memory; the first name may be tied
        for key, to, is_equal in self._shared(update):
            if is_equal:
                for entry in [*self._entries_of(to, update), *self._entries_of(key, update)]:
                    writes = entry.key in update.blobs
                    if writes and writers.setdefault((to, entry.at), entry.key) != entry.key:
                        again.add(entry.key)
            elif self._open is not None:
                values = self._open[key]
                self._put(key, values.detach().clone() if is_torch(values) else values.copy())
        return again

    def fits(self, update: Update, absent: Collection[str]) -> bool:
        """Whether the tensors are those of the update: none appears, vanishes or changes shape.
        absent: names that need not be there."""
        return self._views.keys() <= {entry.name for entry in update.entries.values()} and all(
            self.find(entry) is not None
            for entry in update.entries.values()
            if entry.name not in absent or entry.name in self._views
        )

    def apply(self, update: Update) -> None:
        """Checks everything, then writes. DamagedVersionError: they are of no version now."""
        self.check(update)
        self.write(update)

    def write(self, update: Update, track: Track = iter) -> None:
        """Applies an update that `check` has accepted. track: sees the tensors that change."""
        again = self._part(update)
        bases = {  # writing others changes them
            entry.key: view.read().copy()
            for entry, view in self._overlapping(update)
            if entry.kind == "delta"
        }
        for key in track([key for key in update.blobs if key not in again]):
            entry = update.entries[key]
            if self.is_elsewhere(entry):
                continue
            view = self.find(entry) or self._add(entry)
            if entry.kind == "full":
                data = np.frombuffer(update.blobs[key], np.uint8)
            else:
                data = bases[key] if key in bases else view.read()
                if not data.flags.writeable:
                    data = data.copy()
                update.apply_delta(key, data, self._threads)
            view.write(data)
        for entry in update.entries.values():
            if entry.kind == "tied" and not self.is_elsewhere(entry):
                self._tie(entry, update.entries[entry.to])
        if self._open is not None:
            named = {entry.name for entry in update.entries.values()}
            for name in [name for name in self._open if name not in named]:
                del self._open[name]
        self._check_shared(update)

    def _check_shared(self, update: Update) -> None:
        """Raises WeightsError if tensors that share a part of their memory have overwritten each
        other."""
        for entry, view in self._overlapping(update):
            origin = update.entries[entry.to or entry.key]
            if digest_of(view.read(), self._threads) != origin.digest:
                raise WeightsError(
                    f"tensor {entry.key!r} shares a part of its memory with another one here, and "
                    f"they differ in {self._call(update)}: the tensors are of no version now. "
                    f"Make the model that {self._call(update)} is of"
                )

    def _overlapping(self, update: Update) -> Iterator[tuple[Entry, View]]:
        """The tensors here that perhaps share a part of their memory with others."""
        for key in dict.fromkeys(overlapping(self._views)):
            for entry in self._entries_of(key, update):
                if view := self.find(entry):
                    yield entry, view

    def _add(self, entry: Entry) -> View:
        made = self._make(entry.name, entry.dtype, entry.whole or entry.shape)
        self._put(entry.name, made)
        found = self.find(entry)
        assert found is not None, "it was made for the entry"
        return found

    def _put(self, name: str, values: Any) -> None:
        """Gives a dictionary another tensor of this name."""
        assert self._open is not None, "check() has found the tensor"
        self._open[name] = values
        self._views[name] = views_of({name: values})[name]

    def _tie(self, entry: Entry, to: Entry) -> None:
        source, view = self.find(to), self.find(entry)
        assert source is not None, "the tensor was written before"
        if view is not None:
            view.write(source.read())
        elif self._open is not None:
            self._open[entry.name] = self._open[to.name]

    def _zeros(self, name: str, dtype: str, shape: tuple[int, ...]) -> Any:
        try:
            made = make_values(dtype, shape, self.use_torch)
        except WeightsError as error:
            raise WeightsError(f"tensor {name!r} is new: {error}") from None
        return made.to(self._device) if is_torch(made) else made

    def _describe(self, entry: Entry) -> str:
        view = self._views.get(entry.name)
        if view is None and (part := self._parts.get(entry.name)):
            return f"has a part of shape {list(part.shape)} at {list(part.at)}"
        return "lacks it" if view is None else f"has {view.dtype} {list(view.shape)}"

    def _call(self, update: Update) -> str:
        return "the delta" if self._remedy is None else f"version {update.version}"

    def _refuse_base(self, update: Update, entry: Entry, found: str) -> None:
        ways = (
            "" if self._remedy is None else f" from version {update.base} to {self._call(update)}"
        )
        wanted = f"that the delta{ways} was made for"
        if update.base == update.version:
            wanted = f"of {self._call(update)}"
        raise StaleBaseError(
            f"tensor {entry.key!r} is not the one {wanted}: {found}. Nothing was changed; "
            f"{self._remedy or 'perhaps the delta was applied already'}"
        )


def _is_open(owner: Any) -> TypeGuard[MutableMapping[str, Any]]:
    """Whether tensors may appear and vanish."""
    if not isinstance(owner, MutableMapping) or hasattr(owner, "_metadata"):  # of state_dict()
        return False
    parameter = getattr(sys.modules.get("torch.nn"), "Parameter", ())
    return not any(isinstance(values, parameter) for values in owner.values())


def _results(entries: Sequence[Entry], update: Update) -> list[tuple[Place, int]]:
    """What the tensor is in the update."""
    return sorted((one.at, update.entries[one.to or one.key].digest) for one in entries)

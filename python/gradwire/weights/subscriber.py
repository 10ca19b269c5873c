"""The receivers' side of a store."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

from gradwire.errors import warn_user
from gradwire.option_record import explains_arguments
from gradwire.weights.checkpoint import Checkpoint
from gradwire.weights.difference import fold_updates, list_changes
from gradwire.weights.errors import MissingVersionError, StaleBaseError, WeightsError
from gradwire.weights.folder import Folder, local_path
from gradwire.weights.store import Store
from gradwire.weights.target import Target
from gradwire.weights.update import Update

_REMEDY = (
    "fetch() again takes a full version; if there is none, the publisher makes it with "
    "publish(..., anchor=True)"
)
_REMEDY_OF_FILES = "somebody has changed the files; fetch() again takes a full version"


@dataclass(frozen=True)
class Fetched:
    """A version that is here and checked, and not in use yet.

    Attributes:
        version: Its number.
        bytes: Its deltas or tensors, after folding.
        is_full: Whether it is a full version, which any model takes.
        seconds: How long fetch() took.
    """

    version: int
    bytes: int
    is_full: bool
    seconds: float


@dataclass(frozen=True)
class Applied:
    """A version that is in use now.

    Attributes:
        version: Its number.
        seconds: The pause: how long the model could not be used.
    """

    version: int | None
    seconds: float


class Subscriber:
    """Brings a model, and a checkpoint on this machine, to the newest version of a store.

    At the start a number is not believed, because an emptied store counts from 1 again: if the
    newest version has it, `fetch` compares the values of `local` with the store's digests, or
    `apply_` those of the model. Threads may share it: `apply_` waits for a `fetch` under way.

    Args:
        store: What the publisher has: a folder, a prefix that fsspec opens, or a `Folder`.
        local: A .safetensors file or a folder of such files that follows the versions. It changes
            in place, and with it tensors that are mapped from it: load copies. Without a marker of
            an earlier subscriber it is version 0, the publisher's `base`. It may be missing; the
            first version is a full one then. Tensors in it that no version has put there are an
            error. Subscribers of one machine may share it: one of them changes it.
        version: The version that the model has at the start, without `local`: 0 is the publisher's
            `base`. None: it has none, and the first fetch takes a full version.
        threads: Threads.
        patience: The seconds that a file of the store may be late. A `fetch` that finds no version
            so long after the first one warns, as the store may be another place.
    """

    @explains_arguments
    def __init__(
        self,
        store: str | os.PathLike[str] | Folder,
        *,
        local: str | os.PathLike[str] | None = None,
        version: int | None = None,
        threads: int = 1,
        patience: float = 10.0,
    ) -> None:
        if local is not None and version is not None:
            raise WeightsError("version= is that of a model without local=, which knows its own")
        self._store = Store(store, patience, threads)
        self._threads = threads
        self._local = None
        if local is not None:
            self._local = Checkpoint(local_path(local, "local"), threads, _REMEDY_OF_FILES)
        self._version = version if self._local is None else self._local.version
        self._is_claim = self._version is not None  # a number, and the values were not compared
        self._pending: Update | None = None
        self._files: tuple[Update, Update] | None = None  # an update, and what `local` needs for it
        self._model: Callable[[], Any] = lambda: None  # which has the version; it may be gone
        self._written: Mapping[str, int] = {}  # elements of each tensor in memory
        self._replaced = 0  # as the store counts it
        self._patience = patience
        self._first_look: float | None = None  # of the clock; inf: it has warned
        self._one_at_a_time = threading.Lock()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a Subscriber can't be copied or pickled, because it knows what its model has: make "
            "another one where the other model is"
        )

    @property
    def version(self) -> int | None:
        """The version in use; None: none, or a part of one after an error."""
        return self._version

    @explains_arguments
    def fetch(self, version: int | None = None) -> Fetched | None:
        """Fetches, checks and decodes a version, while the model is in use.

        Args:
            version: Its number, also of one before that in use; None: the newest.

        Returns:
            What `apply_` will apply; None if that version is in use, or none exists. At the start
            it may be the version in use, of which `apply_` then compares the values.

        Raises:
            MissingVersionError: The store has no such version.
            StaleBaseError: No way leads from the version in use to that one.
            DamagedVersionError: Bytes of the store are missing or were changed, and there is no
                way around them.
        """
        started = time.perf_counter()
        with self._one_at_a_time:
            update = self._fetch(version)
        if update is None:
            return None
        size = sum(entry.size for entry in update.entries.values())
        is_full = update.base is None
        return Fetched(update.version, size, is_full, time.perf_counter() - started)

    def _fetch(self, version: int | None) -> Update | None:
        newest = self._store.newest()
        if self._store.replaced != self._replaced:  # its numbers are those of other versions
            self._replaced = self._store.replaced
            self._version = self._pending = None
        wanted = newest if version is None else version
        if version is not None:
            self._store.require(version)
        if wanted == 0:
            self._warn_of_nothing()
        if wanted == 0 or (wanted == self._version and not self._is_claim):
            self._pending = None
            return None
        if wanted == self._version:
            self._pending = None
        if self._pending is None or self._pending.version != wanted:
            try:
                self._take(wanted)
            except MissingVersionError:  # it was removed meanwhile
                if version is not None:
                    raise
                return self._fetch(None)  # a newer one is there
        return self._pending

    def _warn_of_nothing(self) -> None:
        """Says once where it looks, if no version has come in time."""
        now = time.monotonic()
        if self._first_look is None:
            self._first_look = now
        elif now - self._first_look > self._patience:
            self._first_look = math.inf
            warn_user(
                f"{self._store.folder.place} has no version yet. If the publisher has made one, "
                "its store is another place",
            )

    def apply_(self, target: Any = None) -> Applied:
        """Makes the fetched version the one in use: in the model in place, then in `local`.

        All is checked before anything is written. Where writing fails nevertheless, the subscriber
        has no version, and the next fetch takes a full one. Without a fetched version it compares
        a model that is new here, or a dictionary, with the version in use.

        Args:
            target: A model with state_dict(), or a dictionary of arrays or tensors, in which
                tensors may appear, vanish and change shape if they are not a model's own. It is
                not known whose the tensors of `dict(model.state_dict())` are: such a tensor is then
                in the dictionary alone, and the model stays as it was, so give the model itself.
                None: only `local` changes.

        Raises:
            StaleBaseError: The values of the model, or of `local`, are not those of the version
                that was in use. Nothing was changed; the next fetch takes a full version.
        """
        with self._one_at_a_time:
            return self._apply(target)

    def _apply(self, target: Any) -> Applied:
        update = self._pending
        if update is None and target is not None and self._model() is not target:
            update = self._in_use()
        if update is None:
            return Applied(self._version, 0.0)
        if target is None and self._local is None:
            raise WeightsError("apply_() without a model needs local=, a checkpoint to change")
        with nullcontext() if self._local is None else self._local.alone():
            seconds = self._write(update, target)
        self._version, self._is_claim = update.version, False
        return Applied(update.version, seconds)

    def _write(self, update: Update, target: Any) -> float:
        """Returns the seconds of the pause."""
        started = time.perf_counter()
        files = None
        try:
            if self._local is not None:
                files = self._way_of_files(update)
            if target is not None:
                tensors = Target(target, self._threads, remedy=_REMEDY)
                tensors.check(update)
        except StaleBaseError:
            self._version = self._pending = None
            raise
        self._version = self._pending = None
        if target is not None:
            tensors.write(update)
        seconds = time.perf_counter() - started
        if self._local is not None and files is not None and files.base != files.version:
            self._local.apply(files)
        self._files = None
        if target is not None:
            self._model = _reference(target)
            found = update.entries.items()
            self._written = {k: e.numel for k, e in found if tensors.find(e) is not None}
        return seconds

    def changes(self, target: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yields what the fetched version changes, for engines that take sparse patches.

        Args:
            target: The tensors of the version in use; they stay as they are.

        Yields:
            The name, the flat indices and the new values of each tensor that changes: each name of
            tied tensors, and nothing of parts that are not here.
        """
        if self._pending is not None:
            yield from list_changes(
                target, self._pending, self._threads, "give the tensors of the version in use"
            )

    def _in_use(self) -> Update | None:
        """Says what the tensors of the version in use are; None: no version of the store is."""
        found = self._store.unchanged(self._version) if self._version else None
        if self._version and found is None:
            gone, self._version = self._version, None
            raise StaleBaseError(
                f"version {gone}, which is in use, is not in the store, and the model cannot be "
                f"compared with it: prune() removes old versions. Nothing was changed; {_REMEDY}"
            )
        return found

    def _take(self, wanted: int) -> None:
        """Makes the update to a version the pending one; None if `local` was found to have it."""
        start = self._pending
        if start is not None and start.version > wanted:  # no delta leads back
            start = None
        update = self._store.follow(start.version if start else self._version, to=wanted)
        if update.base is not None and start is not None:
            update = fold_updates(start, update, self._threads)
        if self._local is not None:
            with self._local.alone():
                try:
                    self._way_of_files(update)
                except StaleBaseError:  # somebody has changed the files
                    self._version = None
                    update = self._store.follow(None, to=wanted)
                    self._way_of_files(update)
            if update.base == wanted:
                self._is_claim, self._pending = False, None
                return
        update.decode(self._written, self._threads)
        self._pending = update

    def _way_of_files(self, update: Update) -> Update:
        """The update that brings `local` to its version: this one, or another where a subscriber
        that shares the files has brought them elsewhere. What is newer stays. Raises
        StaleBaseError."""
        assert self._local is not None
        if self._files and self._files[0] is update and not self._local.is_touched():
            return self._files[1]
        reason: StaleBaseError | None = None
        for found in self._ways_of_files(update, self._local.is_moved(), self._local.version):
            try:
                self._local.check(found)
            except StaleBaseError as error:
                reason = reason or error
            else:
                self._files = update, found
                return found
        assert reason is not None
        raise reason

    def _ways_of_files(self, update: Update, is_moved: bool, there: int | None) -> Iterator[Update]:
        if not is_moved or there in (None, 0, update.base):
            yield update
        if there and there != update.base:
            here = self._store.unchanged(there) if there >= update.version else None
            yield here or self._store.follow(there, to=update.version)


def _reference(target: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(target)
    except TypeError:  # a dictionary
        return lambda: None

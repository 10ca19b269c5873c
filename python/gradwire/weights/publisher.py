"""The publisher's side of a store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from gradwire.errors import warn_user
from gradwire.option_record import explains_arguments
from gradwire.weights.casting import FLOATS, cast, require_fit, target_named
from gradwire.weights.checkpoint import Checkpoint
from gradwire.weights.difference import (
    encode,
    fold_updates,
    full_entry,
    make_update,
    tied_entry,
)
from gradwire.weights.errors import ConflictError, DamagedVersionError, WeightsError
from gradwire.weights.folder import Folder, local_path
from gradwire.weights.manifest import Manifest, Writer, label_of
from gradwire.weights.store import Store, wait_for
from gradwire.weights.team import Team
from gradwire.weights.tensors import Bytes, View, copy_of, tensors_of, tied_names, views_of
from gradwire.weights.update import Entry, Update, check_parts, write_update

_LATE = 10.0  # seconds that a part of an earlier version may be late
_SHOWN = 3  # names of tensors in an error


@dataclass(frozen=True)
class Published:
    """A version that exists now.

    Attributes:
        version: Its number, from 1 on.
        bytes: What a receiver of the version before it fetches.
        share_changed: The share of the elements that changed; those of new tensors count.
        seconds: How long publish() took.
        anchor_bytes: The full version beside it; 0: there is none.
    """

    version: int
    bytes: int
    share_changed: float
    seconds: float
    anchor_bytes: int


class Publisher:
    """Publishes the versions of a model's tensors to a store, as deltas and now and then in full.

    A publisher that is started again goes on with the versions that the store has. It keeps a copy
    of what it has published last, in host memory. Threads may share it.

    Args:
        store: A folder, a prefix that fsspec opens (`s3://bucket/policy`), or a `Folder`.
        base: The checkpoint that receivers have at the start, as version 0: a .safetensors file, a
            folder of such files, or what `publish` takes, of which a copy is kept until then; with
            the store's names and dtypes. None: the first version is a full one.
        anchor_every: Every so many versions a full one is published, too, from which new receivers
            can start. 0: never.
        dtype: The dtype in which floats are published, such as "bfloat16": what receivers see. Or
            a function that gives it for a tensor's name, None where it stays, as for scales. A
            tensor that `base` has as another float of 16 bits or more becomes what it is there. A
            number that is too large is an error.
        rename: Gives a tensor's name in the store: a function, or a dictionary of the names that
            change. Each name in it must be that of a tensor, of this rank or another.
        rank: This rank, where several publish shards of their own. Rank 0 commits a version when
            the parts of all ranks are there.
        ranks: How many ranks publish.
        run: With several ranks, a text that all ranks of this start share and no other start had,
            such as the job's number and the count of its restarts.
        threads: Threads; the bytes do not depend on it.
        patience: The seconds in which ranks wait for each other.
    """

    @explains_arguments
    def __init__(
        self,
        store: str | os.PathLike[str] | Folder,
        *,
        base: Any = None,
        anchor_every: int = 50,
        dtype: Any = None,
        rename: Callable[[str], str] | Mapping[str, str] | None = None,
        rank: int = 0,
        ranks: int = 1,
        run: str = "",
        threads: int = 1,
        patience: float = 600.0,
    ) -> None:
        if not 0 <= rank < ranks:
            raise WeightsError(f"rank {rank} of {ranks} ranks; ranks count from 0")
        if ranks > 1 and not run:
            raise WeightsError(
                f"{ranks} ranks need run=: a text that all of them share and no earlier start had, "
                "such as the job's number and the count of its restarts"
            )
        if anchor_every < 0:
            raise WeightsError(f"anchor_every={anchor_every}: a number of versions, or 0 for never")
        self._late = min(patience, _LATE)
        self._store = Store(store, self._late, threads)
        is_file = isinstance(base, str | os.PathLike)
        self._origin = os.fspath(base) if is_file else ""
        self._base = local_path(base, "base") if is_file else base
        if is_file and self._store.folder.is_at(base):
            raise WeightsError(
                f"base {self._origin} is the store, whose files are no checkpoint: take another "
                "folder for the store"
            )
        if base is not None and not is_file:  # training may change it before the first version
            self._base = {key: copy_of(view) for key, view in views_of(base).items()}
        self._anchor_every = anchor_every
        is_function = callable(dtype) and not isinstance(dtype, type)  # as NumPy's are
        if dtype is not None and not is_function:
            target_named(dtype)  # raises now what it can
        self._dtype_of = dtype if is_function else lambda name: dtype
        self._base_dtypes: dict[str, str] = {}  # of floats of 16 bits or more, by name
        self._names = rename if isinstance(rename, Mapping) else {}
        self._unmatched: list[str] = []  # of these names: no tensors of this rank have them
        self._rename = _renaming(rename)
        self._threads = threads
        self._writer = Writer.here(run)
        self._team = Team(self._store, self._writer, rank, ranks, patience)
        self._one_at_a_time = threading.Lock()
        self._opened = False
        self._version, self._token = 0, ""  # of who wrote it
        self._former = ""  # the token of who wrote the version before this start
        self._copies: dict[str, Bytes] = {}  # the bytes of the version, by key
        self._entries: dict[str, Entry] = {}
        self._is_sound = False  # whether the copies are those of the version

    @explains_arguments
    def publish(self, state: Any, *, anchor: bool = False, step: int | None = None) -> Published:
        """Publishes the tensors as the next version; it exists when this returns. If another thread
        writes to them meanwhile, the version is a mix of two steps.

        Args:
            state: A dictionary of arrays, tensors or `Shard`s, or a model with state_dict(). Of a
                DTensor each rank publishes what it holds. Tensors that share their memory travel
                once.
            anchor: Publishes the version in full, too.
            step: With several ranks, the training step, the same on all: a rank that misses a call
                is then waited for, and the next step is in order. None: ranks count their calls,
                and one that misses a call is a step behind from then on.

        Raises:
            ConflictError: Another publisher has published; the message names it.
            WeightsError: Something is no tensor or does not fit into `dtype`, or another rank was
                missing or got an error, which the message has.
            OSError: The store cannot be written. If the version does not exist then, the next one
                is published in full.
        """
        if self._writer.process != os.getpid():  # the versions of both would look like those of one
            raise WeightsError(
                f"this publisher is of process {self._writer.process}; this is process "
                f"{os.getpid()}, a child that was forked from it: make the publisher in the "
                "process that publishes"
            )
        with self._one_at_a_time:
            self._team.begin(step)
            try:
                return self._publish(state, anchor)
            except BaseException as error:
                self._team.tell_failure(error)
                raise

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a Publisher can't be copied or pickled, because a store has one: make it in the "
            "process that publishes, where it goes on with the chain"
        )

    def _publish(self, state: Any, anchor: bool) -> Published:
        started = time.perf_counter()
        own = tensors_of(state)
        views = views_of(own, self._rename, in_team=self._team.ranks > 1)
        self._unmatched = [name for name in self._names if name not in own]
        if self._team.ranks == 1:  # with several ranks, others may have them: _commit looks
            self._refuse_names(self._unmatched, own)
        if not self._opened:
            self._open(views)
        require_fit((view, self._dtype(view.name)) for view in views.values())
        self._settle()
        self._refuse_another_chain()
        version = self._version + 1
        update = self._encode(views, version)
        labels = {label_of(version): update}
        wanted = anchor or (self._anchor_every > 0 and version % self._anchor_every == 0)
        if wanted and (update.base is not None or self._team.ranks > 1):  # as all ranks decide
            labels[label_of(version, is_anchor=True)] = self._full(update)
        for label, content in labels.items():
            part = self._team.part(label, self._team.rank)
            self._store.folder.write(part, write_update(content))
        # The version first: an anchor without it would be of values that are published no more.
        label, *anchors = labels
        manifest = self._commit(label, version, bool(anchors))
        self._version, self._is_sound, self._token = version, True, self._writer.token
        anchor_bytes = sum(self._commit(one, version, False).size for one in anchors)
        if self._team.rank == 0:
            self._store.write_hint(version)
        whole = Update(version, None, dict(manifest.entries))
        share = whole.changed / max(whole.numel, 1)
        seconds = time.perf_counter() - started
        return Published(version, manifest.size, share, seconds, anchor_bytes)

    def _open(self, views: Mapping[str, View]) -> None:
        """Takes up the chain that the store has, or begins one."""
        start = self._read_base(views)
        self._version = self._store.newest()
        if self._version:
            found = self._store.manifest(label_of(self._version))
            self._token = self._former = found.writer.token if found else ""
            if self._token == self._writer.token:
                raise WeightsError(
                    f"{self._store.folder.place}: version {self._version} is of an earlier start "
                    "with the same run=, whose parts could be taken for those of this one: give "
                    "each start a text of its own"
                )
            start = self._catch_up(start, views)
        if start is not None:
            self._entries = start.entries
            self._copies = {
                key: np.frombuffer(blob, np.uint8).copy() for key, blob in start.blobs.items()
            }
            self._is_sound = True
        self._opened, self._base = True, None

    def _catch_up(self, base: Update | None, views: Mapping[str, View]) -> Update | None:
        """The tensors of the newest version; None: they cannot be had."""
        reason: WeightsError | None = None
        for start in (base, None) if base else (None,):
            try:
                found = self._store.follow(start.version if start else None, views.keys())
                return fold_updates(start, found, self._threads) if start else found
            except WeightsError as error:
                reason = reason or error
        warn_user(
            f"the next version is a full one, as the newest cannot be read: {reason}",
        )
        return None

    def _read_base(self, views: Mapping[str, View]) -> Update | None:
        """The checkpoint as a full version 0, of this rank's tensors and parts."""
        if self._base is None:
            return None
        found = self._base
        if not isinstance(found, dict):
            found = Checkpoint(self._base, self._threads).views("c")
            if not found:
                raise WeightsError(f"base {self._origin}: no .safetensors files are there")
        self._base_dtypes = {v.name: v.dtype for v in found.values() if v.dtype in FLOATS}
        mine = {}
        for key, view in views.items():
            there = found.get(key) or found.get(view.name)
            if there is None or (there.whole or there.shape) != (view.whole or view.shape):
                continue
            part = there if there.at else there.part(view.at, view.shape)
            if part.shape == view.shape:
                mine[key] = part
        return make_update({}, mine, Update(0, None), self._threads)

    def _settle(self) -> None:
        """Takes up the next version if it exists though publish() has ended in an error. Raises
        ConflictError if it is another publisher's."""
        found = self._refuse_others(self._version + 1)
        if found is not None:
            self._version, self._token = self._version + 1, found.writer.token
            # The copies may be those of a later attempt.
            self._is_sound = all(
                key in found.entries and found.entries[key].result == entry.result
                for key, entry in self._entries.items()
            )

    def _encode(self, views: Mapping[str, View], version: int) -> Update:
        """The update, while the copies become those of the new version."""
        update = Update(version, self._version if self._is_sound else None)
        copies, entries = self._copies, self._entries
        if not self._is_sound:
            copies, entries = {}, {}
        self._is_sound = False
        self._copies, self._entries = {}, {}
        tied = dict(tied_names(views))
        unlike: list[tuple[View, Entry | None]] = []  # the base
        for key, view in views.items():
            if key in tied:
                dtype = self._dtype(views[tied[key]].name)
                update.add(tied_entry(cast(view, dtype), tied[key]))
                continue
            view = cast(view, self._dtype(view.name))
            before, copy = entries.get(key), copies.get(key)
            if copy is not None and before is not None and before.form == view.form:
                entry, blob = encode(view, copy, self._threads, before.digest, follow=True)
            else:
                blob = copy = view.read_copy()  # the memory is the model's, and will change
                entry = full_entry(view, copy, self._threads)
                if update.base == 0:
                    unlike.append((view, before))
            update.add(entry, blob)
            self._copies[key], self._entries[key] = copy, entry
        others = [(view, before) for view, before in unlike if before and before.form != view.form]
        if others or 2 * sum(view.numel for view, _ in unlike) > update.numel:
            view, before = (others or unlike)[0]
            there = f"is {before.dtype} there" if before else "isn't there with this shape"
            warn_user(
                f"{len(unlike)} of {len(views)} tensors go in full, as the base has none like "
                f"them: {view.name!r} is {view.dtype} {list(view.whole or view.shape)} here and "
                f"{there}. dtype= and rename= make them like those of the base",
            )
        return update

    def _dtype(self, name: str) -> str | None:
        """The safetensors dtype in which floats of this tensor are published; None: their own."""
        wanted = self._dtype_of(name)
        return None if wanted is None else self._base_dtypes.get(name) or target_named(wanted)

    def _full(self, update: Update) -> Update:
        """The same version from nothing."""
        full = Update(update.version, None)
        for key, entry in update.entries.items():
            if entry.kind == "tied":
                full.add(entry)
            else:
                size, numel = entry.nbytes, entry.numel
                whole = replace(entry, kind="full", size=size, changed=numel, base=0)
                full.add(whole, self._copies[key])
        return full

    def _commit(self, label: str, version: int, has_anchor: bool) -> Manifest:
        if self._team.rank > 0:
            manifest = self._team.await_manifest(label, version)
            self._refuse_others(version)
            return manifest
        found = [self._team.await_part(label, rank) for rank in range(self._team.ranks)]
        updates = [update for update, _ in found]
        check_parts(entry for update in updates for entry in update.untied())
        merged = Update(version, None).merge(updates)
        if self._team.ranks > 1:
            published = {entry.name for entry in merged.entries.values()}
            absent = [name for name in self._unmatched if self._names[name] not in published]
            self._refuse_names(absent, published)
        bases = [update.base for update, _ in found if update.base is not None]
        manifest = Manifest(
            version,
            max(bases, default=None),
            self._writer,
            tuple(part for _, part in found),
            merged.entries,
            has_anchor,
            self._origin,
        )
        try:
            self._store.write_manifest(label, manifest)
        except FileExistsError:
            if self._store.reread(label) != manifest:  # of an attempt whose answer was lost
                self._refuse_others(version)
                raise
        return manifest

    def _refuse_names(self, absent: Sequence[str], present: Iterable[str]) -> None:
        """Raises WeightsError if names of `rename` are of no tensor."""
        if absent:
            some = ", ".join(sorted(present)[:_SHOWN]) or "none"
            raise WeightsError(
                f"rename={absent[0]!r}: no tensor has this name, and nothing was published; "
                f"tensors are {some}, ..."
            )

    def _refuse_another_chain(self) -> None:
        """Raises ConflictError if the store has another version in place of this publisher's, or
        lost it and has versions of another publisher. If it only lost it, the next version is a
        full one."""
        if not self._version:
            return
        label = label_of(self._version)
        try:
            found = wait_for(lambda: self._store.reread(label), self._late)
        except DamagedVersionError:
            found = None
        if found is None:
            newest = self._store.newest()
            other = self._store.manifest(label_of(newest)) if newest else None
            if other and other.writer.token not in (self._writer.token, self._former):
                self._refuse(other)
            self._is_sound = False
            warn_user(
                f"{self._store.folder.place} has version {self._version} no longer, or not whole: "
                "the next version is a full one",
            )
        elif found.writer.token != self._token:
            self._refuse(found)

    def _refuse_others(self, version: int) -> Manifest | None:
        """The manifest of this publisher's version; None: there is none. Raises ConflictError if it
        is another one's."""
        found = self._store.manifest(label_of(version))
        if found is not None and found.writer.token != self._writer.token:
            self._refuse(found)
        return found

    def _refuse(self, found: Manifest) -> NoReturn:
        raise ConflictError(
            f"{self._store.folder.place}: version {found.version} was published by {found.writer}, "
            f"while this publisher ({self._writer}) was about to. A store has one publisher: end "
            "one of them, or give it a store of its own"
        )


def _renaming(rename: Callable[[str], str] | Mapping[str, str] | None) -> Callable[[str], str]:
    if rename is None:
        return str
    if callable(rename):
        return rename
    names = rename
    return lambda name: names.get(name, name)

"""Differences of named tensors: made, folded and applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire import _core
from gradwire.option_record import explains_arguments
from gradwire.tensor_dtypes import SAFETENSORS_BITS
from gradwire.weights.errors import DamagedVersionError
from gradwire.weights.target import Target, Track
from gradwire.weights.tensors import Bytes, View, element_of, tied_names, typed_values, views_of
from gradwire.weights.update import Blob, Entry, Update, read_update, write_update

_SLICE = 3 << 18  # bytes of whole elements, of 4 bits or 6


@explains_arguments
def diff(old: Any, new: Any, *, threads: int = 1) -> bytes:
    """Describes how the tensors of `old` become those of `new`, exactly, whatever their bits.

    Args:
        old: A dictionary of arrays or tensors, or a model with state_dict().
        new: The same some time later. Tensors may have appeared, vanished, or got another shape or
            dtype.
        threads: Threads; the bytes do not depend on it.

    Returns:
        What `patch` takes: a .safetensors file, small where few elements change.

    Raises:
        WeightsError: One of them is no tensor; the message names it.
    """
    before, after = views_of(old), views_of(new)
    update = make_update(before, after, Update(1, 0), threads, read=View.read_copy)
    return b"".join(bytes(piece) for piece in write_update(update))


@explains_arguments
def patch(old: Any, delta: bytes | bytearray | memoryview, *, threads: int = 1) -> None:
    """Makes the tensors of `old` those of `new`, in place.

    In a dictionary, tensors appear and vanish as in `new`; a model must have the tensors of the
    delta. Tensors that are not contiguous, or on another device, are written through a copy.

    Args:
        old: A dictionary of arrays or tensors, or a model with state_dict().
        delta: What `diff` returned.
        threads: Threads.

    Raises:
        StaleBaseError: A tensor of `old` is not the one that the delta was made for.
        DamagedVersionError: The bytes were changed.
        WeightsError: A tensor of the delta has no place in `old`.
    """
    Target(old, threads).apply(read_update(delta, "the delta"))


@explains_arguments
def changes(
    old: Any, delta: bytes | bytearray | memoryview, *, threads: int = 1
) -> Iterator[tuple[str, Any, Any]]:
    """Yields what a delta changes, for engines that take sparse patches; `old` stays as it is.

    Args:
        old: The tensors that the delta was made for.
        delta: What `diff` returned.
        threads: Threads.

    Yields:
        The name, the flat indices (int64) and the new values of each tensor that changes, as
        tensors of PyTorch where `old` has them. Each name of tied tensors; all indices of a tensor
        that is new; nothing of parts that are not here.

    Raises:
        StaleBaseError: A tensor of `old` is not the one that the delta was made for.
        DamagedVersionError: The bytes were changed.
    """
    yield from list_changes(old, read_update(delta, "the delta"), threads)


def list_changes(
    old: Any, update: Update, threads: int, remedy: str | None = None
) -> Iterator[tuple[str, Any, Any]]:
    """As `changes`, of an update that was read. remedy: Target's."""
    target = Target(old, threads, remedy=remedy)
    target.check_base(update)
    names: dict[str, list[Entry]] = {}  # of one content; the others are tied to the first
    for entry in update.entries.values():
        if not target.is_elsewhere(entry):
            names.setdefault(entry.to or entry.key, []).append(entry)
    for key, entries in names.items():
        origin = update.entries[key]
        if origin.kind == "same" and len(entries) == 1:
            continue
        view = target.find(origin)
        if origin.kind == "full" or view is None:
            values = np.frombuffer(update.blobs[key], np.uint8)
        else:
            values = view.read().copy()
            if origin.kind == "delta":
                update.apply_delta(key, values, threads)
        # Before the first is yielded, since who takes it may write to the memory of the others.
        found = [(one, _changed_places(target.find(one), origin, values)) for one in entries]
        typed = typed_values(origin.dtype, values, target.use_torch)
        for entry, places in found:
            if len(places) or origin.kind == "full":
                flat = _flat_indices(entry, places).view(np.uint8)
                yield entry.name, typed_values("I64", flat, target.use_torch), typed[places]


def _changed_places(view: View | None, origin: Entry, values: Bytes) -> NDArray[np.int64]:
    """Where the elements of a tensor become others; all of one that is new."""
    if origin.kind == "full" or view is None:
        return np.arange(origin.numel)
    rows = (values != view.read()).reshape(-1, max(len(values) // max(origin.numel, 1), 1))
    return np.flatnonzero(rows.any(axis=1))


def make_update(
    before: Mapping[str, View],
    after: Mapping[str, View],
    into: Update,
    threads: int,
    track: Track = iter,
    read: Callable[[View], Bytes] = View.read,
) -> Update:
    """Adds to `into` how the tensors `before` become those `after`. track: sees these. read: reads
    those that go as they are; a copy, if another thread may write to them meanwhile."""
    tied = dict(tied_names(after))
    for key in track(list(after)):
        view = after[key]
        if key in tied:
            into.add(tied_entry(view, tied[key]))
            continue
        old = before.get(key)
        if old is not None and old.form == view.form:
            into.add(*encode(view, old.read(), threads))
        else:
            data = read(view)
            into.add(full_entry(view, data, threads), data)
    return into


def tied_entry(view: View, to: str) -> Entry:
    head = (view.name, view.dtype, view.shape)
    return Entry(*head, "tied", at=view.at, whole=view.whole, to=to)


def full_entry(view: View, data: Bytes, threads: int) -> Entry:
    """That of a tensor which goes as it is, with the bytes that were read from it."""
    digest = _core.digest_array(data, threads=threads)
    entry = Entry(view.name, view.dtype, view.shape, "full", at=view.at, whole=view.whole)
    return replace(entry, digest=digest, changed=entry.numel, size=data.size)


def encode(
    view: View, base: Bytes, threads: int, known: int | None = None, follow: bool = False
) -> tuple[Entry, Blob | None]:
    """The entry of a tensor, and the bytes that make it from `base`. If another thread writes to
    it meanwhile, they all are of the same mix of values; only `changed` may be of another one,
    where the elements of deltas are not those of the dtype.

    known: the base's digest. follow: makes `base` equal to the tensor.
    """
    data = view.read()
    entry = Entry(view.name, view.dtype, view.shape, "delta", at=view.at, whole=view.whole)
    width, is_float = element_of(view.dtype)
    room = np.empty(_core.max_delta_size(data.size // width, width), np.uint8)
    changed = None  # as the delta counts
    if 8 * width != SAFETENSORS_BITS[view.dtype]:
        changed = _count_changed(base, data, SAFETENSORS_BITS[view.dtype])
    written = _core.encode_delta(
        base if base.flags.writeable else base.copy(),
        data,
        room,
        width=width,
        is_float=is_float,
        follow=follow,
        base_digest=known,
        threads=threads,
    )
    digests = {"digest": written["result_digest"], "base": written["base_digest"]}
    if not written["changed"]:
        return replace(entry, kind="same", **digests), None
    size = written["size"]
    changed = written["changed"] if changed is None else changed
    return replace(entry, changed=changed, size=size, **digests), room[:size].copy()


def _count_changed(base: Bytes, data: Bytes, bits: int) -> int:
    """Elements of so many bits that differ."""
    if bits % 8 == 0:
        return int(np.count_nonzero(base.view(f"u{bits // 8}") != data.view(f"u{bits // 8}")))
    count = 0
    for start in range(0, data.size, _SLICE):
        part = slice(start, start + _SLICE)
        differing = np.unpackbits(base[part] ^ data[part], bitorder="little")
        count += int(np.count_nonzero(differing.reshape(-1, bits).any(axis=1)))
    return count


def fold_updates(first: Update, second: Update, threads: int) -> Update:
    """One update for two that follow each other. `changed` of a tensor is exact where one of them
    leaves it alone or has it in full; of two deltas, at most so many elements change."""
    folded = Update(second.version, first.base)
    for key, entry in second.entries.items():
        blob = second.blobs.get(key)
        before = first.entries.get(key)
        if entry.kind not in ("delta", "same"):
            folded.add(entry, blob)
        elif before is None or before.kind == "tied" or before.digest != entry.base:
            raise DamagedVersionError(
                f"tensor {key!r}: version {second.version} does not begin where version "
                f"{first.version} ends"
            )
        elif entry.kind == "same":
            folded.add(before, first.blobs.get(key))
        else:
            folded.add(*_fold(before, first.blobs.get(key), entry, second, threads))
    return folded


def _fold(
    before: Entry, base: Blob | None, entry: Entry, update: Update, threads: int
) -> tuple[Entry, Blob]:
    """Something, then a delta of an update."""
    blob = update.blobs[entry.key]
    if base is None:  # the first changes nothing
        return entry, blob
    if before.kind == "full":
        data = np.frombuffer(base, np.uint8).copy()
        update.apply_delta(entry.key, data, threads)
        return replace(before, digest=entry.digest), data
    width, _ = element_of(entry.dtype)
    room = np.empty(_core.max_delta_size(entry.nbytes // width, width), np.uint8)
    one, two = np.frombuffer(base, np.uint8), np.frombuffer(blob, np.uint8)
    written = _core.fold_deltas(one, two, room, threads=threads)
    size, changed = written["size"], min(before.changed + entry.changed, entry.numel)
    if 8 * width <= SAFETENSORS_BITS[entry.dtype]:  # no element of the delta is of several
        changed = min(changed, written["changed"])
    return replace(entry, base=before.base, changed=changed, size=size), room[:size].copy()


def _flat_indices(entry: Entry, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places in a part as places in the whole tensor."""
    if not entry.at:
        return places
    indices = np.unravel_index(places, entry.shape)
    moved = tuple(index + begin for index, begin in zip(indices, entry.at, strict=True))
    return np.ravel_multi_index(moved, entry.whole)

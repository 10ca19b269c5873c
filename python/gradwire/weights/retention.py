"""What stays in a store, and for how long."""

from __future__ import annotations

import os

from gradwire.option_record import explains_arguments
from gradwire.weights.difference import fold_updates
from gradwire.weights.errors import WeightsError
from gradwire.weights.folder import Folder
from gradwire.weights.manifest import (
    Manifest,
    Part,
    Writer,
    is_manifest,
    label_of,
    part_name,
    version_of,
)
from gradwire.weights.store import Store
from gradwire.weights.target import Track
from gradwire.weights.update import write_update


@explains_arguments
def prune(store: str | os.PathLike[str] | Folder, keep: int) -> list[str]:
    """Removes versions that are no longer needed, and parts of versions that never came to be: what
    a publisher that was killed left half written an hour after.

    Each of the newest versions can still be reached from a full one, so the full version before
    them and all that follows it stay. Without a full version nothing is removed but stray parts.

    Args:
        store: A folder, a prefix that fsspec opens, or a `Folder`.
        keep: How many of the newest versions are promised, at least 1.

    Returns:
        The names of the files that were removed.
    """
    if keep < 1:
        raise WeightsError(f"keep={keep}: at least the newest version stays")
    opened = Store(store, patience=0.0, threads=1)
    newest = opened.newest()
    way = opened.way_to(max(newest - keep + 1, 1), None)
    first = version_of(f"{way[0]}.json") if way else None
    removed = []
    anchor = f"{label_of(newest, is_anchor=True)}."
    needed = set()
    before = opened.folder.names()  # what comes after this is under way, too
    # Manifests first: who has one finds its parts, or reads it again.
    for name in sorted(filter(is_manifest, opened.folder.names())):
        if (version_of(name) or 0) < (first or 0):
            removed.append(name)
            opened.folder.remove(name)
        else:
            manifest = opened.manifest(name.removesuffix(".json"))
            needed |= {name, *(part.name for part in manifest.parts)} if manifest else set()
    for name in sorted(set(before) - set(removed) - needed):
        version = version_of(name)
        if version is None or version > newest:
            continue
        # What is written after its version is perhaps under way; a folded delta goes with that.
        is_fold = ".from." in name and version >= (first or 0)
        if not is_fold and not name.lstrip(".").startswith(anchor):
            removed.append(name)
            opened.folder.remove(name)
    return removed + opened.folder.remove_abandoned()


@explains_arguments
def fold(
    store: str | os.PathLike[str] | Folder,
    first: int,
    last: int,
    *,
    threads: int = 1,
    track: Track = iter,
) -> int:
    """Adds to a store one delta that leads from version `first` to version `last`.

    Receivers that are as far behind take it, where it is smaller than the deltas one by one.

    Args:
        store: A folder, a prefix that fsspec opens, or a `Folder`.
        first: The version that it starts from; 0: the publisher's `base`.
        last: The version that it leads to, at least `first` + 2.
        threads: Threads; the bytes do not depend on it.
        track: Passes the list of versions on, and may show progress.

    Returns:
        Its bytes.

    Raises:
        WeightsError: The store lacks one of these versions, or has the delta already.
        DamagedVersionError: A version between them was changed, or has lost a part.
    """
    if not 0 <= first < last - 1:
        raise WeightsError(f"version {first} to {last}: a fold takes two deltas or more")
    opened = Store(store, patience=0.0, threads=threads)
    for version in (first + 1, last):
        opened.require(version)
    label, writer = label_of(last, first), Writer.here()
    there, whole = opened.manifest(label), opened.manifest(label_of(last))
    if (
        there is not None
        and whole is not None
        and there.leads_where(whole)
        and {part.name for part in there.parts} <= set(opened.folder.names())
    ):
        raise WeightsError(f"{label} is there already")
    folded = opened.load(label_of(first + 1))
    for version in track(range(first + 2, last + 1)):
        folded = fold_updates(folded, opened.load(label_of(version)), threads)
    if folded.base != first:
        raise WeightsError(f"version {first + 1} is a full version, and starts from no other")
    pieces = write_update(folded)
    part = Part(part_name(label, writer.token), sum(memoryview(piece).nbytes for piece in pieces))
    opened.folder.write(part.name, pieces)
    opened.write_manifest(label, Manifest(last, first, writer, (part,), folded.entries))
    return part.size

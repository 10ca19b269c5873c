"""``gradwire fold``."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from gradwire import weights
from gradwire.cli.output import JsonOption, ThreadsOption, human_bytes, print_json, say, track

_STORE_HELP = "The folder or prefix to which a gradwire.weights.Publisher publishes."


def fold(
    store: Annotated[str, Argument(metavar="STORE", help=_STORE_HELP)],
    first: Annotated[int, Argument(min=0, help="The version to start from.")],
    last: Annotated[int, Argument(min=1, help="The version to lead to.")],
    threads: ThreadsOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Add one delta for several versions to a store.

    Receivers that have version FIRST then fetch one delta to LAST, where that is smaller than the
    deltas one by one. These stay.
    """
    size = weights.fold(store, first, last, threads=threads, track=track("fold"))
    if as_json:
        print_json({"store": store, "first": first, "last": last, "bytes": size})
    else:
        say(f"{store}: version {first} -> {last}, {human_bytes(size)}")

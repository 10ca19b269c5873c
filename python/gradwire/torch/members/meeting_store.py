"""The store where processes meet: what they must have in common, and its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import zip_longest

from torch.distributed.distributed_c10d import Store

from gradwire.torch.link.errors import PeerMismatchError, StoreLostError
from gradwire.torch.link.store_access import StoreAccess, StoreUnreachableError

_TERMS = "terms"


def compare_terms(store: Store, access: StoreAccess, terms: str) -> None:
    """Compares `terms`, which all must share, with those of the first process that came.

    Raises PeerMismatchError naming the first line that differs, and StoreLostError. The others do
    not notice.
    """
    with reaching_store():
        there = access.ask(lambda: store.compare_set(_TERMS, "", terms)).decode()
    for theirs, mine in zip_longest(there.split("\n"), terms.split("\n"), fillvalue="nothing"):
        if mine != theirs:
            raise PeerMismatchError(
                f"this process can't join: it has '{mine}', the members have '{theirs}'. Give "
                "it the same settings and the same model"
            )


@contextlib.contextmanager
def reaching_store() -> Iterator[None]:
    """Raises StoreLostError where the store does not answer."""
    try:
        yield
    except StoreUnreachableError as error:
        raise StoreLostError(
            f"the store where the members meet does not answer ({error}), and without it the "
            "training can't go on: start again from a checkpoint, with a new store"
        ) from error


def clone(store: Store, access: StoreAccess) -> Store:
    """A client that waits for no call of another thread. Raises StoreLostError."""
    if not hasattr(store, "clone"):
        raise TypeError(
            "on_lost='continue' needs a store with clone(), which those of PyTorch 2.9 and later "
            "have"
        )
    with reaching_store():
        cloned: Store = access.ask(store.clone)
    return cloned

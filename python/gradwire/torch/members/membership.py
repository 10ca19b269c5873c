"""Who takes part in a training whose processes come and go: they meet in a store.

What is decided there, who belongs to a generation (generations.py) or gets a place (places.py), is
numbered. Any process may propose a decision; the first that reaches the store is valid.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.job_key import VARIABLE, JobKey
from gradwire.torch.errors import CommunicationError, JobKeyError, PeerMismatchError, StoreLostError
from gradwire.torch.members.heartbeat import Heartbeat, make_access
from gradwire.torch.network.sealed_store import (
    Numbers,
    SealedStore,
    StoreAccess,
    StoreUnreachableError,
    read,
    under,
)
from gradwire.torch.network.transport import T
from gradwire.torch.options import Members

LOOK_SECONDS = 0.05  # between two looks at the store
CONNECT_SECONDS = 30.0  # all come at the same time, when it is decided who connects
_PLACE = "gradwire/members/"
_DECISION = "decision/{}"
_TERMS, _KEY, _SAID = "terms", "key", "said"
_NO_KEY = "none"


class Membership:
    """This process in the store of a training."""

    def __init__(self, members: Members, patience: float, terms: str) -> None:
        """Compares the terms with those in the store. The other processes do not notice.

        Args:
            members: With a store.
            patience: Seconds to wait for members that live but do not come, or for a place.
            terms: The settings that all must share, a line for each.

        Raises:
            JobKeyError: The members have another job key.
            PeerMismatchError: The members have other terms.
            StoreLostError: The store is gone.
        """
        assert members.store is not None
        assert members.ranks is not None
        self.ranks = members.ranks
        self.lost_after = members.lost_after
        self._patience = patience
        self._access = make_access(members.lost_after)
        self._store = enter(self._clone(members.store), _PLACE, self._access, terms)
        self._heartbeat: Heartbeat | None = None

    def live(self) -> Heartbeat:
        """Begins to show the others that this process lives."""
        with reaching_store():
            self._heartbeat = Heartbeat(self._clone(self._store), self.lost_after)
        return self._heartbeat

    def leave(self) -> bool:
        """Tells the others, who need not wait for this process then. Returns whether all threads
        have ended."""
        ended = self._heartbeat is None or self._heartbeat.stop()
        self._access.hurry()
        return ended

    def decision(self, number: int) -> dict[str, Any] | None:
        """The decision of this number, if there is one yet."""
        text = self._read(_DECISION.format(number))
        found: dict[str, Any] | None = None if text is None else json.loads(text)
        return found

    def decide(self, number: int, decision: dict[str, Any]) -> None:
        """Proposes a decision, as values of JSON.

        It may be called again if the store did not answer, even with another decision: the first
        that reached the store is valid.
        """
        key, text = _DECISION.format(number), json.dumps(decision)
        self._ask(lambda: self._store.compare_set(key, "", text))

    def _read(self, key: str) -> bytes | None:
        return self._ask(lambda: read(self._store, [key]))[0]

    def _ask(self, call: Callable[[], T]) -> T:
        failure = None if self._heartbeat is None else self._heartbeat.failure
        if failure is not None:
            raise CommunicationError(
                "this process can't go on: its heartbeat, by which the others know that it lives, "
                f"ended with {type(failure).__name__}: {failure}"
            ) from failure
        with reaching_store():
            return self._access.ask(call)

    def _under(self, name: str) -> Store:
        """A client of its own, for connections."""
        return under(self._clone(self._store), name)

    def _clone(self, store: Store) -> Store:
        """A client that waits for no call of another thread. Raises StoreLostError."""
        if not hasattr(store, "clone"):
            raise TypeError(
                "on_lost='continue' needs a store with clone(), which those of PyTorch 2.9 and "
                "later have"
            )
        with reaching_store():
            cloned: Store = self._access.ask(store.clone)
        return cloned


def enter(store: Store, name: str, access: StoreAccess, terms: str) -> Store:
    """The records of a training whose members meet in a store, sealed if the job has a key.

    Without one in its environment, all processes that reach the store at an address of the loopback
    are on this machine, and have their user's key.

    Compares the job's key, and `terms`, which all must share, with those of the first process that
    came. The records are sealed by a key of this training alone, which comes from a random number
    of that process: records of another training with the same job key are not valid.

    Raises JobKeyError, PeerMismatchError naming the first line that differs, and StoreLostError.
    The others do not notice.
    """
    key = JobKey.of_environment() or (JobKey.of_user() if _is_on_this_machine(store) else None)
    records = under(store, name)
    if key is None:
        with reaching_store():
            access.ask(lambda: _require_same_key(records, records, _NO_KEY))
            is_first = access.ask(lambda: Numbers(records, _SAID).take() == 0)
            there = access.ask(lambda: records.compare_set(_TERMS, "", terms)).decode()
        if is_first:
            _say_no_key()
        _compare_terms(there, terms)
        return records
    mark = key.derive("mark").secret.hex()[:16]  # tells keys apart, and is no help to find one
    own = SealedStore(store, key, f"{name}{mark}/")
    mine = json.dumps({"terms": terms, "number": secrets.token_hex(16)})
    with reaching_store():
        access.ask(lambda: _require_same_key(records, own, mark))
        first = json.loads(access.ask(lambda: own.compare_set(_TERMS, "", mine)))
    _compare_terms(first["terms"], terms)
    return own.under("", key.derive("training", first["number"]))


def _require_same_key(records: Store, own: Store, mark: str) -> None:
    """A stranger can write what is compared here, so it does not count where members with the same
    key are. Raises JobKeyError."""
    there = records.compare_set(_KEY, "", mark).decode()
    if there == mark or read(own, [_TERMS]) != [None]:
        return
    if mark == _NO_KEY:
        raise JobKeyError(
            "this process can't join: the members that meet in this store have a job key, and this "
            f"process has none. Give it the same {VARIABLE}"
        )
    theirs = "no" if there == _NO_KEY else "another"
    raise JobKeyError(
        f"this process can't join: what is in this store belongs to members with {theirs} job key. "
        f"Give all processes of the job the same {VARIABLE}, and each job a new store, or "
        "PrefixStore('a new name', store)"
    )


def _is_on_this_machine(store: Store) -> bool:
    """Whether the store is reached at an address that other machines can't reach."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return False
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(store.host).is_loopback
    return store.host == "localhost"


def _say_no_key() -> None:
    print(
        "gradwire: this job has no key, so whoever reaches its store and its ports can join it, "
        f"and get its model. To keep others out: export {VARIABLE}=$(openssl rand -hex 32), with "
        "the same value for all processes of the job",
        file=sys.stderr,
    )


def _compare_terms(there: str, terms: str) -> None:
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

"""The store where ranks meet: records that show that a process with the job key wrote them, the
proofs of ranks that connect, a store of this process's own, and calls that may never be answered.

A record is a message authentication code of the key's name and the value, and then the value. What
has no valid code counts as absent, so a stranger who can reach the store can write no record. (He
can still delete records and write old ones again: see SECURITY.md.)
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.job_key import TAG_BYTES, VARIABLE, JobKey
from gradwire.option_record import explains_arguments
from gradwire.torch.errors import JobKeyError
from gradwire.torch.network.transport import ABORT_SECONDS, T, join

_LOOK_SECONDS = 0.02  # between two looks at a record that has no valid code
_STORE_LOOK = 0.2  # seconds between two looks whether there is an answer, or this rank leaves
STORE_SECONDS = 5.0  # a store that takes longer counts as unreachable
_ATTEMPTS = 100  # to replace a record without a valid code, which others may write, too


class SealedStore(Store):
    """Keep it as long as what was made over it: PyTorch holds only the part of it in C++."""

    def __init__(self, store: Store, key: JobKey, place: str = "") -> None:
        """place: begins the names of all records."""
        super().__init__()
        self.key = key
        self.behind, self.place = store, place

    def under(self, name: str, key: JobKey | None = None) -> SealedStore:
        """The records whose names begin with this one. key: for them, in place of this store's."""
        return SealedStore(self.behind, key or self.key, f"{self.place}{name}/")

    def set(self, name: str, value: str | bytes) -> None:
        self.behind.set(self.place + name, self.seal(name, _bytes(value)))  # type: ignore

    def get(self, name: str) -> bytes:
        """Waits for the record."""
        self.wait([name])
        (found,) = self.read([name])
        if found is None:
            raise self._forged([name])
        return found

    def multi_get(self, names: list[str]) -> list[bytes]:
        return [self.get(name) for name in names]

    def read(self, names: Sequence[str]) -> list[bytes | None]:
        """The values of records that are there; None where the code is not valid."""
        values = self.behind.multi_get([self.place + name for name in names])
        return [self._open(*record) for record in zip(names, values, strict=True)]

    def check(self, names: list[str]) -> bool:
        there = self.behind.check([self.place + name for name in names])
        return there and None not in self.read(names)

    def wait(self, names: list[str], timeout: timedelta | None = None) -> None:
        """Raises JobKeyError if one of them has no valid code in the end."""
        patience = timeout or self.behind.timeout  # type: ignore[attr-defined]
        end = time.monotonic() + patience.total_seconds()
        self.behind.wait([self.place + name for name in names], patience)
        while not self.check(names):
            if time.monotonic() > end:
                raise self._forged(names)
            time.sleep(_LOOK_SECONDS)

    def compare_set(self, name: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Writes a record that is absent (`expected` is empty), and returns the value that it has
        then."""
        assert not expected, "no other use is known"
        full, sealed = self.place + name, self.seal(name, _bytes(desired))
        before = b""
        for _ in range(_ATTEMPTS):
            found = self.behind.compare_set(full, before, sealed)  # type: ignore
            value = self._open(name, found)
            if value is not None:
                return value
            before = found
        raise self._forged([name])

    def add(self, name: str, amount: int) -> int:
        """Counts without a code: what it returns proves nothing."""
        return self.behind.add(self.place + name, amount)

    def set_timeout(self, timeout: timedelta) -> None:
        self.behind.set_timeout(timeout)

    def clone(self) -> SealedStore:
        return SealedStore(self.behind.clone(), self.key, self.place)  # type: ignore[attr-defined]

    def seal(self, name: str, value: bytes) -> bytes:
        return self.key.tag(b"record", (self.place + name).encode(), value) + value

    def _open(self, name: str, sealed: bytes) -> bytes | None:
        tag, value = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        made = self.key.made(tag, b"record", (self.place + name).encode(), value)
        return value if made else None

    def _forged(self, names: Sequence[str]) -> JobKeyError:
        return JobKeyError(
            f"the store has a record ({', '.join(names)}) that was not made with this job's key: "
            "somebody else writes into the store, or has another key. Give all processes of the "
            f"job the same {VARIABLE}"
        )


def sealed(store: Store) -> Store:
    """The store, sealed if this process's job has a key."""
    if isinstance(store, SealedStore) or (key := JobKey.of_environment()) is None:
        return store
    return SealedStore(store, key)


def under(store: Store, name: str) -> Store:
    """The records whose names begin with this one."""
    return store.under(name) if isinstance(store, SealedStore) else PrefixStore(name, store)


def read(store: Store, names: Sequence[str]) -> list[bytes | None]:
    """The values of some records; None where there is none, or none of the job."""
    raw, place = _behind(store)
    if not raw.check([place + name for name in names]):
        return [one for name in names for one in read(store, [name])] if len(names) > 1 else [None]
    if isinstance(store, SealedStore):
        return store.read(names)
    return list(store.multi_get(list(names)))


def exist(store: Store, names: Sequence[str]) -> bool:
    """Whether there are such records, of the job or of a stranger."""
    raw, place = _behind(store)
    return raw.check([place + name for name in names])


class Numbers:
    """Numbers from 0 on, each of which one process takes. A stranger can take numbers, too, but
    not those of others."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._raw, self._place = _behind(store)

    def take(self) -> int:
        """The lowest free number."""
        number, step = 0, 64
        while step:
            if self.are_taken(number, step):
                number += step
            else:
                step //= 2
        while not self._take(number):
            number += 1
        return number

    def are_taken(self, first: int, count: int = 1) -> bool:
        return exist(self._store, [self._name_of(n) for n in range(first, first + count)])

    def is_ours(self, number: int) -> bool:
        """Whether a process of the job took it."""
        return read(self._store, [self._name_of(number)]) != [None]

    def _take(self, number: int) -> bool:
        name, token = self._name_of(number), secrets.token_bytes(16)
        if isinstance(self._store, SealedStore):
            token = self._store.seal(name, token)
        return self._raw.compare_set(self._place + name, b"", token) == token  # type: ignore

    def _name_of(self, number: int) -> str:
        return f"{self._name}/{number}"


def _behind(store: Store) -> tuple[Store, str]:
    """The store in which anybody can write, and what names begin with there."""
    return (store.behind, store.place) if isinstance(store, SealedStore) else (store, "")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


@explains_arguments
def host_store(address: str, port: int) -> TCPStore:
    """A store for processes that come and go (`store=`), which others reach at this address alone.

    `TCPStore(address, port, is_master=True)` listens on all interfaces of the machine. The store
    ends with this process.

    Args:
        address: of this machine, on the network of the job.
        port: 0 takes a free one; see `port` of the result.

    Raises:
        OSError: the machine does not have the address, or the port is taken.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family, backlog=1024)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


TAG = 0x70726F66  # of the messages, before any other message of the group


def prove(group: dist.ProcessGroup, key: JobKey, ranks: Sequence[int], timeout: float) -> None:
    """Checks that the other ends of a group's connections have the key; every rank must call this.

    Args:
        key: Of these ranks and this meeting alone. It holds a random number of each rank, so the
            proof of another meeting is of no use; and a proof has sender and receiver.
        ranks: As errors name them, by place.
        timeout: Seconds.

    Raises:
        JobKeyError: Another process has a rank's place.
        RuntimeError: A connection breaks, or nothing comes for `timeout` seconds.
    """
    own, places = group.rank(), [place for place in range(group.size()) if place != group.rank()]
    proofs = {place: torch.empty(TAG_BYTES, dtype=torch.uint8, device="cpu") for place in places}
    receives = {place: group.recv([proofs[place]], place, TAG) for place in places}
    sends = [group.send([proof_of(key, own, place)], place, TAG) for place in places]
    for place, receive in receives.items():
        receive.wait(timedelta(seconds=timeout))
        if not key.made(proofs[place].numpy().tobytes(), *_words(place, own)):
            raise JobKeyError(
                f"rank {ranks[own]}: the process that connected as rank {ranks[place]} has not "
                "this job's key: it is not of this job",
                (ranks[place],),
            )
    for send in sends:
        send.wait(timedelta(seconds=timeout))


def proof_of(key: JobKey, sender: int, receiver: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(key.tag(*_words(sender, receiver))), dtype=torch.uint8)


def _words(sender: int, receiver: int) -> tuple[bytes, ...]:
    return b"proof", str(sender).encode(), str(receiver).encode()


class StoreUnreachableError(Exception):
    """The store does not answer."""


class StoreAccess:
    """Runs each call in a thread of its own, because a store on a stopped machine never answers."""

    def __init__(self, seconds: float = STORE_SECONDS) -> None:
        """seconds: after which a call counts as not answered."""
        self._seconds = seconds
        self._unanswered: list[threading.Thread] = []
        self._leaving = threading.Event()
        self._has_warned = False

    def ask(self, call: Callable[[], T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """The answer. Raises StoreUnreachableError if there is none, and an error of `call` that is
        not PyTorch's store's as it is. meanwhile: called again and again in this thread."""
        if self._leaving.is_set():
            raise StoreUnreachableError("this rank is leaving")
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

        thread = threading.Thread(target=run, name="gradwire-store", daemon=True)
        thread.start()
        end = time.monotonic() + self._seconds
        while thread.is_alive() and not self._leaving.is_set() and time.monotonic() < end:
            thread.join(_STORE_LOOK)
            if thread.is_alive():
                meanwhile()
        if thread.is_alive():
            self._unanswered.append(thread)
        if not answer.done():
            raise StoreUnreachableError("no answer")
        try:
            return answer.result()
        except JobKeyError:
            raise
        except RuntimeError as error:
            raise StoreUnreachableError(str(error).partition("\n")[0]) from None

    def pause(self, seconds: float) -> bool:
        """Waits so long, or until `hurry`. Returns whether that was called."""
        return self._leaving.wait(seconds)

    def hurry(self) -> None:
        """Ends all pauses and waits; no call is begun any more, because the program exits."""
        self._leaving.set()

    def warn_of_threads(self, rank: int, ended: bool) -> None:
        """Says on stderr, once, if a thread waits. `ended`: whether the owner's threads have."""
        if self._has_warned:
            return
        if not (join(self._unanswered, ABORT_SECONDS) and ended):
            self._has_warned = True
            print(
                f"gradwire: rank {rank}: a thread still waits for another rank or for the "
                "store, though its connections are closed; if the wait ends while Python exits, "
                "this process aborts",
                file=sys.stderr,
            )

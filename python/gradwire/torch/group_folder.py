"""A store without files: ranks of a process group fetch versions from the rank that publishes."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch.distributed as dist

from gradwire.strict_json import parse_json
from gradwire.torch.errors import CommunicationError, PeerLostError, PeerSilentError
from gradwire.torch.network.meeting import connect
from gradwire.torch.network.transport import (
    ABORT_SECONDS,
    TEXT_BYTES,
    Kind,
    LostError,
    Received,
    Transport,
    join,
    only_here,
)
from gradwire.weights.errors import WeightsError
from gradwire.weights.folder import Folder, MemoryFolder, open_folder

PIECE_BYTES = 1 << 26  # of a file, in one answer
_FOUND, _NOT_FOUND = 0, 1  # an answer's `part`


class GroupFolder(Folder):
    """A store for the ranks of a process group, without files that all of them see.

        store = GroupFolder()
        publisher = Publisher(store)  # on rank 0
        subscriber = Subscriber(store)  # on the others
        ...
        store.close()

    One rank publishes; it encodes a version once, and the others fetch its bytes when they want
    them. Nobody waits for a slow receiver, and one that is behind, or has another base, takes the
    way that any store has for it. All ranks make it together. It has connections of its own, over
    Gloo, whatever the group's backend is.

    Args:
        group: The ranks; None: all.
        store: Where the publishing rank keeps the versions: a folder, a prefix that fsspec opens,
            or a `Folder`. None: in its memory, where `prune` makes room. Other ranks ignore it.
        source: The rank of the group that publishes.
        timeout: The seconds in which all ranks come, an answer comes, and `close` waits.

    Raises:
        CommunicationError: Not all ranks have come; the message names those that are missing.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        store: str | os.PathLike[str] | Folder | None = None,
        source: int = 0,
        timeout: float = 600.0,
    ) -> None:
        size = dist.get_world_size(group)
        if not 0 <= source < size:
            raise WeightsError(f"source={source}: the group has ranks 0 to {size - 1}")
        self._wire, names, _ = connect(group, timeout)
        self._names = list(names) or list(range(size))
        self._source = source
        self._asking = threading.Lock()
        self._error: CommunicationError | None = None
        self.place = f"rank {self._names[source]}"
        self._served: _Served | None = None
        readers: list[threading.Thread] = []
        if self._wire.rank == source:
            files = MemoryFolder() if store is None else open_folder(store)
            self.place += f", {files.place}"
            self._served = _Served(files, self._wire)
            limits = {Kind.ASK: TEXT_BYTES, Kind.LEAVE: 0}
            for peer in self._wire.peers:
                readers += self._wire.listen(peer, limits, partial(self._served.take, peer))
        self._end = weakref.finalize(self, only_here(partial(_disconnect, self._wire, readers)))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """On the publishing rank it raises PeerLostError once for each receiver that has ended
        without close(); the others go on."""
        if self._served is not None:
            self._report_lost(self._served)
            return self._served.files.read(name, begin, end)
        pieces = []
        while True:
            most = PIECE_BYTES if end is None else min(PIECE_BYTES, end - begin)
            pieces.append(self._ask({"read": name, "begin": begin, "end": begin + most}))
            begin += len(pieces[-1])
            if len(pieces[-1]) < most or begin == end:
                return b"".join(pieces)

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        self._files_of_source("publish").write(name, pieces, only_new)

    def names(self) -> list[str]:
        if self._served is not None:
            return self._served.files.names()
        return list(parse_json(self._ask({"names": True}), 1))

    def remove(self, name: str) -> None:
        self._files_of_source("prune").remove(name)

    def close(self) -> None:
        """Leaves. The publishing rank first waits until all receivers have done so, too, since they
        fetch from it.

        Raises:
            PeerLostError: A receiver has ended without close().
            PeerSilentError: A receiver has not closed its store within `timeout`.
        """
        if not self._end.alive:
            return
        try:
            if self._served is not None:
                self._await_receivers(self._served)
            elif self._error is None:
                self._wire.send(self._source, Kind.LEAVE)
                self._wire.flush()
        except LostError as lost:
            raise self._described(lost, "leaving") from lost
        finally:
            self._end()

    def __enter__(self) -> GroupFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an error it leaves without a word, so that others see that this rank has failed."""
        if error is None:
            self.close()
        else:
            self._end()

    def _ask(self, wanted: dict[str, Any]) -> bytes:
        question = np.frombuffer(json.dumps(wanted).encode(), np.uint8)
        limits = {Kind.ANSWER: max(PIECE_BYTES, TEXT_BYTES)}
        with self._asking:
            if self._error is not None:
                raise self._error
            if not self._end.alive:
                raise WeightsError("this GroupFolder is closed")
            try:
                self._wire.send(self._source, Kind.ASK, question)
                self._wire.flush()
                answer = self._wire.receive(self._source, limits)
                data = answer.payload.tobytes()
                self._wire.release(self._source)
            except LostError as lost:
                self._error = self._described(lost, "fetching weights")
                raise self._error from lost
            except CommunicationError as error:
                self._error = error
                raise
        if answer.part == _NOT_FOUND:
            raise FileNotFoundError(f"{self.place}: {wanted['read']}")
        return data

    def _files_of_source(self, action: str) -> Folder:
        if self._served is None:
            raise WeightsError(
                f"rank {self._names[self._wire.rank]} cannot {action} here, only {self.place} can; "
                "several ranks publish to a folder that all of them see"
            )
        return self._served.files

    def _report_lost(self, served: _Served) -> None:
        lost, served.lost = served.lost, []
        if lost:
            ranks = tuple(self._names[peer] for peer, _ in lost)
            raise PeerLostError(
                f"rank {', '.join(map(str, ranks))} is gone ({lost[0][1]}) and fetches no more "
                "versions. Call again to go on without it",
                ranks,
            )

    def _await_receivers(self, served: _Served) -> None:
        end = time.monotonic() + self._wire.timeout
        while len(served.gone) < len(self._wire.peers):
            try:
                served.gone.add(
                    self._wire.take_from(served.leaving, max(end - time.monotonic(), 0.0))
                )
            except queue.Empty:
                there = [self._names[p] for p in self._wire.peers if p not in served.gone]
                raise PeerSilentError(
                    f"rank {', '.join(map(str, there))} has not closed its GroupFolder in "
                    f"{self._wire.timeout:g} s; receivers close it when they need no more versions",
                    tuple(there),
                ) from None
        self._report_lost(served)

    def _described(self, lost: LostError, doing: str) -> CommunicationError:
        ranks = tuple(self._names[peer] for peer in lost.peers)
        kind, what = (PeerSilentError, "is silent") if lost.silent else (PeerLostError, "is gone")
        return kind(
            f"rank {self._names[self._wire.rank]}, {doing}: rank {', '.join(map(str, ranks))} "
            f"{what}: {lost}",
            ranks,
        )


@dataclass
class _Served:
    """The publishing rank's files, and what it knows of the receivers.

    Attributes:
        leaving: Those that have left or are lost, as it happens; gone: the same, counted.
        lost: Those that ended without a word and were not reported yet, and why.
    """

    files: Folder
    wire: Transport
    leaving: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    gone: set[int] = field(default_factory=set)
    lost: list[tuple[int, str]] = field(default_factory=list)
    answering: threading.Lock = field(default_factory=threading.Lock)

    def take(self, peer: int, message: Received | Exception) -> None:
        """A message of a receiver, or the error that ended its connection."""
        error: Exception | None = None
        if isinstance(message, Exception):
            error = message
        elif message.kind is Kind.ASK:
            try:
                self._answer(peer, message)
                return
            except Exception as raised:
                error = raised
        elif message.kind is not Kind.LEAVE:
            error = ValueError(f"it sent a {message.kind.label}")
        if error is not None:
            self.lost.append((peer, str(error) or type(error).__name__))
        self.leaving.put(peer)

    def _answer(self, peer: int, message: Received) -> None:
        wanted, part = parse_json(message.payload.tobytes(), 1), _FOUND
        try:
            if "names" in wanted:
                data = json.dumps(self.files.names()).encode()
            else:
                data = self._read(**wanted)
        except FileNotFoundError:
            data, part = b"", _NOT_FOUND
        with self.answering:  # one thread at a time may send
            self.wire.flush(peer)  # it has the last answer, or it would not ask
            self.wire.send(peer, Kind.ANSWER, np.frombuffer(data, np.uint8), part)

    def _read(self, read: str, begin: int, end: int) -> bytes:
        if os.path.basename(read) != read or not 0 <= begin <= end <= begin + PIECE_BYTES:
            raise ValueError(f"it asks for {read!r}, {begin} to {end}")
        return self.files.read(read, begin, end)


def _disconnect(wire: Transport, readers: list[threading.Thread]) -> None:
    wire.abort()
    join(readers, ABORT_SECONDS)
    wire.drop()

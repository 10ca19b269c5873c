"""A store without files: ranks of a process group fetch versions from the rank that keeps them."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import TracebackType

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gradwire.option_record import explains_arguments
from gradwire.strict_json import parse_json
from gradwire.torch.errors import CommunicationError, PeerLostError, PeerSilentError
from gradwire.torch.network.meeting import connect, require_group
from gradwire.torch.network.transport import (
    TEXT_BYTES,
    Bytes,
    Kind,
    LostError,
    Transport,
    only_here,
)
from gradwire.torch.weight_keeper import (
    PIECE_BYTES,
    Admission,
    Answer,
    Keeper,
    Link,
    Question,
    join_keeper,
)
from gradwire.weights.errors import WeightsError
from gradwire.weights.folder import Folder, MemoryFolder, open_folder


class GroupFolder(Folder):
    """A store for the ranks of a process group, without files that all of them see.

        store = GroupFolder()
        publisher = Publisher(store)  # on rank 0
        subscriber = Subscriber(store)  # on the others
        ...
        store.close()

    A version is encoded once, and the others fetch its bytes when they want them. Nobody waits for
    a slow receiver, and one that is behind, or has another base, takes the way that any store has
    for it. All ranks of the group make it together. It has connections of its own, over Gloo,
    whatever the group's backend is.

    Receivers that come and go need not be in the group: they meet the others in a store of
    torch.distributed, and `join`.

    Args:
        group: The ranks; None: all.
        store: Where the versions are kept: a folder, a prefix that fsspec opens, or a `Folder`.
            None: in memory, where `prune` makes room. Only the rank that keeps them needs it.
        source: The rank of the group that publishes and keeps the versions. Of several, which
            publish shards of their own, the first keeps them.
        meet: A store of torch.distributed with clone(), such as `host_store` makes it, where
            receivers join. Only the rank that keeps the versions needs it.
        timeout: The seconds in which all ranks come, an answer comes, and `close` waits.

    Raises:
        CommunicationError: Not all ranks have come; the message names those that are missing. Or
            this rank is not in the group.
    """

    @explains_arguments
    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        store: str | os.PathLike[str] | Folder | None = None,
        source: int | Sequence[int] = 0,
        meet: Store | None = None,
        timeout: float = 600.0,
    ) -> None:
        sources = [source] if isinstance(source, int) else list(source)
        size = require_group(group)[0].size()
        if not sources or not all(0 <= one < size for one in sources):
            raise WeightsError(f"source={source}: the group has ranks 0 to {size - 1}")
        wire, names, _ = connect(group, timeout)
        names = list(names) or list(range(size))
        keeper = None
        if wire.rank == sources[0]:
            keeper = Keeper(MemoryFolder() if store is None else open_folder(store))
        self._begin(wire, names, sources[0], keeper)
        self._may_write = wire.rank in sources
        if keeper is not None:
            self.place += f", {keeper.files.place}"
            sending = threading.Lock()
            for peer in wire.peers:
                is_source = peer in sources
                keeper.serve(Link(wire, peer, names[peer], self._who(peer), is_source, sending))
            if meet is not None:
                keeper.admission = Admission(keeper, meet)

    @classmethod
    def join(cls, meet: Store, *, timeout: float = 600.0) -> GroupFolder:
        """The folder of the ranks that publish, for a process that is not in their group.

        It may come at any time, leave with `close`, or die, and come again: a `Subscriber` with
        `local=` or `version=` then fetches what it has missed, or a full version.

        Args:
            meet: A client of the store that the publishing ranks have as `meet`.
            timeout: The seconds in which they let it in, and an answer comes.

        Raises:
            CommunicationError: Nobody is there, or has another job key.
        """
        folder = cls.__new__(cls)
        wire = join_keeper(meet, timeout)
        folder._begin(wire, (), 0, None)
        return folder

    def _begin(
        self, wire: Transport, names: Sequence[int], source: int, keeper: Keeper | None
    ) -> None:
        """names: of the wire's ranks, in the world; empty: this process has joined. keeper: None
        on all but the rank `source` of the wire, which has it."""
        self._wire, self._names, self._source = wire, names, source
        self._process = os.getpid()
        self._asking = threading.Lock()
        self._error: CommunicationError | None = None
        self.place = self._who(source)
        self._keeper = keeper
        self._may_write = False
        self._end = weakref.finalize(self, only_here(partial(_disconnect, wire, keeper)))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """On the rank that keeps the versions it tells once of each process that has ended without
        close(). A receiver that has joined, or any receiver where several ranks publish: a
        RankLostWarning. All others: PeerLostError; after it the rest go on."""
        if self._keeper is not None:
            self._keeper.report_lost()
            return self._keeper.files.read(name, begin, end)
        pieces = []
        while True:
            most = PIECE_BYTES if end is None else min(PIECE_BYTES, end - begin)
            pieces.append(self._ask(Question.READ, name, begin, begin + most))
            begin += len(pieces[-1])
            if len(pieces[-1]) < most or begin == end:
                return b"".join(pieces)

    def write(
        self, name: str, pieces: Iterable[bytes | memoryview], only_new: bool = False
    ) -> None:
        if self._may_write and self._keeper is None:
            self._ask(Question.WRITE, name, only_new, pieces=pieces)
        else:
            self._files_here("publish").write(name, pieces, only_new)

    def names(self) -> list[str]:
        if self._keeper is not None:
            return self._keeper.files.names()
        return list(parse_json(self._ask(Question.NAMES), 1))

    def remove(self, name: str) -> None:
        self._files_here("prune").remove(name)

    def close(self) -> None:
        """Leaves. The rank that keeps the versions first waits until all others have done so, too,
        since they fetch from it.

        Raises:
            PeerLostError: A receiver has ended without close().
            PeerSilentError: A receiver has not closed its store within `timeout`.
        """
        if not self._end.alive or os.getpid() != self._process:
            return
        try:
            if self._keeper is not None:
                self._await_others(self._keeper)
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

    def _ask(
        self, question: Question, *arguments: str | int, pieces: Iterable[bytes | memoryview] = ()
    ) -> bytes:
        """The answer to a question. pieces: of a file, which go before it."""
        if os.getpid() != self._process:
            raise CommunicationError(
                f"this GroupFolder is of process {self._process}; this is process {os.getpid()}, a "
                "child that was forked from it, which would take the answers to its questions"
            )
        asked = np.frombuffer(json.dumps(arguments).encode(), np.uint8)
        limits = {Kind.ANSWER: max(PIECE_BYTES, TEXT_BYTES)}
        with self._asking:
            if self._error is not None:
                raise self._error
            if not self._end.alive:
                raise WeightsError(
                    "this GroupFolder is closed: by close(), or by an interrupt while it waited"
                )
            try:
                for piece in _cut(pieces):
                    self._wire.send(self._source, Kind.PUT, piece)
                    self._wire.flush()
                self._wire.send(self._source, Kind.ASK, asked, question)
                self._wire.flush()
                answer = self._wire.receive(self._source, limits)
                data = answer.payload.tobytes()
                self._wire.release(self._source)
            except LostError as lost:
                doing = "publishing" if question is Question.WRITE else "fetching"
                self._error = self._described(lost, f"{doing} weights")
                raise self._error from lost
            except CommunicationError as error:
                self._error = error
                raise
            except BaseException:  # an interrupt: the next question would get this one's answer
                self._end()
                raise
        if answer.part == Answer.NOT_FOUND:
            raise FileNotFoundError(f"{self.place}: {arguments[0]}")
        if answer.part == Answer.IS_THERE:
            raise FileExistsError(f"{self.place}: {arguments[0]}")
        if answer.part == Answer.FAILED:
            raise OSError(f"{self.place}: {data.decode()}")
        return data

    def _files_here(self, action: str) -> Folder:
        if self._keeper is None:
            raise WeightsError(
                f"{self._who(self._wire.rank)} cannot {action} here, only {self.place} can; "
                "several ranks publish to GroupFolder(source=[...]), or to a folder that all of "
                "them see"
            )
        return self._keeper.files

    def _await_others(self, keeper: Keeper) -> None:
        if keeper.admission is not None:
            keeper.admission.end()
        end = time.monotonic() + self._wire.timeout
        there = set(keeper.links)
        while there:
            try:
                seconds = max(end - time.monotonic(), 0.0)
                there.discard(self._wire.take_from(keeper.left, seconds))
            except queue.Empty:
                names = ", ".join(link.name for link in keeper.links if link in there)
                raise PeerSilentError(
                    f"{names} has not closed its GroupFolder in {self._wire.timeout:g} s; "
                    "receivers close it when they need no more versions",
                    tuple(link.rank for link in there if link.rank is not None),
                ) from None
        keeper.report_lost()

    def _described(self, lost: LostError, doing: str) -> CommunicationError:
        names = ", ".join(map(self._who, lost.peers))
        kind, what = (PeerSilentError, "is silent") if lost.silent else (PeerLostError, "is gone")
        ranks = tuple(self._names[peer] for peer in lost.peers) if self._names else ()
        return kind(f"{self._who(self._wire.rank)}, {doing}: {names} {what}: {lost}", ranks)

    def _who(self, rank: int) -> str:
        """What errors call a rank of the wire."""
        if self._names:
            return f"rank {self._names[rank]}"
        return "the publisher" if rank == self._source else "this receiver"


def _cut(pieces: Iterable[bytes | memoryview]) -> Iterator[Bytes]:
    """Pieces of at most PIECE_BYTES."""
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        for begin in range(0, data.size, PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES]


def _disconnect(wire: Transport, keeper: Keeper | None) -> None:
    if keeper is not None:
        keeper.end()
    wire.abort()
    wire.drop()

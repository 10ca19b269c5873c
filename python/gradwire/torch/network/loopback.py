"""All ranks in one process, for tests and experiments: `run` calls a function once for each rank.

    def train(rank: int) -> list[torch.Tensor]:
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(GradwireState(), gradwire_hook)
        ...

    weights_of_each_rank = loopback.run(4, train)

Inside, torch.distributed has a world of these ranks, with the backend "loopback", and every class
of `gradwire.torch` works as it does between processes: its messages are passed on in memory.

The ranks are threads, of which exactly one runs at a time. A rank runs until it has to wait for a
message, and then the next one runs that need not wait. So a run is deterministic and needs no more
than one core. Each rank has its own state of torch's generator for the CPU, as if it were a
process. (All else that belongs to a process is shared: other generators, warning filters.)
"""

from __future__ import annotations

import functools
import itertools
import queue
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from gradwire.torch.errors import PeerLostError, PeerMismatchError
from gradwire.torch.network.transport import (
    NOTHING,
    OVERHEAD_BYTES,
    Bytes,
    Kind,
    Limits,
    LostError,
    Received,
    T,
    Transport,
    ranks_in_world,
)

NAME = "loopback"
_CLOSED = "its connection is closed"
_here = threading.local()  # `ranks` and `rank` of a thread that is a rank


def run(world_size: int, function: Callable[[int], T]) -> list[T]:
    """Calls `function` with each rank from 0 to world_size - 1, and returns what it returned.

    Raises the first exception of a rank. Ranks that wait for one that has ended, or for each other
    in a circle, get the errors of a lost peer; after an interrupt, all that wait.
    """
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, group_here, devices=["cpu"])
    before, hook = distributed_c10d._world, sys.excepthook
    distributed_c10d._world = _Worlds(before)  # type: ignore[assignment]
    isolate = c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    try:
        return _Ranks(world_size).run(function)
    finally:
        isolate(False)
        distributed_c10d._world = before
        sys.excepthook = hook  # init_process_group puts its own before it


def let_others_run() -> None:
    """In the thread of a rank of `run`: the others run, each until it waits."""
    ranks = getattr(_here, "ranks", None)
    if ranks is not None:
        looks = itertools.count()
        ranks.wait(lambda: next(looks))  # not at the first look


class _Ranks:
    """The threads, of which one has the baton."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.store = c10d.HashStore()
        self.channels: defaultdict[object, _Channels] = defaultdict(_Channels)
        self._ended: set[int] = set()
        self._over = threading.Event()  # all have ended
        self._may_run = [threading.Semaphore(0) for _ in range(world_size)]
        self._until: list[Callable[[], object]] = [lambda: True] * world_size
        self._is_stuck = self._is_interrupted = False
        self._draws = [torch.get_rng_state()] * world_size

    def run(self, function: Callable[[int], T]) -> list[T]:
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        size = self.world_size

        def live(rank: int) -> None:
            self._may_run[rank].acquire()
            _here.ranks, _here.rank = self, rank
            torch.set_rng_state(self._draws[rank])
            try:
                dist.init_process_group(NAME, store=self.store, rank=rank, world_size=size)
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
            finally:
                self._end(rank)

        before = torch.get_rng_state()
        threads = [
            threading.Thread(target=live, args=(rank,), name=f"gradwire-rank-{rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in threads:
            thread.start()
        self._may_run[0].release()
        try:
            self._over.wait()
        except BaseException:
            self._is_interrupted = True
            self._over.wait()
            raise
        finally:
            torch.set_rng_state(before)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(size)]

    def wait(self, until: Callable[[], object]) -> bool:
        """Lets other ranks run until `until()` holds. Returns False if it never will."""
        if self._is_interrupted:
            return False
        if until():
            return True
        if getattr(_here, "ranks", None) is not self:
            return False  # all have ended
        rank = _here.rank
        self._until[rank] = until
        self._draws[rank] = torch.get_rng_state()
        self._hand_on(rank)
        self._may_run[rank].acquire()
        torch.set_rng_state(self._draws[rank])
        is_stuck, self._is_stuck = self._is_stuck, False
        return not is_stuck

    def _hand_on(self, rank: int) -> None:
        """Gives the baton to the next rank that need not wait; to the next one, if all must."""
        order = [(rank + step) % self.world_size for step in range(1, self.world_size + 1)]
        waiting = [other for other in order if other not in self._ended]
        if not waiting:
            self._over.set()
            return
        ready = next((other for other in waiting if self._until[other]()), None)
        self._is_stuck = ready is None
        self._may_run[waiting[0] if ready is None else ready].release()

    def _end(self, rank: int) -> None:
        for channels in list(self.channels.values()):
            if rank in channels.place_of:
                channels.close(channels.place_of[rank])
        self._ended.add(rank)
        self._hand_on(rank)


class _Channels:
    """What the ranks of a connection, or of a group, pass to each other."""

    def __init__(self) -> None:
        self.place_of: dict[int, int] = {}  # of those that have come, by their ranks in the world
        self.closed: set[int] = set()
        # By sender and receiver.
        self.messages: defaultdict[tuple[int, int], deque[Received]] = defaultdict(deque)
        self.listeners: dict[tuple[int, int], Callable[[], None]] = {}
        # By the number of a collective, until all have come to it: what each rank gave.
        self.given: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def close(self, rank: int) -> None:
        self.closed.add(rank)
        for sender, receiver in list(self.listeners):
            if sender == rank:
                self.notify(sender, receiver)

    def notify(self, sender: int, receiver: int) -> None:
        if (listener := self.listeners.get((sender, receiver))) is not None:
            listener()


class LoopbackTransport(Transport):
    """Messages between the ranks of one `run`."""

    waits_alone = False

    def __init__(
        self, ranks: _Ranks, channels: _Channels, rank: int, size: int, timeout: float
    ) -> None:
        super().__init__(rank, range(size), timeout)
        self._ranks, self._channels = ranks, channels

    def send(
        self, peer: int, kind: Kind, payload: Bytes = NOTHING, part: int = 0, in_turn: bool = False
    ) -> None:
        if peer in self._channels.closed:
            raise LostError((peer,), False, _CLOSED)
        is_ahead = in_turn and part != self.turn
        message = Received(kind, payload.copy(), part, True, is_ahead)
        self.sent_bytes += OVERHEAD_BYTES + payload.size
        self._channels.messages[self.rank, peer].append(message)
        self._channels.notify(self.rank, peer)

    def receive(self, peer: int, limits: Limits, timeout: float | None = None) -> Received:
        channels = self._channels
        messages = channels.messages[peer, self.rank]
        if not self._wait(lambda: messages or {peer, self.rank} & channels.closed):
            raise LostError((peer,), True, "all ranks wait for each other")
        if not messages:
            raise LostError((peer,), False, _CLOSED)
        message = messages.popleft()
        if message.kind not in limits:
            return message._replace(payload=NOTHING)
        self._check_length(peer, message.kind, message.payload.size, limits[message.kind])
        return message

    def release(self, peer: int) -> None:
        """Each message has memory of its own."""

    def flush(self, peer: int | None = None, keep: int = 0) -> None:
        """A message arrives as it is sent."""

    def closed_peers(self) -> tuple[int, ...]:
        return tuple(peer for peer in self.peers if peer in self._channels.closed)

    def abort(self) -> None:
        self._channels.close(self.rank)

    drop = abort

    def listen(
        self, peer: int, limits: Limits, put: Callable[[Received | Exception], None]
    ) -> list[threading.Thread]:
        place = peer, self.rank
        messages = self._channels.messages[place]

        def take_all() -> None:
            while place in self._channels.listeners and (messages or peer in self._channels.closed):
                found: Received | Exception
                try:
                    found = self.receive(peer, limits)
                except (LostError, PeerMismatchError) as error:
                    found = error
                if isinstance(found, Exception) or self._is_last(found, limits):
                    self._channels.listeners.pop(place)
                put(found)

        self._channels.listeners[place] = take_all
        take_all()
        return []

    def take_from(self, arrived: queue.SimpleQueue[T], seconds: float) -> T:
        self._wait(lambda: not arrived.empty())
        return arrived.get_nowait()

    def _wait(self, until: Callable[[], object]) -> bool:
        start = time.perf_counter()
        came = self._ranks.wait(until)
        self.waited_seconds += time.perf_counter() - start
        return came


class LoopbackGroup(dist.ProcessGroup):
    """The group of torch.distributed in a rank's thread. It has what DDP and FSDP2 need; sums are
    computed in the order of the ranks."""

    def __init__(self, ranks: _Ranks, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._ranks, self._store = ranks, store
        self._name = ""
        self._connections = itertools.count()
        self._calls = itertools.count()

    def make_transport(self, timeout: float) -> tuple[Transport, Store]:
        number, rank, size = next(self._connections), self.rank(), self.size()
        channels = self._ranks.channels[self._name, number]
        channels.place_of[_here.rank] = rank
        if not self._ranks.wait(lambda: len(channels.place_of) == size):
            names = ranks_in_world(self) or range(size)
            here = channels.place_of.values()
            absent = tuple(names[place] for place in range(size) if place not in here)
            why = "all other ranks wait or have ended"
            raise PeerLostError(f"ranks {absent} do not connect: {why}", absent)
        store = PrefixStore(f"gradwire/{self._name}/{number}", self._store)
        return LoopbackTransport(self._ranks, channels, rank, size, timeout), store

    # What torch.distributed asks for -------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch calls it
        return NAME

    def get_group_store(self) -> Store:
        return self._store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        return self._name

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        root = opts.rootRank
        for tensor, given in zip(tensors, self._gather(tensors)[root], strict=True):
            _write(tensor, given)
        return _done(tensors)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        tensors = tensors if isinstance(tensors, list) else [tensors]
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor, *given in zip(tensors, *self._gather(tensors), strict=True):
            _write(tensor, _reduce(given, op))
        return _done(tensors)

    allreduce_coalesced: Any = allreduce

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> dist.Work:
        for given, output in zip(self._gather(tensors), outputs[0], strict=True):
            _write(output, given[0])
        return _done(outputs)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        _write(output.view(-1), torch.cat([given[0].view(-1) for given in self._gather([tensor])]))
        return _done([output])

    def allgather_into_tensor_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor)
        return _done(outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        whole = _reduce([given[0] for given in self._gather([tensor])], op)
        _write(output.view(-1), whole.view(self.size(), -1)[self.rank()])
        return _done([output])

    # Names of versions of PyTorch before 2.13.
    _allgather_base: Any = all_gather_single
    _reduce_scatter_base: Any = reduce_scatter_single

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gather([])
        return _done([])

    def _gather(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The tensors of every rank, in the order of ranks."""
        number, size = next(self._calls), self.size()
        channels = self._ranks.channels[self._name, "collectives"]
        given = channels.given[number]
        given[self.rank()] = [tensor.detach().clone() for tensor in tensors]
        if len(given) == size:
            del channels.given[number]  # each rank has it
        if not self._ranks.wait(lambda: len(given) == size):
            missing = sorted(set(range(size)) - given.keys())
            raise dist.DistBackendError(f"{NAME}: ranks {missing} do not take part")
        return [given[rank] for rank in range(size)]


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.detach().copy_(values.view_as(tensor))


def _reduce(tensors: list[torch.Tensor], op: Any) -> torch.Tensor:
    """Raises NotImplementedError for operations other than these."""
    if op == dist.ReduceOp.MAX:  # a ReduceOp equals a RedOpType, but not the reverse
        return torch.stack(tensors).amax(dim=0)
    if op == dist.ReduceOp.MIN:
        return torch.stack(tensors).amin(dim=0)
    if op == dist.ReduceOp.SUM:
        return functools.reduce(torch.add, tensors)
    if op == dist.ReduceOp.AVG:
        return functools.reduce(torch.add, tensors) / len(tensors)
    raise NotImplementedError(f"{NAME} has no {op}")


def _done(result: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def group_here(store: Store, rank: int, size: int, timeout: Any = None) -> LoopbackGroup | None:
    """A group in the thread of a rank, which has no use for the timeout; None in other threads."""
    ranks = getattr(_here, "ranks", None)
    return None if ranks is None else LoopbackGroup(ranks, store, rank, size)


class _Worlds:
    """torch.distributed's record of groups: one for each rank's thread, and for other threads that
    of before."""

    def __init__(self, before: Any) -> None:
        from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

        vars(self).update(before=before, of_threads=ThreadLocalWorld())

    def _now(self) -> Any:
        return vars(self)["of_threads" if hasattr(_here, "ranks") else "before"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._now(), name, value)

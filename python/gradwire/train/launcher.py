"""Starts the workers of this machine, follows them and ends them.

No process outlives the training. Workers and switch are killed when the launcher leaves the `with`
block, also on Ctrl-C, and end by themselves when the launcher dies (see worker.py and network.py).
Then the kernel removes their namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from gradwire.train import network
from gradwire.train.errors import DivergedError, TrainError
from gradwire.train.settings import TrainSettings

Event = dict[str, Any]
OnEvent = Callable[[int, Event], None]  # rank, event

_STDERR_LINES_KEPT = 30
_SECONDS_TO_LEAVE = 20.0  # for workers that have delivered everything; then they are killed
_POLL_SECONDS = 0.05


class WorkerError(TrainError):
    """A worker ended before its work was done. The message names it and quotes its last lines."""


class Workers:
    """The processes of all ranks. A context manager, which ends them when it is left.

    Enter it in the main thread: a worker ends when the thread that started it ends.
    """

    def __init__(self, settings: TrainSettings, shaped: bool) -> None:
        self._settings = settings
        self._shaped = shaped
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[list[threading.Thread]] = []
        self._events: queue.Queue[tuple[int, Event]] = queue.Queue()
        self._errors: dict[int, TrainError] = {}
        self._stderr = [deque[str](maxlen=_STDERR_LINES_KEPT) for _ in range(settings.ranks)]
        self._place = ["while it started"] * settings.ranks
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Workers:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._kill)
            for rank in range(self._settings.ranks):
                self._start(rank)
            if self._shaped:
                assert self._settings.bandwidth is not None
                shaper = network.ShapedNetwork(self._settings.bandwidth)
                switch = cleanup.enter_context(shaper)
                for rank, process in enumerate(self._processes):
                    switch.attach(rank, process)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def process_ids(self) -> list[int]:
        """By rank."""
        return [process.pid for process in self._processes]

    def run(self, on_event: OnEvent) -> list[list[Event]]:
        """Lets the workers do everything. Returns each codec's records (RankRecord), by rank.

        on_event gets the events that worker.py lists, and {"event": "stderr", "line"}. Raises
        TrainError as soon as a worker fails. A worker that fails after it delivered everything
        costs no result; on_event gets a line on stderr that says so.
        """
        ranks = range(self._settings.ranks)
        for rank in ranks:
            self._tell(
                rank,
                {
                    "settings": self._settings.to_json(),
                    "rank": rank,
                    "address": network.address(0) if self._shaped else "127.0.0.1",
                    "interface": network.INTERFACE if self._shaped else None,
                },
            )
        records: dict[str, dict[int, Event]] = {codec: {} for codec in self._settings.codecs}
        for rank, event in self._until_all_ended():
            if event["event"] == "store":
                for other in ranks[1:]:
                    self._tell(other, {"port": event["port"]})
            elif event["event"] == "record":
                records[event["record"]["codec"]][rank] = event["record"]
            on_event(rank, event)
        for codec, by_rank in records.items():
            for rank in ranks:
                if rank not in by_rank:
                    raise WorkerError(
                        f"{self._settings.names([rank])} ended without a result for {codec}"
                    )
        return [[by_rank[rank] for rank in ranks] for by_rank in records.values()]

    def _start(self, rank: int) -> None:
        command = [sys.executable, "-m", "gradwire.train.worker"]
        process = subprocess.Popen(
            network.in_own_namespace(command) if self._shaped else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                # Errors come as exceptions; what c10d only logs is that a namespace has no DNS.
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                **os.environ,
                "OMP_NUM_THREADS": "1",
                # Threads that spin while they wait would take the CPU from the other workers.
                "OMP_WAIT_POLICY": "passive",
                "PYTHONUNBUFFERED": "1",
                "GLOO_SOCKET_IFNAME": network.INTERFACE if self._shaped else "lo",
            },
            process_group=0,  # Ctrl-C in a terminal reaches the launcher alone
        )
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=self._read_events, args=(rank, process.stdout), daemon=True),
            threading.Thread(target=self._read_stderr, args=(rank, process.stderr), daemon=True),
        ]
        for reader in readers:
            reader.start()
        self._processes.append(process)
        self._readers.append(readers)

    def _read_events(self, rank: int, pipe: IO[bytes]) -> None:
        for line in pipe:
            # A killed worker may leave half a line.
            with contextlib.suppress(ValueError):
                self._events.put((rank, json.loads(line)))

    def _read_stderr(self, rank: int, pipe: IO[bytes]) -> None:
        for line in pipe:
            text = line.decode(errors="replace").rstrip()
            self._events.put((rank, {"event": "stderr", "line": text}))

    def _tell(self, rank: int, values: Event) -> None:
        pipe = self._processes[rank].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: _raise_if_one_failed says how
            pipe.write(json.dumps(values).encode() + b"\n")
            pipe.flush()

    def _until_all_ended(self) -> Iterator[tuple[int, Event]]:
        """Events until every worker has ended, with status 0 or after it delivered everything."""
        deadline = None
        finished: set[int] = set()
        killed: list[int] = []
        while True:
            with contextlib.suppress(queue.Empty):
                rank, event = self._events.get(timeout=_POLL_SECONDS)
                self._note(rank, event)
                is_record = event["event"] == "record"
                if is_record and event["record"]["codec"] == self._settings.codecs[-1]:
                    finished.add(rank)
                yield rank, event
            self._raise_if_one_failed(finished)
            running = [rank for rank, p in enumerate(self._processes) if p.poll() is None]
            if not running:
                break
            if len(finished) == len(self._processes):
                deadline = deadline or time.monotonic() + _SECONDS_TO_LEAVE
                if time.monotonic() > deadline:
                    killed = running
                    for rank in killed:
                        self._processes[rank].kill()
                        self._processes[rank].wait()
        yield from self._drain()
        for rank in sorted(finished):
            if self._status(rank) != 0:
                line = f"{describe_end(self._status(rank))} after it had delivered everything"
                if rank in killed:
                    line += f": it did not end within {_SECONDS_TO_LEAVE:g} s"
                yield rank, {"event": "stderr", "line": line}

    def _drain(self) -> Iterator[tuple[int, Event]]:
        """The events of ended workers that are still in the queue."""
        self._join_readers(range(len(self._processes)))
        while not self._events.empty():
            rank, event = self._events.get()
            self._note(rank, event)
            yield rank, event

    def _note(self, rank: int, event: Event) -> None:
        match event["event"]:
            case "stderr":
                self._stderr[rank].append(event["line"])
            case "error":
                self._errors[rank] = WorkerError(event["message"])
            case "diverged":
                self._errors[rank] = DivergedError(event["message"])
            case "ready":
                self._place[rank] = "before the first step"
            case "begin":
                self._place[rank] = f"in the run of {event['codec']}"
            case "step":
                self._place[rank] = f"in the run of {event['codec']}, after step {event['step']}"

    def _raise_if_one_failed(self, finished: set[int]) -> None:
        failed = [rank for rank, process in enumerate(self._processes) if process.poll()]
        if finished.issuperset(failed):
            return  # or nobody failed
        self._join_readers(failed)
        if not self._events.empty():
            return  # its last events are noted first
        # If a worker was killed, others may have failed because of it in the same moment.
        first = min(failed, key=self._status)
        if first in self._errors:
            raise self._errors[first]
        lines = "".join(f"\n  | {line}" for line in self._stderr[first])
        end = describe_end(self._status(first))
        raise WorkerError(
            f"{self._settings.names([first])} {end} {self._place[first]}; "
            f"the others were stopped. Its last lines:{lines or ' none'}"
        )

    def _status(self, rank: int) -> int:
        status = self._processes[rank].poll()
        assert status is not None
        return status

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self._join_readers(range(len(self._readers)))
        for process in self._processes:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def _join_readers(self, ranks: Iterable[int]) -> None:
        """Waits until the readers have seen the end of the pipes of ended workers."""
        for reader in [reader for rank in ranks for reader in self._readers[rank]]:
            reader.join(timeout=1.0)


def describe_end(status: int) -> str:
    """How a process ended, from subprocess's return code."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"

"""Starts the workers of this machine, follows them and ends them.

No process outlives the training. Workers and switch are killed when `run_workers` ends, also on
Ctrl-C, and end by themselves when the launcher dies (see worker.py and network.py). Then the kernel
removes their namespaces.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

from gradwire.train import network
from gradwire.train.errors import TrainError
from gradwire.train.records import RankRecord
from gradwire.train.settings import Run, TrainSettings

Event = dict[str, Any]
OnEvent = Callable[[int, Event], None]  # rank, event

_STDERR_LINES_KEPT = 30
_SECONDS_TO_LEAVE = 20.0  # for workers that have delivered everything; then they are killed


def run_workers(
    settings: TrainSettings, runs: list[Run], shaped: bool, on_event: OnEvent
) -> list[list[RankRecord]]:
    """Starts a process for each rank, which takes part in all runs. Returns each run's records, by
    rank. Call it in the main thread: a worker ends when the thread that started it ends.

    on_event gets the events that worker.py lists, and at the end {"event": "stderr", "line"}.
    Raises TrainError as soon as a worker fails. A worker that fails after it delivered everything
    costs no result; on_event gets a line on stderr that says so.
    """
    with contextlib.ExitStack() as cleanup:
        workers: list[_Worker] = []
        for rank in range(settings.ranks):
            workers.append(_Worker(rank, settings, runs, shaped))
            cleanup.callback(workers[rank].end)
        if shaped:
            assert settings.bandwidth is not None
            attach = cleanup.enter_context(network.shaped_network(settings.bandwidth))
            for worker in workers:
                attach(worker.rank, worker.process)
        for worker in workers:
            place = (network.address(0), network.INTERFACE) if shaped else ("127.0.0.1", None)
            worker.tell(settings, runs, worker.rank, *place)
        try:
            _follow(workers, on_event)
            deadline = time.monotonic() + _SECONDS_TO_LEAVE
            for worker in workers:
                worker.leave(deadline)
        finally:
            for worker in workers:
                for line in worker.written():
                    on_event(worker.rank, {"event": "stderr", "line": line})
        return [list(records) for records in zip(*(w.records for w in workers), strict=True)]


class _Worker:
    """A rank's process, the pipe to it, and the file that receives its stdout and stderr."""

    def __init__(self, rank: int, settings: TrainSettings, runs: list[Run], shaped: bool) -> None:
        self.rank = rank
        self.name = settings.names([rank])
        self.records: list[RankRecord] = []
        self._runs = [settings.title(run) for run in runs]
        self._place = "while it started"
        self._error: TrainError | None = None
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed by end
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-m", "gradwire.train.worker"]
        self.process = subprocess.Popen(
            network.in_own_namespace(command) if shaped else command,
            stdin=theirs.fileno(),
            stdout=self._output,
            stderr=self._output,
            env={
                # Errors come as exceptions; c10d would only log that a namespace has no DNS.
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                **os.environ,
                "OMP_NUM_THREADS": "1",
                # Threads that spin while they wait would take the CPU from the other workers.
                "OMP_WAIT_POLICY": "passive",
                "PYTHONUNBUFFERED": "1",
                "GLOO_SOCKET_IFNAME": network.INTERFACE if shaped else "lo",
            },
            process_group=0,  # Ctrl-C in a terminal reaches the launcher alone
        )
        theirs.close()

    @property
    def has_delivered(self) -> bool:
        return len(self.records) == len(self._runs)

    def tell(self, *values: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it ended, and so next_event will say
            self.pipe.send(values)

    def next_event(self) -> Event | None:
        """Waits for an event. Returns None when the process has ended."""
        try:
            event: Event = self.pipe.recv()
        except (EOFError, OSError):  # a killed worker may leave half an event
            return None
        match event["event"]:
            case "record":
                self.records.append(event["record"])
            case "error":
                self._error = event["error"]
            case "ready":
                self._place = "before the first step"
            case "begin":
                self._place = f"in the run of {event['run']}"
            case "step":
                self._place = f"in the run of {event['run']}, after step {event['step']}"
        return event

    def written(self) -> list[str]:
        """The lines that it wrote on stdout and stderr."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace").splitlines()

    def leave(self, deadline: float) -> None:
        """Waits for the end of a worker that has delivered everything. Adds a failure to its
        output."""
        late = ""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = f": it did not end within {_SECONDS_TO_LEAVE:g} s"
            self.process.kill()
        if status := self.process.wait():
            line = f"{describe_end(status)} after it had delivered everything{late}\n"
            self._output.write(line.encode())

    def failure(self) -> TrainError:
        """The error that says why the worker ended too early."""
        while self.next_event() is not None:
            pass
        status = self.process.wait()
        if status == 0:
            missing = self._runs[len(self.records)]
            return TrainError(f"{self.name} ended without a result for {missing}")
        if self._error is not None:
            return self._error
        lines = "".join(f"\n  | {line}" for line in self.written()[-_STDERR_LINES_KEPT:])
        return TrainError(
            f"{self.name} {describe_end(status)} {self._place}; "
            f"the others were stopped. Its last lines:{lines or ' none'}"
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self._output.close()


def _follow(workers: Sequence[_Worker], on_event: OnEvent) -> None:
    """Passes on the events until every worker has delivered everything."""
    while busy := [worker for worker in workers if not worker.has_delivered]:
        ready = wait([worker.pipe for worker in busy])
        for worker in [worker for worker in busy if worker.pipe in ready]:
            event = worker.next_event()
            if event is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(_SECONDS_TO_LEAVE)
                worker.process.kill()
                worker.process.wait()
                # If a worker was killed, others may have failed because of it in the same moment.
                failed = [w for w in workers if w.process.poll()] or [worker]
                raise min(failed, key=lambda w: w.process.returncode).failure()
            if event["event"] == "store":
                for other in workers[1:]:
                    other.tell(event["port"])
            on_event(worker.rank, event)


def describe_end(status: int) -> str:
    """How a process ended, from subprocess's return code."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"

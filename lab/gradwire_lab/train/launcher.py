"""Starts the workers of this machine, follows them and ends them.

No process outlives the training. Workers and switch are killed when `run_workers` ends, also on
Ctrl-C and SIGTERM, and end by themselves when the launcher dies (see worker.py and network.py).
Then the kernel removes their namespaces.
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
from dataclasses import asdict
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from gradwire.files import terminating_late
from gradwire.job_key import with_new_key
from gradwire_lab.train import messages, network
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.records import RankRecord
from gradwire_lab.train.settings import Run, TrainSettings

Event = dict[str, Any]
OnEvent = Callable[[int, Event], None]  # rank, event

_STDERR_LINES_KEPT = 30
_SECONDS_TO_LEAVE = 20.0  # for workers that have delivered everything; then they are killed


def run_workers(settings: TrainSettings, runs: list[Run], shaped: bool, on_event: OnEvent) -> None:
    """Starts a process for each rank, which takes part in all runs. Call it in the main thread: a
    worker ends when the thread that started it ends.

    on_event gets the events that worker.py lists, and at the end {"event": "stderr", "line"}.
    Raises TrainError as soon as a worker fails. A worker that fails after it delivered everything
    costs no result; on_event gets a line on stderr that says so.

    If a worker is killed that a run can do without (backup workers), on_event gets {"event":
    "lost", "run", "why"}, and that run goes on to its end. Then run_workers returns early, because
    the next run needs all workers; the lost worker has no record.
    """
    with terminating_late(), contextlib.ExitStack() as cleanup:
        # Nobody else may enter the folder, so no other user reaches the store of the ranks.
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-"))
        environment = {
            # Errors come as exceptions; c10d would only log that a namespace has no DNS.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **with_new_key(os.environ),
            "OMP_NUM_THREADS": "1",
            # Threads that spin while they wait would take the CPU from the other workers.
            "OMP_WAIT_POLICY": "passive",
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": network.INTERFACE if shaped else "lo",
        }
        workers: list[_Worker] = []
        for rank in range(settings.processes):
            # The first worker of a machine gets its namespace and link; the others share them.
            index = rank % settings.ranks_per_machine
            first = workers[rank - index].process if index else None
            workers.append(_Worker(rank, settings, runs, environment, shaped, first))
            cleanup.callback(workers[rank].end)
        if shaped:
            assert settings.bandwidth is not None
            shaped_links = network.shaped_network(settings.bandwidth, settings.latency / 1e3)
            attach = cleanup.enter_context(shaped_links)
            for worker in workers[:: settings.ranks_per_machine]:
                attach(worker.rank, worker.process)
        for worker in workers:
            worker.tell(
                settings=settings.to_json(),
                runs=[asdict(run) for run in runs],
                rank=worker.rank,
                store=f"{folder}/store",
                interface=network.INTERFACE if shaped else None,
            )
        try:
            _follow(settings, workers, on_event)
            deadline = time.monotonic() + _SECONDS_TO_LEAVE
            for worker in workers:
                worker.leave(deadline)
        finally:
            for worker in workers:
                for line in worker.written():
                    on_event(worker.rank, {"event": "stderr", "line": line})


class _Worker:
    """A rank's process, the pipe to it, and the file that receives its stdout and stderr."""

    def __init__(
        self,
        rank: int,
        settings: TrainSettings,
        runs: list[Run],
        environment: dict[str, str],
        shaped: bool,
        first: subprocess.Popen[bytes] | None,
    ) -> None:
        """first: the process whose namespace it shares if `shaped`; None: it has its own."""
        self.rank, self.name = rank, settings.names([rank])
        self.runs = list(runs)  # that it has yet to deliver; the first is under way
        self.steps = 0  # of the run under way, of which the launcher heard
        self._settings = settings
        self._place = "while it started"
        self._error: TrainError | None = None
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed by end
        self.pipe, theirs = Pipe()
        # -P: a file of the working folder, such as random.py, takes no module's place.
        command = [sys.executable, "-P", "-m", "gradwire_lab.train.worker"]
        with contextlib.ExitStack() as opened:
            inherited: tuple[int, ...] = ()
            if shaped and first is not None:
                inherited = (opened.enter_context(network.namespace_of(first)),)
                command = network.in_namespace(inherited[0], command)
            elif shaped:
                command = network.in_own_namespace(command)
            self.process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=self._output,
                stderr=self._output,
                pass_fds=inherited,
                env=environment,
                process_group=0,  # Ctrl-C in a terminal reaches the launcher alone
            )
        theirs.close()

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it ended, and so next_event will say
            messages.send(self.pipe, message)

    def next_event(self) -> Event | None:
        """Waits for an event. Returns None when the process has ended."""
        try:
            event: Event = messages.receive(self.pipe)
        except (EOFError, OSError):  # a killed worker may leave half an event
            return None
        match event["event"]:
            case "records":
                event["records"] = [RankRecord.read(record) for record in event["records"]]
                self.runs.pop(0)
                self.steps = 0
            case "error":
                self._error = TrainError(event["error"])
            case "ready":
                self._place = "before the first step"
            case "begin":
                self._place = f"in the run of {event['run']}"
            case "step":
                self._place = f"in the run of {event['run']}, after step {event['step']}"
                self.steps = event["step"]
        return event

    def how_it_ended(self) -> str:
        return f"{self.name} {describe_end(self.process.returncode)} {self._place}"

    def written(self) -> list[str]:
        self._output.seek(0)
        return self._output.read().decode(errors="replace").splitlines()

    def leave(self, deadline: float) -> None:
        """Waits for the end of a worker that has delivered everything. Adds a failure to its
        output."""
        late = (
            "" if self.has_ended(deadline) else f": it did not end within {_SECONDS_TO_LEAVE:g} s"
        )
        if status := self.process.returncode:
            line = f"{describe_end(status)} after it had delivered everything{late}\n"
            self._output.write(line.encode())

    def has_ended(self, deadline: float) -> bool:
        """Whether it ended by itself; at the deadline it is killed."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True

    def failure(self) -> TrainError:
        while self.next_event() is not None:
            pass
        if self.process.wait() == 0:
            missing = self._settings.title(self.runs[0])
            return TrainError(f"{self.name} ended without a result for {missing}")
        if self._error is not None:
            return self._error
        lines = "".join(f"\n  | {line}" for line in self.written()[-_STDERR_LINES_KEPT:])
        return TrainError(
            f"{self.how_it_ended()}; the others were stopped. Its last lines:{lines or ' none'}"
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self._output.close()


def _follow(settings: TrainSettings, workers: Sequence[_Worker], on_event: OnEvent) -> None:
    """Passes on the events until every worker has delivered everything, or, if one is lost, what
    the run gives without it."""
    lost: list[_Worker] = []
    left = 0  # runs that nobody delivers any more
    while busy := {w.pipe: w for w in workers if w not in lost and len(w.runs) > left}:
        for worker in [busy[pipe] for pipe in wait(list(busy)) if isinstance(pipe, Connection)]:
            if (event := worker.next_event()) is not None:
                on_event(worker.rank, event)
                continue
            worker.has_ended(time.monotonic() + _SECONDS_TO_LEAVE)
            if not _can_do_without(settings, worker, len(lost)):
                # If a worker was killed, others may have failed because of it in the same moment.
                failed = [w for w in workers if w.process.poll()] or [worker]
                raise min(failed, key=lambda w: w.process.returncode).failure()
            lost.append(worker)
            left = max(left, len(worker.runs) - 1)
            for other in workers:
                other.tell(lost=worker.rank)
            why = worker.how_it_ended()
            on_event(worker.rank, {"event": "lost", "run": worker.runs[0], "why": why})


def _can_do_without(settings: TrainSettings, worker: _Worker, lost: int) -> bool:
    """Rank 0 evaluates and keeps the store. A worker that was not killed has an error to tell."""
    return (
        worker.rank > 0
        and not settings.is_server(worker.rank)
        and worker.process.returncode < 0
        and worker.steps > 0
        and settings.can_lose_workers(worker.runs[0])
        and lost < settings.backup_workers
    )


def describe_end(status: int) -> str:
    """How a process ended, from subprocess's return code."""
    if status >= 0:
        return f"ended with exit status {status}"
    with contextlib.suppress(ValueError):  # real-time signals have no names
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    return f"was killed by signal {-status}"
